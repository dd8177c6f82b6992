"""Responses in the format of the OpenAI API with vLLM's additions, and the versions that made each token."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable
from itertools import accumulate, pairwise
from typing import Any, ClassVar

from ..live import names
from .requests import ChatRequest, CommonRequest, CompletionRequest
from .sequence import NewTokens, Sequence

_LOWEST = -9999.0
"""JSON has no −∞; this is what vLLM says."""


def made_by(sequences: Iterable[Sequence]) -> str:
    """The versions that had a part in these sequences, ascending, as the response header has them."""
    return ",".join(map(str, sorted({version for s in sequences for version, _ in s.spans})))


class Answer:
    """The answer to one request, whole or in chunks: a whole answer is one large chunk. The routes differ in `_choice`.

    `name` gives the text of a single token.
    """

    prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, request: CommonRequest, model: str, name: Callable[[int], str]) -> None:
        self.request = request
        self._head = {"id": f"{self.prefix}-{secrets.token_hex(16)}", "created": int(time.time()), "model": model}
        self._name = "token_id:{}".format if request.return_tokens_as_token_ids else name

    def whole(self, sequences: list[Sequence]) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        choices = [
            {**self._choice(s, NewTokens(s.text, 0, len(s.tokens), True), streamed=False), **_end(s)} for s in sequences
        ]
        return {**self._head, "object": self.whole_object, "choices": choices, **self.usage(sequences)}

    def opening(self, sequences: list[Sequence]) -> list[dict[str, Any]]:
        """The chunks before the first token."""
        return []

    def chunk(self, sequence: Sequence, delta: NewTokens) -> dict[str, Any]:
        """The chunk with the tokens that a step added."""
        end = _end(sequence) if delta.finished else {"finish_reason": None, "stop_reason": None}
        return self._chunk({**self._choice(sequence, delta, streamed=True), **end})

    def usage_chunk(self, sequences: list[Sequence]) -> dict[str, Any]:
        """The chunk after the last token, if the client asked for it."""
        return {**self._chunk(), **self.usage(sequences)}

    def usage(self, sequences: list[Sequence]) -> dict[str, Any]:
        """Numbers of tokens. The prompt of a request with several choices counts once."""
        prompt, made = sum(len(s.prompt) for s in sequences) // self.request.n, sum(len(s.tokens) for s in sequences)
        return {"usage": {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}}

    def _chunk(self, *choices: dict[str, Any]) -> dict[str, Any]:
        return {**self._head, "object": self.chunk_object, "choices": [*choices]}

    def _choice(self, sequence: Sequence, delta: NewTokens, *, streamed: bool) -> dict[str, Any]:
        raise NotImplementedError

    def _ids(self, sequence: Sequence, delta: NewTokens) -> dict[str, Any]:
        return {"token_ids": sequence.tokens[delta.first : delta.last]} if self.request.return_token_ids else {}


class CompletionAnswer(Answer):
    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"
    request: CompletionRequest

    def __init__(self, request: CompletionRequest, model: str, name: Callable[[int], str]) -> None:
        super().__init__(request, model, name)
        self._offsets: dict[int, int] = {}
        """Where the next token of each choice begins in its text."""

    def _choice(self, sequence: Sequence, delta: NewTokens, *, streamed: bool) -> dict[str, Any]:
        first = sequence.index not in self._offsets
        echo = self._echo(sequence) if first else ""
        offset = self._offsets.get(sequence.index, 0) + len(echo)
        logprobs = self._logprobs(sequence, delta, offset)
        self._offsets[sequence.index] = offset + sum(map(len, logprobs["tokens"])) if logprobs else offset
        choice = {"index": sequence.index, "text": echo + delta.text, "logprobs": logprobs}
        if self.request.return_token_ids:
            choice["prompt_token_ids"] = sequence.prompt if first else None
        return {**choice, **self._ids(sequence, delta)}

    def _echo(self, sequence: Sequence) -> str:
        if not self.request.echo or sequence.tokenizer is None:
            return ""
        prompts = [self.request.prompt] if isinstance(self.request.prompt, str) else self.request.prompt
        said = prompts[sequence.index // self.request.n]
        return said if isinstance(said, str) else str(sequence.tokenizer.decode(sequence.prompt))

    def _logprobs(self, sequence: Sequence, delta: NewTokens, offset: int) -> dict[str, Any] | None:
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


class ChatAnswer(Answer):
    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"
    request: ChatRequest

    def whole(self, sequences: list[Sequence]) -> dict[str, Any]:
        return {**super().whole(sequences), **self._prompt(sequences[0])}

    def opening(self, sequences: list[Sequence]) -> list[dict[str, Any]]:
        opened = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return [{**self._chunk({"index": s.index, **opened}), **self._prompt(s)} for s in sequences]

    def _prompt(self, sequence: Sequence) -> dict[str, Any]:
        return {"prompt_token_ids": sequence.prompt} if self.request.return_token_ids else {}

    def _choice(self, sequence: Sequence, delta: NewTokens, *, streamed: bool) -> dict[str, Any]:
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


def _end(sequence: Sequence) -> dict[str, Any]:
    """Why a sequence ended, and which versions made its tokens."""
    ends = [*accumulate((tokens for _, tokens in sequence.spans), initial=0)]
    return {
        "finish_reason": sequence.finish_reason,
        "stop_reason": sequence.stop_reason,
        names.VERSIONS_FIELD: [
            {"version": version, "start": start, "end": end}
            for (version, _), (start, end) in zip(sequence.spans, pairwise(ends), strict=True)
        ],
    }
