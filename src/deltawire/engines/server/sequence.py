"""One continuation of one prompt, from the queue to its last token."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .sampling import Draw, Drawn, Sampling

_BROKEN = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, slots=True)
class Delta:
    """What a step added to a sequence: its tokens from `first` up to `last`, and their text."""

    text: str
    first: int
    last: int
    finished: bool


Listener = Callable[["Sequence", Delta], None]


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt, how it is continued, and the tokens so far."""

    prompt: list[int]
    sampling: Sampling
    index: int
    """Index of the choice in the answer."""
    tokenizer: Any
    eos: frozenset[int]
    live: bool
    """Whether the listener is called after each step."""
    listener: Listener
    """Called when it is finished, and before that after each step if `live`."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[list[tuple[int, float]]] = field(default_factory=list)
    """The likeliest tokens at each position, where they were asked for."""
    spans: list[list[int]] = field(default_factory=list)
    """[version, number of tokens in a row that it made]"""
    finish_reason: str | None = None
    """stop, length, abort or error; None while it is not finished."""
    stop_reason: str | int | None = None
    """The stop string or token that ended it."""
    cancelled: bool = False
    _random: random.Random = field(init=False)
    _stream: TextStream | None = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.sampling.seed)
        self._stream = TextStream(self.tokenizer, self.sampling) if self.live or self.sampling.stop else None

    @property
    def length(self) -> int:
        """Tokens of the prompt and of the answer so far."""
        return len(self.prompt) + len(self.tokens)

    @property
    def longest(self) -> int:
        """Tokens it may have in the end."""
        return len(self.prompt) + self.sampling.max_tokens

    @property
    def text(self) -> str:
        """The text of the answer so far, up to a stop string."""
        if self._stream is not None:
            return self._stream.text
        return decode(self.tokenizer, self.tokens, self.sampling.skip_special_tokens)

    def next_draw(self) -> Draw:
        """What the next token is drawn with."""
        banned: tuple[int, ...] = ()
        if len(self.tokens) < self.sampling.min_tokens:
            banned = (*self.eos, *self.sampling.stop_token_ids)
        return Draw(self.sampling, self._random.random(), banned)

    def take(self, drawn: Drawn, version: int) -> None:
        """Add a token that was made by the weights of this version."""
        self.tokens.append(drawn.token)
        if drawn.logprob is not None:
            self.logprobs.append(drawn.logprob)
            self.tops.append(drawn.top)
        if self.spans and self.spans[-1][0] == version:
            self.spans[-1][1] += 1
        else:
            self.spans.append([version, 1])
        stopped_by = self._stream.push(drawn.token) if self._stream is not None else None
        if drawn.token in self.eos and not self.sampling.ignore_eos:
            self.finish("stop")
        elif drawn.token in self.sampling.stop_token_ids:
            self.finish("stop", drawn.token)
        elif stopped_by is not None and len(self.tokens) >= self.sampling.min_tokens:
            self.finish("stop", stopped_by)
        elif len(self.tokens) >= self.sampling.max_tokens:
            self.finish("length")

    def finish(self, reason: str, stop_reason: str | int | None = None) -> None:
        """End it: nothing is added afterwards."""
        self.finish_reason, self.stop_reason = reason, stop_reason
        if self._stream is not None:
            self._stream.finish()

    def delta(self, first: int) -> Delta:
        """What is new, from the token `first` on."""
        text = self._stream.take() if self._stream is not None and self.live else ""
        return Delta(text, first, len(self.tokens), self.finish_reason is not None)


class TextStream:
    """The text of a sequence while it is made.

    Held back are characters whose bytes are not complete, and text that a stop string may still remove.
    """

    def __init__(self, tokenizer: Any, sampling: Sampling) -> None:
        self._tokenizer, self._sampling = tokenizer, sampling
        self._longest = max(map(len, sampling.stop), default=1) - 1
        self._tokens: list[int] = []
        self._start = self._read = 0
        """Tokens before `_read` are in `text`; `_start` is a little earlier: text can depend on its neighbours."""
        self._taken = 0
        """Characters of `text` that `take` has returned."""
        self.text = ""
        self.stopped_by: str | None = None
        """The stop string at which `text` ends."""

    def push(self, token: int) -> str | None:
        """Add a token; returns the stop string that its text completes, if any."""
        self._tokens.append(token)
        new = self._unread()
        if new and not new.endswith(_BROKEN):
            self._start, self._read = self._read, len(self._tokens)
            self._extend(new)
        return self.stopped_by

    def finish(self) -> None:
        """Add what was held back, since nothing follows."""
        if self.stopped_by is None:
            self._extend(self._unread())
        self._longest = 0

    def take(self) -> str:
        """Return new text that is certain."""
        end = len(self.text) if self.stopped_by else max(len(self.text) - self._longest, self._taken)
        text, self._taken = self.text[self._taken : end], end
        return text

    def _unread(self) -> str:
        skip = self._sampling.skip_special_tokens
        before = decode(self._tokenizer, self._tokens[self._start : self._read], skip)
        return decode(self._tokenizer, self._tokens[self._start :], skip)[len(before) :]

    def _extend(self, new: str) -> None:
        look_from = max(len(self.text) - self._longest, 0)
        self.text += new
        found = [(at, stop) for stop in self._sampling.stop if (at := self.text.find(stop, look_from)) >= 0]
        if found:
            at, self.stopped_by = min(found)
            kept = len(self.stopped_by) if self._sampling.include_stop_str_in_output else 0
            self.text = self.text[: at + kept]


def decode(tokenizer: Any, tokens: list[int], skip_special_tokens: bool = True) -> str:
    """The text of tokens; empty without a tokenizer."""
    if tokenizer is None or not tokens:
        return ""
    text: str = tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
    return text
