"""Answers of the Hub that have no end, or are none."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
from test_store_hub import address

from deltawire.core.errors import (
    StoreError,
    StoreUnavailable,
)
from deltawire.store import HubStore


class EndlessHub:
    """Answers HEAD as the Hub would, and all else with bytes that never end, for as long as somebody reads them."""

    def __init__(self, head: bytes, piece: bytes) -> None:
        self.sent = 0
        """Bytes of the latest answer."""
        self._head, self._piece = head, piece
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while request := connection.recv(1 << 16):
                if request.startswith(b"HEAD"):
                    known = b"X-Xet-Hash: " + b"a" * 64 + b"\r\nX-Linked-Size: 9\r\nContent-Length: 0\r\n\r\n"
                    connection.sendall(b"HTTP/1.1 200 OK\r\n" + known)
                    continue
                connection.sendall(b"HTTP/1.1 " + self._head + b"\r\nTransfer-Encoding: chunked\r\n\r\n")
                self.sent = 0
                while True:
                    connection.sendall(b"%x\r\n%s\r\n" % (len(self._piece), self._piece))
                    self.sent += len(self._piece)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bytes, bytes], EndlessHub]]:
    hubs: list[EndlessHub] = []

    def start(head: bytes, piece: bytes) -> EndlessHub:
        hubs.append(EndlessHub(head, piece))
        monkeypatch.setenv("HF_ENDPOINT", hubs[-1].endpoint)
        monkeypatch.setenv("HF_TOKEN", "hf_none")
        return hubs[-1]

    yield start
    for hub in hubs:
        hub.close()


@pytest.mark.parametrize(
    "head", [b"200 OK", b"500 Busy", b"302 Found\r\nLocation: /more", b"200 OK\r\nContent-Encoding: gzip"]
)
def test_an_answer_without_an_end(endless: Callable[[bytes, bytes], EndlessHub], head: bytes) -> None:
    """It is read up to a limit, and what leads elsewhere is not read at all."""
    hub = endless(head, b"[" * (1 << 16))
    store = HubStore.from_url(address())
    for call in (lambda: store.get("key"), lambda: store.head("key"), lambda: list(store.list()), store.folders):
        with pytest.raises(StoreError, match="HF_ENDPOINT"):
            call()
        # what the sockets of both sides hold comes on top
        assert hub.sent < 64 << 20


@pytest.mark.parametrize("piece", [b"x" * 4096, b"data: x\n" * 512])
def test_an_event_without_an_end(endless: Callable[[bytes, bytes], EndlessHub], piece: bytes) -> None:
    hub = endless(b"200 OK\r\nContent-Type: text/event-stream", piece)
    with pytest.raises(StoreUnavailable, match="an event of more than"):
        list(HubStore.from_url(address()).announcements(threading.Event()))
    assert hub.sent < 64 << 20
