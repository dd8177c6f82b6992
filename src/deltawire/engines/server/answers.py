"""What clients get back, in the words of the OpenAI API and vLLM, and which versions made it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

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
    spans, start = [], 0
    for version, tokens in sequence.spans:
        spans.append({"version": version, "start": start, "end": start + tokens})
        start += tokens
    return spans


@dataclass(slots=True)
class Answer:
    """How one request is answered; the parts that differ between the two routes are in the subclasses."""

    request: CompletionRequest | ChatRequest
    id: str
    model: str
    names: TokenNames
    created: int = field(default_factory=lambda: int(time.time()))
    offsets: dict[int, int] = field(default_factory=dict)
    # where the next token of a streamed choice begins in its text

    def whole(self, sequences: list[Sequence]) -> dict[str, Any]:
        raise NotImplementedError

    def chunk(self, sequence: Sequence, delta: Delta) -> dict[str, Any]:
        raise NotImplementedError

    def opening(self, sequences: list[Sequence]) -> list[dict[str, Any]]:
        """Chunks before the first token."""
        return []

    def usage_chunk(self, sequences: list[Sequence]) -> dict[str, Any]:
        return {**self._head(self.chunk_object), "choices": [], "usage": usage(sequences, self.request.choices)}

    @property
    def chunk_object(self) -> str:
        raise NotImplementedError

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _name(self, token: int) -> str:
        return self.names(token, bool(self.request.return_tokens_as_token_ids))

    def _end(self, sequence: Sequence, finished: bool = True) -> dict[str, Any]:
        if not finished:
            return {"finish_reason": None, "stop_reason": None}
        return {
            "finish_reason": sequence.finish_reason,
            "stop_reason": sequence.stop_reason,
            VERSIONS_FIELD: _versions(sequence),
        }


@dataclass(slots=True)
class CompletionAnswer(Answer):
    request: CompletionRequest

    @property
    def chunk_object(self) -> str:
        return "text_completion"

    def whole(self, sequences: list[Sequence]) -> dict[str, Any]:
        choices = []
        for sequence in sequences:
            echo = self._echo(sequence)
            choice: dict[str, Any] = {
                "index": sequence.index,
                "text": echo + sequence.text,
                "logprobs": self._logprobs(sequence, 0, len(sequence.tokens), len(echo)),
                **self._end(sequence),
            }
            if self.request.return_token_ids:
                choice["token_ids"] = sequence.tokens
                choice["prompt_token_ids"] = sequence.prompt
            choices.append(choice)
        return {
            **self._head("text_completion"),
            "choices": choices,
            "usage": usage(sequences, self.request.choices),
        }

    def chunk(self, sequence: Sequence, delta: Delta) -> dict[str, Any]:
        first = sequence.index not in self.offsets
        echo = self._echo(sequence) if first else ""
        offset = self.offsets.get(sequence.index, 0) + len(echo)
        logprobs = self._logprobs(sequence, delta.first, delta.last, offset)
        self.offsets[sequence.index] = offset + sum(len(token) for token in logprobs["tokens"]) if logprobs else offset
        choice: dict[str, Any] = {
            "index": sequence.index,
            "text": echo + delta.text,
            "logprobs": logprobs,
            **self._end(sequence, delta.finished),
        }
        if self.request.return_token_ids:
            choice["token_ids"] = sequence.tokens[delta.first : delta.last]
            choice["prompt_token_ids"] = sequence.prompt if first else None
        return {**self._head("text_completion"), "choices": [choice]}

    def _echo(self, sequence: Sequence) -> str:
        if not self.request.echo or sequence.tokenizer is None:
            return ""
        prompts = [self.request.prompt] if isinstance(self.request.prompt, str) else self.request.prompt
        said = prompts[sequence.index // self.request.choices]
        if isinstance(said, str):
            return said
        text: str = sequence.tokenizer.decode(sequence.prompt, skip_special_tokens=False)
        return text

    def _logprobs(self, sequence: Sequence, first: int, last: int, offset: int) -> dict[str, Any] | None:
        if self.request.logprobs is None:
            return None
        tokens = [self._name(token) for token in sequence.tokens[first:last]]
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        tops = []
        for i in range(first, last):
            # the token that was drawn is always among them
            likely = [(sequence.tokens[i], sequence.logprobs[i]), *sequence.tops[i]]
            tops.append({self._name(token): max(value, _LOWEST) for token, value in likely})
        return {
            "text_offset": offsets,
            "token_logprobs": [max(value, _LOWEST) for value in sequence.logprobs[first:last]],
            "tokens": tokens,
            "top_logprobs": tops,
        }


@dataclass(slots=True)
class ChatAnswer(Answer):
    request: ChatRequest

    @property
    def chunk_object(self) -> str:
        return "chat.completion.chunk"

    def whole(self, sequences: list[Sequence]) -> dict[str, Any]:
        choices = []
        for sequence in sequences:
            choice: dict[str, Any] = {
                "index": sequence.index,
                "message": {"role": "assistant", "content": sequence.text},
                "logprobs": self._logprobs(sequence, 0, len(sequence.tokens)),
                **self._end(sequence),
            }
            if self.request.return_token_ids:
                choice["token_ids"] = sequence.tokens
            choices.append(choice)
        return {
            **self._head("chat.completion"),
            "choices": choices,
            "usage": usage(sequences, self.request.choices),
            **({"prompt_token_ids": sequences[0].prompt} if self.request.return_token_ids else {}),
        }

    def opening(self, sequences: list[Sequence]) -> list[dict[str, Any]]:
        return [
            {
                **self._head("chat.completion.chunk"),
                "choices": [
                    {
                        "index": sequence.index,
                        "delta": {"role": "assistant", "content": ""},
                        "logprobs": None,
                        "finish_reason": None,
                    }
                ],
                **({"prompt_token_ids": sequence.prompt} if self.request.return_token_ids else {}),
            }
            for sequence in sequences
        ]

    def chunk(self, sequence: Sequence, delta: Delta) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": sequence.index,
            "delta": {"content": delta.text},
            "logprobs": self._logprobs(sequence, delta.first, delta.last),
            **self._end(sequence, delta.finished),
        }
        if self.request.return_token_ids:
            choice["token_ids"] = sequence.tokens[delta.first : delta.last]
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def _logprobs(self, sequence: Sequence, first: int, last: int) -> dict[str, Any] | None:
        if not self.request.logprobs:
            return None
        content = []
        for i in range(first, last):
            entry = self._entry(sequence.tokens[i], sequence.logprobs[i])
            entry["top_logprobs"] = [self._entry(token, value) for token, value in sequence.tops[i]]
            content.append(entry)
        return {"content": content}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        name = self._name(token)
        return {"token": name, "logprob": max(logprob, _LOWEST), "bytes": list(name.encode())}
