"""From logits to tokens, for a whole batch at once and yet for each request on its own.

A request draws one uniform number per token from its own generator, and the token is where that number falls in the
cumulated probabilities. Who else is in the batch does not matter, but for the last bits of the logits: these depend on
the shapes that are multiplied, and can move a token only when the number falls within that rounding of a border.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]
_GREEDY_BELOW = 1e-5


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one request wants its tokens."""

    max_tokens: int
    temperature: float = 1.0
    # 0 takes the likeliest token
    top_p: float = 1.0
    top_k: int = 0
    # 0: all of them
    min_p: float = 0.0
    seed: int | None = None
    logprobs: int | None = None
    # None: none; n: of the token that was drawn, and of the n likeliest
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    keep_stop: bool = False
    # leave the stop string in the text

    @property
    def greedy(self) -> bool:
        return self.temperature < _GREEDY_BELOW


@dataclass(frozen=True, slots=True)
class Draw:
    """What a row of the batch wants of its logits."""

    sampling: Sampling
    number: float
    # uniform in [0, 1)
    banned: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Drawn:
    token: int
    logprob: float | None
    top: list[tuple[int, float]] = field(default_factory=list)
    # the likeliest tokens, where they were asked for


def draw(logits: Tensor, rows: Rows[Draw], mode: LogprobsMode) -> list[Drawn]:
    """One token for each row of logits."""
    logits = logits.float()
    wanted = [row.sampling.logprobs for row in rows]
    scores = logits if mode == "raw_logprobs" and any(n is not None for n in wanted) else None
    for i, row in enumerate(rows):
        if row.banned:
            logits = logits.clone() if scores is logits else logits
            logits[i, list(row.banned)] = -torch.inf
    processed = _processed(logits, [row.sampling for row in rows])
    tokens = _pick(processed, rows)
    picked = tokens.tolist()
    if all(n is None for n in wanted):
        return [Drawn(token, None) for token in picked]
    logprobs = torch.log_softmax(processed if scores is None else scores, dim=-1)
    own = logprobs.gather(1, tokens[:, None])[:, 0].tolist()
    most = min(max(n or 0 for n in wanted), logits.shape[1])
    best = logprobs.topk(most) if most else None
    result = []
    for i, n in enumerate(wanted):
        top = [*zip(best.indices[i, :n].tolist(), best.values[i, :n].tolist(), strict=True)] if best and n else []
        result.append(Drawn(picked[i], None if n is None else own[i], top))
    return result


def _processed(logits: Tensor, wishes: list[Sampling]) -> Tensor:
    """Logits of the distribution that is drawn from. Rows that take the likeliest token stay as they are."""
    device = logits.device
    if any(not w.greedy and w.temperature != 1 for w in wishes):
        heat = torch.tensor([1.0 if w.greedy else w.temperature for w in wishes], device=device)
        logits = logits / heat[:, None]
    if any(w.top_k or w.top_p < 1 or w.min_p for w in wishes if not w.greedy):
        logits = logits.clone()
        for i, wish in enumerate(wishes):
            if not wish.greedy and (wish.top_k or wish.top_p < 1 or wish.min_p):
                logits[i] = _cut(logits[i], wish)
    return logits


def _cut(row: Tensor, wish: Sampling) -> Tensor:
    """Without the tokens that top_k, top_p and min_p leave out; the likeliest always stays."""
    ordered, order = row.sort(descending=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if wish.top_k:
        keep[wish.top_k :] = False
    if wish.top_p < 1 or wish.min_p:
        shares = ordered.masked_fill(~keep, -torch.inf).softmax(0)
        # a token stays while those before it have not reached top_p
        keep &= shares.cumsum(0) - shares < wish.top_p
        keep &= shares >= wish.min_p * shares[0]
    keep[0] = True
    return torch.full_like(row, -torch.inf).scatter(0, order, ordered.masked_fill(~keep, -torch.inf))


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
