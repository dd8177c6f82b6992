"""A run that is read over https, from a CDN or a proxy in front of its bucket: `https://cdn.example/run`.

Only reads: GET, HEAD, ranges and conditional requests, without credentials. There are no listings, and writing raises
Unsupported. By the standard library and not by the bucket client, which follows redirects to wherever they lead and
does not tell when a server asks to come back later.

What comes back is not trusted. An answer that is not what was asked for (compressed, a redirect, the whole object for a
range, less than it promises) is an error, and the next request starts anew.
"""

from __future__ import annotations

import email.utils
import http.client
import io
import logging
import os
import re
import ssl
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn
from urllib.parse import quote, unquote, urlsplit

from deltawire.core import keys
from deltawire.core.errors import (
    BadURL,
    DeltawireError,
    ObjectNotFound,
    PermissionDenied,
    StoreError,
    StoreUnavailable,
    TruncatedFile,
    UnsafeName,
    Unsupported,
)
from deltawire.core.settings import switch
from deltawire.store.aws import is_near
from deltawire.store.base import (
    Chunks,
    Fetched,
    Level,
    ObjectInfo,
    check_key,
    check_range,
    check_size,
    is_transient,
    rest_after,
)

log = logging.getLogger("deltawire")

SCHEMES = ("http", "https")
ALLOW_HTTP = "DELTAWIRE_ALLOW_HTTP"

CONNECT_S, SILENT_S, TOTAL_S = 5.0, 60.0, 900.0
"""Seconds to connect, without a byte, and of a request in all: as with buckets (address.py)."""

_IDLE = 16
"""Connections that are kept open for the next request."""

_DOUBTED = 64
"""Objects that are read past caches; the latest."""

_READ, _SHORT = 1 << 20, 4 << 10
_MAX_OFFSET = (1 << 63) - 1

_ETAG = re.compile(r"[\x21-\x7e]{1,1000}")
_RANGE = re.compile(r"bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19}|\*)", re.ASCII)
_FOR_EVER = (keys.ANCHORS, keys.DELTAS, keys.FILES)
"""Folders of objects that never change: a cache may answer with what it has, however old."""

_FRESH = {"Cache-Control": "max-age=1"}
_PAST_CACHES = {"Cache-Control": "no-cache"}
_ALWAYS = {"Accept-Encoding": "identity", "User-Agent": "deltawire"}
_RANGES = "let the proxy pass ranges on (docs/https.md)"


@dataclass(frozen=True, slots=True)
class _Answer:
    """A usable answer to one request, read to its end."""

    status: int
    headers: http.client.HTTPMessage
    data: bytes = b""

    @property
    def etag(self) -> str | None:
        """Its ETag; None where it has none that can be sent back."""
        found = self.headers.get("ETag", "")
        return found if _ETAG.fullmatch(found) else None

    @property
    def is_kept(self) -> bool:
        """Whether a cache answered from what it has."""
        return self.headers.get("Age", "0").strip() != "0"


class _Timed(io.RawIOBase):
    """What a connection brings, for as long as a request may take: single bytes, or lines without an end, cannot keep
    a reader waiting. http.client itself limits the time of each byte only."""

    def __init__(self, connection: io.RawIOBase) -> None:
        self._connection, self._until = connection, time.monotonic() + TOTAL_S

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        if time.monotonic() > self._until:
            raise TimeoutError(f"not all of it in {TOTAL_S:.0f} s")
        return self._connection.readinto(buffer)

    def close(self) -> None:
        self._connection.close()
        super().close()


