"""examples/wordle_start.py and wordle_trl.py as they are, on a CPU, with servers in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import environments
from deltawire.bucket.run import Run
from deltawire.replica import Replica
from deltawire_wordle.processes import free_port
from servers import Server

EXAMPLES = Path(__file__).parents[2] / "examples"
QUIET = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
STEPS, GUESSES = 4, 5


@pytest.mark.slow
def test_a_game_is_written_as_trl_writes_it() -> None:
    form = str(Path(__file__).with_name("start_form.py"))
    subprocess.run([str(environments.trl("trl,rl")), form], check=True, env=QUIET)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_few_steps(tmp_path: Path) -> None:
    python = str(environments.trl("trl,rl"))
    model, run, out = tmp_path / "player", (tmp_path / "run").as_uri(), tmp_path / "out"
    start = [
        python, str(EXAMPLES / "wordle_start.py"), str(model), "--model", "tiny", "--words", "toy", "--guesses",
        str(GUESSES), "--device", "cpu", "--batch", "16", "--games", "32", "--knows", "0", "--seconds", "0",
    ]  # fmt: skip
    subprocess.run(start, check=True, env=QUIET)
    begun = json.loads((model / "start.json").read_text())
    assert begun["final"]["finished"] > 0.5
    deltawire = [sys.executable, "-m", "deltawire.cli"]
    env, server = free_port(), free_port()
    wordle = [*deltawire, "env", "wordle", "--words", "toy", "--guesses", str(GUESSES), "--port", str(env)]
    serve = [*deltawire, "serve", str(model), "--run", run, "--port", str(server), "--poll", "0.2"]
    said = tmp_path / "trainer.log"
    with Server(wordle, env), said.open("wb") as log_file:
        command = [
            python, str(EXAMPLES / "wordle_trl.py"), "--model", str(model), "--run", run, "--env-url", f"http://127.0.0.1:{env}",
            "--server-url", f"http://127.0.0.1:{server}", "--guesses", str(GUESSES), "--games", "16",
            "--num-generations", "4", "--max-staleness", "4", "--learning-rate", "1e-4", "--max-steps", str(STEPS),
            "--per-device-train-batch-size", "8", "--queue-maxsize", "16", "--max-completion-length", "48",
            "--output-dir", str(out), "--use-cpu", "True", "--bf16", "False", "--gradient-checkpointing", "False",
            "--report-to", "none", "--logging-steps", "1", "--save-strategy", "steps", "--save-steps", str(STEPS),
        ]  # fmt: skip
        with subprocess.Popen(command, env=QUIET, stderr=log_file) as trainer:
            # a server that starts late is waited for, in one line
            while "waiting for the server" not in said.read_text():
                assert trainer.poll() is None, said.read_text()
                time.sleep(0.5)
            with Server(serve, server, env=QUIET):
                assert trainer.wait(900) == 0, said.read_text()
    assert "Cannot connect" not in said.read_text()
    saved = out / f"checkpoint-{STEPS}"
    log = [
        entry for entry in json.loads((saved / "trainer_state.json").read_text())["log_history"] if "reward" in entry
    ]
    print(json.dumps(log))
    assert len(log) == STEPS
    # games of several turns were played, by calling the tool, and the environment judged them
    # (a step between two of which no game ended has no such figures)
    assert max(entry.get("rollout/turns_mean", 0) for entry in log) > 2
    assert max(entry.get("tools/call_frequency", 0) for entry in log) > 1
    assert len({entry["rewards/Wordle"] for entry in log}) > 1
    assert min(entry["sample/staleness_mean"] for entry in log) >= 0
    assert log[-1]["deltawire/version"] >= 1
    # what the run ends with is what was trained, and a server could start from it alone
    final = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(saved / "model.safetensors").items()}
    live = {name: torch.zeros_like(tensor) for name, tensor in final.items()}
    version = Replica(run, heartbeat=0).sync(live)
    assert all(torch.equal(live[name].view(torch.int16), final[name].view(torch.int16)) for name in live)
    files = {file.name for file in Run.open(run).manifest(version).files}
    assert {"config.json", "tokenizer.json", "chat_template.jinja"} <= files
