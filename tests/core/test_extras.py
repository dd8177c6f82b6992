"""How to install what is missing, from where deltawire itself came."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from deltawire.core.extras import install_command

ROOT = Path(__file__).parents[2]


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
