"""A store in a Hugging Face bucket: `hf://buckets/namespace/name[/run]`.

    put    stream the bytes into the storage, where nothing names them yet → one request gives them their path
    get    one small request tells which bytes a path names → read these, by their hash

So a reader sees the old object or the new one, and a poll that finds nothing new is one HEAD request. What the Hub does
not have is a conditional put: `put_if_absent` looks first, which holds among the threads of one process but not against
other machines; `creates_exclusively` says so and a publisher claims the run.

Set HF_TOKEN or run `hf auth login`; HF_ENDPOINT leads elsewhere. A bucket that does not exist is made at the first put,
as a private one.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote, urljoin, urlsplit

from deltawire.core.errors import (
    AlreadyExists,
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
from deltawire.store import hub_client, hub_errors
from deltawire.store.base import (
    Chunks,
    Fetched,
    Level,
    ObjectInfo,
    check_key,
    check_listing,
    check_prefix,
    check_range,
    check_size,
    is_key,
)

if TYPE_CHECKING:
    from httpx2 import Response

# A large object is read in parts. The first asks which bytes its path names; those that follow soon need not ask again.
_SAME_OBJECT_S = 30.0
_MAX_NAMED = 64
_MAX_REDIRECTS = 5
_RECONNECT_S = 1.0


@dataclass(frozen=True, slots=True)
class _Named:
    """Which bytes a path names."""

    hash: str
    size: int
    at: float
    """When that was asked, by this process's monotonic clock."""


