"""Parse and check requests: the OpenAI completions API with vLLM's additions, as far as this server implements it.

Unknown fields are ignored, as vLLM does. Fields that would change the text and are not implemented are refused unless
they ask for nothing: a sampler that quietly ignores a penalty is wrong data for training.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, fields
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, ValidationError, model_validator
from pydantic_core import from_json

from .sequence import Sampling
from .template import ChatTemplate, TemplateFailed

MAX_TEMPLATE_KWARGS = 8192
"""Bytes of JSON."""

BYTES_PER_TOKEN = 16
"""Text longer than this for every token that the model takes is refused before it is tokenized; English has four or
five."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    # fields that are not implemented, and the values that ask for nothing
    "best_of": (1,),
    "suffix": ("",),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "prompt_logprobs": (),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "structured_outputs": (),
    "response_format": ({"type": "text"},),
    "tools": ([],),
}
_SAMPLING = {field.name for field in fields(Sampling)} - {"max_tokens", "seed", "logprobs"}


class Refused(Exception):
    """A request that is answered with an error. `param` is the field of the request that is wrong."""

    def __init__(
        self, message: str, param: str | None = None, status: int = 400, kind: str = "invalid_request_error"
    ) -> None:
        super().__init__(message)
        self.param, self.status, self.kind = param, status, kind


@dataclass(frozen=True, slots=True)
class Reader:
    """Turns the text of a request into tokens, within the limits of this server."""

    tokenizer: Any
    template: ChatTemplate | None
    max_model_len: int
    max_prompts: int

    @property
    def max_bytes(self) -> int:
        """Bytes of the text of one prompt: tokenizing takes time and two hundred times as much memory."""
        return max(BYTES_PER_TOKEN * self.max_model_len, 4096)

    def tokens(self, text: str, special: bool) -> list[int]:
        """Tokenize text, with the special tokens that the tokenizer adds if `special`."""
        if self.tokenizer is None:
            raise Refused("this server has no tokenizer: send token ids", "prompt")
        self.check(len(text.encode()), "prompt")
        found: list[int] = self.tokenizer.encode(text, add_special_tokens=special)
        return found

    def check(self, size: int, param: str) -> None:
        """Raise Refused for more bytes of text than are tokenized."""
        if size > self.max_bytes:
            message = f"{size} bytes of text; this server takes {self.max_model_len} tokens, and no text of more than "
            raise Refused(f"{message}{self.max_bytes} bytes for them", param, 413)


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None


Stop = Annotated[str, Field(min_length=1, max_length=1024)]
OneOrMore = BeforeValidator(lambda value: [value] if isinstance(value, str) else value)


