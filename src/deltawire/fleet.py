"""The replicas that follow a run, by their heartbeats: for `log`, `fleet` and the page of `dash`.

Whoever can write the bucket can write a heartbeat, so nothing that one says is believed unless it is possible: `Member`
has numbers, times and text that can be shown, and an address in a strict form (`host_and_port`). Whether a heartbeat is
fresh is told by the store's time of the object, against the clock of the machine that asks, not by what it says.
"""

from __future__ import annotations

import fnmatch
import logging
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import deltawire as dw

from .errors import DeltawireError
from .store import ObjectInfo

log = logging.getLogger("deltawire")

REPLICAS = "replicas/"
"""Folder of the heartbeats in a bucket (docs/format.md)."""

HEARTBEATS = 1000
"""Number of heartbeats that are read."""

FEW = 100
"""Heartbeats up to which no roster is looked for again: keepers write one of more than these."""

FRESH_S = 60.0
"""Seconds after which a replica without a new heartbeat is silent; one is due every ten."""

JUST_PUBLISHED = 1000
"""Number of versions by which a heartbeat may be ahead of the newest known one, which was read before it."""

SKEW_S = 5.0
"""Seconds by which a replica's clock may be ahead without being corrected: a put takes time, and listings have whole
seconds."""

WRONG_S = 1e7
"""Seconds above which a clock is wrong rather than ahead."""

LONGEST_SYNC_S = 86400.0
"""Seconds of a sync above which its record is not believed."""

KEPT_SYNCS = 200
"""Syncs of a replica that are kept; a heartbeat has the latest 24."""

LARGEST = 1 << 53
"""Integers up to here are exact in JavaScript."""


@dataclass(frozen=True, slots=True)
class Sync:
    """A sync of a replica. Its time is corrected where the replica's clock is ahead of the store's."""

    version: int
    previous: int | None
    at: float
    """When it ended."""
    seconds: float
    bytes: int
    phases: dict[str, float]
    """Seconds by phase."""
    pause: float
    """Seconds in which nothing was computed with the weights; without an engine, those of writing and verifying."""
    proven: bool
    """Whether the digest of all live weights was recomputed."""
    error: str
    times: int


@dataclass(frozen=True, slots=True)
class Member:
    """A replica as its heartbeat shows it."""

    replica: str
    version: int | None
    lag: int | None
    """Number of versions behind the newest one."""
    health: str
    """ok, failing, silent where its heartbeat is old, or unread where it was not read."""
    pause_s: float | None
    """Seconds without tokens at its last sync; None where it tells of none."""
    address: str
    """host:port for clients, in a strict form; empty where it has none."""
    seen_s: float
    """Seconds since its heartbeat was written: the store's time of it, against the clock of this machine; in a copied
    run the replica's time."""
    error: str = ""
    role: str = ""
    """`keeper` of a keeper, which serves nobody; empty of all others."""
    at: float = 0.0
    """When it wrote its heartbeat, by its own clock."""
    timings: dict[str, float] = field(default_factory=dict)
    """Seconds of its last sync, by phase."""
    behind_s: float | None = None
    """Seconds since a version was published that it does not have, where that is known; 0 if it has the newest."""
    clock_s: float = 0.0
    """Seconds that its clock is ahead of the store's; 0 below five seconds, and 1e7 for a clock that is wrong."""
    syncs: tuple[Sync, ...] = ()
    """Its latest syncs, oldest first."""

    @property
    def is_keeper(self) -> bool:
        """Whether it is a keeper, which serves nobody."""
        return self.role == "keeper"

    def serves(self, max_lag: int | None = None) -> bool:
        """Whether clients may be sent there."""
        if self.health != "ok" or self.lag is None or not self.address:
            return False
        return max_lag is None or self.lag <= max_lag


@dataclass(slots=True)
class _Known:
    """What is known of a heartbeat."""

    item: ObjectInfo
    """As listed."""
    read: ObjectInfo | None = None
    """As it was when it was read; None if it never was."""
    beat: dw.Heartbeat | None = None
    """None where it is damaged, or is no heartbeat of this run."""
    broken: bool = False
    syncs: dict[tuple[float, int], Sync] = field(default_factory=dict)


