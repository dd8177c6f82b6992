"""Live weights on a GPU: what changes is staged there, written by one kernel and proven by another.

While the engine is paused nothing crosses the bus but two words of digest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import kernels
from ..core.change import Change, Region, blocks, no_change, regions
from ..core.codecs.base import BaseBits
from ..core.digest import StateDigest
from ..core.dtypes import Bits, lookup
from ..core.full import Source
from ..core.moves import RegionMoves
from ..core.schema import Schema, TensorSpec
from ..core.sparse import BlockRef, DeltaFile
from ..kernels.plan import Remember, units
from ..models import live_tensors
from .target import Target, require


class DeviceTarget(Target):
    """Contiguous tensors on one device, by the names of the run's schema."""

    def __init__(self, model: Any, schema: Schema, *, strict: bool = True) -> None:
        self.model = model
        self.schema = schema
        tensors = live_tensors(model)
        require(tensors, schema, strict, may_be_wider=False)
        seen: dict[tuple[int, str], str] = {}
        self._names: dict[str, list[str]] = {}
        # the run's name → the model's names with memory of their own: an alias may be tied in the run and not here
        self._live: dict[str, Tensor] = {}
        for tensor in schema.tensors:
            names = [tensor.name, *(alias for alias, name in schema.ties.items() if name == tensor.name)]
            for name in (n for n in names if n in tensors):
                own = seen.setdefault((tensors[name].data_ptr(), tensor.name), name)
                self._live.setdefault(own, tensors[name].detach())
                if own not in self._names.setdefault(tensor.name, []):
                    self._names[tensor.name].append(own)
        self.device = next(iter(self._live.values())).device
        self._regions = [region for block in blocks(schema) for region in block]
        # those that a publisher cuts the run into
        self._plans = Remember()
        # what is proven in every pause
        self._proven = [tensor.name for tensor in schema.tensors]
        self._first = [self._live[self._names[name][0]] for name in self._proven]
        self._digest_plan = kernels.digest_plan(self._first)

    @property
    def in_place(self) -> bool:
        return True

    def bits(self, name: str) -> Bits:
        whole = TensorSpec(name, self._spec(name).dtype, self._spec(name).shape)
        return self._read(Region(whole, 0, whole.rows, 0, whole.columns))

    def region(self, region: Region) -> Bits:
        if region.contiguous:
            return self._read(region)
        return region.cut(self.bits(region.tensor.name))

    def decode(self, file: DeltaFile) -> list[RegionMoves]:
        """Positions and steps, which take no weights to read; where they do, those of a block come to the host."""

        def one(block: BlockRef) -> list[RegionMoves]:
            moves = file.moves(block)
            if moves is None:
                changes = file.decode(block, self._base([region for region, _ in block.regions]))
                return [RegionMoves(c.region, c.positions, c.new, kernels.NEW_BITS) for c in changes]
            return moves

        return [moves for found in file.each(one) for moves in found]

    def stage(self, decoded: Sequence[RegionMoves]) -> DevicePatch:
        most = max(map(len, self._names.values()), default=1)
        parts = (self._part(decoded, number) for number in range(most))
        return DevicePatch(self.device, [part for part in parts if part is not None])

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
        return _Part(names, tensors, plan, kernels.resolve(tensors, kernels.send_moves(plan, moves), plan=plan))

    def write(self, change: Change) -> None:
        self.stage([RegionMoves(change.region, change.positions, change.new, kernels.NEW_BITS)]).write()

    def undo(self, change: Change) -> None:
        self.stage([RegionMoves(change.region, change.positions, change.old, kernels.NEW_BITS)]).write()

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

    def _spec(self, name: str) -> TensorSpec:
        return self.schema.by_name()[name]

    def _read(self, region: Region) -> Bits:
        part = units(self._live[self._names[region.tensor.name][0]])[region.base : region.base + region.units]
        if part.device.type == "cuda":
            stream = torch.cuda.current_stream(part.device)
            part = torch.empty(part.shape, dtype=part.dtype, pin_memory=True).copy_(part, non_blocking=True)
            stream.synchronize()
        return part.numpy().view(lookup(region.tensor.dtype).unit)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class _Part:
    """Tensors with memory of their own, and what changes in them."""

    names: list[str]
    # in the run
    tensors: list[Tensor]
    plan: kernels.Plan
    changed: kernels.Changed


class DevicePatch:
    """Changes on the device, ready to be written. Undoing puts back the bits that were really found there."""

    def __init__(self, device: torch.device, parts: Sequence[_Part]) -> None:
        self._device, self._parts = device, parts
        self._kept: list[kernels.Changed] = []
        # what each part that was written replaced
        # tensors that the run ties and this model does not count once: the first part has all of the run's
        first = parts[0] if parts else None
        self.moved = (
            kernels.digest_change(first.names, first.tensors, first.changed, plan=first.plan)
            if first is not None
            else StateDigest()
        )

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
    return RegionMoves(region, nothing.positions, nothing.new, kernels.NEW_BITS)
