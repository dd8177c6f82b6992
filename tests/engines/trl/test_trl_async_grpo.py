"""TRL's own AsyncGRPOTrainer learns through a bucket and a rollout server, from an environment that has TRL."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from deltawire.bucket.run import Run
from deltawire.core.errors import DeltawireError
from deltawire.replica import Replica
from environments import environment

ROOT = Path(__file__).parents[3]
TASK = Path(__file__).with_name("eos_task.py")
QUIET = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
STEPS = 25

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def python() -> Path:
    constraints = ["-c", str(ROOT / "constraints.txt")]
    python = environment("trl", ["torch==2.13.0"], ["trl==1.16.0", "aiohttp", "requests"], [*constraints, "hatchling"])
    subprocess.run(
        [str(python), "-m", "pip", "install", "-q", *constraints, "--no-build-isolation", "-e", f"{ROOT}[trl]"],
        check=True,
    )
    return python


@contextmanager
def server(folder: Path, run: str, port: int) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "deltawire.cli", "serve", str(folder), "--run", run, "--port", str(port)]
    process = subprocess.Popen(command, env=QUIET)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_for(run: str, version: int, trainer: subprocess.Popen[str]) -> None:
    while trainer.poll() is None:
        try:
            if (Run.open(run).newest() or 0) >= version:
                return
        except DeltawireError:
            pass
        time.sleep(0.2)


@pytest.mark.parametrize("restart", [False, True], ids=["steady", "server restarted"])
def test_completions_get_shorter(python: Path, tmp_path: Path, restart: bool) -> None:
    folder, run = tmp_path / "model", (tmp_path / "run").as_uri()
    subprocess.run([str(python), str(TASK), "make", str(folder)], check=True, env=QUIET)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(python), str(TASK), "train", str(folder), run, f"http://127.0.0.1:{port}", str(STEPS)]
    with server(folder, run, port) as first:
        trainer = subprocess.Popen(command, env=QUIET, stdout=subprocess.PIPE, text=True)
        try:
            wait_for(run, 8, trainer)
            if restart:
                first.send_signal(signal.SIGKILL)
                first.wait()
            with server(folder, run, port) if restart else nullcontext():
                said, _ = trainer.communicate(timeout=1500)
        finally:
            trainer.kill()
    assert trainer.returncode == 0
    log = [entry for entry in json.loads(said.splitlines()[-1])["log"] if "reward" in entry]
    lengths = [entry["completions/mean_length"] for entry in log]
    assert len(lengths) == STEPS
    assert sum(lengths[-3:]) < 0.7 * sum(lengths[:3]), lengths
    # what the server had is never ahead of the trainer, and with publishing in the background mostly behind it
    stale = [entry["sample/staleness_mean"] for entry in log]
    assert min(stale) >= 0
    assert max(stale) > 0
    assert log[-1]["deltawire/version"] > STEPS / 2
    # every sync is proven by its digest; and the last one is the trainer's weights, bit for bit
    final = load_file(folder / "final.safetensors")
    live = {name: torch.zeros_like(tensor) for name, tensor in final.items()}
    Replica(run, heartbeat=0).sync(live)
    assert all(torch.equal(live[name].view(torch.int16), final[name].view(torch.int16)) for name in live)
