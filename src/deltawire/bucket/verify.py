"""Check a run from end to end: every record against the others, every object by its hash, every version by its digest.

One copy of the weights walks up the versions. Standing at version v it proves every delta that starts there, skip
deltas too: the digest of v, moved by the delta's changes, must be the digest that the manifest at its other end names.
Only the delta to the next version is also written. An anchor is proven by the digest of its own content.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

from blake3 import blake3

from ..core import chain, full, keys
from ..core.digest import StateDigest
from ..core.errors import DigestMismatch, HashMismatch, MissingBase, ReferenceUnavailable, VersionNotFound
from ..core.manifest import File, Link, Manifest
from ..core.sparse import DeltaFile
from .ahead import Parcel, arrivals
from .records import Found, Problem, Records, blame, blobs, ranges
from .replay import Resolve, State, as_anchor, as_delta, find_reference, reference_source, take
from .run import Run
from .versions import existing
from .walk import Walker

Progress = Callable[[int, int], None]
"""(bytes read since the last call, bytes to read in all)."""

_QUICK = "not replayed, as asked"
_NO_BASE = "starts from a version that is pruned or was not asked for"
_NO_REFERENCE = "the reference is not available here"


@dataclass(slots=True)
class Verification:
    """What was looked at and what came of it."""

    versions: int = 0
    objects: int = 0
    """Objects that were read whole and hashed: anchors, deltas, companion files."""
    bytes: int = 0
    proven: int = 0
    """Links whose weights have the digest that their version's manifest names."""
    not_proven: dict[str, int] = field(default_factory=dict)
    """Links whose objects were only hashed, by reason."""
    warnings: list[str] = field(default_factory=list)
    """What harms no reader."""
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
    records = Records(run)
    try:
        records.check()
        chosen = [v for v in records.manifests if (first is None or v >= first) and (last is None or v <= last)]
        if records.manifests and not chosen:
            start = "" if first is None else f" from {first}"
            end = " on" if last is None else f" up to {last}"
            raise VersionNotFound(f"{run.store.url} has no version{start}{end}; {existing(run)}")
        _Walk(records, chosen, quick, resolve, result).go(progress)
    except Found as found:
        result.failure = found.problem
        if _was_pruned_since(run, records, found.problem.version):
            result.failure = replace(found.problem, advice="it was pruned while verify ran: run verify again")
    result.warnings = records.warnings
    return result


def _was_pruned_since(run: Run, records: Records, version: int | None) -> bool:
    return version is not None and version not in records.pruned and version in run.pruned()


@dataclass(frozen=True, slots=True)
class _Visit:
    """One link to check."""

    at: int
    """The version the walk has come to: a delta's base, else the link's own version."""
    manifest: Manifest
    link: Link
    go_on: bool = False
    """The state moves along this delta."""
    hash_only: str = ""
    """Why nothing is replayed."""

    @property
    def step(self) -> chain.Step:
        return chain.Step(self.manifest.version, self.link.kind, self.link.base, self.link.bytes)


def _route(manifests: list[Manifest], quick: bool) -> list[_Visit]:
    """Every link of these versions once, in the order in which one state can prove them."""
    versions = [manifest.version for manifest in manifests]
    chosen = set(versions)
    starting: dict[int, list[tuple[Manifest, Link]]] = defaultdict(list)
    for manifest in manifests:
        for link in manifest.links:
            if link.base is not None and not quick:
                starting[link.base].append((manifest, link))
    route = []
    following = dict(itertools.pairwise(versions))
    for manifest in manifests:
        version, after = manifest.version, following.get(manifest.version)
        for link in manifest.links:
            if quick or link.base is None:
                route.append(_Visit(version, manifest, link, hash_only=_QUICK if quick else ""))
            elif link.base not in chosen:
                route.append(_Visit(version, manifest, link, hash_only=_NO_BASE))
        # the delta to the next version comes last, because it takes the state along
        for child, link in sorted(starting.get(version, []), key=lambda pair: pair[0].version == after):
            route.append(_Visit(version, child, link, go_on=child.version == after and after in starting))
    return route


