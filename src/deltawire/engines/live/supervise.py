"""The process of `deltawire serve --engine`: waits for the engine's server, passes signals on, cleans up behind it.

Started as a program of its own with nothing but the standard library, so that it takes 10 MB and has one thread.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}

_SI_KERNEL = 0x80
"""Sent by a terminal: to all processes in front of it, the engine's too."""

_PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None)


def end_with_parent(number: signal.Signals) -> None:
    """Have this process sent a signal when the one that started it ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, number)


def become(line: Sequence[str], environment: Mapping[str, str], folder: str = "") -> NoReturn:
    """Replace this process by one that runs an engine's server, and then removes `folder`, if one is given."""
    # blocked from here on: none must come between the two programs
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        # -I: no module of this folder in place of one of the standard library
        os.execve(sys.executable, [sys.executable, "-I", os.path.abspath(__file__), folder, *line], environment)
    finally:
        # where that failed
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run(line: Sequence[str]) -> int:
    """Run a server until it ends. Returns 130 after Ctrl-C, 0 after SIGTERM or SIGHUP, else the server's own code.

    Engines end in order at either signal, each with a code of its own: 0 at Ctrl-C, death by a signal at SIGTERM.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {*SIGNALS, signal.SIGCHLD})
    asked = 0

    def start() -> None:
        # it does not stay behind where this process is killed
        end_with_parent(signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {*SIGNALS, signal.SIGCHLD})

    server = subprocess.Popen([*line], preexec_fn=start)
    while server.poll() is None:
        got = signal.sigwaitinfo({*SIGNALS, signal.SIGCHLD})
        _reap_others(server.pid)
        if got.si_signo != signal.SIGCHLD:
            asked = asked or got.si_signo
            if got.si_code != _SI_KERNEL:
                server.send_signal(got.si_signo)
    code: int = server.returncode
    if asked == signal.SIGINT:
        return 130
    if code < 0:
        return 0 if asked else 128 - code
    return code


def _reap_others(server: int) -> None:
    """Take note of the end of processes that this one had started before it became what it is (ahead.py)."""
    while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        if ended.si_pid == server:
            break
        os.waitpid(ended.si_pid, 0)


if __name__ == "__main__":
    try:
        _code = run(sys.argv[2:])
    except OSError as error:
        _code = 1
        print(f"deltawire: {error}", file=sys.stderr)
    finally:
        if sys.argv[1]:
            shutil.rmtree(sys.argv[1], ignore_errors=True)
    sys.exit(_code)
