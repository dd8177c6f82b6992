"""A store over https that can only be read, against a server that behaves, and one that does not."""

from __future__ import annotations

import gzip
import logging
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from deltawire.core.errors import (
    BadURL,
    DeltawireError,
    ObjectTooLarge,
    PermissionDenied,
    StoreError,
    StoreUnavailable,
    TruncatedFile,
    Unsupported,
)
from deltawire.store import Chunks, HttpStore, ObjectInfo, Retrying, Store, http, open_store
from deltawire.testing import StoreTests
from soak.certificate import certificate_of
from tests.web import Handler, WebServer, serving


class Behind:
    """Writes to the bucket, reads through the web server: the store protocol of both together."""

    creates_exclusively = True

    def __init__(self, bucket: Store, web: HttpStore) -> None:
        self._bucket, self._web = bucket, web
        self.url = web.url
        self.get, self.get_if_changed = web.get, web.get_if_changed
        self.get_range, self.head = web.get_range, web.head

    def put(self, key: str, data: bytes | Chunks) -> None:
        self._bucket.put(key, data)

    def put_if_absent(self, key: str, data: bytes) -> None:
        self._bucket.put_if_absent(key, data)

    def list(self, prefix: str = "", after: str | None = None) -> Iterator[ObjectInfo]:
        # a web server tells whole seconds
        return (replace(info, modified=float(int(info.modified))) for info in self._bucket.list(prefix, after))

    def delete(self, key: str) -> None:
        self._bucket.delete(key)


@pytest.fixture
def server(store: Store) -> Iterator[WebServer]:
    with serving(store) as server:
        yield server


@pytest.fixture
def web(server: WebServer) -> HttpStore:
    return HttpStore(server.url)


class TestHttpStore(StoreTests):
    page_size = 100

    @pytest.fixture
    def store(self, store: Store) -> Iterator[Store]:
        with serving(store) as server:
            yield Behind(store, HttpStore(server.url))


# ── addresses ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    for where, url in {
        "https://cdn.example/run": "https://cdn.example/run",
        "HTTPS://cdn.example/a%20b/run/": "https://cdn.example/a%20b/run",
        "https://cdn.example": "https://cdn.example",
        "http://127.0.0.1:8330/run": "http://127.0.0.1:8330/run",
        "http://[::1]:80/run": "http://[::1]:80/run",
        "http://nginx/run": "http://nginx/run",
        "http://cache.internal/run": "http://cache.internal/run",
    }.items():
        store = open_store(where)
        assert isinstance(store, Retrying)
        assert isinstance(store.inner, HttpStore)
        assert store.url == url
        assert open_store(store.url).url == url
    for wrong in (
        "https://", "https:///run", "https://host:port/run", "https://[::1/run", "https://host/a/../b",
        "https://me:hunter2@host/run", "https://host/run?X-Amz-Signature=hunter2", "https://host/run#hunter2",
    ):  # fmt: skip
        with pytest.raises(BadURL) as refused:
            open_store(wrong)
        assert "hunter2" not in str(refused.value)
    with pytest.raises(BadURL, match="DELTAWIRE_ALLOW_HTTP=1"):
        open_store("http://cdn.example/run")
    monkeypatch.setenv("DELTAWIRE_ALLOW_HTTP", "1")
    assert open_store("http://cdn.example/run").url == "http://cdn.example/run"


def test_what_a_web_server_cannot_do_says_so(web: HttpStore) -> None:
    for listing in (web.list, lambda: web.list("replicas/"), web.folders):
        with pytest.raises(Unsupported, match="has no listings"):
            listing()
    for write in (
        lambda: web.put("key", b"x"), lambda: web.put_if_absent("key", b"x"), lambda: web.delete("key")
    ):  # fmt: skip
        with pytest.raises(Unsupported, match="can only be read"):
            write()


# ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_requests_carry_no_credentials_and_share_connections(
    web: HttpStore, server: WebServer, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("head.json", b"{}")
    seen, clients = [], set()

    def look(handler: Handler, key: str) -> bool:
        seen.append({name.lower(): value for name, value in handler.headers.items()})
        clients.add(handler.client_address)
        return False

    server.fault = look
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "DELTAWIRE_TOKEN", "HF_TOKEN"):
        monkeypatch.setenv(variable, "hunter2")
    etag = web.get("head.json").etag
    assert web.get_if_changed("head.json", etag) is None
    web.head("head.json")
    assert web.get_range("head.json", 0, 1) == b"{"
    with pytest.raises(StoreError):
        web.get("absent")
    assert len(clients) == 1
    for headers in seen:
        assert headers.keys() <= {"host", "accept-encoding", "user-agent", "cache-control", "if-none-match", "range"}
        assert headers["accept-encoding"] == "identity"
        assert headers["cache-control"] == "max-age=1"
        assert "hunter2" not in str(headers)


