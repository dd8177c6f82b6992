from __future__ import annotations

from types import ModuleType

import kernel_models as models
import numpy as np
import pytest
import torch

from deltawire import kernels
from deltawire.core.codecs.context.classes import CLASSES
from deltawire.kernels import Plan, flat_plan, grid, torch_ops

TILES = [1 << 16, 1 << 10]


@pytest.mark.parametrize("tile", TILES)
def test_detect_finds_what_the_core_finds(ops: ModuleType, device: torch.device, tile: int) -> None:
    old = models.odd_model(device)
    new = models.moved(old, 0.02, 1)
    plan = models.cut_plan(old, tile)
    found = ops.detect(plan, old, new)
    for (positions, was, now), change in zip(models.by_tensor(plan, found), models.core_changes(old, new), strict=True):
        assert np.array_equal(positions, change.positions)
        assert np.array_equal(was, change.old)
        assert np.array_equal(now, change.new)
    assert models.equal(found, torch_ops.detect(plan, old, new))


@pytest.mark.parametrize("density", [0.0, 0.3, 1.0])
def test_detect_at_any_density(ops: ModuleType, device: torch.device, density: float) -> None:
    old = [models.random_tensor((30, 130), torch.bfloat16, 3).to(device)]
    new = models.moved(old, density, 4)
    plan = models.cut_plan(old, 1 << 10)
    assert models.equal(ops.detect(plan, old, new), torch_ops.detect(plan, old, new))


def test_what_was_detected_brings_the_snapshot_up_to_date(ops: ModuleType, device: torch.device) -> None:
    snapshot = models.odd_model(device)
    before, new, plan = models.clones(snapshot), models.moved(snapshot, 0.02, 1), flat_plan(snapshot)
    found = ops.detect(plan, snapshot, new)
    assert models.same(snapshot, before)
    ops.prepare_apply(plan, snapshot, found)()
    assert models.same(snapshot, new)
    assert ops.detect(plan, snapshot, new).count == 0


def test_detect_compares_bits_and_not_numbers(ops: ModuleType, device: torch.device) -> None:
    nan = torch.tensor([0x7FC0, 0x7FC1, 0, 0x3F80], dtype=torch.int16).view(torch.bfloat16).to(device)
    old, new = nan.clone(), nan.clone()
    new.view(torch.int16)[1] = 0x7FC2
    new[2] = -0.0
    found = ops.detect(flat_plan([old]), [old], [new])
    assert found.positions.tolist() == [1, 2]


def test_tiles_of_a_grid_come_in_order_and_row_by_row(ops: ModuleType, device: torch.device) -> None:
    old = [models.random_tensor((30, 300), torch.bfloat16, 5).to(device)]
    new = models.moved(old, 0.05, 6)
    # two column shards of 144 columns that begin at column 8, cut into 3 × 2 tiles
    plan = Plan(old, [grid(0, 8, 300, (30, 288), (3, 2))])
    found = ops.detect(plan, old, new)
    a, b = (models.bits(t[0]).reshape(30, 300)[:, 8:296] for t in (old, new))
    for tile in range(6):
        i, j = divmod(tile, 2)
        x, y = (m[10 * i : 10 * i + 10, 144 * j : 144 * j + 144].reshape(-1) for m in (a, b))
        here = slice(int(found.starts[tile]), int(found.starts[tile + 1]))
        where = np.flatnonzero(x != y)
        assert np.array_equal(found.positions[here].cpu().numpy(), where)
        assert np.array_equal(found.old[here].cpu().numpy(), x[where])
        assert np.array_equal(found.new[here].cpu().numpy(), y[where])


def test_detect_rounds_masters_as_torch_does(ops: ModuleType, device: torch.device) -> None:
    rng = torch.Generator().manual_seed(1)
    masters = [torch.randn(shape, generator=rng) * 0.02 for shape in ((50, 130), (1000,), (0,))]
    # halves to round to even both ways, what becomes infinite, denormals, both zeros
    special = [0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 1, 0x80000000, 0]
    masters[1].view(torch.int32)[:10] = torch.tensor(special, dtype=torch.int64).to(torch.int32)
    copies = [(m + 1e-5 * torch.randn(m.shape, generator=rng)).to(torch.bfloat16).to(device) for m in masters]
    masters = [m.to(device) for m in masters]
    before, expected = models.clones(copies), [m.to(torch.bfloat16) for m in masters]
    found = ops.detect(flat_plan(copies), copies, masters, cast=True)
    assert found.count > 10
    assert models.same(copies, before)
    assert models.equal(found, torch_ops.detect(flat_plan(copies), before, expected))


