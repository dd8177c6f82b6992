"""Links that are added later: which skip deltas a keeper makes, and what a reader accepts."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache

import msgspec
import pytest

from deltawire.core import added, chain, keys
from deltawire.core.added import AddedIndex, AddedLink, AddedPage, in_summaries, parse_index, parse_page, skip_spans
from deltawire.core.errors import DeltawireError
from deltawire.core.manifest import Blob, Link, RunInfo, Summary, SummaryLink, dump
from deltawire.core.schema import Schema, TensorSpec
from deltawire.costs import bits_at

MOST = 10
"""Objects that a replica 1,000 versions behind may need."""

SCHEMA = Schema.build([TensorSpec("w", "BF16", (64, 64))])
INFO = RunInfo("run", 0.0, SCHEMA, SCHEMA.hash)


def delta(version: int, start: int, **other: object) -> AddedLink:
    blob = Blob(keys.delta(start, version, "0123abcd"), 100, "0" * 32)
    return AddedLink(version, msgspec.structs.replace(Link("delta", start, (blob,), "packed"), **other))


def test_spans_lead_up_and_down_by_one_delta_per_level() -> None:
    assert skip_spans(0) == skip_spans(1) == []
    assert (skip_spans(2), skip_spans(3), skip_spans(4), skip_spans(8)) == ([2], [3], [2, 3, 4], [2, 3, 4, 8])
    assert skip_spans(16) == [2, 3, 4, 8, 12, 16]
    assert skip_spans(64) == [2, 3, 4, 8, 12, 16, 32, 48, 64]
    assert skip_spans(16, levels=2) == [2, 3, 4, 8, 12]
    assert sum(len(skip_spans(version)) for version in range(4096)) < 1.7 * 4096


WEIGHTS, FULL = 600_000_000, 1_200_000_000


def random_changes(share: float, encoding: str) -> Callable[[int], float]:
    """Bytes of a delta over so many versions, each of which changes any weights with the same chance."""

    def size(span: int) -> float:
        density = 1 - (1 - share) ** span
        bits = 48.0 if encoding == "raw" else bits_at(density, encoding)
        return WEIGHTS * density * bits / 8

    return size


SIZES: dict[str, Callable[[int], float]] = {
    "0.01 %": random_changes(0.0001, "packed"),
    "0.1 %": random_changes(0.001, "context"),
    "1 %": random_changes(0.01, "context"),
    "10 %": random_changes(0.1, "packed"),
    "50 %": random_changes(0.5, "packed"),
    "raw 1 %": random_changes(0.01, "raw"),
    "the same weights change": lambda span: 5_000_000,
    "tiny": lambda span: 2000 * span,
}


@cache
def run_of(kind: str, count: int) -> dict[int, Summary]:
    """Summaries of a run with a keeper, whose deltas grow with their span in one of several ways."""
    size = SIZES[kind]
    versions: dict[int, Summary] = {}
    since = 0.0
    for version in range(count):
        links = [SummaryLink("delta", version - 1, int(size(1)), 1, "")] if version else []
        for span in skip_spans(version):
            if 2 * size(span) < FULL:
                links.append(SummaryLink("delta", version - span, int(size(span)), 1, ""))
        since += size(1)
        if not version or (since > FULL and version % 16 == 0):
            links.append(SummaryLink("anchor", None, FULL, 1, ""))
            since = 0.0
        versions[version] = Summary(version, version - 1 if version else None, "", 0.0, None, 0, tuple(links))
    return versions


@pytest.mark.parametrize("kind", SIZES)
def test_a_replica_1000_versions_behind_needs_at_most_10_objects(kind: str) -> None:
    versions, dice = run_of(kind, 2600), random.Random(kind)
    worst = 0
    for have in [18, 257, 513, *(dice.randrange(1590) for _ in range(6))]:
        for want in (have + 1000, have + dice.randrange(16, 1000)):
            window = {v: versions[v] for v in range(have, want + 1)}
            worst = max(worst, len(chain.plan(have, want, window)))
    assert worst <= MOST
    # and a server that joins: an anchor and at most 10 deltas
    for want in (dice.randrange(2600) for _ in range(4)):
        steps = chain.plan(None, want, versions)
        assert steps[0].kind == "anchor"
        assert len(steps) <= 1 + MOST


def test_added_links_come_after_those_of_the_manifest() -> None:
    own = SummaryLink("delta", 3, 7, 1, "packed")
    versions = {4: Summary(4, 3, "", 0.0, None, 0, (own,))}
    found = in_summaries(versions, [delta(4, 3), delta(4, 0), delta(9, 8)])
    assert list(found) == [4]
    assert found[4].links == (own, SummaryLink("delta", 0, 100, 1, "packed"))


def test_index_and_page_are_read_as_they_are_written() -> None:
    index = AddedIndex("run", "k", 1.0, 9, (keys.added_page(2, 8, "0123abcd"),), (delta(9, 7),))
    assert parse_index(dump(index), INFO) == index
    page = AddedPage("run", (delta(2, 0), delta(8, 4)))
    assert parse_page(dump(page), keys.added_page(2, 8, "0123abcd"), INFO) == page


BLOB = Blob("deltas/step_000009.0123abcd.safetensors", 100, "0" * 32)
BAD_LINKS = {
    "base above its version": delta(3, 2, base=3),
    "no base": delta(3, 2, base=None),
    "a reference": AddedLink(3, Link("reference", None, (), source="/etc", nbytes=3)),
    "larger than any delta": delta(3, 2, objects=(Blob(keys.delta(2, 3, "0123abcd"), 1 << 60, "0" * 32),)),
    "another place": delta(3, 2, objects=(Blob("../run.json", 100, "0" * 32),)),
    "of another version": delta(3, 2, objects=(BLOB,)),
    "many objects": delta(9, 8, objects=(BLOB, BLOB)),
    "no object": delta(3, 2, objects=()),
    "no hash": delta(9, 8, objects=(msgspec.structs.replace(BLOB, hash="x"),)),
}


@pytest.mark.parametrize("link", BAD_LINKS.values(), ids=BAD_LINKS)
def test_a_link_that_cannot_be_is_refused(link: AddedLink) -> None:
    with pytest.raises(DeltawireError):
        parse_page(dump(AddedPage("run", (link,))), keys.added_page(0, 99, "0123abcd"), INFO)
    with pytest.raises(DeltawireError):
        parse_index(dump(AddedIndex("run", "k", 1.0, 9, (), (link,))), INFO)


def test_foreign_and_impossible_records_are_refused() -> None:
    index = AddedIndex("run", "k", 1.0, 9)
    page = keys.added_page(0, 99, "0123abcd")
    for wrong in (
        {"run": "other"},
        {"done": -1},
        {"done": 10**18},
        {"pages": ("run.json",)},
        {"pages": (page,) * (added.MAX_PAGES + 1)},
        {"anchor": delta(9, 7)},
    ):
        with pytest.raises(DeltawireError):
            parse_index(dump(msgspec.structs.replace(index, **wrong)), INFO)
    for data in (b"", b"{}", b"[]", b"\xff", b'{"run":"run","links":[[1]]}', dump(AddedPage("other", ()))):
        with pytest.raises(DeltawireError):
            parse_page(data, page, INFO)
    with pytest.raises(DeltawireError, match="does not belong"):
        parse_page(dump(AddedPage("run", (delta(100, 99),))), page, INFO)
    with pytest.raises(DeltawireError):
        parse_page(dump(AddedPage("run", (delta(9, 8),) * (added.PAGE_LINKS + 1))), page, INFO)
