"""Serve the objects of a run to the servers of one site, each fetched from the bucket once: `deltawire cache RUN`.

    GET /<hash>?key=deltas/…&size=5012345      200 and the object, or 404 if the bucket does not have it

A client names an object as its manifest does. It is kept in a folder, as a host's own cache keeps it (bucket/cache.py),
and sent only if its hash is the one asked for. While it is still being fetched, the answer is an interim `100 Continue`
every second, so that a client can tell a slow bucket from a dead cache.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from ..bucket.cache import Cache
from ..bucket.fetch import fetch
from ..bucket.neighbour import Neighbour, is_address
from ..bucket.versions import address_only
from ..core import keys
from ..core.errors import DeltawireError
from ..core.manifest import Blob
from ..store import Store, open_store
from .threaded import Handler, ThreadedServer

__all__ = ["CacheServer"]

log = logging.getLogger("deltawire")

CONNECTIONS = 256
"""Clients that are answered at the same time."""

TIMEOUT = 30.0
"""Seconds that a client may take to send a request, or to read on."""

SEND = 1 << 20
"""Bytes that are sent at once: a client has TIMEOUT for each, and each connection keeps so many in memory."""

ALIVE_S = 1.0
"""Seconds between two interim responses while an object is fetched: less than a client waits in silence."""

_HASH = re.compile(r"[0-9a-f]{32}")
_SIZE = re.compile(r"[0-9]{1,15}")


class CacheServer(ThreadedServer):
    """Serves the objects of one run to the servers of a site.

        with dw.CacheServer("s3://runs/chat", "/var/cache/deltawire", 20 << 30, port=8330, token=token) as server:
            server.serve_forever()

    Objects are kept in the folder, `limit` bytes of them: the least recently used go. Raises Misconfigured if the port
    is taken, or if `host` is not this machine and there is no token.
    """

    def __init__(
        self,
        run: str | Store,
        folder: str | os.PathLike[str],
        limit: int,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
    ) -> None:
        self.store, self.cache = open_store(address_only(run)), Cache(Path(folder).expanduser(), limit)
        self._room = threading.BoundedSemaphore(CONNECTIONS)
        super().__init__(CacheHandler, host, port, token)

    @staticmethod
    def name_in(setting: str) -> str | None:
        """The cache that DELTAWIRE_CACHE names; None where that is a folder. Misconfigured for what cannot be used."""
        return Neighbour(setting, None).name if is_address(setting) else None

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()


class CacheHandler(Handler):
    timeout = TIMEOUT
    server: CacheServer

    def do_GET(self) -> None:
        self.close_connection = True
        if not self.has_token:
            self._refuse(HTTPStatus.UNAUTHORIZED)
        elif (blob := _blob(self.path)) is None:
            self._refuse(HTTPStatus.BAD_REQUEST)
        elif blob.size > self.server.cache.limit:
            self._refuse(HTTPStatus.NOT_FOUND)
        else:
            self._give(blob)

    def _give(self, blob: Blob) -> None:
        try:
            with self._alive():
                # the first to ask fetches it, and the others wait for its lock
                fetched = fetch(self.server.store, blob, cache=self.server.cache)
        except DeltawireError as error:
            log.warning("%s is not served: %s", blob.key, error)
            self._refuse(HTTPStatus.NOT_FOUND)
            return
        with fetched:
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("Content-Length", str(blob.size))
            self.end_headers()
            for chunk in fetched.chunks(SEND):
                self.wfile.write(chunk)

    @contextmanager
    def _alive(self) -> Iterator[None]:
        """Send an interim response every ALIVE_S while the block runs."""
        done = threading.Event()

        def send() -> None:
            with suppress(OSError):
                while not done.wait(ALIVE_S):
                    self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")

        thread = threading.Thread(target=send, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _refuse(self, status: HTTPStatus) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _blob(path: str) -> Blob | None:
    """The object that a path names; None if it names none."""
    try:
        where = urlsplit(path)
        asked = parse_qs(where.query, max_num_fields=4)
        (key,), (size,), hash = asked["key"], asked["size"], where.path.removeprefix("/")
    except (ValueError, KeyError):
        return None
    if not _HASH.fullmatch(hash) or not _SIZE.fullmatch(size) or not keys.is_object(key):
        return None
    return Blob(key, int(size), hash)
