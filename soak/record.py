"""What a soak is asked to do, and what happened in it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Options:
    folder: Path
    seed: int
    minutes: float
    replicas: int = 12
    period: float = 0.25
    # seconds from one publish to the next
    pace: float = 2.0
    # seconds from one fault to the next, on average
    deadline: float = 300.0
    # seconds that everything may take to agree once the faults have stopped
    proxy: bool = False
    # whether replicas read through an nginx


@dataclass(slots=True)
class Event:
    """A fault as it happened."""

    kind: str
    at: float
    clients: list[int]
    # whom it kept from working
    until: float | None = None


@dataclass(slots=True)
class Outcome:
    events: list[Event] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    # faults that found nothing to work on
    failures: list[str] = field(default_factory=list)
    # what must not happen, in words
    notes: list[str] = field(default_factory=list)
    newest: int = -1
    bytes_down: list[int] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    seconds_to_agree: float = 0.0
    stopped_at: float = 0.0
