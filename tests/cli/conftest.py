from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_support import invoke, trained, weights, write_checkpoint

STEPS = 4


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """`publish` notes there which folder it published last."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def _made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps of a training, as folders, and a run with those steps as its versions. Made once, copied for each."""
    home, now = tmp_path_factory.mktemp("made"), weights()
    for step in range(STEPS):
        files = {"config.json": f'{{"step": {step // 2}}}', "tokenizer.json": "{}", "chat_template.jinja": "hello"}
        write_checkpoint(home / f"step-{step}", now, files=files)
        invoke("publish", home / f"step-{step}", home / "run", "--step", step * 10)
        now = trained(now, seed=step + 1)
    return home


@pytest.fixture
def checkpoints(tmp_path: Path, _made: Path) -> list[Path]:
    return [shutil.copytree(_made / f"step-{step}", tmp_path / f"step-{step}") for step in range(STEPS)]


@pytest.fixture
def run(tmp_path: Path, _made: Path) -> Path:
    return shutil.copytree(_made / "run", tmp_path / "run")