def test_detect_rounds_nan(ops: ModuleType, device: torch.device) -> None:
    bits = torch.tensor([0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF, 0x7FC00000], dtype=torch.int64)
    master = bits.to(torch.int32).view(torch.float32).to(device)
    copy = torch.zeros(5, dtype=torch.bfloat16, device=device)
    ops.prepare_apply(flat_plan([copy]), [copy], ops.detect(flat_plan([copy]), [copy], [master], cast=True))()
    assert copy.isnan().all()
    if device.type == "cuda" or ops is torch_ops:
        # CPUs and GPUs make different NaNs: each twin has to agree with torch where it is used
        assert models.same([copy], [master.to(torch.bfloat16)])


def test_apply_writes_what_changed_and_can_take_it_back(ops: ModuleType, device: torch.device) -> None:
    old = models.odd_model(device)
    new = models.moved(old, 0.02, 1)
    live, plan = models.clones(old), flat_plan(old)
    changed = torch_ops.detect(plan, old, new)
    ops.prepare_apply(plan, live, changed)()
    assert models.same(live, new)
    ops.prepare_apply(plan, live, changed.swapped())()
    assert models.same(live, old)


def test_an_unaligned_view_leaves_its_neighbours_alone(ops: ModuleType, device: torch.device) -> None:
    base = torch.zeros(300, dtype=torch.int16, device=device)
    view, plan = [base[3:103]], flat_plan([base[3:103]])
    changed = torch_ops.detect(plan, view, [torch.ones(100, dtype=torch.int16, device=device)])
    ops.prepare_apply(plan, view, changed)()
    assert base.sum() == 100
    assert base[3:103].sum() == 100


def test_a_position_past_its_tile_is_not_written(device: torch.device) -> None:
    triton_ops = pytest.importorskip("deltawire.kernels.triton_ops")

    base = torch.zeros(300, dtype=torch.int16, device=device)
    view, plan = [base[:100]], flat_plan([base[:100]])
    changed = torch_ops.detect(plan, view, [torch.ones(100, dtype=torch.int16, device=device)])
    changed.positions.view(torch.int16)[7] = 200
    triton_ops.prepare_apply(plan, view, changed)()
    assert base[100:].sum() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_detect_casts_to_the_dtypes_of_the_old_weights(device: torch.device, dtype: torch.dtype) -> None:
    old = [models.random_tensor((30, 130), torch.bfloat16, 3).to(device).nan_to_num()]
    new = models.moved(old, 0.3, 4)
    wide = [tensor.nan_to_num().to(dtype) for tensor in new]
    expected = [tensor.to(torch.bfloat16) for tensor in wide]
    assert models.equal(kernels.detect(old, wide), kernels.detect(old, expected))


def test_public_functions_make_their_plan_and_refuse_what_does_not_fit(device: torch.device) -> None:
    old = models.odd_model(device)
    new = models.moved(old, 0.02, 1)
    changed = kernels.detect(old, new)
    kernels.apply(old, changed)
    assert models.same(old, new)
    assert flat_plan(old) is flat_plan(new)
    with pytest.raises(ValueError, match="tensor 0 has"):
        kernels.detect(old, [new[0][1:], *new[1:]])
    with pytest.raises(ValueError, match="not contiguous"):
        kernels.detect([old[0].T], [new[0].T])
    with pytest.raises(ValueError, match=r"tensor 0 is torch\.int32 and should be"):
        kernels.detect(old, [new[0].to(torch.int32), *new[1:]])
    with pytest.raises(ValueError, match="was it made by another"):
        kernels.apply(old, changed, plan=models.cut_plan(old, 1 << 10))
    with pytest.raises(ValueError, match="the plan is for"):
        kernels.apply(old[:2], changed, plan=flat_plan(old))
    mixed = [torch.zeros(8, dtype=dtype, device=device) for dtype in (torch.bfloat16, torch.float32)]
    plan, none = flat_plan(mixed), torch.zeros(0, dtype=torch.int32, device=device)
    found, counts = kernels.rules(plan, [[0, 0, 0, 0, 252, 2]] * 2), torch.zeros((2, CLASSES), dtype=torch.int32)
    with pytest.raises(ValueError, match="several widths"):
        kernels.place(mixed, plan, found, counts.to(device), none, none)


def test_no_tensors_at_all(ops: ModuleType) -> None:
    plan = flat_plan([])
    assert ops.detect(plan, [], []).count == 0
    ops.prepare_apply(plan, [], ops.detect(plan, [], []))()
