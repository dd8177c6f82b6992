"""Check a run from end to end: every record against the others, every object by its hash, every version by its digest.

First the small JSON objects, which must agree with each other. Then one copy of the weights walks up the versions.
Standing at version v it proves every delta that starts there, skip deltas too: the digest of v, moved by the delta's
changes, must be the digest that the manifest at its other end names. Only the delta to the next version is written.

A digest says that there was no error. Weights can be made to have the digest of others, so all links to a version are
also compared with each other: an anchor bit by bit with the weights that the walk has come to, deltas by sums like the
digest with words that are drawn for each check, which nobody can have known.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NoReturn

import msgspec
import numpy as np
from blake3 import blake3

from ..core import chain, full, history, keys
from ..core.added import AddedLink, in_manifest, in_summaries
from ..core.change import Change, Region, digest_shift, regions
from ..core.digest import StateDigest, Words
from ..core.errors import (
    DAMAGE,
    DeltawireError,
    ForeignObject,
    HashMismatch,
    ManifestError,
    MissingBase,
    ReferenceUnavailable,
    VersionNotFound,
)
from ..core.manifest import Link, Manifest, Pruned, Summary, ranges_of
from ..core.parallel import ordered_map, threads_for
from ..core.state import State
from .references import Reference, Resolve, resolver
from .replay import advance, require_digest
from .run import Run, blobs, lean, ranges, read_each
from .versions import existing, tags
from .walk import FetchedLink, Walker, prefetch

_QUICK = "not replayed, as asked"
_NO_BASE = "starts from a version that is pruned or was not asked for"
_NO_REFERENCE = "the reference is not available here"

_RESTORE = "restore it from a copy of the bucket"
_RESTORE_FILE = "publish again with the checkpoint's files, or restore it from a copy of the bucket"
_FORGED = (
    "no error does this: somebody with a delegated key, or the right to write an unsigned run, has made it. Delete it "
    f"and {keys.ADDED}; in a signed run rotate the key, which ends the delegation (docs/signed.md)"
)
_RESTORE_BASE = "restore the versions it is built on from a copy of the bucket, or publish an anchor and prune it"


@dataclass(frozen=True, slots=True)
class Problem:
    """The first bad thing that was found."""

    version: int | None
    """The version it makes unusable; None for a problem of the run as a whole."""
    object: str
    """Key of the object, or the source of a reference."""
    error: str
    """Class of the error, see core/errors.py."""
    message: str
    advice: str


@dataclass(frozen=True, slots=True)
class Signer:
    """Versions that one key signed."""

    key: str
    signed: str
    """`manifests`, or `links` that a keeper has added."""
    versions: tuple[tuple[int, int], ...]
    """First and last version of each range."""


@dataclass(slots=True)
class Verification:
    """What was checked and the result.

    found = dw.verify(run, quick=True)
    print(found.objects, found.warnings)
    """

    versions: int = 0
    objects: int = 0
    """Objects that were read whole and hashed: anchors, deltas, companion files."""
    bytes: int = 0
    proven: int = 0
    """Links whose weights have the digest that their version's manifest names, and are those of all other links to it
    that were proven."""
    not_proven: dict[str, int] = field(default_factory=dict)
    """Links whose objects were only hashed, by reason."""
    warnings: list[str] = field(default_factory=list)
    """Findings that harm no reader."""
    signers: list[Signer] = field(default_factory=list)
    """Who signed the versions, as they say."""
    signatures_checked: bool = False
    """Whether keys were trusted, so that every signature was checked."""
    failure: Problem | None = None

    @property
    def ok(self) -> bool:
        """Whether no problem was found."""
        return self.failure is None

    def count(self, reason: str) -> None:
        """Count a link, or with a reason one that could not be proven."""
        if reason:
            self.not_proven[reason] = self.not_proven.get(reason, 0) + 1
        else:
            self.proven += 1


def verify(
    run: Run,
    *,
    first: int | None = None,
    last: int | None = None,
    quick: bool = False,
    reference: Reference = None,
    progress: Callable[[int, int], None] | None = None,
) -> Verification:
    """Check every record of a run and every object of the versions from `first` to `last`; stop at the first problem.

        found = dw.verify(dw.Run.open("s3://runs/chat"))
        print(found.ok, found.failure)

    `quick` hashes the objects but replays nothing. Needs memory for one copy of the weights plus a few blocks.
    `progress` is called with the bytes read since the last call and the bytes to read in all.
    """
    result = Verification()
    records = _Records(run)
    try:
        records.check()
        chosen = [v for v in records.manifests if (first is None or v >= first) and (last is None or v <= last)]
        if records.manifests and not chosen:
            start = "" if first is None else f" from {first}"
            end = " on" if last is None else f" up to {last}"
            raise VersionNotFound(f"{run.store.url} has no version{start}{end}; {existing(run)}")
        _Replay(records, chosen, quick, resolver(reference), result).check(progress)
    except _Contradiction as found:
        result.failure, version = found.problem, found.problem.version
        if version is not None and version not in records.pruned and version in run.pruned():
            result.failure = replace(found.problem, advice="it was pruned while verify ran: run verify again")
    result.warnings = records.warnings
    result.signers, result.signatures_checked = records.signers(), run.trust is not None
    return result


class _Contradiction(Exception):
    """Ends the check with a problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem


