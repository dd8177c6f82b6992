"""How failures of a server reach the caller, against a server that fails as told."""

from __future__ import annotations

import http.server
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from obstore.exceptions import GenericError

from deltawire.core.errors import (
    AlreadyExists,
    BadURL,
    DeltawireError,
    ObjectNotFound,
    PermissionDenied,
    StoreError,
    StoreFull,
    StoreUnavailable,
    TruncatedFile,
)
from deltawire.store import Fetched, ObjectStore, Retrying
from deltawire.store.base import SLOW_DOWN_S
from deltawire.store.object_errors import translate


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    status = 500
    body = b""
    etag: str | None = None
    requests: list[str]

    def answer(self, status: int, code: str = "") -> None:
        self.status = status
        self.body = f"<Error><Code>{code}</Code><Message>as told</Message></Error>".encode() if code else b""


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do(self) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        self.server.requests.append(f"{self.command} {self.path}")
        self.send_response(self.server.status)
        self.send_header("content-length", str(len(self.server.body)))
        if self.server.etag:
            self.send_header("etag", self.server.etag)
            self.send_header("last-modified", "Wed, 21 Oct 2026 07:28:00 GMT")
        # One request per connection: the client must not find its pooled connection closed and call that the error.
        self.send_header("connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(self.server.body)

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = do

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    server = Server(("127.0.0.1", 0), Handler)
    server.requests = []
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ALLOW_HTTP", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def tls(tmp_path: Path) -> Iterator[str]:
    """A server that has nothing, behind a certificate of its own making."""
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-keyout", key, "-out", certificate,
         "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-addext",
         "basicConstraints=critical,CA:FALSE"],
        check=True,
        capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server = Server(("127.0.0.1", 0), Handler)
    server.requests = []
    server.answer(404, "NoSuchKey")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"https://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def calls(store: ObjectStore) -> list[Callable[[], object]]:
    return [
        lambda: store.get("key"),
        lambda: store.get_if_changed("key", '"etag"'),
        lambda: store.get_range("key", 0, 1),
        lambda: store.put("key", b"x"),
        lambda: store.put("key", lambda: [b"x"]),
        lambda: store.put_if_absent("key", b"x"),
        lambda: list(store.list()),
        lambda: store.delete("key"),
        lambda: store.head("key"),  # the last: an answer to HEAD has no body, so no error code
    ]


def failures(store: ObjectStore, *, head: bool = True) -> set[type]:
    found = set()
    for call in calls(store)[: None if head else -1]:
        with pytest.raises(DeltawireError) as caught:
            call()
        found.add(type(caught.value))
        assert "s3://bucket/run" in str(caught.value), "a message names the place"
        assert "hunter2" not in str(caught.value)
        assert "Debug source" not in str(caught.value)
    return found


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (500, "InternalError", StoreUnavailable),
        (502, "", StoreUnavailable),
        (503, "SlowDown", StoreUnavailable),
        (429, "", StoreUnavailable),
        (408, "", StoreUnavailable),
        (403, "AccessDenied", PermissionDenied),
        (401, "", PermissionDenied),
        (507, "", StoreFull),
        (501, "NotImplemented", StoreError),
        (405, "", StoreError),
    ],
)
def test_status_of_every_verb(server: Server, status: int, code: str, expected: type) -> None:
    server.answer(status, code)
    assert failures(ObjectStore.from_url("s3://bucket/run", retries=0)) == {expected}


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (400, "RequestTimeout", StoreUnavailable),
        (409, "ConditionalRequestConflict", StoreUnavailable),
        (400, "ExpiredToken", PermissionDenied),
        (403, "SignatureDoesNotMatch", PermissionDenied),
    ],
)
def test_codes_that_outrank_the_status(server: Server, status: int, code: str, expected: type) -> None:
    server.answer(status, code)
    assert failures(ObjectStore.from_url("s3://bucket/run", retries=0), head=False) == {expected}


