"""Draw tokens from logits: one call for a batch, with the sampling parameters of each request.

A request draws one uniform number per token from its own generator, and the token is where that number falls in the
cumulated probabilities. Who else is in the batch does not matter, but for the last bits of the logits: these depend on
the shapes that are multiplied, and can move a token only when the number falls within that rounding of a border.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as Rows
from functools import lru_cache

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from .sequence import Sequence


def draw(
    logits: Tensor, sequences: Rows[Sequence], mode: str
) -> list[tuple[int, float | None, list[tuple[int, float]]]]:
    """Draw a token for each row of logits. Returns token, log-probability and likeliest tokens, for `Sequence.take`."""
    raw = logits.float()
    processed = _processed(raw, sequences)
    tokens = _pick(processed, sequences)
    picked = tokens.tolist()
    wanted = [sequence.sampling.logprobs for sequence in sequences]
    if all(n is None for n in wanted):
        return [(token, None, []) for token in picked]
    logprobs = torch.log_softmax(raw if mode == "raw_logprobs" else processed, dim=-1)
    own = logprobs.gather(1, tokens[:, None])[:, 0].tolist()
    most = min(max(n or 0 for n in wanted), logits.shape[1])
    values, indices = (part.tolist() for part in logprobs.topk(most)) if most else ([[]] * len(picked),) * 2
    return [
        (token, None if n is None else own[i], [*zip(indices[i][: n or 0], values[i][: n or 0], strict=True)])
        for i, (token, n) in enumerate(zip(picked, wanted, strict=True))
    ]


def _processed(raw: Tensor, sequences: Rows[Sequence]) -> Tensor:
    """Logits of the distribution that is drawn from. Rows that take the likeliest token stay as they are."""
    alike: dict[tuple[float, int, float, float], list[int]] = defaultdict(list)
    for i, sequence in enumerate(sequences):
        s = sequence.sampling
        if not s.greedy:
            alike[s.temperature, s.top_k, s.top_p, s.min_p].append(i)
    alike.pop((1.0, 0, 1.0, 0.0), None)
    banned = {i: tokens for i, sequence in enumerate(sequences) if (tokens := sequence.banned)}
    if not alike and not banned:
        return raw
    logits = raw.clone()
    for i, tokens in banned.items():
        logits[i, tokens] = -torch.inf
    for settings, places in alike.items():
        logits[places] = _warpers(*settings)(None, logits[places])
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


def _pick(logits: Tensor, sequences: Rows[Sequence]) -> Tensor:
    likeliest = logits.argmax(dim=-1)
    if all(sequence.sampling.greedy for sequence in sequences):
        return likeliest
    # summed in float64: over a large vocabulary float32 would lose the unlikely tokens
    upto = logits.softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    numbers = torch.tensor([[s.random.random()] for s in sequences], dtype=torch.float64, device=logits.device)
    # right: a token with no probability has no room, so no number can fall on it
    places = torch.searchsorted(upto, numbers * upto[:, -1:], right=True)[:, 0].clamp(max=logits.shape[1] - 1)
    greedy = torch.tensor([sequence.sampling.greedy for sequence in sequences], device=logits.device)
    # numbers of a broken policy may all be NaN: then any token is as wrong as any other
    return torch.where(greedy, likeliest, places)
