"""How the weights captured last are kept beside live ones on a device, and what differs is found."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from .. import kernels
from ..core.change import Block, Change, Region
from ..core.digest import StateDigest
from ..core.dtypes import Bits, lookup
from ..kernels.plan import Plan, flat, units
from ..models import ModelView, torch_bits


class TensorGroup(Protocol):
    """Tensors whose changes are found in the same way."""

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def copy(self) -> Callable[[Region], Tensor] | None:
        """As `read`, but on the device, as flat units that are not to be written; None where they are not there."""
        ...

    @property
    def moved(self) -> Callable[[Any], StateDigest] | None:
        """How what was found moves the state digest, computed on the device; None where that is not possible."""
        ...

    def load(self, live: Sequence[Tensor]) -> None:
        """Make these the weights captured last."""
        ...

    def find(self, live: Sequence[Tensor], most: int) -> Any:
        """What differs now; kernels.TooMany past so many. Changes nothing."""
        ...

    def take(self, found: Any) -> None: ...

    def give_back(self, found: Any) -> None: ...

    def changes(self, found: Any) -> list[Change]:
        """On the host. Called on another thread and stream than `find`, and perhaps after `take`."""
        ...

    def read(self, region: Region) -> Bits:
        """Of the weights captured last, on the host."""
        ...


class DeviceCopy:
    """Weights captured last in tensors on the live ones' device, in the wire dtype."""

    def __init__(self, held: Mapping[str, Tensor], regions: Sequence[Region]) -> None:
        self.names = list(held)
        self.held = list(held.values())
        self._number = {name: number for number, name in enumerate(self.names)}
        self._regions = regions
        self._plan = kernels.region_plan(self.names, self.held, regions)
        self._views: dict[Region, Tensor] = {}
        """Regions of `held` that were asked for."""

    def load(self, live: Sequence[Tensor]) -> None:
        for held, tensor in zip(self.held, live, strict=True):
            held.copy_(tensor.detach())

    def find(self, live: Sequence[Tensor], most: int) -> kernels.Changed:
        return kernels.detect(self.held, live, plan=self._plan, most=most)

    def take(self, found: kernels.Changed) -> None:
        kernels.apply(self.held, found, plan=self._plan)

    def give_back(self, found: kernels.Changed) -> None:
        kernels.apply(self.held, found.swapped(), plan=self._plan)

    def moved(self, found: kernels.Changed) -> StateDigest:
        return kernels.digest_change(self.names, self.held, found, plan=self._plan)

    def changes(self, found: kernels.Changed) -> list[Change]:
        return kernels.to_changes(self._plan, found, self._regions)

    def read(self, region: Region) -> Bits:
        return kernels.read_region(self._units(region.tensor.name), region)

    def copy(self, region: Region) -> Tensor:
        # each call into torch gives up the interpreter's lock, for which encoders are waiting: once is enough
        found = self._views.get(region)
        if found is None:
            found = self._views[region] = self._units(region.tensor.name)[region.base : region.base + region.units]
        return found

    def _units(self, name: str) -> Tensor:
        return units(self.held[self._number[name]])


@dataclass(slots=True, eq=False)
class _Streamed:
    """What differs, block by block on the device until it is needed on the host."""

    blocks: list[tuple[Plan, kernels.Changed, Sequence[Region]]]
    changes: list[Change] | None = None
    taken: bool = False


