"""The Wordle environment as a server: OpenEnv's WebSocket sessions and HTTP routes.

A game lives on one WebSocket (/ws). HTTP keeps nothing between two calls: /reset shows how a game begins, /step makes
the first guess of the game with the seed it is given.

Memory is bounded: so many sessions, one game in each, messages and bodies of a few kilobytes, one reply at a time. A
session that says nothing for `idle` seconds ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response, WebSocket
from starlette.requests import ClientDisconnect
from starlette.websockets import WebSocketDisconnect
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from deltawire import __version__
from deltawire.engines.http import Connections, Server

from .env_protocol import LARGEST_MESSAGE, Action, Closed, Observation, Reset, Seed, Session, State, error
from .errors import IllegalMove
from .wordle import Rules

LARGEST_FRAME = 16 * LARGEST_MESSAGE
"""Bytes of a frame. A message up to here is answered with an error, a larger one closes the connection (1009)."""
SHUTDOWN_SECONDS = 5
SPARE = 32
"""Connections beside those of the sessions."""
TRY_AGAIN_LATER = 1013
T = TypeVar("T")


class StepRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A step over HTTP."""

    action: Action
    seed: Seed | None = None


def create_app(rules: Rules, *, max_sessions: int = 512, idle: float = 600.0) -> FastAPI:
    app = FastAPI(title="Wordle", version=__version__, description="Wordle as an OpenEnv environment.")
    active: set[WebSocket] = set()

    @app.websocket("/ws")
    async def session(websocket: WebSocket) -> None:
        await websocket.accept()
        with suppress(WebSocketDisconnect):
            if len(active) >= max_sessions:
                full = f"all {max_sessions} sessions are taken; try again later"
                counts = {"active_sessions": len(active), "max_sessions": max_sessions}
                await websocket.send_text(error("CAPACITY_REACHED", full, **counts))
                await websocket.close(TRY_AGAIN_LATER)
                return
            active.add(websocket)
            try:
                await _converse(websocket, Session(rules), idle)
            finally:
                active.discard(websocket)

    @app.post("/reset")
    async def reset(request: Request) -> Response:
        return await _answer(request, Reset, lambda wanted: Session(rules).reset(wanted))

    @app.post("/step")
    async def step(request: Request) -> Response:
        def first_guess(wanted: StepRequest) -> Any:
            if wanted.seed is None:
                raise IllegalMove("HTTP keeps no game between calls; play over the WebSocket /ws, or give a seed")
            game = Session(rules)
            game.reset(Reset(wanted.seed))
            return game.step(wanted.action)

        return await _answer(request, StepRequest, first_guess)

    @app.get("/state")
    async def state() -> Response:
        return _json(Session(rules).state)

    @app.get("/health")
    async def health() -> Response:
        return _json({"status": "healthy"})

    @app.get("/metadata")
    async def metadata() -> Response:
        about = f"Guess a word of five letters in {rules.limit} tries; {len(rules.words)} words."
        return _json({"name": "wordle", "description": about, "version": __version__, "author": "deltawire"})

    @app.get("/schema")
    async def schema() -> Response:
        kinds = {"action": Action, "observation": Observation, "state": State}
        return _json({name: _schema(kind) for name, kind in kinds.items()})

    return app


async def _converse(websocket: WebSocket, session: Session, idle: float) -> None:
    """Answer one message after another, until the client goes or goes quiet."""
    while True:
        try:
            received = await asyncio.wait_for(websocket.receive(), idle)
        except asyncio.TimeoutError:
            await websocket.send_text(error("SESSION_ERROR", f"no message for {idle:g} s; connect again and reset"))
            await websocket.close()
            return
        if received["type"] == "websocket.disconnect":
            return
        text = received.get("text")
        try:
            answer = session.answer(text) if text is not None else error("INVALID_JSON", "send text frames, not binary")
        except Closed:
            await websocket.close()
            return
        try:
            # a client that sends and never reads must not hold its session for ever
            await asyncio.wait_for(websocket.send_text(answer), idle)
        except asyncio.TimeoutError:
            return


async def _answer(request: Request, kind: type[T], work: Callable[[T], Any]) -> Response:
    """Read, check and answer the body of a POST; an empty one is an empty object."""
    body = b""
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > LARGEST_MESSAGE:
                return _json({"detail": f"the body is larger than {LARGEST_MESSAGE} bytes"}, 413)
        return _json(work(msgspec.json.decode(body or b"{}", type=kind)))
    except msgspec.ValidationError as bad:
        return _json({"detail": str(bad)}, 422)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as bad:
        return _json({"detail": f"not JSON: {bad}"}, 400)
    except IllegalMove as illegal:
        return _json({"detail": str(illegal)}, 409)
    except ClientDisconnect:
        return Response(status_code=499)


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _schema(kind: type) -> dict[str, Any]:
    (described,), parts = msgspec.json.schema_components([kind], ref_template="#/$defs/{name}")
    # the type itself in place, as clients look for `properties` at the top
    return {**parts.pop(described["$ref"].rpartition("/")[2]), **({"$defs": parts} if parts else {})}


# ── running it ───────────────────────────────────────────────────────────────────────────────────────────────────────


def sessions_allowed(wanted: int) -> int:
    """How many sessions there can be, each on a connection of its own, with some left for /health and the like."""
    return max(min(wanted, Connections(most=wanted + SPARE).allowed - SPARE), 1)


def make_server(app: FastAPI, max_sessions: int) -> Server:
    """Return a server that runs until SIGINT or SIGTERM, which it raises again once all connections are closed."""
    return Server(
        app,
        Connections(most=max_sessions + SPARE),
        grace=SHUTDOWN_SECONDS,
        # the class, not its name: where `websockets` is missing, importing this module fails, before anything is served
        ws=WebSocketsSansIOProtocol,
        ws_max_size=LARGEST_FRAME,
        ws_per_message_deflate=False,  # messages are small, and each connection would hold a compressor
    )
