"""Tokens that several sequences share are computed once: the attention of such a batch, in plain torch.

TRL 1.16 packs the games of a batch into a tree, in which a shared prompt is there once, and has only FlashAttention 3
to run it. `let_trl_run` gives it this one where that is missing. `wordle_start.py` uses it for its one prompt.

Exact on every device and in every dtype: each sequence is laid out as a row of a padded batch, so that torch's own
causal attention runs over all rows at once, forward and backward, with whichever kernel it has for them.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

SHARED = "shared_tokens"
"""The attention's name in transformers: `model.set_attn_implementation(SHARED)`, then `model(…, tree=Tree(…))`."""


class Tree(NamedTuple):
    """Which packed tokens each sequence has."""

    rows: Tensor
    """[sequences, longest]: the packed position of each token of each sequence; behind its end anything."""
    places: Tensor
    """[packed tokens]: an entry of the flattened rows that is this token; its output is read there."""


def tree_of(rows: Tensor, inside: Tensor, packed: int) -> Tree:
    """`inside` says which entries of `rows` are tokens and not behind the end of a sequence."""
    rows = rows.masked_fill(~inside, 0)
    entries = torch.arange(rows.numel(), device=rows.device).view_as(rows)
    places = entries.new_full((packed,), rows.numel())
    return Tree(rows, places.scatter_reduce(0, rows[inside], entries[inside], "amin"))


def attend(query: Tensor, key: Tensor, value: Tensor, tree: Tree, scale: float | None = None) -> Tensor:
    """Causal attention along each sequence: [1, heads, packed, size] → [1, packed, heads, size]."""
    heads = query.shape[1]

    def along_rows(packed: Tensor) -> Tensor:
        taken = packed[0].transpose(0, 1).index_select(0, tree.rows.flatten()).unflatten(0, tree.rows.shape)
        return taken.transpose(1, 2).repeat_interleave(heads // packed.shape[1], 1)

    rows = [along_rows(packed) for packed in (query, key, value)]
    # what is behind the end of a row comes after everything that is read: no mask is needed
    out = scaled_dot_product_attention(*rows, is_causal=True, scale=scale)
    return out.transpose(1, 2).flatten(0, 1).index_select(0, tree.places).unsqueeze(0)


def shared_tokens(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    tree: Tree,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    return attend(query, key, value, tree, scaling), None


AttentionInterface.register(SHARED, shared_tokens)
AttentionMaskInterface.register(SHARED, lambda **_: None)


def tree_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    tree_kv_index: Tensor,
    tree_cu_seqlens_q: Tensor,
    tree_cu_seqlens_k: Tensor,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What TRL asks of FlashAttention 3."""
    if sliding_window or softcap:
        raise ValueError("a model with sliding windows or soft caps needs FlashAttention 3 here: --attention flash")
    tree = _of_segments(tree_kv_index, tree_cu_seqlens_q, tree_cu_seqlens_k)
    return attend(query, key, value, tree, scaling), None


@lru_cache(maxsize=1)  # all layers of a forward pass bring the same tensors
def _of_segments(kv_index: Tensor, cu_q: Tensor, cu_k: Tensor) -> Tree:
    """The packed tokens are cut into segments; a segment's path are the tokens from the root to its end."""
    own, path = cu_q.diff(), cu_k.diff()
    follows = path > own
    before = kv_index[(cu_k[1:] - own - 1)[follows]]  # the last token of the segment that another one follows
    leaf = ~torch.isin(cu_q[1:] - 1, before)
    begin, length = cu_k[:-1][leaf, None], path[leaf, None]
    step = torch.arange(int(length.max()), device=kv_index.device)
    inside = step < length
    return tree_of(kv_index[(begin + step).clamp(max=len(kv_index) - 1)], inside, int(cu_q[-1]))


def let_trl_run(attention: str = "auto") -> None:
    """Call it before TRL's asynchronous trainers are made: they then need no FlashAttention 3, no vLLM beside them
    (the server has it) and no GPU."""
    from trl.experimental.async_distillation import async_distillation_trainer
    from trl.experimental.async_distillation import async_rollout_worker as distillation_worker
    from trl.experimental.async_grpo import async_grpo_trainer, async_rollout_worker, packing

    if attention not in ("auto", "flash", "torch"):
        raise SystemExit(f"--attention is auto, flash or torch, not {attention}")
    if attention == "torch" or (attention == "auto" and not _has_flash_attention_3()):
        packing.tree_attention = tree_attention
    for worker in (async_rollout_worker, distillation_worker):
        worker.is_vllm_available = lambda *_: True
    if not torch.cuda.is_available():
        for trainer in (async_grpo_trainer, async_distillation_trainer):
            trainer.get_peak_flops_per_device = lambda *_: None


def _has_flash_attention_3() -> bool:
    """TRL gets it with the package `kernels`; it is for Hopper, and AMD has its own."""
    if not torch.cuda.is_available() or find_spec("kernels") is None:
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability()[0] == 9
