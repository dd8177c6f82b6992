from __future__ import annotations

from types import ModuleType
from unittest.mock import patch

import kernel_models as models
import numpy as np
import pytest
import torch

from deltawire import kernels
from deltawire.core.change import (
    BIT_STEPS,
    FLIPS,
    NEW_BITS,
    NUMBER_STEPS,
    Change,
    Region,
    RegionMoves,
    blocks,
    compare,
    whole,
)
from deltawire.core.dtypes import lookup
from deltawire.core.schema import Schema, TensorSpec
from deltawire.core.ulps import zigzags_of
from deltawire.kernels import torch_ops
from deltawire.models import ModelView
from deltawire.replica.moves import DevicePieces


def _model(device: torch.device) -> tuple[list[str], list[torch.Tensor], list[torch.Tensor], Schema]:
    old = [t for t in models.odd_model(device) if t.numel()]
    new = models.moved(old, 0.03, 1)
    names = [f"t{i}" for i in range(len(old))]
    return names, old, new, ModelView(dict(zip(names, old, strict=True))).schema


def region_plan(names: list[str], tensors: list[torch.Tensor], regions: list[Region], tile: int) -> kernels.Plan:
    with patch("deltawire.kernels.host.TILE", tile):
        return kernels.region_plan(names, tensors, regions)


def _equal(a: Change, b: Change) -> bool:
    pairs = [(getattr(a, f), getattr(b, f)) for f in ("positions", "old", "new")]
    return a.region == b.region and all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("block_units", [1 << 24, 1000])
def test_changes_by_region_equal_those_of_the_core(device: torch.device, block_units: int) -> None:
    names, old, new, schema = _model(device)
    regions = [region for block in blocks(schema, block_units) for region in block]
    plan = region_plan(names, old, regions, 512)
    changed = kernels.detect(old, new, plan=plan)
    found = kernels.to_changes(plan, changed, regions)
    before, after = (dict(zip(names, ts, strict=True)) for ts in (old, new))
    for change, region in zip(found, regions, strict=True):
        name = region.tensor.name
        assert _equal(
            change, compare(region, region.cut(models.bits(before[name])), region.cut(models.bits(after[name])))
        )


def test_a_block_of_columns(device: torch.device) -> None:
    old = [models.random_tensor((30, 300), torch.bfloat16, 5).to(device)]
    new = models.moved(old, 0.05, 6)
    region = Region(TensorSpec("w", "BF16", (30, 300)), 3, 20, 150, 150)
    plan = region_plan(["w"], old, [region], 1000)
    changed = kernels.detect(old, new, plan=plan)
    (found,) = kernels.to_changes(plan, changed, [region])
    assert _equal(found, compare(region, *(region.cut(models.bits(t[0])) for t in (old, new))))


def test_nothing_changed(device: torch.device) -> None:
    names, old, _, schema = _model(device)
    regions = [region for block in blocks(schema) for region in block]
    plan = kernels.region_plan(names, old, regions)
    found = kernels.to_changes(plan, kernels.detect(old, old, plan=plan), regions)
    assert [change.count for change in found] == [0] * len(regions)


@pytest.mark.parametrize("block_units", [1 << 24, 1000])
def test_steps_from_the_host_are_taken_where_the_weights_are(
    ops: ModuleType, device: torch.device, block_units: int
) -> None:
    """What a delta says without old bits becomes the change that `detect` finds, for every dtype and kind of value."""
    names, old, new, schema = _model(device)
    regions = [region for block in blocks(schema, block_units) for region in block]
    plan = region_plan(names, old, regions, 512)
    expected = torch_ops.detect(plan, old, new)
    moves = []
    for number, change in enumerate(kernels.to_changes(plan, expected, regions)):
        signed = lookup(change.region.tensor.dtype).steps_are_signed
        zigzags = np.empty(change.count, np.uint32)
        zigzags_of(change.old, change.new, signed, zigzags)
        kind = NUMBER_STEPS if signed else BIT_STEPS
        values = zigzags.astype(change.old.dtype)
        if number % 3 == 0:
            kind, values = NEW_BITS, change.new
        elif number % 3 == 1:
            kind, values = FLIPS, change.old ^ change.new
        moves.append(RegionMoves(change.region, change.positions, values, kind))
    before, flat = models.clones(old), kernels.flat_plan(old)
    pieces = DevicePieces([whole(schema.by_name()[name]) for name in names])
    cut, _ = pieces.cut(moves)
    parts, made = pieces.join(cut, lambda shapes: {n: np.empty(shape, dtype) for n, (dtype, shape) in shapes.items()})
    found = []
    for kind, _ in parts:
        sent = [torch.from_numpy(made[f"{name}.{kind}"]).to(device) for name in ("starts", "positions", "values")]
        kinds = torch.full((flat.tiles,), kind, dtype=torch.int32, device=device)
        found.append(ops.resolve(flat, old, kernels.Moves(*sent, kinds)))
    assert models.same(old, before)
    for changed in found:
        ops.prepare_apply(flat, old, changed)()
    assert models.same(old, new)
    with pytest.raises(ValueError, match="tiles"):
        kernels.resolve(old, kernels.Moves(*sent, kinds), plan=models.cut_plan(old, 64))
