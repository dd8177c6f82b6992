"""Trainers as processes of their own, with other host names and clocks, on one run: the one that is there keeps it."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType

import pytest
from writing import weights

from deltawire.bucket.run import Run
from deltawire.bucket.verify import verify
from deltawire.core import full, keys
from deltawire.models import ModelView
from deltawire.store import open_store
from deltawire_wordle.seaweed import SeaweedFS
from tests import forks

DAY = 86_400.0
KILLED, CONFLICT = -9, 6
PATIENCE_S = 120.0


class Trainer:
    """`writing.py` in a process."""

    def __init__(self, run: str, *, host: str = "one", wrong_s: float = 0.0, renewal: float, takeover: bool = False):
        command = [sys.executable, str(Path(__file__).with_name("writing.py")), run, host, str(wrong_s)]
        self.process = forks.Popen(
            [*command, "takeover"] if takeover else command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "DELTAWIRE_WRITER_RENEWAL": str(renewal), "DELTAWIRE_THREADS": "1"},
        )
        self.versions: list[int] = []
        self.said: list[str] = []
        self._news = threading.Condition()
        self._readers = [threading.Thread(target=self._read_versions), threading.Thread(target=self._read_errors)]
        for reader in self._readers:
            reader.start()

    def _read_versions(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._news:
                self.versions.append(int(line))
                self._news.notify_all()
        with self._news:
            self._news.notify_all()

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line)

    @property
    def log(self) -> str:
        return "".join(self.said)

    def publishes(self, more: int = 1) -> None:
        """Wait until it has published so many further versions."""
        with self._news:
            wanted = len(self.versions) + more
            self._news.wait_for(lambda: len(self.versions) >= wanted or self.process.poll() is not None, PATIENCE_S)
            assert len(self.versions) >= wanted, self.log

    def says(self, text: str) -> None:
        until = time.monotonic() + PATIENCE_S
        while text not in self.log and time.monotonic() < until:
            time.sleep(0.01)
        assert text in self.log

    def end(self) -> int:
        """Let it end, or wait until it has."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.wait()

    def kill(self) -> int:
        self.process.kill()
        return self.wait()

    def wait(self) -> int:
        code = self.process.wait(PATIENCE_S)
        for reader in self._readers:
            reader.join(PATIENCE_S)
        return int(code)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.returncode is None:
            self.kill()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()


Start = Callable[..., Trainer]


@contextmanager
def trainers(run: str) -> Iterator[Start]:
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(Trainer(run, **options))


def on(everyday: str) -> pytest.MarkDecorator:
    """On each kind of store, every day on one of them."""
    kinds = [pytest.param(kind, marks=() if kind == everyday else pytest.mark.slow) for kind in ("folder", "s3", "hub")]
    return pytest.mark.parametrize("run", kinds, indirect=True)


@pytest.fixture
def run(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An address that processes share."""
    if request.param == "folder":
        return str(tmp_path / "run")
    if request.param == "s3":
        server: SeaweedFS = request.getfixturevalue("seaweed")
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        return f"s3://deltawire/{uuid.uuid4()}/run"
    request.getfixturevalue("hub")
    return f"hf://buckets/me/{uuid.uuid4().hex}/run"


def writers_of(address: str) -> list[str]:
    """The mark of each version's writer. All versions must be what was published as their step."""
    run = Run.open(address)
    manifests = [run.manifest(version) for version in run.listed()]
    assert [manifest.version for manifest in manifests] == list(range(len(manifests)))
    for manifest in manifests:
        assert manifest.step is not None
        assert manifest.digest == str(full.digest_of(ModelView(weights(manifest.step))))
    assert verify(run).ok
    return [manifest.writer for manifest in manifests]


@on("s3")
@pytest.mark.parametrize("wrong_s", [DAY, pytest.param(-DAY, marks=pytest.mark.slow)])
def test_one_that_is_started_by_mistake_is_refused(run: str, wrong_s: float) -> None:
    dice = random.Random(f"{wrong_s}")
    with trainers(run) as start:
        first = start(renewal=1.0, host="gpu-7")
        first.publishes()
        # before it has looked, while it watches, or when it was refused
        other = start(renewal=1.0, host="laptop", wrong_s=wrong_s)
        time.sleep(dice.uniform(0.2, 1.5))
        assert other.kill() in (KILLED, CONFLICT)
        mistaken = start(renewal=1.0, host="laptop", wrong_s=wrong_s)
        assert mistaken.wait() == CONFLICT
        said = rf"is being written by writing\.py on gpu-7 \(process {first.process.pid}, for \d+ s\)"
        assert re.search(said, mistaken.log)
        assert "--take-over, replaces it" in mistaken.log
        assert not mistaken.versions
        first.publishes(3)
        assert first.end() == 0
        published = len(first.versions)
        assert len(writers_of(run)) == published
        assert len({*writers_of(run)}) == 1
        # a run that was closed is there at once
        after = start(renewal=60.0, host="laptop", wrong_s=wrong_s)
        after.publishes()
        assert "waiting" not in after.log
        assert after.end() == 0
    assert len(writers_of(run)) == published + len(after.versions)


@on("hub")
@pytest.mark.parametrize("crashes", [2, pytest.param(12, marks=pytest.mark.slow)])
def test_one_that_is_started_after_a_crash_continues(run: str, crashes: int) -> None:
    """Killed at random moments, and started again on another host whose clock is wrong."""
    dice = random.Random(crashes)
    with trainers(run) as start:
        crashed = start(renewal=0.3)
        crashed.publishes()
        for number in range(crashes):
            time.sleep(dice.uniform(0, 0.2))
            assert crashed.kill() == KILLED
            again = start(renewal=0.3, host=f"host-{number}", wrong_s=dice.choice([-DAY, 0.0, DAY]))
            again.publishes()
            assert "waiting 1 s to see whether that still runs" in again.log
            assert "does not run any more, continuing" in again.log
            crashed = again
        assert crashed.end() == 0
    assert len({*writers_of(run)}) == crashes + 1


@on("folder")
def test_one_that_takes_over(run: str) -> None:
    with trainers(run) as start:
        first = start(renewal=5.0)
        first.publishes()
        second = start(renewal=5.0, host="two", wrong_s=-DAY, takeover=True)
        assert first.wait() == CONFLICT
        assert f"another trainer took over {open_store(run).url}: writing.py on two" in first.log
        second.publishes(2)
        assert second.end() == 0
    marks = writers_of(run)
    assert marks == sorted(marks, key=marks.index)
    assert len({*marks}) == 2


def test_one_that_was_paused_while_another_took_over(tmp_path: Path) -> None:
    """As a laptop that sleeps. When it wakes it stops, and the other one goes on."""
    address = str(tmp_path / "run")
    with trainers(address) as start:
        first = start(renewal=0.5)
        first.publishes()
        first.process.send_signal(signal.SIGSTOP)
        second = start(renewal=0.5, host="two")
        second.publishes()
        first.process.send_signal(signal.SIGCONT)
        assert first.wait() == CONFLICT
        second.publishes(3)
        assert second.end() == 0
    assert len({*writers_of(address)}) == 2
    assert b'"ended":true' in open_store(address).get(keys.WRITER).data
