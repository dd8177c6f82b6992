"""A small web server that serves a store, as a proxy or a CDN would, and fails as tests tell it to."""

from __future__ import annotations

import email.utils
import re
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from deltawire.core.errors import ObjectNotFound, UnsafeName
from deltawire.store import Store

Fault = Callable[["Handler", str], bool]
"""Called with the handler and the key. True if it has answered."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: WebServer
    # small writes wait for each other otherwise
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        key = unquote(self.path).removeprefix(self.server.root)
        self.server.requests[key] += 1
        if self.server.fault is None or not self.server.fault(self, key):
            self.serve(key)

    do_HEAD = do_GET

    @property
    def range(self) -> tuple[int, int] | None:
        """The first and the last byte that are asked for."""
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        return (int(found[1]), int(found[2])) if found else None

    def serve(self, key: str, **changed: str) -> None:
        """Answer as a good server does, but for the headers in `changed`."""
        try:
            found, info = self.server.store.get(key), self.server.store.head(key)
        except (ObjectNotFound, UnsafeName):
            self.answer(404, b"nothing here")
            return
        modified = email.utils.formatdate(info.modified, usegmt=True)
        headers = {"ETag": found.etag or "", "Last-Modified": modified, **changed}
        if self.headers.get("If-None-Match") == headers["ETag"]:
            self.answer(304, b"", ETag=headers["ETag"])
            return
        data = found.data
        if self.range is not None:
            first, last = self.range[0], min(self.range[1], len(data) - 1)
            if first >= len(data):
                self.answer(416, b"")
                return
            self.answer(
                206, data[first : last + 1], **{"Content-Range": f"bytes {first}-{last}/{len(data)}"}, **headers
            )
        else:
            self.answer(200, data, **headers)

    def answer(self, status: int, data: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class WebServer(ThreadingHTTPServer):
    """Serves `store` below `/run/`."""

    daemon_threads = True
    request_queue_size = 128
    root = "/run/"

    def __init__(self, store: Store, certificate: Path | None = None) -> None:
        self.store = store
        self.fault: Fault | None = None
        """Answers instead, until it is None again."""
        self.requests: Counter[str] = Counter()
        """Requests by key."""
        super().__init__(("127.0.0.1", 0), Handler)
        if certificate is not None:
            self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self.present(certificate)
            self.socket = self._tls.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        self.url = f"{'http' if certificate is None else 'https'}://127.0.0.1:{self.server_port}/run"

    def present(self, certificate: Path) -> None:
        """Use another certificate for connections from now on."""
        self._tls.load_cert_chain(certificate)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone, or does not trust the certificate."""


@contextmanager
def serving(store: Store, certificate: Path | None = None) -> Iterator[WebServer]:
    server = WebServer(store, certificate)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
