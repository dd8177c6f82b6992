"""Python's turns are short while a thread computes beside a loop, and as before afterwards."""

from __future__ import annotations

import sys

import pytest

from deltawire.engines.live.turns import SWITCH_S, short_turns


def test_turns_are_short_for_a_while() -> None:
    before = sys.getswitchinterval()
    with pytest.raises(ZeroDivisionError), short_turns():
        assert sys.getswitchinterval() == pytest.approx(SWITCH_S)
        _ = 1 // 0
    assert sys.getswitchinterval() == before
