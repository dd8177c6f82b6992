"""`deltawire env`: how it begins and ends, and what it refuses."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from env_support import wordle_server
from test_env_server import ask, ws
from typer.testing import CliRunner
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect as connect_now

from deltawire.cli import app


@pytest.mark.parametrize("how, code", [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_it_ends_in_order_with_games_open(how: signal.Signals, code: int) -> None:
    with wordle_server() as (url, process), connect_now(ws(url)) as connection:
        ask(connection, {"type": "reset"})
        process.send_signal(how)
        with pytest.raises(ConnectionClosed) as closed:
            connection.recv(timeout=120)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1012, "told that the service restarts, not cut off"
        assert process.wait(120) == code
        assert process.stderr is not None
        assert process.stderr.read() == ""


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = CliRunner().invoke(app, ["env", "wordle", "--port", port])
    assert result.exit_code == 2
    assert f"port {port} of 127.0.0.1 is in use" in result.stderr
    assert "--port" in result.stderr


@pytest.mark.parametrize(
    "options, part",
    [
        (["wordle", "--words", "nowhere.txt"], "nowhere.txt"),
        (["wordle", "--guesses", "0"], "--guesses"),
        (["wordle", "--idle", "0"], "--idle"),
        (["wordle", "--port", "70000"], "--port"),
        (["chess"], "wordle"),
    ],
)
def test_options_that_cannot_be(options: list[str], part: str) -> None:
    result = CliRunner().invoke(app, ["env", *options], env={"COLUMNS": "160"})
    assert result.exit_code == 2
    assert part in result.stderr


def test_it_needs_its_extra_and_says_so_but_no_torch() -> None:
    code = """
import sys
if len(sys.argv) > 1:
    sys.modules[sys.argv[1]] = None
    from deltawire.cli import app
    app(["env", "wordle", "--port", "0"])
import deltawire_wordle.env_server, deltawire_wordle.env_client
print({"torch", "transformers", "numba"} & {*sys.modules})
"""
    # fastapi and uvicorn come with the extra `serve` too, websockets do not
    for name in ("uvicorn", "websockets"):
        missing = subprocess.run([sys.executable, "-c", code, name], capture_output=True, text=True, timeout=60)
        assert missing.returncode == 2
        assert missing.stderr.startswith(f"deltawire: an environment needs {name}: pip install ")
        assert "[rl]'" in missing.stderr
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert there.stdout == "set()\n"


def test_a_server_with_all_options(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("zebra\n")
    options = ("--words", str(tmp_path / "mine.txt"), "--guesses", "3", "--max-sessions", "1", "--idle", "2m")
    with wordle_server(*options) as (url, _), connect_now(ws(url)) as connection:
        assert ask(connection, {"type": "reset"})["data"]["observation"]["guesses_left"] == 3
        assert ask(connection, {"type": "step", "data": {"guess": "zebra"}})["data"]["done"] is True
        with connect_now(ws(url)) as second:
            assert json.loads(second.recv(timeout=120))["data"]["max_sessions"] == 1
