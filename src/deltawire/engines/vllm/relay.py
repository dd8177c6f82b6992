"""Several API servers in front of the same engines (`--api-server-count`): the first one follows the run, the others
pass on what concerns it, over a Unix socket in a folder that the process that starts them has made (`register`)."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import uvicorn
from fastapi import Request, Response

from ..live import control
from . import SOCKETS


def _socket() -> str:
    return os.path.join(os.environ[SOCKETS], "api.sock")


def serve(app: Any) -> None:
    """Answer the other API servers, in a thread."""
    server = uvicorn.Server(uvicorn.Config(app, uds=_socket(), log_config=None, access_log=False, lifespan="off"))
    threading.Thread(target=server.run, name="deltawire-relay", daemon=True).start()


class Relay:
    """The state of the API server that follows, for one that does not."""

    def __init__(self) -> None:
        self._http = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=_socket()), base_url="http://deltawire", timeout=3600
        )
        self.version: int | None = None
        """The version that is served, as of the last look."""
        self.pin: int | None = None
        self.listeners: set[Callable[[], None]] = set()
        """Called whenever the version or the pin has changed."""

    async def connect(self, patience_s: float = 600.0) -> None:
        """Wait until the follower is there and holds generation; then look at its version every now and then."""
        end = time.monotonic() + patience_s
        while not await self._look():
            if time.monotonic() > end:
                raise TimeoutError("the API server that follows the run does not answer")
            await asyncio.sleep(0.1)
        self._task = asyncio.create_task(self._watch())

    async def close(self) -> None:
        self._task.cancel()
        await self._http.aclose()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(0.2)
            await self._look()

    async def _look(self) -> bool:
        try:
            status = (await self._http.get("/deltawire/status")).json()
            found = status["version"], status.get("pin")
        except (httpx.TransportError, ValueError, KeyError):
            return False
        if found != (self.version, self.pin):
            self.version, self.pin = found
            for listener in tuple(self.listeners):
                listener()
        return True

    def hurry(self, seconds: float) -> None:
        """Do nothing: the follower polls at its own pace."""

    async def answer(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request on, and its answer back."""
        body = b""
        async for part in Request(scope, receive).stream():
            body += part
            if len(body) > control.MAX_BODY:
                await Response(status_code=413)(scope, receive, send)
                return
        kept = {name: value for name, value in scope["headers"] if name in (b"authorization", b"content-type")}
        try:
            found = await self._http.request(
                scope["method"], scope["path"], params=scope["query_string"], content=body, headers=[*kept.items()]
            )
            status, content = found.status_code, found.content
        except httpx.TransportError as error:
            status, content = 503, f'{{"detail": "no API server follows the run: {type(error).__name__}"}}'.encode()
        await Response(content, status, media_type="application/json")(scope, receive, send)


class RelayMiddleware:
    """Passes requests about the run on to the API server that follows it; `relay` is None there."""

    def __init__(self, app: Any, relay: Any) -> None:
        self._app, self._relay = app, relay

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        relay: Relay | None = self._relay()
        path = scope.get("path", "")
        mine = path.startswith("/deltawire/") or path in ("/update_weights", "/health")
        if relay is None or scope["type"] != "http" or not mine:
            await self._app(scope, receive, send)
        else:
            await relay.answer(scope, receive, send)
