"""A store in a bucket: S3 and compatible servers, Google Cloud Storage, Azure, or this process's memory.

Only this module and `address.py` use the bucket client (obstore); `object_errors` translates its errors.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import obstore
from obstore.exceptions import BaseError, NotModifiedError
from obstore.store import MemoryStore

from deltawire.core.errors import ObjectNotFound, StoreUnavailable, TruncatedFile, Unsupported
from deltawire.store.address import SCHEMES, connect, parse
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
from deltawire.store.object_errors import CLIENT_ERRORS, translate

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ObjectStore as Client

__all__ = ["SCHEMES", "ObjectStore"]

# S3 takes at most 10,000 parts, so this bounds one object at 160 GB; a put holds at most _PARTS_AT_ONCE + 1 of them.
_PART_BYTES = 16 << 20
_PARTS_AT_ONCE = 4
_MAX_OFFSET = (1 << 63) - 1

_memory: dict[str, MemoryStore] = {}
_memory_lock = threading.Lock()


class ObjectStore:
    """A store over any obstore client; `prefix` is the run's folder in the bucket.

    `once` is the client for put_if_absent and for reads. It must not retry by itself: after a lost answer its own
    repeat would come back as "already exists", and the winner would seem to have lost, which `Retrying` can tell; and
    an overloaded bucket would get each read several times, sooner than `Retrying` allows.
    """

    def __init__(
        self,
        client: Client,
        url: str,
        *,
        prefix: str = "",
        once: Client | None = None,
    ) -> None:
        self.url = url
        self._place = url.partition("?")[0]
        self.creates_exclusively = True
        self._client = client
        self._once = once or client
        self._root = check_key(prefix) + "/" if prefix else ""

    @classmethod
    def from_url(cls, url: str, *, retries: int = 3, environ: Mapping[str, str] = os.environ) -> ObjectStore:
        """`retries` are the client's own, per request that writes: one failed part need not repeat a large upload."""
        address = parse(url)
        if address.scheme == "memory":
            with _memory_lock:
                return cls(_memory.setdefault(address.bucket, MemoryStore()), address.url, prefix=address.prefix)
        with _translated(address.url):
            client, once = (connect(address, environ, count) for count in (retries, 0))
        return cls(client, address.url, prefix=address.prefix, once=once)

    def get(self, key: str, *, limit: int | None = None) -> Fetched:
        with self._request(key) as path:
            return self._read(key, obstore.get(self._once, path), limit)

    def get_if_changed(self, key: str, etag: str | None, *, limit: int | None = None) -> Fetched | None:
        if not etag:
            return self.get(key, limit=limit)
        with self._request(key) as path:
            try:
                result = obstore.get(self._once, path, options={"if_none_match": etag})
            except NotModifiedError:
                return None
            # Some gateways ignore the condition; the body is not fetched before we ask for it.
            return None if result.meta["e_tag"] == etag else self._read(key, result, limit)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        check_range(start, length)
        if length == 0 or start + length > _MAX_OFFSET:  # HTTP has no empty range, the client no larger number
            if start + length > self.head(key).size:
                raise TruncatedFile(f"{self._where(key)} ends before byte {start + length}")
            return b""
        with self._request(key) as path:
            data = obstore.get_range(self._once, path, start=start, length=length).to_bytes()
        if len(data) != length:  # past the end, a server sends what there is
            raise TruncatedFile(f"{self._where(key)} ends at byte {start + len(data)}, before byte {start + length}")
        return data

    def head(self, key: str) -> ObjectInfo:
        with self._request(key) as path:
            return self._info(obstore.head(self._once, path))

    def put(self, key: str, data: bytes | Chunks) -> None:
        if not callable(data):
            with self._request(key) as path:
                self._upload(path, self._payload(data))
            return
        source = _Source(data)
        try:
            with self._request(key) as path:
                self._stream(path, source)
        except Exception:
            # A producer's error must reach the caller as it is; some, like FileNotFoundError, look like the client's.
            if source.failure is not None:
                raise source.failure from None
            raise

    def put_if_absent(self, key: str, data: bytes) -> None:
        with self._request(key) as path:
            obstore.put(self._once, path, self._payload(data), mode="create")

    def list(self, prefix: str = "", after: str | None = None) -> Iterator[ObjectInfo]:
        folder = check_prefix(prefix)
        # The client matches prefixes by whole path parts, not by text; so ask for the folder and compare here.
        with self._request():
            found: list[ObjectInfo] = []
            for page in obstore.list(self._client, (self._root + folder) or None, chunk_size=1000):
                found += map(self._info, page)
                check_listing(self.url, len(found))
        # Not every server lists in key order (those built on folders put 'a/x' before 'a b'), so none is trusted to.
        found.sort(key=lambda info: info.key)
        return (info for info in found if info.key.startswith(prefix) and info.key > (after or ""))

    def folders(self, prefix: str = "") -> Level:
        folder = check_prefix(prefix)
        with self._request():
            found = obstore.list_with_delimiter(self._client, (self._root + folder) or None)
            names = [name.rstrip("/")[len(self._root) :] for name in found["common_prefixes"]]
            objects = [self._info(meta) for meta in found["objects"]]
        return sorted(f"{name}/" for name in names if is_key(name)), sorted(objects, key=lambda info: info.key)

    def delete(self, key: str) -> None:
        with contextlib.suppress(ObjectNotFound), self._request(key) as path:
            obstore.delete(self._client, path)

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _stream(self, path: str, source: _Source) -> None:
        """Upload what fits in one part as one request, the rest as a multipart upload, visible when complete."""
        head, size = [], 0
        chunks = iter(source)
        for chunk in chunks:
            head.append(chunk)
            size += len(chunk)
            if size > _PART_BYTES:
                break
        else:
            self._upload(path, self._payload(b"".join(head)))
            return
        self._upload(path, itertools.chain(head, chunks))

    def _payload(self, data: bytes) -> bytes | io.BytesIO:
        # The client's memory store keeps Python's own bytes, and before 0.12 can deadlock when it drops them: replacing
        # an object waits for the interpreter lock, a listing holds that and waits for the store. A file it copies.
        return io.BytesIO(data) if isinstance(self._client, MemoryStore) else data

    def _upload(self, path: str, data: bytes | io.BytesIO | Iterable[bytes]) -> None:
        obstore.put(self._client, path, data, chunk_size=_PART_BYTES, max_concurrency=_PARTS_AT_ONCE)

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _read(self, key: str, result: Any, limit: int | None) -> Fetched:
        meta: ObjectMeta = result.meta
        check_size(self._where(key), meta["size"], limit)
        data: bytes = result.bytes().to_bytes()
        if len(data) != meta["size"]:
            raise StoreUnavailable(f"{self._where(key)}: {len(data)} of {meta['size']} bytes arrived")
        return Fetched(data, meta["e_tag"])

    def _info(self, meta: ObjectMeta) -> ObjectInfo:
        key, etag = meta["path"][len(self._root) :], meta["e_tag"]
        if etag and not etag.endswith('"') and self.url.startswith("az:"):
            etag = f'"{etag}"'  # Azure leaves the quotes out of listings
        return ObjectInfo(key, meta["size"], meta["last_modified"].timestamp(), etag)

    # ── names and errors ─────────────────────────────────────────────────────────────────────────────────────────────

    @contextlib.contextmanager
    def _request(self, key: str | None = None) -> Iterator[str]:
        """Yield the path of an object in the bucket, or of all objects, and translate the client's errors.

        Raises Unsupported in a process that was forked after the client's threads had started.
        """
        global _process
        path = self._root + ("" if key is None else check_key(key))
        where = self.url if key is None else self._where(key)
        if not where.startswith("memory:"):
            _process = _process or os.getpid()
            if _process != os.getpid():
                raise Unsupported(
                    f"{where} cannot be reached: this process was forked from one that had used a bucket, and has none "
                    'of its threads; start processes with multiprocessing.get_context("spawn")'
                )
        with _translated(where):
            yield path

    def _where(self, key: str) -> str:
        """Address of an object, for messages."""
        return f"{self._place}/{key}"


class _Source:
    """Copies of a producer's chunks, and the error it failed with.

    Copies, because the client reads buffers after it has asked for the next one: a producer that fills one buffer again
    and again would upload the wrong bytes.
    """

    def __init__(self, chunks: Chunks) -> None:
        self._chunks = chunks
        self.failure: BaseException | None = None

    def __iter__(self) -> Iterator[bytes]:
        try:
            for chunk in self._chunks():
                yield bytes(chunk)
        except GeneratorExit:
            raise
        except BaseException as error:
            self.failure = error
            raise


_process = 0
"""The process that made the first request."""


@contextlib.contextmanager
def _translated(where: str) -> Iterator[None]:
    """Translate the bucket client's errors. They are not kept as the cause: they quote signed requests."""
    try:
        yield
    except CLIENT_ERRORS as error:
        meaning = translate(error, where)
        if isinstance(error, BaseError) or str(error).startswith("Object at location "):
            # Python keeps it as the context all the same: replace its text. Other errors are a put producer's.
            error.args = (str(meaning),)
        raise meaning from None