class HubStore:
    """A Hugging Face bucket, or a folder in one."""

    def __init__(self, bucket: str, *, prefix: str = "") -> None:
        hub_client.require()
        self.creates_exclusively = False
        self.settles_s = 10.0
        self.url = f"hf://buckets/{bucket}" + (f"/{prefix}" if prefix else "")
        self._bucket = bucket
        self._root = check_key(prefix) + "/" if prefix else ""
        self._hub = hub_client.HubClient(bucket)
        self._creating = threading.Lock()
        self._named: dict[str, _Named] = {}

    @classmethod
    def from_url(cls, url: str) -> HubStore:
        parts = urlsplit(url)
        names = unquote(parts.path).strip("/").split("/")
        login = "@" in parts.netloc or any("@" in name or ":" in name for name in names[:2])
        if login or parts.query or parts.fragment:
            raise BadURL(
                "an hf:// address has no place for credentials or options; set HF_TOKEN and HF_ENDPOINT instead"
            )
        if parts.netloc != "buckets" or len(names) < 2 or not all(names[:2]):
            raise BadURL(f"{url}: write hf://buckets/namespace/name/run")
        try:
            check_key("/".join(names))
        except UnsafeName as error:
            raise BadURL(f"{url}: {error}") from None
        return cls("/".join(names[:2]), prefix="/".join(names[2:]))

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def get(self, key: str, *, limit: int | None = None) -> Fetched:
        return self._fetch(key, self._resolve(key), limit)

    def get_if_changed(self, key: str, etag: str | None, *, limit: int | None = None) -> Fetched | None:
        named = self._resolve(key)
        return None if named.hash == etag else self._fetch(key, named, limit)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        check_range(start, length)
        check_key(key)
        named = self._named.get(key) if start else None
        if named is None or time.monotonic() - named.at > _SAME_OBJECT_S:
            if len(self._named) > _MAX_NAMED:
                self._named.clear()
            named = self._named[key] = self._resolve(key)
        if start + length > named.size:
            raise TruncatedFile(f"{self._where(key)} ends at byte {named.size}, before byte {start + length}")
        return self._read(key, named, start, start + length)

    def head(self, key: str) -> ObjectInfo:
        path, where = self._path(key), self._where(key)
        answer = self._hub.ask("POST", "/paths-info", where, json={"paths": [path]})
        with hub_client.understood(where):
            for item in answer.json():
                if item["path"] == path:
                    return self._info(item)
        raise ObjectNotFound(f"no object at {where}")

    def list(self, prefix: str = "", after: str | None = None) -> Iterator[ObjectInfo]:
        entries = self._entries(check_prefix(prefix), recursive="true")
        return (info for _, info in entries if info and info.key.startswith(prefix) and info.key > (after or ""))

    def folders(self, prefix: str = "") -> Level:
        folder = check_prefix(prefix)
        entries = self._entries(folder)
        right_below = [(key, info) for key, info in entries if is_key(part := key[len(folder) :]) and "/" not in part]
        return sorted(f"{key}/" for key, info in right_below if info is None), [x for _, x in right_below if x]

    def _entries(self, folder: str, **params: str) -> Iterable[tuple[str, ObjectInfo | None]]:
        """The listing of the Hub below a folder of this store, by key; folders have no info."""
        root = self._root + folder
        page: str | None = "/tree" + (f"/{quote(root[:-1], safe='')}" if root else "")
        options: dict[str, Any] = {"params": params}
        found: dict[str, ObjectInfo | None] = {}
        with contextlib.suppress(hub_errors.NoBucket):
            while page is not None:
                answer = self._hub.ask("GET", page, self.url, **options)
                with hub_client.understood(self.url):
                    for item in answer.json():
                        # the server takes any path that begins like the folder
                        if item["path"].startswith(root):
                            is_folder = item["type"] == "directory"
                            found[item["path"][len(self._root) :]] = None if is_folder else self._info(item)
                check_listing(self.url, len(found))
                page, options = answer.links.get("next", {}).get("url"), {}
        # no order is promised
        return sorted(found.items(), key=lambda entry: entry[0])

    def _resolve(self, key: str) -> _Named:
        """Which bytes a key names now. Counted apart from the API by the Hub, and five times as generously."""
        where = self._where(key)
        url = f"{self._hub.endpoint}/buckets/{self._bucket}/resolve/{quote(self._path(key), safe='')}"
        for _ in range(_MAX_REDIRECTS):
            answer = self._hub.ask("HEAD", url, where, follow_redirects=False)
            size = answer.headers.get("X-Linked-Size") or answer.headers.get("Content-Length") or ""
            if "X-Xet-Hash" in answer.headers and size.isdecimal() and len(size) < 20:
                return _Named(answer.headers["X-Xet-Hash"], int(size), time.monotonic())
            # a bucket that was renamed; anywhere else, our token has no business
            with hub_client.understood(where):
                there = urljoin(url, answer.headers.get("Location", ""))
                elsewhere = urlsplit(there)[:2] != urlsplit(url)[:2]
            if there == url or elsewhere:
                break
            url = there
        raise StoreError(f"{where}: the Hub does not say which bytes it has; upgrade huggingface_hub")

    def _fetch(self, key: str, named: _Named, limit: int | None) -> Fetched:
        check_size(self._where(key), named.size, limit)
        return Fetched(self._read(key, named, 0, named.size), named.hash)

    def _read(self, key: str, named: _Named, start: int, end: int) -> bytes:
        return self._hub.read(named.hash, named.size, start, end, self._where(key)) if end > start else b""

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def put(self, key: str, data: bytes | Chunks) -> None:
        path, where = self._path(key), self._where(key)
        try:
            try:
                hash = self._hub.upload(data, where)
            except hub_errors.NoBucket:
                self._create_bucket(where)
                hash = self._hub.upload(data, where)
            failed = self._hub.batch(
                {"type": "addFile", "path": path, "xetHash": hash, "mtime": int(time.time() * 1000)}, where
            )
        finally:
            self._named.pop(key, None)
        if failed:
            raise StoreError(f"{where}: {failed.get('error', 'the Hub did not take it')}")

    def put_if_absent(self, key: str, data: bytes) -> None:
        with self._creating:
            if self._exists(key):
                raise AlreadyExists(f"{self._where(key)} exists already")
            self.put(key, data)

    def delete(self, key: str) -> None:
        path, where = self._path(key), self._where(key)
        self._named.pop(key, None)
        with contextlib.suppress(hub_errors.NoBucket):
            failed = self._hub.batch({"type": "deleteFile", "path": path}, where)
            if failed and self._exists(key):
                raise StoreError(f"{where}: {failed.get('error', 'the Hub did not delete it')}")

    def _exists(self, key: str) -> bool:
        try:
            self._resolve(key)
        except ObjectNotFound:
            return False
        return True

    def _create_bucket(self, where: str) -> None:
        try:
            # 409: another process was faster
            self._hub.ask("POST", "", where, accept=409, json={"visibility": "private"})
        except PermissionDenied:
            raise PermissionDenied(
                f"{where}: there is no bucket {self._bucket}, or this token may not see it, and it may not make one; "
                f"check HF_TOKEN, or make it with a token that may: `hf buckets create {self._bucket} --private`"
            ) from None

    # ── announcements ────────────────────────────────────────────────────────────────────────────────────────────────

    def announcements(self, stop: threading.Event) -> Iterator[str]:
        cursor: str | None = None
        try:
            while not stop.is_set():
                with self._hub.listen(cursor, self.url) as response, _ended_by(stop, response):
                    if response.status_code >= 400:
                        raise self._stream_error(response)
                    for name, content in _events(hub_client.event_lines(response, self.url)):
                        cursor = content.get("cursor") or cursor
                        if name == "changes":
                            yield from self._keys(content.get("changes"))
                        elif name == "ready":
                            yield ""
                        elif name == "reset":  # it no longer knows what we missed
                            cursor = None
                            yield ""
                            break
                        elif name == "reconnect":  # to another server, and on from the cursor
                            break
                    else:
                        raise StoreUnavailable(f"{self.url}: the stream of events ended")
                stop.wait(_RECONNECT_S)
        except StoreUnavailable:
            if not stop.is_set():
                raise

    def _keys(self, changes: object) -> Iterator[str]:
        for change in changes if isinstance(changes, list) else []:
            path = change.get("path") if isinstance(change, dict) else None
            if isinstance(path, str) and path.startswith(self._root) and path != self._root:
                yield path[len(self._root) :]

    def _stream_error(self, response: Response) -> DeltawireError:
        error = hub_errors.of_response(response, self.url)
        if isinstance(error, hub_errors.NoBucket):
            return StoreUnavailable(str(error))  # it may come
        if isinstance(error, ObjectNotFound) or response.status_code == 501:
            return Unsupported(f"{self.url}: this Hub does not tell its readers what changed")
        return error

    # ── names ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _path(self, key: str) -> str:
        return self._root + check_key(key)

    def _where(self, key: str) -> str:
        return f"{self.url}/{key}"

    def _info(self, item: hub_client.Json) -> ObjectInfo:
        from huggingface_hub.utils import parse_datetime

        when = parse_datetime(item.get("uploadedAt") or item["mtime"])
        return ObjectInfo(item["path"][len(self._root) :], item["size"], when.timestamp(), item["xetHash"])


def _events(lines: Iterator[str]) -> Iterator[tuple[str, hub_client.Json]]:
    """Server-sent events: (name, content). What does not parse is left out; the stream is only ever a hint."""
    name, data = "", ""
    for line in lines:
        field, _, value = line.partition(":")
        if field == "event":
            name = value.strip()
        elif field == "data":
            data += value.strip()
        elif not line and name:
            with contextlib.suppress(ValueError):
                content = json.loads(data or "{}")
                if isinstance(content, dict):
                    yield name, content
            name, data = "", ""


@contextlib.contextmanager
def _ended_by(stop: threading.Event, response: Response) -> Iterator[None]:
    """Close the connection soon after `stop` is set, instead of at the next event."""
    connection = response.extensions["network_stream"].get_extra_info("socket")
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            if stop.wait(0.2):
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
                return

    threading.Thread(target=watch, name="deltawire-hub-events", daemon=True).start()
    try:
        yield
    finally:
        done.set()
