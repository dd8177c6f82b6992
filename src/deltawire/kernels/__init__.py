"""Kernels over whole models: find what changed, rank it, write it, prove it.

Every function takes lists of tensors (a model), does its work on their device, and hands over what changed and nothing
else: only the sparse payload needs to leave the device. On a CUDA device with Triton they are a launch or two for the
whole model (`triton_ops`); anywhere else they are plain torch (`torch_ops`). Both give the same bits.

A *plan* says how a model is cut into tiles. Functions that are not given one cut tensors along their memory; the cut is
made once per list of shapes. Tensors must be contiguous. Work is queued on torch's current stream; functions that must
know a count wait for it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection, Sequence
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.codecs.context.classes import CLASSES
from ..core.digest import StateDigest, tensor_keys
from . import ahead, torch_ops
from .host import on, read_region, region_plan, to_changes
from .pace import gently
from .plan import TILE, Plan, Segment, flat_plan, grid
from .results import (
    Changed,
    ClassRanks,
    ClassRules,
    Moves,
    Origins,
    TooMany,
    part_of_sheet,
    read_sheet,
    rules,
    tiles_of,
)

__all__ = [
    "TILE",
    "Changed",
    "ClassRanks",
    "ClassRules",
    "Moves",
    "Origins",
    "Plan",
    "Segment",
    "TooMany",
    "apply",
    "class_counts",
    "class_ranks",
    "detect",
    "digest",
    "digest_change",
    "digest_change_by_group",
    "exponents",
    "flat_plan",
    "gently",
    "grid",
    "operations",
    "part_of_sheet",
    "place",
    "prepare_apply",
    "read_region",
    "read_sheet",
    "region_plan",
    "rehearse",
    "resolve",
    "rules",
    "state",
    "tile_keys",
    "tiles_of",
    "to_changes",
]


def operations(device: torch.device) -> ModuleType:
    """The module that works for a device."""
    if device.type == "cuda" and _has_triton():
        from . import triton_ops

        return triton_ops
    return torch_ops


def detect(
    old: Sequence[Tensor], new: Sequence[Tensor], *, plan: Plan | None = None, most: int | None = None
) -> Changed:
    """Every unit whose bits differ between two models. Writes nothing. TooMany if that is more than `most`.

    New weights of other dtypes are cast to those of the old ones: fp32 to bf16 by the kernel itself, so that no copy is
    made, anything else by torch. A NaN becomes the one its device makes: 0x7FFF from CUDA, 0xFFFF from torch on a CPU.
    """
    plan = plan or flat_plan(old)
    # told by whole lists, since this runs in every publish
    if [*map(Tensor.numel, old)] != [*map(Tensor.numel, new)]:
        for number, (a, b) in enumerate(zip(old, new, strict=True)):
            if a.numel() != b.numel():
                raise ValueError(f"tensor {number} has {a.numel()} elements where its twin has {b.numel()}")
    given, wire = [t.dtype for t in new], [t.dtype for t in old]
    rounds = {*given} == {torch.float32} and {*wire} == {torch.bfloat16}
    if given != wire and not rounds:
        for number, (a, b) in enumerate(zip(old, new, strict=True)):
            if a.dtype != b.dtype and not (a.is_floating_point() and b.is_floating_point()):
                raise ValueError(f"tensor {number} is {b.dtype} and should be {a.dtype}")
        new = [tensor.detach().to(dtype) for tensor, dtype in zip(new, wire, strict=True)]
    return _run("detect", plan, old, new, cast=rounds, most=most)  # type: ignore[no-any-return]


def apply(tensors: Sequence[Tensor], changed: Changed, *, plan: Plan | None = None) -> None:
    """Write the new bits. Apply the change's `swapped()` to undo."""
    plan = plan or flat_plan(tensors)
    write = prepare_apply(tensors, changed, plan=plan)
    with on(plan.device):
        write()


def prepare_apply(tensors: Sequence[Tensor], changed: Changed, *, plan: Plan) -> Callable[[], None]:
    """Return a call that does what `apply` does, without the checks and allocations, so that the pause is short.

    When it is called, the tensors must lie where they lie now, with their device as the current one.
    """
    _require_tiles(plan, changed)
    return _run("prepare_apply", plan, tensors, changed)  # type: ignore[no-any-return]