class _Response(http.client.HTTPResponse):
    """A response whose head and body together have TOTAL_S seconds."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.fp: io.BufferedReader = io.BufferedReader(_Timed(self.fp.detach()))


class HttpStore:
    """A store that reads from an address of a web server. Threads may share it."""

    creates_exclusively = False

    def __init__(self, url: str) -> None:
        """Raises BadURL for an address that could hold a secret, and for http:// through the internet."""
        scheme = url.partition(":")[0]
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port or (443 if scheme == "https" else 80)
        except ValueError:
            raise BadURL(f"this is no address: write {scheme}://host/run") from None
        if "@" in parts.netloc or parts.query or parts.fragment:
            raise BadURL(
                f"{scheme}://… is read without credentials: leave out what stands before an @ and after ? or #, "
                "or name the bucket itself (s3://…)"
            )
        if not host:
            raise BadURL(f"{url}: no host; write {scheme}://host/run")
        if scheme == "http" and not is_near(url) and not switch(ALLOW_HTTP):
            raise BadURL(
                f"{url}: without TLS anybody on the way could read the weights, and change those of a run that is not "
                f"signed; write https://, or set {ALLOW_HTTP}=1 if that is meant"
            )
        prefix = unquote(parts.path).strip("/")
        try:
            self._root = quote("/" + check_key(prefix) + "/" if prefix else "/")
        except (UnsafeName, UnicodeEncodeError) as error:
            raise BadURL(f"{url}: {error}") from None
        self._host, self._port = host, port
        self.url = f"{scheme}://{parts.netloc}{self._root}".rstrip("/")
        self._tls = ssl.create_default_context() if scheme == "https" else None
        self._idle: list[http.client.HTTPConnection] = []
        self._lock, self._process = threading.Lock(), os.getpid()
        self._has_warned = False
        self._doubted: deque[str] = deque(maxlen=_DOUBTED)

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def get(self, key: str, *, limit: int | None = None) -> Fetched:
        answer = self._ask("GET", key, {}, limit)
        return Fetched(answer.data, answer.etag)

    def get_if_changed(self, key: str, etag: str | None, *, limit: int | None = None) -> Fetched | None:
        if not etag:
            return self.get(key, limit=limit)
        answer = self._ask("GET", key, {"If-None-Match": etag}, limit)
        # an answer with the same ETag is taken as it is: of some servers the ETag never changes
        return None if answer.status == 304 else Fetched(answer.data, answer.etag)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        check_range(start, length)
        where, end = self._where(key), start + length
        if length == 0 or end > _MAX_OFFSET:  # HTTP has no empty range
            if end > self.head(key).size:
                raise TruncatedFile(f"{where} ends before byte {end}")
            return b""
        answer = self._ask("GET", key, {"Range": f"bytes={start}-{end - 1}"}, length)
        found = _RANGE.fullmatch(answer.headers.get("Content-Range", ""))
        # the whole object is right where it is one range
        if int(found[1]) != start if found else answer.status == 206 or start:
            raise StoreError(f"{where}: bytes {start} to {end - 1} were asked for, and others came back; {_RANGES}")
        if len(answer.data) != length:
            raise TruncatedFile(f"{where}: {len(answer.data)} of the {length} bytes from {start} on came back")
        return answer.data

    def head(self, key: str) -> ObjectInfo:
        answer = self._ask("HEAD", key, {}, None)
        size, modified = answer.headers.get("Content-Length", ""), answer.headers.get("Last-Modified", "")
        if not size.isdecimal() or len(size) > 18:
            raise StoreError(f"{self._where(key)}: the answer does not say how large the object is")
        return ObjectInfo(key, int(size), _timestamp(modified) or 0.0, answer.etag)

    def doubt(self, key: str) -> None:
        self._doubted.append(key)

    # ── what a web server does not have ──────────────────────────────────────────────────────────────────────────────

    def list(self, prefix: str = "", after: str | None = None) -> Iterator[ObjectInfo]:
        self._refuse_listing()

    def folders(self, prefix: str = "") -> Level:
        self._refuse_listing()

    def _refuse_listing(self) -> NoReturn:
        raise Unsupported(
            f"{self.url} has no listings, and this needs one: over {self.url.partition(':')[0]} a run can be followed, "
            "served, shown and checked out; for all else name its bucket (s3://…)"
        )

    def put(self, key: str, data: bytes | Chunks) -> None:
        self._refuse_writing(key)

    def put_if_absent(self, key: str, data: bytes) -> None:
        self._refuse_writing(key)

    def delete(self, key: str) -> None:
        self._refuse_writing(key)

    def _refuse_writing(self, key: str) -> NoReturn:
        check_key(key)
        raise Unsupported(f"{self.url} can only be read: to write, name the bucket itself (s3://…)")

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _ask(self, method: str, key: str, headers: dict[str, str], limit: int | None) -> _Answer:
        """Return an answer that is usable, or raise what it means. A 404 of a cache is asked for once more, past it."""
        fresh = {} if key.startswith(_FOR_EVER) else _FRESH
        if key in self._doubted:
            fresh = _PAST_CACHES
        answer = self._once(method, key, headers | fresh, limit)
        if answer.status == 404 and answer.is_kept:
            # a cache that keeps a 404 hides what was published since
            answer = self._once(method, key, headers | _PAST_CACHES, limit)
            if answer.status == 404 and answer.is_kept and not self._has_warned:
                self._has_warned = True
                log.warning("%s: a cache has kept a 404, so new versions come late; let it keep none", self.url)
        if answer.status == 404:
            raise ObjectNotFound(f"no object at {self._where(key)}")
        return answer

    def _once(self, method: str, key: str, headers: dict[str, str], limit: int | None) -> _Answer:
        """Send a request and return its answer: 200, 206, 304 or 404, as far as the request allows them."""
        where, path = self._where(key), self._root + quote(check_key(key))
        with _translated(where), self._sent(method, path, headers) as response:
            status, answered = response.status, response.headers
            if status in (404, 410):
                return _Answer(404, answered)
            if status == 304 and "If-None-Match" in headers:
                return _Answer(304, answered)
            if status != 200 and (status != 206 or "Range" not in headers):
                raise _refusal(status, answered, where)
            if (coding := answered.get("Content-Encoding", "identity").lower()) != "identity":
                raise StoreError(f"{where} came compressed ({_shown(coding)}), unasked: turn that off in the proxy")
            if method == "HEAD":
                return _Answer(status, answered)
            return _Answer(status, answered, _read(response, where, limit, ranged="Range" in headers))

    @contextmanager
    def _sent(self, method: str, path: str, headers: dict[str, str]) -> Iterator[http.client.HTTPResponse]:
        """Send a request, on a connection that is open or else a new one, which is kept for the next one."""
        while True:
            connection = self._open_connection()
            used = connection.sock is not None
            try:
                connection.request(method, path, headers={**_ALWAYS, **headers})
                connection.sock.settimeout(SILENT_S)
                response = connection.getresponse()
                break
            except BaseException as error:
                connection.close()
                # a server ends what was idle; of these at most _IDLE are tried
                if not (used and isinstance(error, ConnectionError | ssl.SSLError)):
                    raise
        try:
            yield response
            if method == "HEAD" or response.status == 304 or (response.length or _READ) <= _SHORT:
                response.read()  # of an error, what it says: the connection is of use after it
            ended = response.isclosed() or response.length == 0
        except BaseException:
            connection.close()
            raise
        response.close()
        with self._lock:
            if ended and not response.will_close and len(self._idle) < _IDLE and self._process == os.getpid():
                self._idle.append(connection)
                return
        connection.close()

    def _open_connection(self) -> http.client.HTTPConnection:
        with self._lock:
            if self._process != os.getpid():
                # after a fork these are the parent's
                self._idle, self._process = [], os.getpid()
            if self._idle:
                return self._idle.pop()
        if self._tls is not None:
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                self._host, self._port, timeout=CONNECT_S, context=self._tls
            )
        else:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=CONNECT_S)
        connection.response_class = _Response
        return connection

    def _where(self, key: str) -> str:
        return f"{self.url}/{key}"


