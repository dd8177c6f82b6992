"""The trainer as a process, through a real S3 server that is killed on the way and comes back."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from deltawire.bucket.run import Run
from deltawire.bucket.verify import verify
from deltawire_wordle.processes import ChildProcess, free_port
from deltawire_wordle.seaweed import SeaweedFS
from deltawire_wordle.train import reached

QUIET = {"OMP_NUM_THREADS": "1", "DELTAWIRE_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture
def boxes() -> Iterator[list[ChildProcess]]:
    made: list[ChildProcess] = []
    yield made
    ChildProcess.stop_all(made)


def heard(box: ChildProcess, kind: str) -> dict[str, Any]:
    """The next event of a kind."""
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and (box.running or not box.events.empty()):
        if not box.events.empty() and (event := box.events.get())["event"] == kind:
            return event
        time.sleep(0.02)
    pytest.fail(f"no {kind} from the {box.name}: {box.last_log_line}")


def test_a_goal_is_reached_by_all_recent_games_together() -> None:
    solved = deque([0.9, 0.6], maxlen=3)
    assert not reached(0.5, solved), "too few games to tell"
    solved += [0.6]
    assert reached(0.7, solved)
    assert not reached(0.71, solved)
    solved += [0.8]
    assert not reached(0.7, solved), "the first step is forgotten"
    assert not reached(None, solved)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_bucket_that_dies_and_comes_back(tmp_path: Path, boxes: list[ChildProcess]) -> None:
    with SeaweedFS(tmp_path / "s3") as server:
        run, where = "s3://deltawire/wordle", {**QUIET, **server.environment}
        command = [sys.executable, "-m", "deltawire.cli"]
        games, port = ["--words", "toy", "--guesses", "5"], str(free_port())
        environment = ChildProcess(
            "environment", [*command, "env", "wordle", *games, "--port", "0", "--json"], tmp_path
        )
        replica = ChildProcess(
            "replica", [*command, "serve", run, "--port", port, "--poll", "0.1", "--json"], tmp_path, where
        )
        boxes += [environment, replica]
        environment.start()
        replica.start()
        trainer = ChildProcess(
            "trainer",
            [
                sys.executable, "-m", "deltawire_wordle.train", "--run", run,
                "--env", environment.ready("ready")["url"], "--server", f"http://127.0.0.1:{port}",
                "--steps", "16", "--games", "0", "--staleness", "2",
                "--secrets", "2", "--generations", "4", "--workers", "2",
            ],
            tmp_path,
            where,
        )  # fmt: skip
        boxes.append(trainer)
        trainer.start()
        while heard(trainer, "step")["step"] < 3:
            pass
        server.kill()
        time.sleep(3)
        assert trainer.running
        assert replica.running
        server.start()
        done = heard(trainer, "done")
        live = httpx.get(f"http://127.0.0.1:{port}/deltawire/fingerprint", timeout=60).json()
        assert (live["version"], live["sha256"]) == (done["version"], done["sha256"])
        assert done["step"] == 16
        found = verify(Run.open(server.store("deltawire/wordle")))
        assert found.ok
        assert found.versions == done["version"] + 1
