"""Links that were added later: found in few requests, used where they help, and harmless whatever they are."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import msgspec
import pytest

from deltawire.bucket.prune import Retention, prune
from deltawire.bucket.replay import checkout
from deltawire.bucket.run import Run
from deltawire.bucket.verify import verify
from deltawire.bucket.walk import Walker
from deltawire.core import keys
from deltawire.core.added import AddedIndex, AddedLink, AddedPage
from deltawire.core.errors import ObjectTooLarge, StoreUnavailable
from deltawire.core.manifest import Blob, Link, dump
from deltawire.keeper.announce import announce
from deltawire.keeper.keeper import KeeperOptions
from deltawire.replica import Replica
from deltawire.store import Store
from deltawire_wordle.counting import CountingStore
from keeping import Kept, copied, fresh, settings
from support import HookedStore, same

LAST = 69


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    settings(monkeypatch)


@cache
def kept_once() -> Kept:
    kept = fresh()
    kept.keep(KeeperOptions(since=0, anchor_every=32))
    return kept


@pytest.fixture
def kept() -> Kept:
    """A run of 70 versions that a keeper has gone through."""
    return Kept(copied(kept_once().store), kept_once().weights)


def synced(store: Store, kept: Kept, have: int | None, want: int = LAST) -> CountingStore:
    """Bring a replica from one version to another, and prove the weights by the trainer's."""
    counting = CountingStore(store)
    live = kept.blank() if have is None else {name: array.copy() for name, array in kept.weights[have].items()}
    with Replica(counting, heartbeat=0) as replica:
        assert replica.sync(live, want) == want
    assert same(live, kept.weights[want])
    return counting


def test_a_replica_far_behind_takes_few_objects(kept: Kept) -> None:
    run = kept.run
    assert [step.version for step in Walker(run).plan(1, LAST)] == [4, 16, 64, 68, 69]
    synced(kept.store, kept, 1)
    # a server that joins takes the newest anchor
    steps = Walker(kept.run).plan(None, LAST)
    assert (steps[0].version, steps[0].kind) == (64, "anchor")
    synced(kept.store, kept, None)


def test_a_replica_one_or_two_behind_does_not_ask_for_added_links(kept: Kept) -> None:
    for behind in (1, 2):
        counting = CountingStore(kept.store)
        run = Run.open(counting)
        run.manifest(LAST)
        counting.reset()
        assert len(Walker(run).plan(LAST - behind, LAST)) == behind
        assert counting.requests.total() == 0
    # a few behind: one request, for the index
    counting = CountingStore(kept.store)
    run = Run.open(counting)
    run.manifest(67)
    counting.reset()
    assert len(Walker(run).plan(64, 67)) == 1
    assert counting.requests.total() == 1


def test_planning_asks_for_few_objects(kept: Kept) -> None:
    for have in (None, 0, 33):
        counting = CountingStore(kept.store)
        run = Run.open(counting)
        counting.reset()
        Walker(run).plan(have, LAST)
        # the manifest, what was pruned, two pages of history; the index, once or twice, and its pages
        assert counting.requests.total() <= 9
        assert counting.requests["list"] == 0


def test_verify_proves_added_links(kept: Kept) -> None:
    plain, found = verify(fresh().run), verify(kept.run)
    added = kept.run.added.between(-1, LAST)
    assert found.ok
    assert not found.warnings
    assert found.proven == plain.proven + len(added)
    bad = added[5].link.objects[0].key
    kept.store.put(bad, kept.store.get(bad).data[:-1] + b"\0")
    failure = verify(kept.run).failure
    assert failure is not None
    assert failure.object == bad


# ── hostile and damaged ──────────────────────────────────────────────────────────────────────────────────────────────


def forged(opened: Run, *links: AddedLink, **other: object) -> bytes:
    index = AddedIndex(opened.info.run, "k", 1.0, LAST, (), links)
    return dump(msgspec.structs.replace(index, **other))


def link_to(version: int, base: int | None, size: int = 100, key: str = "") -> AddedLink:
    named = keys.anchor(version, "0123abcd") if base is None else keys.delta(base, version, "0123abcd")
    return AddedLink(version, Link("anchor" if base is None else "delta", base, (Blob(key or named, size, "0" * 32),)))


