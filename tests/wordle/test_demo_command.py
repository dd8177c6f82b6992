"""demo: a policy learns, two servers follow, one of them dies and comes back, and every bit is compared."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import psutil
import pytest

import environments
from tests.cli.cli_support import invoke, spawn

pytest.importorskip("torch")

from deltawire.cli.ui import console
from deltawire_wordle import report
from deltawire_wordle.demo import DemoPlan, DemoRecord, LargerRecord, ReplicaStatus, _deltawire
from deltawire_wordle.demo_command import PHASES, _epilogue, _Lines, _picture
from deltawire_wordle.small_policy import FOLDER

LOADED = pytest.mark.timeout(400)
# five processes that import torch, on a machine that may have other things to do


def _record(tmp_path: Path) -> DemoRecord:
    """As the processes of a demo report it, with few of everything."""
    record = DemoRecord(DemoPlan(tmp_path, games=64), pages={1: "http://127.0.0.1:1/", 2: "http://127.0.0.1:2/"})
    record.evaluated = [
        {"version": version, "games": 64, "solved": solved} for version, solved in ((0, 0.25), (20, 0.75))
    ]
    figures = {"solved": 0.5, "tokens": 1000, "clipped": 0.01}
    step = {"staleness": 1.5, "stalest": 2, "dropped": 0, "figures": figures}
    record.steps = [{"step": number, "seconds": 2.0 * number, **step} for number in range(1, 21)]
    published = {"bytes": 100, "changed": 30, "elements": 1000}
    record.published = [{"version": version, **published} for version in range(21)]
    record.replicas = {"replica-1": [ReplicaStatus(1.0, 20, 0, 0.002, "serving")]}
    record.done, record.verified = {"ended_by": "goal", "version": 20}, {"ok": True, "versions": 21, "proven": 22}
    record.equal = {"replica-1": "SHA-256 of the live weights"}
    phases = dict.fromkeys(PHASES, 0.01)
    record.larger = LargerRecord(
        model={"weights": 1_000_000, "full_bytes": 2_000_000, "rate": 1e-6, "link_mbit_s": 100.0},
        full={"bytes": 2_000_100, "phases": phases, "seconds": 12.0},
        versions=[{"version": 1, "changed": 10_000, "bytes": 12_500, "phases": phases, "seconds": 0.5}],
        encodings={name: {"bytes": size, "seconds": 0.1} for name, size in (("packed", 12_500), ("raw", 60_000))},
        done={"equal": True, "version": 1},
    )
    return record


def test_what_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both acts as lines and as a picture, and the end, from a record: no process is started."""
    record = _record(tmp_path)
    lines = _Lines(record)
    lines()
    record.act = 2
    lines()
    _epilogue(record, report.summary(record), report.larger(record))
    console().print(_picture(record))
    text = capsys.readouterr().out
    for expected in (
        "live page: http://127.0.0.1:1/\n",
        "live page: http://127.0.0.1:2/\n",
        "v0: 25.0% of 64 games solved",
        "step 20  solved 50%  tokens/s 500  staleness 1.5  version 20  changed 3.00 %  "
        "sent 2 kB of 40 kB (20.0×, at lr 3e-05)",
        "solved 25.0% before, 75.0% after 20 steps in 40 s (the goal was reached)",
        "so many change because a model this small needs a learning rate of 3e-05",
        "1.00 % of 1 M weights change in a step: 12.5 kB instead of 2 MB, 160× smaller",
        "over 100 Mbit/s: 500 ms (median), full weights 12 s, both measured here",
        "bits per changed weight: packed 10.0 (12.5 kB, 100 ms to encode), raw 48.0",
        "✓ 2 replicas hold the trainer's bits, all 21 versions verified",
    ):
        assert expected in text


