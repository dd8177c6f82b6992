from __future__ import annotations

from pathlib import Path

import pytest
from cli_support import invoke, trained, weights, write_checkpoint


@pytest.fixture
def checkpoints(tmp_path: Path) -> list[Path]:
    """Four steps of a training, as folders."""
    folders, now = [], weights()
    for step in range(4):
        files = {"config.json": f'{{"step": {step // 2}}}', "tokenizer.json": "{}", "chat_template.jinja": "hello"}
        folders.append(write_checkpoint(tmp_path / f"step-{step}", now, files=files))
        now = trained(now, seed=step + 1)
    return folders


@pytest.fixture
def run(tmp_path: Path, checkpoints: list[Path]) -> Path:
    """A run with those steps as its versions."""
    where = tmp_path / "run"
    for step, folder in enumerate(checkpoints):
        invoke("publish", folder, where, "--step", step * 10)
    return where
