"""Delete old versions of a run without breaking its readers.

Pruning is publishing backwards, in two runs. The first marks: `pruned.json` names the versions that no reader starts to
read any more. A later one, after the grace period, deletes what is marked: manifests first, then data. So no manifest
ever names an object that is gone, and a crash at any point leaves a whole run and some garbage, which the next prune
deletes. A mark restarts the period for all of them, so there is one batch at a time.

A replica that is about to read more than the newest delta first says so in its heartbeat (`reading`) and then reads the
marks. Prune marks and then reads the heartbeats; whichever of the two comes second sees the other, without any clock.
Versions that a fresh heartbeat names stay. A replica without heartbeats has the grace period to finish; one that is
suspended for longer finds objects missing and plans again, as with any other damage.

A version with a tag stays. A version that stays keeps its manifest and all that lies on its cheapest path from nothing,
as `checkout` takes it, by links that were added later too. A link counts as a way only if its objects are there, in
their size, and no keeper found one of them damaged. Where only marked versions lead to one that stays, their marks are
taken back, so that readers find them. Versions stay or go whole: a manifest cannot be rewritten, and one
that names a missing object would be a broken one.

Time is the store's: `modified` of what lies there, against that of an object written for the purpose. No clock of a
writer, of a replica or of the machine that prunes is compared with another.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import msgspec

from ..core import chain, history, keys
from ..core.added import AddedIndex, AddedLink, in_manifest
from ..core.errors import ManifestError, MissingBase, ObjectNotFound, VersionNotFound
from ..core.manifest import Blob, Head, Heartbeat, Link, Manifest, Pruned, dump, now
from ..core.parallel import REQUESTS, for_each, ordered_map
from ..store import ObjectInfo
from ..store.base import Sweeping
from .run import Run, blobs, lean
from .versions import tags

_READERS = 50_000
"""Replicas that may say what they read. All of them are asked, since what one reads must stay; so more are refused."""

_HALFWAY_S = 1.0
"""Seconds until a run is listed again in which a version has no way: a prune that is deleting it gets on meanwhile."""


@dataclass(frozen=True, slots=True)
class Retention:
    """Which versions stay. The newest always does.

    dw.Retention(last=100, every=500, versions=frozenset([120]))
    """

    last: int = 20
    """Number of newest versions that stay."""
    every: int | None = None
    """Versions whose number divides by this stay too."""
    versions: frozenset[int] = frozenset()
    """Further versions that stay."""
    grace: float = 3600.0
    """Seconds. Nothing younger is marked, and nothing marked later is deleted, so that readers can finish."""
    lease: float = 900.0
    """Seconds that a version stays after a replica last said that it reads it."""
    heartbeats: float = 86400.0
    """Seconds after which the heartbeat of a silent replica is deleted."""
    unfinished: float = 86400.0
    """Seconds after which an unfinished file in a folder is taken for that of a dead writer."""


@dataclass(frozen=True, slots=True)
class PrunePlan:
    """What a prune marks and deletes.

    dw.prune(run, dw.Retention(), apply=False).kept      # version → why it stays
    """

    newest: int
    kept: dict[int, str]
    """Versions that stay, with the reason."""
    marked: tuple[int, ...]
    """Versions that no reader starts to read from now on; they are deleted when the grace period is over."""
    later: int
    """Bytes of the marked versions."""
    waiting: tuple[int, ...]
    """Marked before and not deleted yet: the period is not over, or a replica reads them."""
    restored: tuple[int, ...]
    """Marked before and no longer: one that stays has no other way that is whole."""
    going: tuple[int, ...]
    """Marked before and deleted now."""
    manifests: tuple[ObjectInfo, ...]
    data: tuple[ObjectInfo, ...]
    """Anchors and deltas, of deleted versions and of publishes that were never committed; pages of added links that
    were merged into later ones; pages of history with deleted versions only."""
    files: tuple[ObjectInfo, ...]
    """Companion files that no version names any more."""
    heartbeats: tuple[ObjectInfo, ...]
    at: float
    """When the plan was made, by the store's clock."""

    @property
    def objects(self) -> tuple[ObjectInfo, ...]:
        """Everything to delete, in this order."""
        return (*self.manifests, *self.data, *self.files, *self.heartbeats)

    @property
    def bytes(self) -> int:
        """Bytes of everything to delete now."""
        return sum(item.size for item in self.objects)


