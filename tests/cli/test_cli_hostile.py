"""What a hostile or broken run, or a full disk, makes of the commands: one line, an exit code, a clean terminal."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deltawire.cli import app
from deltawire.core import keys
from deltawire.core.full import Checkpoint
from deltawire.store import LocalStore
from deltawire.trainer import Publisher
from support import history, model, publish, trained
from tests import forks

BAD = "\x1b]0;pwned\x07\x1b[31m\x9b31m\u202e"
"""Sets a terminal's title, its colours (also in one C1 byte), and the direction of its text."""


def deltawire(*arguments: str) -> Any:
    """A command in this process; whatever it raises that `main` would show as a traceback is raised here."""
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "160"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def obeyed(text: str) -> list[str]:
    """Characters that a terminal would act on."""
    return sorted({char for char in text if not char.isprintable() and char != "\n"})


@pytest.fixture
def run(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "run")
    publish(store, history(3), anchor_ratio=1e9)
    return store


def edit(store: LocalStore, key: str, **changes: Any) -> None:
    store.put(key, json.dumps({**json.loads(store.get(key).data), **changes}).encode())


def test_nothing_of_a_bucket_reaches_the_terminal_as_a_command(run: LocalStore) -> None:
    """Names of the model, metrics, encodings, replicas and their errors, and what error messages quote."""
    edit(run, keys.RUN, model=f"model {BAD}")
    manifest = json.loads(run.get(keys.manifest(2)).data)
    manifest["links"][0] |= {"encoding": f"packed{BAD}", "why": BAD}
    edit(run, keys.manifest(2), metrics={f"loss{BAD}": 1.0}, links=manifest["links"])
    beat = {"run": manifest["run"], "replica": f"one{BAD}", "version": 1, "newest": 2, "healthy": False, "at": 0}
    run.put(keys.replica("one"), json.dumps({**beat, "error": BAD}).encode())
    # a warning of the log quotes the head's bytes
    run.put(keys.HEAD, b'{"run": "\x1b[31m", "version": "\x9b31m"}')
    for arguments in (("log",), ("log", "--json"), ("show",), ("show", "--json"), ("verify",), ("verify", "--json")):
        done = deltawire(*arguments[:1], run.url, *arguments[1:])
        assert obeyed(done.stdout + done.stderr) == [], arguments
        assert done.stdout
        if "--json" in arguments:
            json.loads(done.stdout)
    told = json.loads(deltawire("log", run.url, "--json").stdout)
    assert told["model"] == f"model {BAD}"
    # an error that quotes what it found
    edit(run, keys.manifest(2), run=BAD)
    for arguments in (("checkout", run.url, "-o", "x"), ("verify", run.url), ("-vv", "log", run.url)):
        done = deltawire(*arguments)
        assert done.exit_code == 3
        assert obeyed(done.stdout + done.stderr) == [], arguments


@pytest.mark.parametrize("command", ["checkout", "follow"])
def test_a_folder_name_that_no_disk_can_hold(run: LocalStore, tmp_path: Path, command: str) -> None:
    place = str(tmp_path / ("x" * 300))
    options = ("-o", place) if command == "checkout" else ("--once", "--dir", place)
    done = deltawire(command, run.url, *options)
    assert done.exit_code == 1
    assert done.stderr.count("\n") == 1
    assert f"cannot write {place}: File name too long" in done.stderr


FOLLOW = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
import deltawire.cli.follow as follow
follow.RETRY_S = 0.1
sys.argv = ["deltawire", *sys.argv[2:]]
from deltawire.cli import main
main()
"""


def test_follow_outlives_a_full_disk(tmp_path: Path) -> None:
    """It names the folder, keeps what is there, and goes on when there is room."""
    store, place = LocalStore(tmp_path / "run"), tmp_path / "models" / "chat"
    weights = model(rows=8192)
    room = 100_000
    with Publisher(store) as publisher:
        publisher.publish(weights, wait=True)
        child = forks.Popen(
            [sys.executable, "-c", FOLLOW, str(room), "follow", store.url, "--dir", str(place), "--poll", "0.05"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert child.stderr is not None
            assert child.stdout is not None
            line = child.stderr.readline()
            assert f"cannot write {place}: File too large" in line
            assert not place.exists()
            publisher.publish(trained(weights, 1), wait=True)
            assert child.poll() is None
            resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            assert child.stdout.readline().startswith("v0")
            assert child.stdout.readline().startswith("v1")
            assert Checkpoint(place).schema.elements > 0
        finally:
            child.send_signal(signal.SIGTERM)
            child.communicate(timeout=120)
    assert child.returncode == 0


def test_a_checkout_to_a_full_disk_names_the_folder(run: LocalStore, tmp_path: Path) -> None:
    place = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, "-m", "deltawire.cli", "checkout", run.url, "-o", str(place)], capture_output=True, text=True,
        timeout=100, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)),
    )  # fmt: skip
    assert done.returncode == 1
    assert f"cannot write {place}: File too large" in done.stderr
    assert os.listdir(tmp_path) == ["run"]


def test_an_index_of_a_checkpoint_that_is_not_utf8(tmp_path: Path) -> None:
    folder = tmp_path / "step"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_bytes(b'{"weight_map": {"x": "\xff\xfe"}}')
    done = deltawire("publish", str(folder), str(tmp_path / "run"))
    assert done.exit_code == 3
    assert "does not parse" in done.stderr
    assert done.stderr.count("\n") == 1
