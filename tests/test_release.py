"""What would be released, and the commands that messages and documents give for installing it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from deltawire.core.extras import install_command
from tests import release

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["tar.gz", "whl"])
def test_it_installs_and_runs_in_a_clean_environment(kind: str, tmp_path: Path) -> None:
    (artifact,) = [path for path in release.build(tmp_path / "dist") if path.name.endswith(kind)]
    release.try_out(artifact, tmp_path)


@pytest.mark.parametrize(
    ("noted", "command"),
    [
        ({"url": "file:///my%20clone", "dir_info": {"editable": True}}, "pip install -e '/my clone[hub]'"),
        ({"url": "file:///clone", "dir_info": {}}, "pip install 'deltawire[hub] @ file:///clone'"),
        ({"url": "file:///x.whl", "archive_info": {}}, "pip install 'deltawire[hub] @ file:///x.whl'"),
        (
            {"url": "https://example.org/d.git", "vcs_info": {"vcs": "git", "commit_id": "0"}},
            "pip install 'deltawire[hub] @ git+https://example.org/d.git'",
        ),
        (None, f"pip install -e '{ROOT}[hub]'"),  # found in a clone by PYTHONPATH
    ],
)
def test_an_extra_is_installed_from_where_deltawire_came_from(
    noted: dict[str, Any] | None, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "deltawire-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: deltawire\nVersion: 0.1.0\n")
    if noted:
        (info / "direct_url.json").write_text(json.dumps(noted))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert install_command("hub") == command


def test_nothing_says_to_install_a_release_that_there_is_not() -> None:
    """Until there is one, every line must work from a clone."""
    files = [
        p
        for pattern in ("*.md", "docs/*.md", "examples/**/*", "deploy/**/*", "src/**/*.py")
        for p in ROOT.glob(pattern)
    ]
    wrong = re.compile(r"pip install (-\S+ )*[\"']?deltawire(?!-)")
    found = [str(p) for p in files if p.is_file() and p.suffix in (".md", ".py") and wrong.search(p.read_text())]
    assert not found
