"""The right to publish to a run. writer.json names the publisher that has it and is renewed while that one runs.

    take       nobody's, or of a publisher that ended: taken at once, with the next epoch
               of another one: watched for three renewals. If it changes, that publisher runs: WriterConflict
    renew      by a thread of its own, also while nothing is published
    check      before each commit: it is still ours
    release    marked as ended, so that the next publisher need not wait

So the publisher that is there keeps the run, one started by mistake is refused, and one started after a crash continues
after half a minute. Clocks of clients are never compared. Only where the object is very old by the store's own clock,
nothing is watched. With `takeover` neither is; the publisher before finds that out at its next check or renewal.

A publisher that finds an epoch not below its own has lost the run. One that finds a lower epoch puts its own back: that
was written by a publisher that had lost the run and was paused between its look and its put.

Where the store creates exclusively, the manifest is the last word: one version, one writer. Where it does not (`take`
finds out), a new claim stands for a moment before it counts, and a commit is confirmed after it was made. Between the
last check of the publisher that lost and its write, no store without conditions can stop it. But it writes one manifest
only, of the version after the last one it knew, which is the first version of its successor: the successor checks that
manifest before every later commit, and restores it. Data is safe in any case, its keys carry the writer's mark; and
a replica that read the wrong manifest finds that the next delta does not fit, before it touches a weight, and plans
again.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple
from weakref import WeakValueDictionary

import msgspec

from ..bucket.run import Run
from ..core import keys
from ..core.errors import (
    AlreadyExists,
    ManifestError,
    ObjectNotFound,
    ObjectTooLarge,
    RunNotFound,
    RunReplaced,
    StoreUnavailable,
    WriterConflict,
)
from ..core.manifest import MAX_RENEWAL, Writer, dump, parse
from ..core.settings import seconds
from ..store import Fetched

log = logging.getLogger("deltawire")

RENEWAL_S = 10.0
"""Seconds between renewals, unless DELTAWIRE_WRITER_RENEWAL says otherwise."""

WATCHED = 3
"""Renewals without a change after which a publisher is taken for dead."""

LONG_DEAD = 30
"""Renewals after which that needs no watching: more than an outage of the store takes, during which none can renew."""

SETTLES = 0.1
"""Renewals that a new claim stands before it counts: two that start together, and a commit under way, show by then."""

VISIBLE_S = 15.0
"""Seconds that a store may take to show what was written."""

RELEASE_S = 5.0
"""Seconds that `release` waits for the store."""

ADVICE = "only one trainer may publish to a run: stop this one, or give it a run of its own"


class _Found(NamedTuple):
    """Content of writer.json."""

    writer: Writer | None
    """None where there is nothing, or nothing that names a publisher."""
    etag: str | None = None
    there: bool = True


class Claim:
    """The right of one publisher to write to its run. `take` does the first request; `drop` may be called anywhere."""

    def __init__(self, takeover: bool = False, sleep: Callable[[float], None] = time.sleep) -> None:
        self.takeover, self._sleep = takeover, sleep
        self._run: Run
        self._mine: Writer | None = None
        """What writer.json says of us; None before `take`."""
        self._began = 0.0
        self.excludes = True
        """Whether the store keeps two writers from creating one manifest."""
        self._etag: str | None = None
        """Of writer.json, where it was read as ours."""
        self.follows_own = False
        """Whether the publisher before was of this process too."""
        self._lost = ""
        """How another publisher took the run."""
        self._first: tuple[str, bytes, str | None] | None = None
        """Key, content and etag of the first manifest written under this claim, where the store does not exclude."""
        self._thread: threading.Thread | None = None
        # a finalizer may run within any call of another queue's or event's methods, on the same thread
        self._stop: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._process = os.getpid()

    # ── from the first publish to the last ───────────────────────────────────────────────────────────────────────────

    def take(self, run: Run) -> None:
        """Take the run. Raises WriterConflict if another publisher writes to it."""
        renews_s = seconds("DELTAWIRE_WRITER_RENEWAL", RENEWAL_S, MAX_RENEWAL)
        self._run, self._process = run, os.getpid()
        self.excludes = self._store_excludes()
        mark, host = secrets.token_hex(8), socket.gethostname()
        program = os.path.basename(sys.argv[0] if sys.argv else "")
        while True:
            found, settled = self._until_free()
            self._began, epoch = time.monotonic(), found.writer.epoch + 1 if found.writer else 1
            self.follows_own = found.writer is not None and (found.writer.writer, os.getpid()) in _marks
            self._mine = mine = Writer(epoch, mark, host[:80], os.getpid(), program[:80], 0.0, renews_s)
            # after an interrupt this object takes the run from itself
            _here[mark] = self
            _marks.add((mark, os.getpid()))
            self._lost, self._etag, self._first = "", None, None
            if found.there or not self.excludes:
                run.store.put(keys.WRITER, dump(mine))
                break
            with suppress(AlreadyExists):  # another one was created meanwhile
                run.store.put_if_absent(keys.WRITER, dump(mine))
                settled = True
                break
        if not (settled and self.excludes):
            self._settle(found)
        self._stop = queue.SimpleQueue()
        # first: `release` finds it, wherever this is interrupted
        self._thread = threading.Thread(
            target=self._keep, args=(self._stop, mine), name="deltawire-writer", daemon=True
        )
        self._thread.start()

    def check(self) -> None:
        """Before a commit. Raises WriterConflict, RunNotFound or RunReplaced if this publisher may not commit."""
        try:
            self._require_ours()
        except WriterConflict:
            # a run that was deleted has no writer, or that of the run that came after
            self._run.check_present()
            raise
        if not self.excludes:
            self._guard()

    def confirm(self, key: str, manifest: bytes) -> None:
        """After a commit: raise WriterConflict if another publisher has taken the run or overwritten the manifest."""
        if self.excludes:
            return
        self._require_ours()
        try:
            found = self._changed(key, None)
        except ObjectNotFound:
            return  # not visible yet, and not overwritten
        if found is None or found.data != manifest:
            raise WriterConflict(f"{self._run.store.url}/{key} was written over by another trainer; {ADVICE}")
        if self._first is None:
            self._first = key, manifest, found.etag

    def release(self, timeout: float = RELEASE_S) -> None:
        """Mark the claim as ended. If the store fails within the timeout, the next publisher has to wait."""
        thread = self._thread
        if thread is not None and self._process == os.getpid():
            self.drop()
            if thread.ident is not None:
                thread.join(timeout)
            self._thread = None

    def drop(self) -> None:
        """Let the thread mark the claim as ended, without waiting for it: for a finalizer."""
        self._stop.put(None)

    # ── taking it ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _until_free(self) -> tuple[_Found, bool]:
        """Wait until no other publisher writes to the run, and return what is at writer.json then, and whether whoever
        wrote it is known to write no more."""
        found = self._read()
        writer, url = found.writer, self._run.store.url
        if writer is None or writer.ended:
            return found, True
        if (older := _of_this_process(writer.writer)) is not None:
            log.info("this publisher of %s replaces an earlier one of this process", url)
            older._replaced()
            return found, True
        if self.takeover:
            log.warning("taking %s over from %s", url, writer)
            return found, False
        age = self._run.age(keys.WRITER)
        if age is not None and age > LONG_DEAD * writer.renews_s:
            log.info("%s was written by %s, which ended long ago without closing it", url, writer)
            return found, False
        watched = WATCHED * writer.renews_s
        log.warning(
            "%s was written by %s: waiting %.0f s to see whether that still runs (not with takeover=True, --take-over)",
            url,
            writer,
            watched,
        )
        until = time.monotonic() + watched
        while time.monotonic() < until:
            self._sleep(min(1.0, writer.renews_s / 4))
            asked = time.monotonic()
            now = self._read()
            if now.writer is None or now.writer.ended:
                return now, True
            if now.writer != writer:
                raise WriterConflict(
                    f"{url} is being written by {now.writer}: only one trainer may publish to a run. Give this one a "
                    "run of its own, or stop the other one; takeover=True, or --take-over, replaces it"
                )
            if time.monotonic() - asked > writer.renews_s:
                # a store that did not answer kept the other one from renewing, too
                until = time.monotonic() + watched
        log.warning("%s: %s does not run any more, continuing", url, writer)
        return now, False

    def _settle(self, before: _Found) -> None:
        """Let the claim stand for a while. Raises WriterConflict if it is not ours then."""
        assert self._mine is not None
        pause, waited, replaced = self._mine.renews_s * SETTLES, 0.0, before.writer
        while True:
            self._sleep(pause)
            waited += pause
            found = self._read()
            if found.writer is not None and found.writer.epoch >= self._mine.epoch:
                self._compare(found)
                return
            if waited >= VISIBLE_S:
                where = f"{self._run.store.url}/{keys.WRITER}"
                raise StoreUnavailable(f"{where} was written {waited:.0f} s ago and does not show")
            if found.writer is not None and found.writer != replaced:
                # renewed at the same moment by the publisher before
                replaced = found.writer
                self._run.store.put(keys.WRITER, dump(self._mine))

    def _store_excludes(self) -> bool:
        """Whether the store keeps two writers from creating one manifest, tried on run.json, which is there already.

        Some servers ignore the condition of a put and answer that all is well. The bytes are those of run.json, so that
        nothing is lost where that happens.
        """
        store = self._run.store
        if not store.creates_exclusively:
            return False
        try:
            store.put_if_absent(keys.RUN, dump(self._run.info))
        except AlreadyExists:
            return True
        log.warning("%s creates objects that exist already: relying on %s alone", store.url, keys.WRITER)
        return False

    # ── keeping it ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _keep(self, stop: queue.SimpleQueue[None], mine: Writer) -> None:
        """Renew until the publisher ends, or another one takes the run: the thread."""
        failing = False
        while True:
            try:
                stop.get(timeout=mine.renews_s)
                break
            except queue.Empty:
                pass
            try:
                self._renew(mine)
                failing = False
            except (WriterConflict, RunNotFound, RunReplaced) as error:
                log.error("%s", error)
                return
            except Exception as error:
                if not failing:
                    log.warning("cannot renew %s/%s, trying again: %s", self._run.store.url, keys.WRITER, error)
                failing = True
        # whatever fails here, the next publisher waits
        with suppress(Exception):
            self._renew(mine, ended=True)

    def _renew(self, mine: Writer, ended: bool = False) -> None:
        self._require_ours()
        self._run.check_present()
        held_s = round(time.monotonic() - self._began, 3)
        self._run.store.put(keys.WRITER, dump(msgspec.structs.replace(mine, held_s=held_s, ended=ended)))

    def _replaced(self) -> None:
        """A later publisher of this process takes the run."""
        self._lost = (
            f"a later publisher of this process took over {self._run.store.url}: use that one, or close one before the "
            "next is made"
        )
        self.release()

    def _require_ours(self) -> None:
        """Raise WriterConflict if writer.json is another publisher's, and put ours back if it is gone."""
        if self._lost:
            raise WriterConflict(self._lost)
        try:
            found = self._changed(keys.WRITER, self._etag)
        except ObjectNotFound:
            found = Fetched(b"", None)
        if found is not None:
            self._compare(self._parsed(found))

    def _compare(self, found: _Found) -> None:
        mine, there, url = self._mine, found.writer, self._run.store.url
        assert mine is not None
        if there is not None and there.writer == mine.writer:
            self._etag = found.etag
            return
        if there is not None and there.epoch >= mine.epoch:
            self._lost = f"another trainer took over {url}: {there}; {ADVICE}"
            raise WriterConflict(self._lost)
        self._run.check_present()
        log.warning("%s/%s was deleted or overwritten: put back", url, keys.WRITER)
        self._run.store.put(keys.WRITER, dump(mine))

    def _guard(self) -> None:
        """Restore the first manifest if a trainer that had lost the run overwrote it (see above)."""
        if self._first is None:
            return
        key, manifest, etag = self._first
        try:
            found = self._changed(key, etag)
        except ObjectNotFound:
            self._first = None  # pruned
            return
        if found is not None and found.data != manifest:
            log.warning("%s/%s was written over by a trainer that has lost the run: put back", self._run.store.url, key)
            self._run.store.put(key, manifest)

    def _changed(self, key: str, etag: str | None) -> Fetched | None:
        """An object, unless it still has this etag. One that is larger than any of ours counts as empty."""
        try:
            return self._run.store.get_if_changed(key, etag, limit=keys.limit(key))
        except ObjectTooLarge:
            return Fetched(b"", None)

    def _read(self) -> _Found:
        try:
            return self._parsed(self._run.store.get(keys.WRITER, limit=keys.limit(keys.WRITER)))
        except ObjectTooLarge:
            return _Found(None)
        except ObjectNotFound:
            return _Found(None, there=False)

    def _parsed(self, found: Fetched) -> _Found:
        try:
            writer = parse(found.data, Writer, keys.WRITER)
        except ManifestError:
            writer = None
        return _Found(writer, found.etag)


# ── this process ─────────────────────────────────────────────────────────────────────────────────────────────────────

_here: WeakValueDictionary[str, Claim] = WeakValueDictionary()
"""Claims that were taken by this process, or by the one that it was forked from, by their marks."""

_marks: set[tuple[str, int]] = set()
"""Marks of all claims that were ever taken by this process, with its id: a forked one has another."""


def _of_this_process(mark: str) -> Claim | None:
    claim = _here.get(mark)
    return claim if claim is not None and claim._process == os.getpid() else None


@atexit.register
def _end_all() -> None:
    """A program that ends without closing its publishers has ended all the same."""
    claims = [claim for claim in list(_here.values()) if claim._process == os.getpid()]
    for claim in claims:
        claim.drop()
    until = time.monotonic() + RELEASE_S
    for claim in claims:
        claim.release(max(0.0, until - time.monotonic()))
