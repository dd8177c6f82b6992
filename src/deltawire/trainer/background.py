"""The background thread of a publisher: one version in flight, and one that waits, into which later publishes merge."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

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
from .writer import PendingVersion, Published, PublishHandle

log = logging.getLogger("deltawire")

_LASTING = (WriterConflict, RankLost, OutOfStep, RunNotFound, RunReplaced)
"""Failures after which no later publish can succeed."""

Captured = PendingVersion[Capture]

_LOOK = 0.5
_LAST_MESSAGE = 10.0
"""Seconds that `close` waits for the last message to other ranks: all that was published here is in the bucket then."""


class Background:
    """A thread that writes captured versions, one after the other. Any thread may call its methods.

    Where several ranks publish together, `leave` is called by the thread when no further publish will come, unless a
    lasting failure came before. Then a failure is not raised by the next publish, nor at all once a later version has
    made up for it: a rank that raised where others do not would leave them waiting.
    """

    def __init__(
        self, write: Callable[[Captured], Published], where: str, leave: Callable[[], None] | None = None
    ) -> None:
        self._write, self._where, self._leave = write, where, leave
        self._work = threading.Condition()
        self._waiting: Captured | None = None
        self._in_flight: Captured | None = None
        self._unfinished: set[PublishHandle] = set()
        """Of all versions that were submitted, also one that is withdrawn for a moment."""
        self._failure: BaseException | None = None
        self._ending = False
        """No further publish will come."""
        self._closed = False
        self._thread: threading.Thread | None = None
        self._process = os.getpid()

    @property
    def depth(self) -> int:
        """Number of versions that are in flight or waiting: 0 to 2."""
        with self._work:
            return (self._in_flight is not None) + (self._waiting is not None)

    def withdraw(self) -> Captured | None:
        """Take the version that waits away from the thread, to merge a publish into it. `submit` gives it back."""
        with self._work:
            waiting, self._waiting = self._waiting, None
            return waiting

    def submit(self, pending: Captured | None) -> None:
        """Let the thread write a version as soon as it is free."""
        with self._work:
            self._waiting = pending
            if pending is not None:
                self._unfinished.update(pending.handles)
                self._start()
            self._work.notify_all()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="deltawire-publisher", daemon=True)
            self._thread.start()

    def next(self) -> Captured | None:
        """Wait for the next version and take it, on the thread itself. None if none will come."""
        with self._work:
            self._work.wait_for(lambda: self._waiting is not None or self._ending)
            pending, self._waiting = self._waiting, None
            self._in_flight = self._in_flight or pending
            return pending

    def wait_for(self, handle: PublishHandle) -> None:
        """Wait until it is done. A failure is raised here, and not a second time by a later publish."""
        try:
            handle.result()
        except BaseException as error:
            with self._work:
                if self._failure is error and not isinstance(error, _LASTING):
                    self._failure = None
            raise

    def flush(self, timeout: float | None = None, overdue: Callable[[], None] | None = None) -> None:
        """Wait until all that was submitted before is committed. Raises a failure, or what `overdue` raises."""
        self.refuse_own_thread()
        deadline = time.monotonic() + timeout if timeout is not None else None
        with self._work:
            todo = self._unfinished.copy()
            while not todo.isdisjoint(self._unfinished):
                if deadline is not None and time.monotonic() > deadline:
                    raise TimeoutError(f"{self._where} has not taken everything within {timeout} s")
                if overdue is not None:
                    overdue()
                self._work.wait(_LOOK if deadline is None else min(_LOOK, max(deadline - time.monotonic(), 0)))
        self._raise_failure()

    def close(self, timeout: float | None = None, overdue: Callable[[], None] | None = None) -> bool:
        """Publish what waits, then stop. Raises a failure not raised before. After a TimeoutError, call it again.

        Returns False if it was closed before.
        """
        if self._closed:
            return False
        with self._work:
            self._ending = True
            if self._leave is not None:
                self._start()
            self._work.notify_all()
        try:
            self.flush(timeout, overdue)
            if self._thread is not None:
                self._thread.join(_LAST_MESSAGE)
            self._raise_failure()
        except DeltawireError:
            self._closed = True
            raise
        self._closed = True
        return True

    def refuse_own_thread(self) -> None:
        """Raise PublishFailed on the background thread, which would wait for itself, and in a forked process."""
        if os.getpid() != self._process:
            raise PublishFailed(
                f"this publisher of {self._where} was made before this process was forked, and its thread is in the "
                "other one; make a publisher in the process that publishes"
            )
        if threading.current_thread() is self._thread:
            raise PublishFailed(
                "the thread that publishes cannot publish, flush or close: it would wait for itself; "
                "do that in the training loop"
            )

    def check(self) -> None:
        """Before a publish: raise an earlier failure, unless it is forgiven."""
        if self._ending and not self._closed:
            raise PublisherClosed(f"this publisher of {self._where} is being closed")
        if self._closed or self._leave is None or isinstance(self._failure, _LASTING):
            self._raise_failure()

    def _raise_failure(self) -> None:
        if self._closed:
            raise PublisherClosed(f"this publisher of {self._where} is closed; make a new one to go on")
        with self._work:
            failure = self._failure
            if not isinstance(failure, _LASTING):
                self._failure = None
        if isinstance(failure, _LASTING):
            raise failure
        if failure is not None:
            raise PublishFailed(
                f"publishing to {self._where} failed in the background: {failure}. "
                "Nothing is lost: the next publish carries what this one should have"
            ) from failure

    def _loop(self) -> None:
        while (pending := self.next()) is not None:
            try:
                published = self._write(pending)
            except BaseException as error:
                log.error("publish failed: %s", error)
                with self._work:
                    self._failure = error
                pending.fail(error)
            else:
                if self._leave is not None:
                    with self._work:
                        self._failure = None
                pending.succeed(published)
            with self._work:
                self._in_flight = None
                self._unfinished.difference_update(pending.handles)
                self._work.notify_all()
            # its changes are not needed while this waits for the next
            del pending
        if self._leave is not None and not isinstance(self._failure, _LASTING):
            try:
                self._leave()
            except BaseException as error:
                self._failure = error
