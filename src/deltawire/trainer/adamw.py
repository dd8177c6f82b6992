"""AdamW that notes what its own steps change in bf16, so that publishing needs no copy of the model and no comparison.

optimizer = DeltaAdamW(model.parameters(), lr=1e-6)
publisher = Publisher("s3://runs/wordle", detector=optimizer)
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import kernels
from ..core.change import Change, Region
from ..core.dtypes import Bits
from ..core.errors import PublishFailed, SchemaMismatch
from ..kernels import adamw as ops
from ..kernels import torch_ops
from ..kernels.host import on
from ..kernels.plan import TILE, units
from ..models import ModelView
from .detectors import WITHIN_A_STEP, Detector, SnapshotLost
from .device import DeviceDetector, TensorGroup, regions_of, snapshot_parts

_REFUSED = ("foreach", "capturable", "differentiable")


def local_tensor(tensor: Tensor) -> Tensor:
    """A tensor, or the local part of a DTensor: the memory itself, where its writes are counted."""
    if not hasattr(tensor, "to_local"):
        return tensor
    with torch.no_grad():
        return tensor.to_local()  # type: ignore[no-any-return]


class DeltaAdamW(torch.optim.AdamW):
    """A drop-in for `torch.optim.AdamW(fused=True)`: the same update within fp32 rounding, the same state.

    Parameters are all fp32 or all bf16, on one device; DTensors (FSDP2, tensor parallelism) count as their local part.
    Once a publisher has it as its detector, every step also notes the bf16 bits from before of what it changes for the
    first time since the last publish: a bit per parameter, and 8 bytes per parameter that moved. There is no amsgrad;
    gradient scaling (GradScaler), clipping, parameter groups, `maximize` and learning rates that change work as they
    do in torch.

    What anything but `step` writes to the parameters goes unnoticed only if it hides from autograd (`parameter.data`);
    otherwise the next publish compares with the newest version in the bucket.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        fused: bool | None = True,
        **others: Any,
    ) -> None:
        wrong = [name for name, value in {"amsgrad": amsgrad, **others}.items() if value]
        if wrong or fused is False:
            raise ValueError(
                f"DeltaAdamW has one way to step, fused and without {', '.join(['amsgrad', *_REFUSED])}; "
                f"use torch.optim.AdamW and the publisher's default detector for {', '.join(wrong) or 'fused=False'}"
            )
        unknown = set(others) - set(_REFUSED)
        if unknown:
            raise TypeError(f"DeltaAdamW has no option {sorted(unknown)[0]!r}")
        super().__init__(params, lr, betas, eps, weight_decay, maximize=maximize, fused=True)
        self._steps = threading.RLock()
        """Held by a step, and by a reader that needs parameters and log to belong together."""
        self._within = threading.Lock()
        """Held by a step alone."""
        self._log: ops.ChangeLog | None = None
        self._elements: ops.Elements | None = None
        self._kept: _Kept | None = None
        self._versions: list[int] = []
        """Autograd's count of writes to each parameter after the last step."""
        self._written: Any = None
        """CUDA event: the last write of a step."""

    # ── as an optimizer ──────────────────────────────────────────────────────────────────────────────────────────────

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self._steps, self._within:
            strayed = self._log is not None and self._strayed()
            # unknown until the step has ended: torch's own fused step does not count as a write
            self._versions = []
            if kernels.operations(self._cut().device).__name__.endswith("triton_ops"):
                self._step_by_kernel(self._cut())
            else:
                self._step_by_torch(self._cut())
            if self._log is not None and not strayed:
                self._remember()
        return loss

    def _step_by_torch(self, elements: ops.Elements) -> None:
        """Torch's own step, and a look at what it changed."""
        if self._log is None:
            super().step()
            return
        params = self._held()
        before = [p.to(torch.bfloat16, copy=True) for p in params]
        super().step()
        for number, old in enumerate(before):
            torch_ops.note(elements, self._log, number, units(old), units(params[number].to(torch.bfloat16)))

    def _step_by_kernel(self, elements: ops.Elements) -> None:
        params = self._held()
        grads = [None if p.grad is None else local_tensor(p.grad) for p in self._parameters()]
        numbers = [
            (float(g["lr"]), *g["betas"], g["weight_decay"], g["eps"], g["maximize"], len(g["params"]))
            for g in self.param_groups
        ]
        kept = self._kept
        if kept is None or not kept.fits(params, grads):
            kept = self._kept = self._prepare(elements, params, grads)
        kept.point(grads)
        with on(elements.device):
            scalars = kept.scalars(numbers)
            scale, inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
            ops.step(elements, ops.StepInputs(kept.pointers, scalars, scale, inf), self._log)
            if inf is not None:
                # a step that was skipped does not count
                kept.counts -= inf
        torch.autograd.graph.increment_version(kept.written)

    def _prepare(self, elements: ops.Elements, params: list[Tensor], grads: list[Tensor | None]) -> _Kept:
        """Everything that stays the same from step to step as long as the tensors do not move."""
        for group in self.param_groups:
            self._init_group(group, [], [], [], [], [], [])  # type: ignore[no-untyped-call]
        states = [None if grad is None else self.state[p] for p, grad in zip(self._parameters(), grads, strict=True)]
        # the step counts as one tensor, of which each parameter's state has its element
        counts = torch.stack(
            [torch.zeros((), device=elements.device) if s is None else s["step"].float().reshape(()) for s in states]
        )
        for number, state in enumerate(states):
            if state is not None:
                state["step"] = counts[number]
        averages, squares = (
            [None if s is None else local_tensor(s[name]) for s in states] for name in ("exp_avg", "exp_avg_sq")
        )
        for p, *moments in zip(params, averages, squares, strict=True):
            for moment in moments:
                if moment is not None:
                    _require_alike(moment, p)
        return _Kept(elements, params, grads, averages, squares, counts)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if getattr(self, "_log", None) is not None:
            raise ValueError("a publisher follows this optimizer already: make a new one for other parameters")
        super().add_param_group(param_group)
        self._elements = self._kept = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._kept = None

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _held(self) -> list[Tensor]:
        """The local parts of the parameters, in their own memory."""
        return [local_tensor(p) for p in self._parameters()]

    def _cut(self) -> ops.Elements:
        if self._elements is None:
            self._elements = ops.Elements(self._held())
        return self._elements

    # ── as a detector ────────────────────────────────────────────────────────────────────────────────────────────────

    def detector(self) -> Detector:
        """The detector that `Publisher(detector=optimizer)` uses."""
        return AdamWDetector(self)

    def _require_rest(self) -> None:
        """PublishFailed in a signal handler that has interrupted a step. Called with `_steps` held."""
        if self._within.locked():
            raise PublishFailed(WITHIN_A_STEP)

    def _follow(self) -> None:
        """From now on, note what changes; whatever changed so far does not count."""
        with self._steps:
            self._require_rest()
            if self._log is None:
                elements = self._cut()
                self._log = ops.ChangeLog(elements, kernels.operations(elements.device))
            else:
                self._log.empty()
            self._remember()

    def _remember(self) -> None:
        self._versions = self._writes()
        if self._cut().device.type == "cuda":
            self._written = torch.cuda.Event()
            self._written.record(torch.cuda.current_stream(self._cut().device))

    def _strayed(self) -> bool:
        """Whether anything but `step` wrote to a parameter."""
        return self._writes() != self._versions

    def _writes(self) -> list[int]:
        """Autograd's counts of writes. A DTensor has its own count, besides that of its local part."""
        return [t._version for tensors in (self._parameters(), self._held()) for t in tensors]

    def _require_log(self) -> ops.ChangeLog:
        """What was noted since the last publish. SnapshotLost where that is not all that changed."""
        if self._log is None or self._strayed():
            raise SnapshotLost("parameters were written by something else than DeltaAdamW.step")
        return self._log