class Fleet:
    """The replicas of a run. `read` reads the heartbeats that were written since it was called before."""

    def __init__(
        self,
        run: dw.Run,
        *,
        fresh: float = FRESH_S,
        only: Sequence[str] = (),
        keepers: bool = False,
        copied: bool = False,
    ) -> None:
        """
        fresh      seconds after which a replica without a new heartbeat is silent
        only       patterns of names, such as `gpu-*`: no others are read
        keepers    also those, which serve nobody
        copied     the objects are copies: their times say nothing of clocks
        """
        self._run, self._fresh, self._keepers, self._copied = run, fresh, keepers, copied
        self._wanted = re.compile("|".join(fnmatch.translate(f"{REPLICAS}{pattern}.json") for pattern in only))
        self._known: dict[str, _Known] = {}
        self._roster: ObjectInfo | None = None
        """The roster that was read last."""
        self._is_small = False
        self.broken: list[str] = []
        """Names of those whose heartbeat cannot be read."""
        self.left_out = 0
        """Number of heartbeats beyond those that are read."""
        self.requests = 0
        """Number of requests of the last `read`."""

    def read(self, most: int = HEARTBEATS) -> None:
        """Read the heartbeats that were written since the last time, at most so many: the others come later.

        Those of a large fleet are read from the roster, if a keeper writes one.
        """
        self.requests = 0
        if not self._is_small and self._read_roster():
            return
        self._list()
        # those that were never read first, and then those whose news are oldest
        due = [known for known in self._known.values() if known.read != known.item]
        due = sorted(due, key=lambda known: known.read.modified if known.read else 0.0)[:most]
        self.requests += len(due)
        for known, (item, beat) in zip(due, self._run.heartbeats([known.item for known in due]), strict=True):
            known.broken = isinstance(beat, DeltawireError)
            if known.broken:
                log.warning("ignoring %s: %s", item.key, beat)
            known.read, known.beat = item, beat if isinstance(beat, dw.Heartbeat) else None
            if known.beat is not None:
                self._keep_syncs(known.syncs, known.beat, self._skew(known))
        self.broken = sorted(_name(key) for key, known in self._known.items() if known.broken)

    def members(self, newest: int | None, summaries: Mapping[int, dw.Summary] | None = None) -> list[Member]:
        """Return the replicas as of now, by name.

        newest       the newest version of the run
        summaries    its versions, where they are known: they tell since when a replica is behind
        """
        clock = time.time()
        found = (self._member(known, newest, summaries or {}, clock) for known in self._known.values())
        return sorted((member for member in found if member is not None), key=lambda member: member.replica)

    def _read_roster(self) -> bool:
        """Read the roster, unless it is known. False if there is none."""
        self.requests, item = 1, self._run.roster_object()
        if item is None or item == self._roster:
            return item is not None
        self.requests, found = 2, self._run.roster()
        if found is None:
            return False
        self._roster, before, self._known = item, self._known, {}
        for beat, modified in zip(found.replicas, found.modified, strict=True):
            key = f"{REPLICAS}{beat.replica}.json"
            if self._wanted.match(key):
                known = self._known[key] = before.get(key) or _Known(ObjectInfo(key, 0, modified, None))
                known.item = known.read = ObjectInfo(key, 0, modified, None)
                known.beat, known.broken = beat, False
                self._keep_syncs(known.syncs, beat, self._skew(known))
        self.left_out, self.broken = found.left_out, []
        return True

    def _list(self) -> None:
        before = self._known
        found = [item for item in self._run.heartbeat_objects() if self._wanted.match(item.key)]
        items = dw.latest_heartbeats(found, HEARTBEATS, [key for key, known in before.items() if known.beat])
        self.requests += max(1, -(-len(found) // 1000))  # as buckets list them
        self._is_small = len(found) <= FEW
        left_out = len(found) - len(items)
        if left_out and not self.left_out:
            log.warning(
                "%s has %d heartbeats: %d are left out, and only the latest %d are read; name those that count "
                "(deltawire fleet --replica), or delete the others",
                self._run.store.url,
                len(found),
                left_out,
                len(items),
            )
        self.left_out, there = left_out, {item.key: item for item in items}
        # those that have been there for longest stay first
        self._known = {key: before[key] for key in before if key in there}
        for key, item in there.items():
            self._known.setdefault(key, _Known(item)).item = item

    def _keep_syncs(self, kept: dict[tuple[float, int], Sync], beat: dw.Heartbeat, skew: float) -> None:
        now = time.time()
        for record in beat.syncs:
            sync = _sync(record, skew)
            if sync is not None and sync.at < now + 60:
                # a failure that repeats is one record that is written again
                same = [
                    k for k, old in kept.items() if old.error and (old.version, old.error) == (sync.version, sync.error)
                ]
                for old in same[-1:] if sync.error else ():
                    del kept[old]
                kept[record.at, record.version] = sync
        for old in sorted(kept)[:-KEPT_SYNCS]:
            del kept[old]

    def _skew(self, known: _Known) -> float:
        """Seconds that a replica's clock is ahead of the store's; 0 where it is not, or nobody can tell.

        A heartbeat that is older than its object says nothing of clocks: objects are copied.
        """
        if known.beat is None or known.read is None or self._copied:
            return 0.0
        ahead = known.beat.at - known.read.modified
        return round(min(ahead, WRONG_S), 1) if ahead > SKEW_S else 0.0

    def _member(
        self, known: _Known, newest: int | None, summaries: Mapping[int, dw.Summary], clock: float
    ) -> Member | None:
        seen, beat, top = known.item.modified, known.beat, -1 if newest is None else newest
        if known.read is None:
            return Member(_name(known.item.key), None, None, "unread", None, "", max(clock - seen, 0.0))
        if beat is None or (beat.is_keeper and not self._keepers):
            return None

        def is_possible(version: int | None) -> bool:
            return version is None or version <= top + JUST_PUBLISHED

        if self._copied and (at := moment(beat.at)) is not None:
            seen = min(seen, at)
        version = beat.version if is_possible(beat.version) else None
        silent, failing = clock - seen > self._fresh, not beat.healthy or version is None
        possible = (s for s in known.syncs.values() if is_possible(s.version) and is_possible(s.previous))
        syncs = sorted(possible, key=lambda sync: sync.at)
        return Member(
            beat.replica,
            version,
            None if version is None else max(top - version, 0),
            "silent" if silent else "failing" if failing else "ok",
            next((sync.pause for sync in reversed(syncs) if not sync.error), None),
            _address(beat.address),
            max(clock - seen, 0.0),
            beat.error[:500],
            beat.role,
            beat.at,
            beat.timings,
            _behind_s(version, newest, summaries, clock),
            self._skew(known),
            tuple(syncs),
        )


def _address(text: str) -> str:
    """An address in its usual form; empty if it is none."""
    found = dw.host_and_port(text)
    return "" if found is None else f"[{found[0]}]:{found[1]}" if ":" in str(found[0]) else f"{found[0]}:{found[1]}"


def moment(at: float) -> float | None:
    """A time that can be shown; None for anything else that may stand in a bucket."""
    return round(at, 3) if math.isfinite(at) and 1e9 < at < time.time() + 86400 else None


def is_duration(seconds: float) -> bool:
    """Whether this can be the length of a phase."""
    return math.isfinite(seconds) and 0 <= seconds < 1e9


def _sync(record: dw.SyncRecord, skew: float) -> Sync | None:
    at = moment(record.at - skew)
    versions = (record.version,) if record.previous is None else (record.version, record.previous)
    if at is None or not 0 <= record.seconds <= LONGEST_SYNC_S or not all(0 <= v < LARGEST for v in versions):
        return None
    if not all(map(is_duration, record.timings.values())):
        return None
    # no part is longer than the whole
    phases = {name[:40]: min(seconds, record.seconds) for name, seconds in list(record.timings.items())[:16]}
    paused = min(phases.get("pause", phases.get("apply", 0.0) + phases.get("prove", 0.0)), record.seconds)
    return Sync(
        record.version, record.previous, at, record.seconds, min(max(record.bytes, 0), LARGEST), phases, paused,
        not record.error and ("prove" in phases or "audit" in phases), record.error[:200],
        min(max(record.times, 1), 1 << 31),
    )  # fmt: skip


def _behind_s(
    version: int | None, newest: int | None, summaries: Mapping[int, dw.Summary], clock: float
) -> float | None:
    """Seconds since the version after this one was published."""
    if version is None or newest is None:
        return None
    if version >= newest:
        return 0.0
    at = moment(summaries[version + 1].created) if version + 1 in summaries else None
    return None if at is None else round(max(clock - at, 0.0), 3)


def _name(key: str) -> str:
    return key.removeprefix(REPLICAS).removesuffix(".json")[:128]
