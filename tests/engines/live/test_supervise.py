"""The process that waits for an engine's server: what it returns, whom it tells, what it leaves behind."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deltawire.engines.live import supervise

ENGINE = """
import os, signal, sys
how = sys.argv[1]
if how == "in order":
    # as uvicorn does: it ends with 0 at either signal, and counts them
    got = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: got.append(number))
else:
    # whatever the tests were started with: nohup has SIGHUP ignored
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
print(os.getpid(), flush=True)
if how.isdigit():
    sys.exit(int(how))
if how == "out of memory":
    os.kill(os.getpid(), signal.SIGKILL)
while how != "in order" or not got:
    signal.pause()
signal.sigtimedwait([], 0.3)
print(*got, flush=True)
"""


def started(tmp_path: Path, how: str, **options: object) -> subprocess.Popen[str]:
    (tmp_path / "engine.py").write_text(ENGINE)
    (tmp_path / "made" / "m").mkdir(parents=True)
    code = (
        "import sys; from deltawire.engines.live.supervise import become; import os\n"
        "become(sys.argv[2:], os.environ, sys.argv[1])"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "made"), sys.executable, str(tmp_path / "engine.py"), how]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize("how", ["in order", "at once"])
@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 0), (signal.SIGHUP, 0)])
def test_a_signal_ends_both(tmp_path: Path, how: str, number: signal.Signals, code: int) -> None:
    with started(tmp_path, how) as process:
        assert process.stdout is not None
        engine = int(process.stdout.readline())
        assert engine != process.pid
        process.send_signal(number)
        assert process.stdout.read() == (f"{number.value}\n" if how == "in order" else "")
        assert process.wait(60) == code
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("how, code", [("0", 0), ("3", 3), ("out of memory", 137)])
def test_a_server_that_ends_by_itself(tmp_path: Path, how: str, code: int) -> None:
    with started(tmp_path, how) as process:
        assert process.wait(60) == code
    assert not (tmp_path / "made").exists()


def test_ctrl_c_in_a_terminal_reaches_the_server_once(tmp_path: Path) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        with started(tmp_path, "in order") as process:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            assert process.stdout is not None
            os.write(1, b"ready" if process.stdout.readline() else b"no engine, code 0")
            os.write(1, f"got {process.stdout.read().strip()}, code {process.wait(60)};".encode())
            os._exit(0)
    seen = b""
    while b";" not in seen:
        if b"ready" in seen and b"^C" not in seen:
            os.write(terminal, b"\x03")
        seen += os.read(terminal, 1000)
    os.waitpid(pid, 0)
    os.close(terminal)
    assert b"got 2, code 130" in seen


def test_a_server_does_not_outlive_a_process_that_was_killed(tmp_path: Path) -> None:
    with started(tmp_path, "in order") as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.kill()
        # the server has the other end of the pipe
        assert process.stdout.read() == f"{signal.SIGTERM.value}\n"
        assert process.wait(60) == -signal.SIGKILL


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    command = [sys.executable, "-I", supervise.__file__, str(tmp_path / "made"), str(tmp_path / "nothing")]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 1
    assert found.stderr.startswith("deltawire: ")
    assert "nothing" in found.stderr
    assert not (tmp_path / "made").exists()


def test_what_was_started_before_leaves_no_zombie(tmp_path: Path) -> None:
    """What compiles beside the engine (ahead.py) is a child of the process that becomes this one."""
    code = (
        "import sys; from deltawire.engines.live.supervise import become; import os, subprocess\n"
        "print(subprocess.Popen(['sleep', '0.5']).pid, flush=True)\n"
        "become(sys.argv[1:], os.environ)"
    )
    command = [sys.executable, "-c", code, "sleep", "60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        beside = int(process.stdout.readline())
        while Path(f"/proc/{beside}").exists():
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
