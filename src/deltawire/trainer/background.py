"""The background thread of a publisher: one version in flight, and one that waits, into which later publishes merge."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from weakref import WeakSet

from ..core.errors import (
    DeltawireError,
    OutOfStep,
    PublisherClosed,
    PublishFailed,
    RankLost,
    RunNotFound,
    RunReplaced,
    WriterConflict,
)
from .captures import Capture
from .detectors import SnapshotLost
from .pending import PendingVersion, Published, PublishHandle

log = logging.getLogger("deltawire")

_LASTING = (WriterConflict, RankLost, OutOfStep, RunNotFound, RunReplaced)
"""Failures after which no later publish can succeed."""

CapturedVersion = PendingVersion[Capture]

LAST_IS_MISSING = "What was published last is not in the bucket: publish it again with a new Publisher"

_INTERVAL = 0.5
_LAST_MESSAGE = 10.0
"""Seconds that `close` waits for the last message to other ranks: all that was published here is in the bucket then."""


class Background:
    """A thread that writes captured versions, one after the other. Any thread may call its methods.

    The caller's thread may be interrupted at any line (docs/design.md, points of no return): a version waits or it does
    not, and whatever waits is written. Nor does a thread hold a lock while it waits for a version, or asks for one: its
    signal handler may publish and wait as well.

    Where several ranks publish together, `leave` is called by the thread when no further publish will come, unless a
    lasting failure came before. Then a failure is not raised by the next publish, nor at all once a later version has
    made up for it: a rank that raised where others do not would leave them waiting. `part` is called where ranks have
    given up: it ends what their threads do together.
    """

    def __init__(
        self,
        write: Callable[[CapturedVersion], Published],
        where: str,
        leave: Callable[[], None] | None = None,
        part: Callable[[], None] | None = None,
    ) -> None:
        self._write, self._where, self._leave, self._part = write, where, leave, part
        self._lock = threading.Lock()
        """`with` takes this one and not the condition, whose own `__enter__` can be interrupted when the lock is taken
        already."""
        self._work = threading.Condition(self._lock)
        self.waiting: CapturedVersion | None = None
        """The version that the next publish will be part of."""
        self._in_flight: list[CapturedVersion] = []
        """What the thread is writing as one version."""
        self._failures: deque[BaseException] = deque(maxlen=1)
        """The last failure, until it is raised."""
        self._lasting: BaseException | None = None
        """A failure that stays, whatever becomes of the version in flight."""
        self._given_up = False
        """Whether all ranks have agreed in their own threads that no version can follow."""
        self._behind = False
        """Whether the last version to be written has failed."""
        self._ending = False
        """No further publish will come."""
        self.takes_more = True
        """False where a thread waits for its turn to close: publishes of others are refused."""
        self.closed = False
        """Whether all that was published is in the bucket, or has failed for good."""
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        _here.add(self)

    @property
    def depth(self) -> int:
        """Number of versions that are in flight or waiting: 0 to 2."""
        return bool(self._in_flight) + (self.waiting is not None)

    def submit(self, pending: CapturedVersion, fold: Callable[[Capture, Capture], None]) -> None:
        """Let the thread write a version as soon as it is free, together with one that waits.

        `fold` makes one capture of theirs, to save memory: what is not folded here is folded when it is written.
        """
        with self._lock:
            # first: if this is interrupted, the thread finds whatever waits by then
            self._start()
            waiting = self.waiting
            self.waiting = pending if waiting is None else waiting.merged(pending)
            if waiting is not None:
                fold(waiting.changes, pending.changes)

    def _start(self) -> None:
        """Start the thread, or wake it up."""
        # one that was interrupted before it began is replaced: should it begin after all, it finds that and ends
        if self._thread is None or self._thread.ident is None:
            self._thread = threading.Thread(target=self._loop, name="deltawire-publisher", daemon=True)
            self._thread.start()
        self._work.notify_all()

    def next(self) -> CapturedVersion | None:
        """Wait for the next version and take it, on the thread itself. None if none will come."""
        with self._lock:
            self._work.wait_for(lambda: self.waiting is not None or self._ending or not self._is_own_thread())
            if not self._is_own_thread():
                return None
            pending = self.waiting
            if pending is not None:
                # in this order: a thread that looks without the lock finds it in one of the two
                self._in_flight.append(pending)
                self.waiting = None
            return pending

    def _is_own_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def _unfinished(self) -> set[PublishHandle]:
        waiting = self.waiting
        versions = self._in_flight if waiting is None else [*self._in_flight, waiting]
        return {handle for version in versions for handle in version.handles}

    def wait_for(self, handle: PublishHandle) -> None:
        """Wait until it is done. A failure is raised here, and not a second time by a later publish."""
        try:
            handle.result()
        except BaseException as error:
            if not isinstance(error, _LASTING):
                with suppress(ValueError):
                    self._failures.remove(error)
            raise

    def flush(self, timeout: float | None = None, overdue: Callable[[], None] | None = None) -> None:
        """Wait until all that was submitted before is committed. Raises a failure, or what `overdue` raises."""
        self.refuse_own_thread()
        deadline = time.monotonic() + timeout if timeout is not None else None
        for handle in self._unfinished():
            while not handle.wait(_INTERVAL if deadline is None else min(_INTERVAL, deadline - time.monotonic())):
                if deadline is not None and time.monotonic() > deadline:
                    raise TimeoutError(f"{self._where} has not taken everything within {timeout} s")
                if overdue is not None:
                    overdue()
        self._raise_failure()

    def close(self, timeout: float | None = None, overdue: Callable[[], None] | None = None) -> bool:
        """Publish what waits, then stop. Raises a failure not raised before. After a TimeoutError, call it again.

        Returns False if it was closed before.
        """
        if self.closed:
            return False
        with self._lock:
            self._ending = True
            if self._leave is not None:
                self._start()
            self._work.notify_all()
        try:
            self.flush(timeout, overdue)
            # one that was interrupted before it began has nothing to end
            if self._thread is not None and self._thread.ident is not None:
                self._thread.join(_LAST_MESSAGE)
            self._raise_failure()
        except DeltawireError:
            self.closed = True
            raise
        self.closed = True
        return True

    def refuse_own_thread(self) -> None:
        """Raise PublishFailed on the background thread, which would wait for itself, in a forked process, and where
        the interpreter has ended its threads (`__del__`)."""
        if os.getpid() != self._process:
            raise PublishFailed(
                f"this publisher of {self._where} was made before this process was forked, and its thread is in the "
                "other one; make a publisher in the process that publishes"
            )
        if sys.is_finalizing():
            raise PublishFailed(
                f"the program has ended, and with it the thread that publishes to {self._where}: call `close` before, "
                "or publish within `with Publisher(…)`"
            )
        if self._is_own_thread():
            raise PublishFailed(
                "the thread that publishes cannot publish, flush or close: it would wait for itself; "
                "do that in the training loop"
            )

    def check(self) -> None:
        """Before a publish: raise an earlier failure, unless it is forgiven."""
        if (self._ending or not self.takes_more) and not self.closed:
            raise PublisherClosed(f"this publisher of {self._where} is being closed")
        failure = self._failure()
        if isinstance(failure, SnapshotLost):
            # this publish compares with the bucket, and so carries what that one should have
            self._failures.clear()
        if self.closed or self._leave is None or self._lasting is not None:
            self._raise_failure()

    def give_up(self, error: OutOfStep) -> None:
        """Let all later publishes fail like one that did not get as far as this thread, on all ranks."""
        self._given_up = True
        self._note(error)

    def _note(self, error: BaseException) -> None:
        if isinstance(error, _LASTING):
            # what came first is the cause
            self._lasting = self._lasting or error
        else:
            self._failures.append(error)

    def _failure(self) -> BaseException | None:
        return self._lasting or next(iter([*self._failures]), None)

    def _raise_failure(self) -> None:
        if self.closed:
            raise PublisherClosed(f"this publisher of {self._where} is closed; make a new one to go on")
        if self._lasting is not None:
            raise self._lasting
        try:
            failure = self._failures.pop()
        except IndexError:
            return
        then = LAST_IS_MISSING
        if not (self._ending and self._behind):
            carries = "a later version" if self._ending else "the next publish"
            then = f"Nothing is lost: {carries} carries what this one should have"
        raise PublishFailed(f"publishing to {self._where} failed in the background: {failure}. {then}") from failure

    def _loop(self) -> None:
        while (pending := self.next()) is not None:
            try:
                if self._lasting is not None:
                    # other ranks may have ended for the same reason: none would answer
                    self._part_after_giving_up()
                    raise self._lasting
                published = self._write(pending)
            except BaseException as error:
                log.error("publish failed: %s", error)
                self._note(error)
                self._behind = True
                finish = partial(pending.fail, error)
            else:
                self._behind = False
                if self._leave is not None:
                    self._failures.clear()
                finish = partial(pending.succeed, published)
            # first: nothing that is done counts as unfinished
            self._in_flight = []
            finish()
            # its changes are not needed while this waits for the next
            del pending, finish
        if self._leave is not None and self._is_own_thread() and self._lasting is None:
            try:
                self._leave()
            except BaseException as error:
                self._note(error)
        if self._is_own_thread():
            self._part_after_giving_up()

    def _part_after_giving_up(self) -> None:
        """Ranks give up in their own threads: that of another one may wait for this one to write a version with it."""
        if self._given_up and self._part is not None:
            self._part()


# ── this process ─────────────────────────────────────────────────────────────────────────────────────────────────────

_here: WeakSet[Background] = WeakSet()
"""Those of this process, or of the one that it was forked from."""


@atexit.register
def _tell_of_the_rest() -> None:
    """A program that ends without waiting loses what is not in the bucket by then."""
    for background in [*_here]:
        if background.depth and background._process == os.getpid():
            log.error(
                "the program ends, and what it published last is not in %s yet: call `close` before, or publish within "
                "`with Publisher(…)`",
                background._where,
            )
