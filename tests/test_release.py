"""What would be released, and the commands that messages and documents give for installing it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import release

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["tar.gz", "whl"])
def test_it_installs_and_runs_in_a_clean_environment(kind: str, tmp_path: Path) -> None:
    (artifact,) = [path for path in release.build(tmp_path / "dist") if path.name.endswith(kind)]
    release.try_out(artifact, tmp_path)


def test_nothing_says_to_install_a_release_that_there_is_not() -> None:
    """Until there is one, every line must work from a clone."""
    files = [
        p
        for pattern in ("*.md", "docs/**/*.md", "examples/**/*", "deploy/**/*", "src/**/*.py")
        for p in ROOT.glob(pattern)
    ]
    wrong = re.compile(r"pip install (-\S+ )*[\"']?deltawire(?!-)")
    found = [str(p) for p in files if p.is_file() and p.suffix in (".md", ".py") and wrong.search(p.read_text())]
    assert not found
