from __future__ import annotations

from types import ModuleType

import kernel_models as models
import numpy as np
import pytest
import torch
from torch import Tensor

from deltawire.core.codecs.context.classes import CLASSES
from deltawire.kernels import ClassRanks, ClassRules, Plan, grid, pace, rules, torch_ops

EXPONENT = {torch.bfloat16: (7, 255), torch.float32: (23, 255), torch.float8_e4m3fn: (3, 15), torch.uint8: (0, 0)}


class Case:
    """Two small models, a plan with tiles of several shapes, and rules."""

    def __init__(self, device: torch.device, dtype: torch.dtype, leveled: bool, density: float = 0.03) -> None:
        rng = torch.Generator().manual_seed(3)
        shapes = [(40, 300), (1, 700), (20, 256)]
        tensors = [torch.randn(s, generator=rng) * 0.02 for s in shapes]
        if dtype == torch.uint8:
            tensors = [(t * 1000).to(torch.int32).to(torch.uint8) for t in tensors]
        self.old = [t.to(dtype).to(device) for t in tensors]
        self.new = models.moved(self.old, density, 4)
        self.plan = Plan(
            self.old,
            [
                grid(0, 0, 300, (40, 300), (2, 2)),
                grid(1, 0, 700, (1, 700), (1, 1)),
                # a rectangle inside a tensor
                grid(2, 3 * 256 + 128, 256, (16, 128), (2, 1)),
            ],
        )
        shift, mask = EXPONENT[dtype]
        top, span = (min(122, mask - 3), 6) if mask else (0, 1)
        # as the codec does: without levels the offset takes back that every row and column is neutral
        offset = (top if leveled else top - 4) % 256
        classes = span + 1 + (9 if leveled else 0)
        random = np.random.default_rng(5)
        levels = [
            (random.integers(0, 6, s.rows).astype(np.uint8), random.integers(0, 5, s.columns).astype(np.uint8))
            for s in self.plan.segments
        ]
        levels[1] = (None, None)  # type: ignore[call-overload]
        if leveled:
            self._keep_dead_rows(levels)
        row = [shift, mask, top - span + 1, top, offset, classes]
        self.levels = levels if leveled else [(None, None)] * 3
        self.row = row
        self.rules: ClassRules = rules(self.plan, [row] * 3, levels if leveled else None)

    def _keep_dead_rows(self, levels: list[tuple[np.ndarray | None, np.ndarray | None]]) -> None:
        """A row of level 0 is one that did not change."""
        for segment, (rows, _) in zip(self.plan.segments, levels, strict=True):
            flat = [t[segment.tensor].view(-1) for t in (self.old, self.new)]
            for row in np.flatnonzero(rows == 0) if rows is not None else ():
                start = segment.offset + int(row) * segment.stride
                flat[1][start : start + segment.columns] = flat[0][start : start + segment.columns]

    def tile_classes(self) -> list[np.ndarray]:
        """Classes of every tile's units, row by row, one at a time and by the book."""
        shift, mask, low, top, offset, classes = self.row
        result = []
        for number, segment in enumerate(self.plan.segments):
            bits = models.bits(self.old[segment.tensor])
            row_levels, column_levels = self.levels[number]
            for r0, r1 in zip(segment.row_cuts, segment.row_cuts[1:], strict=False):
                for c0, c1 in zip(segment.column_cuts, segment.column_cuts[1:], strict=False):
                    tile = []
                    for r in range(r0, r1):
                        for c in range(c0, c1):
                            exponent = int(bits[segment.offset + r * segment.stride + c]) >> shift & mask
                            row = 3 if row_levels is None else int(row_levels[r])
                            column = 2 if column_levels is None else int(column_levels[c])
                            cls = (offset - min(max(exponent, low), top) + row + column) % 256
                            tile.append(min(cls, classes - 1) if row else 0)
                    result.append(np.array(tile))
        return result


DTYPES = (torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.uint8)
EVERYDAY = ((torch.bfloat16, False), (torch.bfloat16, True), (torch.float32, False), (torch.float8_e4m3fn, True))
"""The interpreter takes a second for each: every width of a unit, with levels and without."""
every_kind = pytest.mark.parametrize(
    "dtype, leveled",
    [
        pytest.param(dtype, leveled, marks=() if (dtype, leveled) in EVERYDAY else pytest.mark.slow)
        for dtype in DTYPES
        for leveled in (False, True)
    ],
)


@every_kind
def test_counts_ranks_and_steps_equal_a_plain_loop(
    ops: ModuleType, device: torch.device, dtype: torch.dtype, leveled: bool
) -> None:
    case = Case(device, dtype, leveled)
    changed = torch_ops.detect(case.plan, case.old, case.new)
    found: ClassRanks = ops.class_ranks(case.plan, case.old, case.rules, changed)
    assert torch.equal(ops.class_counts(case.plan, case.old, case.rules), found.sizes)
    starts = changed.starts.tolist()
    for tile, classes in enumerate(case.tile_classes()):
        sizes = np.bincount(classes, minlength=CLASSES)
        sizes[0] = 0
        assert np.array_equal(found.sizes[tile].cpu().numpy(), sizes)
        positions = changed.positions[starts[tile] : starts[tile + 1]].cpu().numpy()
        expected = []
        for cls in range(CLASSES):
            mine = positions[classes[positions] == cls]
            assert found.counts[tile, cls] == len(mine)
            expected += [int((classes[:p] == cls).sum()) for p in mine]
        assert found.ranks[starts[tile] : starts[tile + 1]].tolist() == expected
    assert models.equal(found, torch_ops.class_ranks(case.plan, case.old, case.rules, changed))