@pytest.mark.parametrize(
    ("status", "code", "expected", "next_step"),
    [
        (403, "AccessDenied", PermissionDenied, "allow it to get, put, list and delete"),
        (403, "SignatureDoesNotMatch", PermissionDenied, "check AWS_SECRET_ACCESS_KEY"),
        (403, "InvalidAccessKeyId", PermissionDenied, "check AWS_ACCESS_KEY_ID"),
        (403, "RequestTimeTooSkewed", PermissionDenied, "set this machine's clock"),
        (400, "ExpiredToken", PermissionDenied, "sign in again"),
        (400, "InvalidToken", PermissionDenied, "AWS_SESSION_TOKEN does not belong to this key"),
        (403, "", PermissionDenied, "check the key, its permissions and the bucket's name"),
        (400, "AuthorizationHeaderMalformed", BadURL, "set AWS_REGION"),
        (301, "PermanentRedirect", BadURL, "set AWS_REGION"),
        (404, "NoSuchBucket", BadURL, "create it first"),
        (507, "XMinioStorageFull", StoreFull, "free some space"),
        (403, "QuotaExceeded", StoreFull, "raise the quota, or prune"),
        (400, "QuotaExceeded", StoreFull, "raise the quota, or prune"),
    ],
)
def test_the_next_step(server: Server, status: int, code: str, expected: type, next_step: str) -> None:
    server.answer(status, code)
    store = ObjectStore.from_url("s3://bucket/run", retries=0)
    for call in calls(store)[:-1]:
        with pytest.raises(expected, match=next_step) as caught:
            call()
        assert caught.value.__cause__ is None, "the client's own words quote whole requests"


def test_unreachable_endpoints(monkeypatch: pytest.MonkeyPatch, server: Server, tls: str, tmp_path: Path) -> None:
    for endpoint, expected, says in (
        (tls, StoreError, "certificate is not trusted; name its authority's file in AWS_CA_BUNDLE"),
        (f"https://127.0.0.1:{server.server_port}", StoreError, "does not speak TLS.*write http://"),
        ("http://no-such-host.invalid", StoreUnavailable, "failed to lookup address.*check the endpoint"),
    ):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
        with pytest.raises(expected, match=says) as caught:
            ObjectStore.from_url("s3://bucket/run", retries=0).get("key")
        assert type(caught.value) is expected, "only what may pass is worth a retry"
    monkeypatch.setenv("AWS_ENDPOINT_URL", tls)
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "certificate.pem"))
    with pytest.raises(ObjectNotFound):
        ObjectStore.from_url("s3://bucket/run", retries=0).get("key")
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "absent.pem"))
    with pytest.raises(BadURL, match=r"AWS_CA_BUNDLE names .*absent.pem, which cannot be read"):
        ObjectStore.from_url("s3://bucket/run", retries=0)


def test_a_missing_bucket_is_not_a_missing_object(server: Server) -> None:
    server.answer(404, "NoSuchBucket")
    store = ObjectStore.from_url("s3://bucket/run", retries=0)
    assert failures(store, head=False) == {BadURL}
    with pytest.raises(BadURL, match="no such bucket; create it first"):
        store.put("key", b"x")
    server.answer(404, "NoSuchKey")
    with pytest.raises(ObjectNotFound, match="s3://bucket/run/key"):
        store.get("key")


def test_a_message_says_what_the_server_said(server: Server) -> None:
    server.answer(403, "AccessDenied")
    with pytest.raises(PermissionDenied, match=r"s3://bucket/run/key: 403 Forbidden: AccessDenied: as told; "):
        ObjectStore.from_url("s3://bucket/run", retries=0).get("key")


def test_a_key_does_not_decide_what_an_error_means(server: Server) -> None:
    server.answer(404, "NoSuchKey")
    store = ObjectStore.from_url("s3://bucket/run", retries=0)
    for key in ("NoSuchBucket", "SlowDown/x", "<Code>NoSuchBucket</Code>", "status code: x"):
        with pytest.raises(ObjectNotFound):
            store.get(key)


def test_create_is_never_repeated_by_the_client(server: Server) -> None:
    """Its second try would find the first one's object and report a conflict with itself."""
    server.answer(500)
    store = ObjectStore.from_url("s3://bucket/run", retries=1)
    with pytest.raises(StoreUnavailable):
        store.put_if_absent("key", b"x")
    assert server.requests == ["PUT /bucket/run/key"]
    server.requests.clear()
    with pytest.raises(StoreUnavailable):
        store.put("key", b"x")
    assert server.requests == ["PUT /bucket/run/key"] * 2


