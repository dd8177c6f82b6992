"""Detectors that compare where the model is: only what changed leaves the device.

The trainer's stream is held by the comparison alone. What changed is copied to pinned memory on a stream of its own and
put into the core's terms by a thread of its own, while training goes on.

A detector holds the weights captured last in groups of tensors whose changes are found in the same way: `DeviceCopy`
beside the model, `PinnedCopy` in host memory, or what an optimizer noted (adamw.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from .. import kernels
from ..core.change import Block, Change, Region, blocks, no_change, undo_within
from ..core.digest import StateDigest
from ..core.dtypes import Bits, lookup
from ..core.errors import PublishFailed, SchemaMismatch
from ..core.full import Source
from ..core.parallel import Later, Workers
from ..core.schema import Schema
from ..kernels.block import DeviceBlock
from ..kernels.plan import Plan, flat, units
from ..models import Known, ModelView, tensors_of, torch_bits
from .detectors import WITHIN_A_STEP, Detector, Found, SnapshotLost, Take, TooLarge, merge

_CHANGE_BYTES = 8
"""What a changed unit of 16 bits takes on the host: position, old and new bits."""

_AT_ONCE = 1 << 27
"""Elements that are cast at a time where a digest needs them in the wire dtype."""


class TensorGroup(Protocol):
    """Tensors whose changes are found in the same way."""

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def copy(self) -> Callable[[Region], Tensor] | None:
        """As `read`, but on the device, as flat units that are not to be written; None where they are not there."""
        ...

    @property
    def shift(self) -> Callable[[Any], StateDigest] | None:
        """How what was found moves the state digest, computed on the device; None where that is not possible."""
        ...

    def load(self, live: Sequence[Tensor]) -> None:
        """Make these the weights captured last."""
        ...

    def find(self, live: Sequence[Tensor], most: int) -> Any:
        """Find the changes; raises kernels.TooMany past so many. Writes nothing."""
        ...

    def take(self, found: Any) -> None: ...

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

    def shift(self, found: kernels.Changed) -> StateDigest:
        return kernels.digest_change(self.names, self.held, found, plan=self._plan)

    def changes(self, found: kernels.Changed) -> list[Change]:
        return kernels.to_changes(self._plan, found, self._regions)

    def read(self, region: Region) -> Bits:
        return kernels.read_region(self._units(region.tensor.name), region)

    def copy(self, region: Region) -> Tensor:
        # each call into torch releases the interpreter's lock, for which encoders are waiting: once is enough
        found = self._views.get(region)
        if found is None:
            found = self._views[region] = self._units(region.tensor.name)[region.start : region.start + region.units]
        return found

    def _units(self, name: str) -> Tensor:
        return units(self.held[self._number[name]])


@dataclass(slots=True, eq=False)
class _Streamed:
    """Changes, kept on the device block by block until they are needed on the host."""

    blocks: list[tuple[Plan, kernels.Changed, Sequence[Region]]]
    changes: list[Change] | None = None
    taken: bool = False
    written: bool = False


class PinnedCopy:
    """Weights captured last in pinned host memory: they visit the device a block at a time to be compared there.

    The trainer waits for the visit and nothing else. What differs stays on the device until it is fetched and
    written to the host: by a thread, or before that by a caller that needs the captured weights.
    """

    copy = shift = None

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
            self._last = found
            found.taken = True

    def changes(self, found: _Streamed) -> list[Change]:
        with self._writing:
            if found.changes is None:
                parts = (kernels.to_changes(plan, new, regions) for plan, new, regions in found.blocks)
                found.changes = [change for part in parts for change in part]
                found.blocks = []
            if found.taken and not found.written:
                # again from the start where it was interrupted: a write can be repeated
                for change in found.changes:
                    change.write(self._bits[change.region.tensor.name])
                found.written = True
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
    return slice(region.start // per, (region.start + region.units) // per)


def compare_there(region: Region, held: Bits, live: Tensor, wire: torch.dtype) -> Change:
    """Every position where a region of a contiguous tensor, in the wire dtype, differs from what is held on the host.

    What is held visits the tensor's device, and only what differs leaves it.
    """
    signed = torch.from_numpy(held.view(f"i{held.itemsize}" if held.itemsize > 1 else np.uint8))
    old = [signed.view(wire).to(live.device)]
    plan = Plan(old, flat(old))
    found = kernels.detect(old, [live.detach().reshape(-1)[_elements(region)]], plan=plan)
    (change,) = kernels.to_changes(plan, found, [region])
    return change


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


def regions_of(plan: Sequence[Block], names: Sequence[str]) -> list[Region]:
    """The regions of some tensors, in the order of the plan."""
    own = set(names)
    return [region for block in plan for region in block if region.tensor.name in own]


class DeviceDetector(Detector):
    """Base of the detectors of this module. Its parts cover the schema's tensors, each of them once."""

    in_host_memory = compares_views = False

    def __init__(self) -> None:
        self._parts: list[TensorGroup] = []
        self._turn = threading.Lock()
        self._stream: Any = None
        self._known: Known | None = None
        """Of a view that was checked before: one with the same needs no check."""

    # ── what a kind of detector defines ──

    def _make_parts(self, view: ModelView) -> list[TensorGroup]:
        raise NotImplementedError

    # ── the interface ──

    def bind(self, source: Source) -> None:
        view = self._view(source)
        self._known = view.known
        self.schema: Schema = source.schema
        self.plan = blocks(source.schema)
        tensors = list(view.tensors.values())
        self.device: torch.device = tensors[0].device
        if self.device.type == "cuda":
            self._stream = torch.cuda.Stream(self.device)
            self._counter = torch.cuda.Stream(self.device)
            self._taken = torch.cuda.Event()
            self._copied = torch.cuda.Event()
        self._pool = Workers(1, "deltawire-capture")
        self._parts = self._make_parts(view)
        self._part_of = {name: part for part in self._parts for name in part.names}

    def suits(self, source: Source) -> bool:
        if not isinstance(source, ModelView):
            return False
        if self._is_known(source):
            return True
        fits = all(isinstance(t, Tensor) and t.device == self.device for t in source.tensors.values())
        self._known = source.known if fits else None
        return fits

    def digest_of(self, source: Source) -> StateDigest:
        view = self._view(source)
        total, names, tensors, size = StateDigest(), [], [], 0
        for name, tensor in view.tensors.items():
            names.append(name)
            tensors.append(tensor.detach().contiguous().to(view.wire_dtype(name)))
            size += tensor.numel()
            if size >= _AT_ONCE:
                total += kernels.digest(names, tensors)
                names, tensors, size = [], [], 0
        return total + kernels.digest(names, tensors) if tensors else total

    def load(self, source: Source) -> StateDigest:
        view = self._view(source)
        # the thread may still write what was captured before: an interrupted publish leaves it at work
        self._pool.submit(lambda: None).result()
        self._after_copies()
        for part in self._parts:
            part.load(self._live(view.tensors, part))
        self._mark()
        return self.digest_of(source)

    def detect(self, source: Source, budget: int) -> Take:
        return self._detect(self._view(source).tensors, budget // _CHANGE_BYTES)

    def _detect(self, tensors: Mapping[str, Tensor], most: int) -> Take:
        found: list[tuple[TensorGroup, Any]] = []
        try:
            for part in self._parts:
                found.append((part, part.find(self._live(tensors, part), most)))
        except kernels.TooMany:
            raise TooLarge from None
        ready = None
        if self._stream is not None:
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(self.device))

        def take() -> Later[Found]:
            self._after_copies()
            for part, what in found:
                part.take(what)
            self._mark()
            # last: the thread that fetches would take turns with this one
            return self._pool.submit(partial(self._fetch, found, ready))

        return take

    def region(self, region: Region) -> Bits:
        with self._beside_training(self._taken if self._stream is not None else None):
            return self._part_of[region.tensor.name].read(region)

    def block(self, regions: Sequence[Region]) -> DeviceBlock | None:
        if not self.counts:
            return None

        def copy(region: Region) -> Tensor:
            found = self._part_of[region.tensor.name].copy
            assert found is not None, "no weights here are in host memory"
            return found(region)

        return DeviceBlock(regions, copy, self._copying, self._counting)

    @property
    def counts(self) -> bool:
        return self._counts_on_device() and all(part.copy is not None for part in self._parts)

    def _counts_on_device(self) -> bool:
        # in host memory the codec's own kernels are faster
        return self.device.type != "cpu"

    def later(self, work: Callable[[], Found]) -> Later[Found]:
        # one thread, in order: what is merged was fetched by the time its turn comes
        return self._pool.submit(work)

    def close(self) -> None:
        if not self._pool.closed:
            self._pool.submit(lambda: None).result()
            self._pool.close()

    # ── inside ──

    def _view(self, source: Source) -> ModelView:
        if isinstance(source, ModelView) and (
            self._is_known(source) or all(isinstance(t, Tensor) for t in source.tensors.values())
        ):
            return source
        raise SchemaMismatch(f"{type(self).__name__} compares torch models; this is a {type(source).__name__}")

    def _is_known(self, view: ModelView) -> bool:
        return view.known is not None and view.known is self._known

    def _live(self, tensors: Mapping[str, Tensor], part: TensorGroup) -> list[Tensor]:
        live = [tensors[name] for name in part.names]
        return live if all(map(Tensor.is_contiguous, live)) else [tensor.detach().contiguous() for tensor in live]

    def _fetch(self, found: list[tuple[TensorGroup, Any]], ready: Any) -> Found:
        with self._beside_training(ready):
            changes = {change.region: change for part, what in found for change in part.changes(what)}
            blocks = [[changes.get(region) or no_change(region) for region in block] for block in self.plan]
            # where that is quicker than on the host
            shifts = [part.shift(what) for part, what in found if part.shift and self._counts_on_device()]
        return Found(blocks, sum(shifts, StateDigest())) if len(shifts) == len(found) else Found.of(blocks)

    @contextmanager
    def _counting(self) -> Iterator[None]:
        """On the stream where old weights are counted: what is copied from live ones must not wait for that.

        One encoder at a time: each call into torch releases the interpreter's lock, and with many threads after it, the
        trainer's among them, passing it on takes longer than the work.
        """
        if self._stream is None:
            yield
            return
        with self._turn, torch.cuda.device(self.device), torch.cuda.stream(self._counter):
            self._counter.wait_event(self._copied)
            yield

    @contextmanager
    def _copying(self) -> Iterator[None]:
        """Copy beside training, without waiting. What counts, or writes the next capture, comes after the copy."""
        if self._stream is None:
            yield
            return
        with self._beside_training(self._taken):
            yield
            self._copied.record(self._stream)

    def _after_copies(self) -> None:
        """Wait for copies of the weights captured last: what is queued from now on may write to them."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_event(self._copied)

    @contextmanager
    def _beside_training(self, event: Any) -> Iterator[None]:
        """On the stream beside training, after an event."""
        if self._stream is None:
            yield
            return
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            if event is not None:
                self._stream.wait_event(event)
            yield

    def _mark(self) -> None:
        """Order reads from now on after all work that was queued so far."""
        if self._stream is not None:
            self._taken.record(torch.cuda.current_stream(self.device))


class SnapshotDetector(DeviceDetector):
    """A copy of the model in the wire dtype. Works for every optimizer and whatever else writes to the weights.

    memory   "device": beside the model; 2 bytes per parameter (in bf16).
             "host": in pinned host memory, for models whose copy does not fit; it is streamed through the device by
             blocks of 32 MB, so `publish` takes as long as the bus needs for the whole model.
    """

    compares_views = True

    def __init__(self, memory: str = "device") -> None:
        super().__init__()
        if memory not in ("device", "host"):
            raise ValueError(f"a snapshot can be in 'device' or 'host' memory, not in {memory!r}")
        self._memory = memory

    def _make_parts(self, view: ModelView) -> list[TensorGroup]:
        return snapshot_parts(view, list(view.tensors), self.plan, self.device, self._memory)


class FusedDetector(DeviceDetector):
    """No copy of its own: the bf16 weights that mixed-precision training keeps beside its fp32 masters are the copy.

    `copies` is the bf16 model, or its tensors by name; `publish` takes the masters, under the same names. Detecting is
    the cast: it writes the copies and says what that changed. So the trainer calls `cast(masters)` after an optimizer
    step where it had cast by itself, and `publish(masters)` whenever it likes.
    """

    def __init__(self, copies: Any) -> None:
        super().__init__()
        self._copies = copies
        self._since: Later[Found] | None = None
        """What was cast since the last capture, and is in the copies already."""
        self._torn = False
        """Whether a cast was interrupted: what it changed in the copies is perhaps not in `_since`."""
        self._casting = threading.Lock()
        self._within = threading.Lock()
        """Held by a cast, of this thread:"""
        self._caster = 0

    def _make_parts(self, view: ModelView) -> list[TensorGroup]:
        copies = {name: tensor.detach() for name, tensor in tensors_of(self._copies).items()}
        held = {}
        for name in view.tensors:
            copy = copies.get(name)
            if copy is None or copy.shape != view.tensors[name].shape or copy.dtype != view.wire_dtype(name):
                found = "is missing" if copy is None else f"is {copy.dtype} {list(copy.shape)}"
                raise SchemaMismatch(
                    f"the copy of {name!r} {found}; it must be {view.wire_dtype(name)} {list(view.tensors[name].shape)}"
                )
            held[name] = copy
        kinds: dict[bool, list[str]] = {}
        for name, copy in held.items():
            kinds.setdefault(copy.dtype == view.tensors[name].dtype, []).append(name)
        return [DeviceCopy({n: held[n] for n in members}, regions_of(self.plan, members)) for members in kinds.values()]

    def cast(self, masters: Any) -> None:
        """Write the masters' rounding to the copies, as training wants after every step."""
        tensors = tensors_of(masters)
        if not self._parts:
            # nothing was published yet, so there is nothing to keep account of
            for name, copy in tensors_of(self._copies).items():
                copy.detach().copy_(tensors[name].detach())
            return
        with self._within:
            self._caster = threading.get_ident()
            take = self._detect(tensors, 1 << 62)
            with self._casting:
                torn, self._torn = self._torn, True
                self._since = self._joined(self._since, take())
                self._torn = torn

    def _require_rest(self) -> None:
        """PublishFailed in a signal handler that has interrupted a cast."""
        if self._within.locked() and self._caster == threading.get_ident():
            raise PublishFailed(WITHIN_A_STEP)

    def load(self, source: Source) -> StateDigest:
        self._require_rest()
        digest = super().load(source)
        with self._casting:
            self._since, self._torn = None, False
        return digest

    def detect(self, source: Source, budget: int) -> Take:
        self._require_rest()
        detected = super().detect(source, budget)
        with self._casting:
            since = self._cast_since()

        def take() -> Later[Found]:
            found = self._joined(since, detected())
            self._since = None
            return found

        return take

    def _cast_since(self) -> Later[Found] | None:
        if self._torn:
            raise SnapshotLost("a cast was interrupted")
        return self._since

    def region(self, region: Region) -> Bits:
        with self._casting:
            bits, since = super().region(region), self._cast_since()
        if since is not None:
            for block in since.result().blocks:
                for change in block:
                    undo_within(region, bits, change)
        return bits

    def block(self, regions: Sequence[Region]) -> DeviceBlock | None:
        with self._casting:
            found, since = super().block(regions), self._cast_since()
        if found is not None and since is not None:
            cast = {change.region: change for block in since.result().blocks for change in block}
            found.undo([cast[region] for region in regions])
        return found

    def _joined(self, first: Later[Found] | None, found: Later[Found]) -> Later[Found]:
        return found if first is None else self.later(lambda: merge(first.result(), found.result()))
