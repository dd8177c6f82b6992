"""Child processes with events, and their ends."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from deltawire_wordle.errors import ServerUnavailable
from deltawire_wordle.processes import ChildProcess, free_port

READY = 'import sys, time; print(\'hello\'); print(\'{"event": "ready", "port": 7}\', flush=True); time.sleep(60)'


def child(folder: Path, code: str) -> ChildProcess:
    process = ChildProcess("child", [sys.executable, "-S", "-c", code], folder)
    process.start()
    return process


def test_events_are_read_and_other_lines_are_logged(tmp_path: Path) -> None:
    process = child(tmp_path, READY)
    assert process.ready("ready")["port"] == 7
    assert process.running
    ChildProcess.stop_all([process])
    assert process.finished
    assert process.exit_code == -15
    assert "hello" in process.log_file.read_text()


def test_a_process_that_does_not_start_says_why(tmp_path: Path) -> None:
    process = child(tmp_path, "import sys; sys.exit('out of luck')")
    with pytest.raises(ServerUnavailable, match=r"the child did not start \(1\): out of luck"):
        process.ready("ready")


def test_what_a_process_said_last_is_last_in_its_log(tmp_path: Path) -> None:
    code = "import sys, time; print('listening', flush=True); time.sleep(0.5); sys.exit('out of luck')"
    process = child(tmp_path, code)
    with pytest.raises(ServerUnavailable):
        process.ready("ready")
    assert process.last_log_line == "out of luck"


def test_ports_differ() -> None:
    assert len({free_port() for _ in range(5)}) == 5