class AdamWDetector(DeviceDetector):
    """Changes that a DeltaAdamW has recorded, and a snapshot of weights that it does not step (frozen, buffers)."""

    def __init__(self, optimizer: DeltaAdamW) -> None:
        super().__init__()
        self._optimizer = optimizer
        self.covers_model = True
        """False where it is bound to what one of several ranks writes, which the optimizer may not step at all."""

    def _make_parts(self, view: ModelView) -> list[TensorGroup]:
        places: dict[str, tuple[int, int]] = {}
        find = _finder(self._optimizer._held())
        for name, tensor in view.tensors.items():
            place = find(tensor)
            if place is not None:
                if view.wire_dtype(name) != torch.bfloat16:
                    raise SchemaMismatch(
                        f"DeltaAdamW notes changes in bf16; {name!r} travels as {view.wire_dtype(name)}"
                    )
                places[name] = place
        if not places and self.covers_model:
            raise SchemaMismatch("the optimizer given as detector steps none of this model's parameters")
        rest = [name for name in view.tensors if name not in places]
        parts: list[TensorGroup] = (
            [LoggedParameters(self._optimizer, places, regions_of(self.plan, list(places)))] if places else []
        )
        return parts + (snapshot_parts(view, rest, self.plan, self.device, "device") if rest else [])


