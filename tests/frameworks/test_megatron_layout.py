"""How Megatron's add-on finds rectangles in what Bridge makes of numbers. With a real Megatron: megatron/live.py."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor

from deltawire.frameworks import megatron
from deltawire.frameworks.megatron import _code, _places, _rectangles

RANK, OTHER = 3, 4

SHAPE = (6, 8)
Arrange = Callable[[list[Tensor], Tensor], Tensor]


def heads(parts: list[Tensor], _: Tensor) -> Tensor:
    """The queries of four groups of two heads, which lie between keys and values."""
    return parts[0].view(4, 4, 2, 8)[:, :2].reshape(-1, 8)


ARRANGED: dict[str, tuple[list[tuple[int, ...]], Arrange, int]] = {
    "as it is": ([SHAPE], lambda parts, _: parts[0], 1),
    "one dimension": ([(7,)], lambda parts, _: parts[0], 1),
    "one element": ([(1,)], lambda parts, _: parts[0], 1),
    "a number": ([()], lambda parts, _: parts[0], 1),
    "rows, another rank's below": ([SHAPE], lambda parts, other: torch.cat([parts[0], other]), 1),
    "columns, another rank's beside": ([SHAPE], lambda parts, other: torch.cat([other, parts[0]], 1), 1),
    "half of the rows": ([SHAPE], lambda parts, other: torch.cat([parts[0][3:], other]), 1),
    "rows between others": ([(32, 8)], heads, 4),
    "elements of a bias": ([(32,)], lambda parts, _: parts[0].view(4, 4, 2)[:, :2].reshape(-1), 4),
    "transposed": ([SHAPE], lambda parts, _: parts[0].T, 1),
    "experts in one tensor": ([SHAPE, SHAPE], lambda parts, other: torch.stack([*parts, other]), 2),
    "experts, transposed": ([SHAPE, SHAPE], lambda parts, other: torch.stack([other, *parts]).mT, 2),
    "columns of experts": ([SHAPE] * 2, lambda parts, other: torch.stack([torch.cat([p, other], 1) for p in parts]), 2),
    "a convolution": ([(6, 1, 4)], lambda parts, _: parts[0][[0, 1, 4, 5, 2, 3]], 3),
    "two parameters of one element": ([(1,), (1,)], lambda parts, _: torch.cat(parts), 2),
    "backwards": ([(5, 2)], lambda parts, _: parts[0].flip(0), 5),
}  # fmt: skip


def found(tensor: Tensor, starts: list[int], memory: Tensor) -> tuple[int, Tensor]:
    """Write what rectangles say back into a tensor. Returns their number, and the tensor, -1 where nothing is."""
    made, count = torch.full(tensor.shape, -1), 0
    for source, first, *rectangle in _rectangles(tensor, RANK, starts):
        assert starts[source] <= first < starts[source + 1]
        for where, offset, size, stride in _places(tuple(tensor.shape), *rectangle):
            view = memory.as_strided(size, stride, first + offset)
            if isinstance(where, range):
                made.view(-1)[where.start : where.stop] = view
            else:
                made[where] = view
            count += 1
    return count, made


@pytest.mark.parametrize("chunk", [megatron.CHUNK, 16])
@pytest.mark.parametrize("how", ARRANGED)
def test_rectangles_are_exactly_what_is_of_this_rank(how: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron, "CHUNK", chunk)
    shapes, arrange, rectangles = ARRANGED[how]
    parts = [torch.empty(shape) for shape in shapes]
    starts = [0, *accumulate(part.numel() for part in parts)]
    numbers = [torch.arange(*ends).view(p.shape) for ends, p in zip(pairwise(starts), parts, strict=True)]
    of_another = torch.arange(48).view(SHAPE)
    codes = arrange([_code(n, torch.tensor(RANK)) for n in numbers], _code(of_another, torch.tensor(OTHER)))
    expected = arrange(numbers, torch.full(SHAPE, -1))
    count, made = found(codes, starts, torch.arange(starts[-1]))
    assert torch.equal(made, expected)
    assert count == rectangles


@pytest.mark.parametrize(
    "computed",
    [lambda codes: codes + 1, lambda codes: -codes, lambda codes: codes * 2, torch.Tensor.float, torch.zeros_like],
)
def test_what_is_computed_is_no_rectangle(computed: Callable[[Tensor], Tensor]) -> None:
    for size in (1, 4096):
        codes = _code(torch.arange(1, size + 1), torch.tensor(RANK))
        with pytest.raises(ValueError, match=r".*"):
            list(_rectangles(computed(codes), RANK, [0, size + 1]))


def test_numbers_and_ranks_are_read_back() -> None:
    numbers = torch.tensor([0, 1, 12345, (1 << 36) - 1])
    for rank in (0, 1, (1 << 14) - 1):
        codes = _code(numbers, torch.tensor(rank))
        assert (codes >= 0).all()
        number, owner = megatron._decoded(codes)
        assert torch.equal(number, numbers)
        assert owner.tolist() == [rank] * 4
