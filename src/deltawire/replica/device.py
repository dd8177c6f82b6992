"""Live weights on a GPU: what changes is staged there, written by one kernel and proven by another.

While the engine is paused nothing crosses the bus but two words of digest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import kernels
from ..core.change import Change, Region, regions
from ..core.codecs.base import BaseBits
from ..core.digest import StateDigest
from ..core.dtypes import Bits, lookup
from ..core.full import Source
from ..core.schema import Schema, TensorSpec
from ..kernels.plan import units
from ..models import tensors_of
from .target import Target, require


class DeviceTarget(Target):
    """Contiguous tensors on one device, by the names of the run's schema."""

    def __init__(self, model: Any, schema: Schema, *, strict: bool = True) -> None:
        self.model = model
        self.schema = schema
        tensors = tensors_of(model)
        require(model, tensors, schema, strict)
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

    def base(self, wanted: Sequence[Region]) -> BaseBits:
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

    def stage(self, changes: Sequence[Change]) -> DevicePatch:
        return DevicePatch(self, changes)

    def write(self, change: Change) -> None:
        self.stage([change]).write()

    def undo(self, change: Change) -> None:
        self.stage([Change(change.region, change.positions, change.new, change.old)]).write()

    def load(self, source: Source) -> None:
        for tensor in self.schema.tensors:
            for region in regions(tensor):
                # a copy: what is read from a file may not be writable, and torch wants it to be
                new = units(torch.from_numpy(source.region(region).view(np.uint8).copy()), tensor.unit_size)
                for name in self._names[tensor.name]:
                    units(self._live[name])[region.base : region.base + region.units].copy_(new)

    def digest(self) -> StateDigest:
        first = [self._live[self._names[tensor.name][0]] for tensor in self.schema.tensors]
        total = kernels.digest([tensor.name for tensor in self.schema.tensors], first)
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


class DevicePatch:
    """Changes on the device, ready to be written. Undoing puts back the bits that were really found there."""

    def __init__(self, target: DeviceTarget, changes: Sequence[Change]) -> None:
        spread = [
            Change(_renamed(change.region, name), change.positions, change.old, change.new)
            for change in changes
            for name in target._names[change.region.tensor.name]
        ]
        touched = list(dict.fromkeys(change.region.tensor.name for change in spread))
        self._tensors = [target._live[name] for name in touched]
        self._plan = kernels.region_plan(touched, self._tensors, [change.region for change in spread])
        self._staged = kernels.from_changes(self._plan, spread) if spread else None
        # looked up now, not in the pause
        self._plan.launches(self._tensors)
        self._device = target.device
        self._kept: kernels.Changed | None = None
        self._wait()

    def write(self) -> None:
        if self._staged is not None:
            self._kept = kernels.apply(self._tensors, self._staged, keep=True, plan=self._plan)
            self._wait()

    def undo(self) -> None:
        if self._kept is not None:
            kernels.apply(self._tensors, self._kept.swapped(), plan=self._plan)
            self._kept = None
            self._wait()

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def _renamed(region: Region, name: str) -> Region:
    if region.tensor.name == name:
        return region
    spec = TensorSpec(name, region.tensor.dtype, region.tensor.shape)
    return replace(region, tensor=spec)
