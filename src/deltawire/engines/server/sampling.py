"""From logits to tokens, for a whole batch at once and yet for each request on its own.

A request draws one uniform number per token from its own generator, and the token is where that number falls in the
cumulated probabilities. Who else is in the batch does not matter, but for the last bits of the logits: these depend on
the shapes that are multiplied, and can move a token only when the number falls within that rounding of a border.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]
_GREEDY_BELOW = 1e-5


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one request wants its tokens."""

    max_tokens: int
    temperature: float = 1.0
    """0 takes the likeliest token."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: all of them."""
    min_p: float = 0.0
    seed: int | None = None
    logprobs: int | None = None
    """None: none; n: of the token that was drawn, and of the n likeliest."""
    stop: Rows[str] = ()
    stop_token_ids: Rows[int] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    @property
    def greedy(self) -> bool:
        return self.temperature < _GREEDY_BELOW


@dataclass(frozen=True, slots=True)
class Draw:
    """How the token of one row of the batch is drawn."""

    sampling: Sampling
    number: float
    """Uniform in [0, 1)."""
    banned: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Drawn:
    """A token that was drawn."""

    token: int
    logprob: float | None
    top: list[tuple[int, float]] = field(default_factory=list)
    """The likeliest tokens, where they were asked for."""


def draw(logits: Tensor, rows: Rows[Draw], mode: LogprobsMode) -> list[Drawn]:
    """One token for each row of logits."""
    raw = logits.float()
    processed = _processed(raw, rows)
    tokens = _pick(processed, rows)
    picked = tokens.tolist()
    wanted = [row.sampling.logprobs for row in rows]
    if all(n is None for n in wanted):
        return [Drawn(token, None) for token in picked]
    logprobs = torch.log_softmax(raw if mode == "raw_logprobs" else processed, dim=-1)
    own = logprobs.gather(1, tokens[:, None])[:, 0].tolist()
    most = min(max(n or 0 for n in wanted), logits.shape[1])
    values, indices = (part.tolist() for part in logprobs.topk(most)) if most else ([[]] * len(rows),) * 2
    return [
        Drawn(token, None if n is None else own[i], [*zip(indices[i][: n or 0], values[i][: n or 0], strict=True)])
        for i, (token, n) in enumerate(zip(picked, wanted, strict=True))
    ]


def _processed(raw: Tensor, rows: Rows[Draw]) -> Tensor:
    """Logits of the distribution that is drawn from. Rows that take the likeliest token stay as they are."""
    alike: dict[tuple[float, int, float, float], list[int]] = defaultdict(list)
    for i, row in enumerate(rows):
        wish = row.sampling
        if not wish.greedy:
            alike[wish.temperature, wish.top_k, wish.top_p, wish.min_p].append(i)
    alike.pop((1.0, 0, 1.0, 0.0), None)
    if not alike and not any(row.banned for row in rows):
        return raw
    logits = raw.clone()
    for i, row in enumerate(rows):
        if row.banned:
            logits[i, list(row.banned)] = -torch.inf
    for wishes, places in alike.items():
        logits[places] = _warpers(*wishes)(None, logits[places])
    return logits


@lru_cache
def _warpers(temperature: float, top_k: int, top_p: float, min_p: float) -> LogitsProcessorList:
    made = LogitsProcessorList([TemperatureLogitsWarper(float(temperature))])
    if top_k > 0:
        made.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        made.append(TopPLogitsWarper(top_p))
    if min_p:
        made.append(MinPLogitsWarper(min_p))
    return made


def _pick(logits: Tensor, rows: Rows[Draw]) -> Tensor:
    likeliest = logits.argmax(dim=-1)
    if all(row.sampling.greedy for row in rows):
        return likeliest
    # summed in float64: over a large vocabulary float32 would lose the unlikely tokens
    upto = logits.softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    numbers = torch.tensor([[row.number] for row in rows], dtype=torch.float64, device=logits.device)
    # right: a token with no probability has no room, so no number can fall on it
    places = torch.searchsorted(upto, numbers * upto[:, -1:], right=True)[:, 0].clamp(max=logits.shape[1] - 1)
    greedy = torch.tensor([row.sampling.greedy for row in rows], device=logits.device)
    # numbers of a broken policy may all be NaN: then any token is as wrong as any other
    return torch.where(greedy, likeliest, places)
