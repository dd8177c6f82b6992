"""One cache for a site, over HTTP: one transfer from the bucket, and never a wrong byte from a neighbour."""

from __future__ import annotations

import http.client
import http.server
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from deltawire.bucket import neighbour as neighbours
from deltawire.bucket.cache import shared_cache
from deltawire.bucket.fetch import fetch
from deltawire.bucket.run import Run
from deltawire.bucket.verify import verify
from deltawire.core import keys
from deltawire.core.errors import Misconfigured
from deltawire.core.manifest import Blob
from deltawire.engines import cache_server
from deltawire.engines.cache_server import CacheServer
from deltawire.replica import Replica
from deltawire.store import Store
from deltawire_wordle.counting import CountingStore
from support import HookedStore, blank, content, history, publish, same, stored

WAIT = 120.0


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """No neighbour of an earlier test rests."""
    neighbours.neighbour.cache_clear()
    monkeypatch.delenv("DELTAWIRE_CACHE_TOKEN", raising=False)


@contextmanager
def running(server: Any) -> Iterator[Any]:
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Starts the cache of a site and points this process's environment at it."""

    @contextmanager
    def start(store: Store, limit: int = 10**9, token: str | None = None) -> Iterator[CacheServer]:
        with running(CacheServer(store, tmp_path / "objects", limit, token=token)) as server:
            monkeypatch.setenv("DELTAWIRE_CACHE", server.url)
            # a busy machine is silent too
            monkeypatch.setattr(neighbours, "SILENT_S", WAIT)
            monkeypatch.setattr(neighbours, "CONNECT_S", WAIT)
            yield server

    return start


def test_eight_replicas_of_a_site_fetch_an_object_once(store: Store, site: Any) -> None:
    versions = history(6)
    publish(store, versions)
    alone, bucket = CountingStore(store), CountingStore(store)
    Replica(alone, heartbeat=0).sync(blank(versions[0]))
    ours = [CountingStore(store) for _ in range(8)]
    with site(bucket):

        def follow(number: int) -> bool:
            weights = blank(versions[0])
            Replica(ours[number], id=f"r{number}").sync(weights)
            return same(weights, versions[5])

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(follow, range(8)))
    # data is read in ranges, and nothing else is
    assert bucket.requests["get_range"] == alone.requests["get_range"] > 1, "each object once, by the cache"
    assert [counted.requests["get_range"] for counted in ours] == [0] * 8, "none by a replica"


def test_objects_of_many_pieces(store: Store, site: Any) -> None:
    blob = stored(store, os.urandom((3 << 20) + 17))
    told: list[int] = []
    with site(store), fetch(store, blob, told.append) as data:
        assert data.read(0, blob.size) == store.get(blob.key).data
    assert sum(told) == blob.size


