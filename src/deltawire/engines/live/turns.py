"""Python threads beside a loop that must not wait for them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SWITCH_S = 0.0005
"""Seconds after which a thread yields Python. The default, 5 ms, is longer than many a step of a model."""


class ShortTurns:
    """Lets threads of this process take short turns while at least one of them asks for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._usual_s = 0.0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            if not self._users:
                self._usual_s = sys.getswitchinterval()
                sys.setswitchinterval(SWITCH_S)
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    sys.setswitchinterval(self._usual_s)


short_turns = ShortTurns()
"""Entered by a thread that computes beside a loop."""
