"""The small JSON objects of a run, each by itself and against the others: pruned, manifests, history, head."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

import msgspec

from ..core import chain, history, keys
from ..core.errors import (
    ChainError,
    DeltawireError,
    FormatError,
    ManifestError,
    ObjectNotFound,
    ObjectTooLarge,
    ReferenceUnavailable,
    SchemaError,
)
from ..core.manifest import Blob, File, Link, Manifest, Pruned, Summary, dump, spans
from ..core.parallel import ordered_map
from .run import Run
from .versions import tags

_READERS = 16
"""Small records are read this many at a time: all they cost is the round trip."""

_ALL_MANIFESTS = 256 << 20
"""Bytes, as JSON and without what `Room` leaves out; some 400,000 versions. In memory they take three times as much."""

_BAD = (FormatError, SchemaError, ChainError, ObjectNotFound)
"""What is the run's own fault. A store that cannot be reached proves nothing, so its errors go to the caller."""

_RESTORE = "restore it from a copy of the bucket"
_RESTORE_BASE = "restore the versions it is built on from a copy of the bucket, or publish an anchor and prune it"


@dataclass(frozen=True, slots=True)
class Problem:
    """The first bad thing that was found."""

    version: int | None
    # the version it spoils; None for what belongs to the run as a whole
    object: str
    # the key, or the source of a reference
    error: str
    # class of the error, see core/errors.py
    what: str
    # is wrong with it
    advice: str
    # what to do now


class Found(Exception):
    """Ends a check; `problem` says why."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem


@contextmanager
def blame(version: int | None, key: str, advice: Callable[[], str]) -> Iterator[None]:
    """Whatever goes wrong inside is this object's fault. `advice` is asked for only then."""
    try:
        yield
    except ReferenceUnavailable:
        raise  # not here, but perhaps elsewhere: says nothing about the run
    except _BAD as error:
        raise Found(Problem(version, key, type(error).__name__, str(error), advice())) from error


class Room:
    """How much of all manifests of a run may be in memory at once, counted as JSON."""

    def __init__(self) -> None:
        self._left = _ALL_MANIFESTS

    def keep(self, manifest: Manifest) -> Manifest:
        """A manifest without what only people look at. ObjectTooLarge where there is no room for it."""
        lean = msgspec.structs.replace(manifest, recent=(), metrics={}, timings={})
        self._left -= len(dump(lean))
        if self._left < 0:
            raise ObjectTooLarge(
                f"the manifests up to version {manifest.version} take more than {_ALL_MANIFESTS:,} bytes, all that is "
                "read at once: remove versions that nobody needs"
            )
        return lean


