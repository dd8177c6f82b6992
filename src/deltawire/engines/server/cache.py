"""Keys and values of the sequences that run: one row each, one column per position, for the models of transformers.

Rows 0 … n-1 are in use. A sequence that joins gets the next row, one that leaves gives its row to the last one, so the
batch is always a plain slice: nothing is padded anew when requests come and go.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache


class SlotCache(Cache):
    """Told before each forward pass where its keys and values belong, by `prefill` or `decode`."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.rows = 0
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self.capacity = (0, 0)
        # rows and positions there is room for
        self._spread: Tensor | None = None
        self._positions: Tensor | None = None
        self._length = 0

    def reserve(self, rows: int, length: int) -> None:
        """Make room for so many rows of so many positions."""
        have_rows, have_length = self.capacity
        if rows <= have_rows and length <= have_length:
            return
        self.capacity = max(rows, have_rows), max(length, have_length)
        for stores in (self._keys, self._values):
            for i, old in enumerate(stores):
                stores[i] = _store(self.capacity, old)
                stores[i][:have_rows, :, :have_length] = old

    def prefill(self, spread: Tensor, length: int) -> None:
        """The next pass computes prompts. New row i gets the keys and values of prompt spread[i]."""
        self._spread, self._positions, self._length = spread, None, length
        self.rows += len(spread)

    def decode(self, positions: Tensor, length: int) -> None:
        """The next pass computes one token per row, at these positions, all below `length`."""
        self._spread, self._positions, self._length = None, positions, length

    def drop(self, row: int) -> None:
        """The last row takes the place of this one."""
        self.rows -= 1
        if row != self.rows:
            for store in (*self._keys, *self._values):
                store[row] = store[self.rows]
        if not self.rows:
            self.clear()

    def clear(self) -> None:
        """Forget everything, and give the memory back."""
        self.rows, self.capacity = 0, (0, 0)
        self._keys.clear()
        self._values.clear()

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        while len(self._keys) <= layer_idx:
            self._keys.append(_store(self.capacity, key_states))
            self._values.append(_store(self.capacity, value_states))
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        if self._spread is not None:
            first = self.rows - len(self._spread)
            keys[first : self.rows, :, : self._length] = key_states[self._spread]
            values[first : self.rows, :, : self._length] = value_states[self._spread]
            # prompts see nothing but themselves
            return key_states, value_states
        every = torch.arange(self.rows, device=keys.device)
        keys[every, :, self._positions] = key_states[:, :, 0]
        values[every, :, self._positions] = value_states[:, :, 0]
        return keys[: self.rows, :, : self._length], values[: self.rows, :, : self._length]

    @property
    def nbytes(self) -> int:
        return sum(store.nbytes for store in (*self._keys, *self._values))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._length


def _store(capacity: tuple[int, int], like: Tensor) -> Tensor:
    rows, length = capacity
    # zeros, not empty: what is masked is still multiplied, and 0 × NaN is NaN
    return like.new_zeros(rows, like.shape[1], length, like.shape[3])


def causal(length: int, device: torch.device) -> Tensor:
    """Who sees whom in a prompt. Prompts are padded on the right, where nobody looks."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()[None, None]


def reach(positions: Tensor, length: int) -> Tensor:
    """What the newest token of each row sees: everything up to itself."""
    return (torch.arange(length, device=positions.device)[None] <= positions[:, None])[:, None, None]