def test_each_send_is_small(store: Store, site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time limit of a connection holds for one send, and its bytes are in memory."""
    blob, sent, setup = stored(store, os.urandom(3_000_000)), [], cache_server.CacheHandler.setup

    def counted(handler: Any) -> None:
        setup(handler)
        write = handler.wfile.write

        def record(data: bytes) -> int:
            sent.append(len(data))
            return int(write(data))

        handler.wfile.write = record

    monkeypatch.setattr(cache_server.CacheHandler, "setup", counted)
    with site(store):
        assert content(CountingStore(store), blob) == store.get(blob.key).data
    assert sum(sent) > blob.size
    assert max(sent) == 1 << 20


def test_an_object_that_takes_long_is_waited_for(store: Store, site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache says that it still fetches, and its client reads that and waits on."""
    monkeypatch.setattr(cache_server, "ALIVE_S", 0.02)
    blob, heard, enough = stored(store, os.urandom(5000)), 0, threading.Event()
    read = http.client.HTTPResponse._read_status  # type: ignore[attr-defined]

    def counted(answer: http.client.HTTPResponse) -> Any:
        nonlocal heard
        heard += 1
        if heard == 4:
            enough.set()
        return read(answer)

    monkeypatch.setattr(http.client.HTTPResponse, "_read_status", counted)
    slow = HookedStore(store, lambda moment, verb, key: enough.wait(WAIT) and None if moment == "before" else None)
    counting = CountingStore(store)
    with site(slow):
        assert content(counting, blob) == store.get(blob.key).data
    assert enough.is_set()
    assert counting.bytes_in == 0


def test_a_token_where_there_is_one(
    store: Store, site: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    blob, counting = stored(store, os.urandom(5000)), CountingStore(store)
    with site(store, token="secret"):
        assert content(counting, blob) == store.get(blob.key).data
        assert counting.bytes_in == blob.size, "refused, so from the bucket"
        assert "it needs its token in DELTAWIRE_CACHE_TOKEN" in caplog.text
        monkeypatch.setenv("DELTAWIRE_CACHE_TOKEN", "secret")
        assert content(counting, blob) == store.get(blob.key).data
        assert counting.bytes_in == blob.size
    with pytest.raises(Misconfigured, match="lets others read the run"):
        CacheServer(store, "nowhere", 1, host="0.0.0.0")


def test_what_the_cache_does_not_have(store: Store, site: Any, tmp_path: Path) -> None:
    """Objects that are gone, damaged or too large for it, and keys that no manifest names, are left to the bucket."""
    blob, large = stored(store, os.urandom(5000)), stored(store, os.urandom(20_000), version=2)
    other = Blob("replicas/a.json", 5, "0" * 32)
    store.put(other.key, b"12345")
    with site(store, limit=10_000) as server:
        assert content(store, large) == store.get(large.key).data
        for wrong in (other, Blob(blob.key, blob.size, "0" * 32), Blob(keys.anchor(9, "0" * 8), 5, "0" * 32)):
            neighbours.neighbour.cache_clear()
            near = shared_cache(store)
            assert isinstance(near, neighbours.Neighbour)
            assert not near.read(wrong, lambda start, data: None)
        neighbours.neighbour.cache_clear()
        assert content(store, blob) == store.get(blob.key).data
        (tmp_path / "objects" / blob.hash).write_bytes(b"x" * blob.size)
        assert content(store, blob) == store.get(blob.key).data
        assert server.cache.limit == 10_000


def test_verify_reads_the_bucket(store: Store, site: Any) -> None:
    publish(store, history(3))
    with site(store):
        Replica(store, heartbeat=0).sync(blank(history(1)[0]))
        key = Run.open(store).manifest(2).links[0].objects[0].key
        data = bytearray(store.get(key).data)
        data[-1] ^= 1
        store.put(key, bytes(data))
        assert verify(Run.open(store)).failure is not None


# ── neighbours that lie, are slow, or are away ───────────────────────────────────────────────────────────────────────


def neighbour(answer: Callable[[http.server.BaseHTTPRequestHandler], None]) -> http.server.ThreadingHTTPServer:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.close_connection = True
            answer(self)

        def log_message(self, *_: Any) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.asked = 0  # type: ignore[attr-defined]
    return server


def sent(head: bytes, body: bytes = b"") -> Callable[[http.server.BaseHTTPRequestHandler], None]:
    return lambda handler: handler.wfile.write(head + b"\r\n\r\n" + body) and None


def forever(handler: http.server.BaseHTTPRequestHandler) -> None:
    """Says again and again that it is about to answer."""
    while True:
        handler.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        time.sleep(0.05)


def drip(handler: http.server.BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")
    while True:
        handler.wfile.write(b"x")
        time.sleep(0.05)


BAD = {
    "lies": sent(b"HTTP/1.1 200 OK\r\ncontent-length: 1000", b"y" * 1000),
    "has another size": sent(b"HTTP/1.1 200 OK\r\ncontent-length: 999", b"x" * 999),
    "has no end": sent(b"HTTP/1.1 200 OK\r\ncontent-length: 999999999999", b"x" * 5000),
    "says no length": sent(
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked", b"3e8\r\n" + b"x" * 1000 + b"\r\n0\r\n\r\n"
    ),
    "ends early": sent(b"HTTP/1.1 200 OK\r\ncontent-length: 1000", b"x" * 500),
    "leads elsewhere": sent(b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:9/\r\ncontent-length: 0"),
    "is no HTTP": sent(b"SSH-2.0-OpenSSH_9.2"),
    "has endless headers": sent(b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 1000),
    "is silent": lambda handler: time.sleep(WAIT),
    "goes on and on": forever,
    "drips": drip,
}


@pytest.mark.parametrize("kind", BAD)
def test_a_neighbour_that_is_no_help_costs_a_timeout_at_most(
    store: Store, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(neighbours, "SILENT_S", 0.3)
    monkeypatch.setattr(neighbours, "CONNECT_S", 0.3)
    blob = stored(store, b"x" * 1000)
    with running(neighbour(BAD[kind])) as server:
        monkeypatch.setenv("DELTAWIRE_CACHE", f"http://127.0.0.1:{server.server_port}")
        counting = CountingStore(store)
        with caplog.at_level(logging.WARNING, "deltawire"):
            assert content(counting, blob) == content(counting, blob) == b"x" * 1000
    assert counting.bytes_in == 2000
    assert len([r for r in caplog.records if "is not used for 60 s" in r.getMessage()]) == 1, "then it is left alone"


def test_a_neighbour_that_is_away(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("DELTAWIRE_CACHE", f"http://127.0.0.1:{taken.getsockname()[1]}")
        assert content(store, stored(store, b"x" * 1000)) == b"x" * 1000


@pytest.mark.parametrize(
    "url",
    [
        *("http://", "http://:80", "http://a:b", "http://a/b", "http:a", "https://u:secret@a", "http://a:99999"),
        # without http:// it would be the name of a folder
        *("127.0.0.1:8331", "localhost:8330/", "[::1]:8330", "s3://runs/cache"),
    ],
)
def test_addresses_that_are_none(store: Store, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("DELTAWIRE_CACHE", url)
    with pytest.raises(Misconfigured, match="DELTAWIRE_CACHE is") as refused:
        Replica(store)
    assert "secret" not in str(refused.value)
