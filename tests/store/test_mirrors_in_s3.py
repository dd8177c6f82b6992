"""A few seconds of benchmarks/mirrors.py: two S3 servers, a keeper that mirrors, and a mirror that is cut off."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_mirror_that_is_cut_off_for_some_seconds(tmp_path: Path) -> None:
    options = ["--cut", "6", "--versions", "5", "--replicas", "2", "--out", str(tmp_path / "found.json")]
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "benchmarks/mirrors.py", *options],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
    )  # fmt: skip
    # it ends with a message where a state was wrong, full weights were fetched again, or a bucket does not verify
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
