"""Check a run from end to end: every record against the others, every object by its hash, every version by its digest.

One copy of the weights walks up the versions. Standing at version v it proves every delta that starts there, skip
deltas too: the digest of v, moved by the delta's changes, must be the digest that the manifest at its other end names.
Only the delta to the next version is also written. An anchor is proven by the digest of its own content.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

import msgspec
from blake3 import blake3

from ..core import chain, full
from ..core.digest import StateDigest
from ..core.errors import (
    DigestMismatch,
    HashMismatch,
    MissingBase,
    ReferenceUnavailable,
)
from ..core.manifest import Blob, File, Link, Manifest, Summary
from ..core.sparse import DeltaFile
from .ahead import Arrival, arrivals
from .replay import Resolve, State, find_reference, open_anchor, open_delta, reference_source, take, write
from .run import Run

Progress = Callable[[int, int], None]
"""(bytes read since the last call, bytes to read in all)."""


@dataclass(slots=True)
class Verification:
    """What was looked at and what came of it."""

    versions: int = 0
    objects: int = 0
    # read whole and hashed: anchors, deltas, companion files
    bytes: int = 0
    proven: int = 0
    # links whose weights have the digest that their version's manifest names
    not_proven: Counter[str] = field(default_factory=Counter)
    # reason → links that were hashed but not replayed
    warnings: list[str] = field(default_factory=list)
    # nothing that harms a reader
    failure: Problem | None = None

    @property
    def ok(self) -> bool:
        return self.failure is None


def verify(
    run: Run,
    *,
    first: int | None = None,
    last: int | None = None,
    quick: bool = False,
    resolve: Resolve = find_reference,
    progress: Progress | None = None,
) -> Verification:
    """Check every record of a run and every object of the versions from `first` to `last`; stop at the first bad thing.

    `quick` hashes the objects but replays nothing. Needs memory for one copy of the weights plus a few blocks.
    """
    result = Verification()
    records = Records(run, result)
    try:
        records.check()
        chosen = [v for v in records.manifests if (first is None or v >= first) and (last is None or v <= last)]
        _Walk(records, chosen, quick, resolve, progress).check()
    except Found as found:
        result.failure = found.problem
        if found.problem.version is not None and found.problem.version in set(run.pruned()) - records.pruned:
            result.failure = replace(found.problem, advice="it was pruned while verify ran: run verify again")
    return result


# ── objects ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Walk:
    """Up the versions with one copy of the weights. Every object of the chosen versions is fetched once."""

    def __init__(
        self, records: Records, versions: list[int], quick: bool, resolve: Resolve, progress: Progress | None
    ) -> None:
        self.records, self.run, self.result = records, records.run, records.result
        self.versions, self.quick, self.resolve = versions, quick, resolve
        self.state: State | None = None
        self.passable: Mapping[int, Summary] = records.summaries
        # by which a state can be had here: without a reference that is not available
        chosen = set(versions)
        self.starting: dict[int, list[tuple[Manifest, Link]]] = defaultdict(list)
        # base → the deltas that will be proven there
        for manifest in self._manifests():
            for link in manifest.links:
                if link.kind == "delta" and link.base in chosen and not quick:
                    self.starting[link.base].append((manifest, link))
        self.progress: Callable[[int], None] | None = None
        if progress is not None:
            total = sum({blob.key: blob.size for m in self._manifests() for blob in blobs(m)}.values())
            self.progress = lambda n: progress(n, total)

    def check(self) -> None:
        seen: set[str] = set()
        for manifest, after in zip(self._manifests(), [*self.versions[1:], None], strict=True):
            for file in manifest.files:
                if file.key not in seen:
                    self._file(manifest, file)
                    seen.add(file.key)
            for link in manifest.links:
                if link.kind == "anchor":
                    self._anchor(manifest, link)
                elif link.kind == "reference":
                    self._reference(manifest, link)
                elif self.quick or link.base not in self.starting:
                    reason = "quick" if self.quick else "a delta whose base is pruned or was not chosen"
                    self._hash_delta(manifest, link, reason)
            self._prove_deltas(manifest.version, after)
            self.result.versions += 1

    def _manifests(self) -> Iterator[Manifest]:
        return (self.records.manifests[version] for version in self.versions)

    # ── one object ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _file(self, manifest: Manifest, file: File) -> None:
        advice = "publish again with the checkpoint's files, or restore it from a copy of the bucket"
        with blame(manifest.version, file.key, lambda: advice):
            data = self.run.store.get(file.key).data
            found = blake3(data).hexdigest(length=16)
            if found != file.hash:
                raise HashMismatch(f"{file.name} has the hash {found}, its manifest says {file.hash}")
        if self.progress:
            self.progress(file.size)
        self._count(file.size)

    def _anchor(self, manifest: Manifest, link: Link) -> None:
        for blob in link.objects:
            with (
                self._blame(manifest, link, blob),
                open_anchor(self.run, manifest.version, blob, self.progress) as weights,
            ):
                if not self.quick:
                    self._full(manifest, weights)
            self._count(blob.size)
        self._settle("quick" if self.quick else None)

    def _reference(self, manifest: Manifest, link: Link) -> None:
        if self.quick:
            self._settle("quick")
            return
        advice = "name the folder of the checkpoint that the run was started from (--reference)"
        try:
            with blame(manifest.version, link.source, lambda: advice):
                self._full(manifest, reference_source(self.run, link, self.resolve))
        except ReferenceUnavailable:
            self.passable = _without_references(self.records.summaries)
            self._settle(f"the reference {link.source!r} is not available here")
        else:
            self._settle()

    def _full(self, manifest: Manifest, weights: full.Source) -> None:
        """Compare the digest of full weights. They become the state where it is needed and no delta led there."""
        if manifest.version in self.starting and not self._stands_at(manifest.version):
            state = self._private_state()
            state.load(weights)
            found, state.version = state.digest, manifest.version
        else:
            found = full.digest_of(weights)
        _require(manifest, found)

    def _hash_delta(self, manifest: Manifest, link: Link, reason: str) -> None:
        for blob in link.objects:
            with self._blame(manifest, link, blob), self._open_delta(manifest, link, blob):
                pass  # opening it has checked its hash, its header and what it says it is
            self._count(blob.size)
        self._settle(reason)

    def _prove_delta(self, state: State, manifest: Manifest, link: Link, *, go: bool) -> None:
        """With `go` the state moves along. It is spoiled if that fails, but then so is the run, and the walk ends."""
        moved = StateDigest()
        for blob in link.objects:
            with self._blame(manifest, link, blob), self._open_delta(manifest, link, blob) as file:
                for changes in file.changes(state.bits):
                    moved += write(changes, state) if go else sum((c.digest() for c in changes), StateDigest())
            self._count(blob.size)
        with self._blame(manifest, link, link.objects[0]):
            _require(manifest, state.digest + moved)
        if go:
            state.digest, state.version = state.digest + moved, manifest.version
        self._settle()

    # ── the state ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _prove_deltas(self, version: int, after: int | None) -> None:
        """All deltas that start at a version; the one to the next version last, because it takes the state along."""
        deltas = self.starting.get(version, [])
        if not deltas:
            return
        state = self._stand_at(version)
        for manifest, link in sorted(deltas, key=lambda pair: pair[0].version == after):
            if state is None:
                self._hash_delta(manifest, link, "a delta whose base cannot be rebuilt without the reference")
            else:
                self._prove_delta(state, manifest, link, go=manifest.version == after and after in self.starting)

    def _stand_at(self, version: int) -> State | None:
        """The state at a version to which neither the walk nor an anchor of its own led. None if it cannot be had."""
        if self._stands_at(version):
            return self.state
        state = self._private_state()
        try:
            for arrival in arrivals(self.run, chain.plan(state.version, version, self.passable)):
                self._take(state, arrival)
        except MissingBase:
            return None
        except ReferenceUnavailable:
            self.passable = _without_references(self.records.summaries)
            return self._stand_at(version)
        return state

    def _take(self, state: State, arrival: Arrival) -> None:
        manifest = self.records.manifests[arrival.step.version]
        link = manifest.link(arrival.step.kind, arrival.step.base)
        place = link.objects[0].key if link.objects else link.source
        with blame(manifest.version, place, lambda: self._advice(manifest, link)):
            take(self.run, state, arrival.parcel(), self.resolve)

    def _stands_at(self, version: int) -> bool:
        return self.state is not None and self.state.version == version

    def _private_state(self) -> State:
        if self.state is None:
            self.state = State(self.run.schema)
        return self.state

    # ── keeping book ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _open_delta(self, manifest: Manifest, link: Link, blob: Blob) -> AbstractContextManager[DeltaFile]:
        return open_delta(self.run, manifest.version, link.base or 0, blob, self.progress)

    def blame(self, manifest: Manifest, link: Link, blob: Blob) -> AbstractContextManager[None]:
        return blame(manifest.version, blob.key, lambda: self._advice(manifest, link))

    def _advice(self, manifest: Manifest, link: Link) -> str:
        stranded = self.records.stranded_without(manifest.version, link)
        if not stranded:
            return "every version can still be reached another way; restore it from a copy of the bucket, or prune"
        return (
            f"without it version {ranges(stranded)} cannot be reached; restore it from a copy of the bucket, "
            "or publish an anchor from which replicas can go on"
        )

    def _count(self, size: int) -> None:
        self.result.objects += 1
        self.result.bytes += size

    def _settle(self, not_proven: str | None = None) -> None:
        if not_proven is None:
            self.result.proven += 1
        else:
            self.result.not_proven[not_proven] += 1


def _require(manifest: Manifest, found: StateDigest) -> None:
    if str(found) != manifest.digest:
        raise DigestMismatch(manifest.version, manifest.digest, str(found))


def _without_references(versions: Mapping[int, Summary]) -> dict[int, Summary]:
    return {
        v: msgspec.structs.replace(s, links=tuple(x for x in s.links if x.kind != "reference"))
        for v, s in versions.items()
    }
