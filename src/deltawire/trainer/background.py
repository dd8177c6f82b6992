"""The background thread of a publisher: one job in flight, and one that waits and takes in every further publish."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

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
from .writer import Published

log = logging.getLogger("deltawire")

_LASTING = (WriterConflict, RankLost, OutOfStep, RunNotFound, RunReplaced)
"""Failures after which no later publish can succeed."""

_LOOK = 0.5
_LAST_MESSAGE = 10.0
"""Seconds that `close` waits for the last message to other ranks: all that was published here is in the bucket then."""


class PublishHandle:
    """Returned by `publish` at once. `result()` waits for the version that carries the publish."""

    def __init__(self) -> None:
        self._future: Future[Published] = Future()

    def result(self, timeout: float | None = None) -> Published:
        """Wait for the version and return it. Raises what made it fail, or TimeoutError after `timeout` seconds."""
        return self._future.result(timeout)

    def done(self) -> bool:
        """Whether the version is committed or has failed."""
        return self._future.done()

    def succeed(self, published: Published) -> None:
        self._future.set_result(published)

    def fail(self, error: BaseException) -> None:
        self._future.set_exception(error)


@dataclass(slots=True)
class Job:
    """A version to be: what was captured by one or several publishes."""

    capture: Capture
    handles: list[PublishHandle] = field(default_factory=list)
    step: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    held: float = 0.0
    """Seconds the training loop was blocked."""
    last: int = 0
    """Number of the newest publish in it."""

    def add(self, later: Job, capture: Capture) -> None:
        """Take in a later job; `capture` is both captures merged."""
        self.capture = capture
        self.handles += later.handles
        self.step, self.metrics, self.last = later.step, later.metrics, later.last
        self.held += later.held


class Background:
    """A thread that turns jobs into versions, one after the other.

    `forgiving`: a failure is not raised by the next publish, nor at all once a later version has made up for it.
    `leave`: called by the thread when no further publish will come, unless a lasting failure came before.
    """

    def __init__(
        self,
        publish: Callable[[Job], Published],
        where: str,
        *,
        forgiving: bool = False,
        leave: Callable[[], None] | None = None,
    ) -> None:
        self._publish, self._where, self._forgiving, self._leave = publish, where, forgiving, leave
        self._work = threading.Condition()
        self._waiting: Job | None = None
        self._in_flight: Job | None = None
        self._unfinished: set[PublishHandle] = set()
        """Of all jobs that were submitted, also one that is withdrawn for a moment."""
        self.leftover: list[Capture] = []
        """Captures whose publishing failed, oldest first: the next job carries them."""
        self._failure: BaseException | None = None
        self._ending = False
        """No further publish will come."""
        self._closed = False
        self._thread: threading.Thread | None = None
        self._process = os.getpid()

    @property
    def depth(self) -> int:
        with self._work:
            return (self._in_flight is not None) + (self._waiting is not None)

    def withdraw(self) -> Job | None:
        """Take the job that waits away from the thread while it grows. Give it back with `submit`."""
        with self._work:
            job, self._waiting = self._waiting, None
            return job

    def submit(self, job: Job | None) -> None:
        with self._work:
            self._waiting = job
            if job is not None:
                self._unfinished.update(job.handles)
                self._start()
            self._work.notify_all()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="deltawire-publisher", daemon=True)
            self._thread.start()

    def next(self) -> Job | None:
        """The next job, for the thread itself in the middle of a job: waits for it. None if none will come."""
        with self._work:
            self._work.wait_for(lambda: self._waiting is not None or self._ending)
            job, self._waiting = self._waiting, None
            return job

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

    def close(self, timeout: float | None = None, overdue: Callable[[], None] | None = None) -> None:
        """Publish what waits, then stop. Raises a failure not raised before. After a TimeoutError, call it again."""
        if self._closed:
            return
        with self._work:
            self._ending = True
            if self._leave is not None:
                self._start()
            self._work.notify_all()
        try:
            self.flush(timeout, overdue)
            if self.leftover:
                raise PublishFailed(f"the last changes were never published to {self._where}: that failed")
            if self._thread is not None:
                self._thread.join(_LAST_MESSAGE)
            self._raise_failure()
        except DeltawireError:
            self._closed = True
            raise
        self._closed = True

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
        if self._closed or not self._forgiving or isinstance(self._failure, _LASTING):
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
        while True:
            with self._work:
                self._work.wait_for(lambda: self._waiting is not None or self._ending)
                job, self._waiting = self._waiting, None
                self._in_flight = job
            if job is None:
                self._end()
                return
            try:
                published = self._publish(job)
            except BaseException as error:
                log.error("publish failed: %s", error)
                with self._work:
                    self._failure = error
                    self.leftover.append(job.capture)
                for handle in job.handles:
                    handle.fail(error)
            else:
                if self._forgiving:
                    self._failure = None
                for handle in job.handles:
                    handle.succeed(published)
            with self._work:
                self._in_flight = None
                self._unfinished.difference_update(job.handles)
                self._work.notify_all()

    def _end(self) -> None:
        if self._leave is None or isinstance(self._failure, _LASTING):
            return
        try:
            self._leave()
        except BaseException as error:
            self._failure = error
