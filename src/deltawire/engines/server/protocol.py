"""What clients send, checked: the OpenAI completions API with vLLM's additions, as far as this server goes.

Fields that nobody here knows are ignored, as vLLM does. Fields that would change the text and are not implemented are
refused unless they ask for nothing: a sampler that quietly ignores a penalty is wrong data for training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ...core.typed_json import decode
from .sampling import Sampling
from .template import ChatTemplate, TemplateFailed

MAX_CHOICES = 256
MAX_TOP_LOGPROBS = 20
MAX_STOPS = 256
MAX_TEMPLATE_KWARGS = 8192
"""Bytes of JSON."""

BYTES_PER_TOKEN = 16
"""Text longer than this for every token that the model takes is refused unread; English has four or five."""

Int = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    # fields that are not implemented, and the values that ask for nothing
    "best_of": (None, 1),
    "suffix": (None, ""),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "length_penalty": (None, 1),
    "use_beam_search": (None, False),
    "prompt_logprobs": (None,),
    "bad_words": (None, []),
    "allowed_token_ids": (None,),
    "structured_outputs": (None,),
    "response_format": (None, {"type": "text"}),
    "tools": (None, []),
}


class BadRequest(Exception):
    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.status = param, status


@dataclass(frozen=True, slots=True)
class Reader:
    """Turns what a client sends into tokens, as far as this server takes them."""

    tokenizer: Any
    template: ChatTemplate | None
    max_model_len: int
    max_prompts: int

    @property
    def max_bytes(self) -> int:
        """Bytes of the text of one prompt: tokenizing takes time and two hundred times as much memory."""
        return max(BYTES_PER_TOKEN * self.max_model_len, 4096)

    def tokens(self, text: str, special: bool) -> list[int]:
        if self.tokenizer is None:
            raise BadRequest("this server has no tokenizer: send token ids", "prompt")
        self.check(len(text.encode()), "prompt")
        found: list[int] = self.tokenizer.encode(text, add_special_tokens=special)
        return found

    def check(self, size: int, param: str) -> None:
        if size > self.max_bytes:
            raise BadRequest(
                f"{size} bytes of text; this server takes {self.max_model_len} tokens, and no text of more than "
                f"{self.max_bytes} bytes for them",
                param,
                413,
            )


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


_Unsupported: Any = msgspec.defstruct("_Unsupported", [(name, Any, None) for name in _NEUTRAL], kw_only=True)


class Common(_Unsupported, kw_only=True):
    model: str | None = None
    n: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    seed: Int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Int] | None = None
    ignore_eos: bool = False
    min_tokens: Int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    add_special_tokens: bool | None = None

    @property
    def choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def check(self) -> None:
        for name, neutral in _NEUTRAL.items():
            if getattr(self, name) not in neutral:
                raise BadRequest(f"{name} is not implemented by this server; leave it out", name)
        _require("n", 1 <= self.choices <= MAX_CHOICES, f"between 1 and {MAX_CHOICES}")
        _require("temperature", self.temperature is None or 0 <= self.temperature < float("inf"), "at least 0")
        _require("top_p", self.top_p is None or 0 < self.top_p <= 1, "in (0, 1]")
        _require("top_k", self.top_k is None or self.top_k >= -1, "at least 1; 0 and -1 mean all")
        _require("min_p", self.min_p is None or 0 <= self.min_p <= 1, "in [0, 1]")
        _require("min_tokens", self.min_tokens is None or self.min_tokens >= 0, "at least 0")
        _require("stop_token_ids", len(self.stop_token_ids or ()) <= MAX_STOPS, f"at most {MAX_STOPS}")
        stops = self.stops
        _require("stop", len(stops) <= 16 and all(0 < len(s) <= 1024 for s in stops), "up to 16 strings, none empty")

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def sampling(self, max_tokens: int, logprobs: int | None) -> Sampling:
        return Sampling(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=min(max(self.top_k or 0, 0), 1 << 30),
            min_p=self.min_p or 0.0,
            seed=self.seed,
            logprobs=logprobs,
            stop=self.stops,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens or 0,
            skip_special_tokens=self.skip_special_tokens,
            keep_stop=self.include_stop_str_in_output,
        )


class CompletionRequest(Common, kw_only=True):
    prompt: str | list[Any]
    max_tokens: Int | None = 16
    logprobs: Int | None = None
    echo: bool = False

    def check(self) -> None:
        Common.check(self)
        _require(
            "logprobs", self.logprobs is None or 0 <= self.logprobs <= MAX_TOP_LOGPROBS, f"0 to {MAX_TOP_LOGPROBS}"
        )
        if self.echo and self.logprobs is not None:
            raise BadRequest("echo with logprobs is not implemented by this server", "echo")

    def prompts(self, reader: Reader, abandoned: Callable[[], bool]) -> list[list[int]]:
        """Text, texts, token ids, or lists of token ids, as lists of token ids."""
        prompt = self.prompt
        if isinstance(prompt, str) or (prompt and all(isinstance(p, int) and not isinstance(p, bool) for p in prompt)):
            prompt = [prompt]
        if not prompt:
            raise BadRequest("prompt is empty", "prompt")
        if len(prompt) * self.choices > reader.max_prompts:
            raise BadRequest(f"at most {reader.max_prompts} choices at once", "n")
        special = self.add_special_tokens is not False
        made = []
        for one in prompt:
            if abandoned():
                raise BadRequest("the client has gone", "prompt")
            made.append(_tokens(one, reader, special))
        return made


class ChatRequest(Common, kw_only=True):
    messages: list[dict[str, Any]]
    max_tokens: Int | None = None
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    def check(self) -> None:
        Common.check(self)
        most = self.top_logprobs or 0
        _require("top_logprobs", 0 <= most <= MAX_TOP_LOGPROBS, f"0 to {MAX_TOP_LOGPROBS}")
        if self.chat_template is not None:
            raise BadRequest("this server uses the model's own chat template", "chat_template")

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def prompts(self, reader: Reader, abandoned: Callable[[], bool]) -> list[list[int]]:
        if reader.template is None:
            raise BadRequest("this model has no chat template; use /v1/completions", "messages")
        if not self.messages:
            raise BadRequest("messages is empty", "messages")
        if self.choices > reader.max_prompts:
            raise BadRequest(f"at most {reader.max_prompts} choices at once", "n")
        messages = [_plain_message(message) for message in self.messages]
        reader.check(len(msgspec.json.encode(messages)), "messages")
        variables = self.chat_template_kwargs or {}
        if len(msgspec.json.encode(variables)) > MAX_TEMPLATE_KWARGS:
            raise BadRequest(f"chat_template_kwargs: at most {MAX_TEMPLATE_KWARGS} bytes", "chat_template_kwargs", 413)
        try:
            text = reader.template.render(
                messages,
                variables,
                prompt=self.add_generation_prompt and not self.continue_final_message,
                resume=self.continue_final_message,
                most=reader.max_bytes,
            )
        except TemplateFailed as error:
            raise BadRequest(f"the chat template does not take this request: {error}", "messages") from None
        tokens = reader.tokens(text, special=False)
        if not tokens:
            raise BadRequest("these messages come to no tokens", "messages")
        return [tokens]


def parse(body: bytes, kind: type[Any]) -> Any:
    try:
        request = decode(body, kind)
    except msgspec.ValidationError as error:
        raise BadRequest(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    request.check()
    return request


def _require(name: str, fine: bool, wanted: str) -> None:
    if not fine:
        raise BadRequest(f"{name} must be {wanted}", name)


def _tokens(prompt: Any, reader: Reader, special: bool) -> list[int]:
    if isinstance(prompt, str):
        prompt = reader.tokens(prompt, special)
    if not isinstance(prompt, list) or not all(isinstance(t, int) and not isinstance(t, bool) for t in prompt):
        raise BadRequest("prompt must be text, texts, token ids, or lists of token ids", "prompt")
    if not prompt:
        raise BadRequest("a prompt comes to no tokens", "prompt")
    return prompt


def _plain_message(message: dict[str, Any]) -> dict[str, Any]:
    """Content in parts, as some clients send it, as the text that templates expect."""
    content = message.get("content")
    if isinstance(content, list):
        if any(not isinstance(part, dict) or part.get("type") != "text" for part in content):
            raise BadRequest("only text can be part of a message here", "messages")
        return {**message, "content": "".join(str(part.get("text", "")) for part in content)}
    return message
