"""What clients get back, in the words of the OpenAI API and vLLM, and which versions made it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, ClassVar

from ..names import VERSIONS_FIELD
from .protocol import ChatRequest, CompletionRequest
from .sequence import Delta, Sequence

_LOWEST = -9999.0
"""JSON has no −∞; this is what vLLM says."""


class TokenNames:
    """The text of single tokens, each decoded once."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._text = lru_cache(maxsize=1 << 16)(self._decode)

    def __call__(self, token: int, as_id: bool) -> str:
        return f"token_id:{token}" if as_id else self._text(token)

    def _decode(self, token: int) -> str:
        if self._tokenizer is None:
            return f"token_id:{token}"
        text: str = self._tokenizer.decode([token], skip_special_tokens=False)
        return text


def made_by(sequences: Iterable[Sequence]) -> str:
    """For the header: every version that had a part in it, ascending."""
    return ",".join(map(str, sorted({version for s in sequences for version, _ in s.spans})))


def usage(sequences: list[Sequence], choices: int) -> dict[str, int]:
    # the prompt of a request with several choices counts once
    prompt = sum(len(s.prompt) for s in sequences) // choices
    made = sum(len(s.tokens) for s in sequences)
    return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}


def _versions(sequence: Sequence) -> list[dict[str, int]]:
    ends = [*accumulate((tokens for _, tokens in sequence.spans), initial=0)]
    return [
        {"version": version, "start": start, "end": end}
        for (version, _), (start, end) in zip(sequence.spans, pairwise(ends), strict=True)
    ]


@dataclass(slots=True)
class Answer:
    """How one request is answered: `_choice` differs between the two routes. A whole answer is one large chunk."""

    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    request: CompletionRequest | ChatRequest
    id: str
    model: str
    names: TokenNames
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, sequences: list[Sequence]) -> dict[str, Any]:
        choices = [self._choice(s, Delta(s.text, 0, len(s.tokens), True), streamed=False) for s in sequences]
        return {
            **self._head(self.whole_object),
            "choices": [{**choice, **_end(s)} for choice, s in zip(choices, sequences, strict=True)],
            "usage": usage(sequences, self.request.choices),
        }

    def chunk(self, sequence: Sequence, delta: Delta) -> dict[str, Any]:
        choice = {**self._choice(sequence, delta, streamed=True), **_end(sequence, delta.finished)}
        return {**self._head(self.chunk_object), "choices": [choice]}

    def opening(self, sequences: list[Sequence]) -> list[dict[str, Any]]:
        """Chunks before the first token."""
        return []

    def usage_chunk(self, sequences: list[Sequence]) -> dict[str, Any]:
        return {**self._head(self.chunk_object), "choices": [], "usage": usage(sequences, self.request.choices)}

    def _choice(self, sequence: Sequence, delta: Delta, *, streamed: bool) -> dict[str, Any]:
        raise NotImplementedError

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _name(self, token: int) -> str:
        return self.names(token, bool(self.request.return_tokens_as_token_ids))

    def _ids(self, sequence: Sequence, delta: Delta) -> dict[str, Any]:
        return {"token_ids": sequence.tokens[delta.first : delta.last]} if self.request.return_token_ids else {}


@dataclass(slots=True)
class CompletionAnswer(Answer):
    whole_object = chunk_object = "text_completion"

    request: CompletionRequest
    offsets: dict[int, int] = field(default_factory=dict)
    """By choice, where its next token begins in its text."""

    def _choice(self, sequence: Sequence, delta: Delta, *, streamed: bool) -> dict[str, Any]:
        first = sequence.index not in self.offsets
        echo = self._echo(sequence) if first else ""
        offset = self.offsets.get(sequence.index, 0) + len(echo)
        logprobs = self._logprobs(sequence, delta, offset)
        self.offsets[sequence.index] = offset + sum(len(token) for token in logprobs["tokens"]) if logprobs else offset
        choice = {"index": sequence.index, "text": echo + delta.text, "logprobs": logprobs}
        if self.request.return_token_ids:
            choice["prompt_token_ids"] = sequence.prompt if first else None
        return {**choice, **self._ids(sequence, delta)}

    def _echo(self, sequence: Sequence) -> str:
        if not self.request.echo or sequence.tokenizer is None:
            return ""
        prompts = [self.request.prompt] if isinstance(self.request.prompt, str) else self.request.prompt
        said = prompts[sequence.index // self.request.choices]
        if isinstance(said, str):
            return said
        text: str = sequence.tokenizer.decode(sequence.prompt, skip_special_tokens=False)
        return text

    def _logprobs(self, sequence: Sequence, delta: Delta, offset: int) -> dict[str, Any] | None:
        if self.request.logprobs is None:
            return None
        made = range(delta.first, delta.last)
        tokens = [self._name(sequence.tokens[i]) for i in made]
        # the token that was drawn is always among the likeliest
        likely = ([(sequence.tokens[i], sequence.logprobs[i]), *sequence.tops[i]] for i in made)
        return {
            "text_offset": [*accumulate(map(len, tokens), initial=offset)][:-1],
            "token_logprobs": [max(sequence.logprobs[i], _LOWEST) for i in made],
            "tokens": tokens,
            "top_logprobs": [{self._name(token): max(value, _LOWEST) for token, value in tops} for tops in likely],
        }


@dataclass(slots=True)
class ChatAnswer(Answer):
    whole_object, chunk_object = "chat.completion", "chat.completion.chunk"

    request: ChatRequest

    def whole(self, sequences: list[Sequence]) -> dict[str, Any]:
        return {**Answer.whole(self, sequences), **self._prompt(sequences[0])}

    def opening(self, sequences: list[Sequence]) -> list[dict[str, Any]]:
        opened = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return [
            {**self._head(self.chunk_object), "choices": [{"index": s.index, **opened}], **self._prompt(s)}
            for s in sequences
        ]

    def _prompt(self, sequence: Sequence) -> dict[str, Any]:
        return {"prompt_token_ids": sequence.prompt} if self.request.return_token_ids else {}

    def _choice(self, sequence: Sequence, delta: Delta, *, streamed: bool) -> dict[str, Any]:
        said = {"delta": {"content": delta.text}}
        if not streamed:
            said = {"message": {"role": "assistant", "content": delta.text}}
        logprobs = None
        if self.request.logprobs:
            logprobs = {"content": [self._token(sequence, i) for i in range(delta.first, delta.last)]}
        return {"index": sequence.index, **said, "logprobs": logprobs, **self._ids(sequence, delta)}

    def _token(self, sequence: Sequence, i: int) -> dict[str, Any]:
        tops = [self._entry(token, value) for token, value in sequence.tops[i]]
        return {**self._entry(sequence.tokens[i], sequence.logprobs[i]), "top_logprobs": tops}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        name = self._name(token)
        return {"token": name, "logprob": max(logprob, _LOWEST), "bytes": list(name.encode())}


def _end(sequence: Sequence, finished: bool = True) -> dict[str, Any]:
    if not finished:
        return {"finish_reason": None, "stop_reason": None}
    return {
        "finish_reason": sequence.finish_reason,
        "stop_reason": sequence.stop_reason,
        VERSIONS_FIELD: _versions(sequence),
    }
