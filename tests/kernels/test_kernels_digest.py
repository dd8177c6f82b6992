from __future__ import annotations

from types import ModuleType

import kernel_models as models
import pytest
import torch

from deltawire import kernels
from deltawire.kernels import Plan, grid, torch_ops


@pytest.mark.parametrize("tile", [1 << 16, 1 << 10])
def test_the_digest_equals_that_of_the_core(ops: ModuleType, device: torch.device, tile: int) -> None:
    tensors = models.odd_model(device)
    names = [f"layer.{i}" for i in range(len(tensors))]
    plan = models.cut_plan(tensors, tile, unit=2)
    found = kernels.state(ops.digest(plan, tensors, kernels.tile_keys(plan, names)))
    assert found == models.core_digest(names, tensors)


@pytest.mark.parametrize("tile", [1 << 16, 1 << 10])
def test_digest_moves_as_the_weights_do(ops: ModuleType, device: torch.device, tile: int) -> None:
    old = models.odd_model(device)
    new = models.moved(old, 0.02, 1)
    names = [f"layer.{i}" for i in range(len(old))]
    plan = models.cut_plan(old, tile)
    changed = torch_ops.detect(plan, old, new)
    moved = kernels.state(ops.digest_change(plan, changed, kernels.tile_keys(plan, names))[0])
    assert models.core_digest(names, old) + moved == models.core_digest(names, new)


def test_digest_moves_the_same_whatever_the_tiles(ops: ModuleType, device: torch.device) -> None:
    old = [models.random_tensor((30, 300), torch.float32, 5).to(device)]
    new = models.moved(old, 0.05, 6)
    plan = Plan(old, [grid(0, 0, 300, (30, 300), (3, 2))])
    changed = torch_ops.detect(plan, old, new)
    moved = kernels.state(ops.digest_change(plan, changed, kernels.tile_keys(plan, ["w"]))[0])
    assert models.core_digest(["w"], old) + moved == models.core_digest(["w"], new)


def test_public_digest(device: torch.device) -> None:
    tensors = models.odd_model(device)
    names = [str(i) for i in range(len(tensors))]
    assert kernels.digest(names, tensors) == models.core_digest(names, tensors)
    new = models.moved(tensors, 0.1, 2)
    moved = kernels.digest_change(names, tensors, kernels.detect(tensors, new))
    assert kernels.digest(names, tensors) + moved == kernels.digest(names, new)


def test_parts_of_tensors_count_as_in_their_tensors(ops: ModuleType, device: torch.device) -> None:
    """Pieces cut from larger tensors, by rows and by columns, each in a group of its own."""
    rows, columns = 48, 320
    for dtype in (torch.bfloat16, torch.float32):
        old = models.random_tensor((rows, columns), dtype, 5).to(device)
        new = models.moved([old], 0.05, 6)[0]
        corners = [(0, 16, 0, columns), (16, 32, 0, 100), (16, 32, 100, 220)]
        pieces = [
            [t[r : r + n, c : c + m].contiguous() for r, n, c, m in corners]
            for t in (old, new)
        ]  # fmt: skip
        plan = models.cut_plan(pieces[0], 1 << 10)
        changed = torch_ops.detect(plan, *pieces)
        table = [[r * columns + c, m, columns, group] for group, (r, _, c, m) in enumerate(corners)]
        origins = kernels.Origins(torch.tensor(table, device=device)[torch.from_numpy(plan.tensor)], len(corners))
        moved = ops.digest_change(plan, changed, kernels.tile_keys(plan, ["w"] * len(corners)), origins)
        assert models.core_digest(["w"], [old]) + kernels.state(moved.sum(0)) == models.core_digest(["w"], [new])
        assert [bool(lanes.any()) for lanes in moved] == [True] * len(corners)