class CommonRequest(BaseModel):
    """The fields of both routes. A field that is null has its default."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    max_tokens: int | None = None
    """None: as many as the model takes."""
    n: int = Field(1, ge=1, le=256)
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)
    min_p: float = Field(0.0, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: Annotated[list[Stop], OneOrMore] = Field([], max_length=16)
    stop_token_ids: list[int] = Field([], max_length=256)
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0)
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    add_special_tokens: bool = True

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        for name, neutral in _NEUTRAL.items():
            if given.get(name) is not None and given[name] not in neutral:
                raise Refused(f"{name} is not implemented by this server; leave it out", name)
        return {name: value for name, value in given.items() if value is not None or name == "max_tokens"}

    @property
    def limit(self) -> int | None:
        """Tokens to generate at most."""
        return self.max_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        """How many of the likeliest tokens to name with each token; None for no log-probabilities at all."""
        raise NotImplementedError

    def sampling(self, max_tokens: int, choice: int) -> Sampling:
        """How the tokens of one choice are drawn."""
        seed = None if self.seed is None else self.seed + choice
        return Sampling(max_tokens, seed=seed, logprobs=self.wanted_logprobs, **self.model_dump(include=_SAMPLING))


class CompletionRequest(CommonRequest):
    """The body of POST /v1/completions."""

    prompt: str | list[Any]
    max_tokens: int | None = 16
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = False

    @property
    def wanted_logprobs(self) -> int | None:
        return self.logprobs

    def prompts(self, reader: Reader, deadline: float) -> list[list[int]]:
        """Return the token ids of each prompt. Raises Refused after `deadline`, by time.monotonic."""
        if self.echo and self.logprobs is not None:
            raise Refused("echo with logprobs is not implemented by this server", "echo")
        one = isinstance(self.prompt, str) or (self.prompt and _are_ids(self.prompt))
        prompts: list[Any] = [self.prompt] if one else [*self.prompt]
        if not prompts:
            raise Refused("prompt is empty", "prompt")
        if len(prompts) * self.n > reader.max_prompts:
            raise Refused(f"at most {reader.max_prompts} choices at once", "n")
        made = []
        for prompt in prompts:
            if time.monotonic() > deadline:
                raise Refused("reading this request took too long", "prompt")
            tokens = reader.tokens(prompt, self.add_special_tokens) if isinstance(prompt, str) else prompt
            if not isinstance(tokens, list) or not _are_ids(tokens):
                raise Refused("prompt must be text, texts, token ids, or lists of token ids", "prompt")
            if not tokens:
                raise Refused("a prompt comes to no tokens", "prompt")
            made.append(tokens)
        return made


class ChatRequest(CommonRequest):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], FailFast()]
    """Checked up to the first that is wrong: an error for each of a million would take gigabytes."""
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    def prompts(self, reader: Reader, deadline: float) -> list[list[int]]:
        """Return the token ids of the chat: one prompt."""
        if self.chat_template is not None:
            raise Refused("this server uses the model's own chat template", "chat_template")
        if reader.template is None:
            raise Refused("this model has no chat template; use /v1/completions", "messages")
        if not self.messages:
            raise Refused("messages is empty", "messages")
        if self.n > reader.max_prompts:
            raise Refused(f"at most {reader.max_prompts} choices at once", "n")
        messages = [_plain_message(message) for message in self.messages]
        reader.check(_size(messages), "messages")
        if _size(self.chat_template_kwargs) > MAX_TEMPLATE_KWARGS:
            raise Refused(f"chat_template_kwargs: at most {MAX_TEMPLATE_KWARGS} bytes", "chat_template_kwargs", 413)
        try:
            text = reader.template.render(
                messages,
                self.chat_template_kwargs,
                prompt=self.add_generation_prompt and not self.continue_final_message,
                resume=self.continue_final_message,
                most=reader.max_bytes,
            )
        except TemplateFailed as error:
            raise Refused(f"the chat template does not take this request: {error}", "messages") from None
        tokens = reader.tokens(text, special=False)
        if not tokens:
            raise Refused("these messages come to no tokens", "messages")
        return [tokens]


R = TypeVar("R", bound=CommonRequest)


def parse(body: bytes, kind: type[R]) -> R:
    """Parse the body of a request; raises Refused if it is invalid."""
    try:
        given = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise Refused(f"the body is not JSON for an object: {error}") from None
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_input=False)[0]
    if not wrong["loc"]:
        raise Refused(f"the body is not JSON for an object: {wrong['msg']}")
    param = str(wrong["loc"][0])
    raise Refused(f"{param} {wrong['msg'].replace('Input should', 'must')}", param)


def _size(value: Any) -> int:
    return len(json.dumps(value, ensure_ascii=False).encode())


def _are_ids(prompt: list[Any]) -> bool:
    return all(isinstance(token, int) and not isinstance(token, bool) for token in prompt)


def _plain_message(message: dict[str, Any]) -> dict[str, Any]:
    """Join content that comes in parts, as some clients send it, to the text that templates expect."""
    content = message.get("content")
    if isinstance(content, list):
        if any(not isinstance(part, dict) or part.get("type") != "text" for part in content):
            raise Refused("only text can be part of a message here", "messages")
        return {**message, "content": "".join(str(part.get("text", "")) for part in content)}
    return message