def _finder(params: Sequence[Tensor]) -> Callable[[Tensor], tuple[int, int] | None]:
    """Tells in which parameter, and from which element on, a tensor lies as one piece; None if in none of them."""
    held = sorted((p.data_ptr(), number) for number, p in enumerate(params) if p.numel())
    starts = [start for start, _ in held]

    def find(tensor: Tensor) -> tuple[int, int] | None:
        at = bisect.bisect_right(starts, tensor.data_ptr()) - 1
        if at < 0 or not tensor.numel() or not tensor.is_contiguous():
            return None
        start, number = held[at]
        begin = (tensor.data_ptr() - start) // tensor.dtype.itemsize
        fits = tensor.dtype == params[number].dtype and begin + tensor.numel() <= params[number].numel()
        return (number, begin) if fits else None

    return find


class LoggedParameters:
    """Parameters that one optimizer steps: what it captured last is what they are, with its log undone."""

    shift = None

    def __init__(self, optimizer: DeltaAdamW, places: dict[str, tuple[int, int]], regions: Sequence[Region]) -> None:
        self.names = list(places)
        self._optimizer, self._places, self._regions = optimizer, places, regions

    def load(self, live: Sequence[Tensor]) -> None:
        self._require_same(live)
        self._optimizer._follow()

    def find(self, live: Sequence[Tensor], most: int) -> ops.Noted:
        self._require_same(live)
        optimizer = self._optimizer
        with optimizer._steps:
            optimizer._require_rest()
            log, elements = optimizer._require_log(), optimizer._cut()
            found = ops.noted(elements, optimizer._held(), log, kernels.operations(elements.device))
        if found.entries.numel() > most:
            raise kernels.TooMany(found.entries.numel())
        return found

    def take(self, found: ops.Noted) -> None:
        self._optimizer._follow()

    def changes(self, found: ops.Noted) -> list[Change]:
        elements = self._optimizer._cut()
        return ops.to_changes(elements, self._places, ops.changes(elements, found), self._regions)

    def read(self, region: Region) -> Bits:
        whole = Region(region.tensor, 0, 1, 0, region.units)
        return kernels.read_region(self.copy(region), whole)

    def copy(self, region: Region) -> Tensor:
        """The weights captured last: what the parameter is, with its log undone."""
        optimizer = self._optimizer
        number, begin = self._places[region.tensor.name]
        base = begin + region.start
        with optimizer._steps:
            log, elements, param = optimizer._require_log(), optimizer._cut(), optimizer._held()[number]
            if optimizer._written is not None:
                torch.cuda.current_stream(elements.device).wait_event(optimizer._written)
            piece = units(param.detach().reshape(-1)[base : base + region.units].to(torch.bfloat16, copy=True))
            first = int(elements.first_tile[number])
            tiles = first + base // TILE, first + (base + region.units - 1) // TILE + 1
            entries = log.between(*tiles)
            at = ((entries >> 32) - first) * TILE + ((entries >> 16) & 0xFFFF) - base
            here = (at >= 0) & (at < region.units)
            piece[at[here]] = entries[here].to(torch.int16)
            if piece.device.type == "cuda":
                # the next step may write to what is read here
                torch.cuda.current_stream(piece.device).synchronize()
        return piece

    def _require_same(self, live: Sequence[Tensor]) -> None:
        params = self._optimizer._held()
        stepped = [
            params[number].data_ptr() + begin * params[number].dtype.itemsize for number, begin in self._places.values()
        ]
        found = [*map(Tensor.data_ptr, live)]
        if found != stepped:
            other = next(name for name, a, b in zip(self.names, found, stepped, strict=True) if a != b)
            raise SnapshotLost(f"{other!r} is not what the optimizer steps")


