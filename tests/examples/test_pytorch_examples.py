"""examples/pytorch.py and examples/follow.py, as two programs that share a folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from deltawire.bucket.run import Run

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_one_trains_and_one_follows(tmp_path: Path) -> None:
    run = (tmp_path / "run").as_uri()
    trained = subprocess.run(
        [sys.executable, str(EXAMPLES / "pytorch.py"), run, "--steps", "6", "--rest", "0"],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    newest = Run.open(run).newest()
    assert trained.stdout.startswith("step 6 ")
    assert trained.stdout.endswith(f"version {newest}\n")
    followed = subprocess.run(
        [sys.executable, str(EXAMPLES / "follow.py"), run, "--until", str(newest)],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert followed.stdout.splitlines()[-1].startswith(f"version {newest}  error 0.")
