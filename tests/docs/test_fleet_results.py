"""The tables of docs/https.md are what benchmarks/fleet.py measured."""

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