class _Walk:
    """Up the versions with one copy of the weights. Every object is fetched once, some of them ahead."""

    def __init__(
        self, records: Records, versions: list[int], quick: bool, resolve: Resolve, result: Verification
    ) -> None:
        self.records, self.run, self.resolve, self.result = records, records.run, resolve, result
        self.versions = versions
        self.manifests = [records.manifests[version] for version in versions]
        self.route = _route(self.manifests, quick)
        self.bases = {visit.at for visit in self.route if visit.link.base == visit.at}
        self.state: State | None = None
        self.walker = Walker(self.run, records.summaries)

    def go(self, progress: Progress | None) -> None:
        total = sum({blob.key: blob.size for m in self.manifests for blob in blobs(m)}.values())
        advance = (lambda n: progress(n, total)) if progress else None
        for manifest, file in {file.key: (m, file) for m in reversed(self.manifests) for file in m.files}.values():
            self._file(manifest, file)
            if advance:
                advance(file.size)
        # what lies in the bucket is to be verified, not what this host has of it
        coming = arrivals(self.run, [visit.step for visit in self.route], advance, shared=False)
        for visit, arrival in zip(self.route, coming, strict=True):
            self.result.versions = bisect_left(self.versions, visit.at)
            with self._blame(visit.manifest, visit.link):
                parcel = arrival.parcel()
                reason = self._check(visit, parcel)
            self.result.objects += len(parcel.objects)
            self.result.bytes += sum(data.size for data in parcel.objects)
            if reason:
                self.result.not_proven[reason] = self.result.not_proven.get(reason, 0) + 1
            else:
                self.result.proven += 1
        self.result.versions = len(self.versions)

    def _file(self, manifest: Manifest, file: File) -> None:
        advice = "publish again with the checkpoint's files, or restore it from a copy of the bucket"
        with blame(manifest.version, file.key, lambda: advice):
            data = self.run.store.get(file.key, limit=file.size).data
            found = blake3(data).hexdigest(length=16)
            if found != file.hash:
                raise HashMismatch(f"{file.name} has the hash {found}, its manifest says {file.hash}")
        self.result.objects += 1
        self.result.bytes += file.size

    def _check(self, visit: _Visit, parcel: Parcel) -> str:
        """Replay one link, whose objects have been hashed. Returns why not, where it could not be."""
        manifest, link = visit.manifest, visit.link
        if link.kind == "reference":
            return visit.hash_only or self._reference(manifest, link)
        if link.kind == "anchor":
            weights = as_anchor(self.run, manifest.version, parcel.objects)
            if not visit.hash_only:
                self._full(manifest, weights)
            return visit.hash_only
        if visit.hash_only:
            for data in parcel.objects:
                as_delta(self.run, manifest, link, data)
            return visit.hash_only
        state = self._stand_at(visit.at)
        present = state.digest if state else None
        files = [as_delta(self.run, manifest, link, data, present) for data in parcel.objects]
        if state is None:
            return _NO_REFERENCE
        self._delta(state, manifest, files, visit.go_on)
        return ""

    def _reference(self, manifest: Manifest, link: Link) -> str:
        try:
            self._full(manifest, reference_source(self.run, link, self.resolve))
        except ReferenceUnavailable:
            self.walker.leave_out_references()
            return _NO_REFERENCE
        return ""

    def _full(self, manifest: Manifest, weights: full.Source) -> None:
        """Compare the digest of full weights. They become the state where it is needed and no delta led there."""
        if manifest.version in self.bases and not self._stands_at(manifest.version):
            state = self._private_state()
            state.load(weights)
            found, state.version = state.digest, manifest.version
        else:
            found = full.digest_of(weights)
        _require(manifest, found)

    def _delta(self, state: State, manifest: Manifest, files: list[DeltaFile], go_on: bool) -> None:
        """If it fails while the state moves along, the state is spoiled; but so is the run, and the walk ends."""
        moved = StateDigest()
        for file in files:
            for changes in file.patches(state.bits) if go_on else file.changes(state.bits):
                moved += sum((change.digest() for change in changes), StateDigest())
        _require(manifest, state.digest + moved)
        if go_on:
            state.digest, state.version = state.digest + moved, manifest.version

    # ── the state ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _stand_at(self, version: int) -> State | None:
        """The state at a version, rebuilt where neither the walk nor an anchor led there. None if it cannot be had."""
        if self._stands_at(version):
            return self.state
        state = self._private_state()
        try:
            for arrival in arrivals(self.run, self.walker.plan(state.version, version), shared=False):
                manifest = self.records.manifests[arrival.step.version]
                with self._blame(manifest, manifest.link(arrival.step.kind, arrival.step.base)):
                    take(self.run, state, arrival.parcel(), self.resolve)
        except MissingBase:
            return None
        except ReferenceUnavailable:
            self.walker.leave_out_references()
            return self._stand_at(version)
        return state

    def _stands_at(self, version: int) -> bool:
        return self.state is not None and self.state.version == version

    def _private_state(self) -> State:
        if self.state is None:
            self.state = State(self.run.schema)
        return self.state

    # ── what to say ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _blame(self, manifest: Manifest, link: Link) -> AbstractContextManager[None]:
        place = ", ".join(blob.key for blob in link.objects) or link.source
        return blame(manifest.version, place, lambda: self._advice(manifest, link))

    def _advice(self, manifest: Manifest, link: Link) -> str:
        if link.kind == "reference":
            return "name the folder of the checkpoint that the run was started from (--reference)"
        stranded = self.records.stranded_without(manifest.version, link)
        if not stranded:
            return (
                "every version can still be reached another way; restore it from a copy, or let prune take it in time"
            )
        return (
            f"without it version {ranges(stranded)} cannot be reached; restore it from a copy of the bucket, "
            "or publish an anchor (`deltawire publish --anchor`), from which replicas can go on"
        )


def _require(manifest: Manifest, found: StateDigest) -> None:
    if str(found) != manifest.digest:
        raise DigestMismatch(
            manifest.version, manifest.digest, str(found), f"or {keys.manifest(manifest.version)} lies"
        )
