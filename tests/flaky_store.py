"""A store that injects the faults of networks and buckets, reproducibly for a seed.

    drop            raises StoreUnavailable before or after the effect; the caller cannot know which
    delay           the call takes up to `max_delay_s` longer
    truncate_read   a get returns the beginning of the object (with its true etag), a get_range raises TruncatedFile
    truncate_put    a put fails half-way with StoreUnavailable; nothing becomes visible
    duplicate       a put, put_if_absent or delete is carried out twice
    reorder         a put becomes visible only after 1 to `max_late` further calls, possibly after later puts

`truncate_read` of a get and `reorder` violate the protocol on purpose: code must check sizes and hashes, and wait if a
manifest names an object that is not visible yet. These still hold: an object in the store is whole or absent, the puts
of one key keep their order, one put_if_absent succeeds, listings are in order.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from deltawire.core.errors import AlreadyExists, StoreUnavailable, TruncatedFile
from deltawire.store.base import Chunks, Fetched, ObjectInfo, Store, check_key


@dataclass(frozen=True, slots=True)
class _Faults:
    drop: Literal["before", "after"] | None
    delay_s: float
    truncated: bool
    twice: bool
    late: int
    """Number of further calls after which a put becomes visible; 0 is at once."""
    share: float
    """How far a truncated transfer, or a listing that breaks off, gets."""


@dataclass(frozen=True, slots=True)
class _LatePut:
    due: int
    """Number of the call that will see it."""
    data: bytes


class FlakyStore:
    """Wraps a store and injects faults. Each rate is the probability of that fault per call; `injected` counts them.

    The fault of a call depends on the seed, the method, the key and the number of earlier calls of that method with
    that key, not on other threads. Only `reorder` counts the calls of all threads together.
    """

    def __init__(
        self,
        inner: Store,
        *,
        seed: int = 0,
        drop: float = 0.0,
        delay: float = 0.0,
        truncate_read: float = 0.0,
        truncate_put: float = 0.0,
        duplicate: float = 0.0,
        reorder: float = 0.0,
        max_delay_s: float = 0.002,
        max_late: int = 4,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.inner = inner
        self.url = inner.url
        self.creates_exclusively = inner.creates_exclusively
        self.injected: Counter[str] = Counter()
        self._seed = seed
        self._drop = drop
        self._delay = delay
        self._truncate_read = truncate_read
        self._truncate_put = truncate_put
        self._duplicate = duplicate
        self._reorder = reorder
        self._max_delay_s = max_delay_s
        self._max_late = max_late
        self._sleep = sleep
        # Reentrant: showing a late put is itself part of a call.
        self._lock = threading.RLock()
        self._calls: Counter[tuple[str, str]] = Counter()
        self._clock = 0
        self._late: dict[str, _LatePut] = {}

    def settle(self) -> None:
        """Make every late put visible now."""
        with self._lock:
            for key in list(self._late):
                self._show(key)

    def get(self, key: str, *, limit: int | None = None) -> Fetched:
        with self._call("get", key) as faults:
            return self._cut(faults, self.inner.get(key, limit=limit))

    def get_if_changed(self, key: str, etag: str | None, *, limit: int | None = None) -> Fetched | None:
        with self._call("get_if_changed", key) as faults:
            fetched = self.inner.get_if_changed(key, etag, limit=limit)
            return None if fetched is None else self._cut(faults, fetched)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        with self._call("get_range", key) as faults:
            data = self.inner.get_range(key, start, length)
            if faults.truncated:
                self._count("truncate_read")
                arrived = f"{int(length * faults.share)} of {length} bytes arrived"
                raise TruncatedFile(f"{self.url}/{key}: injected: {arrived}")
            return data

    def head(self, key: str) -> ObjectInfo:
        with self._call("head", key):
            return self.inner.head(key)

    def put(self, key: str, data: bytes | Chunks) -> None:
        with self._call("put", key) as faults:
            if faults.truncated:
                self._fail_partway("put", key, faults, data)
            if faults.late:
                self._count("reorder")
                whole = b"".join(data()) if callable(data) else data
                with self._lock:
                    self._show(key)  # the puts of one key keep their order
                    self._late[key] = _LatePut(self._clock + faults.late + 1, whole)
                return
            with self._lock:
                self._show(key)
            self.inner.put(key, data)
            if faults.twice:
                self._count("duplicate")
                self.inner.put(key, data)

    def put_if_absent(self, key: str, data: bytes) -> None:
        with self._call("put_if_absent", key) as faults:
            if faults.truncated:
                self._fail_partway("put_if_absent", key, faults, data)
            with self._lock:
                self._show(key)
            self.inner.put_if_absent(key, data)
            if faults.twice:
                self._count("duplicate")
                with contextlib.suppress(AlreadyExists):  # because of the first time, which succeeded
                    self.inner.put_if_absent(key, data)

    def list(self, prefix: str = "", after: str | None = None) -> Iterator[ObjectInfo]:
        faults = self._begin("list", prefix)
        return self._list(prefix, after, faults)

    def _list(self, prefix: str, after: str | None, faults: _Faults) -> Iterator[ObjectInfo]:
        if faults.drop is None:
            yield from self.inner.list(prefix, after)
            return
        found = [*self.inner.list(prefix, after)]
        yield from found[: int(len(found) * faults.share)]
        self._end("list", prefix, faults)

    def delete(self, key: str) -> None:
        with self._call("delete", key) as faults:
            with self._lock:
                self._show(key)
            self.inner.delete(key)
            if faults.twice:
                self._count("duplicate")
                self.inner.delete(key)

    # ── one call ─────────────────────────────────────────────────────────────────────────────────────────────────────

    @contextlib.contextmanager
    def _call(self, verb: str, key: str) -> Iterator[_Faults]:
        """Inject the faults before a call, and after it if it succeeded."""
        faults = self._begin(verb, key)
        yield faults
        self._end(verb, key, faults)

    def _begin(self, verb: str, key: str) -> _Faults:
        if verb != "list":
            check_key(key)  # now: a late put must not fail in a later call
        with self._lock:
            self._clock += 1
            for late in [name for name, put in self._late.items() if put.due <= self._clock]:
                self._show(late)
            faults = self._draw(verb, key, self._calls[verb, key])
            self._calls[verb, key] += 1
        if faults.delay_s:
            self._count("delay")
            self._sleep(faults.delay_s)
        if faults.drop == "before":
            self._count("drop_before")
            raise StoreUnavailable(f"{self.url}/{key}: injected: {verb} never arrived")
        return faults

    def _end(self, verb: str, key: str, faults: _Faults) -> None:
        if faults.drop == "after":
            self._count("drop_after")
            raise StoreUnavailable(f"{self.url}/{key}: injected: the answer to {verb} was lost")

    def _draw(self, verb: str, key: str, nth: int) -> _Faults:
        """Draw the faults of a call. All numbers are always drawn, so that one rate does not affect the others."""
        rng = random.Random(f"{self._seed}/{verb}/{nth}/{key}")
        writes = verb in ("put", "put_if_absent")
        drop = rng.random() < self._drop
        before = rng.random() < 0.5
        delay = rng.random() < self._delay
        delay_s = rng.uniform(0.0, self._max_delay_s)
        truncated = rng.random() < (self._truncate_put if writes else self._truncate_read)
        twice = rng.random() < self._duplicate
        late = rng.random() < self._reorder
        calls = rng.randint(1, self._max_late)
        return _Faults(
            drop=("before" if before else "after") if drop else None,
            delay_s=delay_s if delay else 0.0,
            truncated=truncated,
            twice=twice,
            late=calls if late else 0,
            share=rng.random(),
        )

    def _cut(self, faults: _Faults, fetched: Fetched) -> Fetched:
        if not faults.truncated or not fetched.data:
            return fetched
        self._count("truncate_read")
        return Fetched(fetched.data[: int(len(fetched.data) * faults.share)], fetched.etag)

    def _fail_partway(self, verb: str, key: str, faults: _Faults, data: bytes | Chunks) -> None:
        if callable(data):
            for number, _ in enumerate(data()):  # the producer sees its stream taken up, and dropped
                if number >= faults.share * 4:
                    break
        self._count("truncate_put")
        raise StoreUnavailable(f"{self.url}/{key}: injected: {verb} broke off part-way")

    def _show(self, key: str) -> None:
        put = self._late.get(key)
        if put is not None:
            self.inner.put(key, put.data)
            del self._late[key]  # only now: a put that fails is still owed

    def _count(self, fault: str) -> None:
        with self._lock:
            self.injected[fault] += 1
