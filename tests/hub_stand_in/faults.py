"""What goes wrong on demand."""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fault:
    """The next `times` requests whose "METHOD /path" matches fail in one of these ways, or are late.

    `addFile PATH` is matched too, for each file a batch adds: `late_s` then hides it from readers for so long. So is
    `EVENTS BUCKET`, for each stream of events: its reader is told to reconnect, or with status 410 that it has missed
    something.
    """

    match: str
    # a regular expression, searched for
    times: int = 1
    status: int = 0
    # answer with this status
    retry_after: int | None = None
    # and, with a 429 or 503, how many seconds to wait
    delay_s: float = 0.0
    # wait before anything else
    drop: bool = False
    # close the connection without an answer
    truncate: int | None = None
    # send so many bytes of the body, then close the connection
    after: bool = False
    # do what was asked before failing, so that only the answer is lost
    late_s: float = 0.0


class Faults:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left: list[tuple[Fault, int]] = []

    def add(self, *faults: Fault) -> None:
        for fault in faults:
            re.compile(fault.match)
        with self._lock:
            self._left += [(fault, fault.times) for fault in faults]

    def clear(self) -> None:
        with self._lock:
            self._left = []

    def take(self, what: str) -> Fault | None:
        """The first fault that is due for this, once less from now on."""
        with self._lock:
            for at, (fault, left) in enumerate(self._left):
                if re.search(fault.match, what):
                    self._left[at : at + 1] = [(fault, left - 1)] if left > 1 else []
                    return fault
        return None
