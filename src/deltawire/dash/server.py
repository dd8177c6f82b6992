"""Serve the page and what it asks for. Read-only, in the standard library alone.

    GET /                                   the page, without data
    GET /api/run?have=REVISION              the document; 204 while it is what the page has
    GET /api/versions?first=100&last=900    columns of a range, for a zoomed chart
    GET /api/chain?first=100&last=160       versions of a range in detail
    GET /api/tensors?versions=41,42         changed weights per tensor
    GET /api/steps?version=41               how far weights moved

The bucket is looked at when a page asks, at most once in LOOK_EVERY seconds: no viewer, no cost. Without a
token only this machine is answered, by the name it has here, so that no other site can read the run through a browser.
"""

from __future__ import annotations

import json
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec

from ..engines.live import access
from ..engines.threaded import Handler, ThreadedServer
from ..errors import DeltawireError
from ..store import Store
from .collect import Collector
from .document import Document, encode
from .html import FRAME, html, policy

LOOK_EVERY = 0.7
"""Seconds between two looks at the bucket, at least."""

CONNECTIONS = 32
TIMEOUT = 20.0
"""Seconds that a connection may be idle."""


class Live:
    """The newest document of a run, as JSON with a revision. Threads may share it."""

    def __init__(self, collector: Collector) -> None:
        self.collector = collector
        self._lock = threading.Lock()
        self._looked = -LOOK_EVERY
        self._life, self._count = secrets.token_hex(4), 0
        self._newest = "", b""
        """Revision and encoded document; replaced as a whole."""
        self._shown: Document | None = None

    def current(self) -> tuple[str, bytes]:
        """Return the revision and the encoded document, after a look at the bucket where one is due."""
        # while one request looks, the others get what there is, however long the store takes
        if self._lock.acquire(blocking=not self._newest[1]):
            try:
                if time.monotonic() - self._looked >= LOOK_EVERY:
                    self._look()
            finally:
                self._lock.release()
        return self._newest

    def _look(self) -> None:
        document = self.collector.look()
        self._looked = time.monotonic()
        if self._shown is None or _without_clock(document) != _without_clock(self._shown):
            self._shown, self._count = document, self._count + 1
            # another server at the same address counts differently
            self._newest = f"{self._life}.{self._count}", encode(document)


def _without_clock(document: Document) -> Document:
    """A document without what time alone changes: the page counts seconds by itself."""
    replicas = [replace(replica, behind_s=None, seen_s=0.0) for replica in document.replicas]
    return msgspec.structs.replace(document, looked=0.0, replicas=replicas)


class PageServer(ThreadedServer):
    """Serves the page of one run."""

    def __init__(
        self,
        run: str | Path | Store,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        requests: int | None = None,
    ) -> None:
        self.live = Live(Collector(run, requests=requests))
        self._connections: dict[socket.socket, None] = {}
        """The oldest first."""
        super().__init__(PageHandler, host, port, token)

    @property
    def url(self) -> str:
        """Address for a browser, without the token."""
        return f"{super().url}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        if len(self._connections) >= CONNECTIONS:
            # a page connects again; a connection that says nothing keeps nobody out
            # of a copy: they end in their own threads meanwhile
            for oldest in [*self._connections][:1]:
                _end(oldest)
        self._connections[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._connections.pop(request, None)
        super().shutdown_request(request)

    def server_close(self) -> None:
        """Stop listening and end all connections: a page that is open keeps one."""
        super().server_close()
        for connection in [*self._connections]:
            _end(connection)


def _end(connection: socket.socket) -> None:
    """End a connection; the thread that serves it closes it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class PageHandler(Handler):
    timeout = TIMEOUT
    server: PageServer

    def do_GET(self) -> None:
        lengths = self.headers.get_all("Content-Length", [])
        if "Transfer-Encoding" in self.headers or any(length.strip() != "0" for length in lengths):
            # a body is not read: what follows on the connection would be taken for a request
            self.close_connection = True
        try:
            where = urlsplit(self.path)
            other = bool(where.scheme or where.netloc) and where.netloc != self.headers.get("Host", "")
        except ValueError:
            self._say(HTTPStatus.BAD_REQUEST, "the address cannot be one")
            return
        if other:
            self._say(HTTPStatus.BAD_REQUEST, "this server is no proxy: ask for a path")
        elif not self._is_allowed_host():
            self._say(HTTPStatus.FORBIDDEN, "this server answers to its own name only: open the address it printed")
        elif where.path == "/":
            self._send(
                HTTPStatus.OK, html(None, token=self.server.token is not None).encode(), "text/html; charset=utf-8"
            )
        elif where.path not in ROUTES:
            self._say(HTTPStatus.NOT_FOUND, "there is no such page")
        elif not self.has_token:
            self._say(HTTPStatus.UNAUTHORIZED, "the token is missing or wrong")
        else:
            self._answer(where.path, {name: values[-1] for name, values in parse_qs(where.query).items()})

    do_HEAD = do_GET

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer what is no request, or one of another method, like everything else: in JSON, with the same headers."""
        self.close_connection = True
        if code == HTTPStatus.NOT_IMPLEMENTED:
            self._say(HTTPStatus.METHOD_NOT_ALLOWED, "this server is read-only: it answers GET and HEAD")
        else:
            self._say(HTTPStatus(code), (message or HTTPStatus(code).phrase)[:200])

    def _answer(self, path: str, asked: dict[str, str]) -> None:
        try:
            found = ROUTES[path](self.server.live, asked)
        except (ValueError, KeyError):
            self._say(HTTPStatus.BAD_REQUEST, "the request names no version, or not in digits")
        except DeltawireError as error:
            self._say(HTTPStatus.NOT_FOUND, str(error)[:500])
        else:
            status = HTTPStatus.OK if found else HTTPStatus.NO_CONTENT
            self._send(status, found, "application/json")

    def _is_allowed_host(self) -> bool:
        """Without a token, only names of this machine: else a site could point its own name here and read the run."""
        host = self.headers.get("Host", "")
        if "@" in host:
            return False
        if self.server.token is not None:
            return True
        try:
            return access.is_loopback(urlsplit(f"//{host}").hostname)
        except ValueError:
            return False

    def _say(self, status: HTTPStatus, text: str) -> None:
        self._send(status, json.dumps({"error": text}).encode(), "application/json")

    def _send(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        if status != HTTPStatus.NO_CONTENT:
            self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", f"{policy()}; {FRAME}")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


# ── routes ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _run(live: Live, asked: dict[str, str]) -> bytes:
    revision, data = live.current()
    if asked.get("have") == revision:
        return b""
    return b'{"revision":"%s","document":%s}' % (revision.encode(), data)


def _span(asked: dict[str, str]) -> tuple[int, int]:
    return _number(asked["first"]), _number(asked["last"])


def _number(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise ValueError
    return int(text)


ROUTES: dict[str, Callable[[Live, dict[str, str]], bytes]] = {
    "/api/run": _run,
    "/api/versions": lambda live, asked: encode(live.collector.versions(*_span(asked))),
    "/api/chain": lambda live, asked: encode(live.collector.details(*_span(asked))),
    "/api/tensors": lambda live, asked: encode(live.collector.heat([*map(_number, asked["versions"].split(","))])),
    "/api/steps": lambda live, asked: encode(live.collector.steps(_number(asked["version"]))),
}
