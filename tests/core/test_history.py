"""All history in O(log n) pages, and none of it twice."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from deltawire.core import history


@given(version=st.integers(0, 100_000), since=st.integers(0, 100_000))
def test_pages_and_recent_cover_exactly_what_is_asked(version: int, since: int) -> None:
    covered: list[int] = []
    for end in history.pages(version, since):
        assert history.needs_page(end), "a page nobody wrote"
        covered.extend(range(end - history.span(end), end))
    assert len(covered) == len(set(covered))
    everything = set(covered) | set(range(history.recent_start(version), version + 1))
    assert everything >= set(range(since, version + 1))


@given(version=st.integers(1, 10_000_000))
def test_few_pages_are_needed(version: int) -> None:
    assert len(history.pages(version)) <= max(1, math.ceil(math.log2(version)) - 3)


def test_what_a_publisher_writes_grows_slowly() -> None:
    """Each version stands in O(log n) pages."""
    written = sum(history.span(end) for end in range(1, 4097) if history.needs_page(end))
    assert written <= 4096 * 9


def test_small_runs_have_no_pages() -> None:
    assert [v for v in range(40) if history.needs_page(v)] == [16, 32]
    assert history.pages(15) == []
    assert history.pages(16) == [16]
    assert history.pages(48) == [48, 32]


def test_reaching_back_goes_sixteen_times_as_far_each_time() -> None:
    assert history.reaches(99_999) == [99_744, 95_919, 0]
    assert history.reaches(200) == [0]
    assert history.reaches(99_999, 95_000) == [99_744, 95_000]
    assert history.reaches(99_999, 90_000) == [99_744, 95_919, 90_000]
    assert history.reaches(5, 5) == [5]
