"""Requests to the Hub: by `huggingface_hub`'s session and token, by `hf_xet` for the data.

Not by the methods of `HfApi`: they have no time-outs, no limit on the size of an answer, and retries of their own; here
`retry.py` is the one policy for retries.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

from deltawire import __version__
from deltawire.core.errors import MissingExtra, PermissionDenied, StoreError, StoreUnavailable
from deltawire.store import hub_errors
from deltawire.store.base import Chunks

if TYPE_CHECKING:
    import hf_xet
    import httpx2
    from httpx2 import Response

Json = dict[str, Any]

# Seconds without a byte. The server pings an event stream every 30.
_CONNECT_S, _ANSWER_S, _SILENCE_S = 10.0, 60.0, 90.0
_TOKEN_MARGIN_S = 60.0

# Of one answer: a thousand objects with long names take 2 MB.
_ANSWER_BYTES, _ANSWER_IN_ALL_S = 16 << 20, 900.0
_EVENT_BYTES = 1 << 20
_MAX_REDIRECTS = 5

# What the storage engine would do otherwise: keep 16 GB of notes on disk about what was uploaded, ask the server about
# each upload whether it has the like already (entropy-coded bytes never repeat), report each transfer, buffer 1.5 GB of
# a download, wait five minutes for a silent server. Its cache of downloads is off (HF_XET_CHUNK_CACHE_SIZE_BYTES).
# Each can be set otherwise by its own variable, HF_XET_CLIENT_READ_TIMEOUT and so on.
_ENGINE: dict[str, Any] = {
    "shard.cache_size_limit": 64 << 20,
    "deduplication.global_dedup_query_enabled": False,
    "telemetry.enabled": False,
    "reconstruction.download_buffer_size": 256 << 20,
    "reconstruction.download_buffer_perfile_size": 64 << 20,
    "reconstruction.download_buffer_limit": 512 << 20,
    "reconstruction.min_prefetch_buffer": 64 << 20,
    "client.connect_timeout": "10s",
    "client.read_timeout": "60s",
    "client.retry_base_delay": "500ms",
}

_engine: tuple[int, hf_xet.XetSession] | None = None
_engine_lock = threading.Lock()


def require() -> None:
    """Raise MissingExtra if a package that hf:// needs is missing or too old."""
    try:
        import hf_xet  # noqa: F401
        import huggingface_hub  # noqa: F401

        found = metadata.version("hf-xet")
    except ImportError:
        raise MissingExtra("hf:// addresses need huggingface_hub", "hub") from None
    if tuple(map(int, re.findall(r"\d+", found)[:2])) < (1, 7):
        # it would keep the interpreter's lock while it reads, and all other threads with it
        raise MissingExtra(f"hf:// addresses need hf-xet 1.7, this is {found}", "hub")


def _session() -> hf_xet.XetSession:
    """Return the session of this process; a forked child cannot use its parent's."""
    global _engine
    import hf_xet

    with _engine_lock:
        if _engine is None or _engine[0] != os.getpid():
            config = hf_xet.XetConfig()
            # not every release knows every setting
            free = {name for name, _ in config.items() if _variable(name) not in os.environ}
            ours = {name: value for name, value in _ENGINE.items() if name in free}
            _engine = os.getpid(), hf_xet.XetSession(config.with_config(ours))
        return _engine[1]


def _variable(setting: str) -> str:
    return "HF_XET_" + setting.upper().replace(".", "_")


@dataclass(frozen=True, slots=True)
class _Access:
    """Address of a bucket's data, and a token for it."""

    storage: str
    token: str
    expires: int


