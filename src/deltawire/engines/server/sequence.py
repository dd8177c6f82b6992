"""One continuation of one prompt, from the queue to its last token."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .sampling import Draw, Drawn, Sampling
from .text import TextStream, decode


@dataclass(frozen=True, slots=True)
class Delta:
    """What a step added to a sequence, for a client that watches."""

    text: str
    first: int
    last: int
    """Its tokens from `first` up to `last` are new."""
    finished: bool


Listener = Callable[["Sequence", Delta], None]


@dataclass(slots=True, eq=False)
class Sequence:
    prompt: list[int]
    sampling: Sampling
    index: int
    """Which choice of the answer."""
    tokenizer: Any
    eos: frozenset[int]
    live: bool
    """Whether somebody wants each token as it comes."""
    listener: Listener
    """Called when it is finished, and before that after each step if `live`."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[list[tuple[int, float]]] = field(default_factory=list)
    spans: list[list[int]] = field(default_factory=list)
    """[version, how many tokens in a row it made]"""
    finish_reason: str | None = None
    """stop, length, abort or error."""
    stop_reason: str | int | None = None
    cancelled: bool = False
    _random: random.Random = field(init=False)
    _stream: TextStream | None = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.sampling.seed)
        self._stream = TextStream(self.tokenizer, self.sampling) if self.live or self.sampling.stop else None

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.tokens)

    @property
    def longest(self) -> int:
        """Positions it may come to take."""
        return len(self.prompt) + self.sampling.max_tokens

    @property
    def text(self) -> str:
        if self._stream is not None:
            return self._stream.text
        return decode(self.tokenizer, self.tokens, self.sampling.skip_special_tokens)

    def next_draw(self) -> Draw:
        banned: tuple[int, ...] = ()
        if len(self.tokens) < self.sampling.min_tokens:
            banned = (*self.eos, *self.sampling.stop_token_ids)
        return Draw(self.sampling, self._random.random(), banned)

    def take(self, drawn: Drawn, version: int) -> None:
        """One more token, made by the weights of this version."""
        self.tokens.append(drawn.token)
        if drawn.logprob is not None:
            self.logprobs.append(drawn.logprob)
            self.tops.append(drawn.top)
        if self.spans and self.spans[-1][0] == version:
            self.spans[-1][1] += 1
        else:
            self.spans.append([version, 1])
        stopped = self._stream is not None and self._stream.push(drawn.token)
        if len(self.tokens) < self.sampling.min_tokens:
            stopped = False
        if drawn.token in self.eos and not self.sampling.ignore_eos:
            self.finish("stop")
        elif drawn.token in self.sampling.stop_token_ids:
            self.finish("stop", drawn.token)
        elif stopped and self._stream is not None:
            self.finish("stop", self._stream.stopped_by)
        elif len(self.tokens) >= self.sampling.max_tokens:
            self.finish("length")

    def finish(self, reason: str, stop_reason: str | int | None = None) -> None:
        self.finish_reason, self.stop_reason = reason, stop_reason
        if self._stream is not None:
            self._stream.finish()

    def delta(self, first: int) -> Delta:
        text = self._stream.take() if self._stream is not None and self.live else ""
        return Delta(text, first, len(self.tokens), self.finish_reason is not None)
