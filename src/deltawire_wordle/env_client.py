"""A session with a Wordle environment server, for rollout workers.

async with EnvClient("http://127.0.0.1:8000") as env:
    result = await env.reset(seed=7)
    while not result.done:
        result = await env.step("crane")
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from types import TracebackType
from typing import Any

import msgspec
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI, WebSocketException

from .env_protocol import Result, State
from .errors import ServerRefused, ServerUnavailable

_LATER = ("CAPACITY_REACHED", "SESSION_ERROR")
"""Errors after which a new session may succeed."""


class _Reply(msgspec.Struct):
    type: str
    data: msgspec.Raw


class _Error(msgspec.Struct):
    message: str
    code: str = ""


class EnvClient:
    """One WebSocket, one game at a time. After ServerUnavailable the game is lost: leave, and enter a new client."""

    def __init__(self, url: str, *, timeout: float = 30.0) -> None:
        self.url = url.rstrip("/")
        self._timeout = timeout
        self._socket: ClientConnection | None = None

    async def __aenter__(self) -> EnvClient:
        address = self.url.replace("http", "ws", 1) if self.url.startswith("http") else self.url
        try:
            self._socket = await connect(f"{address}/ws", open_timeout=self._timeout, compression=None)
        except InvalidURI as error:
            raise ServerRefused(f"{self.url} is no address of an environment: {error}") from None
        except InvalidHandshake as error:
            if _is_gone(error):
                raise ServerUnavailable(f"the environment at {self.url} does not answer: {error}") from error
            raise ServerRefused(f"{self.url} speaks no OpenEnv ({error}); is it the environment's address?") from None
        except (OSError, asyncio.TimeoutError) as error:
            raise ServerUnavailable(f"the environment at {self.url} does not answer: {error!r}") from error
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._socket is not None:
            await self._socket.close()

    async def reset(self, seed: int | None = None) -> Result:
        return msgspec.json.decode(await self._ask("reset", {"seed": seed}), type=Result)

    async def step(self, guess: str) -> Result:
        return msgspec.json.decode(await self._ask("step", {"guess": guess}), type=Result)

    async def state(self) -> State:
        return msgspec.json.decode(await self._ask("state"), type=State)

    async def _ask(self, kind: str, data: Any = msgspec.UNSET) -> msgspec.Raw:
        if self._socket is None:
            raise RuntimeError("use the client in `async with`")
        message = msgspec.json.encode({"type": kind} if data is msgspec.UNSET else {"type": kind, "data": data})
        try:
            with suppress(ConnectionClosed):
                # a server that closes says why first, and that is still to be read
                await self._socket.send(message.decode())
            raw = await asyncio.wait_for(self._socket.recv(), self._timeout)
        except (OSError, WebSocketException, asyncio.TimeoutError) as error:
            raise ServerUnavailable(f"the environment at {self.url} went away: {error!r}") from error
        try:
            reply = msgspec.json.decode(raw, type=_Reply)
            if reply.type != "error":
                return reply.data
            refused = msgspec.json.decode(reply.data, type=_Error)
        except msgspec.DecodeError as error:
            raise ServerRefused(f"{self.url} answers with what is no OpenEnv message: {error}") from None
        what = ServerUnavailable if refused.code in _LATER else ServerRefused
        raise what(f"the environment at {self.url} refused {kind}: {refused.message} ({refused.code})")


def _is_gone(error: InvalidHandshake) -> bool:
    """Whether the server ended during the handshake, or a proxy before it says that it is not there."""
    if isinstance(error, InvalidStatus):
        return error.response.status_code >= 500
    return isinstance(error.__cause__, EOFError)
