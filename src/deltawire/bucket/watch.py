"""Learn that a run has a new version, with any store.

    announced  the store announces changes (`Announcing`): look at once
    asked      a conditional GET of head.json, which is a 304 while nothing happens
    probed     the manifest after the newest known one; now and then instead of head, whose writer may have died between
               the manifest and head, and more often where head is missing or invalid. Over https less often: no cache
               keeps what is not there, so each of these reaches the bucket

A look is one small request while nothing happens. Looks follow the rhythm in which versions come: rare right after one,
close together when the next is due, fewer and fewer while none comes, and never further apart than `poll`.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from ..core import keys
from ..core.errors import (
    DeltawireError,
    ForeignObject,
    ManifestError,
    ObjectTooLarge,
    RunNotFound,
    RunReplaced,
    StoreError,
    StoreUnavailable,
    Unsupported,
)
from ..core.manifest import Head, parse
from ..store import Store, open_store
from ..store.base import Announcing
from .run import Run, web_addresses
from .trust import KeysLike, Trust
from .versions import address_only

log = logging.getLogger("deltawire")

PROBE_EVERY = 16
"""Every so many idle looks, read the next manifest instead of head."""

PROBE_WEB_S = 60.0
"""Seconds without news, at least, before one of these over https; until then head is read without its ETag instead."""

_FASTEST_S = 0.05
_SLICE_S = 0.1
"""How soon a wait notices that it must stop, or that somebody waits for a version."""

_LISTENING_S = 30.0
"""A store that announces is still asked this often: announcements get lost."""

_HURRY_S = 0.25
"""Most seconds between two looks while somebody waits for a version."""

_REST_S = 300.0
"""Most seconds that a store is left alone because it asked for it."""

_SILENCE_S = (1.0, 60.0)
"""Delays before the first attempt to listen again and, at most, between later ones."""


def watch(
    run: str | Path | Store,
    since: int | None = None,
    *,
    poll: float = 1.0,
    every: bool = False,
    trust: Trust | KeysLike | None = None,
    stop: threading.Event | None = None,
) -> Iterator[int]:
    """Yield new versions of a run, until `stop` is set. Fetches no weights.

        for version in dw.watch("s3://runs/wordle"):
            print("published:", version)

    since   begin after this version; by default with the newest one
    poll    most seconds between two requests
    every   yield every version; by default only the newest if several are new
    trust   public keys whose versions are yielded, as in a Replica; by default DELTAWIRE_TRUST

    Waits for a run that does not exist yet and for a store that is unavailable. Raises RunReplaced if another run is
    at the address.
    """
    stop = stop or threading.Event()
    opened: Run | None = None
    newest, reached, waits = since, since, False
    with Watcher(run, poll=poll, stop=stop) as watcher:
        while not stop.is_set():
            try:
                opened = opened or Run.open(watcher.store, trust=trust)
                newest = watcher.look(opened, newest)
                while newest is not None and (reached is None or reached < newest):
                    reached = newest if reached is None or not every else following(opened, reached, newest)
                    yield reached
                    if stop.is_set():
                        return
            except RunNotFound as error:
                # a warning once, for a user who mistyped the address
                log.log(logging.INFO if waits else logging.WARNING, "%s; waiting for it", error)
                waits = True
            except StoreUnavailable as error:
                log.warning("cannot look for new versions, retrying: %s", error)
                watcher.failed(error)
            watcher.wait()


def wait_for_run(run: str | Store, poll: float = 1.0, *, trust: Trust | KeysLike | None = None) -> Run:
    """Open a run once it has a version: trainer and server start in any order.

    run = dw.wait_for_run("s3://runs/chat")
    """
    # of a run that is not there, watch says so
    with suppress(RunNotFound):
        opened = Run.open(run, trust=trust)
        if opened.newest() is not None:
            return opened
        log.warning("there is no version at %s yet; waiting for it", opened.store.url)
    next(watch(run, poll=poll, trust=trust))
    return Run.open(run, trust=trust)


def following(run: Run, version: int, newest: int) -> int:
    """Return the next version that exists: those between may have been pruned."""
    if run.exists(version + 1):
        return version + 1
    return min(run.timeline(newest, since=version + 1), default=newest)


def _named_by(head: bytes, run: Run) -> int | None:
    """The version that a head names; None if it is invalid, or another run's. Never an error: a head is a hint."""
    try:
        found = parse(head, Head, keys.HEAD)
    except ManifestError:
        return None
    return found.version if found.run == run.info.run else None


