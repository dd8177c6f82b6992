"""The memory benchmark, on a small checkpoint, as a test."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent / "benchmarks" / "memory.py"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_copy_of_the_model_and_little_more() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCH), "--gb", "0.4", "--check"], capture_output=True, text=True, timeout=580
    )
    assert done.returncode == 0, done.stdout + done.stderr