def resolve(tensors: Sequence[Tensor], moves: Moves, *, plan: Plan) -> Changed:
    """Moves as a change of what the tensors hold now. Writes nothing to them."""
    if moves.starts.numel() != plan.tiles + 1:
        raise ValueError(f"the moves have {moves.starts.numel() - 1} tiles, the plan {plan.tiles}")
    return _run("resolve", plan, tensors, moves)  # type: ignore[no-any-return]


def digest(names: Sequence[str], tensors: Sequence[Tensor]) -> StateDigest:
    """The state digest of a model: what `deltawire.core.digest` says of the same bits."""
    plan = flat_plan(tensors, unit=2)
    return state(_run("digest", plan, tensors, tile_keys(plan, names)))


def digest_change(
    names: Sequence[str], tensors: Sequence[Tensor], changed: Changed, *, plan: Plan | None = None
) -> StateDigest:
    """How the state digest moves when the change is applied; `tensors` give the shapes alone."""
    plan = plan or flat_plan(tensors)
    _require_tiles(plan, changed)
    return state(_run("digest_change", plan, changed, tile_keys(plan, names))[0])


def digest_change_by_group(names: Sequence[str], changed: Changed, origins: Origins, *, plan: Plan) -> Tensor:
    """How the state digest of each group moves when the change is applied, for tensors cut from those that are named.

    int64 [groups, 2], still on the device.
    """
    _require_tiles(plan, changed)
    return _run("digest_change", plan, changed, tile_keys(plan, names), origins)  # type: ignore[no-any-return]


def exponents(units: Tensor, samples: Sequence[tuple[int, int, int, int]], shift: int, mask: int) -> Tensor:
    """Count the exponents in each sample: int32 [samples, 256].

    A sample is a matrix in flat units, of which every n-th row counts: (first unit, rows, columns, n).
    """
    with on(units.device):
        return operations(units.device).exponents(units, samples, shift, mask)  # type: ignore[no-any-return]


def class_counts(old: Sequence[Tensor], plan: Plan, rules: ClassRules) -> Tensor:
    """Units of each class in each tile: what a host needs to decode ranks."""
    return _run("class_counts", plan, old, rules)  # type: ignore[no-any-return]


def class_ranks(old: Sequence[Tensor], plan: Plan, rules: ClassRules, changed: Changed) -> ClassRanks:
    """Changes as ranks within the classes of the old bits, which `old` must still hold."""
    _require_tiles(plan, changed)
    return _run("class_ranks", plan, old, rules, changed)  # type: ignore[no-any-return]


def place(
    old: Sequence[Tensor], plan: Plan, rules: ClassRules, counts: Tensor, ranks: Tensor, steps: Tensor
) -> Changed:
    """The inverse of `class_ranks`: a change ready to be applied. A rank past its class is a ValueError.

    `ranks` and `steps` may be overwritten: the change takes their memory. All units of the plan have one width: no
    kernel is compiled for others.
    """
    if plan.tiles and plan.unit.min() < plan.unit.max():
        raise ValueError("the plan has units of several widths; place those of each width apart")
    if tuple(counts.shape) != (plan.tiles, CLASSES):
        raise ValueError(f"counts are {tuple(counts.shape)}, the plan needs {(plan.tiles, CLASSES)}")
    return _run("place", plan, old, rules, counts, ranks, steps)  # type: ignore[no-any-return]


def rehearse(units: Collection[int], device: torch.device) -> None:
    """Launch, for weights of so many bytes, all that staging, writing and proving versions on a device can launch: it
    compiles a kernel on its first launch, which would delay a model that is served."""
    if operations(device) is not torch_ops:
        ahead.rehearse(units, device)


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _run(name: str, plan: Plan, *arguments: Any, **options: Any) -> Any:
    function = getattr(operations(plan.device), name)
    with on(plan.device):
        return function(plan, *arguments, **options)


def _require_tiles(plan: Plan, changed: Changed) -> None:
    if changed.starts.numel() != plan.tiles + 1:
        raise ValueError(
            f"the change has {changed.starts.numel() - 1} tiles, the plan {plan.tiles}; was it made by another?"
        )


def tile_keys(plan: Plan, names: Sequence[str]) -> Tensor:
    """The digest keys of every tile, on the device."""

    def make() -> Tensor:
        keys = np.array([tensor_keys(name) for name in names], np.uint64).reshape(-1, 2)
        return torch.from_numpy(keys[plan.tensor].view(np.int64)).to(plan.device)

    return plan.remember(("keys", tuple(names)), make)


def state(lanes: Tensor) -> StateDigest:
    """A digest from its two lanes; waits for the device."""
    return StateDigest.of_lanes(lanes.tolist())
