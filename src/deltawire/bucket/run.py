"""A run in a bucket, read side: what it is, which version is newest, what each version is made of."""

from __future__ import annotations

import logging
import secrets
import threading

from ..core import history, keys
from ..core.errors import AlreadyExists, ManifestError, ObjectNotFound, RunNotFound, VersionNotFound
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
    parse_manifest,
    parse_run,
)
from ..core.schema import Schema
from ..store import Store, open_store

log = logging.getLogger("deltawire")

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
            return cls(store, parse_run(store.get(keys.RUN).data))
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
            head = parse(self.store.get(keys.HEAD).data, Head, keys.HEAD)
        except ObjectNotFound:
            return None
        except ManifestError as error:
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
            data = self.store.get(keys.manifest(version)).data
        except ObjectNotFound:
            raise VersionNotFound(f"{self.store.url} has no version {version}, or it was pruned") from None
        manifest = parse_manifest(data, version, self.info)
        with self._lock:
            self._manifests[version] = manifest
            if len(self._manifests) > KEPT_MANIFESTS:
                # a follower lives for as long as the training: what it read first goes first
                del self._manifests[next(iter(self._manifests))]
        return manifest

    def timeline(self, newest: int, since: int = 0) -> dict[int, Summary]:
        """Summaries from `since` to `newest`, in O(log n) requests; pruned versions are left out."""
        manifest = self.manifest(newest)
        found = {s.version: s for s in manifest.recent}
        for end in history.pages(newest, since):
            page = parse(self.store.get(keys.history(end)).data, history.Page, keys.history(end))
            if page.run != self.info.run:
                raise ManifestError(f"{keys.history(end)} belongs to another run")
            found.update((s.version, s) for s in page.versions)
        found[newest] = manifest.summary()
        gone = set(self.pruned())
        return {v: found[v] for v in sorted(found) if since <= v <= newest and v not in gone}

    def pruned(self) -> tuple[int, ...]:
        try:
            pruned = parse(self.store.get(keys.PRUNED).data, Pruned, keys.PRUNED)
        except ObjectNotFound:
            return ()
        if pruned.run != self.info.run:
            raise ManifestError(f"{keys.PRUNED} belongs to another run")
        return pruned.versions

    # ── replicas ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def heartbeats(self) -> list[Heartbeat]:
        beats = []
        for item in self.store.list(keys.REPLICAS):
            try:
                beats.append(parse(self.store.get(item.key).data, Heartbeat, item.key))
            except (ObjectNotFound, ManifestError) as error:
                log.warning("ignoring %s: %s", item.key, error)
        return beats