def _read(response: http.client.HTTPResponse, where: str, limit: int | None, *, ranged: bool) -> bytes:
    """Read what an answer brings. Raises ObjectTooLarge, or StoreError for a range, beyond `limit` bytes."""

    def check(size: int) -> None:
        if ranged and limit is not None and size > limit:
            raise StoreError(f"{where}: a range was asked for, and more than that came back; {_RANGES}")
        check_size(where, size, limit)

    whole = response.length
    check(whole or 0)
    parts, size = [], 0
    while size != whole and (data := response.read1(_READ if whole is None else min(_READ, whole - size))):
        parts.append(data)
        size += len(data)
        check(size)
    if whole is not None:
        if size < whole:
            raise ConnectionError(f"the answer broke off, {whole - size:,} bytes before its end")
        # not every Python counts what read1 gives
        response.length = 0
    return parts[0] if len(parts) == 1 else b"".join(parts)


# ── what answers and errors mean ─────────────────────────────────────────────────────────────────────────────────────


def _refusal(status: int, headers: http.client.HTTPMessage, where: str) -> DeltawireError:
    said = f"{where}: {status} {http.client.responses.get(status, '')}".rstrip()
    if 300 <= status < 400 and (target := headers.get("Location")):
        # without what follows a ?, which may be a secret
        return StoreError(f"{said}: it leads to {_shown(target.partition('?')[0])}; redirects are not followed")
    if status in (401, 403):
        return PermissionDenied(
            f"{said}: requests over https carry no credentials. S3 also answers so for an object that is missing, "
            "unless the reader may list its bucket (docs/https.md)"
        )
    if status == 416:
        return TruncatedFile(f"{said}: the object ends before the range that was asked for")
    if is_transient(status):
        asked = _retry_after(headers.get("Retry-After", ""))
        return StoreUnavailable(said, rest_after(status) if asked is None else asked)
    return StoreError(said)


def _retry_after(said: str) -> float | None:
    """Parse Retry-After: seconds, or a time."""
    if said.isdecimal() and said.isascii() and len(said) < 10:
        return float(said)
    at = _timestamp(said)
    return None if at is None else max(0.0, at - time.time())


def _timestamp(text: str) -> float | None:
    try:
        return email.utils.parsedate_to_datetime(text).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None


def _shown(text: str) -> str:
    return "".join(letter if letter.isprintable() else "·" for letter in text[:200])


@contextmanager
def _translated(where: str) -> Iterator[None]:
    try:
        yield
    except ssl.SSLCertVerificationError as error:
        raise StoreError(
            f"{where}: the server's certificate is not trusted ({error.verify_message}); name its authority's file in "
            "SSL_CERT_FILE"
        ) from error
    except ssl.SSLError as error:
        if error.reason == "WRONG_VERSION_NUMBER":
            raise StoreError(f"{where}: this server does not speak TLS on that port") from error
        raise StoreUnavailable(f"{where}: {error.reason or error}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise StoreUnavailable(f"{where}: {_shown(str(error)) or type(error).__name__}") from error
