"""The KV cache of all running sequences, and the forward pass that generates the next token of each."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicLayer

from ...errors import SchemaMismatch

_SPARE = 32


class _Layer(DynamicLayer):
    """Keys and values with spare columns behind them: DynamicLayer copies all that it has for each token."""

    is_initialized: bool
    _stores: tuple[Tensor, ...] = ()

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> Any:
        if not self.is_initialized:
            # a prompt: the batch that it joins copies it
            self.keys, self.values, self.is_initialized = key_states, value_states, True
            return key_states, value_states
        used = self.get_seq_length()
        end = used + key_states.shape[2]
        if not self._stores or self._stores[0].shape[2] < end:
            self.fill((self.keys, self.values))
        for store, new in zip(self._stores, (key_states, value_states), strict=True):
            store[:, :, used:end] = new
        self._show(end)
        return self.keys, self.values

    def fill(self, *parts: tuple[Any, Any]) -> None:
        """Store the rows of these keys and values, aligned on the right."""
        columns = max(keys.shape[2] for keys, _ in parts)
        self._stores = tuple(_stacked(tensors, columns) for tensors in zip(*parts, strict=True))
        self._show(columns)

    def _show(self, columns: int) -> None:
        self.keys, self.values = (store[:, :, :columns] for store in self._stores)
        self.is_initialized = True


def _stacked(parts: Rows[Tensor], columns: int) -> Tensor:
    _, heads, _, size = parts[0].shape
    # zeros: what is masked is still multiplied, and 0 × NaN is NaN
    store, row = parts[0].new_zeros(sum(map(len, parts)), heads, columns + _SPARE, size), 0
    for part in parts:
        store[row : row + len(part), :, columns - part.shape[2] : columns] = part
        row += len(part)
    return store


class Batch:
    """Token lists in rows, aligned on the right: the newest token of every row is in the last column of the cache.

    The last token of each row is not in the cache yet: the next step puts it there. Use it under torch.inference_mode.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._device = next(model.parameters()).device
        self._lengths: Tensor
        """Tokens of each row."""
        self.vocabulary: int = model.config.get_text_config().vocab_size
        self.clear()
        with torch.inference_mode():
            self.join([[0]])
        self.position_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in self._cache.layers)
        """Bytes of keys and values of one token."""
        self.clear()

    def join(self, sequences: Rows[list[int]]) -> Tensor:
        """Add a row for each token list; returns the logits after its last token. Equal lists are computed once."""
        unique = {tokens: i for i, tokens in enumerate(dict.fromkeys(map(tuple, sequences)))}
        lengths, cache = self._tensor([len(tokens) for tokens in unique]), _new_cache()
        widest = int(lengths.max())
        ids = self._tensor([[0] * (widest - len(tokens)) + [*tokens] for tokens in unique])
        logits = self._forward(ids, lengths, cache)
        spread = self._tensor([unique[tuple(tokens)] for tokens in sequences])
        if not self._cache.layers:
            self._cache.layers = [_Layer() for _ in cache.layers]
        for layer, new in zip(self._cache.layers, cache.layers, strict=True):
            old = [(layer.keys, layer.values)] if layer.is_initialized else []
            layer.fill(*old, (new.keys[spread], new.values[spread]))
        self._lengths = torch.cat([self._lengths, lengths[spread]])
        return logits[spread]

    def step(self, last: list[int]) -> Tensor:
        """Compute the next step: `last` are the newest tokens of all rows. Returns the logits after them."""
        self._lengths += 1
        return self._forward(self._tensor(last)[:, None], self._lengths, self._cache)

    def keep(self, rows: list[int]) -> None:
        """Drop all other rows, and the columns that only they used."""
        if not rows:
            self.clear()
            return
        self._lengths = self._lengths[rows]
        columns = int(self._lengths.max())
        for layer in self._cache.layers:
            layer.fill((layer.keys[rows, :, -columns:], layer.values[rows, :, -columns:]))

    def clear(self) -> None:
        self._cache = _new_cache()
        self._lengths = self._tensor([])

    def _tensor(self, values: list[Any]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self._device)

    def _forward(self, ids: Tensor, lengths: Tensor, cache: Cache) -> Tensor:
        """Logits after the last of `ids`, which are the newest of `lengths` tokens; the others are in the cache."""
        count = ids.shape[1]
        columns = torch.arange(cache.get_seq_length() + count, device=self._device)
        newest = columns[-count:]
        first = len(columns) - lengths
        # a token sees itself and what is before it but padding; padding sees itself, for no softmax is over nothing
        seen = (columns >= first[:, None])[:, None] & (columns <= newest[:, None]) | (columns == newest[:, None])
        logits: Tensor = self._model(
            input_ids=ids,
            position_ids=(newest - first[:, None]).clamp(min=0),
            attention_mask=seen[:, None],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        return logits[:, -1]


def _new_cache() -> Cache:
    return Cache(layer_class_to_replicate=_Layer)


def require_batchable(model: Any, name: str) -> None:
    """Raise SchemaMismatch for a model whose logits differ between a batch and a single sequence.

    That is one that caches more than keys and values, or attends to more than earlier tokens: its text would be wrong.
    Two sequences of different lengths are computed in a batch and alone, and compared.
    """
    batch = Batch(model)
    count = batch.vocabulary
    one, other = [i % count for i in (5, 3, 8, 1, 2)], [i % count for i in (4, 9, 7)]
    with torch.inference_mode():
        found = torch.cat([batch.join([one, other]), batch.step([1, 2 % count])])
        longer = (one, other, [*one, 1], [*other, 2 % count])
        expected = torch.stack(
            [model(input_ids=batch._tensor([tokens]), use_cache=False).logits[0, -1] for tokens in longer]
        )
    # rounding only: a wrong mask or position moves logits by as much as they vary
    tolerance = (0.02 if found.dtype == torch.float32 else 0.2) * (expected.std() + 1e-6) + 1e-5
    # weights that give no finite numbers cannot be told apart by them
    if expected.isfinite().all() and not (found - expected).abs().max() <= tolerance:
        raise SchemaMismatch(
            f"{name} ({type(model).__name__}) gives other logits in a batch with a cache than alone; "
            "the built-in server knows decoders with plain attention: serve it with --engine vllm"
        )
