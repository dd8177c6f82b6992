"""Messages between processes that publish together; a process alone is a group of one. test_shards.py has several."""

from __future__ import annotations

import pytest

from deltawire.trainer.collective import Group


def test_a_group_of_one_does_everything_itself() -> None:
    alone = Group()
    assert (alone.rank, alone.size) == (0, 1)
    assert alone.exchange("hello") == ["hello"]
    assert alone.together(lambda: 7) == [7]
    assert alone.each(lambda: 7) == alone.on_rank_0(lambda: 7) == 7


def test_what_fails_is_raised_as_it_is() -> None:
    def fail() -> None:
        raise LookupError("no")

    for method in (Group().together, Group().each, Group().on_rank_0):
        with pytest.raises(LookupError, match="no"):
            method(fail)