class Records:
    """Read and compared by `check`, which raises Found at the first contradiction."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.warnings: list[str] = []
        # nothing that harms a reader
        self.pruned = Pruned(run.info.run, ())
        self.listed: list[int] = []
        self.manifests: dict[int, Manifest] = {}
        # of every version that is not pruned, ascending
        self.summaries: dict[int, Summary] = {}
        self._recent: dict[int, tuple[Summary, ...]] = {}

    def check(self) -> None:
        with blame(None, keys.PRUNED, lambda: _RESTORE):
            self.pruned = self.run.pruned()
        self.listed = self.run.listed()
        if not self.listed:
            self.warnings.append("the run has no version yet")
            return
        self._check_gaps()
        self._read_manifests()
        self._check_paths()
        self._check_history()
        self._check_head()
        self._check_leftovers()
        self._check_tags()

    def _check_gaps(self) -> None:
        newest = self.listed[-1]
        hidden = self.pruned.last
        if hidden >= newest:
            _fail(hidden, keys.PRUNED, f"it hides version {hidden}, but the newest version is {newest}", _RESTORE)
        # in ranges: the newest version may have any number
        first, last = self.pruned.also(self.listed).versions[0]
        missing = 0 if first else last + 1
        if missing < newest:
            advice = f"restore it from a copy of the bucket, or add version {missing} to {keys.PRUNED} if it is to go"
            _fail(missing, keys.manifest(missing), f"is missing, and {keys.PRUNED} does not name it", advice)

    def _read_manifests(self) -> None:
        def read(version: int) -> Manifest | DeltawireError:
            try:
                return self.run.manifest(version)
            except _BAD as error:
                return error

        room = Room()
        kept = [v for v in self.listed if v not in self.pruned]
        for version, found in zip(kept, ordered_map(read, kept, _READERS), strict=True):
            with blame(version, keys.manifest(version), lambda: _RESTORE):
                if isinstance(found, DeltawireError):
                    raise found
            self.manifests[version] = room.keep(found)
            self.summaries[version] = found.summary()
            # as a rule they are what the manifests before it said: then they take no memory of their own
            self._recent[version] = tuple(
                known if (known := self.summaries.get(told.version)) == told else told for told in found.recent
            )

    def _check_paths(self) -> None:
        stranded = sorted(self.manifests.keys() - chain.reachable(self.summaries))
        if stranded:
            with blame(stranded[0], keys.manifest(stranded[0]), lambda: _RESTORE_BASE):
                chain.plan(None, stranded[0], self.summaries)

    def _check_history(self) -> None:
        """What readers see of a version without reading its manifest must be what the manifest says."""
        tellers: Counter[int] = Counter()
        wrong: dict[int, list[tuple[str, Summary]]] = defaultdict(list)
        for key, summaries, covered in self._tellers():
            found = {s.version: s for s in summaries if s.version not in self.pruned}
            for version in sorted({v for v in covered if v in self.manifests} ^ found.keys()):
                what = "tells of a version that does not belong there:" if version in found else "leaves out version"
                _fail(version, key, f"it {what} {version}", _RESTORE)
            for version, summary in found.items():
                tellers[version] += 1
                if summary != self.summaries[version]:
                    wrong[version].append((key, summary))
        for version in sorted(wrong):
            self._contradict(version, wrong[version], tellers[version])

    def _tellers(self) -> Iterator[tuple[str, Iterable[Summary], range]]:
        """(key, what it tells, which versions it must tell of), for every record that tells of versions."""
        ends = sorted({end for version in self.manifests for end in history.pages(version)})
        for end, found in zip(ends, ordered_map(self._read_page, ends, _READERS), strict=True):
            with blame(None, keys.history(end), lambda: _RESTORE):
                if isinstance(found, DeltawireError):
                    raise found
            yield keys.history(end), found.versions, range(end - history.span(end), end)
        for version in self.manifests:
            yield keys.manifest(version), self._recent[version], range(history.recent_start(version), version)

    def _contradict(self, version: int, wrong: list[tuple[str, Summary]], tellers: int) -> NoReturn:
        """Where records contradict each other, several that agree are believed rather than one."""
        truth, key = self.summaries[version], keys.manifest(version)
        teller, other = wrong[0]
        what = next(name for name in truth.__struct_fields__ if getattr(truth, name) != getattr(other, name))
        if len(wrong) == tellers > 1:
            _fail(version, key, f"{tellers} records, such as {teller}, tell other {what} of it", _RESTORE)
        _fail(version, teller, f"it tells other {what} of version {version} than {key}", _RESTORE)

    def _read_page(self, end: int) -> history.Page | DeltawireError:
        try:
            return self.run.page(end)
        except _BAD as error:
            return error

    def _check_head(self) -> None:
        head, newest = self.run.head_hint(), self.listed[-1]
        if head is None:
            self.warnings.append(f"{keys.HEAD} is missing or unreadable: readers list the manifests instead")
        elif head < newest or not self.run.exists(head):
            self.warnings.append(f"{keys.HEAD} points to version {head}; the newest is {newest}")

    def _check_leftovers(self) -> None:
        half = [v for v in self.listed if v in self.pruned]
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

    def _check_tags(self) -> None:
        for name, tag in tags(self.run).items():
            if tag.version not in self.manifests:
                self.warnings.append(f"the tag {name} names version {tag.version}, which the run does not have")

    def stranded_without(self, version: int, link: Link) -> list[int]:
        """The versions that nobody could reach any more if this link were gone."""
        summary = self.summaries[version]
        rest = tuple(x for x in summary.links if (x.kind, x.base) != (link.kind, link.base))
        changed = {**self.summaries, version: msgspec.structs.replace(summary, links=rest)}
        return sorted(chain.reachable(self.summaries) - chain.reachable(changed))


def _fail(version: int | None, key: str, what: str, advice: str) -> NoReturn:
    raise Found(Problem(version, key, ManifestError.__name__, what, advice))


def blobs(manifest: Manifest) -> Iterator[Blob | File]:
    yield from manifest.files
    for link in manifest.links:
        yield from link.objects


def ranges(versions: Iterable[int]) -> str:
    """1–3, 7: ascending numbers for people."""
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in spans(versions))
