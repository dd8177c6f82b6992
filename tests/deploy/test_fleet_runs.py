"""Small runs of benchmarks/fleet.py, through a real nginx, and of benchmarks/heartbeats.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]


def results(tmp_path: Path, script: str, *options: str) -> Any:
    out = tmp_path / "found.json"
    command = [sys.executable, f"benchmarks/{script}", *options, "--out", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=500)
    return json.loads(out.read_text())


def test_what_a_bucket_gets_does_not_depend_on_the_followers(tmp_path: Path) -> None:
    options = ["--followers", "5", "40", "--direct", "5", "--versions", "4", "--every", "3", "--outage", "6"]
    few, many, direct = results(tmp_path, "fleet.py", *options)["rows"]
    assert few["per_version"]["at origin: deltas"] == many["per_version"]["at origin: deltas"] == 1
    assert many["per_version"]["at origin"] < 2 * few["per_version"]["at origin"]
    assert many["per_version"]["requests"] > 4 * few["per_version"]["requests"]
    assert direct["per_version"]["at origin"] == direct["per_version"]["requests"]
    for outage in many["outages"]:
        assert sum(outage["had"]) == 40, "all of them came back"


def test_heartbeats_are_read_in_two_requests(tmp_path: Path) -> None:
    for row in results(tmp_path, "heartbeats.py", "--real", "250", "--forged", "0", "1500", "--stores", "file")["rows"]:
        without, roster = row["looks"]
        assert (roster["requests"], roster["real_shown"]) == (2, 250)
        assert without["requests"] > 250
