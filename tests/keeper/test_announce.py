"""Announcing links: nothing that another keeper announced is undone, and what was pruned is left out."""

from __future__ import annotations

import pytest

from deltawire.core import keys
from deltawire.core.added import MAX_PAGES, AddedLink, AddedPage
from deltawire.core.manifest import Blob, Link, dump
from deltawire.keeper.announce import announce, tidy
from keeping import Kept, fresh, settings


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    settings(monkeypatch)


@pytest.fixture
def kept() -> Kept:
    return fresh(8)


def link(version: int, base: int | None) -> AddedLink:
    key = keys.anchor(version, "0123abcd") if base is None else keys.delta(base, version, "0123abcd")
    return AddedLink(version, Link("anchor" if base is None else "delta", base, (Blob(key, 100, "0" * 32),)))


def test_two_keepers_announce_in_turn(kept: Kept) -> None:
    one, other = kept.run, kept.run
    announce(one, "one", [link(4, 2)], 4)
    announce(other, "other", [link(5, 3)], 5)
    index = announce(one, "one", [link(6, 4)], 4)
    assert [x.version for x in index.recent] == [4, 5, 6]
    assert index.done == 5
    assert {x.version for x in kept.run.added.between(-1, 9)} == {4, 5, 6}


def test_an_anchor_is_in_a_page_at_once(kept: Kept) -> None:
    announce(kept.run, "one", [link(4, 2)], 4)
    index = announce(kept.run, "one", [link(5, None)], 5)
    assert not index.recent
    assert len(index.pages) == 1
    assert index.anchor == link(5, None)
    assert {x.version for x in kept.run.added.listed()} == {4, 5}
    assert announce(kept.run, "one", [link(4, None)], 5).anchor == link(5, None)


def test_links_of_pruned_versions_leave_the_index(kept: Kept) -> None:
    announce(kept.run, "one", [link(v, v - 2) for v in range(2, 8)], 7)
    tidy(kept.run, "one")
    assert len(kept.run.added.between(-1, 9)) == 6
    kept.store.put(keys.PRUNED, dump(kept.run.pruned().also(range(5))))
    tidy(kept.run, "one")
    # from 5, which is there
    assert [x.way for x in kept.run.added.between(-1, 9)] == [(7, "delta", 5)]


def test_a_lost_index_is_made_again_from_the_pages(kept: Kept) -> None:
    announce(kept.run, "one", [link(4, 2), link(5, None)], 5)
    kept.store.put(keys.ADDED, b"lost")
    index = announce(kept.run, "one", [link(6, 4)], 6)
    assert {x.version for x in kept.run.added.between(-1, 9)} == {4, 5, 6}
    assert index.anchor == link(5, None)


def test_an_index_that_is_made_again_names_no_more_pages_than_it_may(kept: Kept) -> None:
    run = kept.run
    for number in range(MAX_PAGES + 1):
        # pages that were merged into later ones stay until they are pruned
        page = AddedPage(run.info.run, (link(4 + number % 4, 2),))
        kept.store.put(keys.added_page(4, 7, f"{number:08x}"), dump(page))
    announce(run, "one", [link(6, 4)], 6)
    assert {x.way for x in kept.run.added.between(-1, 9)} == {*((v, "delta", 2) for v in (4, 5, 6, 7)), (6, "delta", 4)}
    assert len(kept.run.added.index().pages) == 1  # type: ignore[union-attr]
