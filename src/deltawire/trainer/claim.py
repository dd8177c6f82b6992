"""The right to publish, where the store does not refuse a second writer (`Committer` finds out).

    take      read writer.json → write it with the next epoch and a mark of our own → wait → it must still be ours
    confirm   before and after every commit: it is still ours, and so is the manifest that was just written

The trainer that wrote writer.json last may publish; the one before notices that at its next commit and stops. So after
a crash another trainer can simply be started, and of two that start together one fails with WriterConflict.

Between the last check of the trainer that lost and its write, no store without conditions can stop it. But it writes
one manifest only, of the version after the last one it knew, which is the first version of its successor: the successor
checks that manifest before every later commit, and restores it. Data is safe in any case, its keys carry the writer's
mark; and a replica that read the wrong manifest finds that the next delta does not fit, before it touches a weight, and
plans again.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable

from ..core import keys
from ..core.errors import ManifestError, ObjectNotFound, ObjectTooLarge, StoreUnavailable, WriterConflict
from ..core.manifest import Writer, dump, now, parse
from ..store import Fetched, Store

log = logging.getLogger("deltawire")

SETTLE_S = 1.0
"""How long a new claim stands before it counts: two that start together, and a commit under way, show by then."""

VISIBLE_S = 15.0
"""How long a store may take to show us what we wrote."""

_LIMIT = 64 << 10
_MAX_MANIFEST = 64 << 20


class Claim:
    """The exclusive right to publish to a run. `Claim.take` makes one."""

    def __init__(self, store: Store, writer: Writer) -> None:
        self._store = store
        self._writer = writer
        self._etag: str | None = None
        self._first: tuple[str, bytes, str | None] | None = None
        """Key, content and etag of the first manifest written under this claim."""

    @classmethod
    def take(cls, store: Store, sleep: Callable[[float], None] = time.sleep) -> Claim:
        """Claim the run. Raises WriterConflict if another trainer claims it at the same moment."""
        before, _ = _read(store)
        claim = cls(store, Writer(before.epoch + 1 if before else 1, secrets.token_hex(8), now()))
        if before is not None:
            log.info("taking over %s from the trainer that claimed it at %s", store.url, _time(before.at))
        store.put(keys.WRITER, dump(claim._writer))
        sleep(SETTLE_S)
        waited = 0.0
        while (found := _read(store))[0] == before:
            if waited >= VISIBLE_S:
                raise StoreUnavailable(f"{store.url}/{keys.WRITER} was written {waited:.0f} s ago and does not show")
            sleep(SETTLE_S)
            waited += SETTLE_S
        claim._compare(*found)
        return claim

    def check(self) -> None:
        """Before a commit: raise WriterConflict if another trainer has claimed the run."""
        self._look()
        self._guard()

    def confirm(self, key: str, manifest: bytes) -> None:
        """After a commit: raise WriterConflict if another trainer has claimed the run or overwritten the manifest."""
        self._look()
        try:
            found = self._changed(key, None, _MAX_MANIFEST)
        except ObjectNotFound:
            return  # not visible yet, and not overwritten
        if found is None or found.data != manifest:
            raise WriterConflict(f"{self._store.url}/{key} was written over by another trainer; {_ADVICE}")
        if self._first is None:
            self._first = key, manifest, found.etag

    def _look(self) -> None:
        try:
            found = self._changed(keys.WRITER, self._etag, _LIMIT)
        except ObjectNotFound:
            found = Fetched(b"", None)
        if found is not None:
            self._compare(*_parsed(found))

    def _changed(self, key: str, etag: str | None, limit: int) -> Fetched | None:
        """An object, unless it still has this etag. One that is larger than any of ours counts as empty."""
        try:
            return self._store.get_if_changed(key, etag, limit=limit)
        except ObjectTooLarge:
            return Fetched(b"", None)

    def _guard(self) -> None:
        """Restore the first manifest if a trainer that had lost the run overwrote it (see above)."""
        if self._first is None:
            return
        key, manifest, etag = self._first
        try:
            found = self._changed(key, etag, _MAX_MANIFEST)
        except ObjectNotFound:
            self._first = None  # pruned
            return
        if found is not None and found.data != manifest:
            log.warning("%s/%s was written over by a trainer that has lost the run: put back", self._store.url, key)
            self._store.put(key, manifest)

    def _compare(self, found: Writer | None, etag: str | None) -> None:
        if found == self._writer:
            self._etag = etag
            return
        who = "" if found is None else f" at {_time(found.at)} (epoch {found.epoch}; ours is {self._writer.epoch})"
        lost = f"{keys.WRITER} is gone or damaged, so no trainer owns"
        what = lost if found is None else "another trainer took over"
        raise WriterConflict(f"{what} {self._store.url}{who}; {_ADVICE}")


_ADVICE = "only one trainer may publish to a run: stop this one, or give it a run of its own"


def _read(store: Store) -> tuple[Writer | None, str | None]:
    try:
        return _parsed(store.get(keys.WRITER, limit=_LIMIT))
    except (ObjectNotFound, ObjectTooLarge):
        return None, None


def _parsed(found: Fetched) -> tuple[Writer | None, str | None]:
    try:
        return parse(found.data, Writer, keys.WRITER), found.etag
    except ManifestError as error:
        log.warning("%s; taking it for none", error)
        return None, found.etag


def _time(at: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))
    except (ValueError, OverflowError, OSError):
        return "an invalid timestamp"
