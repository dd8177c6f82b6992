"""The tables in docs/wordle-gpu.md are those of the run that is in benchmarks/results."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/wordle-gpu.md").read_text()
FOUND = json.loads((ROOT / "benchmarks/results/wordle-gpu.json").read_text())


def test_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    for table in importlib.import_module("_wordle_figures").tables(FOUND):
        assert table in PAGE, table


def test_what_the_run_shows() -> None:
    deltas, none = FOUND["deltas"], FOUND["none"]
    assert deltas["solved_last"] - deltas["solved_first"] >= 0.2
    assert none["solved_last"] - none["solved_first"] < 0.1
    for checked in FOUND.get("labels", {}).values():
        assert checked["wrong"] == 0
        assert min(checked["mean_difference"], key=checked["mean_difference"].get) == "0"


def test_what_the_page_and_the_front_page_say_of_it() -> None:
    rise = f"from {FOUND['deltas']['solved_first']:.0%} to {FOUND['deltas']['solved_last']:.0%}"
    sent = f"{FOUND['deltas']['bytes_per_step'] / 1e6:.1f} MB"
    for text in (PAGE, (ROOT / "README.md").read_text()):
        assert rise in " ".join(text.split()), rise
        assert sent in " ".join(text.split()), sent
