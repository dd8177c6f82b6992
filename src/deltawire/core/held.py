"""The part of a model that a reader holds, and the parts of an object that it needs for that."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .change import Region
from .schema import Schema, TensorSpec

MOST = 0.85
"""Share of an object, or of a model, from which all of it is fetched."""


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes of an object that can be fetched alone: a block of a delta, some rows of an anchor."""

    start: int
    nbytes: int
    hash: str
    """blake3 of these bytes, 16 bytes, hex."""

    @property
    def end(self) -> int:
        return self.start + self.nbytes


class Held:
    """The regions of a model that a reader holds."""

    def __init__(self, regions: Iterable[Region]) -> None:
        self._by_tensor: dict[str, dict[Region, None]] = {}
        for region in regions:
            self._by_tensor.setdefault(region.tensor.name, {})[region] = None

    def rows(self, tensor: TensorSpec) -> list[tuple[int, int]]:
        """First and last row + 1 of the rows of a tensor of which something is held, ascending and apart."""
        regions = self._by_tensor.get(tensor.name, ())
        return _joined(sorted((region.row, region.row + region.rows) for region in regions), 0)

    def common(self, region: Region) -> list[Region]:
        """The parts of a region that are held."""
        found = (region.meet(mine) for mine in self._by_tensor.get(region.tensor.name, ()))
        return [part for part in found if part is not None]

    def meets(self, region: Region) -> bool:
        """Whether any of a region is held."""
        return any(region.meet(mine) for mine in self._by_tensor.get(region.tensor.name, ()))


def part_of(schema: Schema, regions: Iterable[Region]) -> Held | None:
    """Return what a reader holds of a model; None if that is most of it, and objects are better fetched whole."""
    apart = dict.fromkeys(regions)
    return Held(apart) if sum(region.nbytes for region in apart) <= MOST * schema.nbytes else None


def ranges(parts: Iterable[Part], gap: int, most: int) -> list[tuple[int, int]]:
    """First and last byte + 1 of the ranges that parts are in, ascending. Parts with a smaller gap between them are one
    range, as are those with a larger one where there would be more than `most` ranges."""
    ordered = sorted((part.start, part.end) for part in parts)
    while len(found := _joined(ordered, gap)) > most:
        gap = 2 * gap + 1
    return found


def _joined(ordered: Sequence[tuple[int, int]], gap: int) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for start, end in ordered:
        if found and start - found[-1][1] <= gap:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found