class HubClient:
    """One bucket. Every method raises deltawire's errors and names `where` in them."""

    def __init__(self, bucket: str) -> None:
        from huggingface_hub import constants

        # the client reads HF_ENDPOINT when it is imported, which may have been long ago
        self.endpoint = (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")
        self.bucket = bucket
        self._api = f"{self.endpoint}/api/buckets/{bucket}"
        self._lock = threading.Lock()
        self._access: dict[str, _Access] = {}
        self._downloads: tuple[int, _Access, hf_xet.XetDownloadStreamGroup] | None = None

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def ask(self, method: str, path: str, where: str, *, accept: int = 0, **options: Any) -> Response:
        """A request to the bucket's API, or to a whole URL. Errors are raised, but for the status in `accept`.

        At most _ANSWER_BYTES are read, whatever the server sends.
        """
        import httpx2

        headers = options.pop("headers", {})
        with self._sent(method, path, where, _ANSWER_S, headers, **options) as stream:
            response = httpx2.Response(
                stream.status_code,
                headers=stream.headers,
                content=_content(stream, where),
                request=stream.request,
                extensions=stream.extensions,
            )
        if response.status_code >= 400 and response.status_code != accept:
            raise hub_errors.of_response(response, where)
        return response

    @contextlib.contextmanager
    def listen(self, cursor: str | None, where: str) -> Iterator[Response]:
        """The stream of the bucket's events; read it with `event_lines`."""
        params = {"cursor": cursor} if cursor else {}
        headers = {"Accept": "text/event-stream"}
        with self._sent("GET", "/events", where, _SILENCE_S, headers, params=params) as response:
            yield response

    @contextlib.contextmanager
    def _sent(
        self,
        method: str,
        path: str,
        where: str,
        silence_s: float,
        headers: dict[str, str],
        *,
        follow_redirects: bool = True,
        **options: Any,
    ) -> Iterator[Response]:
        """An answer of which nothing but the head is read yet. Redirects are followed without reading theirs."""
        from huggingface_hub.utils import get_session

        url = path if "://" in path else self._api + path
        with _answers(where):
            session = get_session()
            # `identity`: the size of a compressed answer is not known before it is unpacked
            headers = self._headers({"Accept-Encoding": "identity", **headers})
            request = session.build_request(method, url, headers=headers, timeout=_timeout(silence_s), **options)
            for _ in range(_MAX_REDIRECTS + 1):
                response = session.send(request, stream=True, follow_redirects=False)
                with contextlib.closing(response):
                    if response.next_request is None or not follow_redirects:
                        yield response
                        return
                request = response.next_request
        raise StoreError(f"{where}: more than {_MAX_REDIRECTS} redirects; check HF_ENDPOINT")

    def _headers(self, more: dict[str, str]) -> dict[str, str]:
        """Made for each request: a token may be renewed while a run goes on.

        Not by `build_hf_headers`, which makes a request of its own, for which no limit can be set.
        """
        from huggingface_hub import constants, get_token

        headers = {"User-Agent": f"deltawire/{__version__}"}
        token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
        if token:
            headers["Authorization"] = f"Bearer {token}"
        return {**headers, **more}

    def batch(self, operation: Json, where: str) -> Json:
        """Send one operation. Returns the server's description of a failure, empty if it succeeded.

        Failures come as a list, in a 200 when some operations of a batch failed and in a 422 when all did.
        """
        headers = {"Content-Type": "application/x-ndjson"}
        line = json.dumps(operation).encode() + b"\n"
        answer = self.ask("POST", "/batch", where, accept=422, headers=headers, content=line)
        with understood(where):
            return dict((answer.json().get("failed") or [{}])[0])

    # ── data ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def upload(self, data: bytes | Chunks, where: str) -> str:
        """Upload bytes and return their hash; no path names them yet. Raises NoBucket before anything is read."""
        import hf_xet

        with self._storage("write", where) as access:
            with _engine_errors(where):
                commit = _session().new_upload_commit(**self._connection("write", access))
            try:
                if callable(data):
                    with _engine_errors(where):
                        stream = commit.start_upload_stream(sha256=hf_xet.SKIP_SHA256)
                    for chunk in data():  # what it raises is not the engine's, and passes unchanged
                        with _engine_errors(where):
                            stream.write(bytes(chunk))
                    with _engine_errors(where):
                        uploaded = stream.finish()
                        commit.wait_to_finish()
                else:
                    with _engine_errors(where):
                        handle = commit.start_upload_bytes(data, sha256=hf_xet.SKIP_SHA256)
                        commit.wait_to_finish()
                        uploaded = handle.result()
            except BaseException:
                with contextlib.suppress(Exception):
                    commit.abort()
                raise
        return str(uploaded.xet_info.hash)

    def read(self, hash: str, size: int, start: int, end: int, where: str) -> bytes:
        """Read bytes of a file by its hash: they belong together, whatever happens to its path meanwhile."""
        import hf_xet

        with self._storage("read", where) as access, _engine_errors(where):
            group = self._reading(access)
            data = bytearray()
            for chunk in group.download_stream(hf_xet.XetFileInfo(hash, size), start, end):
                data += chunk
                if len(data) > end - start:
                    break
        if len(data) != end - start:
            raise StoreUnavailable(f"{where}: {len(data)} of {end - start} bytes arrived")
        return bytes(data)

    def _reading(self, access: _Access) -> hf_xet.XetDownloadStreamGroup:
        """Return the download group for all reads while the token is valid; a forked child makes its own."""
        with self._lock:
            if self._downloads is None or self._downloads[:2] != (os.getpid(), access):
                group = _session().new_download_stream_group(**self._connection("read", access))
                self._downloads = os.getpid(), access, group
            return self._downloads[2]

    @contextlib.contextmanager
    def _storage(self, kind: str, where: str) -> Iterator[_Access]:
        """Give a token for the storage, kept until it expires: requests to the Hub are limited."""
        with self._lock:
            access = self._access.get(kind)
        kept = access is not None and access.expires > time.time() + _TOKEN_MARGIN_S
        if access is None or not kept:
            answer = self.ask("GET", f"/xet-{kind}-token", where)
            with understood(where):
                found = answer.json()
                access = _Access(found["casUrl"], found["accessToken"], int(found["exp"]))
            with self._lock:
                self._access[kind] = access
        try:
            yield access
        except PermissionDenied as error:
            with self._lock:
                self._access.pop(kind, None)
            if kept:
                # it was valid before: our clock may be wrong, or it was withdrawn; the next attempt requests another
                raise StoreUnavailable(str(error)) from None
            raise

    def _connection(self, kind: str, access: _Access) -> dict[str, Any]:
        headers = self._headers({})
        return {
            "endpoint": access.storage,
            "token": access.token,
            "token_expiry_unix_secs": access.expires,
            "token_refresh_url": f"{self._api}/xet-{kind}-token",
            "token_refresh_headers": headers,
            # the Hub's token is for the Hub alone
            "custom_headers": {name: value for name, value in headers.items() if name.lower() != "authorization"},
        }


def _timeout(silence_s: float) -> httpx2.Timeout:
    import httpx2

    return httpx2.Timeout(silence_s, connect=_CONNECT_S)


def _content(stream: Response, where: str) -> bytes:
    """Read an answer, with limits on its size and time."""
    content, end = bytearray(), time.monotonic() + _ANSWER_IN_ALL_S
    compressed = stream.headers.get("Content-Encoding", "identity") != "identity"
    for chunk in stream.iter_raw():
        if compressed:
            raise StoreError(f"{where}: a compressed answer, which was not asked for; check HF_ENDPOINT")
        content += chunk
        if len(content) > _ANSWER_BYTES:
            raise StoreError(f"{where}: an answer of more than {_ANSWER_BYTES:,} bytes; check HF_ENDPOINT")
        if time.monotonic() > end:
            raise StoreUnavailable(f"{where}: an answer that took more than {_ANSWER_IN_ALL_S:.0f} s")
    return bytes(content)


def event_lines(stream: Response, where: str) -> Iterator[str]:
    """Yield the lines of an event stream. Raises StoreUnavailable where an event is too large."""
    rest, size = b"", 0
    for chunk in stream.iter_raw():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            size = size + len(line) + 1 if line.strip() else 0
            yield line.decode(errors="replace").removesuffix("\r")
        if size + len(rest) > _EVENT_BYTES:
            raise StoreUnavailable(f"{where}: an event of more than {_EVENT_BYTES:,} bytes; check HF_ENDPOINT")


@contextlib.contextmanager
def understood(where: str) -> Iterator[None]:
    """Raise StoreError for an answer of another form: the Hub has changed, or another server answers."""
    try:
        yield
    except (AttributeError, LookupError, OverflowError, RecursionError, TypeError, ValueError):
        raise StoreError(f"{where}: this is not how the Hub answers; check HF_ENDPOINT, or upgrade deltawire") from None


@contextlib.contextmanager
def _answers(where: str) -> Iterator[None]:
    """Translate errors of requests that get no answer."""
    import httpx2
    from huggingface_hub.errors import OfflineModeIsEnabled

    try:
        yield
    except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError, OfflineModeIsEnabled) as error:
        raise hub_errors.of_request(error, where) from None


@contextlib.contextmanager
def _engine_errors(where: str) -> Iterator[None]:
    """Translate errors of the storage engine, which has no class of its own for most of them."""
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        meaning = hub_errors.of_storage(error, where)
        # Python keeps it as the context all the same: remove the links it quotes
        error.args = (str(meaning),)
        raise meaning from None