def test_a_connection_that_was_closed_meanwhile_is_made_anew(web: HttpStore, server: WebServer, store: Store) -> None:
    store.put("key", b"x")

    def close(handler: Handler, key: str) -> bool:
        handler.serve(key)
        handler.close_connection = True  # without having said so
        return True

    server.fault = close
    for _ in range(5):
        assert web.get("key").data == b"x"
        time.sleep(0.01)


def test_a_limit_is_kept_without_a_length_too(web: HttpStore, server: WebServer) -> None:
    def endless(handler: Handler, key: str) -> bool:
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        while True:
            handler.wfile.write(b"400\r\n" + bytes(1024) + b"\r\n")

    server.fault = endless
    with pytest.raises(ObjectTooLarge):
        web.get("key", limit=100_000)
    with pytest.raises(StoreError, match="more than that came back"):
        web.get_range("key", 0, 10)


def test_retry_after_is_obeyed_and_spread(server: WebServer, store: Store) -> None:
    store.put("key", b"x")
    for said, least in (("7", 7.0), ("Wed, 21 Oct 2065 07:28:00 GMT", 1e8), ("soon", 5.0), ("-1", 5.0)):
        server.fault = lambda handler, key, said=said: handler.answer(503, b"", **{"Retry-After": said}) is None
        with pytest.raises(StoreUnavailable) as busy:
            HttpStore(server.url).get("key")
        assert busy.value.retry_after is not None
        assert busy.value.retry_after >= least
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        server.fault = None

    for _ in range(20):
        server.fault = lambda handler, key: handler.answer(429, b"", **{"Retry-After": "8"}) is None
        assert Retrying(HttpStore(server.url), sleep=sleep).get("key").data == b"x"
    assert min(slept) >= 8
    assert max(slept) - min(slept) > 0.5, "clients that were told the same come back one after the other"


# ── bad answers ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_answers_that_are_not_what_was_asked_for(web: HttpStore, server: WebServer, store: Store) -> None:
    body = bytes(range(200))
    store.put("key", body)

    def compressed(handler: Handler, key: str) -> bool:
        handler.answer(200, gzip.compress(body), **{"Content-Encoding": "gzip", "ETag": '"a"'})
        return True

    def whole(handler: Handler, key: str) -> bool:
        handler.answer(200, body)
        return True

    def short_range(handler: Handler, key: str) -> bool:
        handler.answer(206, body[10:15], **{"Content-Range": "bytes 10-14/200"})
        return True

    def other_range(handler: Handler, key: str) -> bool:
        handler.answer(206, body[:10], **{"Content-Range": "bytes 0-9/200"})
        return True

    def nameless_range(handler: Handler, key: str) -> bool:
        handler.answer(206, body[:10])
        return True

    def broken_off(handler: Handler, key: str) -> bool:
        handler.answer(206, body[10:15], **{"Content-Range": "bytes 10-19/200", "Content-Length": "10"})
        handler.close_connection = True
        return True

    def elsewhere(handler: Handler, key: str) -> bool:
        handler.answer(302, b"", Location="http://169.254.169.254/latest?token=hunter2")
        return True

    def unchanged(handler: Handler, key: str) -> bool:
        handler.answer(304, b"")
        return True

    def forbidden(handler: Handler, key: str) -> bool:
        handler.answer(403, b"<Code>AccessDenied</Code>")
        return True

    def garbage(handler: Handler, key: str) -> bool:
        handler.wfile.write(b"220 smtp.example ready\r\n")
        handler.close_connection = True
        return True

    for fault, kind, said in (
        (compressed, StoreError, "compressed \\(gzip\\)"),
        (whole, StoreError, "let the proxy pass ranges on"),
        (short_range, TruncatedFile, "5 of the 10 bytes"),
        (other_range, StoreError, "others came back"),
        (nameless_range, StoreError, "others came back"),
        (broken_off, StoreUnavailable, "5 bytes before its end"),
        (elsewhere, StoreError, "it leads to http://169.254.169.254/latest; redirects are not followed"),
        (unchanged, StoreError, "304"),
        (forbidden, PermissionDenied, "unless the reader may list"),
        (garbage, StoreUnavailable, "220"),
    ):
        server.fault = fault
        with pytest.raises(DeltawireError, match=said) as refused:
            web.get_range("key", 10, 10)
        assert type(refused.value) is kind, fault.__name__
        assert "hunter2" not in str(refused.value)
        server.fault = None
        assert web.get_range("key", 10, 10) == body[10:20], "the next request is as good as ever"
    server.fault = whole
    assert web.get_range("key", 0, 200) == body, "that is all of it"
    with pytest.raises(TruncatedFile):
        web.get_range("key", 0, 201)
    server.fault = compressed
    with pytest.raises(StoreError, match="compressed"):
        web.get("key", limit=1000)


