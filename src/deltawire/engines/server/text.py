"""Text from tokens as they come, and where a stop string ends it."""

from __future__ import annotations

from typing import Any

from .sampling import Sampling

_BROKEN = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """The text of one sequence. Characters whose bytes are not all there yet are held back."""

    def __init__(self, tokenizer: Any, skip_special_tokens: bool) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._tokens: list[int] = []
        self._start = self._read = 0
        # tokens before `_read` are text already; `_start` is a little earlier, for what depends on its neighbours

    def push(self, token: int) -> str:
        self._tokens.append(token)
        before, now = self._decode(self._start, self._read), self._decode(self._start, None)
        if len(now) <= len(before) or now.endswith(_BROKEN):
            return ""
        self._start, self._read = self._read, len(self._tokens)
        return now[len(before) :]

    def rest(self) -> str:
        """What was held back, now that nothing follows."""
        return self._decode(self._start, None)[len(self._decode(self._start, self._read)) :]

    def _decode(self, start: int, end: int | None) -> str:
        return decode(self._tokenizer, self._tokens[start:end], self._skip)


def decode(tokenizer: Any, tokens: list[int], skip_special_tokens: bool = True) -> str:
    if tokenizer is None or not tokens:
        return ""
    text: str = tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
    return text


class TextStream:
    """Text for a client while it is made: nothing is let out that a stop string may still take back."""

    def __init__(self, tokenizer: Any, sampling: Sampling) -> None:
        self._detokenizer = Detokenizer(tokenizer, sampling.skip_special_tokens)
        self._stops, self._keep = sampling.stop, sampling.keep_stop
        self._longest = max((len(stop) for stop in self._stops), default=1) - 1
        self.text = ""
        self._out = 0
        # characters of it that were handed out
        self.stopped_by: str | None = None

    def push(self, token: int) -> bool:
        """Take a token; True if its text completes a stop string, where the text then ends."""
        self._extend(self._detokenizer.push(token))
        return self.stopped_by is not None

    def finish(self) -> None:
        if self.stopped_by is None:
            self._extend(self._detokenizer.rest())
        self._longest = 0

    def take(self) -> str:
        """New text that is certain."""
        end = len(self.text) if self.stopped_by else max(len(self.text) - self._longest, self._out)
        text, self._out = self.text[self._out : end], end
        return text

    def _extend(self, new: str) -> None:
        look_from = max(len(self.text) - self._longest, 0)
        self.text += new
        found = [(at, stop) for stop in self._stops if (at := self.text.find(stop, look_from)) >= 0]
        if found:
            at, self.stopped_by = min(found)
            self.text = self.text[: at + len(self.stopped_by) * self._keep]
