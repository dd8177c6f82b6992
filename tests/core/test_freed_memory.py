"""Kernels read by address, and an address keeps no array alive: here freed memory is overwritten or unmapped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deltawire.core.codecs import ENCODINGS

HARSH = {"MALLOC_PERTURB_": "85", "MALLOC_MMAP_THRESHOLD_": "65536"}

ROUND_TRIP = """
import sys
from deltawire.core.schema import Schema, TensorSpec
from support import applied, diff, encoded, moved_bag, random_bag

schema = Schema.build([TensorSpec("a", "BF16", (600, 700)), TensorSpec("b", "F32", (300_000,))])
old = random_bag(schema, 1)
for density in (0.05, 1.0):
    new = moved_bag(old, 2, density)
    for encoding in sys.argv[1:]:
        assert applied(encoded(old, diff(old, new), encoding), old)[0] == new, encoding
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the settings are glibc's")
def test_no_kernel_reads_what_was_freed() -> None:
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", ROUND_TRIP, *ENCODINGS],
        env={**os.environ, **HARSH, "PYTHONPATH": path}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