@pytest.mark.parametrize(
    "head, rest",
    [
        ("HTTP/1.1 200 ", "O"),
        ("HTTP/1.1 200 OK\r\nX: ", "y"),
        ("", "HTTP/1.1 100 Continue\r\n\r\n"),
        ("HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n", "x"),
        ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", "0"),
        ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n", "X: y\r\n"),
    ],
    ids=["status", "header", "interim answers", "body", "size of a chunk", "trailers"],
)
def test_an_answer_that_never_ends(
    web: HttpStore, server: WebServer, store: Store, head: str, rest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte comes in time, and a request has a limit nevertheless."""
    store.put("key", b"body")
    monkeypatch.setattr(http, "TOTAL_S", 0.3)

    def endless(handler: Handler, key: str) -> bool:
        handler.close_connection = True
        handler.wfile.write(head.encode())
        with suppress(OSError):
            while True:
                handler.wfile.write(rest.encode())
                time.sleep(0.01)
        return True

    server.fault = endless
    with pytest.raises(StoreUnavailable, match="not all of it in"):
        web.get("key", limit=1000)
    server.fault = None
    monkeypatch.undo()
    assert web.get("key").data == b"body"


def test_an_etag_that_never_changes_hides_nothing_of_an_answer(web: HttpStore, server: WebServer, store: Store) -> None:
    store.put("key", b"one")
    server.fault = lambda handler, key: handler.answer(200, store.get(key).data, ETag='"same"') is None
    first = web.get("key")
    store.put("key", b"two")
    second = web.get_if_changed("key", first.etag)
    assert second is not None
    assert second.data == b"two"


def test_an_etag_that_cannot_be_sent_back_is_none(web: HttpStore, server: WebServer, store: Store) -> None:
    store.put("key", b"one")
    server.fault = lambda handler, key: handler.serve(key, ETag='"a"\r\n folded') is None
    assert web.get("key").etag is None


def test_a_404_of_a_cache_is_asked_for_again(
    web: HttpStore, server: WebServer, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    store.put("there", b"x")

    def kept(handler: Handler, key: str) -> bool:
        if handler.headers.get("Cache-Control") == "no-cache":
            return False
        handler.answer(404, b"", Age="37")
        return True

    server.fault = kept
    assert web.get("there").data == b"x"
    server.fault = lambda handler, key: handler.answer(404, b"", Age="37") is None
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            with pytest.raises(StoreError, match="no object at"):
                web.get("there")
    assert caplog.text.count("has kept a 404") == 1


def test_tls(store: Store, server: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate = certificate_of("127.0.0.1", tmp_path / "both.pem")
    store.put("key", b"x" * (3 << 20))
    with serving(store, certificate) as secure:
        with pytest.raises(StoreError, match=r"self.signed.* SSL_CERT_FILE") as refused:
            HttpStore(secure.url).get("key")
        assert not isinstance(refused.value, StoreUnavailable)
        assert not secure.requests
        with pytest.raises(StoreError, match="certificate is not trusted"):
            HttpStore(secure.url.replace("127.0.0.1", "localhost")).get("key")
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        trusting = HttpStore(secure.url)
        for _ in range(3):
            assert trusting.get_range("key", 1, 2 << 20) == b"x" * (2 << 20)
    with pytest.raises(StoreError, match="does not speak TLS"):
        HttpStore(server.url.replace("http:", "https:")).get("key")
