"""What a replica could not do: why, how often, and what it does not try again for now."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from ..bucket.walk import TRIES
from ..core.chain import Step
from ..core.errors import VersionRefused

REFUSED_S = 60.0
"""Seconds until a version that the target has refused is tried again; a later version is tried at once."""


@dataclass(frozen=True, slots=True)
class _Refusal:
    """Why the target has refused a version."""

    reason: str
    until: float
    """When it is tried again, by the monotonic clock."""
    has_ended: Callable[[], bool]
    """Whether the cause is gone, so that it is tried before that."""


class _InARow:
    """Counts how often in a row the same thing has failed."""

    def __init__(self) -> None:
        self._last: object = None
        self._times = 0

    def count(self, failed: object) -> int:
        self._last, self._times = failed, self._times + 1 if failed == self._last else 1
        return self._times


class Failures:
    """The failures of one replica, and the versions that its target has refused."""

    def __init__(self) -> None:
        self.trouble = ""
        """Why the last sync or poll failed; empty if it succeeded."""
        self.count = 0
        """Number of syncs that failed."""
        self.skipped = -1
        """The last version that a follower of every version passes over."""
        self._refusals: dict[int, _Refusal] = {}
        self._versions, self._links = _InARow(), _InARow()

    def failed(self, error: Exception) -> None:
        """Note a sync that failed."""
        self.count, self.trouble = self.count + 1, str(error)

    def is_lost(self, step: Step) -> bool:
        """Note that the store could not give a link. True after some attempts: then the object counts as lost."""
        return self._links.count(step) >= TRIES

    def skip(self, version: int) -> bool:
        """Note that a version could not be reached. True after some attempts: then it is passed over."""
        if self._versions.count(version) < TRIES:
            return False
        self.skipped = version
        return True

    def refuse(self, version: int, error: VersionRefused) -> None:
        """Leave a version alone for some time."""
        self._refusals[version] = _Refusal(str(error), time.monotonic() + REFUSED_S, error.has_ended)

    def is_refused(self, version: int) -> bool:
        """Whether this version is not to be tried now."""
        refusal = self._refusals.get(version)
        return refusal is not None and time.monotonic() < refusal.until and not refusal.has_ended()

    def why_refused(self, version: int | None) -> str:
        """Why the target refused a version when it was last tried; empty if it did not."""
        refusal = None if version is None else self._refusals.get(version)
        return refusal.reason if refusal else ""

    def reached(self, version: int) -> None:
        """Drop refusals of this version and of earlier ones."""
        self.trouble = ""
        self._refusals = {refused: why for refused, why in self._refusals.items() if refused > version}
