"""Live weights on a GPU: what changes is staged there, written by one kernel and proven by another.

While the engine is paused nothing crosses the bus but two words of digest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .. import kernels
from ..core.change import NEW_BITS, Region, RegionMoves, blocks, no_change, regions
from ..core.codecs import context
from ..core.codecs.base import BaseBits
from ..core.codecs.context.decoder import Ranked, Tiles, decode_ranks, join_ranks, make_sheet
from ..core.codecs.context.tiles import walked
from ..core.digest import StateDigest
from ..core.dtypes import Bits, lookup
from ..core.full import Source
from ..core.schema import Schema
from ..core.sparse import BlockRef, DeltaFile
from ..kernels.plan import Remember, units
from ..models import live_tensors
from .host import require


class DeviceMemory:
    """Contiguous tensors on one device, by the names of the run's schema."""

    def __init__(self, model: Any, schema: Schema, *, strict: bool = True) -> None:
        self.schema = schema
        tensors = live_tensors(model)
        self._names = require(tensors, schema, strict, may_be_wider=False)
        """The model's names with memory of their own, by the run's: an alias may be tied in the run and not here."""
        self._live = {name: tensors[name].detach() for names in self._names.values() for name in names}
        self.device = next(iter(self._live.values())).device
        self._regions = [region for block in blocks(schema) for region in block]
        """The regions that a publisher cuts the run into."""
        self._plans = Remember()
        self._proven = [tensor.name for tensor in schema.tensors]
        """What is proven in every pause."""
        self._first = [self._live[self._names[name][0]] for name in self._proven]
        self._digest_plan = kernels.digest_plan(self._first)
        self._number = {name: number for number, name in enumerate(self._proven)}
        self._tile_plans = Remember()

    def decode(self, file: DeltaFile) -> list[RegionMoves | _Counted]:
        """What takes no weights to read: positions and steps, or ranks within classes counted on the device."""

        def one(block: BlockRef) -> list[RegionMoves] | list[Tiles]:
            found = file.read(block)
            if not isinstance(found, context.TiledBlock):
                return found
            if not all(_is_walked_in_memory(region) for region, _ in block.regions):
                changes = found.decode(self._base([region for region, _ in block.regions]))
                return [RegionMoves(c.region, c.positions, c.new, NEW_BITS) for c in changes]
            return self._tiles(found)

        found = [item for items in file.each(one) for item in items]
        tiles = [item for item in found if isinstance(item, Tiles)]
        moves: list[RegionMoves | _Counted] = [item for item in found if isinstance(item, RegionMoves)]
        return [*moves, self._count(tiles)] if tiles else moves

    def _tiles(self, block: context.TiledBlock) -> list[Tiles]:
        result = []
        for number, (region, _) in enumerate(block.regions):
            span = block.span(number, slice(0, region.rows), slice(0, region.columns))
            tensor = self._number[region.tensor.name]
            result.append(Tiles(tensor, region.base, max(region.tensor.columns, 1), block, span))
        return result

    def _count(self, tiles: list[Tiles]) -> _Counted:
        """Count classes on the device, and decode ranks by that. No weight leaves the device."""
        plan, rules = kernels.read_sheet(make_sheet(tiles), self._first, self._tile_plans)
        sizes = kernels.class_counts(self._first, plan, rules).cpu().numpy()
        return _Counted(tiles, decode_ranks(tiles, sizes))

    def prepare(self, decoded: Sequence[RegionMoves | _Counted]) -> DevicePatch:
        most = max(map(len, self._names.values()), default=1)
        moves = [item for item in decoded if isinstance(item, RegionMoves)]
        counted = [item for item in decoded if isinstance(item, _Counted)]
        parts = []
        for number in range(most):
            parts += [self._part(moves, number), *(self._placed(item, number) for item in counted)]
        return DevicePatch(self.device, [part for part in parts if part is not None])

    def _placed(self, counted: _Counted, number: int) -> _Part | None:
        """The same as `_part` for ranks."""
        there = [len(self._names[name]) > number for name in self._proven]
        kept = [i for i, item in enumerate(counted.tiles) if there[item.tensor]]
        if not kept:
            return None
        tiles, found = [counted.tiles[i] for i in kept], [counted.found[i] for i in kept]
        # no tile lies in those that are not there
        tensors = [self._live[self._names[name][number if there[i] else 0]] for i, name in enumerate(self._proven)]
        plan, rules = kernels.read_sheet(make_sheet(tiles), tensors, self._tile_plans)
        sent = (_sent(array, self.device) for array in join_ranks(tiles, found).values())
        return _Part(self._proven, tensors, plan, kernels.place(tensors, plan, rules, *sent), number == 0)

    def _part(self, decoded: Sequence[RegionMoves], number: int) -> _Part | None:
        """What changes in the first tensor that this model has for each of the run's, or in the next ones."""
        found = {m.region: m for m in decoded if len(self._names[m.region.tensor.name]) > number}
        if not found:
            return None
        regions = [r for r in self._regions if len(self._names[r.tensor.name]) > number]
        if not found.keys() <= set(regions):
            # somebody cut them in another way
            regions = list(found)
        names = list(dict.fromkeys(region.tensor.name for region in regions))
        tensors = [self._live[self._names[name][number]] for name in names]
        # of all regions, whichever changed: so one plan serves every delta
        plan = self._plans.get((number, *regions), lambda: kernels.region_plan(names, tensors, regions))
        moves = [found.get(region) or _no_moves(region) for region in regions]
        changed = kernels.resolve(tensors, kernels.send_moves(plan, moves), plan=plan)
        return _Part(names, tensors, plan, changed, number == 0)

    def _base(self, wanted: Sequence[Region]) -> BaseBits:
        """Only what a block needs leaves the device; the rest of what is handed out is never touched."""
        whole: dict[str, Bits] = {}
        for region in wanted:
            tensor = region.tensor
            if tensor.name not in whole:
                # pages that nobody writes or reads take no memory
                whole[tensor.name] = (
                    torch.empty(tensor.units * tensor.unit_size, dtype=torch.uint8)
                    .numpy()
                    .view(lookup(tensor.dtype).unit)
                )
            rows = Region(tensor, region.row, region.rows, 0, tensor.columns) if not region.contiguous else region
            whole[tensor.name][rows.base : rows.base + rows.units] = self._read(rows)
        return whole.__getitem__

    def load(self, source: Source) -> None:
        for tensor in self.schema.tensors:
            for region in regions(tensor):
                # a copy: what is read from a file may not be writable, and torch wants it to be
                new = units(torch.from_numpy(source.region(region).view(np.uint8).copy()), tensor.unit_size)
                for name in self._names[tensor.name]:
                    units(self._live[name])[region.base : region.base + region.units].copy_(new)

    def digest(self) -> StateDigest:
        total = kernels.digest(self._proven, self._first, plan=self._digest_plan)
        for names in self._names.values():
            for other in names[1:]:
                if not torch.equal(units(self._live[names[0]]), units(self._live[other])):
                    # weights of which one of two tied ones was changed alone are no version
                    total += StateDigest(1, 1)
        return total

    def _read(self, region: Region) -> Bits:
        return kernels.read_region(units(self._live[self._names[region.tensor.name][0]]), region)


