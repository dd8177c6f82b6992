"""Unfinished uploads: pages of them, and servers that do not list them. test_store_object.py asks a real server."""

from __future__ import annotations

import http.server
import logging
import threading
from collections.abc import Iterator
from urllib.parse import parse_qs, urlsplit

import pytest

from deltawire.core.errors import StoreError, StoreUnavailable
from deltawire.store import ObjectStore

SPACE = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    status = 200
    uploads: list[tuple[str, str]]
    page = 2


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        asked = {name: values[0] for name, values in parse_qs(urlsplit(self.path).query, True).items()}
        assert "uploads" in asked
        assert self.headers["authorization"].startswith("AWS4-HMAC-SHA256 Credential=key/")
        after = (asked.get("key-marker", ""), asked.get("upload-id-marker", ""))
        left = [upload for upload in sorted(self.server.uploads) if upload > after]
        page = left[: self.server.page]
        items = "".join(
            f"<Upload><Key>{key}</Key><UploadId>{id}</UploadId><Initiated>2026-01-02T03:04:05.000Z</Initiated></Upload>"
            for key, id in page
        )
        more = "true" if len(left) > len(page) else "false"
        self.answer(
            f"<ListMultipartUploadsResult {SPACE}><IsTruncated>{more}</IsTruncated>{items}</ListMultipartUploadsResult>"
        )

    def do_DELETE(self) -> None:
        parts = urlsplit(self.path)
        upload = (parts.path.removeprefix("/bucket/"), parse_qs(parts.query)["uploadId"][0])
        if upload not in self.server.uploads:
            self.server.status = 404
        else:
            self.server.uploads.remove(upload)
        self.answer("")

    def answer(self, body: str) -> None:
        self.send_response(self.server.status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server(("127.0.0.1", 0), Handler)
    server.uploads = [(f"run/anchors/{number}", f"id{number}") for number in range(5)] + [("run2/anchors/0", "other")]
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def store(server: Server) -> ObjectStore:
    environ = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "hunter2",
    }
    return ObjectStore.from_url("s3://bucket/run", environ=environ)


def test_all_pages_of_this_run_and_no_other(server: Server, store: ObjectStore) -> None:
    assert store.sweep(60) == 5
    assert server.uploads == [("run2/anchors/0", "other")]


def test_young_ones_stay(server: Server, store: ObjectStore) -> None:
    assert store.sweep(1e10) == 0
    assert len(server.uploads) == 6


@pytest.mark.parametrize("status", [400, 403, 405, 501])
def test_a_server_that_does_not_show_them(
    server: Server, store: ObjectStore, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    server.status = status
    caplog.set_level(logging.WARNING, "deltawire")
    assert store.sweep(0) == 0
    assert "lifecycle rule with AbortIncompleteMultipartUpload" in caplog.text
    assert "hunter2" not in caplog.text


def test_kinds_of_failures_are_told_apart(server: Server, store: ObjectStore) -> None:
    server.status = 503
    with pytest.raises(StoreUnavailable):
        store.sweep(0)
    server.status, server.page = 200, 0
    server.uploads = []
    assert store.sweep(0) == 0


def test_an_invalid_answer_is_refused(server: Server, store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Handler, "do_GET", lambda self: self.answer("<html"))
    with pytest.raises(StoreError, match="does not parse"):
        store.sweep(0)
