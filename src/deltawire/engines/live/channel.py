"""Calls between the processes of a server: JSON both ways, over Unix sockets, and over TCP between nodes.

Ranks and the decoder answer on threads of their own, so what goes on beside the model never passes through the
engine's loop. Sockets lie in a folder that only this user can enter. Large arrays travel as files (arrays.py). A TCP
connection begins with a secret of the server; like the engine's own connections between nodes, it is not encrypted. One
such connection is taken, and then no other.
"""

from __future__ import annotations

import errno
import hmac
import logging
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec

log = logging.getLogger("deltawire")

Answer = dict[str, Any]
"""Plain values. `error` in it says that the operation failed, and why."""


class Message(msgspec.Struct, tag=True):
    """A request to a process. Each kind is a struct of its own, sent with its name."""

    def text(self) -> str:
        """As JSON, to go through an engine's own channels."""
        return msgspec.json.encode(self).decode()


Handler = Callable[[Any], Answer]
"""Called with a message. Returns errors as answers."""

Address = str | tuple[str, int]
"""Path of a Unix socket, or host and port."""

_LENGTH = 8
"""Bytes that say how long a message is."""

_MESSAGE = 1 << 30
"""Bytes that a message may have at most."""

_SECRET_S = 10.0
"""Seconds that a connection has to show the secret, all of it."""

_STRANGERS = 64
"""Number of connections that may be about to show it; of more, the oldest are closed."""

_RETRY_S = 0.02
"""Seconds until what has failed is tried again."""


_NOTICED_AFTER = (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 60_000))
"""Options by which a node that is gone is noticed within a minute: the last one where it was sent something."""


class ChannelClosed(Exception):
    """The other process is gone, or did not answer in time."""


def listen(path: str, kind: Any, handle: Handler, *, prepare: Callable[[], None] = lambda: None) -> socket.socket:
    """Answer messages of a kind at a socket, in a thread, one after the other. `prepare` runs first, in that thread,
    which ends once the socket that is returned is shut down and the last caller has gone."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(1)
    serve(listener, kind, handle, prepare=prepare)
    return listener


def serve(
    listener: socket.socket,
    kind: Any,
    handle: Handler,
    *,
    secret: bytes = b"",
    prepare: Callable[[], None] = lambda: None,
) -> None:
    """Answer messages at a socket that listens already. With a secret, only the first connection that begins with it is
    answered, and the socket is closed as soon as there is one."""
    decoder = msgspec.json.Decoder(kind)
    work = (listener, lambda data: handle(decoder.decode(data)), secret, prepare)
    threading.Thread(target=_serve, args=work, name="deltawire-calls", daemon=True).start()


def _serve(listener: socket.socket, handle: Handler, secret: bytes, prepare: Callable[[], None]) -> None:
    prepare()
    # until the listener is closed or shut down
    with suppress(OSError), listener:
        if secret:
            with listener:
                connection = _first_with(secret, listener)
            _answer(connection, handle)
            return
        while True:
            if (accepted := _accept(listener)) is not None:
                _answer(accepted, handle)


def _accept(listener: socket.socket) -> socket.socket | None:
    try:
        return listener.accept()[0]
    except OSError as error:
        if error.errno in (errno.EBADF, errno.EINVAL):
            raise
        # this connection is gone already, or there are too many files just now
        time.sleep(_RETRY_S)
        return None


def _first_with(secret: bytes, listener: socket.socket) -> socket.socket:
    """The first connection that begins with the secret. All others are closed, and none holds up another."""
    strangers: dict[socket.socket, tuple[float, bytearray]] = {}

    def close(connections: Sequence[socket.socket]) -> None:
        for connection in connections:
            del strangers[connection]
            connection.close()

    listener.setblocking(False)
    try:
        while True:
            now = time.monotonic()
            close([connection for connection, (end, _) in strangers.items() if end <= now])
            close([*strangers][:-_STRANGERS])
            wait_s = min((end for end, _ in strangers.values()), default=now + _SECRET_S) - now
            for connection in select.select([listener, *strangers], [], [], wait_s)[0]:
                if connection is listener:
                    if (accepted := _accept(listener)) is not None:
                        accepted.setblocking(False)
                        strangers[accepted] = time.monotonic() + _SECRET_S, bytearray()
                    continue
                _, shown = strangers[connection]
                part = b""
                with suppress(OSError):
                    part = connection.recv(len(secret) - len(shown))
                shown += part
                if hmac.compare_digest(shown, secret):
                    del strangers[connection]
                    connection.setblocking(True)
                    return connection
                if not part or len(shown) == len(secret):
                    close([connection])
    finally:
        close([*strangers])


def _answer(connection: socket.socket, handle: Handler) -> None:
    """Answer the calls of one connection, until its other end is closed or sends what is no call."""
    with connection:
        try:
            while True:
                _send(connection, handle(_receive(connection)))
        except OSError:
            # the caller has gone, and may come back
            pass
        except Exception:
            log.warning("a connection is closed: a call could not be read or answered", exc_info=True)


def _send(connection: socket.socket, message: Any) -> None:
    data = msgspec.json.encode(message)
    _check_size(len(data))
    connection.sendall(len(data).to_bytes(_LENGTH, "little") + data)


def _receive(connection: socket.socket) -> bytes:
    size = int.from_bytes(_exactly(connection, _LENGTH), "little")
    _check_size(size)
    return _exactly(connection, size)


def _check_size(size: int) -> None:
    if size > _MESSAGE:
        raise ValueError(f"a message of {size:,} bytes, more than {_MESSAGE:,}")


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
        for name, value in _NOTICED_AFTER:
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
                time.sleep(_RETRY_S)

    def send(self, message: Message) -> None:
        try:
            _send(self._connection, message)
        except (OSError, ValueError) as error:
            raise ChannelClosed(f"cannot ask for {type(message).__name__}: {error}") from error

    def receive(self, limit_s: float) -> Answer:
        try:
            self._connection.settimeout(limit_s)
            answer: Answer = msgspec.json.decode(_receive(self._connection), type=Answer)
            return answer
        except TimeoutError as error:
            raise ChannelClosed(f"no answer within {limit_s:.0f} s") from error
        except OSError as error:
            raise ChannelClosed(f"the other process is gone: {error}") from error
        except (ValueError, msgspec.MsgspecError) as error:
            raise ChannelClosed(f"the other process does not answer as it should: {error}") from error

    def call(self, message: Message, limit_s: float) -> Answer:
        self.send(message)
        return self.receive(limit_s)

    def close(self) -> None:
        self._connection.close()


def call_all(callers: Sequence[Caller], message: Message, limit_s: float) -> list[Answer]:
    """Call several processes at the same time. Returns their answers in order."""
    for caller in callers:
        caller.send(message)
    return [caller.receive(limit_s) for caller in callers]
