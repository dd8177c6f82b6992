"""Calls between the processes of a server."""

from __future__ import annotations

import errno
import itertools
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deltawire.engines.live import channel
from deltawire.engines.live.channel import Caller, ChannelClosed, Message, call_all, listen, serve


class Go(Message):
    what: str = ""


class Stay(Message): ...


KIND = Go | Stay


def test_calls_are_answered_in_order_and_by_all(tmp_path: Path) -> None:
    for rank in (0, 1):
        listen(str(tmp_path / f"{rank}"), KIND, lambda message, rank=rank: {"rank": rank, "what": message.what})
    callers = [Caller(str(tmp_path / f"{rank}")) for rank in (0, 1)]
    assert callers[0].call(Go("x" * 3_000_000), 60) == {"rank": 0, "what": "x" * 3_000_000}
    assert [answer["rank"] for answer in call_all(callers, Go(), 60)] == [0, 1]
    callers[0].close()
    again = Caller(str(tmp_path / "0"))
    assert again.call(Go(), 60) == {"rank": 0, "what": ""}


def test_a_process_that_is_not_there_or_does_not_answer(tmp_path: Path) -> None:
    with pytest.raises(ChannelClosed, match="no process answers"):
        Caller(str(tmp_path / "nobody"), patience_s=0.0)
    never = threading.Event()

    def handle(message: Any) -> dict[str, Any]:
        never.wait(60)
        return {}

    listen(str(tmp_path / "slow"), KIND, handle)
    with pytest.raises(ChannelClosed, match="no answer within"):
        Caller(str(tmp_path / "slow")).call(Go(), 0.01)
    never.set()


def test_a_connection_from_another_node_begins_with_the_secret() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    serve(listener, KIND, lambda message: {"what": message.what}, secret=b"right")
    address = listener.getsockname()
    with pytest.raises(ChannelClosed, match="is gone"):
        Caller(address, secret=b"wrong").call(Go(), 60)
    assert Caller(address, secret=b"right").call(Go("x"), 60) == {"what": "x"}
    # the only one that is needed
    assert listener.fileno() == -1


def test_connections_without_the_secret_hold_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long they may take, and however many they are."""
    monkeypatch.setattr(channel, "_SECRET_S", 3600.0)
    monkeypatch.setattr(channel, "_STRANGERS", 2)
    listener = socket.create_server(("127.0.0.1", 0))
    strangers = [socket.create_connection(listener.getsockname(), timeout=60) for _ in range(5)]
    strangers[-1].sendall(b"r")
    serve(listener, KIND, lambda message: {"go": 1}, secret=b"right")
    assert Caller(listener.getsockname(), secret=b"right").call(Go(), 60) == {"go": 1}
    for stranger in strangers:
        with stranger:
            assert is_closed(stranger)


def test_a_secret_has_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then does not keep a connection open."""
    # a second whenever it is looked at
    monkeypatch.setattr(channel, "time", SimpleNamespace(monotonic=itertools.count().__next__, sleep=time.sleep))
    listener = socket.create_server(("127.0.0.1", 0))
    serve(listener, KIND, lambda message: {"go": 1}, secret=b"r" * 1_000_000)
    with socket.create_connection(listener.getsockname(), timeout=0.05) as stranger:
        end = time.monotonic() + 60
        closed = False
        while not closed and time.monotonic() < end:
            try:
                stranger.sendall(b"r")
                closed = stranger.recv(1) == b""
            except TimeoutError:
                continue
            except OSError:
                closed = True
        assert closed


@pytest.mark.parametrize(
    "message", (b"no JSON", b"5", b'{"type":"Fly"}', b'{"type":"Go","what":5}', b"[" * 100_000, None)
)
def test_what_is_no_call_ends_its_connection_alone(tmp_path: Path, message: bytes | None) -> None:
    path = str(tmp_path / "rank")
    listen(path, KIND, lambda message: {"what": message.what})
    with socket.socket(socket.AF_UNIX) as caller:
        caller.settimeout(60)
        caller.connect(path)
        # None: one that says that it is very large
        caller.sendall(
            (1 << 50).to_bytes(8, "little") if message is None else len(message).to_bytes(8, "little") + message
        )
        assert is_closed(caller)
    assert Caller(path).call(Go(), 60) == {"what": ""}


def test_messages_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "_MESSAGE", 1000)
    listen(str(tmp_path / "rank"), KIND, lambda message: {})
    with pytest.raises(ChannelClosed, match="more than 1,000"):
        Caller(str(tmp_path / "rank")).call(Go("x" * 1000), 60)


@pytest.mark.parametrize("secret", (b"", b"right"))
def test_calls_are_answered_after_a_connection_that_failed(secret: bytes) -> None:
    class Listener(socket.socket):
        failures = 2

        def accept(self) -> Any:
            if self.failures:
                self.failures -= 1
                raise OSError(errno.EMFILE, "too many open files")
            return super().accept()

    listener = Listener()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    address = listener.getsockname()
    serve(listener, KIND, lambda message: {"go": 1}, secret=secret)
    assert Caller(address, secret=secret).call(Go(), 60) == {"go": 1}


def is_closed(connection: socket.socket) -> bool:
    """Wait until the other end is closed."""
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True
