"""Ranks publish equally often: each says where it is before a version is made, and once more when it closes.

Whoever is behind takes in what comes next (sharded.py). Who is closed will not, and says so: nobody waits for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from ..core.digest import StateDigest
from ..core.errors import OutOfStep, RankLost
from .team import Team

log = logging.getLogger("deltawire")

LAST_WAIT = 600.0
"""Seconds that `close` waits for ranks that have neither published as often as this one nor closed."""


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a rank is when all meet."""

    publishes: int
    changed: int
    # weights that the version to be would change here
    digest: StateDigest
    # this rank's share of the version's digest
    closed: bool


class Pace:
    """Used by the background thread of each rank, but for `overdue`."""

    def __init__(self, team: Team) -> None:
        self._team = team
        self._waits_since: float | None = None

    def meet(
        self, publishes: int, changed: int = 0, digest: StateDigest | None = None, *, closed: bool = False
    ) -> list[Standing]:
        """Hear where everybody is. OutOfStep on all ranks if some are closed and others are not."""
        self._waits_since = time.monotonic()
        heard = self._team.exchange(Standing(publishes, changed, digest or StateDigest(), closed))
        self._waits_since = None
        if len({rank.closed for rank in heard}) > 1:
            counts = (f"rank {n} {rank.publishes}{' and closed' * rank.closed}" for n, rank in enumerate(heard))
            raise OutOfStep(
                f"ranks did not publish equally often: {', '.join(counts)}. What some have not published is in no "
                "version; let all ranks call publish after the same steps"
            )
        return heard

    def leave(self, publishes: int) -> None:
        """No further publish will come from this rank, and those who have more must know it."""
        try:
            self.meet(publishes, closed=True)
        except RankLost:
            # it went without a word, and all that was published here is in the bucket
            log.debug("another rank ended without closing its publisher")

    def overdue(self, patience: float) -> Callable[[], None]:
        """For the trainer's thread while it waits for the background's: raises once others do not come."""
        began = time.monotonic()

        def check() -> None:
            since = self._waits_since
            if since is not None and time.monotonic() - max(since, began) > patience:
                raise OutOfStep(
                    f"rank {self._team.rank} closes; for {patience:g} s other ranks have neither published as often "
                    "nor closed, so its last publishes are in no version"
                )

        return check
