"""What `deltawire serve` prepares before it becomes the server of another engine."""

from __future__ import annotations

import signal
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from deltawire.core.errors import FolderError, RunNotFound, SchemaMismatch
from deltawire.core.full import Checkpoint, digest_of, write_checkpoint
from deltawire.engines.live import launch
from deltawire.engines.live.launch import write_version
from deltawire.engines.options import ServerOptions
from deltawire.models import ModelView
from deltawire.trainer import Publisher
from support import model


class Echo:
    """An engine."""

    def find(self) -> list[str]:
        return ["echo"]

    def prepare(
        self, options: ServerOptions, model: str | Path, command: Sequence[str], environment: Mapping[str, str]
    ) -> tuple[list[str], dict[str, str]]:
        return [*command, str(model)], {**environment, **options.variables()}


@pytest.fixture(autouse=True)
def ahead_of(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The runs that something is compiled for while an engine starts."""
    runs: list[str] = []
    monkeypatch.setattr(launch.ahead, "start", runs.append)
    return runs


@pytest.fixture
def run(tmp_path: Path) -> str:
    with Publisher(tmp_path / "run", files={"config.json": b"{}"}) as publisher:
        for seed in range(3):
            publisher.publish(model(seed)).result(60)
    return str(tmp_path / "run")


def test_the_newest_version_is_written_once(run: str, tmp_path: Path) -> None:
    place = tmp_path / "place"
    assert write_version(run, None, place) == 2
    assert (place / "config.json").read_bytes() == b"{}"
    written = (place / "model.safetensors").stat().st_mtime_ns
    assert write_version(run, 2, place) == 2
    assert (place / "model.safetensors").stat().st_mtime_ns == written
    second = digest_of(Checkpoint(place))
    assert write_version(run, 0, place) == 0
    assert digest_of(Checkpoint(place)) != second


def test_a_run_that_is_not_there_yet_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ahead_of: list[str]
) -> None:
    """TRL waits for its server before it trains, so the server is often the first of the two."""
    started: list[str] = []
    monkeypatch.setattr(launch.os, "execve", lambda program, command, environment: started.extend(command))
    place = tmp_path / "place"
    options = ServerOptions(run=str(tmp_path / "run"), folder=place, poll=0.01)
    thread = threading.Thread(target=launch.launch, args=(Echo(), options), daemon=True)
    thread.start()
    while "waiting for it" not in caplog.text:
        assert thread.is_alive()
        time.sleep(0.01)
    assert ahead_of == [str(tmp_path / "run")]
    with Publisher(tmp_path / "run", files={"config.json": b"{}"}) as publisher:
        publisher.publish(model(0))
    thread.join(60)
    assert started[-3:] == ["", "echo", str(place)]
    assert (place / "model.safetensors").exists()


def test_a_temporary_folder_is_the_servers_or_is_removed(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()

    def execve(program: str, command: list[str], environment: Mapping[str, str]) -> None:
        assert (Path(command[3]) / "m" / "model.safetensors").exists()
        assert command[4:] == ["echo", str(Path(command[3]) / "m")]
        raise SystemExit(0)  # SIGTERM

    monkeypatch.setattr(launch.os, "execve", execve)
    with pytest.raises(SystemExit):
        launch.launch(Echo(), ServerOptions(run=run))
    with Publisher(tmp_path / "bare") as publisher:
        publisher.publish(model(0)).result(60)
    with pytest.raises(SchemaMismatch):
        launch.launch(Echo(), ServerOptions(run=str(tmp_path / "bare")))
    assert not [*(tmp_path / "temporary").iterdir()]
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_what_cannot_be_written_says_why(run: str, tmp_path: Path) -> None:
    with Publisher(tmp_path / "bare") as publisher:
        publisher.publish(model(0)).result(60)
    with pytest.raises(SchemaMismatch, match=r"no config\.json"):
        write_version(str(tmp_path / "bare"), None, tmp_path / "place")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").touch()
    (tmp_path / "own").mkdir()
    write_checkpoint(tmp_path / "own", ModelView(model(7)))
    (tmp_path / "own" / "config.json").touch()
    own = digest_of(Checkpoint(tmp_path / "own"))
    with pytest.raises(FolderError, match="not written by deltawire serve"):
        write_version(run, None, tmp_path / "own")
    assert digest_of(Checkpoint(tmp_path / "own")) == own
    with pytest.raises(SchemaMismatch, match="not a checkpoint folder"):
        write_version(run, None, tmp_path / "other")
    with pytest.raises(RunNotFound):
        write_version(str(tmp_path / "nothing"), None, tmp_path / "place")
    assert (tmp_path / "other" / "letter.txt").exists()
    assert not (tmp_path / "place").exists()