def plan_prune(
    manifests: Mapping[int, Manifest],
    listing: Sequence[ObjectInfo],
    rule: Retention,
    now: float,
    pruned: Container[int] = (),
    reading: Collection[int] = (),
    tagged: Mapping[int, str] = MappingProxyType({}),
    pages: Mapping[str, Collection[AddedLink]] = MappingProxyType({}),
    index: AddedIndex | None = None,
    damaged: Mapping[str, str | None] = MappingProxyType({}),
) -> PrunePlan:
    """Plan from what is in the bucket. Pure.

    `manifests` are all that are still there, `listing` all objects, `reading` the versions that replicas read, `tagged`
    the tags by version, `pages` and `index` the links that were added later, `damaged` the damaged objects, each with
    its etag.

    Versions stay or go by links in pages alone: these are written once, and found without the index too. What is only
    in the index is lost with it, or when two keepers replace it at the same moment.
    """
    listed = {item.key: item for item in listing}

    def is_there(blob: Blob) -> bool:
        return blob.key in listed and listed[blob.key].size == blob.size

    def is_usable(link: Link) -> bool:
        # an object that was repaired has another etag
        return all(
            is_there(x) and not (x.key in damaged and damaged[x.key] == listed[x.key].etag) for x in link.objects
        )

    stated = [*(x for links in pages.values() for x in links), *(index.recent if index else ())]
    # an object may be gone: with no grace period it was perhaps deleted before its keeper announced it
    lost = {x.way for x in stated if not all(map(is_there, x.link.objects))}
    indexed = set(index.pages if index else ()) & pages.keys()
    known = {x.way for page in indexed for x in pages[page]} | lost

    def only_here(link: AddedLink) -> bool:
        """Whether a page that the index does not name has a link that those do not have."""
        base = link.version if link.link.base is None else link.link.base
        return link.version in manifests and base in manifests and link.way not in known

    stay = indexed | {page for page, links in pages.items() if any(map(only_here, links))}
    later: dict[int, list[Link]] = defaultdict(list)
    for link in (x for page in stay for x in pages[page] if x.way not in lost):
        later[link.version].append(link.link)
    present = {v: in_manifest(m, later[v]) for v, m in manifests.items()}
    live = {v: m for v, m in present.items() if v not in pruned}
    for link in index.recent if index else ():
        later[link.version].append(link.link)
    if not live:
        raise VersionNotFound("the run has no version yet: there is nothing to prune")
    newest = max(live)
    # with no grace period nothing is too young, whatever two stamps within a clock's tick say of each other
    before = now - rule.grace if rule.grace else math.inf
    ripe = keys.PRUNED not in listed or listed[keys.PRUNED].modified <= before
    young = {v for v in live if (item := listed.get(keys.manifest(v))) is not None and item.modified > before}
    kept = _kept(live, rule, young, reading, tagged)
    usable = {
        v: msgspec.structs.replace(m, links=tuple(filter(is_usable, m.links))).summary() for v, m in present.items()
    }
    ways = {v: usable[v] for v in live}
    reached = chain.reachable(ways)
    cut_off = kept.keys() - reached
    on_the_way = chain.needed(kept.keys() & reached, ways)
    if cut_off:
        # by their manifests alone: what is damaged may be repaired
        on_the_way |= chain.needed(cut_off, {v: m.summary() for v, m in live.items()})
    # readers do not take a marked version, but it may be all that is left
    last_way = chain.needed(cut_off & chain.reachable(usable), usable)
    on_the_way |= last_way
    kept = dict(sorted({**dict.fromkeys(on_the_way, "on the way to one that stays"), **kept}.items()))
    restored = {v for v in last_way if v in pruned}

    def waits(version: int | None) -> bool:
        return version in pruned and version not in restored and (not ripe or version in reading)

    going = {v for v in manifests if v in pruned and v not in restored and not waits(v)}

    def objects(versions: Collection[int], gone: Collection[int]) -> set[str]:
        """Objects that these versions name. A link that was added later is useless without its base."""
        more = (x for v in versions for x in later[v] if x.base is None or (x.base in manifests and x.base not in gone))
        return {
            *(blob.key for v in versions for blob in blobs(manifests[v])),
            *(blob.key for link in more for blob in link.objects),
        }

    named = objects([v for v in manifests if v not in going], going) | stay

    def old(prefix: str) -> Iterable[ObjectInfo]:
        return (x for x in listing if x.key.startswith(prefix) and x.key not in named and x.modified <= before)

    def settled(key: str) -> bool:
        """Whether no manifest can come to name this object any more.

        The version after the newest may be on its way for hours, its delta already there while its anchor is being
        uploaded. Up to the newest, every manifest that will ever be is there.
        """
        version = keys.data_version(key)
        return version is not None and version <= newest and not waits(version)

    staying = sorted(manifests.keys() - going)

    def forgotten(key: str) -> bool:
        """Whether this is a page of history of versions that are all gone. That of a lost manifest stays."""
        if (end := keys.history_end(key)) is None or end > newest:
            return False
        first = end - history.span(end)
        if bisect_left(staying, first) < bisect_left(staying, end):
            return False
        return all(version in pruned for version in range(first, end))

    # a mark restarts the period for those that wait, so there is none before they are gone
    marked = live.keys() - kept.keys() if ripe else set()
    leaves = {keys.manifest(v) for v in marked} | objects(live, ()) - objects(live.keys() - marked, marked)
    return PrunePlan(
        newest,
        kept,
        tuple(sorted(marked)),
        sum(item.size for item in listing if item.key in leaves),
        tuple(sorted(v for v in manifests if waits(v))),
        tuple(sorted(restored)),
        tuple(sorted(going)),
        tuple(item for item in listing if keys.version_of(item.key) in going),
        (
            *(item for prefix in (keys.ANCHORS, keys.DELTAS) for item in old(prefix) if settled(item.key)),
            *(item for item in old(keys.ADDED_PAGES) if keys.added_range(item.key) is not None),
            *(item for item in old(keys.HISTORY) if forgotten(item.key)),
        ),
        tuple(item for item in old(keys.FILES) if keys.is_file(item.key)),
        tuple(x for x in listing if x.key.startswith(keys.REPLICAS) and x.modified <= now - rule.heartbeats),
        now,
    )


