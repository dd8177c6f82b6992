"""What is compiled beside an engine while it starts."""

from __future__ import annotations

import base64
import multiprocessing
import os
import subprocess
import sys
import textwrap
import time
import zlib
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from deltawire.api import encode
from deltawire.core.codecs import ENCODINGS
from deltawire.engines.live import ahead, small_deltas
from deltawire.trainer import Publisher
from support import model
from tiled import always_tiles


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_the_small_deltas_are_what_the_codecs_write(encoding: str) -> None:
    """Where one has changed, this says what to put into the table."""
    old, new = small_deltas.weights(), small_deltas.weights(1)
    assert 50 < np.count_nonzero(old != new) < 200
    with always_tiles():
        blob = encode({"w": old}, {"w": new}, encoding, threads=1)
    text = base64.b85encode(zlib.compress(blob, 9)).decode()
    assert zlib.decompress(base64.b85decode(small_deltas.DELTAS[encoding])) == blob, "\n".join(
        f'        "{line}"' for line in textwrap.wrap(text, 108)
    )


def test_each_small_delta_is_of_its_encoding() -> None:
    """`context` chooses `packed` for what is small, and a real delta would be the first one that compiles it."""
    found = [{block.record.encoding for block in file.blocks if block.record} for file in small_deltas.open_all()]
    assert [*ENCODINGS] == ["raw", "packed", "context", "planes"]
    assert found == [set(), {"packed"}, {"context"}, {"planes"}]


def test_a_run_says_how_wide_its_weights_are(tmp_path: Path) -> None:
    assert ahead.units_of(str(tmp_path / "none")) == {2}
    with Publisher(tmp_path / "run") as publisher:
        publisher.publish(model(1)).result(60)
    assert ahead.units_of(str(tmp_path / "run")) == {min(array.itemsize, 4) for array in model(1).values()}


def test_a_server_starts_one_such_process_and_its_own_processes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    monkeypatch.setattr(subprocess, "Popen", lambda line, **_: started.append(line[-1]))
    # what is set here is taken back
    monkeypatch.setenv(ahead.STARTED, "")
    monkeypatch.delenv("DELTAWIRE_RUN", raising=False)
    ahead.start_in_plugin()
    monkeypatch.setenv("DELTAWIRE_RUN", "s3://runs/chat")
    with monkeypatch.context() as in_worker:
        in_worker.setattr(multiprocessing, "parent_process", lambda: "the server")
        ahead.start_in_plugin()
    assert started == []
    ahead.start_in_plugin()
    assert started == ["s3://runs/chat"]
    # what vLLM starts as a program of its own, or `deltawire serve` becomes, has the same environment
    ahead.start_in_plugin()
    ahead.start("s3://runs/chat")
    assert started == ["s3://runs/chat"]


@pytest.mark.slow
def test_decoders_are_found_compiled(tmp_path: Path) -> None:
    """A process of the server compiles nothing that this one has compiled before it."""
    compiled = "from deltawire.engines.live import ahead; ahead.compile_for_hosts({2})"
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", compiled], env=environment, check=True)
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.nb?")}
    assert len(files) > 20
    used = "from deltawire.engines.live.decode_pieces import compile_decoders; compile_decoders()"
    subprocess.run([sys.executable, "-c", used], env=environment, check=True)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.nb?")} == files


def test_the_process_ends_with_the_one_that_started_it(tmp_path: Path) -> None:
    code = "from deltawire.engines.live import ahead; ahead.start('memory://none'); print(flush=True); input()"
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as starter:
        assert starter.stdout is not None
        starter.stdout.readline()
        (child,) = Path(f"/proc/{starter.pid}/task/{starter.pid}/children").read_text().split()
        assert "engines.live.ahead" in Path(f"/proc/{child}/cmdline").read_text()
        starter.kill()
    while Path(f"/proc/{child}").exists():
        time.sleep(0.01)
