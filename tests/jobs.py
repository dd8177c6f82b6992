"""Runs the tests in several processes (`pytest --jobs 3`): they are collected once, then this process forks.

Workers that start on their own would import torch and transformers and collect all tests again, 12 to 19 CPU seconds
each. A file's tests stay in one worker, so that what they share is made once.
"""

from __future__ import annotations

import atexit
import io
import os
import sys
import traceback
from collections import deque
from contextlib import suppress
from itertools import count, groupby
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import pytest


class Worker:
    """A forked process, from the outside."""

    def __init__(self, session: pytest.Session, number: int) -> None:
        self.number = number
        self.left: deque[int] = deque()
        """Numbers of the tests it was given and has not finished."""
        self.pipe, there = Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            self.pipe.close()
            _work(session, there, number)
        there.close()

    def give(self, tests: list[int]) -> None:
        """Let it run these next; none: let it end after the test it is at."""
        self.left.extend(tests)
        # one that is gone is noticed at its end of the pipe
        with suppress(OSError):
            self.pipe.send(tests)

    def ended(self) -> int:
        """Wait for it; returns its exit code, or a signal's number below zero."""
        self.pipe.close()
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class Run:
    """All tests of a session in several workers, reported here."""

    def __init__(self, session: pytest.Session, jobs: int) -> None:
        self._session, self._hook, self._config = session, session.config.hook, session.config
        files = groupby(range(len(session.items)), lambda number: session.items[number].path)
        self._files = deque([*tests] for _, tests in files)
        self._workers: dict[Connection, Worker] = {}
        self._numbers = count()
        self._finished = 0
        # before the workers ask for it, each for itself
        self._config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        # tests of several files come in turn
        reporter: Any = self._config.pluginmanager.getplugin("terminalreporter")
        reporter.showfspath = False
        try:
            while self._files and len(self._workers) < jobs:
                self._start(self._files.popleft())
            while self._workers:
                for pipe in wait([*self._workers]):
                    self._hear(self._workers[pipe])  # type: ignore[index]
        finally:
            for worker in self._workers.values():
                worker.ended()
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        if self._finished != len(session.items):
            raise RuntimeError(f"{self._finished} tests of {len(session.items)} were run")

    @property
    def _stopping(self) -> bool:
        return bool(self._session.shouldfail or self._session.shouldstop)

    def _start(self, tests: list[int]) -> None:
        worker = Worker(self._session, next(self._numbers))
        self._workers[worker.pipe] = worker
        worker.give(tests)

    def _hear(self, worker: Worker) -> None:
        try:
            told = worker.pipe.recv()
        except (EOFError, OSError):
            self._lose(worker)
            return
        for kind, value in told:
            self._take(worker, kind, value)

    def _take(self, worker: Worker, kind: str, value: Any) -> None:
        if kind == "report":
            self._report(self._hook.pytest_report_from_serializable(config=self._config, data=value))
        elif kind == "warning":
            self._hook.pytest_warning_recorded.call_historic(kwargs=value)
        elif kind == "finished":
            self._finished += 1
            worker.left.popleft()
        else:
            worker.give(self._files.popleft() if self._files else [])

    def _lose(self, worker: Worker) -> None:
        """A worker ended: in order, or in the middle of a test, and another one runs what it left."""
        del self._workers[worker.pipe]
        code = worker.ended()
        if self._stopping:
            return
        how = f"the worker ended with exit code {code}" if code >= 0 else f"the worker was ended by signal {-code}"
        if worker.left:
            item = self._session.items[worker.left.popleft()]
            self._finished += 1
            self._report(pytest.TestReport(item.nodeid, item.location, {}, "failed", how, "call"))
        elif code:
            raise RuntimeError(f"{how} after its last test: what its tests share did not end well")
        if (worker.left or self._files) and not self._stopping:
            self._start([*worker.left] or self._files.popleft())

    def _report(self, report: pytest.TestReport) -> None:
        if report.when == "setup":
            self._hook.pytest_runtest_logstart(nodeid=report.nodeid, location=report.location)
        self._hook.pytest_runtest_logreport(report=report)
        if report.when == "teardown":
            self._hook.pytest_runtest_logfinish(nodeid=report.nodeid, location=report.location)
        if self._stopping:
            self._files.clear()
            for worker in self._workers.values():
                worker.give([])


def leave(code: int) -> NoReturn:
    """End this process; the interpreter's own end takes seconds to free all that was imported."""
    atexit._run_exitfuncs()
    for stream in (sys.__stdout__, sys.__stderr__):
        if stream and not stream.closed:
            stream.flush()
    os._exit(code)


# ── in a worker ──────────────────────────────────────────────────────────────────────────────────────────────────────


class _Sender:
    """Sends what a worker has to report to the process that shows it, once per test."""

    def __init__(self, config: pytest.Config, pipe: Connection) -> None:
        self._config, self._pipe = config, pipe
        self._told: list[tuple[str, Any]] = []

    def send(self, kind: str) -> None:
        self._pipe.send([*self._told, (kind, None)])
        self._told.clear()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._told.append(("report", data))

    def pytest_warning_recorded(self, warning_message: Any, when: str, nodeid: str, location: Any) -> None:
        # a warning of a class that cannot travel goes as its text
        warning_message.message, warning_message.category = UserWarning(str(warning_message.message)), UserWarning
        warning_message.source = None
        fields = {"warning_message": warning_message, "when": when, "nodeid": nodeid, "location": location}
        self._told.append(("warning", fields))


def _work(session: pytest.Session, pipe: Connection, number: int) -> NoReturn:
    config, code = session.config, 1
    try:
        # output and folders that were inherited are those of the process that shows the results
        plugins = config.pluginmanager
        capture: Any = plugins.getplugin("capturemanager")
        reporter: Any = plugins.getplugin("terminalreporter")
        capture.stop_global_capturing()
        reporter._tw._file = io.StringIO()
        capture.start_global_capturing()
        capture.suspend_global_capture()
        factory: Any = config._tmp_path_factory  # type: ignore[attr-defined]
        factory._basetemp = factory.getbasetemp() / f"worker-{number}"
        factory._basetemp.mkdir(mode=0o700)
        # else the warnings so far are told again
        history: Any = config.hook.pytest_warning_recorded._call_history
        history.clear()
        sender = _Sender(config, pipe)
        plugins.register(sender)
        while tests := pipe.recv():
            for at, test in enumerate(tests):
                # what the session shares outlives a file
                following = session.items[tests[at + 1]] if at + 1 < len(tests) else session
                config.hook.pytest_runtest_protocol(item=session.items[test], nextitem=following)
                sender.send("finished")
                if pipe.poll():
                    break
            else:
                sender.send("next")
        session._setupstate.teardown_exact(None)
        code = 0
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    finally:
        # the interpreter's end would go on where this process was forked
        leave(code)
