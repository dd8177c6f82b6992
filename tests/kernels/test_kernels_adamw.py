"""The AdamW step and its log: torch's own update within rounding, and exactly the elements whose bf16 changed."""

from __future__ import annotations

import copy
from types import ModuleType

import numpy as np
import pytest
import torch

from deltawire.kernels import adamw
from deltawire.trainer import DeltaAdamW

SHAPES = [(70_000,), (130, 257), (1,), (64, 64), (3, 5)]

# torch takes 1 − beta in single precision on a GPU, as the kernel does, and in double precision on a CPU
BETAS = ((0.9, 0.999), (0.8, 0.95)) if torch.cuda.is_available() else ((0.875, 0.99609375), (0.75, 0.9375))


def parameters(device: torch.device, dtype: torch.dtype, seed: int = 0) -> list[torch.nn.Parameter]:
    random = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter((torch.randn(s, generator=random) * 0.02).to(device, dtype)) for s in SHAPES]


def give_gradients(lists: list[list[torch.nn.Parameter]], seed: int, scale: float = 1.0) -> None:
    random = torch.Generator().manual_seed(seed)
    for same in zip(*lists, strict=True):
        gradient = torch.randn(same[0].shape, generator=random) * 0.01
        for p in same:
            p.grad = (gradient * scale).to(p.device, p.dtype)


def groups(params: list[torch.nn.Parameter]) -> list[dict[str, object]]:
    return [
        {"params": params[:2], "lr": 1e-4, "betas": BETAS[0], "weight_decay": 0.1},
        {"params": params[2:], "lr": 1e-3, "betas": BETAS[1], "maximize": True, "weight_decay": 0.0},
    ]


