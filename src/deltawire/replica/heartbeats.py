"""Heartbeats of a replica: a small object in the bucket, written again and again, for prune, log, fleet and dash."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping

import msgspec

from ..bucket.addresses import checked_address
from ..core import keys
from ..core.errors import PermissionDenied, StoreError, Unsupported
from ..core.manifest import Heartbeat, SyncRecord, dump, now, ranges_of
from ..store import Store

log = logging.getLogger("deltawire")

READING_EVERY = 60.0
"""Seconds, at most, between heartbeats of a replica that reads what prune must leave; `Retention.lease` is longer."""

SYNCS = 24
"""Number of recent syncs in a heartbeat; fewer where it would be larger than its readers allow."""

Status = tuple[str, int | None, int | None, Mapping[str, float]]
"""Id of the run, the version that clients get, the newest one, and the seconds of the last sync by phase."""


class Heartbeats:
    """Writes the heartbeats of one replica. Threads may share it.

    id       name of the replica
    every    seconds between heartbeats; 0 writes none
    address  where clients reach the server of the weights
    status   returns what is new; None while there is no run
    """

    def __init__(self, store: Store, id: str, every: float, address: str, status: Callable[[], Status | None]) -> None:
        keys.replica(id)
        self.id = id
        self.note = ""
        """Trouble that is reported besides that of the last sync."""
        self.role = ""
        """Of the process (core/manifest.py)."""
        self.every = every
        self._store, self._status = store, status
        self._address = checked_address(address) if address else ""
        self._syncs: deque[SyncRecord] = deque(maxlen=SYNCS)
        self._reading: tuple[tuple[int, int], ...] = ()
        """Ranges of versions that prune must leave for this replica."""
        self._beat_at = 0.0
        self._beating = threading.RLock()
        self._may_not_beat = False

    def announce(self, versions: Iterable[int]) -> None:
        """Tell at once which versions are about to be read, until `done`."""
        self._reading = ranges_of(versions)
        self.beat(force=True)

    def done(self) -> None:
        """End what was announced: the next heartbeat names no version that is being read."""
        self._reading = ()

    def record(
        self, version: int, previous: int | None, seconds: float, fetched: int, timings: Mapping[str, float],
        error: str = "",
    ) -> None:  # fmt: skip
        """Keep a sync for the heartbeats. A failure that repeats is one record."""
        error, times = _as_text(error)[:160], 1
        if error and self._syncs and (self._syncs[-1].version, self._syncs[-1].error) == (version, error):
            times += self._syncs.pop().times
        took = _rounded(timings)
        self._syncs.append(SyncRecord(version, previous, now(), round(seconds, 6), fetched, took, error, times))

    def leave(self) -> None:
        """Take the server's address out, so that no proxy sends clients there any more."""
        if self._address:
            self._address = ""
            self.beat(force=True)

    def beat(self, error: str = "", *, force: bool = False) -> None:
        """Write a heartbeat if one is due. Never raises: a replica works without heartbeats."""
        if not self.every:
            return
        every = min(self.every, READING_EVERY) if self._reading else self.every
        if not self._is_due(every, force):
            return
        try:
            # threads that fetch call this too, and one of them writes for all; `with`, because an interrupt between an
            # `acquire` and its `try` would leave the lock taken
            with self._beating:
                if self._is_due(every, force) and (status := self._status()) is not None:
                    self._beat_at = now()
                    self._store.put(keys.replica(self.id), self._made(*status, error or self.note))
        except (PermissionDenied, Unsupported) as trouble:
            # a replica only needs to read; warn once
            level = logging.DEBUG if self._may_not_beat else logging.WARNING
            log.log(
                level,
                "%s sends no heartbeats, so log does not see it, and prune leaves what it reads for its grace period "
                "alone: %s",
                self.id,
                trouble,
            )
            self._may_not_beat = True
        except StoreError as trouble:
            log.debug("no heartbeat: %s", trouble)

    def _is_due(self, every: float, force: bool) -> bool:
        return force or now() - self._beat_at >= every

    def _made(
        self, run: str, version: int | None, newest: int | None, timings: Mapping[str, float], error: str
    ) -> bytes:
        beat = Heartbeat(
            run, self.id, version, newest, not error, self._beat_at, _as_text(error)[:500], _rounded(timings),
            self._reading, tuple(self._syncs), self._address, self.role,
        )  # fmt: skip
        while len(data := dump(beat)) > keys.limit(keys.REPLICAS) and beat.syncs:
            beat = msgspec.structs.replace(beat, syncs=beat.syncs[len(beat.syncs) // 2 + 1 :])
        return data


def _rounded(timings: Mapping[str, float]) -> dict[str, float]:
    return {phase: round(seconds, 6) for phase, seconds in dict(timings).items()}


def _as_text(error: str) -> str:
    """Text that a heartbeat can carry: a path in a message may have bytes that are none."""
    return error.encode(errors="replace").decode()
