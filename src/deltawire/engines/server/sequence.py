"""A sequence: one continuation of a prompt, how it is sampled, and its tokens and text so far."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from random import Random
from typing import Any

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_GREEDY_BELOW = 1e-5


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of a request."""

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
class NewTokens:
    """The addition of a step to a sequence: its tokens from `first` up to `last`, and their text."""

    text: str
    first: int
    last: int
    finished: bool


Listener = Callable[["Sequence", NewTokens], None]


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt, its sampling parameters, and the tokens so far."""

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
    late: bool = False
    """Whether it arrived while the server was paused, and waits for the end of that."""
    random: Random = field(init=False)
    """One uniform number per token decides which it is."""
    _stream: TextStream | None = field(init=False)

    def __post_init__(self) -> None:
        self.random = Random(self.sampling.seed)
        self._stream = TextStream(self.tokenizer, self.sampling) if self.live or self.sampling.stop else None

    @property
    def length(self) -> int:
        """Tokens of the prompt and of the answer so far."""
        return len(self.prompt) + len(self.tokens)

    @property
    def longest(self) -> int:
        """Most tokens that it can have, the prompt included."""
        return len(self.prompt) + self.sampling.max_tokens

    @property
    def text(self) -> str:
        """The text of the answer so far, up to a stop string."""
        if self._stream is not None:
            return self._stream.text
        return decode(self.tokenizer, self.tokens, self.sampling.skip_special_tokens)

    @property
    def banned(self) -> list[int]:
        """Tokens that must not be drawn next, because they would end the answer before `min_tokens`."""
        return [*self.eos, *self.sampling.stop_token_ids] if len(self.tokens) < self.sampling.min_tokens else []

    def take(self, version: int, token: int, logprob: float | None, top: list[tuple[int, float]]) -> None:
        """Add a token that was made by the weights of a version."""
        self.tokens.append(token)
        if logprob is not None:
            self.logprobs.append(logprob)
            self.tops.append(top)
        if self.spans and self.spans[-1][0] == version:
            self.spans[-1][1] += 1
        else:
            self.spans.append([version, 1])
        stopped_by = self._stream.push(token) if self._stream is not None else None
        if token in self.eos and not self.sampling.ignore_eos:
            self.finish("stop")
        elif token in self.sampling.stop_token_ids:
            self.finish("stop", token)
        elif stopped_by is not None and len(self.tokens) >= self.sampling.min_tokens:
            self.finish("stop", stopped_by)
        elif len(self.tokens) >= self.sampling.max_tokens:
            self.finish("length")

    def finish(self, reason: str, stop_reason: str | int | None = None) -> None:
        """End the sequence. No token is added afterwards."""
        self.finish_reason, self.stop_reason = reason, stop_reason
        if self._stream is not None:
            self._stream.finish()

    def delta(self, first: int) -> NewTokens:
        """Return what was added from the token `first` on."""
        text = self._stream.take() if self._stream is not None and self.live else ""
        return NewTokens(text, first, len(self.tokens), self.finish_reason is not None)


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