@pytest.mark.parametrize(
    ("status", "code", "rest"),
    [(503, "SlowDown", True), (429, "", True), (503, "", True), (500, "InternalError", False)],
)
def test_an_overloaded_bucket_is_left_alone(server: Server, status: int, code: str, rest: bool) -> None:
    """It gets a read once, and not again before some seconds, at a time that differs from client to client."""
    server.answer(status, code)
    slept: list[float] = []
    store = ObjectStore.from_url("s3://bucket/run")
    with pytest.raises(StoreUnavailable) as busy:
        store.get("key")
    assert busy.value.retry_after == (SLOW_DOWN_S if rest else None)
    assert server.requests == ["GET /bucket/run/key"]
    with pytest.raises(StoreUnavailable):
        Retrying(store, sleep=slept.append, clock=lambda: 0.0).get("key")
    assert len(server.requests) == 1 + len(slept) + 1
    assert (min(slept) >= SLOW_DOWN_S) == rest
    assert max(slept) - min(slept) > 0.5


def test_taken_keys(server: Server) -> None:
    server.answer(412, "PreconditionFailed")
    with pytest.raises(AlreadyExists):
        ObjectStore.from_url("s3://bucket/run", retries=0).put_if_absent("key", b"x")


def test_conditional_get(server: Server) -> None:
    store = ObjectStore.from_url("s3://bucket/run", retries=0)
    server.answer(304)
    assert store.get_if_changed("key", '"same"') is None
    # A gateway that ignores the condition sends the object again, with the etag we have.
    server.status, server.body, server.etag = 200, b"content", '"same"'
    assert store.get_if_changed("key", '"same"') is None
    assert store.get_if_changed("key", '"other"') == Fetched(b"content", '"same"')


def test_a_range_past_the_end(server: Server) -> None:
    server.answer(416, "InvalidRange")
    with pytest.raises(TruncatedFile):
        ObjectStore.from_url("s3://bucket/run", retries=0).get_range("key", 10, 1)


def test_small_streams_take_one_request(server: Server) -> None:
    server.status, server.etag = 200, '"etag"'
    ObjectStore.from_url("s3://bucket/run", retries=0).put("key", lambda: [b"one", b"two"])
    assert server.requests == ["PUT /bucket/run/key"]


def test_nobody_listens(monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{bound.getsockname()[1]}")
        store = ObjectStore.from_url("s3://bucket/run", retries=0)
        assert failures(store) == {StoreUnavailable}
        with pytest.raises(StoreUnavailable, match="Connection refused"):
            store.get("key")


def test_nobody_answers(monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    monkeypatch.setenv("AWS_TIMEOUT", "100ms")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(StoreUnavailable, match="timed out"):
            ObjectStore.from_url("s3://bucket/run", retries=0).get("key")


@pytest.mark.parametrize(
    ("scheme", "advice"),
    [
        ("s3", "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"),
        ("gs", "GOOGLE_APPLICATION_CREDENTIALS"),
        ("az", "AZURE_STORAGE_CONNECTION_STRING"),
    ],
)
def test_advice_for_missing_credentials_is_that_of_the_cloud(scheme: str, advice: str) -> None:
    asked = GenericError("Generic S3 error: Error performing PUT http://169.254.169.254/latest/api/token in 1s")
    said = str(translate(asked, f"{scheme}://bucket/run"))
    assert advice in said
    for other in {"AWS", "GOOGLE", "AZURE"} - {advice.partition("_")[0]}:
        assert f"{other}_" not in said


def test_a_server_with_a_full_disk_that_does_not_say_so(server: Server) -> None:
    """SeaweedFS answers an upload with 500 InternalError when no volume has room."""
    server.answer(500, "InternalError")
    with pytest.raises(StoreUnavailable, match="look whether the server's disk is full"):
        ObjectStore.from_url("s3://bucket/run", retries=0).put("key", b"x")
