"""How tensors are cut into the tiles of a launch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_models import cut_plan

from deltawire.kernels.plan import Plan, Remember, common_device, flat_plan, grid, narrow, units, widen


def test_tiles_cover_every_unit_once() -> None:
    tensors = [torch.zeros(300), torch.zeros(7, 5, dtype=torch.bfloat16), torch.zeros(0), torch.zeros(3).double()]
    plan = cut_plan(tensors, 64)
    covered = [np.zeros(total, int) for total in plan.totals]
    for tensor, offset, rows, width, stride in zip(
        plan.tensor, plan.offset, plan.rows, plan.width, plan.stride, strict=True
    ):
        for row in range(rows):
            covered[tensor][offset + row * stride : offset + row * stride + width] += 1
    assert all((count == 1).all() for count in covered)
    assert plan.totals == [300, 35, 0, 6], "eight bytes are two units"
    assert plan.position_dtype == torch.uint16
    assert plan.value_dtype == torch.uint32
    assert flat_plan(tensors) is flat_plan(tensors)


def test_a_grid_lies_within_its_rectangle() -> None:
    tensor = torch.zeros(20, 30)
    plan = Plan([tensor], [grid(0, 2 * 30 + 5, 30, (10, 12), (2, 3))])
    seen = torch.zeros(20 * 30, dtype=torch.int64)
    for offset, rows, width, stride in zip(plan.offset, plan.rows, plan.width, plan.stride, strict=True):
        for row in range(rows):
            seen[offset + row * stride : offset + row * stride + width] += 1
    assert seen.view(20, 30)[2:12, 5:17].eq(1).all()
    assert seen.sum() == 120
    assert plan.chunks(4) == 5


def test_bits_are_unsigned_whatever_torch_has() -> None:
    bits = torch.tensor([0xFFFF, 1], dtype=torch.int32).to(torch.int16).view(torch.uint16)
    assert widen(bits).tolist() == [0xFFFF, 1]
    assert narrow(torch.tensor([0x1FFFF, 1]), torch.uint16).view(torch.int16).tolist() == [-1, 1]
    assert units(torch.zeros(3).double()).numel() == 6


def test_what_kernels_cannot_address_is_refused() -> None:
    with pytest.raises(ValueError, match="not contiguous"):
        common_device([torch.zeros(3, 4).T])
    with pytest.raises(ValueError, match="devices"):
        common_device([torch.zeros(1), torch.zeros(1, device="meta")])
    plan = flat_plan([torch.zeros(8)])
    with pytest.raises(ValueError, match="the plan is for 1 tensors"):
        plan.launches([torch.zeros(8), torch.zeros(8)])


def test_the_oldest_result_is_forgotten() -> None:
    made: list[int] = []
    kept = Remember(size=2)
    for key in (1, 2, 1, 3, 1, 2):
        kept.get(key, lambda key=key: made.append(key))  # type: ignore[misc]
    assert made == [1, 2, 3, 2]
