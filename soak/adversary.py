"""Which fault comes when. Pure: the same seed gives the same faults, whatever they meet."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fault:
    kind: str
    after: float
    # seconds since the one before it began
    lasts: float
    # seconds until it is undone: restarted, let through, repaired
    who: int
    # a large number to choose whom by


@dataclass(frozen=True, slots=True)
class Kind:
    weight: int
    lasts: tuple[float, float]


KINDS = {
    "kill replica": Kind(6, (0.2, 3.0)),
    "kill trainer": Kind(4, (0.2, 2.0)),
    "kill server": Kind(2, (0.2, 2.0)),
    "cut": Kind(5, (0.0, 5.0)),
    "cut all": Kind(1, (0.5, 3.0)),
    "stall": Kind(4, (1.0, 8.0)),
    "slow": Kind(4, (2.0, 10.0)),
    "flip bits": Kind(5, (1.0, 15.0)),
    "truncate": Kind(3, (1.0, 15.0)),
    "lose object": Kind(2, (1.0, 15.0)),
    "rot on disk": Kind(2, (1.0, 8.0)),
    "fill disk": Kind(2, (1.0, 5.0)),
    "sleep": Kind(2, (0.0, 0.0)),
    "join late": Kind(2, (0.0, 0.0)),
    "prune": Kind(6, (0.0, 0.0)),
    "two prunes": Kind(2, (0.0, 0.0)),
    "kill prune": Kind(2, (0.05, 0.8)),
    "damage cache": Kind(3, (0.0, 0.0)),
    "wrong proxy": Kind(8, (1.0, 10.0)),
}


def faults(seed: int, pace: float, without: frozenset[str] = frozenset()) -> Iterator[Fault]:
    """Every kind once, in random order, then for ever by weight. `pace` is the mean number of seconds between two."""
    dice = random.Random(seed)
    kinds = [kind for kind in KINDS if kind not in without]
    first = kinds.copy()
    dice.shuffle(first)
    # who sleeps needs time to sleep in
    first.sort(key=lambda kind: kind != "sleep")
    while True:
        kind = first.pop(0) if first else dice.choices(kinds, [KINDS[k].weight for k in kinds])[0]
        low, high = KINDS[kind].lasts
        yield Fault(kind, dice.uniform(0.2, 1.8) * pace, dice.uniform(low, high), dice.getrandbits(32))