def swapped(run: Run) -> bytes:
    """Links that name the objects of others: a delta of other versions under a tempting size."""
    real = {blob.key: blob for v in (5, 69) for blob in run.manifest(v).links[0].objects}
    five, last = real.values()
    return forged(
        run,
        AddedLink(LAST, Link("delta", 0, (msgspec.structs.replace(five, key=last.key),), "packed")),
        AddedLink(LAST, Link("delta", 1, (last,), "packed")),
        AddedLink(LAST, Link("anchor", None, (last,))),
    )


HOSTILE: dict[str, Callable[[Run], bytes | None]] = {
    "gone": lambda run: None,
    "empty": lambda run: b"",
    "no JSON": lambda run: b"\xff\x00",
    "huge": lambda run: b" " * (1 << 20),
    "of another run": lambda run: forged(run, run="f" * 16),
    "pages elsewhere": lambda run: forged(run, pages=("run.json",)),
    "pages that are not there": lambda run: forged(run, pages=(keys.added_page(0, 99, "0123abcd"),) * 3),
    "objects that are not there": lambda run: forged(run, *(link_to(LAST, base) for base in (None, *range(60)))),
    "all from everywhere": lambda run: forged(run, *(link_to(v, b, 8) for v in range(9, 70) for b in (0, v // 2))),
    "objects of others": swapped,
    "done at the end of numbers": lambda run: forged(run, done=keys.MAX_VERSION),
    "an anchor that is not there": lambda run: forged(run, anchor=link_to(LAST, None, 8)),
    "an anchor of no version": lambda run: forged(run, anchor=link_to(10**17, None, 8)),
}


@pytest.mark.parametrize("index", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_index_costs_requests_and_nothing_else(kept: Kept, index: Callable[[Run], bytes | None]) -> None:
    made = index(kept.run)
    if made is None:
        kept.store.delete(keys.ADDED)
    else:
        kept.store.put(keys.ADDED, made)
    for have in (None, 0, 40, LAST - 3):
        synced(kept.store, kept, have)
    checkout(kept.run, LAST)


@pytest.mark.parametrize("content", [None, b"", b"{}", b"\xff", b" " * (5 << 20)])
def test_a_damaged_page_costs_its_links_alone(kept: Kept, content: bytes | None) -> None:
    index = kept.run.added.index()
    assert index is not None
    for page in index.pages:
        if content is None:
            kept.store.delete(page)
        else:
            kept.store.put(page, content)
    for have in (None, 0, 40):
        synced(kept.store, kept, have)
    found = verify(kept.run)
    assert found.ok
    assert any("readers go without" in warning for warning in found.warnings)


def test_a_page_that_cannot_be_reached_is_not_taken_for_damaged(kept: Kept) -> None:
    """Prune would take the objects that its links name for garbage, and readers would never ask for it again."""

    def hook(moment: str, verb: str, key: str) -> None:
        if key.startswith(keys.ADDED_PAGES) and verb == "get":
            raise StoreUnavailable("away")

    before = [item.key for item in kept.store.list()]
    for read in (
        lambda run: run.added.between(-1, LAST),
        lambda run: run.added.listed(),
        lambda run: prune(run, Retention(last=4, grace=0)),
    ):
        with pytest.raises(StoreUnavailable):
            read(Run.open(HookedStore(kept.store, hook)))
    assert [item.key for item in kept.store.list()] == before


def test_pages_of_any_size_take_limited_memory_and_time(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    run = kept.run
    pages = [keys.added_page(0, 99, f"{n:08x}") for n in range(100)]
    for page in pages:
        kept.store.put(page, dump(AddedPage(run.info.run, ())) + b" " * 100_000)
    kept.store.put(keys.ADDED, forged(run, pages=tuple(pages)))
    monkeypatch.setattr("deltawire.bucket.added.PAGES", 1_000_000)
    counting = CountingStore(kept.store)
    assert Run.open(counting).added.between(-1, LAST) == []
    assert counting.bytes_in < 2_000_000
    # where all of them would have to be read, none is, and nothing is taken for garbage
    monkeypatch.setattr("deltawire.bucket.added.ALL_PAGES", 1_000_000)
    assert kept.run.added.listed() == []
    with pytest.raises(ObjectTooLarge):
        prune(kept.run, Retention(last=4, grace=0))
    for have in (None, 0, 40):
        synced(kept.store, kept, have)


def test_damaged_objects_are_gone_around(kept: Kept) -> None:
    for added in kept.run.added.between(-1, LAST):
        kept.store.put(added.link.objects[0].key, b"not this")
    for have in (None, 0, 40):
        synced(kept.store, kept, have)


def test_an_anchor_is_found_without_the_index_where_nothing_else_leads_on(kept: Kept) -> None:
    run = kept.run
    first = run.manifest(0).links[0].objects[0].key
    kept.store.delete(first)
    kept.store.delete(keys.ADDED)
    synced(kept.store, kept, None)
    # and the next keeper makes an index of the pages again
    before = len(kept_once().run.added.between(-1, LAST))
    announce(kept.run, "other", (), LAST)
    assert len(kept.run.added.between(-1, LAST)) >= before - 64
    assert kept.run.added.index().anchor.version == 64  # type: ignore[union-attr]


# ── pages, prune ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_there_are_few_pages(kept: Kept) -> None:
    run = kept.run
    for version in range(100, 1500):
        announce(run, "k", [link_to(version, version - 2), link_to(version, version - 3)], version)
    index = run.added.index()
    assert index is not None
    assert len(index.pages) <= 10
    assert {x.version for x in run.added.between(99, 1500)} == set(range(100, 1500))
    page = run.added.page(index.pages[0])
    assert isinstance(page, AddedPage)
    # only the pages of an interval are read
    counting = CountingStore(kept.store)
    run = Run.open(counting)
    counting.reset()
    assert {x.version for x in run.added.between(1400, 1500)} == set(range(1401, 1500))
    assert counting.requests.total() <= 5


def test_prune_keeps_what_an_added_link_leads_to_and_takes_what_leads_from_nowhere(kept: Kept) -> None:
    plan = prune(kept.run, Retention(last=4, grace=0))
    # the anchor of 64 is the keeper's, and so is the delta from there: the way to 66 … 69
    assert plan.newest == LAST
    run = kept.run
    assert run.listed()[0] == 64
    assert verify(run).ok
    for have in (None, 66):
        synced(kept.store, kept, have)
    left = {item.key for item in kept.store.list(keys.DELTAS)}
    named = {x.link.objects[0].key for x in run.added.between(-1, LAST) if (x.link.base or 64) >= 64 <= x.version}
    own = {blob.key for v in run.listed() for link in run.manifest(v).links for blob in link.objects}
    assert {key for key in left if key not in own} <= named


@pytest.mark.parametrize("lost", ["deleted", "damaged", "stale"])
def test_prune_leaves_links_that_the_index_has_lost(kept: Kept, lost: str) -> None:
    rule = Retention(last=4, grace=0)
    prune(kept.run, rule)
    # by now the keeper's anchor is the only full weights
    if lost == "deleted":
        kept.store.delete(keys.ADDED)
    else:
        # stale: a keeper that was suspended while it replaced the index goes on
        stale = dump(AddedIndex(kept.run.info.run, "suspended", 0.0, 3))
        kept.store.put(keys.ADDED, stale if lost == "stale" else b"damaged")
    for _ in range(2):
        prune(kept.run, rule)
    synced(kept.store, kept, None)
    found = verify(kept.run)
    assert found.ok
    assert any("readers list the pages" in warning for warning in found.warnings)
    # what is said again in a page of the index goes
    before = [item.key for item in kept.store.list(keys.ADDED_PAGES)]
    kept.store.put(keys.ADDED, dump(AddedIndex(kept.run.info.run, "next", 0.0, LAST, tuple(before))))
    kept.store.put(keys.added_page(2, 64, "0123abcd"), kept.store.get(before[0]).data)
    prune(kept.run, rule)
    assert [item.key for item in kept.store.list(keys.ADDED_PAGES)] == before


def test_prune_relies_on_no_link_that_only_the_index_names(kept: Kept) -> None:
    index = kept.run.added.index()
    assert index is not None
    assert any(x.way == (68, "delta", 64) for x in index.recent)
    prune(kept.run, Retention(last=1, grace=0))
    kept.store.delete(keys.ADDED)
    synced(kept.store, kept, None)


def test_prune_relies_on_no_added_link_without_its_object(kept: Kept) -> None:
    for item in [*kept.store.list(keys.ANCHORS)]:
        if keys.data_version(item.key) == 64:
            kept.store.delete(item.key)
    prune(kept.run, Retention(last=4, grace=0))
    assert kept.run.listed()[0] == 32
    synced(kept.store, kept, None)
