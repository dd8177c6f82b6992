"""`chain.plan`: the cheapest path, found without I/O, and never led astray by what a bucket claims."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltawire.core.chain import REQUEST_COST, Step, needed, plan, reachable
from deltawire.core.errors import MissingBase, VersionNotFound
from deltawire.core.manifest import Summary, SummaryLink

Links = list[tuple[str, int | None, int]]


def summary(version: int, links: Links) -> Summary:
    parent = version - 1 if version else None
    return Summary(
        version,
        parent,
        "0" * 32,
        0.0,
        None,
        0,
        tuple(SummaryLink(kind, base, size, 1, "") for kind, base, size in links),
    )


def run(**versions: Links) -> dict[int, Summary]:
    return {int(name[1:]): summary(int(name[1:]), links) for name, links in versions.items()}


def path(steps: list[Step]) -> list[tuple[int, str, int | None]]:
    return [(step.version, step.kind, step.base) for step in steps]


def chain(count: int, anchors: set[int], full: int = 1_000_000, delta: int = 10_000) -> dict[int, Summary]:
    return {
        v: summary(v, [*([("delta", v - 1, delta)] if v else []), *([("anchor", None, full)] if v in anchors else [])])
        for v in range(count)
    }


def test_full_weights_start_from_nothing_whatever_base_they_claim() -> None:
    """Such a base once led round in circles for ever."""
    versions = run(v0=[("anchor", 0, 100)], v1=[("delta", 0, 10), ("anchor", 1, 5)], v2=[("delta", 1, 10)])
    assert path(plan(None, 2, versions)) == [(1, "anchor", None), (2, "delta", 1)]


def test_nothing_to_do() -> None:
    assert plan(3, 3, chain(5, {0})) == []


def test_one_delta_for_the_next_version() -> None:
    assert path(plan(3, 4, chain(5, {0}))) == [(4, "delta", 3)]


def test_from_nothing_the_anchor_and_what_follows() -> None:
    assert path(plan(None, 2, chain(5, {0}))) == [(0, "anchor", None), (1, "delta", 0), (2, "delta", 1)]


def test_the_later_anchor_when_many_deltas_lie_between() -> None:
    assert path(plan(None, 9, chain(10, {0, 8}))) == [(8, "anchor", None), (9, "delta", 8)]


def test_an_anchor_overtakes_a_long_replay() -> None:
    versions = chain(200, {0, 199}, full=1_000_000, delta=100_000)
    assert path(plan(3, 199, versions)) == [(199, "anchor", None)]


def test_a_skip_delta_saves_requests() -> None:
    versions = chain(17, {0})
    versions[16] = summary(16, [("delta", 15, 10_000), ("delta", 0, 40_000)])
    assert path(plan(0, 16, versions)) == [(16, "delta", 0)]
    # from the middle of it there is only the long way
    assert len(plan(1, 16, versions)) == 15


def test_a_request_costs_something(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = run(
        v0=[("anchor", None, 10)],
        v1=[("delta", 0, 10)],
        v2=[("delta", 1, 10), ("delta", 0, REQUEST_COST)],
    )
    assert path(plan(0, 2, versions)) == [(2, "delta", 0)]
    monkeypatch.setattr("deltawire.core.chain.REQUEST_COST", 0)
    assert path(plan(0, 2, versions)) == [(1, "delta", 0), (2, "delta", 1)]


def test_backwards_means_through_an_anchor() -> None:
    assert path(plan(4, 2, chain(5, {0}))) == [(0, "anchor", None), (1, "delta", 0), (2, "delta", 1)]


def test_a_version_that_is_not_there() -> None:
    with pytest.raises(VersionNotFound, match="no version 9; the newest is 4"):
        plan(None, 9, chain(5, {0}))
    with pytest.raises(VersionNotFound):
        plan(None, 0, {})


def test_no_path_names_what_is_missing() -> None:
    with pytest.raises(MissingBase, match="version 4 needs 3, this replica has nothing"):
        plan(None, 4, chain(5, set()))
    with pytest.raises(MissingBase, match="this replica has 1"):
        plan(1, 4, {v: s for v, s in chain(5, {0}).items() if v in (1, 4)})


@given(
    data=st.lists(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 300_000)), max_size=3), min_size=1, max_size=7),
    have=st.one_of(st.none(), st.integers(0, 6)),
)
def test_no_path_is_cheaper(data: list[list[tuple[int, int]]], have: int | None) -> None:
    """Against all subsets of links, on runs small enough to try them."""
    versions = {
        v: summary(v, [("anchor", None, size) if base >= v else ("delta", base, size) for base, size in links])
        for v, links in enumerate(data)
    }
    want = len(versions) - 1

    def cost(at: int) -> int | None:
        """The cheapest way to `at`, by recursion over every link."""
        if at == have:
            return 0
        found = []
        for link in versions[at].links:
            before = 0 if link.kind == "anchor" else cost(link.base)
            if before is not None:
                found.append(before + link.bytes + REQUEST_COST)
        return min(found, default=None)

    best = cost(want)
    if best is None:
        with pytest.raises(MissingBase):
            plan(have, want, versions)
        return
    steps = plan(have, want, versions)
    assert sum(step.bytes + REQUEST_COST for step in steps) == best
    # each step starts where the one before it ended
    reached = [have, *(step.version for step in steps)]
    assert all(step.kind == "anchor" or step.base == before for step, before in zip(steps, reached, strict=False))
    assert reached[-1] == want


def test_links_that_lead_nowhere_or_round_in_circles_are_ignored() -> None:
    """Summaries come from a bucket: a link from itself or from the future, with a negative price, must not trap us."""
    good = ("anchor", None, 10**9)
    for base, size in itertools.product((1, 2, 7), (-(10**9), 0)):
        versions = run(v0=[good], v1=[good, ("delta", base, size)], v2=[good, ("delta", 1, 10), ("delta", 2, size)])
        for have in (None, 0, 1, 7):
            steps = plan(have, 2, versions)
            assert steps[-1].version == 2
            assert all(step.base is None or step.base < step.version for step in steps)


def test_what_is_needed_is_on_the_cheapest_ways_and_nothing_else() -> None:
    versions = chain(10, {0, 4, 8})
    assert needed([], versions) == set()
    assert needed([2], versions) == {0, 1, 2}
    assert needed([9, 6], versions) == {8, 9, 4, 5, 6}
    assert needed([6, 9, 5], versions) == {8, 9, 4, 5, 6}
    # a skip delta spares what lies between
    versions[3] = summary(3, [("delta", 2, 10_000), ("delta", 0, 15_000)])
    assert needed([3], versions) == {0, 3}


def test_nothing_is_left_out_for_a_version_that_cannot_be_reached() -> None:
    versions = chain(6, {0, 4})
    del versions[1]
    assert reachable(versions) == {0, 4, 5}
    with pytest.raises(MissingBase, match="version 3 needs 2"):
        needed([0, 3], versions)
    with pytest.raises(VersionNotFound):
        needed([1], versions)