@dataclass(frozen=True, slots=True)
class _Part:
    """Tensors with memory of their own, and what changes in them."""

    names: list[str]
    """Their names in the run."""
    tensors: list[Tensor]
    plan: kernels.Plan
    changed: kernels.Changed
    first: bool
    """Tensors that the run ties and this model does not count once."""


@dataclass(frozen=True, slots=True)
class _Counted:
    """Changes as ranks within classes of the weights that are there now."""

    tiles: list[Tiles]
    found: list[Ranked]


class DevicePatch:
    """Changes on the device, ready to be written. Undoing puts back the bits that were really found there."""

    def __init__(self, device: torch.device, parts: Sequence[_Part]) -> None:
        self._device, self._parts = device, parts
        self._kept: list[kernels.Changed] = []
        """What each part that was written replaced."""
        self.moved = StateDigest()
        for part in parts:
            if part.first:
                self.moved += kernels.digest_change(part.names, part.tensors, part.changed, plan=part.plan)

    def write(self) -> None:
        for part in self._parts:
            self._kept.append(kernels.apply(part.tensors, part.changed, keep=True, plan=part.plan))
        self._wait()

    def undo(self) -> None:
        # a part whose write broke off may be written or not: the bits it was staged against are right for both
        found = [*self._kept, *(part.changed for part in self._parts[len(self._kept) :])]
        for part, kept in zip(self._parts, found, strict=True):
            kernels.apply(part.tensors, kept.swapped(), plan=part.plan)
        self._kept = []
        self._wait()

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def _no_moves(region: Region) -> RegionMoves:
    nothing = no_change(region)
    return RegionMoves(region, nothing.positions, nothing.new, NEW_BITS)


def _is_walked_in_memory(region: Region) -> bool:
    """Whether tiles of a region are rectangles of its tensor's memory: a narrow region is walked as one row."""
    return region.contiguous or walked(region.rows, region.columns) == (region.rows, region.columns)


def _sent(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    sent = torch.from_numpy(array)
    return sent.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else sent
