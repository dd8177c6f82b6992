"""follow: a folder that is always one whole version, and a command per version."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_support import (
    Tensor,
    Weights,
    invoke,
    print_of,
    read_checkpoint,
    run_app,
    spawn,
    trained,
    weights,
    write_checkpoint,
)

from deltawire.bucket.checkpoint_folder import CurrentFolder
from deltawire.bucket.run import Run
from deltawire.bucket.watch import Watcher
from deltawire.core import keys
from deltawire.core.errors import FolderError
from deltawire.core.full import Checkpoint
from deltawire.core.manifest import Pruned, dump
from deltawire.trainer import Publisher
from servers import end


def follow(run: Path, *options: object, code: int = 0) -> Any:
    return invoke("follow", run, "--once", *options, code=code)


def kept(folder: Path) -> list[str]:
    """What is beside the folder for its sake."""
    beside = folder.parent / f".{folder.name}.versions"
    return sorted(os.listdir(beside)) if beside.is_dir() else []


# ── the folder ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_folder_is_the_newest_version(tmp_path: Path, run: Path, checkpoints: list[Path]) -> None:
    text = follow(run, "--dir", tmp_path / "model").stdout
    assert text.startswith("v3  ")
    assert read_checkpoint(tmp_path / "model") == read_checkpoint(checkpoints[3])
    assert (tmp_path / "model" / "config.json").read_text() == '{"step": 1}'
    assert os.readlink(tmp_path / "model") == ".model.versions/000003"


def test_the_version_before_stays_and_older_ones_go(tmp_path: Path, checkpoints: list[Path]) -> None:
    run, model = tmp_path / "run", tmp_path / "model"
    for step, folder in enumerate(checkpoints):
        invoke("publish", folder, run)
        follow(run, "--dir", model)
        assert read_checkpoint(model) == read_checkpoint(folder)
        assert kept(model) == [f"{v:06d}" for v in range(max(step - 1, 0), step + 1)]


def test_a_restart_goes_on_from_what_is_on_disk(tmp_path: Path, checkpoints: list[Path]) -> None:
    run, model = tmp_path / "run", tmp_path / "model"
    invoke("publish", checkpoints[0], run)
    follow(run, "--dir", model)
    invoke("publish", checkpoints[1], run)
    invoke("publish", checkpoints[2], run)
    for anchor in run.glob("anchors/*"):
        anchor.unlink()  # only the deltas lead on from here
    follow(run, "--dir", model)
    assert read_checkpoint(model) == read_checkpoint(checkpoints[2])
    inode = model.resolve().stat().st_ino
    assert "already here" in follow(run, "--dir", model).stdout
    assert model.resolve().stat().st_ino == inode  # not written again


@pytest.mark.parametrize("damage", ["weights", "header", "missing", "link"])
def test_a_damaged_folder_is_made_anew(tmp_path: Path, run: Path, checkpoints: list[Path], damage: str) -> None:
    model = tmp_path / "model"
    follow(run, "--dir", model)
    file = model.resolve() / "model.safetensors"
    blob = bytearray(file.read_bytes())
    if damage == "missing":
        file.unlink()
    elif damage == "link":
        file.parent.rename(tmp_path / "away")
    else:
        blob[-1 if damage == "weights" else 10] ^= 1
        file.write_bytes(blob)
    follow(run, "--dir", model)
    assert read_checkpoint(model) == read_checkpoint(checkpoints[3])


def test_another_run_under_the_same_address(tmp_path: Path, run: Path) -> None:
    model = tmp_path / "model"
    follow(run, "--dir", model)
    run.rename(tmp_path / "old run")
    other = write_checkpoint(tmp_path / "other", {"w": Tensor("F32", (4,), bytes(range(16)))})
    for _ in range(4):
        invoke("publish", other, run)
    follow(run, "--dir", model)
    assert read_checkpoint(model) == read_checkpoint(other)
    assert kept(model)[0] == "000003"
    assert kept(model)[1].startswith("000003.")


def test_leftovers_of_a_crash_go(tmp_path: Path, run: Path) -> None:
    model = tmp_path / "model"
    follow(run, "--dir", model)
    versions = tmp_path / ".model.versions"
    for name in (".making-12345678", "000001", "000002", "000009"):
        (versions / name).mkdir()
        (versions / name / "model.safetensors").write_text("part")
    (versions / ".link-12345678").symlink_to("nowhere")
    follow(run, "--dir", model)
    assert kept(model) == ["000002", "000003"]


@pytest.mark.parametrize("there", ["a full folder", "a file", "a foreign link"])
def test_what_is_there_is_not_touched(tmp_path: Path, run: Path, there: str) -> None:
    model = tmp_path / "model"
    if there == "a full folder":
        write_checkpoint(model, weights())
    elif there == "a file":
        model.write_text("mine")
    else:
        model.symlink_to(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert "another name" in follow(run, "--dir", model, code=1).stderr
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("there", ["a link", "a file"])
def test_versions_that_are_no_folder_are_refused(tmp_path: Path, run: Path, there: str) -> None:
    model, beside, away = tmp_path / "model", tmp_path / ".model.versions", tmp_path / "away"
    (away / "000001").mkdir(parents=True)
    (away / "notes.txt").write_text("mine")
    if there == "a link":
        beside.symlink_to(away)
    else:
        beside.write_text("mine")
    before = sorted(away.rglob("*"))
    assert str(beside) in follow(run, "--dir", model, code=1).stderr
    assert sorted(away.rglob("*")) == before
    assert not model.exists()


def test_only_names_of_its_own_form_are_removed(tmp_path: Path, run: Path) -> None:
    versions, away = tmp_path / ".model.versions", tmp_path / "away"
    foreign = ["notes.txt", "1", "000001.bak", "00000x", ".making-", ".making-1234567g", ".link", "model"]
    for name in foreign:
        (versions / name).mkdir(parents=True)
    (away / "deep").mkdir(parents=True)
    for name in ("000000", ".making-12345678"):
        (versions / name).symlink_to(away)
    follow(run, "--dir", tmp_path / "model")
    assert kept(tmp_path / "model") == sorted([*foreign, "000003"])
    assert (away / "deep").is_dir()


def test_versions_that_are_replaced_by_a_link_meanwhile(tmp_path: Path) -> None:
    away, versions = tmp_path / "away", tmp_path / ".model.versions"
    (away / "000001").mkdir(parents=True)
    with CurrentFolder(tmp_path / "model") as current:
        versions.rename(tmp_path / "moved")
        versions.symlink_to(away)
        with pytest.raises(FolderError, match="was replaced"):
            current.put(3, lambda made: None)
    assert os.listdir(away) == ["000001"]


def test_an_empty_folder_is_taken_over(tmp_path: Path, run: Path) -> None:
    (tmp_path / "model").mkdir()
    follow(run, "--dir", tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors").is_file()


def test_files_are_not_fetched_twice(tmp_path: Path, run: Path, checkpoints: list[Path]) -> None:
    follow(run, "--dir", tmp_path / "model")
    for file in run.glob("files/*"):
        file.unlink()
    with Publisher(run) as publisher:  # without files of its own a version has those of the one before
        publisher.publish(Checkpoint(checkpoints[0]), wait=True)
    follow(run, "--dir", tmp_path / "model")
    assert read_checkpoint(tmp_path / "model") == read_checkpoint(checkpoints[0])
    assert (tmp_path / "model" / "config.json").read_text() == '{"step": 1}'


def test_a_bad_version_changes_nothing(tmp_path: Path, run: Path, checkpoints: list[Path]) -> None:
    model = tmp_path / "model"
    follow(run, "--dir", model)
    invoke("publish", checkpoints[0], run)
    for path in run.glob("deltas/*000004*"):
        path.write_bytes(path.read_bytes()[:-1])
    follow(run, "--dir", model, code=3)
    assert read_checkpoint(model) == read_checkpoint(checkpoints[3])


# ── commands ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_command_sees_the_version(tmp_path: Path, run: Path) -> None:
    script = f'printf "%s %s %s" "$DELTAWIRE_VERSION" "$DELTAWIRE_RUN" "$DELTAWIRE_DIR" > {tmp_path}/seen'
    follow(run, "--exec", script)
    assert (tmp_path / "seen").read_text() == f"3 {run.as_uri()} "
    follow(run, "--exec", script, "--dir", tmp_path / "model")
    assert (tmp_path / "seen").read_text() == f"3 {run.as_uri()} {tmp_path}/model"


def test_a_failing_command_is_reported(tmp_path: Path, run: Path) -> None:
    result = follow(run, "--exec", "exit 7", "--dir", tmp_path / "model", "--json", code=1)
    assert "version 3 ended with exit code 7" in result.stderr
    assert json.loads(result.stdout)["exit_code"] == 7
    assert (tmp_path / "model").is_dir()


@pytest.mark.parametrize(
    "options, code",
    [
        ((), 2),
        (("--exec", "true", "--every"), 2),
        (("--exec", "true", "--id", "no/slashes"), 2),
        (("--exec", "true", "--poll", "0"), 2),
    ],
)
def test_bad_options(run: Path, options: tuple[str, ...], code: int) -> None:
    follow(run, *options, code=code)


def test_no_run(tmp_path: Path) -> None:
    follow(tmp_path / "nothing", "--dir", tmp_path / "model", code=4)


def test_it_is_seen_in_log(run: Path) -> None:
    follow(run, "--exec", "true", "--id", "box-7")
    assert "box-7" in invoke("log", run).stdout


# ── as a process ─────────────────────────────────────────────────────────────────────────────────────────────────────


def lines(process: Any) -> Iterator[dict[str, Any]]:
    return (json.loads(line) for line in process.stdout)


def test_every_version_from_a_run_that_is_not_there_yet(tmp_path: Path, checkpoints: list[Path]) -> None:
    """It waits for the run, misses no version, outlives a failing command, lets nobody else in, ends on SIGTERM."""
    run, model = tmp_path / "run", tmp_path / "model"
    command = 'test "$DELTAWIRE_VERSION" != 1'
    process = spawn("follow", run, "--dir", model, "--exec", command, "--every", "--poll", "0.02", "--json")
    try:
        assert "waiting" in process.stderr.readline()
        assert "another process" in follow(run, "--dir", model, code=1).stderr
        invoke("publish", checkpoints[0], run)
        reached = lines(process)
        assert next(reached)["version"] == 0
        for folder in checkpoints[1:]:
            invoke("publish", folder, run)
        events = [next(reached) for _ in range(3)]
        assert [(event["version"], event["exit_code"]) for event in events] == [(1, 1), (2, 0), (3, 0)]
        assert read_checkpoint(model) == read_checkpoint(checkpoints[3])
        assert end(process) == 0
        assert "version 1 ended with exit code 1" in process.stderr.read()
    finally:
        process.kill()
        process.communicate()
    assert kept(model) == ["000002", "000003"]


def test_ctrl_c(tmp_path: Path, run: Path) -> None:
    process = spawn("follow", run, "--dir", tmp_path / "model", "--json")
    try:
        assert next(lines(process))["version"] == 3
        assert end(process, signal.SIGINT) == 130
        assert process.stderr.read() == ""
    finally:
        process.kill()
        process.communicate()


def every_until(last: int, run: Path, model: Path) -> list[int]:
    """Versions before the last one that `follow --every` reports in this process; the command for the last one ends it
    (SIGTERM)."""
    command = f'test "$DELTAWIRE_VERSION" != {last} || kill $PPID'
    done = invoke("follow", run, "--dir", model, "--every", "--json", "--poll", "0.02", "--exec", command)
    # the signal may arrive before or after the line about the last one
    return [version for line in done.stdout.splitlines() if (version := json.loads(line)["version"]) != last]


def test_every_goes_on_from_what_is_on_disk(tmp_path: Path, checkpoints: list[Path]) -> None:
    run, model = tmp_path / "run", tmp_path / "model"
    invoke("publish", checkpoints[0], run)
    follow(run, "--dir", model)
    for folder in checkpoints[1:]:
        invoke("publish", folder, run)
    assert every_until(3, run, model) == [0, 1, 2]
    assert read_checkpoint(model) == read_checkpoint(checkpoints[3])


def test_every_passes_over_what_was_pruned(tmp_path: Path, checkpoints: list[Path]) -> None:
    run, model = tmp_path / "run", tmp_path / "model"
    invoke("publish", checkpoints[0], run)
    follow(run, "--dir", model)
    for folder in checkpoints[1:]:
        invoke("publish", folder, run, "--anchor")
    opened = Run.open(str(run))
    opened.store.put(keys.PRUNED, dump(Pruned.of(opened.info.run, (1,))))
    opened.store.delete(keys.manifest(1))
    assert every_until(3, run, model) == [0, 2]
    assert read_checkpoint(model) == read_checkpoint(checkpoints[3])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_sigterm_ends_it_also_while_a_finalizer_runs(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python drops what a signal handler raises there."""

    class Finalized:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)
            time.sleep(0)

    wait = Watcher.wait

    def interrupted(watcher: Watcher) -> None:
        Finalized()
        wait(watcher)

    monkeypatch.setattr(Watcher, "wait", interrupted)
    invoke("follow", run, "--dir", tmp_path / "model", "--poll", "0.01")


