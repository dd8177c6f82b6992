"""`python -SI forked.py ADDRESS MODULE ARGUMENT…` runs a module in a fork of the process at that address (forks.py).

It has the streams, folder and environment of this process; signals are passed on.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any


def start(
    address: str, program: dict[str, Any], cwd: str, env: Mapping[str, str], session: bool, files: Sequence[int]
) -> tuple[int, socket.socket]:
    """Its process, and where its exit status will be told. Files after the three streams keep their numbers."""
    there = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    there.connect(f"\0{address}")
    numbers = [0, 1, 2, *files[3:]]
    task = {"program": program, "cwd": cwd, "env": {**env}, "session": session, "files": numbers}
    socket.send_fds(there, [json.dumps(task).encode()], files)
    return int(there.recv(64)), there


def main(address: str, module: str, *arguments: str) -> None:
    program = {"how": "-m", "what": module, "arguments": arguments, "watched": False}
    pid, status = start(address, program, os.getcwd(), os.environ, False, (0, 1, 2))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: os.kill(pid, number))
    code = os.waitstatus_to_exitcode(int(status.recv(64)))
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    main(*sys.argv[1:])