def _kept(
    manifests: Mapping[int, Manifest],
    rule: Retention,
    young: set[int],
    reading: Collection[int],
    tagged: Mapping[int, str],
) -> dict[int, str]:
    """The versions that stay for a reason of their own."""
    versions = sorted(manifests)
    missing = sorted(rule.versions - manifests.keys())
    if missing:
        raise VersionNotFound(f"cannot keep version {missing[0]}: the run does not have it, or it was pruned")
    reasons: list[tuple[str, Iterable[int]]] = [
        ("the newest", versions[-1:]),
        ("asked for", rule.versions),
        *((f"tagged {name}", (v,)) for v, name in tagged.items() if v in manifests),
        (f"one of every {rule.every}", (v for v in versions if rule.every and v % rule.every == 0)),
        (f"one of the last {rule.last}", versions[len(versions) - min(rule.last, len(versions)) :]),
        ("younger than the grace period", young),
        ("a replica reads it now", (v for v in versions if v in reading)),
    ]
    kept: dict[int, str] = {}
    for reason, chosen in reasons:
        for version in chosen:
            kept.setdefault(version, reason)
    return kept


# ── doing it ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def survey(run: Run, rule: Retention, at: float | None = None) -> PrunePlan:
    """Look at a run and plan, without a change to it; by this machine's clock unless told the time."""
    listing = list(run.store.list())
    at, known = now() if at is None else at, dict[int, Manifest]()
    plan = _plan(run, rule, listing, at, known)
    # without a grace period, what is marked goes in the same visit
    return plan if rule.grace or not plan.marked else _plan(run, rule, listing, at, known, plan.marked)


def prune(
    run: Run,
    rule: Retention,
    damaged: Mapping[str, str | None] = MappingProxyType({}),
    *,
    apply: bool = True,
) -> PrunePlan:
    """Mark what can go and delete what was marked long enough ago. Several at once do no harm.

        plan = dw.prune(run, dw.Retention(last=100, every=500), apply=False)
        print(plan.marked, plan.going, plan.bytes)

    apply     without it nothing is changed: only the plan is made
    damaged   objects that are no way to a version, with their etags, besides those that a keeper has announced

    Raises RunNotFound or RunReplaced if the run was deleted since it was opened: its manifests may still be in memory.
    """
    if not apply:
        return survey(run, rule)
    run.check_present()
    known: dict[int, Manifest] = {}
    if not rule.grace:
        # only replicas that read are waited for, and their heartbeats are read after the mark
        _mark(run, _survey_by_its_clock(run, rule, damaged, known).marked)
    plan = _survey_by_its_clock(run, rule, damaged, known)
    apply_prune(run, plan)
    if isinstance(run.store, Sweeping):
        run.store.sweep(rule.unfinished, at=plan.at)
    return plan


def _survey_by_its_clock(
    run: Run, rule: Retention, damaged: Mapping[str, str | None], known: dict[int, Manifest]
) -> PrunePlan:
    seen: set[int | None] = set()
    while True:
        run.store.put(keys.CLOCK, b"{}")
        # by listing, like everything it is compared with: some stores list finer times than they head
        listing = list(run.store.list())
        run.store.delete(keys.CLOCK)
        at = next((item.modified for item in listing if item.key == keys.CLOCK), None)
        if at is None:  # another prune took it away
            continue
        try:
            return _plan(run, rule, listing, at, known, damaged=damaged)
        except MissingBase:
            # another prune may have deleted half of what it deletes
            before, seen = seen, {keys.version_of(item.key) for item in listing}
            if seen == before:
                raise
            time.sleep(_HALFWAY_S)


