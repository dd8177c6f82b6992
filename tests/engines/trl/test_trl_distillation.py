"""TRL's own AsyncDistillationTrainer, as docs/trl.md has it: its student follows a bucket, its teacher is a vLLM."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import environments
from deltawire import Replica, Run
from deltawire_wordle.processes import free_port
from servers import Server
from tests.engines.test_trl_worker import QUIET, TASK

PAGE = Path(__file__).parents[3] / "docs" / "trl.md"
STEPS = 6

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def test_a_student_follows_through_a_bucket(tmp_path: Path) -> None:
    python, run, log = environments.trl(), (tmp_path / "run").as_uri(), tmp_path / "log"
    folder, teacher_folder = tmp_path / "model", tmp_path / "teacher"
    for place, scale in ((folder, "1"), (teacher_folder, "8")):
        subprocess.run([str(python), str(TASK), "make", str(place), scale], check=True, env=QUIET)
    student, teacher = free_port(), free_port()
    vllm = str(environments.engine("vllm").with_name("vllm"))
    commands = {
        student: [sys.executable, "-m", "deltawire.cli", "serve", run, "--port", str(student), "--poll", "0.2"],
        teacher: [
            vllm, "serve", str(teacher_folder), "--port", str(teacher), "--logprobs-mode", "processed_logprobs",
            "--max-logprobs", "-1", "--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "512",
        ],
    }  # fmt: skip
    code = re.search(r"```python\n(from trl.experimental.async_distillation.*?)```", PAGE.read_text(), re.DOTALL)
    assert code is not None
    snippet = code[1]
    for printed, here in (
        ("hf://buckets/me/student", run),
        ("https://student.example", f"http://127.0.0.1:{student}"),
        ("https://teacher.example", f"http://127.0.0.1:{teacher}"),
        ("my-model", str(folder)),
        ('output_dir="out"', f'**options, max_steps={STEPS}, output_dir="{tmp_path / "out"}"'),
    ):
        assert snippet.count(printed) == 1, printed
        snippet = snippet.replace(printed, here)
    (tmp_path / "snippet.py").write_text(snippet)
    environment = {**QUIET, **environments.VLLM_ON_A_CPU}
    with (
        Server(commands[student], student, env=QUIET, log=log) as server,
        Server(commands[teacher], teacher, env=environment, log=tmp_path / "teacher.log") as scoring,
    ):
        scoring.wait("/health")
        said = subprocess.run(
            [str(python), str(TASK), "distill", str(folder), str(tmp_path / "snippet.py")],
            env=QUIET, stdout=subprocess.PIPE, text=True, timeout=900,
        )  # fmt: skip
        assert said.returncode == 0
        opened = Run.open(run)
        newest = opened.newest()
        status = server.wait("/deltawire/status", version=newest)
    assert status.get("failures", 0) == 0
    entries = [entry for entry in json.loads(said.stdout.splitlines()[-1])["log"] if "loss" in entry]
    assert len(entries) == STEPS
    assert entries[-1]["deltawire/version"] > 0
    # the first version, one per sync, and none that was lost
    assert opened.manifest(newest).step == STEPS + 1
    final = load_file(folder / "final.safetensors")
    live = {name: torch.zeros_like(tensor) for name, tensor in final.items()}
    Replica(run, heartbeat=0).sync(live)
    assert all(torch.equal(live[name].view(torch.int16), final[name].view(torch.int16)) for name in live)
