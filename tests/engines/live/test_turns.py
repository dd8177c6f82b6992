"""Python's turns are short while a thread computes beside a loop, and as before afterwards."""

from __future__ import annotations

import sys

import pytest

from deltawire.engines.live.turns import SWITCH_S, ShortTurns


def test_turns_are_short_until_the_last_user_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    # not Python's own interval, which threads of other tests may have set
    interval = [0.25]
    monkeypatch.setattr(sys, "getswitchinterval", lambda: interval[0])
    monkeypatch.setattr(sys, "setswitchinterval", lambda seconds: interval.__setitem__(0, seconds))
    short_turns = ShortTurns()
    with short_turns():
        with pytest.raises(ZeroDivisionError), short_turns():
            assert interval == [SWITCH_S]
            _ = 1 // 0
        assert interval == [SWITCH_S]
    assert interval == [0.25]
    # what somebody sets meanwhile is the usual one next time
    interval[0] = 0.125
    with short_turns():
        assert interval == [SWITCH_S]
    assert interval == [0.125]
