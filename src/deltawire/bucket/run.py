"""A run in a bucket, read side: what it is, which version is newest, what each version is made of."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Iterable

from ..core import history, keys
from ..core.errors import (
    AlreadyExists,
    ManifestError,
    ObjectNotFound,
    ObjectTooLarge,
    RunNotFound,
    VersionNotFound,
)
from ..core.manifest import (
    Head,
    Heartbeat,
    Manifest,
    Pruned,
    RunInfo,
    Summary,
    dump,
    now,
    parse,
    parse_heartbeat,
    parse_manifest,
    parse_pruned,
    parse_run,
)
from ..core.schema import Schema
from ..store import Store, open_store

log = logging.getLogger("deltawire")

SMALL = 64 << 10
"""Bytes that a head or a heartbeat may have. Whoever can write to a bucket must not fill a reader's memory."""

RECORD = 64 << 20
"""Bytes that any other JSON object may have; the schema of a model of 100,000 tensors takes a tenth of it."""

KEPT_MANIFESTS = 256
"""They never change, so the latest are kept."""


class Run:
    """Open with `Run.open`, make with `Run.create`. Holds no weights."""

    def __init__(self, store: Store, info: RunInfo) -> None:
        self.store = store
        self.info = info
        self._manifests: dict[int, Manifest] = {}
        self._lock = threading.Lock()

    @property
    def schema(self) -> Schema:
        return self.info.schema

    @classmethod
    def open(cls, where: str | Store) -> Run:
        store = open_store(where)
        try:
            return cls(store, parse_run(store.get(keys.RUN, limit=RECORD).data))
        except ObjectNotFound:
            raise RunNotFound(f"there is no run at {store.url}: publish to it first, or check the address") from None

    @classmethod
    def create(cls, where: str | Store, schema: Schema, model: str = "") -> Run:
        """A new run, or WriterConflict's cousin: of two creators exactly one wins, the other opens what is there."""
        store = open_store(where)
        info = RunInfo(secrets.token_hex(8), now(), schema, schema.hash, model=model)
        try:
            store.put_if_absent(keys.RUN, dump(info))
        except AlreadyExists:
            return cls.open(store)
        return cls(store, info)

    # ── versions ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def newest(self) -> int | None:
        """The newest committed version. Head is only a hint, so its manifest and the next one are asked for too."""
        version = self.head_hint()
        if version is None or not self.exists(version):
            version = max(self.listed(), default=None)
            if version is None:
                return None
        while self.exists(version + 1):
            version += 1
        return version

    def head_hint(self) -> int | None:
        try:
            head = parse(self.store.get(keys.HEAD, limit=SMALL).data, Head, keys.HEAD)
        except ObjectNotFound:
            return None
        except (ManifestError, ObjectTooLarge) as error:
            log.warning("ignoring a bad %s: %s", keys.HEAD, error)
            return None
        return head.version if head.run == self.info.run and head.version >= 0 else None

    def listed(self) -> list[int]:
        """Every version that has a manifest, by listing: one request per thousand."""
        found = (keys.version_of(item.key) for item in self.store.list(keys.VERSIONS))
        return sorted(version for version in found if version is not None)

    def exists(self, version: int) -> bool:
        if version in self._manifests:
            return True
        try:
            self.manifest(version)
        except VersionNotFound:
            return False
        return True

    def manifest(self, version: int) -> Manifest:
        if (kept := self._manifests.get(version)) is not None:
            return kept
        if version < 0:
            raise VersionNotFound(f"versions count from 0; {version} cannot be one")
        try:
            data = self.store.get(keys.manifest(version), limit=RECORD).data
        except ObjectNotFound:
            raise VersionNotFound(f"{self.store.url} has no version {version}, or it was pruned") from None
        manifest = parse_manifest(data, version, self.info)
        with self._lock:
            self._manifests[version] = manifest
            if len(self._manifests) > KEPT_MANIFESTS:
                # a follower lives for as long as the training: what it read first goes first
                del self._manifests[next(iter(self._manifests))]
        return manifest

    def forget(self, version: int) -> None:
        """Ask for this manifest again when it is next needed: it seems to have been pruned."""
        with self._lock:
            self._manifests.pop(version, None)

    def timeline(self, newest: int, since: int = 0) -> dict[int, Summary]:
        """Summaries from `since` to `newest`, in O(log n) requests; pruned versions are left out."""
        manifest = self.manifest(newest)
        found = {s.version: s for s in manifest.recent}
        for end in history.pages(newest, since):
            found.update((s.version, s) for s in self._told_by(end, since))
        found[newest] = manifest.summary()
        gone = self.pruned()
        return {v: found[v] for v in sorted(found) if since <= v <= newest and v not in gone}

    def _told_by(self, end: int, since: int) -> Iterable[Summary]:
        """A page of history, or, where it is lost, what the manifests it covers say: sixteen versions each."""
        try:
            page = self.page(end)
            if page.run != self.info.run:
                raise ManifestError(f"{keys.history(end)} belongs to another run")
            return page.versions
        except (ObjectNotFound, ManifestError, ObjectTooLarge) as error:
            log.warning("%s is of no use (%s): reading manifests instead", keys.history(end), error)
        found: list[Summary] = []
        version = end - 1
        while version >= max(end - history.span(end), since):
            try:
                manifest = self.manifest(version)
            except (VersionNotFound, ManifestError):
                version -= 1
                continue
            found += (*manifest.recent, manifest.summary())
            version = history.recent_start(version) - 1
        return found

    def page(self, end: int) -> history.Page:
        return parse(self.store.get(keys.history(end), limit=RECORD).data, history.Page, keys.history(end))

    def pruned(self) -> Pruned:
        try:
            return parse_pruned(self.store.get(keys.PRUNED, limit=RECORD).data, self.info)
        except ObjectNotFound:
            return Pruned(self.info.run, ())

    # ── replicas ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def heartbeats(self) -> list[Heartbeat]:
        beats = []
        for item in self.store.list(keys.REPLICAS):
            if (beat := self.heartbeat(item.key)) is not None:
                beats.append(beat)
        return beats

    def heartbeat(self, key: str) -> Heartbeat | None:
        """None where it is gone or makes no sense: anybody may write one."""
        try:
            return parse_heartbeat(self.store.get(key, limit=SMALL).data, key)
        except (ObjectNotFound, ManifestError, ObjectTooLarge) as error:
            log.warning("ignoring %s: %s", key, error)
            return None
