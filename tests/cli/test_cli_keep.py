"""keep: what is due, once or for as long as it runs."""

from __future__ import annotations

import json
import random
import threading
import time
from pathlib import Path
from typing import IO

import numpy as np
import pytest
from cli_support import invoke, run_until_sigterm, spawn

from deltawire.bucket.run import Run
from deltawire.bucket.verify import verify
from deltawire.core import keys
from deltawire.replica import Replica
from deltawire.trainer import Publisher
from keeping import large, settings, step, template
from support import blank, same


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    settings(monkeypatch)


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A run of 40 versions in a folder."""
    source, folder = template(40).store, tmp_path / "run"
    for item in source.list():
        path = folder / item.key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(source.get(item.key).data)
    return folder


def test_once(kept: Path) -> None:
    said = invoke("keep", kept, "--once", "--since", 0, "--anchor-every", 16, "--json").stdout.splitlines()
    lines = [json.loads(line) for line in said]
    assert [line["version"] for line in lines] == list(range(1, 40))
    assert lines[15]["added"][-1]["kind"] == "anchor"
    assert {link["base"] for link in lines[7]["added"]} == {0, 4, 5, 6}
    assert verify(Run.open(str(kept))).ok
    assert invoke("keep", kept, "--once").stdout == ""
    text = invoke("log", kept).stdout
    assert "keeper-" in text


def test_without_skip_deltas_and_anchors(kept: Path) -> None:
    text = invoke("keep", kept, "--once", "--since", 8, "--longest-skip", 0, "--no-anchors").stdout
    assert text.startswith("v9  ")
    assert "skip" not in text
    assert Run.open(str(kept)).added.between(-1, 99) == []
    text = invoke("keep", kept, "--once", "--longest-skip", 3).stdout
    assert text == ""


def test_a_bad_object_is_told_by_the_exit_code(kept: Path) -> None:
    key = Run.open(str(kept)).manifest(35).links[0].objects[0].key
    (kept / key).write_bytes(b"not this")
    said = invoke("keep", kept, "--once", "--since", 32, code=3).stdout
    assert "BAD: version 35 cannot be reached" in said


def test_mirrors_and_retention(kept: Path, tmp_path: Path) -> None:
    options = ("--mirror", tmp_path / "mirror", "--keep-last", 5, "--grace", "0s", "--anchor-every", 16)
    invoke("keep", kept, "--once", "--since", 0, *options)
    for folder in (kept, tmp_path / "mirror"):
        run = Run.open(str(folder))
        assert run.listed()[0] == 32
        assert verify(run).ok


def test_wrong_use(kept: Path, tmp_path: Path) -> None:
    invoke("keep", kept, "--keep-every", 5, code=2)
    invoke("keep", kept, "--id", "../x", code=2)
    invoke("keep", f"{kept}@3", code=2)
    invoke("keep", tmp_path / "nothing", "--once", code=4)
    assert "1,000 versions behind" in invoke("keep", "--help").stdout


@pytest.mark.slow
def test_it_follows_until_it_is_told_to_end(kept: Path) -> None:
    def client(out: IO[str], _: IO[str]) -> None:
        while json.loads(out.readline())["version"] != 39:
            pass
        assert (kept / keys.KEEPER).exists()

    assert run_until_sigterm(client, "keep", kept, "--since", 36, "--json", "--poll", 0.1) == 0
    assert not (kept / keys.KEEPER).exists()


def test_show_tells_of_added_links(kept: Path) -> None:
    invoke("keep", kept, "--once", "--since", 32)
    said = json.loads(invoke("show", f"{kept}@36", "--json").stdout)
    assert {link["base"] for link in said["added"]} == {32, 33, 34}
    assert invoke("show", f"{kept}@36").stdout.count("added later") == 3


def test_views(tmp_path: Path) -> None:
    run, derived = tmp_path / "run", tmp_path / "fp8"
    weights = {"layers.0.mlp.weight": np.random.default_rng(0).standard_normal((256, 256)).astype(np.float16)}
    with Publisher(str(run)) as publisher:
        for version in range(4):
            weights["layers.0.mlp.weight"][version] += np.float16(1)
            publisher.publish(weights).result(120)
    invoke("keep", run, "--once", "--since", 0, "--view", f"fp8-block={derived}")
    assert Run.open(str(derived)).newest() == 3
    invoke("verify", derived, "--source", run)
    invoke("keep", run, "--view", "fp8-block", code=2)


@pytest.mark.slow
def test_killed_at_random_moments_while_the_trainer_goes_on(tmp_path: Path) -> None:
    """Real processes, SIGKILL. Whatever a keeper leaves, replicas get the trainer's bits, and run and mirror verify."""
    dice, folder, weights = random.Random(1), tmp_path / "run", large()
    ended = threading.Event()

    def train() -> None:
        nonlocal weights
        with Publisher(str(folder), anchor_ratio=1e9) as publisher:
            for version in range(300):
                weights = step(weights, version)
                publisher.publish(weights).result(60)
                time.sleep(0.05)
        ended.set()

    trainer = threading.Thread(target=train)
    trainer.start()
    kills = 0
    while not ended.is_set():
        options = ("--lease", "0s", "--poll", 0.05, "--anchor-every", 16, "--keep-last", 60, "--grace", "1s")
        process = spawn("keep", folder, *options, "--mirror", tmp_path / "mirror", "--json")
        assert process.stdout is not None
        process.stdout.readline()  # it is at work
        time.sleep(dice.uniform(0.0, 1.5))
        process.kill()
        process.wait()
        kills += 1
        live = blank(weights)
        with Replica(str(folder), heartbeat=0) as replica:
            replica.sync(live)
    trainer.join()
    assert kills >= 3
    invoke("keep", folder, "--once", "--lease", "0s", "--mirror", tmp_path / "mirror")
    for place in (folder, tmp_path / "mirror"):
        live = blank(weights)
        with Replica(str(place), heartbeat=0) as replica:
            assert replica.sync(live) == 299
        assert same(live, weights)
        found = verify(Run.open(str(place)))
        assert found.ok, found.failure
