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
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.codecs.context.classes import CLASSES, COLUMN_NEUTRAL, ROW_NEUTRAL
from ..core.codecs.context.tiles import grid_of, walked
from ..core.digest import StateDigest, tensor_keys
from . import torch_ops
from .host import on, read_region, region_plan, to_changes
from .pace import gently
from .plan import TILE, Plan, Segment, flat_plan, grid
from .results import (
    CLASS_STEPS,
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
    "compile_classes",
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

    `ranks` and `steps` may be overwritten: the change takes their memory.
    """
    if tuple(counts.shape) != (plan.tiles, CLASSES):
        raise ValueError(f"counts are {tuple(counts.shape)}, the plan needs {(plan.tiles, CLASSES)}")
    return _run("place", plan, old, rules, counts, ranks, steps)  # type: ignore[no-any-return]


def compile_classes(tensors: Sequence[Tensor], shapes: Sequence[tuple[int, int]]) -> None:
    """Run once, with every kind of rules, what a `context` delta needs: a GPU compiles it on first use.

    `shapes`: rows and columns of each tensor. What is written is what the tensors hold.
    """
    walks = [(number, walked(*shape)) for number, shape in enumerate(shapes) if shape[0] * shape[1]]
    grids = [grid_of(*walk) for _, walk in walks]
    usual = [grid(number, 0, walk[1], walk, tiles) for (number, walk), tiles in zip(walks, grids, strict=True)]
    # rows in one piece: levels of columns begin where wide reads are allowed, as in most deltas
    even = [
        grid(number, 0, walk[1], walk, (min(walk[0], down * across), 1))
        for (number, walk), (down, across) in zip(walks, grids, strict=True)
    ]
    each = [
        [(s, _widths(Plan([tensors[s.tensor]], [replace(s, tensor=0)]))) for s in segments]
        for segments in (usual, even)
    ]
    values, positions = ({width[n] for _, width in each[0]} for n in range(2))
    # a delta has changes of some tensors only: its values and positions are as wide as the widest of these need
    for value, position in product(values, positions):
        for segments, wide_levels in zip(each, (False, True), strict=True):
            plan = Plan(tensors, [s for s, width in segments if width[0] <= value and width[1] <= position])
            if plan.tiles and _widths(plan) == (value, position):
                _compile(tensors, plan, wide_levels=wide_levels)


def _widths(plan: Plan) -> tuple[int, int]:
    """Bytes of a value and of a position."""
    return plan.value_dtype.itemsize, plan.position_dtype.itemsize


def _compile(tensors: Sequence[Tensor], plan: Plan, *, wide_levels: bool) -> None:
    """Without `wide_levels`: rules that have no levels, and levels that are read one by one."""
    neutral = [
        (np.full(s.rows, ROW_NEUTRAL, np.uint8), np.full(s.columns, COLUMN_NEUTRAL, np.uint8)) for s in plan.segments
    ]
    # not floats, all of class 1
    one = [0, 0, 0, 0, (1 - ROW_NEUTRAL - COLUMN_NEUTRAL) % 256]
    for classes, levels in product(CLASS_STEPS, (neutral,) if wide_levels else (None, neutral)):
        found = rules(plan, [[*one, classes]] * len(plan.segments), levels)
        found = replace(found, aligned=found.aligned and wide_levels)
        counts = torch.zeros_like(class_counts(tensors, plan, found))
        counts[0, 1] = 1
        dtypes = plan.position_dtype, plan.value_dtype
        rank, step = (torch.zeros(1, dtype=dtype, device=plan.device) for dtype in dtypes)
        changed = place(tensors, plan, found, counts, rank, step)
    # the old bits over themselves: even the smallest step would change them
    changed = replace(changed, new=changed.old)
    origins = Origins(torch.tensor([[0, 1, 1, 0]], device=plan.device).repeat(plan.tiles, 1), 1)
    digest_change_by_group([str(number) for number in range(len(tensors))], changed, origins, plan=plan)
    apply(tensors, changed, plan=plan)


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