@every_kind
def test_place_inverts_ranks(ops: ModuleType, device: torch.device, dtype: torch.dtype, leveled: bool) -> None:
    assert_placed(ops, Case(device, dtype, leveled))


def test_place_inverts_the_ranks_of_all_weights(ops: ModuleType, device: torch.device) -> None:
    assert_placed(ops, Case(device, torch.bfloat16, False, 1.0))


def test_large_tiles_without_levels_are_read_with_neutral_ones(ops: ModuleType, device: torch.device) -> None:
    case = Case(device, torch.bfloat16, False)
    # as where a tile has more units than two bytes count
    case.plan.__dict__["position_dtype"] = torch.uint32
    changed = torch_ops.detect(case.plan, case.old, case.new)
    found = ops.class_ranks(case.plan, case.old, case.rules, changed)
    assert models.equal(found, torch_ops.class_ranks(case.plan, case.old, case.rules, changed))
    assert torch.equal(ops.class_counts(case.plan, case.old, case.rules), found.sizes)
    assert_placed(ops, case)


def assert_placed(ops: ModuleType, case: Case) -> None:
    changed = torch_ops.detect(case.plan, case.old, case.new)
    ranks: ClassRanks = torch_ops.class_ranks(case.plan, case.old, case.rules, changed)
    expected = torch_ops.place(case.plan, case.old, case.rules, ranks.counts, ranks.ranks, ranks.steps)
    # the change takes the memory of ranks and steps
    placed = ops.place(case.plan, case.old, case.rules, ranks.counts, ranks.ranks.clone(), ranks.steps.clone())
    assert models.equal(placed, expected)
    one, two = models.clones(case.old), models.clones(case.old)
    torch_ops.prepare_apply(case.plan, one, placed)()
    torch_ops.prepare_apply(case.plan, two, changed)()
    assert models.same(one, two)


def test_steps_reach_every_bit_pattern(ops: ModuleType, device: torch.device) -> None:
    special = torch.tensor([0, -(1 << 15), 0x7F80, 0x7FFF, -1, 1, 0x3F80, -0x4080], dtype=torch.int16)
    old = [special.repeat_interleave(8).view(torch.bfloat16).to(device)]
    new = [special.repeat(8).view(torch.bfloat16).to(device)]
    plan = Plan(old, [grid(0, 0, 64, (1, 64), (1, 1))])
    rule = rules(plan, [[7, 255, 120, 130, 126, 12]])
    changed = torch_ops.detect(plan, old, new)
    ranks = ops.class_ranks(plan, old, rule, changed)
    assert models.equal(ranks, torch_ops.class_ranks(plan, old, rule, changed))
    placed = ops.place(plan, old, rule, ranks.counts, ranks.ranks, ranks.steps)
    ops.prepare_apply(plan, old, placed)()
    assert models.same(old, new)


def test_a_rank_past_its_class_is_refused(ops: ModuleType, device: torch.device) -> None:
    case = Case(device, torch.bfloat16, False)
    before = models.clones(case.old)
    changed = torch_ops.detect(case.plan, case.old, case.new)
    ranks = torch_ops.class_ranks(case.plan, case.old, case.rules, changed)
    lie = ranks.ranks.clone()
    lie.view(torch.int16)[5] = -1
    with pytest.raises(ValueError, match="past their class"):
        ops.place(case.plan, case.old, case.rules, ranks.counts, lie.clone(), ranks.steps.clone())
    with pytest.raises(ValueError, match="counts say"):
        ops.place(case.plan, case.old, case.rules, ranks.counts, lie[1:], ranks.steps)
    counts: Tensor = ranks.counts.clone()
    # as many as before, but in a class that no weight is in
    counts[0, CLASSES - 1], counts[0, 1:7] = counts[0].sum(), 0
    with pytest.raises(ValueError, match="past their class"):
        ops.place(case.plan, case.old, case.rules, counts, ranks.ranks, ranks.steps)
    assert models.same(case.old, before)


def test_work_beside_a_model_comes_in_parts(
    ops: ModuleType, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tiles at a time, with a wait after each part: the same results. torch's own kernels are not cut."""
    monkeypatch.setattr(pace, "TURN", 2)
    case = Case(device, torch.bfloat16, True)
    changed = torch_ops.detect(case.plan, case.old, case.new)
    ranks = torch_ops.class_ranks(case.plan, case.old, case.rules, changed)
    expected = torch_ops.place(case.plan, case.old, case.rules, ranks.counts, ranks.ranks, ranks.steps)
    waits: list[int] = []
    with pace.gently(lambda: waits.append(1)):
        sizes = ops.class_counts(case.plan, case.old, case.rules)
        placed = ops.place(case.plan, case.old, case.rules, ranks.counts, ranks.ranks, ranks.steps)
    assert torch.equal(sizes, ranks.sizes)
    assert models.equal(placed, expected)
    counts = [launch.count for launch in case.plan.launches(case.old)]
    parts = sum(-(-count // 2) + -(-count // 8) for count in counts)
    assert len(waits) == (parts if ops is not torch_ops else 0)
