"""The blocks of the documents that need a real vLLM: part of `make test-vllm`, in its environment."""

from __future__ import annotations

from pathlib import Path

import pytest
from documents import blocks, to_run
from scenes import SCENES
from stage import Stage

from tests.environments import VLLM_ON_A_CPU


@pytest.mark.parametrize("page", to_run("vllm"))
def test_vllm(page: str, tmp_path: Path) -> None:
    """There is no S3 server in that environment: runs lie in a folder."""
    with Stage(tmp_path, None, (tmp_path / "runs").as_uri(), VLLM_ON_A_CPU) as stage:
        stage.run_all(blocks(page), "vllm", SCENES)
