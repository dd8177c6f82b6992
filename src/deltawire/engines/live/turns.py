"""Python threads beside a loop that must not wait for them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

SWITCH_S = 0.0005
"""Seconds after which a thread yields Python. The default, 5 ms, is longer than many a step of a model."""

_USUAL_S = sys.getswitchinterval()


@contextmanager
def short_turns() -> Iterator[None]:
    """Let threads of this process take short turns while this one computes. If two do, until the first has ended."""
    sys.setswitchinterval(SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(_USUAL_S)
