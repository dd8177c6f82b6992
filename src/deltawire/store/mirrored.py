"""Several buckets with the same run, read as one store: `s3://us/chat,s3://eu/chat`."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from deltawire.core import keys
from deltawire.core.errors import ObjectNotFound, ObjectTooLarge, StoreUnavailable, Unsupported
from deltawire.store.base import Cached, Chunks, Fetched, ObjectInfo, Settling, Store

log = logging.getLogger("deltawire")

T = TypeVar("T")

BACK_S = 60.0
"""Seconds after which the first bucket is tried again."""


class MirroredStore:
    """Reads from one of several buckets, and from the next one when that is unavailable or `leave` is called.

    It does not matter which bucket an object comes from: its hash is in a manifest, and a manifest names its run.
    Another bucket is used only if its run.json is the same, byte for byte, as a keeper copies it. Only for readers:
    heartbeats go to the bucket in use, and everything else that writes raises Unsupported.

    stores   the first one is preferred: after `back_s` seconds with another it is tried again
    """

    def __init__(self, stores: Sequence[Store], *, back_s: float = BACK_S) -> None:
        self._stores, self._back_s = tuple(stores), back_s
        self.url = stores[0].url
        self.creates_exclusively = stores[0].creates_exclusively
        self.settles_s = max(store.settles_s if isinstance(store, Settling) else 0.0 for store in stores)
        self._lock = threading.Lock()
        self._first, self._since = 0, 0.0
        """Number of the store that is asked first, and since when."""
        self._answered = 0
        """Number of the store that answered last."""
        self._left = 0
        """How often a store was left: what was asked of it before decides nothing afterwards."""
        self._run: bytes | None = None
        """Content of run.json."""
        self._same: set[int] = set()
        """Numbers of the stores that have the same run.json."""

    @property
    def current(self) -> Store:
        """The store that answered last."""
        return self._stores[self._answered]

    @property
    def urls(self) -> list[str]:
        """Addresses of all stores."""
        return [store.url for store in self._stores]

    def leave(self, *, another_run: bool = False) -> None:
        """Ask the next bucket first, until `may_return`: the one in use is damaged or lacks something.

        another_run    its run.json is not to be believed either: that of the next bucket decides which run this is
        """
        with self._lock:
            self._same.discard(self._answered)
            if another_run:
                self._run = None
                self._same.clear()
            self._first, self._since = (self._answered + 1) % len(self._stores), math.inf
            self._left += 1

    def may_return(self) -> None:
        """Let the first bucket be asked again after `back_s`: what was done without it has ended."""
        with self._lock:
            self._since = time.monotonic()

    def get(self, key: str, *, limit: int | None = None) -> Fetched:
        return self._read(lambda number, store: _marked(number, store.get(key, limit=limit)), key)

    def get_if_changed(self, key: str, etag: str | None, *, limit: int | None = None) -> Fetched | None:
        def read(number: int, store: Store) -> Fetched | None:
            # an etag has a meaning only in the bucket that gave it
            known = etag.partition(" ")[2] if etag and etag.startswith(f"{number} ") else None
            found = store.get_if_changed(key, known, limit=limit)
            return None if found is None else _marked(number, found)

        return self._read(read, key)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self._read(lambda _, store: store.get_range(key, start, length), key)

    def head(self, key: str) -> ObjectInfo:
        return self._read(lambda _, store: store.head(key), key)

    def list(self, prefix: str = "", after: str | None = None) -> Iterator[ObjectInfo]:
        yield from self._read(lambda _, store: [*store.list(prefix, after)], prefix)

    def put(self, key: str, data: bytes | Chunks) -> None:
        if not key.startswith(keys.REPLICAS):
            self._refuse()
        self.current.put(key, data)

    def put_if_absent(self, key: str, data: bytes) -> None:
        self._refuse()

    def delete(self, key: str) -> None:
        self._refuse()

    def doubt(self, key: str) -> None:
        if isinstance(self.current, Cached):
            self.current.doubt(key)

    def _refuse(self) -> None:
        raise Unsupported(f"{self.url} and its mirrors are read as one run; to write, name one of the addresses alone")

    def _read(self, read: Callable[[int, Store], T], key: str) -> T:
        failure: StoreUnavailable | None = None
        left, order = self._order()
        for number in order:
            store = self._stores[number]
            try:
                if key != keys.RUN and not self._has_run(number, store):
                    continue
                found = read(number, store)
            except StoreUnavailable as error:
                failure = failure or error
                continue
            self._use(number, found if key == keys.RUN else None, left)
            return found
        raise StoreUnavailable(
            f"none of the {len(self._stores)} buckets of {self.url} can be used: {failure}"
        ) from failure

    def _order(self) -> tuple[int, Sequence[int]]:
        """How often a store was left, and the order to ask: the store in use, then the others; the first one again
        after a while."""
        with self._lock:
            first, count = self._first, len(self._stores)
            if first and time.monotonic() - self._since > self._back_s:
                first, self._since = 0, time.monotonic()
            return self._left, [(first + number) % count for number in range(count)]

    def _use(self, number: int, run: object, left: int) -> None:
        with self._lock:
            if left != self._left:
                return
            if isinstance(run, Fetched) and self._run in (None, run.data):
                self._run = run.data
                self._same.add(number)
            if number != self._answered:
                log.warning("reading %s from %s", self.url, self._stores[number].url)
                self._answered = number
            if number != self._first:
                self._first, self._since = number, time.monotonic()

    def _has_run(self, number: int, store: Store) -> bool:
        """Whether a store has the run that was read first."""
        if self._run is None or number in self._same:
            return True
        try:
            if store.get(keys.RUN, limit=len(self._run)).data == self._run:
                self._same.add(number)
                return True
        except (ObjectNotFound, ObjectTooLarge):
            pass
        log.warning("%s is not a mirror of %s: it has another run, or none", store.url, self.url)
        return False


def _marked(number: int, found: Fetched) -> Fetched:
    return replace(found, etag=None if found.etag is None else f"{number} {found.etag}")