@pytest.fixture(autouse=True)
def chosen(ops: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltawire.kernels.operations", lambda device: ops)


def bits(params: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    return [p.detach().bfloat16().view(torch.int16).reshape(-1).clone() for p in params]


def test_each_step_is_torchs_within_rounding(device: torch.device) -> None:
    """From the same state each time, so that what is compared is a step and not the sum of many."""
    mine, theirs = parameters(device, torch.float32), parameters(device, torch.float32)
    ours = DeltaAdamW(groups(mine))
    reference = torch.optim.AdamW(groups(theirs), fused=True)
    ours._follow()
    for step in range(3):
        for optimizer in (ours, reference):
            optimizer.param_groups[0]["lr"] = 1e-4 / (step + 1)
        give_gradients([mine, theirs], step)
        ours.step()
        reference.step()
        for a, b in zip(mine, theirs, strict=True):
            # rounding is relative to the larger of the parameter and its step
            lr = max(group["lr"] for group in ours.param_groups)
            assert bool(((a - b).abs() <= 2.0**-22 * (b.abs() + lr)).all())
            # and to the larger of a moment and what is added to it, which may cancel each other
            for name, added in (("exp_avg", b.grad.abs()), ("exp_avg_sq", b.grad**2)):
                found, expected = ours.state[a][name], reference.state[b][name]
                assert bool(((found - expected).abs() <= 5e-7 * (expected.abs() + added)).all())
        assert ours.state_dict()["state"].keys() == reference.state_dict()["state"].keys()
        ours.load_state_dict(copy.deepcopy(reference.state_dict()))
        with torch.no_grad():
            for a, b in zip(mine, theirs, strict=True):
                a.copy_(b)


# the interpreter walks changed bits one by one: ten seconds a case, so one of them is an everyday test
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("spare", [32, pytest.param(10**9, marks=pytest.mark.slow)])
def test_the_log_is_exact(
    device: torch.device, dtype: torch.dtype, spare: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over several steps, whatever room it starts with."""
    monkeypatch.setattr(adamw, "SPARE", spare)
    if device.type == "cpu":
        from deltawire.kernels import triton_ops

        # two blocks per tile: one may find room in the log where the other does not
        monkeypatch.setitem(vars(triton_ops), "ADAMW", {**triton_ops.ADAMW, "WORDS": 1024})
    mine = parameters(device, dtype)
    optimizer = DeltaAdamW(groups(mine))
    optimizer._follow()
    log, elements = optimizer._log, optimizer._cut()
    assert log is not None
    from deltawire import kernels

    for publish, steps in enumerate((2, 1)):
        before = bits(mine)
        for step in range(steps):
            give_gradients([mine], 10 * publish + step)
            optimizer.step()
        found = adamw.changes(elements, adamw.noted(elements, mine, log, kernels.operations(device)))
        after = bits(mine)
        starts = found.starts.cpu().numpy()
        for number, (old, new) in enumerate(zip(before, after, strict=True)):
            first, last = elements.first_tile[number : number + 2]
            here = slice(int(starts[first]), int(starts[last]))
            edges = starts[first : last + 1] - starts[first]
            positions = found.positions[here].cpu().numpy()
            at = adamw.to_flat(edges, positions, 0)
            expected = torch.nonzero(old != new).view(-1).cpu().numpy()
            assert np.array_equal(at, expected)
            assert np.array_equal(found.old[here].cpu().view(torch.int16).numpy(), old.cpu().numpy()[expected])
            assert np.array_equal(found.new[here].cpu().view(torch.int16).numpy(), new.cpu().numpy()[expected])
        assert found.count > 0
        optimizer._follow()


def test_scaled_gradients_and_steps_that_are_skipped(device: torch.device) -> None:
    mine, theirs = parameters(device, torch.float32), parameters(device, torch.float32)
    ours, reference = DeltaAdamW(groups(mine)), torch.optim.AdamW(groups(theirs), fused=True)
    ours._follow()
    for step, inf in enumerate((0.0, 1.0, 0.0)):
        give_gradients([mine, theirs], step, scale=1024.0)
        for optimizer in (ours, reference):
            optimizer.grad_scale = torch.tensor(1024.0, device=device)
            optimizer.found_inf = torch.tensor(inf, device=device)
        before = bits(mine)
        ours.step()
        reference.step()
        if inf:
            assert all(torch.equal(a, b) for a, b in zip(before, bits(mine), strict=True))
        for a, b in zip(mine, theirs, strict=True):
            assert torch.allclose(a, b, rtol=1e-6, atol=1e-9)
            assert torch.equal(ours.state[a]["step"], reference.state[b]["step"])


def test_parameters_without_a_gradient_stay(device: torch.device) -> None:
    mine = parameters(device, torch.float32)
    optimizer = DeltaAdamW(mine, lr=1e-2)
    optimizer._follow()
    give_gradients([mine], 1)
    mine[1].grad = None
    before = bits(mine)
    optimizer.step()
    after = bits(mine)
    assert torch.equal(before[1], after[1])
    assert not torch.equal(before[0], after[0])
    assert mine[1] not in optimizer.state


def test_a_gradient_scaler_of_torchs(device: torch.device) -> None:
    mine = parameters(device, torch.float32)
    optimizer = DeltaAdamW(mine, lr=1e-2)
    scaler = torch.amp.GradScaler(device.type, init_scale=256.0)
    for inf in (False, True, False):
        before = bits(mine)
        optimizer.zero_grad()
        loss = sum((p * p).sum() for p in mine) * (float("inf") if inf else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        moved = not all(torch.equal(a, b) for a, b in zip(before, bits(mine), strict=True))
        assert moved != inf


def test_what_it_does_not_do_is_refused(device: torch.device) -> None:
    params = parameters(device, torch.float32)
    for wrong in ({"amsgrad": True}, {"foreach": True}, {"fused": False}, {"capturable": True}):
        with pytest.raises(ValueError, match="DeltaAdamW has one way"):
            DeltaAdamW(params, **wrong)
    with pytest.raises(TypeError, match="no option 'momentum'"):
        DeltaAdamW(params, momentum=0)
    mixed = [params[0], torch.nn.Parameter(params[1].detach().double())]
    for p in mixed:
        p.grad = torch.zeros_like(p)
    with pytest.raises(ValueError, match="all fp32 or all bf16"):
        DeltaAdamW(mixed).step()