def test_killed_at_any_moment_the_folder_is_a_whole_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL at random moments, while versions keep coming."""
    run, model = tmp_path / "run", tmp_path / "model"
    # forked from a process that has imported and compiled everything, so that few moments fall into the start
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["cli_warm"])
    first = context.Process(target=time.sleep, args=(0,))
    first.start()
    first.join()
    versions: dict[str, int] = {}
    stop = threading.Event()
    publishing = threading.Thread(target=_publish_until, args=(stop, run, versions, tmp_path / "checkpoint"))
    publishing.start()
    moments, seen, kills = random.Random(7), set(), 0
    try:
        # on a busy machine until two versions were seen
        while kills < 15 or len(seen) < 2:
            kills += 1
            process = context.Process(target=run_app, args=("follow", str(run), "--dir", str(model), "--poll", "0.01"))
            process.start()
            _wait_for_the_moment(model, moments)
            process.kill()
            process.join()
            if model.exists():
                seen.add(_whole_version(model, versions))
    finally:
        stop.set()
        publishing.join()
    follow(run, "--dir", model)
    assert _whole_version(model, versions) == Run.open(str(run)).newest() == max(versions.values())
    assert len(kept(model)) <= 2


def _wait_for_the_moment(model: Path, moments: random.Random) -> None:
    """Any moment; or, since writing is a small part of the time, one soon after a version began to be written."""
    time.sleep(moments.uniform(0.02, 0.5))
    if moments.random() < 0.6:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not any(name.startswith(".") for name in kept(model)):
            time.sleep(0.0002)
        time.sleep(moments.uniform(0, 0.01))


def _publish_until(stop: threading.Event, run: Path, versions: dict[str, int], folder: Path) -> None:
    now: Weights = {"w": Tensor("BF16", (512, 1024), np.random.default_rng(0).bytes(1 << 20)), **weights()}
    with Publisher(run, anchor_every=10) as publisher:
        while not stop.is_set():
            write_checkpoint(folder, now)
            # noted before anybody can see it
            versions[print_of(now)] = len(versions)
            publisher.publish(Checkpoint(folder), wait=True)
            now = trained(now, seed=len(versions))
            stop.wait(0.05)


def _whole_version(model: Path, versions: dict[str, int]) -> int:
    version = versions[print_of(read_checkpoint(model))]
    assert model.resolve().name == f"{version:06d}"
    return version