class Watcher:
    """Looks for new versions of a run, for one follower. Use as a context manager, from one thread at a time.

        with dw.Watcher("s3://runs/chat") as watcher:
            run, newest = dw.Run.open(watcher.store), None
            while True:
                newest = watcher.look(run, newest)
                watcher.wait()

    `watch` is that loop. `poll` is the longest time between two looks; `stop` ends a wait.
    """

    def __init__(
        self,
        run: str | Path | Store,
        *,
        poll: float = 1.0,
        stop: threading.Event | None = None,
        hurry: Callable[[], bool] = lambda: False,
    ) -> None:
        """`hurry` returns whether somebody waits for a version; then looks are close together."""
        self.store = open_store(address_only(run))
        self._poll = poll
        self._stop = stop or threading.Event()
        self._hurry = hurry
        self._rhythm = Rhythm(poll)
        self._etag: str | None = None
        self._headless = False
        self._looked = False
        self._idle = 0
        self._is_web = next(web_addresses(self.store), None) is not None
        self._probes_at = 0.0
        """When the next manifest is asked for over https, by the monotonic clock."""
        self._probe_later()
        self._rests_until = 0.0
        """No look before, by the monotonic clock."""
        self._announced = threading.Event()
        self._listening = False
        self._ended = threading.Event()
        self._listener: threading.Thread | None = None

    def __enter__(self) -> Watcher:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    # ── looking ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def look(self, run: Run, known: int | None) -> int | None:
        """Return the newest version, at least `known`; None while there is none.

        Raises RunReplaced if there is another run at the address by now.
        """
        if known is None and not self._looked:
            newest = run.newest()
        else:
            before = -1 if known is None else known
            newest = run.anywhere(lambda: self._look(run, before))
            if newest > before:
                self._rhythm.saw(newest - before, time.monotonic())
                self._probe_later()
        self._looked = True
        newest = None if newest == -1 else newest
        self._idle = self._idle + 1 if newest == known else 0
        return newest

    def failed(self, error: DeltawireError) -> None:
        """Read head again at the next look, since the version that it named may be there by then. If the store asked to
        be left alone, the next look waits so long, and a little longer: not all clients come back at once."""
        self._etag = None
        if isinstance(error, StoreUnavailable) and error.retry_after:
            self._rests_until = time.monotonic() + min(error.retry_after, _REST_S) * random.uniform(1.0, 1.25)

    def _look(self, run: Run, known: int) -> int:
        try:
            if self._headless and self._idle % 3:
                return self._probe(run, known) if self._idle % 3 == 1 else self._check_run(run, known)
            if self._idle % PROBE_EVERY == PROBE_EVERY - 1:
                if not self._is_web or time.monotonic() >= self._probes_at:
                    self._probe_later()
                    return self._probe(run, known)
                # of some servers it never changes
                self._etag = None
            return self._ask(run, known)
        except ForeignObject:
            self._check_run(run, known)
            raise

    def _ask(self, run: Run, known: int) -> int:
        try:
            got = self.store.get_if_changed(keys.HEAD, self._etag, limit=keys.limit(keys.HEAD))
            if got is None:
                return known
            version = _named_by(got.data, run)
        except StoreUnavailable:
            raise
        except (StoreError, ObjectTooLarge):
            self._etag, self._headless = None, True
            return known
        self._headless = version is None
        if version is not None and version > known and not run.exists(version):
            # perhaps not visible yet: without its ETag, head is read again at the next look
            return known
        if version is not None and version < known:
            run.check_kept(known)
        self._etag = got.etag
        # where head names no version, manifests are the truth; but there may be another run now
        return self._check_run(run, known) if version is None else max(version, known)

    def _probe_later(self) -> None:
        # each follower at a time of its own
        self._probes_at = time.monotonic() + PROBE_WEB_S * random.uniform(1.0, 2.0)

    def _probe(self, run: Run, known: int) -> int:
        newest = run.newest() if run.exists(known + 1) else None
        if newest is None or newest <= known:
            return known
        # head did not show it: its ETag may not change
        self._etag = None
        return newest

    def _check_run(self, run: Run, known: int) -> int:
        """Raise RunReplaced if the address has another run than the one that was opened, RolledBack if less of it."""
        found = Run.open(self.store).info.run
        if found != run.info.run:
            raise RunReplaced(
                f"another run lies at {self.store.url} now ({found[:32]}, this was {run.info.run}): weights stay the "
                "version they are; start again to follow the new run"
            )
        if known >= 0:
            run.check_kept(known)
        return known

    # ── waiting ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def wait(self) -> None:
        """Wait until it is worth looking again, or time to stop."""
        if self._listener is None and isinstance(self.store, Announcing):
            self._listener = threading.Thread(
                target=self._listen, args=(self.store,), name="deltawire-watch", daemon=True
            )
            self._listener.start()
        pause = self._rhythm.pause(time.monotonic()) * random.uniform(0.75, 1.0)
        event = self._announced if self._listener is not None and self._listener.is_alive() else self._stop
        begun = time.monotonic()
        while not self._stop.is_set():
            if (rest := self._rests_until - time.monotonic()) > 0:
                self._stop.wait(min(rest, _SLICE_S))
                continue
            # in each round: the store may stop announcing meanwhile, or somebody wait
            patience = max(pause, min(10 * self._poll, _LISTENING_S)) if self._listening else pause
            if self._hurry():
                patience = min(patience, _HURRY_S)
            left = begun + patience - time.monotonic()
            if left <= 0 or event.wait(min(left, _SLICE_S)):
                break
        self._announced.clear()

    def _listen(self, store: Announcing) -> None:
        """Listen for announcements, in a thread of its own. Looks find what it misses."""
        silence, longest = _SILENCE_S
        while not self._ended.is_set():
            asked = 0.0
            try:
                for key in store.announcements(self._ended):
                    self._listening, silence = True, _SILENCE_S[0]
                    if key in ("", keys.HEAD, keys.RUN) or key.startswith(keys.VERSIONS):
                        self._announced.set()
            except Unsupported:
                return
            except StoreError as error:
                log.debug("%s: announcements interrupted: %s", self.store.url, error)
                asked = getattr(error, "retry_after", None) or 0.0
            finally:
                self._listening = False
            self._announced.set()  # for changes while it did not listen
            self._ended.wait(max(asked, random.uniform(silence / 2, silence)))
            silence = min(2 * silence, longest)


class Rhythm:
    """Decides how long to wait before the next look, from when versions came."""

    def __init__(self, most: float) -> None:
        self._most = most
        self._last: float | None = None
        self._period: float | None = None

    def saw(self, count: int, at: float) -> None:
        if self._last is not None:
            found = (at - self._last) / count
            self._period = found if self._period is None else (self._period + found) / 2
        self._last = at

    def pause(self, at: float) -> float:
        if self._last is None or self._period is None:
            return self._most
        since, period = at - self._last, self._period
        if since < period / 2:
            wait = period / 2 - since
        elif since < 2 * period:
            wait = period / 16
        else:
            wait = since / 16
        return min(self._most, max(wait, _FASTEST_S))
