"""Classes, ranks and places on a device are those of the `context` codec on the host."""

from __future__ import annotations

from itertools import product
from types import ModuleType

import numpy as np
import pytest
import torch
from kernel_models import bits, random_tensor

from deltawire.core.codecs.context.classes import CHUNK, CLASSES, SPARE, Rule, classify_tile, place_tile, rank_tile
from deltawire.core.codecs.context.tiles import Matrix, grid_of, padded
from deltawire.core.ulps import take_steps, zigzags_of
from deltawire.kernels import (
    Origins,
    Plan,
    apply,
    class_counts,
    digest_change_by_group,
    grid,
    place,
    rehearse,
    rules,
    torch_ops,
)


@pytest.mark.parametrize(
    "shape, leveled",
    [
        ((64, 512), True),
        ((40, 130), False),
        ((1, 5000), False),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (((64, 512), False), ((40, 130), True), ((1, 5000), True))
        ),
    ],
)
def test_ranks_equal_those_of_the_codec(
    ops: ModuleType, device: torch.device, shape: tuple[int, int], leveled: bool
) -> None:
    rows, columns = shape
    old = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 0.02).to(torch.bfloat16)
    changed_rows = torch.arange(rows) % 5 != 1
    flips = (random_tensor((rows * columns,), torch.uint8, 2).reshape(shape) < 8) & changed_rows[:, None]
    new = torch.where(flips, old.view(torch.int16) + 1, old.view(torch.int16)).view(torch.bfloat16)
    random = np.random.default_rng(3)
    levels = random.integers(1, 6, rows).astype(np.uint8), random.integers(0, 5, columns).astype(np.uint8)
    # only rows that did not change may have level 0
    levels[0][~changed_rows.numpy()] = 0
    rule = Rule(123, 9, leveled, 7, 255).table(19 if leveled else 10)
    tiles = grid_of(rows, columns, 4096)

    plan = Plan([old.to(device)], [grid(0, 0, columns, shape, tiles)])
    rule_set = rules(plan, [rule], [levels] if leveled else None)
    changed = torch_ops.detect(plan, [old.to(device)], [new.to(device)])
    found = ops.class_ranks(plan, [old.to(device)], rule_set, changed)

    matrix = Matrix.over(bits(old).reshape(shape))
    row_levels, column_levels = padded(*(levels if leveled else (None, None)), shape)
    positions = np.flatnonzero(bits(old) != bits(new)).astype(np.uint32)
    cursor = np.searchsorted(positions, np.arange(rows) * columns)
    segment, starts = plan.segments[0], changed.starts.tolist()
    placed = ops.place(plan, [old.to(device)], rule_set, found.counts, found.ranks.clone(), found.steps.clone())
    for tile in range(plan.tiles):
        i, j = divmod(tile, tiles[1])
        r0, r1 = (int(v) for v in segment.row_cuts[i : i + 2])
        c0, c1 = (int(v) for v in segment.column_cuts[j : j + 2])
        across = -(-(c1 - c0) // CHUNK)
        used = (r1 - r0) * across
        cls, hist = np.empty(used * CHUNK + SPARE, np.uint8), np.zeros((used, CLASSES), np.uint8)
        n, k = np.zeros(CLASSES, np.int64), np.zeros(CLASSES, np.int64)
        classify_tile(
            matrix.units, matrix.size, matrix.stride, rule, row_levels, column_levels, r0, r1, c0, c1, cls, hist, n
        )
        ranks, source = np.empty(positions.size, np.uint32), np.empty(positions.size, np.uint32)
        scratch = np.empty((3, positions.size), np.uint32)
        count = rank_tile(rule[5], r0, r1, c0, c1, columns, cls, hist, positions, cursor, k, scratch, ranks, source)
        here = slice(starts[tile], starts[tile + 1])
        assert np.array_equal(found.sizes[tile].cpu().numpy(), n)
        assert np.array_equal(found.counts[tile].cpu().numpy(), k)
        assert np.array_equal(found.ranks[here].cpu().numpy(), ranks[:count])
        rows_, columns_, which = (np.empty(count, np.uint32) for _ in range(3))
        fill = np.zeros(used + 1, np.int64)
        place_tile(rule[5], r0, c0, across, used, cls, hist, k, ranks[:count], fill, rows_, columns_, which)
        expected = np.empty(count, np.int64)
        expected[which] = (rows_.astype(np.int64) - r0) * (c1 - c0) + columns_ - c0
        assert np.array_equal(placed.positions[here].cpu().numpy(), expected)


@pytest.mark.parametrize("step", [1, -3, -0x8000, *(pytest.param(n, marks=pytest.mark.slow) for n in (-1, 2, 0x4000))])
def test_steps_equal_those_of_the_core(ops: ModuleType, device: torch.device, step: int) -> None:
    old = random_tensor((1024,), torch.int16, 5).view(torch.bfloat16)
    bits_before = bits(old)
    # steps are counted along the numbers, so go there by way of the core's own step
    zigzag = np.full(old.numel(), 2 * step - 2 if step > 0 else -2 * step - 1, np.uint32)
    zigzag = np.minimum(zigzag, 0xFFFE)
    bits_after = np.empty_like(bits_before)
    take_steps(zigzag, bits_before, True, bits_after)
    new = torch.from_numpy(bits_after.view(np.int16)).view(torch.bfloat16)
    plan = Plan([old.to(device)], [grid(0, 0, 1024, (1, 1024), (1, 1))])
    rule_set = rules(plan, [Rule(123, 9, False, 7, 255).table(10)])
    changed = torch_ops.detect(plan, [old.to(device)], [new.to(device)])
    found = ops.class_ranks(plan, [old.to(device)], rule_set, changed)
    expected = np.empty(old.numel(), np.uint32)
    zigzags_of(bits_before, bits_after, True, expected)
    assert np.array_equal(np.unique(found.steps.cpu().numpy().view(np.uint16)), np.unique(expected).astype(np.uint16))
    placed = ops.place(plan, [old.to(device)], rule_set, found.counts, found.ranks.clone(), found.steps.clone())
    reached = np.empty_like(bits_after)
    reached[placed.positions.cpu().numpy().astype(np.int64)] = (
        placed.new.cpu().view(torch.int16).numpy().view(np.uint16)
    )
    assert np.array_equal(reached, bits_after)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU compiles")
def test_no_delta_makes_a_device_compile_after_a_rehearsal(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    compiled: list[object] = []
    shapes = [(64, 1024), (1, 1024), (30, 128), (64, 512), (8, 64)]
    dtypes = [torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.uint8, torch.float32]
    tensors = [torch.zeros(shape, dtype=dtype, device="cuda") for shape, dtype in zip(shapes, dtypes, strict=True)]
    rehearse((1, 2, 4), torch.device("cuda"))
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **call: compiled.append(call["repr"]))
    for classes, some in product(range(2, CLASSES + 1), ((0, 2), (3,), (4,))):
        for tiles, leveled in ((1, False), (7, True), (16, True), (17, False)):
            plan = Plan(tensors, [grid(n, 0, shapes[n][1], shapes[n], (min(tiles, shapes[n][0]), 1)) for n in some])
            levels = [(np.full(s.rows, 3, np.uint8), np.full(s.columns, 2, np.uint8)) for s in plan.segments]
            found = rules(plan, [[0, 0, 0, 0, 252, classes]] * len(some), levels if leveled else None)
            counts = torch.zeros_like(class_counts(tensors, plan, found))
            counts[-1, 1] = 1
            one = (torch.zeros(1, dtype=d, device="cuda") for d in (plan.position_dtype, plan.value_dtype))
            changed = place(tensors, plan, found, counts, *one)
            assert changed.positions.tolist() == [0]
            origins = Origins(torch.ones((plan.tiles, 4), dtype=torch.int64, device="cuda"), 2)
            digest_change_by_group([str(n) for n in range(len(tensors))], changed, origins, plan=plan)
            apply(tensors, changed, plan=plan)
    assert not compiled