def _plan(
    run: Run,
    rule: Retention,
    listing: list[ObjectInfo],
    at: float,
    known: dict[int, Manifest],
    marked: Collection[int] = (),
    damaged: Mapping[str, str | None] = MappingProxyType({}),
) -> PrunePlan:
    """Plan by the manifests themselves, not by history: what is deleted does not come back.

    Versions in `marked` count as marked already. `known` are manifests that were read for the same prune; those that
    are read now are added to them.
    """
    pruned = run.pruned().also(marked)

    listed = sorted({v for item in listing if (v := keys.version_of(item.key)) is not None})
    for version, found in run.manifests([v for v in listed if v not in known]):
        if isinstance(found, Manifest):
            known[version] = lean(found)
        elif not isinstance(found, VersionNotFound) or (version not in pruned and version not in run.pruned()):
            raise found  # else another prune was here
    manifests = {v: known[v] for v in listed if v in known}
    tagged: dict[int, str] = {}
    for name, tag in tags(run, strict=True).items():
        tagged[tag.version] = f"{tagged[tag.version]}, {name}" if tag.version in tagged else name
    reading = _reading(run, listing, at - rule.lease, manifests)
    # all pages, also those that a lost index does not name
    pages = run.added.pages(item for item in listing if item.key.startswith(keys.ADDED_PAGES))
    index = run.added.index()
    damaged = {**(index.damaged if index else {}), **damaged}
    return plan_prune(manifests, listing, rule, at, pruned, reading, tagged, pages, index, damaged)


def _reading(run: Run, listing: Iterable[ObjectInfo], since: float, versions: Collection[int]) -> set[int]:
    """The versions that replicas fetch, by heartbeats not older than `since`."""
    fresh = [item for item in listing if item.key.startswith(keys.REPLICAS) and item.modified > since]
    if len(fresh) > _READERS:
        raise ManifestError(
            f"{len(fresh):,} heartbeats in {run.store.url} are fresh, and at most {_READERS:,} are read: delete those "
            f"of replicas that do not exist ({fresh[0].key}, …)"
        )
    reading: set[int] = set()
    for beat in ordered_map(lambda item: run.hint(item.key, Heartbeat), fresh, REQUESTS):
        if beat is not None and beat.reading:
            announced = Pruned(run.info.run, beat.reading)
            reading |= {v for v in versions if v in announced}
    return reading


def apply_prune(run: Run, plan: PrunePlan) -> None:
    """Carry a plan out. Publishers, replicas and other prunes may go on."""
    head = run.head_hint()
    if head is None or head < plan.newest:
        # readers look one manifest past head; the one they would find there may be about to go
        run.store.put(keys.HEAD, dump(Head(run.info.run, plan.newest)))

    def delete(item: ObjectInfo) -> None:
        if not item.key.startswith((keys.FILES, keys.REPLICAS)) or _is_unchanged(run, item):
            run.store.delete(item.key)

    for group in (plan.manifests, (*plan.data, *plan.files, *plan.heartbeats)):
        for_each(delete, group, REQUESTS)
    # those that went are named again in case another prune, writing at the same moment, has lost them
    _mark(run, plan.marked, gone=plan.going, restored=plan.restored)


def _mark(run: Run, versions: Iterable[int], gone: Iterable[int] = (), restored: Iterable[int] = ()) -> None:
    """Marks of versions in `restored` are taken back, if they still have a manifest: another prune may delete it.

    A tag that was set since the survey, or is set just now, takes the mark back: `set_tag` looks at the marks after
    it has set the tag, so one of the two sees the other."""
    pruned = run.pruned()
    lost, new = ([v for v in group if v not in pruned] for group in (gone, versions))
    back = [v for v in restored if v in pruned and run.etag(keys.manifest(v)) is not None]
    if lost or new or back:
        pruned = pruned.without(back)
        run.store.put(keys.PRUNED, dump(pruned.also([*lost, *new])))
        if new and any(tag.version in new for tag in tags(run, strict=True).values()):
            run.store.put(keys.PRUNED, dump(pruned.also(lost)))


def _is_unchanged(run: Run, item: ObjectInfo) -> bool:
    """A companion file may be published once more, and a silent replica come back, since we looked."""
    try:
        return run.store.head(item.key).modified < item.modified + 1.0  # some stores list finer times than they head
    except ObjectNotFound:
        return False
