"""A minute of benchmarks/spot_fleet.py: replicas and keepers die, and no state and no answer is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_minute_of_a_spot_fleet(tmp_path: Path) -> None:
    options = ["--minutes", "1", "--processes", "4", "--servers", "1", "--keeper-kills", "3", "--every", "1"]
    command = [sys.executable, "benchmarks/spot_fleet.py", *options, "--out", str(tmp_path / "found.json")]
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    # it ends with a message where anything was wrong
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["states_checked"] > 100
    assert found["ready"] >= found["setup"]["replicas"]
    assert found["killed"]["keepers"] == 3
