"""Every kernel that the weights of a server can need, before any is needed.

Triton compiles a kernel once for each combination of dtypes and constants, when the first launch has it: seconds in
which a model that is served stands still. Which launches a delta makes depends on what changed. `rehearse` makes all
that there can be, on a few weights of each width; `compile_for` has the same launches compiled for a device, and
launches none: it needs no device, takes no memory of one, and leaves the kernels in Triton's cache on disk, where a
process finds them that rehearses later.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Hashable
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..core import change, digest
from ..core.codecs.context.classes import COLUMN_NEUTRAL, ROW_NEUTRAL
from .host import on
from .plan import _SIGNED, Launch, Plan, flat, grid
from .results import CLASS_STEPS, Changed, Moves, Origins, rules

_MAJOR, _MINOR = 75, 76
"""Attributes of a device, as cuda.h numbers them."""

_LARGE = (2, 1 << 16)
"""Rows and columns of a tile whose positions take four bytes."""


def rehearse(units: Collection[int], device: torch.device) -> None:
    """Launch, for weights of so many bytes (1, 2, 4), all that can be launched to stage, write and prove versions."""
    name_all()
    with on(device):
        for unit in sorted(units):
            # one that is read wide, and one that cannot be
            for shape in ((2, 128), _LARGE):
                _rehearse_ranks([_zeros(unit, size, device) for size in (shape, (2, 127))])
            _rehearse_full_weights([_zeros(unit, (1, columns), device) for columns in (128, 127)])
        for widest in sorted(units):
            widths = [unit for unit in sorted(units) if unit <= widest]
            weights = [_zeros(unit, (1, columns), device) for unit in widths for columns in (128, 127)]
            _rehearse_moves(weights)
            _rehearse_proof(weights)


def _rehearse_ranks(weights: list[Tensor]) -> None:
    """A delta of ranks, of weights of one width: counted, placed, written, and its digest."""
    from . import triton_ops as ops

    plan = Plan(weights, [grid(n, 0, w.shape[1], (w.shape[0], w.shape[1]), (1, 1)) for n, w in enumerate(weights)])
    neutral = [
        (np.full(s.rows, ROW_NEUTRAL, np.uint8), np.full(s.columns, COLUMN_NEUTRAL, np.uint8)) for s in plan.segments
    ]
    # not floats, all of class 1
    one = [0, 0, 0, 0, (1 - ROW_NEUTRAL - COLUMN_NEUTRAL) % 256]
    for classes, levels in product(CLASS_STEPS, (None, neutral)):
        found = rules(plan, [[*one, classes]] * len(plan.segments), levels)
        counts = torch.zeros_like(ops.class_counts(plan, weights, found))
        counts[0, 1] = 1
        rank, step = (torch.zeros(1, dtype=d, device=plan.device) for d in (plan.position_dtype, plan.value_dtype))
        changed = ops.place(plan, weights, found, counts, rank, step)
    # the old bits over themselves
    _rehearse_change(plan, weights, replace(changed, new=changed.old))


def _rehearse_moves(weights: list[Tensor]) -> None:
    """A delta of moves, of weights of several widths: its old and new bits, written, and its digest."""
    from . import triton_ops as ops

    plan = Plan(weights, flat(weights))
    starts = torch.ones(plan.tiles + 1, dtype=torch.int64, device=plan.device)
    starts[0] = 0
    kinds = torch.full((plan.tiles,), change.NEW_BITS, dtype=torch.int32, device=plan.device)
    first, same = (torch.zeros(1, dtype=d, device=plan.device) for d in (plan.position_dtype, plan.value_dtype))
    changed = ops.resolve(plan, weights, Moves(starts, first, same, kinds))
    _rehearse_change(plan, weights, replace(changed, new=changed.old))


def _rehearse_change(plan: Plan, weights: list[Tensor], changed: Changed) -> None:
    """Write what changes, and its digest."""
    from . import triton_ops as ops

    ops.prepare_apply(plan, weights, changed)()
    table = torch.tensor([[0, 1, 1, 0]], device=plan.device).repeat(plan.tiles, 1)
    ops.digest_change(plan, changed, _keys(plan), Origins(table, 1))


def _rehearse_full_weights(weights: list[Tensor]) -> None:
    """Full weights, compared one tensor at a time."""
    from . import triton_ops as ops

    for old in weights:
        plan, new = Plan([old], flat([old])), old.clone()
        ops.detect(plan, [old], [new])
        # where nothing differs, nothing is extracted
        starts = torch.zeros(plan.tiles + 1, dtype=torch.int64, device=plan.device)
        ops.extract(plan, plan.launches([old], [new]), starts, 1)


def _rehearse_proof(weights: list[Tensor]) -> None:
    """The digest of weights that begin with a block of it, and of such that do not."""
    from . import triton_ops as ops

    plan = Plan(weights, flat(weights, unit=2), unit=2)
    out = ops.digest(plan, weights, _keys(plan))
    table = torch.from_numpy(digest.TABLE.view("i8").copy()).to(plan.device)
    ops.digest_rows(Launch(torch.zeros((1, 7), dtype=torch.int64, device=plan.device), 1, 2, False, ()), table, out)


def _zeros(unit: int, shape: tuple[int, int], device: torch.device) -> Tensor:
    return torch.zeros(shape, dtype=_SIGNED[unit], device=device)


def _keys(plan: Plan) -> Tensor:
    return torch.zeros((plan.tiles, 2), dtype=torch.int64, device=plan.device)


# ── without a device ─────────────────────────────────────────────────────────────────────────────────────────────────


def launches(units: Collection[int]) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """Every launch of a rehearsal, by kernel, arguments in host memory, and constants; of each kind one."""
    from . import triton_ops

    found: dict[Hashable, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {}

    def note(kernel: Any, grid: object, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        found.setdefault(kind(kernel, arguments, options), (kernel, arguments, options))

    token = triton_ops.starting.set(note)
    try:
        rehearse(units, torch.device("cpu"))
    finally:
        triton_ops.starting.reset(token)
    return [*found.values()]


def kind(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Hashable:
    """What a kernel is compiled for, if all tensors and numbers are multiples of 16: where a tensor begins, and what a
    number is, unless the kernel says that it does not matter."""
    kinds = tuple(argument.dtype if isinstance(argument, Tensor) else int for argument in arguments)
    return kernel.__name__, kinds, tuple(sorted(options.items()))


def compile_for(capability: int, units: Collection[int], part: int = 0, parts: int = 1) -> None:
    """Compile what a rehearsal launches, for devices of a compute capability (90 for 9.0): every `parts`-th kernel.

    This process can launch nothing afterwards.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    driver.set_active(_Absent(GPUTarget("cuda", capability, 32)))
    name_all()
    for kernel, arguments, options in launches(units)[part::parts]:
        dtypes = [argument.dtype if isinstance(argument, Tensor) else argument for argument in arguments]
        compiled = kernel.warmup(*dtypes, grid=(1,), **options)
        # what calls it is compiled too, by some versions of Triton
        with suppress(Exception):
            from triton.backends.nvidia.driver import CudaLauncher

            CudaLauncher(compiled.src, compiled.metadata)


def name_all() -> None:
    """Have Triton name all kernels and what they call, in one order.

    By its name a kernel is found on disk. Triton 3.6 leaves constants out of the name of a function that calls others
    whose names it does not know yet (3.9 does not): names would depend on which kernel a process needs first.
    """
    from . import _change, _classes, _digest, _ranks, _rows, _steps, _tiles

    for module in (_tiles, _steps, _digest, _rows, _classes, _ranks, _change):
        for function in vars(module).values():
            # Triton's interpreter has none
            getattr(function, "cache_key", None)


class _Absent(NamedTuple):
    """What Triton asks a driver, of a device that is not touched."""

    target: Any

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        # Triton keeps what it compiled by this number
        return int(self.target.arch)

    def get_current_stream(self, device: int) -> int:
        return 0


def capabilities() -> set[int]:
    """The compute capabilities of this machine's devices, from the driver: no memory of theirs is taken, which a CUDA
    context would."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return set()
    count, value, found = ctypes.c_int(), ctypes.c_int(), set()
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return set()
    for device in range(count.value):
        pair = []
        for attribute in (_MAJOR, _MINOR):
            cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
            pair.append(value.value)
        found.add(10 * pair[0] + pair[1])
    return found