class PinnedCopy:
    """Weights captured last in pinned host memory: they visit the device a block at a time to be compared there.

    The trainer waits for the visit and nothing else. What differs stays on the device until the thread that fetches it,
    or whoever needs the captured weights before that, brings it to the host and writes it there.
    """

    copy = moved = None

    def __init__(self, specs: Mapping[str, tuple[int, torch.dtype]], regions: Sequence[Sequence[Region]], device: Any):
        self.names = list(specs)
        pin = device.type == "cuda"
        self.held = {n: torch.empty(size, dtype=dtype, pin_memory=pin) for n, (size, dtype) in specs.items()}
        self._bits = {name: torch_bits(tensor) for name, tensor in self.held.items()}
        self._blocks = regions
        self._device = device
        # two, so that one is filled while the other is compared
        most = max((sum(r.units * r.tensor.unit_size for r in block) for block in regions), default=0)
        self._buffers = [torch.empty(most + 16 * 1024, dtype=torch.uint8, device=device) for _ in range(2)]
        self._stream = torch.cuda.Stream(device) if pin else None
        self._plans: dict[int, tuple[list[Tensor], Plan]] = {}
        self._last: _Streamed | None = None
        """Taken, and perhaps not yet written to `held`."""
        self._writing = threading.Lock()

    def load(self, live: Sequence[Tensor]) -> None:
        with self._writing:
            self._last = None
            for held, tensor in zip(self.held.values(), live, strict=True):
                held.copy_(tensor.detach().reshape(-1))

    def find(self, live: Sequence[Tensor], most: int) -> _Streamed:
        self._settle()
        flat_live = {name: tensor.detach().reshape(-1) for name, tensor in zip(self.names, live, strict=True)}
        found = _Streamed([])
        pending = self._upload(0)
        for number, regions in enumerate(self._blocks):
            old, plan = pending()
            if number + 1 < len(self._blocks):
                pending = self._upload(number + 1)
            new = [flat_live[region.tensor.name][_elements(region)] for region in regions]
            changed = kernels.detect(old, new, plan=plan, most=most)
            most -= changed.count
            found.blocks.append((plan, changed, regions))
        return found

    def _upload(self, number: int) -> Callable[[], tuple[list[Tensor], Plan]]:
        """Start to copy a block to the device; the answer waits for it."""
        views, plan = self._room(number)
        if self._stream is not None:
            # what was compared in this buffer before must be done with
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            for view, region in zip(views, self._blocks[number], strict=True):
                view.copy_(self.held[region.tensor.name][_elements(region)], non_blocking=True)

        def arrived() -> tuple[list[Tensor], Plan]:
            if self._stream is not None:
                torch.cuda.current_stream(self._device).wait_stream(self._stream)
            return views, plan

        return arrived

    def _room(self, number: int) -> tuple[list[Tensor], Plan]:
        """A block's place in one of the buffers."""
        if number not in self._plans:
            views, at = [], 0
            for region in self._blocks[number]:
                size = region.units * region.tensor.unit_size
                views.append(self._buffers[number % 2][at : at + size].view(self.held[region.tensor.name].dtype))
                at += -(-size // 16) * 16
            self._plans[number] = views, Plan(views, flat(views))
        return self._plans[number]

    def take(self, found: _Streamed) -> None:
        with self._writing:
            found.taken, self._last = True, found

    def give_back(self, found: _Streamed) -> None:
        with self._writing:
            if found.taken and found.changes is not None:
                for change in found.changes:
                    change.undo(self._bits[change.region.tensor.name])
            found.taken, self._last = False, None

    def changes(self, found: _Streamed) -> list[Change]:
        with self._writing:
            if found.changes is None:
                blocks, found.blocks = found.blocks, []
                found.changes = [c for plan, new, regions in blocks for c in kernels.to_changes(plan, new, regions)]
                if found.taken:
                    for change in found.changes:
                        change.write(self._bits[change.region.tensor.name])
            return found.changes

    def read(self, region: Region) -> Bits:
        self._settle()
        return region.cut(self._bits[region.tensor.name])

    def _settle(self) -> None:
        """Let `held` be what was captured last."""
        last = self._last
        if last is not None:
            self.changes(last)


def _elements(region: Region) -> slice:
    """Where a region in one piece lies in its flat tensor."""
    per = lookup(region.tensor.dtype).units_per_element
    return slice(region.base // per, (region.base + region.units) // per)


def snapshot_parts(
    view: ModelView, names: Sequence[str], plan: Sequence[Block], device: torch.device, memory: str
) -> list[TensorGroup]:
    """Tensors that travel as they are, those that are cast from fp32 to bf16, and others apart from each other."""
    wire = {name: view.wire_dtype(name) for name in names}
    kinds: dict[tuple[Any, Any] | None, list[str]] = {}
    for name in names:
        pair = (view.tensors[name].dtype, wire[name])
        kinds.setdefault(None if pair[0] == pair[1] else pair, []).append(name)
    parts: list[TensorGroup] = []
    for members in kinds.values():
        if memory == "host":
            own = set(members)
            regions = [[r for r in block if r.tensor.name in own] for block in plan]
            specs = {name: (view.tensors[name].numel(), wire[name]) for name in members}
            parts.append(PinnedCopy(specs, [block for block in regions if block], device))
        else:
            held = {n: torch.empty(view.tensors[n].shape, dtype=wire[n], device=device) for n in members}
            parts.append(DeviceCopy(held, regions_of(plan, members)))
    return parts


def undo_within(region: Region, bits: Bits, change: Change) -> None:
    """Put the old bits of a change back where it falls into a region, both in one piece."""
    if change.count and change.region.tensor == region.tensor:
        at = change.positions.astype(np.int64) + (change.region.base - region.base)
        here = slice(*np.searchsorted(at, (0, region.units)).tolist())
        bits[at[here]] = change.old[here]


def regions_of(plan: Sequence[Block], names: Sequence[str]) -> list[Region]:
    """The regions of some tensors, in the order of the plan."""
    own = set(names)
    return [region for block in plan for region in block if region.tensor.name in own]
