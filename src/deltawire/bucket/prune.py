"""What of a run can go, and the order in which it goes.

Pruning is publishing backwards: first `pruned.json` says which versions are no more, then their manifests go, and only
then the data. So no manifest ever names an object that is gone, and a crash at any point leaves a whole run and some
garbage, which the next prune takes.

A version that stays keeps its manifest and all that lies on its cheapest path from nothing, as `checkout` takes it.
Versions stay or go whole: a manifest cannot be rewritten, and one that names a missing object would be a broken one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..core import chain, keys
from ..core.errors import ObjectNotFound, VersionNotFound
from ..core.manifest import Head, Manifest, Pruned, dump, now
from ..core.parallel import ordered_map
from ..store import ObjectInfo
from .records import blobs
from .run import Run

_REQUESTS = 16
"""Small requests at a time: all they cost is the round trip."""


@dataclass(frozen=True, slots=True)
class Retention:
    """Which versions stay. The newest always does."""

    last: int = 20
    # so many of the newest versions
    every: int | None = None
    # and every version whose number divides by this
    versions: frozenset[int] = frozenset()
    # and these
    grace: float = 3600.0
    # seconds; nothing younger goes, so that readers get to the end of what they have begun
    heartbeats: float = 86400.0
    # seconds; a replica that has been silent for longer is forgotten


@dataclass(frozen=True, slots=True)
class PrunePlan:
    newest: int
    kept: dict[int, str]
    # version → why it stays
    dropped: tuple[int, ...]
    # the versions that go now
    pruned: tuple[int, ...]
    # what pruned.json will say: these and those that went before
    manifests: tuple[ObjectInfo, ...]
    data: tuple[ObjectInfo, ...]
    # anchors and deltas, of versions that go and of publishes that never came to a commit
    files: tuple[ObjectInfo, ...]
    # companion files that no version names any more
    heartbeats: tuple[ObjectInfo, ...]

    @property
    def objects(self) -> tuple[ObjectInfo, ...]:
        """Everything to delete, in this order."""
        return (*self.manifests, *self.data, *self.files, *self.heartbeats)

    @property
    def bytes(self) -> int:
        return sum(item.size for item in self.objects)


def plan_prune(
    manifests: Mapping[int, Manifest],
    listing: Sequence[ObjectInfo],
    rule: Retention,
    now: float,
    pruned: Iterable[int] = (),
) -> PrunePlan:
    """Pure: from the manifests of every version not yet pruned, and everything that lies in the bucket."""
    if not manifests:
        raise VersionNotFound("the run has no version yet: there is nothing to prune")
    newest = max(manifests)
    before = now - rule.grace
    written = {item.key: item.modified for item in listing}
    young = {v for v, m in manifests.items() if max(m.created, written.get(keys.manifest(v), 0.0)) > before}
    kept = _kept(manifests, rule, young)
    dropped = tuple(sorted(manifests.keys() - kept.keys()))
    gone = {*pruned, *dropped}
    named = {blob.key for version in kept for blob in blobs(manifests[version])}

    def old(prefix: str) -> Iterable[ObjectInfo]:
        return (x for x in listing if x.key.startswith(prefix) and x.key not in named and x.modified <= before)

    return PrunePlan(
        newest,
        kept,
        dropped,
        tuple(sorted(gone)),
        tuple(item for item in listing if keys.version_of(item.key) in gone),
        tuple(item for prefix in (keys.ANCHORS, keys.DELTAS) for item in old(prefix) if _is_settled(item.key, newest)),
        tuple(item for item in old(keys.FILES) if keys.is_file(item.key)),
        tuple(x for x in listing if x.key.startswith(keys.REPLICAS) and x.modified <= now - rule.heartbeats),
    )


def _kept(manifests: Mapping[int, Manifest], rule: Retention, young: set[int]) -> dict[int, str]:
    versions = sorted(manifests)
    missing = sorted(rule.versions - manifests.keys())
    if missing:
        raise VersionNotFound(f"cannot keep version {missing[0]}: the run does not have it, or it was pruned")
    reasons: list[tuple[str, Iterable[int]]] = [
        ("the newest", versions[-1:]),
        ("asked for", rule.versions),
        (f"one of every {rule.every}", (v for v in versions if rule.every and v % rule.every == 0)),
        (f"one of the last {rule.last}", versions[len(versions) - min(rule.last, len(versions)) :]),
        ("younger than the grace period", young),
    ]
    kept: dict[int, str] = {}
    for reason, chosen in reasons:
        for version in chosen:
            kept.setdefault(version, reason)
    for version in chain.needed(list(kept), {v: m.summary() for v, m in manifests.items()}):
        kept.setdefault(version, "on the way to one that stays")
    return dict(sorted(kept.items()))


def _is_settled(data_key: str, newest: int) -> bool:
    """Whether no manifest can come to name this object any more.

    The version after the newest may be on its way for hours, its delta already there while its anchor is being
    uploaded. Up to the newest, every manifest that will ever be is there.
    """
    version = keys.data_version(data_key)
    return version is not None and version <= newest


# ── doing it ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def survey(run: Run, rule: Retention, at: float | None = None) -> PrunePlan:
    """Look at a run and plan. By the manifests themselves, not by history: what is deleted does not come back."""
    listing = list(run.store.list())
    pruned = set(run.pruned())
    found = (keys.version_of(item.key) for item in listing)
    versions = sorted({v for v in found if v is not None} - pruned)
    manifests = dict(zip(versions, ordered_map(run.manifest, versions, _REQUESTS), strict=True))
    return plan_prune(manifests, listing, rule, now() if at is None else at, pruned)


def apply_prune(run: Run, plan: PrunePlan, progress: Callable[[ObjectInfo], None] | None = None) -> None:
    """Carry a plan out. One prune of a run at a time; publishers and replicas may go on."""
    head = run.head_hint()
    if head is None or head < plan.newest:
        # readers look one manifest past head; the one they would find there may be about to go
        run.store.put(keys.HEAD, dump(Head(run.info.run, plan.newest)))
    pruned = set(run.pruned())
    if not pruned.issuperset(plan.pruned):
        run.store.put(keys.PRUNED, dump(Pruned(run.info.run, tuple(sorted(pruned.union(plan.pruned))))))

    def delete(item: ObjectInfo) -> ObjectInfo:
        if not item.key.startswith((keys.FILES, keys.REPLICAS)) or _is_unchanged(run, item):
            run.store.delete(item.key)
        return item

    for group in (plan.manifests, (*plan.data, *plan.files, *plan.heartbeats)):
        for item in ordered_map(delete, group, _REQUESTS):
            if progress:
                progress(item)


def _is_unchanged(run: Run, item: ObjectInfo) -> bool:
    """A companion file may be published once more, and a silent replica come back, since we looked."""
    try:
        return run.store.head(item.key).modified < item.modified + 1.0  # some stores list finer times than they head
    except ObjectNotFound:
        return False
