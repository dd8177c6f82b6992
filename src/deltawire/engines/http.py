"""An HTTP server that no client can block: a limit on connections, and a deadline for each phase of one.

uvicorn parses and answers; what it lacks is here. A connection is in one of these phases:

    header     waiting for a request: `header` seconds for its header, `idle` seconds between two requests
    body       waiting for the rest of a body: `body` seconds
    answer     the application computes and answers, and has a deadline of its own; a client that does not read what it
               is sent is disconnected after `write` seconds

When all connections are taken, the one that has been waited for longest is closed for the new one: those without a
header first, then those without a body. So clients that open connections and send nothing, or little, never keep out
one that has something to ask. Where all of them are being answered, the new one gets a 503.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

RESERVED = 64
"""File descriptors that are left for everything but connections."""

_ACCEPTED_AT_ONCE = 16
"""Connections that the event loop takes before it looks at any of them: they must fit into what is reserved."""

_KERNEL_QUEUE = 2048
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: text/plain; charset=utf-8\r\nconnection: close\r\n"
    b"retry-after: 1\r\ncontent-length: 40\r\n\r\nall connections are taken; try again now"
)
_TOO_SLOW = (
    b"HTTP/1.1 408 Request Timeout\r\ncontent-type: text/plain; charset=utf-8\r\nconnection: close\r\n"
    b"content-length: 39\r\n\r\nthe request did not arrive in good time"
)


@dataclass(frozen=True, slots=True)
class Connections:
    """Limits on connections; times are in seconds."""

    most: int = 1024
    """Connections at once; fewer where the process may not open so many files."""
    header: float = 10.0
    """Seconds for the header of a request, from the connection or its first byte."""
    idle: float = 60.0
    """Seconds between two requests."""
    body: float = 30.0
    """Seconds for the body of a request, after its header."""
    write: float = 30.0
    """Seconds a client may take to read on once its buffers are full."""

    @property
    def allowed(self) -> int:
        """Number of connections that this process can have."""
        try:
            import resource
        except ImportError:  # Windows has no such limit
            return self.most
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return self.most if files == resource.RLIM_INFINITY else max(min(self.most, files - RESERVED), 8)


def _is_ours(record: logging.LogRecord) -> bool:
    """Whether to log a line: not the traceback for a client that sends invalid UTF-8 over a WebSocket."""
    return not str(record.msg).startswith("Invalid UTF-8 sequence received")


class Server(uvicorn.Server):
    """uvicorn's server with the limits above. `on_listening` is called once it takes requests."""

    def __init__(
        self, app: Any, limits: Connections, *, grace: float, ws: str | type[asyncio.Protocol] = "none", **options: Any
    ) -> None:
        config = uvicorn.Config(
            app,
            http=partial(_Connection, limits),  # type: ignore[arg-type]
            ws=ws,
            # without: what a proxy says of a client's address is believed
            proxy_headers=False,
            server_header=False,
            log_config=None,
            # not a line for each bad request of a client
            log_level="error",
            access_log=False,
            backlog=_ACCEPTED_AT_ONCE,
            # our own deadline, which does not race with that of clients
            timeout_keep_alive=int(limits.idle) + 60,
            timeout_graceful_shutdown=max(int(grace), 1),
            **options,
        )
        super().__init__(config)
        logging.getLogger("uvicorn.error").addFilter(_is_ours)
        self.on_listening: Callable[[], None] = lambda: None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            # for bursts: the kernel keeps more than are taken at once
            listener.listen(_KERNEL_QUEUE)
        self.on_listening()

    async def on_tick(self, counter: int) -> bool:
        now = time.monotonic()
        for connection in [*self.server_state.connections]:
            if isinstance(connection, _Connection):
                connection.check(now)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        dropping = asyncio.create_task(self._drop_slow_clients())
        await super().shutdown(sockets)
        dropping.cancel()

    async def _drop_slow_clients(self) -> None:
        """Close connections that are not being answered, or whose client does not read."""
        while True:
            for connection in [*self.server_state.connections]:
                if isinstance(connection, _Connection) and (connection.phase != "answer" or connection.stuck):
                    connection.end()
            await asyncio.sleep(0.1)


class _Connection(H11Protocol):
    """One HTTP connection, with the time at which its phase began."""

    def __init__(self, limits: Connections, **options: Any) -> None:
        super().__init__(**options)
        self._limits = limits
        self.since = time.monotonic()
        self._idle = False
        """Whether a request was answered and the next one has not begun."""
        self._stuck_since: float | None = None

    @property
    def phase(self) -> str:
        """header, body or answer."""
        if self.cycle is None or self.cycle.response_complete:
            return "header"
        return "body" if self.cycle.more_body and not self.cycle.response_started else "answer"

    @property
    def stuck(self) -> bool:
        """Whether the client has stopped reading."""
        return self._stuck_since is not None

    def check(self, now: float) -> None:
        """Disconnect a client that is too slow."""
        if self._stuck_since is not None and now - self._stuck_since > self._limits.write:
            self.end()
        elif self.phase == "header" and now - self.since > (self._limits.idle if self._idle else self._limits.header):
            # after an answer there may be the rest of a body that was refused: nothing to answer a second time
            self.end(_TOO_SLOW if self.cycle is None else b"")
        elif self.phase == "body" and now - self.since > self._limits.body:
            self.end(_TOO_SLOW)

    def end(self, answer: bytes = b"") -> None:
        """Disconnect now, whether the client reads or not."""
        self.connections.discard(self)
        if answer and not self.transport.is_closing():
            self.transport.write(answer)
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()

    # ── what asyncio and uvicorn call ────────────────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) <= self._limits.allowed:
            return
        closing = [c for c in self.connections if getattr(c, "close_sent", False)]
        slow = [c for c in self.connections if isinstance(c, _Connection) and c.phase != "answer" and c is not self]
        if closing:
            # a WebSocket that was sent a close frame and does not answer
            closing[0].transport.abort()
        elif slow:
            min(slow, key=lambda connection: (connection.phase == "body", connection.since)).end()
        else:
            self.end(_REFUSAL)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._idle:
            # the first byte of the next request
            self.since, self._idle = time.monotonic(), False
        before = self.phase
        super().data_received(data)
        if before == "header" and self.phase == "body":
            self.since = time.monotonic()

    def on_response_complete(self) -> None:
        self.since, self._idle = time.monotonic(), True
        super().on_response_complete()

    def pause_writing(self) -> None:
        self._stuck_since = time.monotonic()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._stuck_since = None
        super().resume_writing()
