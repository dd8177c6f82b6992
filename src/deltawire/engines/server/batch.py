"""The sequences that run together, and the forward pass that moves all of them by a token."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Any

import torch
from torch import Tensor

from ...core.errors import SchemaMismatch
from .cache import SlotCache, causal, reach

LOGITS_AT_ONCE = 1 << 24
"""Numbers that the logits of one prefill may take: prompts of different lengths are read off at different places."""

_ROUND = 64


class Batch:
    """Token lists in rows. The last token of each row is not in the cache yet: the next step puts it there.

    To be used under torch.inference_mode.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._cache = SlotCache()
        self._device = next(model.parameters()).device
        self.vocabulary = model.config.get_text_config().vocab_size

    @property
    def rows(self) -> int:
        return self._cache.rows

    @property
    def room(self) -> tuple[int, int]:
        return self._cache.capacity

    def reserve(self, rows: int, length: int) -> None:
        """Room for so many rows, each of which may grow to `length`; a few more, so that it is seldom asked for."""
        self._cache.reserve(1 << (rows - 1).bit_length(), -(-length // _ROUND) * _ROUND)

    def join(self, sequences: Rows[list[int]]) -> Tensor:
        """Add rows for these tokens; returns the logits after the last token of each. Equal ones are computed once."""
        unique = {tuple(tokens): i for i, tokens in enumerate(dict.fromkeys(map(tuple, sequences)))}
        length = max(map(len, unique))
        spread = torch.tensor([unique[tuple(tokens)] for tokens in sequences], device=self._device)
        self._cache.prefill(spread, length)
        ids = torch.zeros(len(unique), length, dtype=torch.long)
        for i, tokens in enumerate(unique):
            ids[i, : len(tokens)] = torch.tensor(tokens)
        ends, where = torch.tensor([len(tokens) - 1 for tokens in unique], device=self._device).unique(
            return_inverse=True
        )
        logits = self._model(
            input_ids=ids.to(self._device),
            position_ids=torch.arange(length, device=self._device).expand(len(unique), -1),
            attention_mask=causal(length, self._device),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=ends,
        ).logits
        return logits[torch.arange(len(unique), device=self._device), where][spread]

    def step(self, last: list[int], lengths: list[int]) -> Tensor:
        """Move every row by a token; `last` are the newest tokens, `lengths` count them. Returns the logits after."""
        positions = torch.tensor(lengths, device=self._device) - 1
        longest = max(lengths)
        self._cache.decode(positions, longest)
        return self._model(
            input_ids=torch.tensor(last, device=self._device)[:, None],
            position_ids=positions[:, None],
            attention_mask=reach(positions, longest),
            past_key_values=self._cache,
            use_cache=True,
        ).logits[:, -1]

    def leave(self, row: int) -> None:
        """The last row takes the place of this one."""
        self._cache.drop(row)

    def clear(self) -> None:
        self._cache.clear()


def kv_bytes(model: Any) -> int:
    """What a position of a sequence takes in the cache, measured."""
    cache = SlotCache()
    cache.reserve(1, 1)
    cache.prefill(torch.zeros(1, dtype=torch.long), 1)
    device = next(model.parameters()).device
    one = torch.zeros(1, 1, dtype=torch.long, device=device)
    with torch.inference_mode():
        model(input_ids=one, position_ids=one, attention_mask=causal(1, device), past_key_values=cache, use_cache=True)
    return cache.nbytes


def require_batchable(model: Any, name: str) -> None:
    """Some architectures keep more than keys and values, or see other things than the tokens before. They would give
    wrong text, so try: two sequences of different lengths must come out as they do alone."""
    batch = Batch(model)
    count = batch.vocabulary
    one, other = [i % count for i in (5, 3, 8, 1, 2)], [i % count for i in (4, 9, 7)]
    batch.reserve(2, 8)
    with torch.inference_mode():
        found = [batch.join([one, other])]
        found.append(batch.step([1, 2 % count], [6, 4]))
        alone = [
            torch.stack([_plain(model, one), _plain(model, other)]),
            torch.stack([_plain(model, [*one, 1]), _plain(model, [*other, 2 % count])]),
        ]
    for batched, expected in zip(found, alone, strict=True):
        if not expected.isfinite().all():
            return  # weights that cannot be told apart by what they give
        # rounding only: a wrong mask or position moves logits by as much as they vary
        tolerance = 0.02 if batched.dtype == torch.float32 else 0.2
        if not (batched - expected).abs().max() <= tolerance * (expected.std() + 1e-6) + 1e-5:
            raise SchemaMismatch(
                f"{name} ({type(model).__name__}) gives other logits in a batch with a cache than alone; "
                "the built-in server knows decoders with plain attention: serve it with --engine vllm"
            )


def _plain(model: Any, tokens: list[int]) -> Tensor:
    device = next(model.parameters()).device
    return model(input_ids=torch.tensor([tokens], device=device), use_cache=False).logits[0, -1]
