"""Fetch those parts of a data object that a reader needs: its head, then ranges, each part checked by its own hash.

    head     header and index, by the hash in the manifest: they say where parts are, and their hashes
    parts    blocks of a delta, or rows of an anchor; those that are near each other in one request

A part that does not have its hash is fetched once more. Where that does not help, or a store has no ranges, the object
is fetched whole (fetch.py), which says what is wrong with it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence

from blake3 import blake3

from ..core.container import Read
from ..core.errors import HashMismatch, StoreError, StoreUnavailable, TruncatedFile
from ..core.held import MOST, Part, ranges
from ..core.manifest import Blob
from ..core.parallel import default_threads, for_each
from ..store import Store
from ..store.base import Cached
from .fetch import CONNECTIONS, PART, SMALL, FetchedObject, Progress, room_for

log = logging.getLogger("deltawire")

GAP = 32 << 10
"""Bytes between two parts that take no longer than another request."""
MAX_RANGES = 1024
"""Ranges of one object."""

Needed = Callable[[Read, int], Sequence[Part] | None]
"""The parts that a reader needs of an object, given its head and its size; None for all of it."""


def fetch_head(store: Store, blob: Blob) -> bytes:
    """Fetch header and index of a data object. Raises HashMismatch if they are not those that its manifest names."""
    head = store.get_range(blob.key, 0, blob.head_size)
    if blake3(head).hexdigest(length=16) != blob.head_hash:
        raise HashMismatch(f"the header of {blob.key} does not have the hash its manifest names")
    return head


def fetch_parts(
    store: Store, blob: Blob, needed: Needed, progress: Progress | None = None, *, open_objects: int = 1
) -> FetchedObject | None:
    """Fetch the head of an object and the parts that a reader needs.

    None where all of it is to be fetched: it is small, most of it is needed, its parts cannot be checked alone, or
    they cannot be had alone. Raises what is wrong with a head that has its hash. `open_objects` as in `fetch`.
    """
    if not blob.head_size or blob.size <= SMALL or blob.head_size > MOST * blob.size:
        return None
    try:
        head = _twice(lambda: fetch_head(store, blob), store, blob)
    except (HashMismatch, TruncatedFile, StoreError) as error:
        _fall_back(blob, error)
        return None

    def read(start: int, length: int) -> bytes:
        if start + length > len(head):
            raise TruncatedFile(f"the head of {blob.key} ends at byte {len(head):,}, before {start + length:,}")
        return head[start : start + length]

    parts = needed(read, blob.size)
    if parts is None:
        return None
    wanted = ranges(parts, GAP, MAX_RANGES)
    size = len(head) + sum(end - start for start, end in wanted)
    if size > MOST * blob.size:
        return None
    into = room_for(blob, size, open_objects)
    try:
        into.write(0, head)
        into.fetched = len(head)
        if progress:
            progress(len(head))
        _fetch_ranges(store, blob, wanted, into, progress, open_objects)
        clock = time.perf_counter()
        if bad := [part for part in parts if _hash(into, part) != part.hash]:
            if isinstance(store, Cached):
                store.doubt(blob.key)
            _fetch_ranges(store, blob, ranges(bad, 0, MAX_RANGES), into, progress, open_objects)
            if still := next((part for part in bad if _hash(into, part) != part.hash), None):
                raise HashMismatch(
                    f"bytes {still.start:,} to {still.end:,} of {blob.key} do not have the hash that its head names"
                )
        into.hashing_s = time.perf_counter() - clock
        into.parts = ranges([Part(0, len(head), ""), *parts], 0, len(parts) + 1)
        return into
    except (HashMismatch, TruncatedFile, StoreError) as error:
        into.close()
        _fall_back(blob, error)
        return None
    except BaseException:
        into.close()
        raise


def _fall_back(blob: Blob, error: Exception) -> None:
    """Say that the object is fetched whole; raise the error where the store does not answer at all."""
    if isinstance(error, StoreUnavailable):
        raise error
    log.warning("cannot use parts of %s, fetching all of it: %s", blob.key, error)


def _twice(fetch: Callable[[], bytes], store: Store, blob: Blob) -> bytes:
    try:
        return fetch()
    except (HashMismatch, TruncatedFile):
        if isinstance(store, Cached):
            store.doubt(blob.key)
        return fetch()


def _fetch_ranges(
    store: Store,
    blob: Blob,
    wanted: Iterable[tuple[int, int]],
    into: FetchedObject,
    progress: Progress | None,
    open_objects: int,
) -> None:
    def one(span: tuple[int, int]) -> int:
        data = store.get_range(blob.key, span[0], span[1] - span[0])
        into.write(span[0], data)
        if progress:
            progress(len(data))
        return len(data)

    spans = [(at, min(at + PART, end)) for start, end in wanted for at in range(start, end, PART)]
    into.fetched += sum(end - start for start, end in spans)
    for_each(one, spans, max(1, min(CONNECTIONS // open_objects, len(spans))))


def _hash(into: FetchedObject, part: Part) -> str:
    hashed = blake3(max_threads=default_threads())
    for start in range(part.start, part.end, PART):
        hashed.update(into.read(start, min(PART, part.end - start)))
    return hashed.hexdigest(length=16)
