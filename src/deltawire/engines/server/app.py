"""The HTTP routes of the built-in server: access, limits, responses. The scheduler's thread generates the tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..live import Bound, access, control, names
from .answers import Answer, ChatAnswer, CompletionAnswer, made_by
from .requests import ChatRequest, CompletionRequest, Refused, parse
from .scheduler import QueueFull, Updates, notify
from .sequence import NewTokens, Sequence

if TYPE_CHECKING:
    from .server import RolloutServer

PREPARED_AT_ONCE = 2
"""Requests that are tokenized at the same time; the other cores generate."""

PREPARE_S = 30.0
"""Seconds until a request must be tokenized, the wait for its turn included."""

BODIES_AT_ONCE = 8
"""Bodies of the largest size that may be in memory, read and not tokenized yet."""

Events = asyncio.Queue[tuple[Sequence, NewTokens]]
Kind = type[CompletionRequest] | type[ChatRequest]

_CONTROL = ("/pause", "/resume", "/is_paused", "/deltawire/")


def build(server: RolloutServer) -> FastAPI:
    """Return the application of a server."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()

        def deliver(updates: Updates) -> None:
            # one call per step, however many sequences; an event loop that has ended has no clients either
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(notify, updates)

        server.scheduler.deliver = deliver
        yield

    app = FastAPI(title="deltawire", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await _answer(server, request, CompletionRequest)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await _answer(server, request, ChatRequest)

    @app.get("/v1/models")
    async def models() -> Response:
        model = {
            "id": server.name,
            "object": "model",
            "created": int(server.started),
            "owned_by": "deltawire",
            "max_model_len": server.loaded.max_model_len,
            "deltawire": {"version": server.follower.version},
        }
        return _json({"object": "list", "data": [model]})

    @app.get("/health")
    async def health() -> Response:
        state, reason = server.health
        return _json(names.health(state, reason), 200 if state in names.SERVING else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(server.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/deltawire/fingerprint")
    async def live_weights(dtype: str = "bf16") -> Response:
        try:
            version, found = await run_in_threadpool(server.follower.sha256, dtype)
            return _json({"version": version, "sha256": found})
        except ValueError as error:
            raise Refused(str(error), "dtype") from None

    @app.post("/pause")
    async def pause(mode: Literal["abort", "wait", "keep"] = "abort", clear_cache: bool = True) -> Response:
        await run_in_threadpool(server.scheduler.pause, mode, clear_cache=clear_cache)
        return _json({"status": "paused"})

    @app.post("/resume")
    async def resume() -> Response:
        server.scheduler.resume()
        return _json({"status": "resumed"})

    @app.get("/is_paused")
    async def is_paused() -> Response:
        return _json({"is_paused": server.scheduler.paused})

    @app.exception_handler(Refused)
    async def refused(_: Request, error: Refused) -> Response:
        return _error(error)

    @app.exception_handler(HTTPException)
    async def failed(_: Request, error: HTTPException) -> Response:
        return _error(Refused(str(error.detail), status=error.status_code))

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        wrong = error.errors()[0]
        return _error(Refused(f"{wrong['loc'][-1]}: {wrong['msg']}", str(wrong["loc"][-1])))

    # the middleware below has checked the token
    app.include_router(control.routes(lambda: server.follower, server.status, lambda request: None))
    paths = frozenset(route.path for route in app.routes if isinstance(route, Route))
    app.add_middleware(_Guard, server=server, paths=paths)
    return app


class _Guard:
    """Middleware that checks the token and counts responses. Plain ASGI: streams and disconnects pass unchanged."""

    def __init__(self, app: ASGIApp, server: RolloutServer, paths: frozenset[str]) -> None:
        self._app, self._server, self._paths = app, server, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = path if path in self._paths else "other"
                self._server.metrics.requests.labels(route, str(message["status"])).inc()
            await send(message)

        app: ASGIApp = self._app
        # the path that is routed by; a URL made of it would have the client's Host header in it
        token, path = self._server.options.token, scope["path"]
        needed = path.startswith(_CONTROL) or (self._server.options.guard_all and path != "/health")
        if token is not None and needed and not access.is_bearer(Headers(scope=scope).get("authorization", ""), token):
            refused = Refused("this route needs the server's bearer token", None, 401, "authentication_error")
            app = _error(refused, {"www-authenticate": "Bearer"})
        await app(scope, receive, counted)


# ── completions ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def _answer(server: RolloutServer, http: Request, kind: Kind) -> Response:
    events: Events = asyncio.Queue()
    try:
        bound = Bound.of(http.headers.raw)
        sequences, answer = await _read(server, http, kind, events)
    except ValueError as error:
        raise Refused(str(error)) from None
    except ClientDisconnect:
        return Response(status_code=499)
    loop, seconds = asyncio.get_running_loop(), server.options.request_timeout
    until, wait = loop.time() + seconds, min(server.options.version_wait, seconds)
    if bound is not None and not await bound.reached(server.follower, lambda: server.follower.version, wait):
        return _conflict(server, bound)
    try:
        server.scheduler.add(sequences)
    except QueueFull:
        raise Refused("the queue is full; try again", status=503, kind="overloaded_error") from None
    # at the deadline generation ends: a stream ends with "abort", any other response is a 504
    deadline = loop.call_at(until, server.scheduler.cancel, sequences)
    if answer.request.stream:
        headers = {"cache-control": "no-cache", names.VERSION_HEADER: str(server.follower.version)}
        chunks = _stream(server, sequences, answer, events, deadline, bound)
        return StreamingResponse(chunks, media_type="text/event-stream", headers=headers)
    try:
        if not await _finished(server, http, sequences, events):
            return Response(status_code=499)
    finally:
        deadline.cancel()
    reasons = {sequence.finish_reason for sequence in sequences}
    if loop.time() >= deadline.when() and "abort" in reasons:
        message = f"no answer within {seconds:g} s; ask for less, or raise --request-timeout"
        raise Refused(message, status=504, kind="timeout_error")
    if "error" in reasons:
        raise Refused("computing this failed; the server's log says why", status=500, kind="internal_error")
    if bound is not None and not all(bound.allows(version) for s in sequences for version, _ in s.spans):
        return _conflict(server, bound, made_by(sequences))
    return _json(answer.whole(sequences), headers={names.VERSION_HEADER: made_by(sequences)})


def _conflict(server: RolloutServer, bound: Bound, made: str = "") -> Response:
    """The 409 for a request that accepts other versions than this server has, or than made its answer."""
    version = server.follower.version
    headers = {names.VERSION_HEADER: str(version)} if version is not None else {}
    return _json(bound.refusal(version, made, server.follower.pin), 409, headers)


async def _read(server: RolloutServer, http: Request, kind: Kind, events: Events) -> tuple[list[Sequence], Answer]:
    """Read and check a request; its sequences are not queued yet."""
    body, most = bytearray(), server.max_body
    try:
        async for part in http.stream():
            body += part
            server.held += len(part)
            if len(body) > most:
                raise Refused(f"the body is larger than {most} bytes", status=413)
            if server.held > BODIES_AT_ONCE * most:
                raise Refused("too many large requests at once; try again", status=503, kind="overloaded_error")
        state, reason = server.health
        if state not in names.SERVING:
            raise Refused(f"not ready, {state}: {reason}", status=503, kind="unavailable_error")
        # tokenizing a long prompt takes long, so it is not done in the event loop
        said, until = bytes(body), time.monotonic() + PREPARE_S
        return await server.offload.run(PREPARE_S, lambda: _prepare(server, said, kind, events, until))
    except asyncio.TimeoutError:
        message = f"reading this request took more than {PREPARE_S:g} s; send less text, or try again"
        raise Refused(message, status=503, kind="overloaded_error") from None
    finally:
        server.held -= len(body)


def _prepare(
    server: RolloutServer, body: bytes, kind: Kind, events: Events, deadline: float
) -> tuple[list[Sequence], Answer]:
    """Parse and tokenize a request: a sequence for each prompt and choice, if they can run here at all."""
    request: CompletionRequest | ChatRequest = parse(body, kind)
    prompts = request.prompts(server.reader, deadline)
    count, most = server.scheduler.batch.vocabulary, server.loaded.max_model_len
    for token in (*(token for prompt in prompts for token in prompt), *request.stop_token_ids):
        if not 0 <= token < count:
            raise Refused(f"token id {token} is not in the vocabulary of {count}", "prompt")

    def listen(sequence: Sequence, delta: NewTokens) -> None:
        events.put_nowait((sequence, delta))

    made: list[Sequence] = []
    for prompt in prompts:
        tokens = most - len(prompt) if request.limit is None else request.limit
        if tokens < 1:
            wanted = f"a prompt of {len(prompt)} tokens" if request.limit is None else f"max_tokens {tokens}"
            message = f"{wanted} leaves nothing to generate; this model takes {most} tokens in all"
            raise Refused(message, "max_tokens")
        if not server.scheduler.fits(len(prompt) + tokens):
            message = f"a prompt of {len(prompt)} tokens and max_tokens {tokens} do not fit: this server takes {most} "
            raise Refused(f"{message}tokens in all, as far as its memory for keys and values goes", "prompt")
        for choice in range(request.n):
            sampling, loaded = request.sampling(tokens, choice), server.loaded
            made.append(Sequence(prompt, sampling, len(made), loaded.tokenizer, loaded.eos, request.stream, listen))
    if isinstance(request, ChatRequest):
        return made, ChatAnswer(request, server.name, server.token_text)
    return made, CompletionAnswer(request, server.name, server.token_text)


async def _finished(server: RolloutServer, http: Request, sequences: list[Sequence], events: Events) -> bool:
    """Wait until all sequences are finished. Cancels them and returns False if the client disconnects."""

    async def all_of_them() -> None:
        for _ in sequences:
            await events.get()

    async def disconnected() -> None:
        # the body is read, so the next message can only be that the client has disconnected
        while (await http.receive())["type"] != "http.disconnect":
            pass

    work, gone = asyncio.ensure_future(all_of_them()), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        return work.done()
    finally:
        if not work.done():
            server.scheduler.cancel(sequences)
        for task in (work, gone):
            task.cancel()


async def _stream(
    server: RolloutServer,
    sequences: list[Sequence],
    answer: Answer,
    events: Events,
    deadline: asyncio.TimerHandle,
    bound: Bound | None,
) -> AsyncIterator[bytes]:
    left = len(sequences)
    try:
        for chunk in answer.opening(sequences):
            yield _event(chunk)
        while left:
            sequence, delta = await events.get()
            # all of them: a pin may have led to another version and back since the last event
            if bound is not None and not all(bound.allows(version) for version, _ in sequence.spans):
                yield _event(bound.refusal(server.follower.version, made_by(sequences), server.follower.pin))
                break
            left -= delta.finished
            yield _event(answer.chunk(sequence, delta))
        if not left and answer.request.stream_options.include_usage:
            yield _event(answer.usage_chunk(sequences))
        yield b"data: [DONE]\n\n"
    finally:
        deadline.cancel()
        if left:
            server.scheduler.cancel(sequences)


def _event(value: Any) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    headers = {**(headers or {}), **({"retry-after": "1"} if status == 503 else {})}
    return Response(msgspec.json.encode(value), status, headers=headers, media_type="application/json")


def _error(error: Refused, headers: dict[str, str] | None = None) -> Response:
    said = {"message": str(error), "type": error.kind, "param": error.param, "code": error.status}
    return _json({"error": said}, error.status, headers)
