"""Which of several keepers works: the one that `keeper.json` names, until that is LEASE_S old by the store's clock.

No more than an agreement that saves double work: two that hold it at once harm nothing, because data keys have a
writer's mark and the index is read again before it is written.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import msgspec

from ..bucket.run import Run
from ..core import keys
from ..core.errors import AlreadyExists
from ..core.manifest import dump, now

log = logging.getLogger("deltawire")

LEASE_S = 60.0
"""Seconds after which a keeper that does not renew its lease is taken for dead."""

SETTLE_S = 1.0
"""Seconds that a new lease stands before it counts: two keepers that take it together find out by then."""


class KeeperLease(msgspec.Struct, frozen=True):
    """keeper.json: the keeper that works now."""

    run: str
    keeper: str
    at: float
    """When it was renewed, by the clock of that keeper. Readers go by the store's."""


class Lease:
    """The right of one keeper to do the work."""

    def __init__(
        self, run: Run, keeper: str, lease_s: float = LEASE_S, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._run, self._keeper, self._lease_s, self._sleep = run, keeper, lease_s, sleep
        self._renewed = -float("inf")
        self.holder = ""
        """Name of the keeper that holds it, as far as known."""

    def hold(self) -> bool:
        """Whether this keeper may work now: renews the lease when due, and takes one that has expired."""
        if self.holder == self._keeper and time.monotonic() - self._renewed < self._lease_s / 4:
            return True
        store, began = self._run.store, time.monotonic()
        found = self._read()
        self.holder = found.keeper if found else ""
        if found is not None and found.keeper != self._keeper and not self._expired():
            return False
        if found is None or found.keeper != self._keeper:
            if found is not None:
                log.warning("the keeper %s of %s has ended or stalled: taking its place", found.keeper, store.url)
            try:
                if found is None and store.creates_exclusively:
                    store.put_if_absent(keys.KEEPER, self._mine())
                else:
                    store.put(keys.KEEPER, self._mine())
            except AlreadyExists:
                if (found := self._read()) is not None:
                    self.holder = found.keeper
                    return False
                store.put(keys.KEEPER, self._mine())  # it was left by another run, or is no lease
            self._sleep(SETTLE_S)
            found = self._read()
            self.holder = found.keeper if found else ""
        else:
            store.put(keys.KEEPER, self._mine())
        self._renewed = began
        return self.holder == self._keeper

    def release(self) -> None:
        """Let another keeper begin at once."""
        found = self._read()
        if found is not None and found.keeper == self._keeper:
            self._run.store.delete(keys.KEEPER)
        self.holder = ""

    def _mine(self) -> bytes:
        return dump(KeeperLease(self._run.info.run, self._keeper, now()))

    def _read(self) -> KeeperLease | None:
        return self._run.hint(keys.KEEPER, KeeperLease)

    def _expired(self) -> bool:
        age = self._run.age(keys.KEEPER)
        return age is not None and age > self._lease_s
