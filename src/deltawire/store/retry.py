"""Retries for any store: StoreUnavailable is retried, every other error is an answer.

Delays grow exponentially with full jitter, so that the replicas of a fleet do not retry in step.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

from deltawire.core.errors import AlreadyExists, ObjectNotFound, StoreUnavailable, TruncatedFile, Unsupported
from deltawire.store.base import (
    Announcing,
    Browsing,
    Cached,
    Chunks,
    Fetched,
    Level,
    ObjectInfo,
    Settling,
    Store,
    Sweeping,
)

log = logging.getLogger("deltawire")

P = ParamSpec("P")
T = TypeVar("T")

_LOG_AFTER = 4
"""Failures in a row after which a waiting user should know why; a second or two."""


class Retrying:
    """A store whose operations are repeated while it is unavailable.

    attempts        of one operation
    total_s         seconds that one operation may take with all its attempts
    first_delay_s   upper bound of the first delay; it doubles each time, up to max_delay_s
    sleep, clock, rng   replaced in tests
    """

    def __init__(
        self,
        inner: Store,
        *,
        attempts: int = 10,
        total_s: float = 60.0,
        first_delay_s: float = 0.1,
        max_delay_s: float = 5.0,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        if attempts < 1:
            raise ValueError(f"attempts must be at least 1, got {attempts}")
        self.inner = inner
        self.url = inner.url
        self.creates_exclusively = inner.creates_exclusively
        self.settles_s = inner.settles_s if isinstance(inner, Settling) else 0.0
        self._attempts = attempts
        self._total_s = total_s
        self._first_delay_s = first_delay_s
        self._max_delay_s = max_delay_s
        self._sleep = sleep
        self._clock = clock
        self._rng = rng or random.Random()

    def get(self, key: str, *, limit: int | None = None) -> Fetched:
        return self._retry(self.inner.get, key, limit=limit)

    def get_if_changed(self, key: str, etag: str | None, *, limit: int | None = None) -> Fetched | None:
        return self._retry(self.inner.get_if_changed, key, etag, limit=limit)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self._retry(self.inner.get_range, key, start, length)

    def head(self, key: str) -> ObjectInfo:
        return self._retry(self.inner.head, key)

    def put(self, key: str, data: bytes | Chunks) -> None:
        self._retry(self.inner.put, key, data)

    def delete(self, key: str) -> None:
        self._retry(self.inner.delete, key)

    def put_if_absent(self, key: str, data: bytes) -> None:
        """As in the protocol. After a failure that may have had its effect, the stored bytes tell whose object it is.

        Two writers that create the same bytes can therefore both be told they won; give each writer's bytes a mark of
        their own where that matters.
        """
        attempts = _Attempts(self)
        while True:
            try:
                self.inner.put_if_absent(key, data)
                return
            except StoreUnavailable as error:
                failure = error
            except AlreadyExists:
                if attempts.failures == 0:
                    raise
                if self._holds(key, data):
                    return
                raise
            try:
                attempts.wait(failure)
            except StoreUnavailable:
                # No attempt is left, but the last attempt may have gone through: say so if it did.
                if self._holds(key, data):
                    return
                raise

    def list(self, prefix: str = "", after: str | None = None) -> Iterator[ObjectInfo]:
        attempts = _Attempts(self)
        while True:
            try:
                for info in self.inner.list(prefix, after):
                    after = info.key  # a listing that breaks off goes on from here
                    attempts = _Attempts(self)
                    yield info
                return
            except StoreUnavailable as error:
                attempts.wait(error)

    def folders(self, prefix: str = "") -> Level:
        inner = self.inner
        if not isinstance(inner, Browsing):
            raise Unsupported(f"{self.url} cannot list one level at a time")
        return self._retry(inner.folders, prefix)

    def announcements(self, stop: threading.Event) -> Iterator[str]:
        """As in `Announcing`; not retried here, because the reader must look for what it missed."""
        if not isinstance(self.inner, Announcing):
            raise Unsupported(f"{self.url} does not tell its readers what changed")
        return self.inner.announcements(stop)

    def doubt(self, key: str) -> None:
        if isinstance(self.inner, Cached):
            self.inner.doubt(key)

    def sweep(self, older_than_s: float = 86_400.0, *, at: float | None = None) -> int:
        inner = self.inner
        return self._retry(inner.sweep, older_than_s, at=at) if isinstance(inner, Sweeping) else 0

    def _holds(self, key: str, data: bytes) -> bool:
        """Whether the object at `key` is exactly `data`. By size and range: a plain get may come back short."""

        def look() -> bool:
            try:
                return self.inner.head(key).size == len(data) and self.inner.get_range(key, 0, len(data)) == data
            except ObjectNotFound:
                return False
            except TruncatedFile as error:
                raise StoreUnavailable(str(error)) from error

        return self._retry(look)

    def _retry(self, call: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        attempts = _Attempts(self)
        while True:
            try:
                return call(*args, **options)
            except StoreUnavailable as error:
                attempts.wait(error)


class _Attempts:
    """The attempts of one operation."""

    def __init__(self, policy: Retrying) -> None:
        self._policy = policy
        self._started = policy._clock()
        self.failures = 0

    def wait(self, error: StoreUnavailable) -> None:
        """Sleep before the next attempt, or raise when there is none."""
        policy = self._policy
        self.failures += 1
        # the exponent is capped because 2**n overflows a float
        ceiling = min(policy._max_delay_s, policy._first_delay_s * 2.0 ** min(self.failures - 1, 60))
        delay = policy._rng.uniform(0.0, ceiling)
        if error.retry_after is not None:
            # at least the delay that the server asked for: clients that were told the same must not come back at once
            delay += error.retry_after * policy._rng.uniform(1.0, 1.25)
        spent = policy._clock() - self._started
        if self.failures >= policy._attempts or spent + delay > policy._total_s:
            attempts = "1 attempt" if self.failures == 1 else f"{self.failures} attempts"
            raise StoreUnavailable(f"{error}; gave up after {attempts} in {spent:.1f} s", error.retry_after) from error
        if self.failures == _LOG_AFTER:
            left = policy._attempts - self.failures
            log.warning("%s; retrying up to %d more times, for %.0f s at most", error, left, policy._total_s)
        policy._sleep(delay)
