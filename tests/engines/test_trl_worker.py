"""TRL's own AsyncGRPOTrainer, as docs/trl.md has it, learns through a bucket and a rollout server.

The server is ours, or a real vLLM with the plugin from an environment of its own: then the whole path is other people's
trainer, a bucket, other people's server.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

import environments
from deltawire.bucket.run import Run
from deltawire.core.errors import DeltawireError
from deltawire.core.full import Checkpoint, digest_of
from deltawire.replica import Replica
from deltawire_wordle.processes import free_port
from servers import Server
from tests.docs.documents import blocks

TASK = Path(__file__).parent / "trl" / "eos_task.py"
QUIET = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
STEPS = 25

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def python() -> Path:
    return environments.trl()


@pytest.fixture(scope="module", params=["builtin", "vllm"])
def serve(request: pytest.FixtureRequest) -> Callable[[str, int, Path], Server]:
    """Starts a rollout server for a run, at a port, as docs/trl.md does."""
    if request.param == "vllm":
        return with_vllm

    def start(run: str, port: int, log: Path) -> Server:
        command = [sys.executable, "-m", "deltawire.cli", "serve", run, "--port", str(port), "--poll", "0.2"]
        return Server(command, port, env=QUIET, log=log)

    return start


def with_vllm(run: str, port: int, log: Path, *options: str) -> Server:
    """A vLLM that follows a run, or with options serves a model."""
    command = [
        str(environments.engine("vllm")), "-m", "deltawire.cli", "serve", "--engine", "vllm", run, *options,
        "--port", str(port), "--poll", "0.2",
        "--", "--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "16",
    ]  # fmt: skip
    return Server(command, port, env={**QUIET, **environments.VLLM_ON_A_CPU}, log=log)


@contextmanager
def training(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    trainer = subprocess.Popen(command, env=QUIET, stdout=subprocess.PIPE, text=True)
    try:
        yield trainer
    finally:
        trainer.kill()


def documented(run: str, server: str, model: Path, *more: tuple[str, str]) -> str:
    """The block of docs/trl.md, at these places and with options for a tiny model on a CPU."""
    (block,) = [block for block in blocks("docs/trl.md") if block.suite == "trl"]
    code = block.code
    for printed, meant in (
        ("hf://buckets/me/wordle", run),
        ("https://rollouts.example", server),
        ("my-model", str(model)),
        ('output_dir="out"', f'**options, max_steps={STEPS}, output_dir="{model / "out"}"'),
        *more,
    ):
        assert code.count(printed) == 1, printed
        code = code.replace(printed, meant)
    return code


def newest(run: str) -> int:
    try:
        return Run.open(run).newest() or 0
    except DeltawireError:
        return 0


@pytest.mark.parametrize("restart", [False, True], ids=["steady", "server restarted"])
def test_completions_get_shorter(
    python: Path, serve: Callable[[str, int, Path], Server], tmp_path: Path, restart: bool
) -> None:
    folder, run, port = tmp_path / "model", (tmp_path / "run").as_uri(), free_port()
    subprocess.run([str(python), str(TASK), "make", str(folder)], check=True, env=QUIET)
    with ExitStack() as stack:
        server = stack.enter_context(serve(run, port, tmp_path / "server.log"))
        snippet = tmp_path / "snippet.py"
        snippet.write_text(documented(run, server.url, folder))
        command = [str(python), str(TASK), "train", str(folder), str(snippet)]
        trainer = stack.enter_context(training(command))
        if restart:
            while newest(run) < 8:
                assert trainer.poll() is None
                time.sleep(0.2)
            server.kill()
            server = stack.enter_context(serve(run, port, tmp_path / "server.log"))
        said, _ = trainer.communicate(timeout=1500)
        assert trainer.returncode == 0
        # proven by its digest, as every version before it, or the server would not name it
        status = server.wait("/deltawire/status", version=newest(run))
    check_that_it_learned(said, status)
    # no sync failed, and none took full weights instead of deltas
    assert status.get("failures", 0) == 0
    assert status.get("guard", "patch") == "patch"
    assert not status["reason"]
    check_that_the_run_ends_with(folder / "final.safetensors", run)


def test_an_adapter_is_trained_by_peft_config_and_followed_beside_its_base(python: Path, tmp_path: Path) -> None:
    """Stock TRL with `peft_config`, a bucket, a stock vLLM that serves the base model and follows the adapter."""
    folder, run, port = tmp_path / "model", (tmp_path / "run").as_uri(), free_port()
    subprocess.run([str(python), str(TASK), "make", str(folder), "8"], check=True, env=QUIET)
    with ExitStack() as stack:
        server = stack.enter_context(
            with_vllm(str(folder), port, tmp_path / "server.log", "--adapter", f"policy={run}")
        )
        snippet = tmp_path / "snippet.py"
        config = 'peft_config=__import__("peft").LoraConfig(r=8, target_modules="all-linear"), weight_transfer=transfer'
        snippet.write_text(documented(run, server.url, folder, ("weight_transfer=transfer", config)))
        trainer = stack.enter_context(training([str(python), str(TASK), "train", str(folder), str(snippet)]))
        said, _ = trainer.communicate(timeout=1500)
        assert trainer.returncode == 0

        def follows() -> dict[str, Any]:
            (found,) = server.get("/deltawire/status")["adapters"]
            return found  # type: ignore[no-any-return]

        while (status := follows())["version"] != newest(run):
            time.sleep(0.2)
    check_that_it_learned(said, status)
    assert status["failures"] == 0
    base = Run.open(run).info.base
    assert base is not None
    assert base.fits(str(digest_of(Checkpoint(folder))))
    check_that_the_run_ends_with(folder / "final.safetensors", run)


def check_that_it_learned(said: str, status: dict[str, Any]) -> None:
    """Completions got shorter, and samples have the versions that made them. `said` is what the trainer printed."""
    log = [entry for entry in json.loads(said.splitlines()[-1])["log"] if "reward" in entry]
    # of the samples of a step; the worker's own mean is not there where it made none meanwhile
    lengths = [entry["sample/trained_tokens_mean"] for entry in log]
    print(json.dumps({"lengths": lengths, "status": status, "last": log[-1]}))
    assert len(lengths) == STEPS
    assert sum(lengths[-3:]) < 0.7 * sum(lengths[:3]), lengths
    # what the server had is never ahead of the trainer, and with publishing in the background mostly behind it
    stale = [entry["sample/staleness_mean"] for entry in log]
    assert min(stale) >= 0
    assert max(stale) > 0
    assert log[-1]["deltawire/version"] > STEPS / 2


def check_that_the_run_ends_with(weights: Path, run: str) -> None:
    """The last version is the trainer's weights, bit for bit."""
    final = load_file(weights)
    live = {name: torch.zeros_like(tensor) for name, tensor in final.items()}
    Replica(run, heartbeat=0).sync(live)
    assert all(torch.equal(live[name].view(torch.int16), final[name].view(torch.int16)) for name in live)


def test_a_worker_that_was_killed_ends_the_trainer(python: Path) -> None:
    """TRL itself finds out by its heartbeat after 300 s, and then waits for the process without end."""
    script = str(TASK.with_name("worker_killed.py"))
    done = subprocess.run([str(python), script], env=QUIET, stdout=subprocess.PIPE, text=True, check=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "TRL's rollout worker was killed by signal 9: start the trainer again"


def test_a_worker_ends_with_its_trainer(python: Path) -> None:
    script = str(TASK.with_name("trainer_killed.py"))
    with subprocess.Popen([str(python), script], env=QUIET, stdout=subprocess.PIPE, text=True) as trainer:
        worker = psutil.Process(int(trainer.stdout.readline()))  # type: ignore[union-attr]
        trainer.kill()
        worker.wait(timeout=10)


def test_a_server_that_comes_back_is_asked_at_once(python: Path) -> None:
    """TRL itself asks again after up to 16 seconds, and logs a line for each attempt of each game."""
    script = str(TASK.with_name("server_gone.py"))
    done = subprocess.run([str(python), script], env=QUIET, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["seconds"] < 4
    gone, back = found["messages"]
    assert "is gone; waiting for it up to 600 s" in gone
    assert "is back after" in back
