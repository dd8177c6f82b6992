"""demo: a policy learns, two servers follow, one of them dies and comes back, and every bit is compared."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.cli.cli_support import invoke, spawn

pytest.importorskip("torch")

from deltawire_wordle.demo import Plan

LOADED = pytest.mark.timeout(400)
# five processes that import torch, on a machine that may have other things to do


@LOADED
def test_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As short as it can be: two steps and one server."""
    monkeypatch.setattr("deltawire_wordle.demo.Plan", partial(Plan, replicas=1))
    out, before = tmp_path / "out", _children()
    lines = invoke("demo", "--steps", 2, "--games", 4, "--keep", "--out", out).stdout.splitlines()
    assert not _children() - before
    assert "· training" in lines
    assert any(line.startswith("✓ 1 replicas hold the trainer's bits, all 3 versions verified") for line in lines)
    story = json.loads((out / "report.json").read_bytes())
    assert story["ok"]
    assert [step["step"] for step in story["steps"]] == [1, 2]
    assert [version["version"] for version in story["published"]] == [0, 1, 2]
    assert [found["version"] for found in story["evaluated"]] == [0, 2]
    assert set(story["equal"]) == {"replica-1"}
    page = (out / "report.html").read_text()
    assert page.count("<svg") >= 6
    assert not re.search(r"(src|href)\s*=", page), "it needs no other file"
    # the bucket is a run like any other
    assert json.loads(invoke("verify", out / "run", "--json").stdout)["ok"]
    # and a second demo publishes into neither it nor its folder
    assert "already" in invoke("demo", "--bucket", out / "run", code=2).stderr
    assert "already" in invoke("demo", "--out", out, code=2).stderr


@LOADED
@pytest.mark.slow
def test_a_server_dies_and_comes_back(tmp_path: Path) -> None:
    """As `make demo --kill-replica` runs it, in a process of its own, with few steps."""
    out = tmp_path / "out"
    process = spawn("demo", "--steps", 6, "--games", 16, "--kill-replica", "--out", out)
    seen = _watch(process)
    text, err = process.communicate()
    assert process.returncode == 0, text + err
    assert not _alive(seen)
    lines = text.splitlines()
    assert any(line.startswith("✓ 2 replicas hold the trainer's bits, all 7 versions verified") for line in lines)
    story = json.loads((out / "report.json").read_bytes())
    assert story["ok"]
    assert [step["step"] for step in story["steps"]] == [1, 2, 3, 4, 5, 6]
    assert [version["version"] for version in story["published"]] == [*range(7)]
    assert [found["version"] for found in story["evaluated"]] == [0, 6]
    assert set(story["equal"]) == {"replica-1", "replica-2"}
    remarks = [text for _, text in story["remarks"]]
    assert "replica-2 is killed (SIGKILL)" in remarks
    assert any(text.startswith("replica-2 starts again") for text in remarks)


@LOADED
@pytest.mark.parametrize(
    "sent, when",
    [
        pytest.param(signal.SIGINT, "· starting", id="interrupt-at-once"),
        pytest.param(signal.SIGINT, "· training", marks=pytest.mark.slow, id="interrupt"),
        pytest.param(signal.SIGTERM, "· waiting for the replicas", marks=pytest.mark.slow, id="terminate"),
        pytest.param(signal.SIGKILL, "· training", marks=pytest.mark.slow, id="kill"),
    ],
)
def test_nothing_outlives_the_demo(tmp_path: Path, sent: signal.Signals, when: str) -> None:
    process = spawn("demo", "--games", 0, "--out", tmp_path / "out")
    try:
        assert any(line.startswith(when) for line in process.stdout)
        children = psutil.Process(process.pid).children(recursive=True)
        if when == "· training":
            assert len(children) == 4
        process.send_signal(sent)
        expected = {signal.SIGINT: 130, signal.SIGTERM: 0, signal.SIGKILL: -signal.SIGKILL}
        assert process.wait(60) == expected[sent]
        _, left = psutil.wait_procs(children, timeout=60)
        assert not _alive({child.pid: child for child in left})
        if sent != signal.SIGKILL:
            assert not (tmp_path / "out" / "run").exists()
    finally:
        process.kill()
        process.communicate()


@LOADED
@pytest.mark.slow
def test_the_demo_through_s3_without_syncing(tmp_path: Path) -> None:
    """The control: replicas play with version 0 throughout, and get the last one only to be measured."""
    home = {**os.environ, "TMPDIR": str(tmp_path)}
    process = spawn("demo", "--steps", 4, "--games", 16, "--bucket", "s3", "--no-sync", "--json", env=home)
    seen = _watch(process)
    text, err = process.communicate()
    assert process.returncode == 0, text + err
    assert not _alive(seen)
    value = json.loads(text)
    assert value["ok"]
    assert value["versions"] == 2
    assert value["staleness_max"] == 3
    [folder] = tmp_path.glob("deltawire-demo-*")
    assert sorted(path.name for path in folder.iterdir()) == ["logs", "report.html", "report.json"]


def test_without_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert "[rl,serve]'" in invoke("demo", code=2).stderr


@LOADED
@pytest.mark.slow
def test_a_trainer_that_cannot_start_is_a_problem_with_a_reason(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("a file where a folder should be")
    value = json.loads(invoke("demo", "--bucket", taken / "run", "--out", tmp_path / "out", "--json", code=1).stdout)
    assert "trainer" in value["problems"][0]
    assert Path(value["report"]["html"]).is_file()


def _watch(process: subprocess.Popen[str]) -> dict[int, psutil.Process]:
    """Every process that the demo had at some time."""
    seen: dict[int, psutil.Process] = {}
    while process.poll() is None:
        for child in psutil.Process(process.pid).children(recursive=True):
            seen[child.pid] = child
        try:
            process.wait(0.3)
        except subprocess.TimeoutExpired:
            continue
    assert len(seen) >= 4
    return seen


def _children() -> set[psutil.Process]:
    return {*psutil.Process().children(recursive=True)}


def _alive(processes: dict[int, psutil.Process]) -> list[psutil.Process]:
    return [one for one in processes.values() if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
