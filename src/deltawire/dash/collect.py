"""Read what the page shows from the bucket: manifests, pages of history, heartbeats, headers of deltas.

The first look costs fewer than `requests` requests, whatever the length of the run and the number of replicas. Later
looks read what is new: one conditional request while nothing happens, and a listing of the heartbeats.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from statistics import median

import deltawire as dw

from ..errors import DAMAGE, DeltawireError, ObjectTooLarge, RunNotFound, RunReplaced, VersionNotFound
from ..fleet import FRESH_S, LARGEST, Fleet, Member, is_duration, moment
from ..store import Store
from . import document as doc

log = logging.getLogger("deltawire")

FEW_REQUESTS = 48
"""Requests of the first look at a bucket."""

MANY_REQUESTS = 400
"""Requests of the first look at a folder, where they cost nothing."""

RECENT = 256
"""Versions that are shown in detail."""

SHOWN = 256
"""Replicas that are shown; all are counted."""

MAX_TAGS = 4
HEAT_ROWS = 400
HEAT_COLUMNS = 64
STEP_BYTES = 64 << 20
"""Bytes that are read in a folder for a histogram of steps without being asked."""

FEW_BYTES = 8 << 20
"""Bytes that are read from a bucket for that without being asked: one request."""

ASKED_BYTES = 1 << 30
"""Bytes that are read for a histogram if a viewer asks for it."""

_EARLIER = 8
"""Number of manifests that are tried for one that can be read, from the newest on."""


class Collector:
    """Reads a run, again and again. Threads may share it."""

    def __init__(self, run: str | Path | Store, *, requests: int | None = None) -> None:
        """`requests` limits the first look: 48 by default, in a folder 400."""
        self._store = dw.Watcher(run).store
        local = self._store.url.startswith("file:") or "://" not in self._store.url
        self._requests = requests or (MANY_REQUESTS if local else FEW_REQUESTS)
        self._lock, self._computing = threading.Lock(), threading.Lock()
        self._reset()

    def _reset(self) -> None:
        self._run: dw.Run | None = None
        self._first = True
        """Whether no version has been looked at yet."""
        self._watcher = dw.Watcher(self._store)
        self._head: int | None = None
        """The newest version there is."""
        self._newest: int | None = None
        """The newest version that can be read."""
        self._summaries: dict[int, dw.Summary] = {}
        self._tags: dict[str, int] = {}
        self._members: list[Member] = []
        self._heat: dict[int, list[float]] = {}
        self._unreadable: set[int] = set()
        self._trainer: dict[int, doc.Trainer] = {}
        self._shown_steps: doc.Steps | None = None
        """Steps of the newest version at the first look."""
        self._asked_steps: doc.Steps | None = None
        """The latest that a viewer asked for."""
        self._spent = 0

    # ── looking ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def look(self) -> doc.Document:
        """Read what is new and return everything. What is wrong with the bucket is in `problem`, never raised."""
        with self._lock:
            problem = ""
            try:
                problem = self._read()
            except RunReplaced:
                log.info("another run is at %s now", self._store.url)
                self._reset()
                return doc.Document(self._store.url, time.time(), problem="another run is at this address; reading it")
            except RunNotFound as error:
                problem = str(error) if self._run is None else f"the run is gone: {error}"
            except DAMAGE as error:
                problem = self._damage(error)
            except DeltawireError as error:
                problem = str(error)
            return self._document(problem[:500])

    def opened(self) -> dw.Run:
        """The run. Raises RunNotFound where there is none yet."""
        with self._lock:
            return self._open()

    def _open(self) -> dw.Run:
        if self._run is None:
            run = dw.Run.open(self._store)
            # once: a schema may have a hundred thousand tensors
            self._sizes = {tensor.name: tensor.elements for tensor in run.schema.tensors}
            self._elements, self._full_bytes = sum(self._sizes.values()), run.schema.nbytes
            self._rows = doc.groups([*self._sizes], HEAT_ROWS)
            self._columns, self._totals = doc.columns([], 0), doc.Totals()
            # of a copy, the times of objects say when it was made
            copied = self._store.head("run.json").modified - run.info.created > FRESH_S
            # a store that has no listings says so before anything is shown
            next(iter(self._store.list("tags/")), None)
            self._fleet = Fleet(run, keepers=True, copied=copied)
            self._run, self._spent = run, 3
        return self._run

    def _damage(self, error: DeltawireError, more: str = "") -> str:
        return f"{str(error)[:250]}{more}; `deltawire verify {self._store.url[:150]}` tells what is damaged"

    def _readable(self, run: dw.Run, newest: int) -> tuple[int | None, str]:
        """Return the newest version whose manifest can be read, and what is wrong with those above it."""
        first: DeltawireError | None = None
        for version in range(newest, max(newest - _EARLIER, -1 if self._newest is None else self._newest), -1):
            try:
                self._spent += version != newest
                run.manifest(version)
            except (*DAMAGE, ObjectTooLarge, VersionNotFound) as error:
                first = first or error
            else:
                return version, self._damage(first, f"; showing the run up to version {version}") if first else ""
        if first is None:
            return self._newest, ""
        shown = "" if self._newest is None else f"; showing the run up to version {self._newest}"
        return self._newest, self._damage(first, shown)

    def _read(self) -> str:
        """Read what is new. Returns what is damaged; empty if nothing is known to be."""
        run, first, problem = self._open(), self._first, ""
        if not first and self._head is None:
            run.check_present()
        try:
            newest = self._watcher.look(run, self._head)
        except (RunNotFound, RunReplaced):
            raise
        except (*DAMAGE, ObjectTooLarge) as error:
            # a damaged manifest is in the way; head tells how far the run is
            newest, problem = run.head_hint(), self._damage(error)
            if newest is None:
                raise
        self._head = newest
        self._spent += 4
        if newest is not None and newest != self._newest:
            newest, found = self._readable(run, newest)
            problem = found or problem
        if newest is not None and newest != self._newest:
            since = 0 if self._newest is None else self._newest + 1
            # one for the manifest, and one per page of history, at most
            self._spent += 1 + (newest // 16).bit_count()
            self._summaries.update(run.timeline(newest, since))
            gone = run.pruned() if since else ()
            self._summaries = {v: s for v, s in self._summaries.items() if v not in gone}
            self._newest = newest
            known = [self._summaries[v] for v in sorted(self._summaries)]
            self._columns, self._totals = doc.columns(known, self._elements), _totals(known, self._elements)
            self._learn(run.manifest(newest))
            self._spent += 1 + MAX_TAGS
            self._tags = {name: tag.version for name, tag in run.tags(latest=MAX_TAGS).items()}
        self._fleet.read(max(self._requests // 2 - 2, 1))
        self._spent += self._fleet.requests
        if first:
            self._first_steps(run)
            self._read_heat(self._requests - self._spent)
            self._first = newest is None
        elif newest is not None:
            # its manifest is there already: one request per new version
            self._read_heat(2, [newest])
        return problem

    def _learn(self, manifest: dw.Manifest) -> None:
        """Keep the trainer's timings of a manifest that was read."""
        first = list(manifest.timings.items())[:12]
        phases = {name[:40]: seconds for name, seconds in first if is_duration(seconds)}
        self._trainer[manifest.version] = doc.Trainer(manifest.version, moment(manifest.created), phases)
        for version in sorted(self._trainer)[:-RECENT]:
            del self._trainer[version]

    # ── detail ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def versions(self, first: int, last: int) -> doc.Columns:
        """Return the versions of a range, without thinning it out where it is short enough."""
        with self._lock:
            found = [self._summaries[v] for v in sorted(self._summaries) if first <= v <= last]
            return doc.columns(found, self._elements if self._run else 0)

    def details(self, first: int, last: int) -> list[doc.Version]:
        """Return the versions of a range in detail, RECENT at most."""
        with self._lock:
            wanted = [v for v in sorted(self._summaries) if first <= v <= last][:RECENT]
            return self._versions(wanted)

    def heat(self, versions: Iterable[int]) -> doc.Heat | None:
        """Read changed weights per tensor of some more versions, HEAT_COLUMNS at most."""
        with self._lock:
            self._read_heat(4 * HEAT_COLUMNS, list(versions)[:HEAT_COLUMNS])
            return self._heat_map()

    def steps(self, version: int, *, most: int = ASKED_BYTES) -> doc.Steps:
        """Return how far the weights of a version moved; fetches its delta, and its base where that is needed.

        Raises a DeltawireError where there is no such version, or it cannot be read.
        """
        run = self.opened()
        # not under the lock: looks go on while this fetches
        with self._computing:
            for known in (self._shown_steps, self._asked_steps):
                if known is not None and known.version == version and known.rows:
                    return known
            self._asked_steps = _steps(run, version, most)
            return self._asked_steps

    def _read_heat(self, requests: int, wanted: list[int] | None = None) -> None:
        run = self._run
        if run is None:
            return
        deltas = [v for v, s in sorted(self._summaries.items()) if any(x.kind == "delta" for x in s.links)]
        if wanted is None:
            links = self._summaries[deltas[-1]].links if deltas else ()
            per_column = 1 + max((link.objects for link in links if link.kind == "delta"), default=1)
            wanted = _spread(deltas, min(requests // per_column, HEAT_COLUMNS))
        todo = [v for v in wanted if v in self._summaries and v not in self._heat and v not in self._unreadable]
        for version, parts in dw.tensor_changes(run, todo):
            if isinstance(parts, DeltawireError) or not parts:
                log.debug("no changes per tensor of version %d: %s", version, parts)
                self._unreadable.add(version)
                continue
            changed: Counter[str] = Counter()
            for part in parts:
                changed[part.name] += part.changed or 0
            self._learn(run.manifest(version))
            self._heat[version] = doc.merged(changed, self._sizes, self._rows)
        for version in sorted(set(self._heat) - set(_spread(sorted(self._heat), HEAT_COLUMNS))):
            del self._heat[version]

    def _first_steps(self, run: dw.Run) -> None:
        """The histogram of the newest delta, where that costs little."""
        if self._newest is None:
            return
        try:
            link = run.manifest(self._newest).main
            if self._requests >= MANY_REQUESTS:
                self._shown_steps = _steps(run, self._newest, STEP_BYTES)
            elif len(link.objects) == 1 and link.bytes < FEW_BYTES:
                self._spent += 1
                _, found = dw.step_sizes(run, self._newest, stored=True)
                self._shown_steps = None if found is None else doc.Steps(self._newest, found.rows(), "")
        except DeltawireError as error:
            log.debug("no steps of version %d: %s", self._newest, error)

    # ── the document ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _document(self, problem: str) -> doc.Document:
        run = self._run
        document = doc.Document(self._store.url, round(time.time(), 3), problem)
        if run is None:
            return document
        document.run, document.model = run.info.run[:64], run.info.model[:200]
        document.created = moment(run.info.created)
        document.tensors, document.elements, document.full_bytes = len(self._sizes), self._elements, self._full_bytes
        document.newest = self._newest
        document.tags = {name: v for name, v in self._tags.items() if v in self._summaries}
        document.totals, document.versions = self._totals, self._columns
        self._members = self._fleet.members(self._head, self._summaries)
        document.replicas = _shown(self._members)
        document.recent = self._versions(sorted(self._summaries)[-RECENT:])
        document.trainer = [self._trainer[v] for v in sorted(self._trainer)]
        document.heat, document.steps = self._heat_map(), self._shown_steps
        document.headline = _headline(document, self._members, self._summaries)
        document.notes = self._notes(document)
        return document

    def _notes(self, document: doc.Document) -> list[str]:
        notes = []
        unread = sum(replica.health == "unread" for replica in self._members)
        if unread:
            notes.append(f"The heartbeats of {unread} of {len(self._members)} replicas were not read.")
        if broken := self._fleet.broken:
            names = [name[:24] for name in broken[:4]]
            more = ", …" if len(broken) > len(names) else ""
            many = f"{len(broken)} heartbeats" if len(broken) > 1 else "1 heartbeat"
            notes.append(f"{many} cannot be read: {', '.join(names)}{more}.")
        if self._fleet.left_out:
            notes.append(f"{self._fleet.left_out:,} more heartbeats are left out: the latest ones are read.")
        if (counted := len(self._members) - len(document.replicas)) > 0:
            notes.append(f"{counted:,} more replicas are counted and not shown: those that need a look come first.")
        if document.versions and max(document.versions.count, default=1) > 1:
            most = max(document.versions.count)
            notes.append(f"{len(self._summaries):,} versions: in most charts a point is the mean of {most}.")
        if self._newest is not None and len(self._summaries) <= self._newest:
            notes.append(f"Versions that were pruned or cannot be read: {self._newest + 1 - len(self._summaries):,}.")
        return notes

    def _versions(self, wanted: list[int]) -> list[doc.Version]:
        proven: dict[int, set[str]] = {}
        for member in self._members:
            for version in (member.version, *(sync.version for sync in member.syncs if sync.proven)):
                if version is not None:
                    proven.setdefault(version, set()).add(member.replica)
        tags: dict[int, list[str]] = {}
        for name, version in self._tags.items():
            tags.setdefault(version, []).append(name)
        return [_version(self._summaries[v], self._elements, tags.get(v, []), len(proven.get(v, ()))) for v in wanted]

    def _heat_map(self) -> doc.Heat | None:
        if self._run is None or not self._heat:
            return None
        labels = [r[0][:200] if len(r) == 1 else f"{r[0][:100]} … {r[-1][:100]} ({len(r)} tensors)" for r in self._rows]
        order, tensors = sorted(self._heat), len(self._sizes)
        return doc.Heat(labels, order, [self._heat[v] for v in order], tensors if len(labels) < tensors else 0)


# ── from records to the document ─────────────────────────────────────────────────────────────────────────────────────


def _size(value: int) -> int:
    """Bytes that a program in JavaScript can count."""
    return min(max(value, 0), LARGEST)


def _version(summary: dw.Summary, elements: int, tags: list[str], proven: int) -> doc.Version:
    links = [doc.PageLink(x.kind, x.base, _size(x.bytes), x.encoding[:40], x.why[:300]) for x in summary.links[:16]]
    step = summary.step if summary.step is not None and abs(summary.step) < LARGEST else None
    metrics = {k[:40]: v for k, v in list(summary.metrics.items())[:16] if math.isfinite(v) and abs(v) < 1e300}
    return doc.Version(
        summary.version, summary.parent, moment(summary.created), step, doc.share(summary, elements), links, metrics,
        sorted(tags), proven,
    )  # fmt: skip


def _totals(found: list[dw.Summary], elements: int) -> doc.Totals:
    totals = doc.Totals(versions=len(found))
    shares = []
    for summary in found:
        link = summary.main if summary.links else None
        if link is not None and link.kind == "delta":
            totals.deltas += 1
            totals.delta_bytes += _size(link.bytes)
            shares.append(doc.share(summary, elements))
        totals.anchors += any(x.kind != "delta" for x in summary.links)
        totals.skips += sum(x.kind == "delta" and x.base != summary.parent for x in summary.links)
        totals.stored_bytes += sum(_size(x.bytes) for x in summary.links if x.kind != "reference")
    totals.changed_share = round(sum(shares) / len(shares), 10) if shares else None
    return totals


def _shown(members: list[Member]) -> list[Member]:
    """By name, SHOWN at most: those that fail, then those that are far behind."""
    chosen = sorted(members, key=lambda member: (member.health == "ok", -(member.lag or 0)))[:SHOWN]
    return sorted(chosen, key=lambda member: member.replica)


def _headline(document: doc.Document, members: list[Member], summaries: dict[int, dw.Summary]) -> doc.Headline:
    found, totals = doc.Headline(), document.totals
    if totals.delta_bytes:
        full = document.full_bytes * totals.deltas
        found.smaller, found.saved_bytes = round(full / totals.delta_bytes, 2), max(full - totals.delta_bytes, 0)
    arrivals = []
    for replica in members:
        found.failures += sum(sync.times for sync in replica.syncs if sync.error)
        for sync in replica.syncs:
            if sync.error or sync.previous is None:
                continue
            if found.pause_s is None or sync.pause > found.pause_s:
                found.pause_s, found.pause_replica, found.pause_version = sync.pause, replica.replica, sync.version
            published = moment(summaries[sync.version].created) if sync.version in summaries else None
            if published is not None and sync.at >= published:
                arrivals.append(sync.at - published)
    found.arrival_s = round(median(arrivals), 3) if arrivals else None
    read = [replica for replica in members if replica.health != "unread"]
    # of a run that has ended all are silent: then it is about how it ended
    alive = [replica for replica in read if replica.health != "silent"] or read
    found.following, found.current = len(alive), sum(replica.lag == 0 for replica in alive)
    if alive:
        took = {r.replica: median([s.seconds for s in r.syncs if s.previous is not None] or [0.0]) for r in alive}
        slowest = max(
            alive, key=lambda replica: (replica.lag if replica.lag is not None else LARGEST, took[replica.replica])
        )
        found.slowest, found.slowest_lag = slowest.replica, slowest.lag or 0
        found.slowest_sync_s = round(took[slowest.replica], 6) or None
    return found


def _spread(values: list[int], most: int) -> list[int]:
    """At most so many of the values, evenly spread, the last one among them."""
    if most <= 0 or not values:
        return []
    if len(values) <= most:
        return values
    return sorted({values[-1 - round(i * (len(values) - 1) / max(most - 1, 1))] for i in range(most)})


def _steps(run: dw.Run, version: int, most: int) -> doc.Steps:
    """How far the weights of a version moved, unless more than `most` bytes would be fetched for it."""
    link = run.manifest(version).main
    if link.kind != "delta" or link.base is None:
        return doc.Steps(version, [], "this version has no delta")
    cost, found = dw.step_sizes(run, version, most=most)
    if found is not None:
        return doc.Steps(version, found.rows(), "")
    ask = "; “Compute” fetches it" if cost <= ASKED_BYTES else ""
    return doc.Steps(version, [], f"this takes {cost / 1e6:,.0f} MB from the bucket{ask}")