@contextmanager
def _blame(version: int | None, key: str, advice: Callable[[], str] = lambda: _RESTORE) -> Iterator[None]:
    """Turn an error inside into a problem of this object. A store that cannot be reached proves nothing, and raises."""
    try:
        yield
    except ReferenceUnavailable:
        raise  # not here, but perhaps elsewhere: says nothing about the run
    except DAMAGE as error:
        raise _Contradiction(Problem(version, key, type(error).__name__, str(error), advice())) from error


def _fail(version: int, key: str, message: str, advice: str = _RESTORE) -> NoReturn:
    raise _Contradiction(Problem(version, key, ManifestError.__name__, message, advice))


# ── records ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Records:
    """The small JSON objects of a run, each by itself and against the others: pruned, manifests, history, head."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.warnings: list[str] = []
        self.pruned = Pruned(run.info.run, ())
        self.manifests: dict[int, Manifest] = {}
        """Of every version that is not pruned, ascending."""
        self.summaries: dict[int, Summary] = {}
        self.added: set[tuple[int, str, int | None]] = set()
        """Links that were added later, by way."""
        self._recent: dict[int, tuple[Summary, ...]] = {}
        self._signed: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
        """Versions by what was signed and who signed it."""

    def check(self) -> None:
        """Raise _Contradiction at the first contradiction."""
        with _blame(None, keys.PRUNED):
            self.pruned = self.run.pruned()
        listed = self.run.listed()
        if self.run.trust is not None:
            with _blame(None, keys.VERSIONS):
                self.run.trust.check_newest(max(listed, default=None))
        if not listed:
            self.warnings.append("the run has no version yet")
            return
        self._check_gaps(listed)
        self._read_manifests(listed)
        added = self._read_added(listed[-1])
        ways = in_summaries(self.summaries, added)
        stranded = sorted(self.manifests.keys() - chain.reachable(ways))
        if stranded and (lost := self._usable(self.run.added.listed())):
            # a reader that finds no path lists the pages
            added = [*{link.way: link for link in (*lost, *added)}.values()]
            ways = in_summaries(self.summaries, added)
            if later := [v for v in stranded if v in chain.reachable(ways)]:
                self.warnings.append(f"{keys.ADDED} lacks links that version {later[0]} needs: readers list the pages")
            stranded = sorted(set(stranded).difference(later))
        if stranded:
            with _blame(stranded[0], keys.manifest(stranded[0]), lambda: _RESTORE_BASE):
                chain.plan(None, stranded[0], ways)
        self._check_history()
        # from here on, links that were added later are links like all others
        self.summaries = ways
        self.added = {link.way for link in added}
        for link in added:
            self.manifests[link.version] = in_manifest(self.manifests[link.version], [link.link])
        self._check_head(listed[-1])
        self._check_leftovers(listed)
        for name, tag in tags(self.run).items():
            if tag.version not in self.manifests:
                self.warnings.append(f"the tag {name} names version {tag.version}, which the run does not have")

    def signers(self) -> list[Signer]:
        for version, manifest in self.manifests.items():
            self._signed["manifests", manifest.signer].add(version)
        found = [
            Signer(key, what, ranges_of(versions)) for (what, key), versions in self._signed.items() if key and versions
        ]
        return sorted(found, key=lambda signer: (signer.signed != "manifests", signer.versions))

    def _check_gaps(self, listed: list[int]) -> None:
        newest = listed[-1]
        hidden = self.pruned.last
        if hidden >= newest:
            _fail(hidden, keys.PRUNED, f"it hides version {hidden}, but the newest version is {newest}")
        # in ranges: the newest version may have any number
        first, last = self.pruned.also(listed).versions[0]
        missing = 0 if first else last + 1
        if missing < newest:
            advice = f"restore it from a copy of the bucket, or add version {missing} to {keys.PRUNED} if it is to go"
            _fail(missing, keys.manifest(missing), f"is missing, and {keys.PRUNED} does not name it", advice)

    def _read_manifests(self, listed: list[int]) -> None:
        for version, found in self.run.manifests(v for v in listed if v not in self.pruned):
            with _blame(version, keys.manifest(version)):
                if isinstance(found, DeltawireError):
                    raise found
            self.summaries[version] = found.summary()
            # as a rule they are what the manifests before it say: then they take no memory of their own
            self._recent[version] = tuple(
                known if (known := self.summaries.get(told.version)) == told else told for told in found.recent
            )
            self.manifests[version] = lean(found)

    def _read_added(self, newest: int) -> list[AddedLink]:
        """Return the links that were added later and that a reader can use. Others are findings."""
        index = self.run.added.index()
        if index is None:
            if any(item.key == keys.ADDED for item in self.run.store.list(keys.ADDED)):
                self.warnings.append(f"{keys.ADDED} cannot be used: readers go without the links that were added later")
            return []
        self._signed["links", index.signer].update(added.version for added in index.recent)
        for key in index.pages:
            try:
                page = self.run.added.page(key)
                self._signed["links", page.signer].update(added.version for added in page.links)
            except DAMAGE as error:
                self.warnings.append(f"{key} cannot be used ({error}): readers go without the links in it")
        return self._usable(self.run.added.between(-1, newest))

    def _usable(self, links: Iterable[AddedLink]) -> list[AddedLink]:
        """The links between versions that are there."""
        return [
            x for x in links if x.version in self.manifests and (x.link.base is None or x.link.base in self.manifests)
        ]

    def _check_history(self) -> None:
        """Check that summaries of a version, which readers use without its manifest, say what the manifest says."""
        tellers: Counter[int] = Counter()
        wrong: dict[int, list[tuple[str, Summary]]] = defaultdict(list)
        for key, summaries, covered in self._tellers():
            found = {s.version: s for s in summaries if s.version not in self.pruned}
            for version in sorted({v for v in covered if v in self.manifests} ^ found.keys()):
                what = "tells of a version that does not belong there:" if version in found else "leaves out version"
                _fail(version, key, f"it {what} {version}")
            for version, summary in found.items():
                tellers[version] += 1
                if summary != self.summaries[version]:
                    wrong[version].append((key, summary))
        if not wrong:
            return
        # where records contradict each other, several that agree are believed rather than one
        version = min(wrong)
        truth, key, (teller, other) = self.summaries[version], keys.manifest(version), wrong[version][0]
        what = next(name for name in truth.__struct_fields__ if getattr(truth, name) != getattr(other, name))
        if len(wrong[version]) == tellers[version] > 1:
            _fail(version, key, f"{tellers[version]} records, such as {teller}, tell other {what} of it")
        _fail(version, teller, f"it tells other {what} of version {version} than {key}")

    def _tellers(self) -> Iterator[tuple[str, Iterable[Summary], range]]:
        """(key, summaries in it, versions it must have), for every record that has summaries of versions."""
        there = sorted(self.manifests)
        # a page of pruned versions alone is needed by nobody, and pruned too
        ends = sorted(
            end
            for end in {end for version in there for end in history.pages(version)}
            if bisect_left(there, end - history.span(end)) < bisect_left(there, end)
        )
        for end, found in read_each(self.run.page, ends):
            with _blame(None, keys.history(end)):
                if isinstance(found, DeltawireError):
                    raise found
            yield keys.history(end), found.versions, range(end - history.span(end), end)
        for version in self.manifests:
            yield keys.manifest(version), self._recent[version], range(history.recent_start(version), version)

    def _check_head(self, newest: int) -> None:
        head = self.run.head_hint()
        if head is None:
            self.warnings.append(f"{keys.HEAD} is missing or unreadable: readers list the manifests instead")
        elif head < newest or not self.run.exists(head):
            self.warnings.append(f"{keys.HEAD} points to version {head}; the newest is {newest}")

    def _check_leftovers(self, listed: list[int]) -> None:
        half = [v for v in listed if v in self.pruned]
        if half:
            self.warnings.append(
                f"{len(half)} pruned versions still have a manifest ({ranges(half)}): run `prune --apply` again"
            )
        named = {blob.key for m in self.manifests.values() for blob in blobs(m)}
        orphans = [
            item
            for prefix in (keys.ANCHORS, keys.DELTAS, keys.FILES)
            for item in self.run.store.list(prefix)
            if item.key not in named
        ]
        if orphans:
            size = sum(item.size for item in orphans)
            self.warnings.append(
                f"{len(orphans)} objects ({size:,} bytes) belong to no version, such as {orphans[0].key}: "
                "left by a crash, or on their way; `prune` takes the old ones"
            )


# ── objects ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Visit:
    """One link to check."""

    at: int
    """The version that the walk has come to: a delta's base, else the link's own version."""
    manifest: Manifest
    link: Link
    go_on: bool = False
    """Whether the state moves along this delta."""
    hash_only: str = ""
    """Why nothing is replayed."""

    @property
    def step(self) -> chain.Step:
        return chain.Step(self.manifest.version, self.link.kind, self.link.base, self.link.bytes)

    @property
    def way(self) -> tuple[int, str, int | None]:
        return self.manifest.version, self.link.kind, self.link.base

    @property
    def key(self) -> str:
        return ", ".join(blob.key for blob in self.link.objects) or self.link.source


def _route(manifests: list[Manifest], quick: bool) -> list[_Visit]:
    """Return every link of these versions once, in the order in which one state can prove them."""
    versions = [manifest.version for manifest in manifests]
    chosen = set(versions)
    starting: dict[int, list[tuple[Manifest, Link]]] = defaultdict(list)
    for manifest in manifests:
        for link in manifest.links:
            if link.base is not None and not quick:
                starting[link.base].append((manifest, link))
    # the state also goes where something is to be compared with it
    goals = starting.keys() | {m.version for m in manifests if any(link.base is None for link in m.links)}
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
            route.append(_Visit(version, child, link, go_on=child.version == after and after in goals))
    return route


class _Replay:
    """Walks up the versions with one copy of the weights. Every object is fetched once, some of them ahead."""

    def __init__(
        self, records: _Records, versions: list[int], quick: bool, resolve: Resolve, result: Verification
    ) -> None:
        self.records, self.run, self.resolve, self.result = records, records.run, resolve, result
        self.versions = versions
        self.manifests = [records.manifests[version] for version in versions]
        self.route = _route(self.manifests, quick)
        self.walker = Walker(self.run, records.summaries)
        self.words = Words.drawn()
        self.sum = StateDigest()
        """The sum of the state's weights by these words."""
        self.sums: dict[int, tuple[StateDigest, _Visit | None]] = {}
        """The sum of each version's weights by the link that was proven first, and its `suspect`."""
        self.came_by: _Visit | None = None
        """The latest link on the state's way that was added later; None since an anchor of the trainer."""

    @cached_property
    def state(self) -> State:
        return State(self.run.schema)

    def check(self, progress: Callable[[int, int], None] | None) -> None:
        result = self.result
        total = sum({blob.key: blob.size for m in self.manifests for blob in blobs(m)}.values())
        advance = (lambda n: progress(n, total)) if progress else None
        for manifest, file in {file.key: (m, file) for m in reversed(self.manifests) for file in m.files}.values():
            with _blame(manifest.version, file.key, lambda: _RESTORE_FILE):
                found = blake3(self.run.store.get(file.key, limit=file.size).data).hexdigest(length=16)
                if found != file.hash:
                    raise HashMismatch(f"{file.name} has the hash {found}, its manifest says {file.hash}")
            result.objects += 1
            result.bytes += file.size
            if advance:
                advance(file.size)
        # verify what is in the bucket, not this host's cache of it
        coming = prefetch(self.run, [visit.step for visit in self.route], advance, shared=False)
        for visit, (_, pending) in zip(self.route, coming, strict=True):
            result.versions = bisect_left(self.versions, visit.at)
            with self._blame_link(visit.manifest, visit.link):
                fetched = pending.result()
                reason = self._prove(visit, fetched)
            result.objects += len(fetched.objects)
            result.bytes += sum(data.size for data in fetched.objects)
            result.count(reason)
        result.versions = len(self.versions)

    def _prove(self, visit: _Visit, fetched: FetchedLink) -> str:
        """Replay one link, whose objects have been hashed. Returns the reason where it could not be replayed."""
        manifest, kind = visit.manifest, visit.link.kind
        if kind == "delta":
            reason = visit.hash_only or ("" if self._stand_at(visit.at) else _NO_REFERENCE)
            if reason:
                fetched.delta().open()
            else:
                self._take(visit, fetched, write=visit.go_on)
            return reason
        if visit.hash_only:
            if kind == "anchor":
                fetched.weights(self.resolve)
            return visit.hash_only
        try:
            if self.state.version == manifest.version:
                self._compare(visit, fetched.weights(self.resolve))
            else:
                self._take(visit, fetched)
        except ReferenceUnavailable:
            self.walker.leave_out_references()
            return _NO_REFERENCE
        return ""

    def _take(self, visit: _Visit, fetched: FetchedLink, *, write: bool = True) -> None:
        """As `advance`. All links to a version must lead to the same weights."""
        found, version, kind = self.sum, visit.manifest.version, visit.link.kind

        def changed(changes: Sequence[Change] | None) -> None:
            nonlocal found
            found = (
                full.digest_of(self.state, words=self.words)
                if changes is None
                else found + digest_shift(changes, self.words)
            )

        advance(self.state, fetched, self.resolve, write=write, changed=changed)
        is_added = visit.way in self.records.added
        suspect = visit if is_added else self.came_by if kind == "delta" else None
        if write:
            self.sum, self.came_by = found, suspect
        if is_added and kind == "anchor" and version not in self.sums:
            self.records.warnings.append(
                f"the anchor of version {version} was added by a keeper, and no other link that is checked leads "
                "there: its weights have the right digest, and were compared with no others"
            )
        expected, other = self.sums.setdefault(version, (found, suspect))
        if found != expected:
            bad = suspect or other or visit
            message = (
                f"it leads to other weights of version {version} than another link, which were made to have its digest"
            )
            raise _Contradiction(Problem(version, bad.key, ForeignObject.__name__, message, _FORGED))

    def _compare(self, visit: _Visit, weights: full.Source) -> None:
        """Require an anchor to have, bit for bit, the weights of the version that the state has come to."""
        parts = [part for tensor in self.run.schema.tensors for part in regions(tensor)]

        def differ(part: Region) -> int:
            return int(np.count_nonzero(self.state.region(part) != weights.region(part)))

        threads = threads_for(self.run.schema.elements, None)
        for part, count in zip(parts, ordered_map(differ, parts, threads), strict=True):
            if count:
                # another digest: an error, and of this anchor
                require_digest(visit.manifest, full.digest_of(weights))
                bad = visit if visit.way in self.records.added else self.came_by or visit
                message = (
                    f"an anchor of version {visit.manifest.version} has other weights than the deltas lead to, which "
                    f"were made to have its digest: {part.tensor.name} differs in {count:,} of {part.units:,}"
                )
                raise _Contradiction(Problem(visit.manifest.version, bad.key, ForeignObject.__name__, message, _FORGED))

    def _stand_at(self, version: int) -> bool:
        """Bring the state to a version that neither the walk nor an anchor has reached. False if no link does."""
        while self.state.version != version:
            try:
                for step, pending in prefetch(self.run, self.walker.plan(self.state.version, version), shared=False):
                    manifest = self.records.manifests[step.version]
                    link = manifest.link(step.kind, step.base)
                    with self._blame_link(manifest, link):
                        self._take(_Visit(version, manifest, link), pending.result())
            except MissingBase:
                return False
            except ReferenceUnavailable:
                self.walker.leave_out_references()
        return True

    def _blame_link(self, manifest: Manifest, link: Link) -> AbstractContextManager[None]:
        def advice() -> str:
            if link.kind == "reference":
                return "name the folder of the checkpoint that the run was started from (--reference)"
            before, summary = self.records.summaries, self.records.summaries[manifest.version]
            rest = tuple(x for x in summary.links if (x.kind, x.base) != (link.kind, link.base))
            without = {**before, manifest.version: msgspec.structs.replace(summary, links=rest)}
            stranded = chain.reachable(before) - chain.reachable(without)
            if not stranded:
                return (
                    "every version can still be reached another way; restore it from a copy, or let prune remove it in "
                    "time"
                )
            return (
                f"without it version {ranges(stranded)} cannot be reached; restore it from a copy of the bucket, "
                "or publish an anchor (`deltawire publish --anchor`), from which replicas can go on"
            )

        return _blame(manifest.version, _Visit(manifest.version, manifest, link).key, advice)
