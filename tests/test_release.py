"""What would be released, and the commands that messages and documents give for installing it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests import release
from tests.docs.documents import blocks

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["tar.gz", "whl"])
def test_it_installs_and_runs_in_a_clean_environment(kind: str, tmp_path: Path) -> None:
    (artifact,) = [path for path in release.build(tmp_path / "dist") if path.name.endswith(kind)]
    release.try_out(artifact, tmp_path)


def test_nothing_says_to_install_a_release_that_there_is_not() -> None:
    """Until there is one, every line must say where from: a clone, or `deltawire @ $DW`."""
    files = [
        p
        for pattern in ("*.md", "docs/**/*.md", "examples/**/*", "deploy/**/*", "src/**/*.py")
        for p in ROOT.glob(pattern)
    ]
    wrong = re.compile(r"pip install (-\S+ )*[\"']?deltawire(?!-)(?!(\[[\w,]+\])? @ )")
    found = [str(p) for p in files if p.is_file() and p.suffix in (".md", ".py") and wrong.search(p.read_text())]
    assert not found


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md", "docs/trl.md", "docs/vllm.md"])
def test_documents_install_as_the_release_is_checked(page: str) -> None:
    """`make release-check` types these commands in empty environments."""
    lines = [line for block in blocks(page) for line in block.code.splitlines()]
    typed = {line.partition("#")[0].rstrip() for line in lines if " @ $DW" in line}
    wanted = {"docs/trl.md": {release.TRAINER}, "docs/vllm.md": {release.ENGINE}}
    assert typed == wanted.get(page, {release.TRAINER, release.ENGINE})


def test_the_workflow_and_the_check_run_every_python_that_is_promised() -> None:
    promised = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text())
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    matrix = re.search(r"python-version: (\[.*\])", workflow)
    assert matrix is not None
    assert tuple(promised) == release.PYTHONS == tuple(json.loads(matrix[1]))


def test_an_interpreter_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    assert release.interpreter("3.9") is None
    broken = tmp_path / "python3.9"
    broken.write_text("#!/bin/sh\nexit 127\n")
    broken.chmod(0o755)
    assert release.interpreter("3.9") is None, "the shim of a version that is not switched on"
