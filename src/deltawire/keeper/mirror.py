"""Copy a run to another bucket, object by object and byte for byte: data first, then manifests, then head."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from ..bucket.fetch import fetch
from ..bucket.prune import Retention, prune
from ..bucket.run import Run, blobs
from ..core import chain, history, keys
from ..core.added import AddedIndex, in_manifest
from ..core.errors import DAMAGE, AlreadyExists, ObjectNotFound, RunNotFound, RunReplaced
from ..core.manifest import Blob, File, Head, Link, Manifest, Pruned, Summary, dump
from ..store import Store

log = logging.getLogger("deltawire")

AT_ONCE = 1000
"""Manifests that are read in one go: a run may have more of them than may be kept in memory."""


class Ended(Exception):
    """The keeper ends, and does not wait until an object is copied."""


@dataclass(frozen=True, slots=True)
class Damaged:
    """An object of the source that is not the one its manifest names."""

    versions: set[int]
    """Versions that name it: a companion file may belong to many."""
    etag: str | None
    """Of what is there; None where nothing is."""
    why: str


class Mirror:
    """A copy of a run in another bucket. It continues after an interruption, whatever is there already.

    A damaged object of the source is not copied, and holds nothing up: the version is there without it, and readers go
    another way, as they do at the source. It is copied as soon as it is repaired.
    """

    def __init__(self, run: Run, store: Store, stop: threading.Event | None = None) -> None:
        """Once `stop` is set, `update` raises Ended. Raises RunReplaced if another run is at the address."""
        self._run, self.store, self._stop = run, store, stop or threading.Event()
        try:
            there = Run.open(store).info.run
        except RunNotFound:
            # byte for byte: a run is known by its run.json
            store.put_if_absent(keys.RUN, run.get(keys.RUN))
            there = Run.open(store).info.run
        if there != run.info.run:
            raise RunReplaced(f"{store.url} holds another run ({there[:32]}): a mirror needs an address of its own")
        self.copy = Run.open(store)
        self._sizes = {item.key: item.size for item in store.list()}
        """What is there, as far as known: objects are never changed."""
        copied = (v for key in self._sizes if (v := keys.version_of(key)) is not None)
        self._next = max((*copied, self.copy.pruned().last), default=-1) + 1
        """The first version that was not copied yet: manifests are copied in order."""
        self._incomplete = {*self._without_objects()}
        self.damaged: dict[str, Damaged] = {}
        """Objects that the mirror lacks, by key."""
        self._looked_at: set[str] = set()
        """Those of them that this update has looked at."""
        self._index: AddedIndex | None = None
        self.bytes = 0
        """Bytes copied by this process."""

    def update(self, newest: int, rule: Retention | None = None) -> int:
        """Copy what the mirror lacks up to a version. Returns how many versions it got."""
        pruned, count = self._run.pruned(), 0
        # before the versions that perhaps nothing else leads to
        self._added()
        for one in self.damaged.values():
            one.versions.difference_update([v for v in one.versions if v in pruned])
        self.damaged = {key: one for key, one in self.damaged.items() if one.versions}
        self._looked_at.clear()
        for version in sorted(self._incomplete.union(max(one.versions) for one in self.damaged.values())):
            if version not in pruned:
                self._again(version)
            self._incomplete.discard(version)
        first = self._next
        while self._next <= newest:
            version = self._next
            try:
                if version not in pruned:
                    self._version(version, first)
                    count, first = count + 1, version + 1
            except DAMAGE:
                if version not in (pruned := self._run.pruned()):
                    raise  # else it was pruned meanwhile
            self._next += 1
        # only now: older versions are all that readers have here until newer ones are copied
        self._mark(((first, last) for first, last in pruned.versions if last < newest), spare=bool(self.damaged))
        if count or self.copy.head_hint() != newest:
            self.store.put(keys.HEAD, dump(Head(self._run.info.run, newest)))
        tags = [item.key for item in self._run.store.list(keys.TAGS) if keys.tag_name(item.key) is not None]
        for key in tags:
            self._small(key, again=True)
        for key in [key for key in self._sizes if keys.tag_name(key) is not None and key not in tags]:
            self.store.delete(key)
            del self._sizes[key]
        if rule is not None:
            plan = prune(self.copy, rule)
            for item in (*plan.data, *plan.files):
                self._sizes.pop(item.key, None)
        return count

    def _mark(self, ranges: Iterable[tuple[int, int]], *, spare: bool = False) -> None:
        """Mark versions that no reader starts to read at the source: nor are they read here then.

        spare   none that is all that leads to one that stays
        """
        if wanted := [*ranges]:
            marked = self.copy.pruned()
            every = marked.also_ranges(wanted)
            if spare:
                every = every.without(self._last_way(every))
            if every != marked:
                self.store.put(keys.PRUNED, dump(every))

    def _last_way(self, gone: Pruned) -> set[int]:
        """Versions that are all that leads to one that stays: without what is damaged, ways of the source end here."""
        added: dict[int, list[Link]] = defaultdict(list)
        for each in self.copy.added.between(-1, keys.MAX_VERSION):
            added[each.version].append(each.link)
        usable: dict[int, Summary] = {}
        for version, found in self._copied(self.copy.listed()):
            links = in_manifest(found, added[version]).links
            whole = tuple(link for link in links if all(self._sizes.get(x.key) == x.size for x in link.objects))
            usable[version] = msgspec.structs.replace(found, links=whole).summary()
        live = {version: usable[version] for version in usable if version not in gone}
        cut_off = live.keys() - chain.reachable(live)
        return chain.needed(cut_off & chain.reachable(usable), usable)

    def _version(self, version: int, first: int) -> None:
        """Copy a version; those from `first` to it are pruned at the source."""
        self._objects(version)
        self._pages(version)
        if first < version:
            # marked before the next one is committed: a version is there or is marked, up to the newest
            self._mark([(first, version - 1)])
        self._small(keys.manifest(version), once=True)

    def _again(self, version: int) -> None:
        """Copy what the mirror lacks of a version that it has."""
        key = keys.manifest(version)
        try:
            self._objects(version)
            self._pages(version)
            self.damaged.pop(key, None)
        except DAMAGE as error:
            if version not in self._run.pruned():
                self._note(key, version, error)

    def _objects(self, version: int) -> None:
        """Copy what the manifest of a version names, without what is damaged."""
        for blob in blobs(self._run.manifest(version)):
            known = self.damaged.get(blob.key)
            if known is not None and (blob.key in self._looked_at or known.etag == self._run.etag(blob.key)):
                known.versions.add(version)
                self._looked_at.add(blob.key)
                continue
            try:
                self._data(blob)
                self.damaged.pop(blob.key, None)
            except DAMAGE as error:
                if version in self._run.pruned():
                    raise
                self._note(blob.key, version, error)

    def _pages(self, version: int) -> None:
        """Copy the pages of history that readers of a version use. Versions that came with them may have been pruned
        before they were copied."""
        for end in history.pages(version):
            key = keys.history(end)
            try:
                self._small(key)
                self.damaged.pop(key, None)
            except DAMAGE as error:
                # a page of pruned versions alone is pruned too
                if self._run.pruned().extent(end - history.span(end), end):
                    self._note(key, version, error)

    def _note(self, key: str, version: int, error: Exception) -> None:
        versions = self.damaged[key].versions if key in self.damaged else set()
        self.damaged[key] = Damaged(versions | {version}, self._run.etag(key), str(error))
        self._looked_at.add(key)

    def _added(self) -> None:
        """Links that were added later: their objects, the pages that name them, the index. All of it only helps."""
        for _ in range(3):
            index = self._run.added.index()
            if index is None or index == self._index:
                return
            pruned = self._run.pruned()
            for added in self._run.added.between(-1, keys.MAX_VERSION):
                for blob in added.link.objects:
                    self.damaged.pop(blob.key, None)
                    if added.version in pruned or added.link.base in pruned:
                        continue
                    try:
                        self._data(blob)
                    except DAMAGE as error:
                        pruned = self._run.pruned()  # perhaps just now
                        if added.version not in pruned and added.link.base not in pruned:
                            self._note(blob.key, added.version, error)
            try:
                for key in index.pages:
                    self._small(key)
            except ObjectNotFound:
                continue  # merged meanwhile: the next index names another one
            data = self._run.get(keys.ADDED)
            if self._run.added.index() == index:
                self.store.put(keys.ADDED, data)
                self._index = index
                return

    def _data(self, blob: Blob | File) -> None:
        if self._sizes.get(blob.key) == blob.size:
            return
        with fetch(self._run.store, blob, self._go_on) as data:

            def chunks() -> Iterator[bytes]:
                for chunk in data.chunks():
                    self._go_on()
                    yield chunk

            self.store.put(blob.key, chunks)
        self._sizes[blob.key] = blob.size
        self.bytes += blob.size

    def _small(self, key: str, *, once: bool = False, again: bool = False) -> None:
        """Copy a small object. `once`: it commits a version and is created, never overwritten."""
        if key in self._sizes and not again:
            return
        self._go_on()
        data = self._run.get(key)
        if not once:
            self.store.put(key, data)
        else:
            try:
                self.store.put_if_absent(key, data)
            except AlreadyExists:
                log.debug("%s is in %s already", key, self.store.url)
        self._sizes[key] = len(data)
        self.bytes += len(data)

    def _go_on(self, _: int = 0) -> None:
        if self._stop.is_set():
            raise Ended

    def _without_objects(self) -> Iterator[int]:
        """Versions that were copied without some of their objects, by an earlier process."""
        gone = self.copy.pruned()
        copied = sorted(v for key in self._sizes if (v := keys.version_of(key)) is not None and v not in gone)
        for version, found in self._copied(copied):
            if any(self._sizes.get(x.key) != x.size for x in blobs(found)):
                yield version

    def _copied(self, versions: Sequence[int]) -> Iterator[tuple[int, Manifest]]:
        for start in range(0, len(versions), AT_ONCE):
            for version, found in self.copy.manifests(versions[start : start + AT_ONCE]):
                if isinstance(found, Manifest):
                    yield version, found
