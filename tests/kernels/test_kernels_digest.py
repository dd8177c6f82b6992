from __future__ import annotations

from types import ModuleType

import kernel_models as models
import pytest
import torch

from deltawire import kernels
from deltawire.kernels import Plan, flat_plan, grid, torch_ops


@pytest.mark.parametrize("tile", [1 << 16, 1 << 10])
def test_digest_is_the_core_s(ops: ModuleType, device: torch.device, tile: int) -> None:
    tensors = models.odd_model(device)
    names = [f"layer.{i}" for i in range(len(tensors))]
    plan = flat_plan(tensors, tile, unit=2)
    found = kernels._state(ops.digest(plan, tensors, kernels._keys(plan, names)))
    assert found == models.core_digest(names, tensors)


@pytest.mark.parametrize("tile", [1 << 16, 1 << 10])
def test_digest_moves_as_the_weights_do(ops: ModuleType, device: torch.device, tile: int) -> None:
    old = models.odd_model(device)
    new = models.moved(old, 0.02, 1)
    names = [f"layer.{i}" for i in range(len(old))]
    plan = flat_plan(old, tile)
    changed = torch_ops.detect(plan, old, new)
    moved = kernels._state(ops.digest_change(plan, changed, kernels._keys(plan, names)))
    assert models.core_digest(names, old) + moved == models.core_digest(names, new)


def test_digest_moves_the_same_whatever_the_tiles(ops: ModuleType, device: torch.device) -> None:
    old = [models.random_tensor((30, 300), torch.float32, 5).to(device)]
    new = models.moved(old, 0.05, 6)
    plan = Plan(old, [grid(0, 0, 300, (30, 300), (3, 2))])
    changed = torch_ops.detect(plan, old, new)
    moved = kernels._state(ops.digest_change(plan, changed, kernels._keys(plan, ["w"])))
    assert models.core_digest(["w"], old) + moved == models.core_digest(["w"], new)


def test_public_digest(device: torch.device) -> None:
    tensors = models.odd_model(device)
    names = [str(i) for i in range(len(tensors))]
    assert kernels.digest(names, tensors) == models.core_digest(names, tensors)
    new = models.moved(tensors, 0.1, 2)
    moved = kernels.digest_change(names, tensors, kernels.detect(tensors, new))
    assert kernels.digest(names, tensors) + moved == kernels.digest(names, new)
