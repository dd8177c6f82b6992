"""Calls between the processes of a server: JSON both ways, over Unix sockets, and over TCP between nodes.

Ranks and the decoder answer on threads of their own, so what goes on beside the model never passes through the
engine's loop. Sockets lie in a folder that only this user can enter. Large arrays travel as files (arrays.py). A TCP
connection begins with a secret of the server; like the engine's own connections between nodes, it is not encrypted.
"""

from __future__ import annotations

import hmac
import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

Answer = dict[str, Any]
"""Plain values. `error` in it says that the operation failed, and why."""

Handler = Callable[..., Answer]
"""Called with the name of an operation and its arguments. Returns errors as answers."""

Address = str | tuple[str, int]
"""Path of a Unix socket, or host and port."""

_LENGTH = 8
"""Bytes that say how long a message is."""

_SECRET_S = 10.0
"""Seconds that a connection has to show the secret."""


class ChannelClosed(Exception):
    """The other process is gone, or did not answer in time."""


def listen(path: str, handle: Handler, *, prepare: Callable[[], None] = lambda: None) -> None:
    """Answer calls at a socket, in a thread, one after the other. `prepare` runs first, in that thread."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(1)
    serve(listener, handle, prepare=prepare)


def serve(
    listener: socket.socket, handle: Handler, *, secret: bytes = b"", prepare: Callable[[], None] = lambda: None
) -> None:
    """Answer calls at a socket that listens already; connections that do not begin with the secret are closed."""
    work = (listener, handle, secret, prepare)
    threading.Thread(target=_serve, args=work, name="deltawire-calls", daemon=True).start()


def _serve(listener: socket.socket, handle: Handler, secret: bytes, prepare: Callable[[], None]) -> None:
    prepare()
    while True:
        connection, _ = listener.accept()
        with connection:
            try:
                connection.settimeout(_SECRET_S)
                if not hmac.compare_digest(_exactly(connection, len(secret)), secret):
                    continue
                connection.settimeout(None)
                while True:
                    operation, arguments = _receive(connection)
                    _send(connection, handle(operation, **arguments))
            except OSError:
                # the caller has gone, and may come back
                continue


def _send(connection: socket.socket, message: Any) -> None:
    data = json.dumps(message).encode()
    connection.sendall(len(data).to_bytes(_LENGTH, "little") + data)


def _receive(connection: socket.socket) -> Any:
    size = int.from_bytes(_exactly(connection, _LENGTH), "little")
    return json.loads(_exactly(connection, size))


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = connection.recv(min(size - len(data), 1 << 20))
        if not part:
            raise ConnectionResetError("the other end is closed")
        data += part
    return bytes(data)


def _connect(address: Address) -> socket.socket:
    if isinstance(address, tuple):
        connection = socket.create_connection(address, timeout=_SECRET_S)
        connection.settimeout(None)
        # a node that is switched off closes nothing
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        return connection
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(address)
    except OSError:
        connection.close()
        raise
    return connection


class Caller:
    """The calling side of a socket. For one thread at a time."""

    def __init__(self, address: Address, *, secret: bytes = b"", patience_s: float = 60.0) -> None:
        end = time.monotonic() + patience_s
        while True:
            try:
                self._connection = _connect(address)
                self._connection.sendall(secret)
                return
            except OSError as error:
                if time.monotonic() > end:
                    raise ChannelClosed(f"no process answers at {address}: {error}") from error
                time.sleep(0.02)

    def send(self, operation: str, /, **arguments: Any) -> None:
        try:
            _send(self._connection, [operation, arguments])
        except OSError as error:
            raise ChannelClosed(f"cannot ask for {operation!r}: {error}") from error

    def receive(self, limit_s: float) -> Answer:
        try:
            self._connection.settimeout(limit_s)
            answer: Answer = _receive(self._connection)
            return answer
        except TimeoutError as error:
            raise ChannelClosed(f"no answer within {limit_s:.0f} s") from error
        except OSError as error:
            raise ChannelClosed(f"the other process is gone: {error}") from error

    def call(self, operation: str, limit_s: float, /, **arguments: Any) -> Answer:
        self.send(operation, **arguments)
        return self.receive(limit_s)

    def close(self) -> None:
        self._connection.close()


def call_all(callers: Sequence[Caller], operation: str, limit_s: float, /, **arguments: Any) -> list[Answer]:
    """Call several processes at the same time. Returns their answers in order."""
    for caller in callers:
        caller.send(operation, **arguments)
    return [caller.receive(limit_s) for caller in callers]
