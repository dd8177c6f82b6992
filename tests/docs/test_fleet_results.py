"""The tables of docs/https.md and docs/fleet.md are what benchmarks/fleet.py and benchmarks/heartbeats.py measured."""

from __future__ import annotations

import importlib
import json
from typing import Any

import pytest

from tests.docs.documents import ROOT


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def results(name: str) -> Any:
    return json.loads((ROOT / "benchmarks/results" / name).read_text())


def test_followers() -> None:
    fleet, page, found = importlib.import_module("fleet"), (ROOT / "docs/https.md").read_text(), results("fleet.json")
    for row in found["rows"]:
        assert fleet.line(row) in page
        for outage in row.get("outages", []):
            assert fleet.after(outage) in page
            assert "\n".join(fleet.histogram(outage)) in page
            rates = outage["requests_per_second"]
            assert rates["busiest after"] < 1.5 * rates["before"], "they do not come back at once"
    behind = [row["per_version"]["at origin"] for row in found["rows"] if row["way"] == "nginx"]
    assert max(behind) < 1.5 * min(behind), "whatever the number of followers"


def test_heartbeats() -> None:
    heartbeats, page = importlib.import_module("heartbeats"), (ROOT / "docs/fleet.md").read_text()
    rows = results("heartbeats.json")["rows"]
    for row in rows:
        assert heartbeats.line(row) in page
        without, roster = row["looks"]
        assert (
            roster["requests"] == 2 <= without["requests"] <= 1000 + 1 + -(-(row["real"] + row["forged"] + 2) // 1000)
        )
        assert roster["real_shown"] == row["real"], "nobody is hidden"
    for store in ("s3", "file"):
        costs = [row["requests_per_version"] for row in rows if row["store"] == store]
        assert max(costs) - min(costs) < 0.5, "whatever the number of heartbeats"
