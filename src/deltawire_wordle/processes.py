"""Child processes that end with the process that started them, however that ends."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from deltawire.errors import DeltawireError

from .errors import ServerUnavailable

GRACE_S = 5.0
_PORTS = range(22_700, 32_000)


def say(event: str, **more: Any) -> None:
    """Report an event to the parent, as one line of JSON; in one piece, since threads report too."""
    sys.stdout.write(json.dumps({"event": event, "at": time.time(), **more}) + "\n")
    sys.stdout.flush()


@contextmanager
def plain_errors() -> Iterator[None]:
    """End the process with the message of a deltawire error and without a traceback; after Ctrl-C with 130."""
    try:
        yield
    except DeltawireError as error:
        raise SystemExit(f"deltawire: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


class ChildProcess:
    """A process with a name and a log file, whose standard output is lines of JSON.

    It has a session of its own, so that Ctrl-C reaches only the process that started it. Start it from the main thread:
    the kernel ends it together with that thread.
    """

    def __init__(
        self, name: str, command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.name, self._command, self._environment = name, [*command], {**os.environ, **(environment or {})}
        self.log_file = folder / f"{name}.log"
        self.events: queue.Queue[dict[str, Any]] = queue.Queue()
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    def start(self) -> None:
        with open(self.log_file, "a") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True,
                env=self._environment, start_new_session=True,
                preexec_fn=WITH_PARENT,
            )  # fmt: skip
        self._reader = threading.Thread(target=self._listen, args=(self._process,), daemon=True)
        self._reader.start()

    def ready(self, event: str) -> dict[str, Any]:
        """Wait for the event that reports that it is up, and return it."""
        while True:
            with suppress(queue.Empty):
                found = self.events.get(timeout=0.2)
                if found.get("event") == event:
                    return found
            if self.finished:
                raise ServerUnavailable(f"the {self.name} did not start ({self.exit_code}): {self.last_log_line}")

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll() if self._process else None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def finished(self) -> bool:
        """Whether it has ended and all its events were read."""
        return not self.running and not (self._reader and self._reader.is_alive()) and self.events.empty()

    @property
    def last_log_line(self) -> str:
        """The last line of its log."""
        lines = [line.strip() for line in self.log_file.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1][-500:] if lines else "its log is empty"

    def kill(self) -> None:
        """Kill it and everything it started (SIGKILL)."""
        self._signal(signal.SIGKILL)
        self._wait(None)

    @staticmethod
    def stop_all(processes: Sequence[ChildProcess]) -> None:
        """Terminate all of them at the same time; kill those that take longer than GRACE_S."""
        for process in processes:
            process._signal(signal.SIGTERM)
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process._wait(GRACE_S)
            # and whatever it has started and left behind
            process._signal(signal.SIGKILL)
            process._wait(None)

    def _wait(self, seconds: float | None) -> None:
        if self._process is not None:
            self._process.wait(seconds)
            if self._reader is not None and not self.running:
                self._reader.join(GRACE_S)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        # line by line: what it says on standard error stands where it belongs
        with open(self.log_file, "a", buffering=1) as log:
            for line in process.stdout:
                event = None
                with suppress(ValueError):
                    event = json.loads(line)
                if isinstance(event, dict):
                    self.events.put(event)
                else:
                    log.write(line)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignore Ctrl-C in the block."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


_numbers = itertools.count(16 * os.getpid())
"""Processes that look at the same time start far from each other: a port is taken only once somebody listens."""


def free_port() -> int:
    """Return a free port, another one each time.

    Below the range from which the kernel takes ports of clients, one of which could block ours after a restart.
    """
    for number in itertools.islice(_numbers, len(_PORTS)):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", _PORTS[number % len(_PORTS)]))
            return _PORTS[number % len(_PORTS)]
    raise OSError(f"no free port between {_PORTS.start} and {_PORTS.stop}")


_libc = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


WITH_PARENT = _die_with_parent if sys.platform == "linux" else None
"""A `preexec_fn` by which a process is killed when the one that started it ends. Only Linux can do that."""