class _Kept:
    """The tensors of a step and where they lie, looked up once: a step's own numbers are few."""

    def __init__(
        self,
        elements: ops.Elements,
        params: list[Tensor],
        grads: list[Tensor | None],
        averages: list[Tensor | None],
        squares: list[Tensor | None],
        counts: Tensor,
    ) -> None:
        # no reference to a gradient: it would not be freed when training drops it
        self._params, self._averages, self._squares, self.counts = params, averages, squares, counts
        self.written = [p for p, grad in zip(params, grads, strict=True) if grad is not None]
        self._elements, self._device = elements, elements.device
        self._where = [*map(Tensor.data_ptr, params)]
        self._missing = [grad is None for grad in grads]
        self._gradients: list[int] = []
        active = torch.tensor([grad is not None for grad in grads], dtype=torch.float32)
        self._active = active.to(elements.device)
        self._numbers: list[Any] = []
        self._table = torch.empty(0)

    def fits(self, params: list[Tensor], grads: list[Tensor | None]) -> bool:
        return [grad is None for grad in grads] == self._missing and [*map(Tensor.data_ptr, params)] == self._where

    def point(self, grads: list[Tensor | None]) -> None:
        """Find the gradients, which a trainer may make anew for every step."""
        where = [0 if grad is None else grad.data_ptr() for grad in grads]
        if where != self._gradients:
            for grad, p in zip(grads, self._params, strict=True):
                if grad is not None:
                    _require_alike(grad, p)
            self.pointers = ops.Pointers(self._elements, (self._params, grads, self._averages, self._squares))
            self._gradients = where

    def scalars(self, numbers: list[Any]) -> Tensor:
        """Advance the step counts and work out the numbers of this step, in fp32 on the device, as torch does."""
        if numbers != self._numbers:
            rows = []
            for lr, b1, b2, decay, eps, maximize, size in numbers:
                lr = np.float32(float(lr))
                rows += [(lr * np.float32(decay), b1, b2, 0.0, eps, lr, -1.0 if maximize else 1.0)] * size
            table = torch.from_numpy(np.array(rows, np.float32))
            self._table = table.to(self._device)
            self._numbers = numbers
        self.counts += self._active
        rest = 1 - self._table[:, 1:3] ** self.counts.clamp(min=1)[:, None]
        table = self._table.clone()
        table[:, 3] = rest[:, 1].sqrt()
        table[:, 5] /= rest[:, 0]
        return table


def _require_alike(tensor: Tensor, parameter: Tensor) -> None:
    """Require what the kernel can address beside its parameter: the same number, width and order of elements."""
    if tensor.dtype != parameter.dtype or not tensor.is_contiguous() or tensor.device != parameter.device:
        pieces = "" if tensor.is_contiguous() else ", not contiguous"
        raise ValueError(
            f"a gradient or moment is {tensor.dtype} on {tensor.device}{pieces}; "
            f"its parameter is {parameter.dtype} on {parameter.device}"
        )
