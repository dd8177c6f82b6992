"""The HTTP side: routes, who may use them, how much they take. Tokens are made by the scheduler's thread."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .. import control, names
from ..access import is_bearer
from ..fingerprint import fingerprint
from .answers import Answer, ChatAnswer, CompletionAnswer, TokenNames, made_by
from .follower import Follower
from .loading import Loaded
from .metrics import Metrics
from .offload import Offload
from .protocol import BadRequest, ChatRequest, CompletionRequest, Reader, parse
from .scheduler import QueueFull, Scheduler, Told, tell
from .sequence import Delta, Listener, Sequence

if TYPE_CHECKING:
    from .launch import Options

PREPARED_AT_ONCE = 2
"""Requests that are tokenized at the same time; the rest of the cores compute."""

PREPARE_S = 30.0
"""Seconds until a request must be tokenized, the wait for its turn included."""

BODIES_AT_ONCE = 8
"""Bodies of the largest size that may be in memory, read and not tokenized yet."""

_RETRY = {"retry-after": "1"}
_CONTROL = ("/pause", "/resume", "/is_paused", "/deltawire/")
_OPEN = ("/health",)


class Service:
    """The parts of a running server."""

    def __init__(
        self, options: Options, name: str, loaded: Loaded, scheduler: Scheduler, follower: Follower, metrics: Metrics
    ) -> None:
        self.options, self.loaded = options, loaded
        self.name = name
        """Of the model, as clients see it."""
        self.scheduler, self.follower, self.metrics = scheduler, follower, metrics
        self.names = TokenNames(loaded.tokenizer)
        self.reader = Reader(
            loaded.tokenizer, loaded.template, loaded.max_model_len, max_prompts=scheduler.limits.max_queue
        )
        self.offload = Offload(PREPARED_AT_ONCE)
        self.held = 0
        """Bytes of bodies that are in memory."""
        self.started = time.time()

    @property
    def health(self) -> tuple[str, str]:
        """State and reason."""
        if not self.scheduler.alive:
            return "failed", "nothing is computed any more; the server's log says why"
        return control.health(self.follower)

    def why_not_ready(self) -> str | None:
        state, reason = self.health
        return None if state in names.SERVING else f"{state}: {reason}"

    def sequences(
        self,
        request: CompletionRequest | ChatRequest,
        prompts: list[list[int]],
        limit: int | None,
        logprobs: int | None,
        listener: Listener,
    ) -> list[Sequence]:
        """A sequence for each prompt and choice, if they can run here at all."""
        most = self.loaded.max_model_len
        made: list[Sequence] = []
        count = self.scheduler.vocabulary
        for token in (*(token for prompt in prompts for token in prompt), *(request.stop_token_ids or ())):
            if not 0 <= token < count:
                raise BadRequest(f"token id {token} is not in the vocabulary of {count}", "prompt")
        for prompt in prompts:
            tokens = most - len(prompt) if limit is None else limit
            if tokens < 1:
                wanted = f"a prompt of {len(prompt)} tokens" if limit is None else f"max_tokens {limit}"
                raise BadRequest(
                    f"{wanted} leaves nothing to generate; this model takes {most} tokens in all", "max_tokens"
                )
            sampling = request.sampling(tokens, logprobs)
            if not self.scheduler.fits(len(prompt) + tokens):
                raise BadRequest(
                    f"a prompt of {len(prompt)} tokens and max_tokens {tokens} do not fit: this server takes {most} "
                    "tokens in all, as far as its memory for keys and values goes", "prompt",
                )  # fmt: skip
            for choice in range(request.choices):
                own = sampling if sampling.seed is None else replace(sampling, seed=sampling.seed + choice)
                made.append(
                    Sequence(
                        prompt, own, len(made), self.loaded.tokenizer, self.loaded.eos, bool(request.stream), listener
                    )
                )
        return made

    def close(self) -> None:
        """End what prepares requests."""
        self.offload.close()
        if self.reader.template is not None:
            self.reader.template.close()

    def fingerprint(self, dtype: str) -> dict[str, Any]:
        """SHA-256 of the weights that tokens are computed with, while nobody writes them."""
        with self.follower.still:
            version = self.follower.version
            return {"version": version, "sha256": fingerprint(self.loaded.model.state_dict(), dtype, exact=True)}

    def status(self) -> dict[str, Any]:
        state, reason = self.health
        scheduler = self.scheduler
        return control.status(
            "builtin",
            self.name,
            self.follower,
            state=state,
            reason=reason,
            is_paused=scheduler.paused,
            kv_policy=scheduler.kv_policy,
            running=scheduler.running,
            waiting=scheduler.waiting,
            counts=msgspec.to_builtins(scheduler.counts),
            uptime_s=time.time() - self.started,
        )


def build(service: Service) -> FastAPI:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()

        def deliver(told: Told) -> None:
            # one call per step, however many sequences; a loop that is gone has no clients either
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(tell, told)

        service.scheduler.deliver = deliver
        yield

    app = FastAPI(title="deltawire", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await _answer(service, request, CompletionRequest)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await _answer(service, request, ChatRequest)

    @app.get("/v1/models")
    async def models() -> Response:
        model = {
            "id": service.name,
            "object": "model",
            "created": int(service.started),
            "owned_by": "deltawire",
            "max_model_len": service.loaded.max_model_len,
            "deltawire": {"version": service.follower.version},
        }
        return _json({"object": "list", "data": [model]})

    @app.get("/health")
    async def health() -> Response:
        state, reason = service.health
        said = names.health(state, reason)
        return _json(said) if state in names.SERVING else _json(said, 503, _RETRY)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/deltawire/fingerprint")
    async def live_weights(dtype: str = "bf16") -> Response:
        try:
            return _json(await run_in_threadpool(service.fingerprint, dtype))
        except ValueError as error:
            return _problem(400, str(error), "invalid_request_error", "dtype")

    @app.post("/pause")
    async def pause(mode: str = "abort", clear_cache: bool = True) -> Response:
        if mode not in ("abort", "wait", "keep"):
            return _problem(400, "mode must be abort, wait or keep", "invalid_request_error", "mode")
        await run_in_threadpool(service.scheduler.pause, mode, clear_cache=clear_cache)
        return _json({"status": "paused"})

    @app.post("/resume")
    async def resume() -> Response:
        service.scheduler.resume()
        return _json({"status": "resumed"})

    @app.get("/is_paused")
    async def is_paused() -> Response:
        return _json({"is_paused": service.scheduler.paused})

    @app.exception_handler(HTTPException)
    async def refused(_: Request, error: HTTPException) -> Response:
        return _problem(error.status_code, str(error.detail), "invalid_request_error")

    # the middleware below has asked for the token
    app.include_router(control.routes(lambda: service.follower, service.status, lambda request: None))
    paths = frozenset(route.path for route in app.routes if isinstance(route, Route))
    app.add_middleware(_Guard, service=service, paths=paths)
    return app


class _Guard:
    """Asks for the token where it is needed, and counts answers. Plain ASGI: streams and disconnects pass untouched."""

    def __init__(self, app: ASGIApp, service: Service, paths: frozenset[str]) -> None:
        self._app, self._options, self._metrics, self._paths = app, service.options, service.metrics, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = scope["path"] if scope["path"] in self._paths else "other"
                self._metrics.requests.labels(route, str(message["status"])).inc()
            await send(message)

        if _may(scope, self._options):
            await self._app(scope, receive, counted)
        else:
            headers = {"www-authenticate": "Bearer"}
            refusal = _problem(401, "this route needs the server's bearer token", "authentication_error", None, headers)
            await refusal(scope, receive, counted)


def _may(scope: Scope, options: Options) -> bool:
    # what is routed by; a URL made of it would have the client's Host header in it
    path = scope["path"]
    needed = path.startswith(_CONTROL) or (options.guard_all and path not in _OPEN)
    if options.token is None or not needed:
        return True
    return is_bearer(Headers(scope=scope).get("authorization", ""), options.token)


# ── completions ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def _answer(service: Service, http: Request, kind: type[CompletionRequest] | type[ChatRequest]) -> Response:
    events: asyncio.Queue[tuple[Sequence, Delta]] = asyncio.Queue()
    body = bytearray()
    try:
        async for part in http.stream():
            body += part
            service.held += len(part)
            if len(body) > service.options.max_body:
                message = f"the body is larger than {service.options.max_body} bytes"
                return _problem(413, message, "invalid_request_error")
            if service.held > BODIES_AT_ONCE * service.options.max_body:
                return _problem(503, "too many large requests at once; try again", "overloaded_error", headers=_RETRY)
        if (reason := service.why_not_ready()) is not None:
            return _unready(reason)
        # tokenizing a long prompt takes long: not in the loop that serves everybody
        sequences, answer = await service.offload.run(PREPARE_S, _prepare, service, bytes(body), kind, events)
        service.scheduler.add(sequences)
    except BadRequest as error:
        return _problem(error.status, str(error), "invalid_request_error", error.param)
    except asyncio.TimeoutError:
        message = f"reading this request took more than {PREPARE_S:g} s; send less text, or try again"
        return _problem(503, message, "overloaded_error", headers=_RETRY)
    except QueueFull:
        return _problem(503, "the queue is full; try again", "overloaded_error", headers=_RETRY)
    except ClientDisconnect:
        return Response(status_code=499)
    finally:
        service.held -= len(body)
        del body
    # at its deadline what there is of an answer is ended: what streams ends with "abort", the rest is a 504
    loop, seconds = asyncio.get_running_loop(), service.options.request_timeout
    deadline = loop.call_later(seconds, service.scheduler.cancel, sequences)
    if answer.request.stream:
        headers = {"cache-control": "no-cache", names.VERSION_HEADER: str(service.follower.version)}
        chunks = _stream(service, sequences, answer, events, deadline)
        return StreamingResponse(chunks, media_type="text/event-stream", headers=headers)
    try:
        if not await _finished(service, http, sequences, events):
            return Response(status_code=499)
    finally:
        deadline.cancel()
    if loop.time() >= deadline.when() and any(sequence.finish_reason == "abort" for sequence in sequences):
        message = f"no answer within {seconds:g} s; ask for less, or raise --request-timeout"
        return _problem(504, message, "timeout_error")
    if any(sequence.finish_reason == "error" for sequence in sequences):
        return _problem(500, "computing this failed; the server's log says why", "internal_error")
    return _json(answer.whole(sequences), headers={names.VERSION_HEADER: made_by(sequences)})


def _prepare(
    abandoned: Callable[[], bool],
    service: Service,
    body: bytes,
    kind: type[Any],
    events: asyncio.Queue[tuple[Sequence, Delta]],
) -> tuple[list[Sequence], Answer]:
    request = parse(body, kind)
    name = service.name
    mark = secrets.token_hex(16)

    def listen(sequence: Sequence, delta: Delta) -> None:
        events.put_nowait((sequence, delta))

    answer: Answer
    if isinstance(request, ChatRequest):
        limit, logprobs = request.limit, request.wanted_logprobs
        answer = ChatAnswer(request, f"chatcmpl-{mark}", name, service.names)
    else:
        limit, logprobs = request.max_tokens, request.logprobs
        answer = CompletionAnswer(request, f"cmpl-{mark}", name, service.names)
    return service.sequences(request, request.prompts(service.reader, abandoned), limit, logprobs, listen), answer


async def _finished(
    service: Service, http: Request, sequences: list[Sequence], events: asyncio.Queue[tuple[Sequence, Delta]]
) -> bool:
    """Wait for all of them; False if the client has gone, and then they are cancelled."""

    async def all_of_them() -> None:
        for _ in sequences:
            await events.get()

    work = asyncio.ensure_future(all_of_them())
    gone = asyncio.ensure_future(_disconnected(http))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        return work.done()
    finally:
        if not work.done():
            service.scheduler.cancel(sequences)
        for task in (work, gone):
            task.cancel()


async def _disconnected(http: Request) -> None:
    # the body is read, so the next thing to hear of the client is that it has gone
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def _stream(
    service: Service,
    sequences: list[Sequence],
    answer: Answer,
    events: asyncio.Queue[tuple[Sequence, Delta]],
    deadline: asyncio.TimerHandle,
) -> AsyncIterator[bytes]:
    left = len(sequences)
    try:
        for chunk in answer.opening(sequences):
            yield _event(chunk)
        while left:
            sequence, delta = await events.get()
            left -= delta.finished
            yield _event(answer.chunk(sequence, delta))
        if answer.request.wants_usage:
            yield _event(answer.usage_chunk(sequences))
        yield b"data: [DONE]\n\n"
    finally:
        deadline.cancel()
        if left:
            service.scheduler.cancel(sequences)


def _event(value: Any) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


# ── answers that are no completions ──────────────────────────────────────────────────────────────────────────────────


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers=headers, media_type="application/json")


def _problem(
    status: int, message: str, kind: str, param: str | None = None, headers: dict[str, str] | None = None
) -> Response:
    error = {"message": message, "type": kind, "param": param, "code": status}
    return _json({"error": error}, status, headers)


def _unready(reason: str) -> Response:
    return _problem(503, f"not ready, {reason}", "unavailable_error", headers=_RETRY)
