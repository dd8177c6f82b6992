"""What the fuzzer found stays fixed; and the fuzzer finds what it is there to find."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import forks

HERE = Path(__file__).parent


def fuzz(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(HERE), *map(str, arguments)]
    environment = {**os.environ, "FUZZ_CPU_LIMIT": "2"} if "broken" in arguments else os.environ
    return forks.run(command, env=environment, timeout=800)


def test_kept_cases() -> None:
    done = fuzz("--replay")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(list((HERE / 'found').glob('*.json')))} kept cases, 0 findings" in done.stdout


@pytest.mark.timeout(300)
def test_a_few_seconds_of_interrupts(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    report = tmp_path / "report.json"
    done = fuzz("--mode", "interrupt", "--minutes", 0.1, "--seed", 20261118, "--json", report)
    assert done.returncode == 0, done.stdout + done.stderr
    kinds: dict[str, dict[str, int]] = json.loads(report.read_text())["kinds"]
    publishing = {"publish", "publish device", "publish pairs", "import"}
    assert kinds.keys() == publishing | {"sync", "sync device", "keep", "prune", "follow"}
    assert sum(tally["interrupted"] for tally in kinds.values()) > 0
    assert "0 wrong, 0 hung" in done.stdout


@pytest.mark.slow
def test_every_kind_of_fault_is_found_kept_and_found_again(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = fuzz("--kind", "broken", "--seed", 1, "--minutes", 2, "--most", 6, "--keep", tmp_path, "--json", report)
    assert done.returncode == 1, done.stderr
    result: dict[str, Any] = json.loads(report.read_text())
    kept = {json.loads(Path(f["file"]).read_text())["action"]: f for f in result["findings"]}
    assert sorted(kept) == ["die", "foreign", "grow", "hang", "too large", "wrong"]
    assert kept["foreign"]["found"] == "KeyError: 'version'"
    assert kept["hang"]["found"].startswith("computed for more than")
    assert result["kinds"]["broken"]["outcomes"].keys() == {"ok", "ManifestError", "FOUND"}
    again = fuzz("--replay", *(finding["file"] for fault, finding in kept.items() if fault != "hang"))
    assert (again.returncode, again.stdout.splitlines()[-1]) == (1, "5 kept cases, 5 findings")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_minute_of_everything(tmp_path: Path) -> None:
    done = fuzz("--minutes", 1, "--seed", 20261115, "--keep", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
