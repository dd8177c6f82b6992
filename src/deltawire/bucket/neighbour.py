"""Objects from a cache on another host of the same site: `DELTAWIRE_CACHE=http://host:8330`, see `deltawire cache`.

It saves transfers from the bucket and is never required. What it sends is checked by its hash like everything else. If
it is away, too slow, or sends anything but the object, the bucket is used, and it is not asked again for a while.
"""

from __future__ import annotations

import http.client
import logging
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from urllib.parse import urlencode, urlsplit

from ..core.errors import Misconfigured
from ..core.manifest import Blob, File

log = logging.getLogger("deltawire")

CONNECT_S = 2.0
SILENT_S = 10.0
"""Seconds without a byte after which it is away. While it fetches the object itself, it says so every second."""

SLOWEST = 4e6
"""Bytes per second, on average, below which the bucket is used instead."""

REST_S = 60.0
"""Seconds during which it is not asked after it failed."""

_READ = 1 << 20


class Neighbour:
    """A cache of this site, by its address. Threads may share it."""

    def __init__(self, url: str, token: str | None) -> None:
        try:
            parts = urlsplit(url)
            self._host, self._port = parts.hostname or "", parts.port
        except ValueError:
            parts, self._host, self._port = urlsplit(""), "", None
        if parts.scheme not in ("http", "https") or not self._host or parts.path.strip("/") or parts.username:
            # what is before an @ may be a secret
            shown = f"http://…@{url.rpartition('@')[2]}" if "@" in url else url
            raise Misconfigured(
                f"DELTAWIRE_CACHE is {shown[:80]!r}: name a folder, or a cache with http:// and no path, such as "
                "http://10.0.0.5:8330"
            )
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._rests_until = 0.0
        self.name = f"{self._host}:{self._port}" if self._port else self._host

    def read(self, blob: Blob | File, write: Callable[[int, bytes], None]) -> bool:
        """Write the object in pieces, not yet checked; False if this cache cannot give it now."""
        if time.monotonic() < self._rests_until:
            return False
        limit = CONNECT_S + SILENT_S + blob.size / SLOWEST
        connection = self._kind(self._host, self._port, timeout=CONNECT_S)
        # whatever it sends, in whatever pieces
        watchdog = threading.Timer(limit, _cut, (connection,))
        watchdog.daemon = True
        watchdog.start()
        try:
            connection.connect()
            connection.sock.settimeout(SILENT_S)
            query = urlencode({"key": blob.key, "size": blob.size})
            connection.request("GET", f"/{blob.hash}?{query}", headers=self._headers)
            answer = connection.getresponse()
            if answer.status == 404:
                # it does not have this one: no fault
                return False
            if answer.status == 401:
                raise http.client.HTTPException("it needs its token in DELTAWIRE_CACHE_TOKEN")
            if answer.status != 200 or answer.length != blob.size:
                raise http.client.HTTPException(f"it answered {answer.status}, {answer.length} bytes")
            start = 0
            while start < blob.size and (data := answer.read(min(_READ, blob.size - start))):
                write(start, data)
                start += len(data)
            if start < blob.size:
                raise http.client.HTTPException(f"it ended after {start:,} of {blob.size:,} bytes")
            return True
        except (OSError, http.client.HTTPException) as error:
            self.failed(str(error) or type(error).__name__)
            return False
        finally:
            watchdog.cancel()
            connection.close()

    def failed(self, reason: str) -> None:
        """Do not ask it for a while."""
        self._rests_until = time.monotonic() + REST_S
        log.warning("the cache at %s is not used for %.0f s: %s", self.name, REST_S, reason)


def is_address(cache: str) -> bool:
    """Whether DELTAWIRE_CACHE names a cache on another host, not a folder; perhaps in a form that cannot be used."""
    return bool(re.match(r"https?:|[a-z0-9+.-]+://|[^/]+:[0-9]+/?\Z", cache, re.I))


@lru_cache(maxsize=8)
def neighbour(url: str, token: str | None) -> Neighbour:
    """The cache at an address. One object for all who use it, so that all know when it failed."""
    return Neighbour(url, token)


def _cut(connection: http.client.HTTPConnection) -> None:
    with suppress(OSError, AttributeError):
        # ends a read that another thread is in, which close() does not
        connection.sock.shutdown(2)
