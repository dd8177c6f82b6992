"""examples/tree_attention.py against attention over each sequence alone."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import tree_attention

HEADS, GROUPS, SIZE = 4, 2, 16
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
Batch = tuple[Tensor, Tensor, Tensor, int]


def tree(seed: int) -> Batch:
    """A random forest as TRL describes it: segments depth first, each with the path from its root."""
    dice = random.Random(seed)
    index: list[int] = []
    cu_q, cu_k = [0], [0]

    def grow(path: list[int], depth: int) -> None:
        own = list(range(cu_q[-1], cu_q[-1] + dice.randint(1, 9)))
        cu_q.append(own[-1] + 1)
        index.extend([*path, *own])
        cu_k.append(len(index))
        for _ in range(dice.randint(2, 4) if depth else 0):
            grow([*path, *own], dice.randrange(depth))

    for _ in range(dice.randint(1, 3)):
        grow([], dice.randint(0, 3))
    boundaries = (torch.tensor(cu, dtype=torch.int32) for cu in (cu_q, cu_k))
    return torch.tensor(index), *boundaries, cu_q[-1]


def segment_by_segment(query: Tensor, key: Tensor, value: Tensor, index: Tensor, cu_q: Tensor, cu_k: Tensor) -> Tensor:
    """What FlashAttention 3 computes for TRL."""
    key, value = (t.index_select(2, index).repeat_interleave(GROUPS, 1) for t in (key, value))
    outputs = []
    queries, keys = cu_q.tolist(), cu_k.tolist()
    for q0, q1, k0, k1 in zip(queries, queries[1:], keys, keys[1:], strict=False):
        mask = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool, device=query.device).tril((k1 - k0) - (q1 - q0))
        at = slice(q0, q1), slice(k0, k1)
        outputs.append(
            scaled_dot_product_attention(
                query[:, :, at[0]], key[:, :, at[1]], value[:, :, at[1]], attn_mask=mask, scale=0.2
            )
        )
    return torch.cat(outputs, 2).transpose(1, 2)


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("device", DEVICES)
def test_the_same_as_segment_by_segment(device: str, seed: int, dtype: torch.dtype, near: float) -> None:
    *described, packed = tree(seed)
    index, cu_q, cu_k = (tensor.to(device) for tensor in described)
    made = torch.Generator().manual_seed(seed)
    shapes = [(1, heads, packed, SIZE) for heads in (HEADS, HEADS // GROUPS, HEADS // GROUPS)]
    tensors = [torch.randn(shape, generator=made).to(device, dtype).requires_grad_() for shape in shapes]
    wanted = torch.randn((1, packed, HEADS, SIZE), generator=made).to(device)

    ours, _ = tree_attention.tree_attention(
        torch.nn.Identity(), *tensors, None,
        tree_kv_index=index, tree_cu_seqlens_q=cu_q, tree_cu_seqlens_k=cu_k,
        tree_max_seqlen_q=9, tree_max_seqlen_k=9, scaling=0.2,
    )  # fmt: skip
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    theirs = segment_by_segment(*exact, index, cu_q, cu_k)
    torch.testing.assert_close(ours.double(), theirs, atol=near, rtol=near)
    (ours.float() * wanted).sum().backward()
    (theirs * wanted).sum().backward()
    for one, other in zip(tensors, exact, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        scale = other.grad.abs().max().item()
        torch.testing.assert_close(one.grad.double(), other.grad, atol=near * scale, rtol=near)


def test_what_it_does_not_compute() -> None:
    index, cu_q, cu_k, packed = tree(0)
    tensor = torch.zeros(1, 1, packed, SIZE)
    with pytest.raises(ValueError, match="--attention flash"):
        tree_attention.tree_attention(
            torch.nn.Identity(), tensor, tensor, tensor, None,
            tree_kv_index=index, tree_cu_seqlens_q=cu_q, tree_cu_seqlens_k=cu_k, sliding_window=8,
        )  # fmt: skip