@LOADED
@pytest.mark.slow
def test_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As short as it can be: two steps and one server."""
    monkeypatch.setattr("deltawire_wordle.demo.DemoPlan", partial(DemoPlan, replicas=1))
    out, before = tmp_path / "out", _children()
    lines = invoke("demo", "--act", 1, "--steps", 2, "--games", 4, "--keep", "--out", out).stdout.splitlines()
    assert not _children() - before
    assert lines[0].startswith("A policy of 0.5 M weights learns Wordle.")
    assert lines.index("· starting") == lines.index(next(line for line in lines if "live page: http://127" in line)) + 1
    assert "· training" in lines
    assert any(line.startswith("✓ 1 replicas hold the trainer's bits, all 3 versions verified") for line in lines)
    story = json.loads((out / "report.json").read_bytes())
    assert story["ok"]
    assert [step["step"] for step in story["steps"]] == [1, 2]
    assert [version["version"] for version in story["published"]] == [0, 1, 2]
    assert [found["version"] for found in story["evaluated"]] == [0, 2]
    assert set(story["equal"]) == {"replica-1"}
    assert story["done"]["ended_by"] == "steps"
    page = (out / "report.html").read_text()
    assert story["reports"] == {"1": str(out / "report.html")}
    assert f"report: {out / 'report.html'}" in lines
    assert '"staleness"' in page, "what the trainer measures is on it"
    # the bucket is a run like any other
    assert json.loads(invoke("verify", out / "run", "--json").stdout)["ok"]
    # and a second demo publishes into neither it nor its folder
    assert "already" in invoke("demo", "--bucket", out / "run", code=2).stderr
    assert "already" in invoke("demo", "--out", out, code=2).stderr


@pytest.mark.timeout(1200)
@pytest.mark.slow
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_demo_with_the_servers_of_another_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    """The same loop by one flag, with one server, which runs in the environment of that engine's own tests."""
    python, ours = str(environments.engine(engine)), _deltawire
    monkeypatch.setattr(
        "deltawire_wordle.demo._deltawire",
        lambda verb, *words: [python if verb == "serve" else sys.executable, *ours(verb, *words)[1:]],
    )
    for name, value in environments.VLLM_ON_A_CPU.items() if engine == "vllm" else ():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("deltawire_wordle.demo.DemoPlan", partial(DemoPlan, replicas=1))
    out = tmp_path / "out"
    invoke("demo", "--engine", engine, "--act", 1, "--steps", 3, "--games", 0, "--minutes", 15, "--out", out)
    story = json.loads((out / "report.json").read_bytes())
    assert story["ok"], story["problems"]
    assert [version["version"] for version in story["published"]] == [0, 1, 2, 3]
    assert story["equal"] == {"replica-1": "state digest of the live weights"}


@LOADED
@pytest.mark.slow
def test_act_two_with_the_users_model(tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = spawn("demo", "--act", 2, "--model", FOLDER, "--link", 50, "--out", out)
    text, err = process.communicate()
    assert process.returncode == 0, text + err
    assert "over 50 Mbit/s" in text
    assert "bits per changed weight: packed" in text
    assert "✓ 1 replicas hold the trainer's bits" in text
    assert sorted(path.name for path in out.iterdir()) == ["logs", "report-larger.html", "report.json"]
    assert len(json.loads((out / "report.json").read_bytes())["larger"]["versions"]) == 4


@LOADED
@pytest.mark.slow
def test_a_server_dies_and_comes_back(tmp_path: Path) -> None:
    """As `make demo --kill-replica` runs it, in a process of its own, with few steps."""
    out = tmp_path / "out"
    process = spawn("demo", "--act", 1, "--steps", 6, "--games", 16, "--kill-replica", "--out", out)
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
        assert process.wait(120) == expected[sent]
        _, left = psutil.wait_procs(children, timeout=120)
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
    process = spawn("demo", "--act", 1, "--steps", 4, "--games", 16, "--bucket", "s3", "--no-sync", "--json", env=home)
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
    value = json.loads(
        invoke("demo", "--act", 1, "--bucket", taken / "run", "--out", tmp_path / "out", "--json", code=1).stdout
    )
    assert "trainer" in value["problems"][0]
    assert value["report"]["html"] is None
    assert Path(value["report"]["json"]).is_file()


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
