"""The tables of docs/fleet.md and docs/fleet-cost.md are what the model computes and the benchmarks found."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def simulation(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("fleet_cost")


def test_document_and_results_are_what_it_computes(simulation: Any) -> None:
    found = json.loads((ROOT / "benchmarks/results/fleet-cost.json").read_text())
    assert json.loads(json.dumps(simulation.simulate(simulation.World()))) == found, "python benchmarks/fleet_cost.py"
    page = (ROOT / "docs/fleet-cost.md").read_text()
    assert "\n".join(simulation.table(found)) in page
    # every assumption is in the text
    for name, value in found["assumptions"].items():
        assert f"| `{name}` | {value:g} |" in page, name


def test_what_must_hold_whatever_the_figures(simulation: Any) -> None:
    for model in simulation.simulate(simulation.World())["models"]:
        ways = {way["way"]: way for way in model["ways"]}
        assert ways["deltas, mirrors"]["usd_per_hour"] < ways["deltas, one bucket"]["usd_per_hour"]
        assert ways["deltas, mirrors"]["p99_s"] < ways["full, mirrors"]["p99_s"]
        assert ways["deltas, mirrors, caches"]["gets_per_hour"] < ways["deltas, mirrors"]["gets_per_hour"]
        assert all(way["p50_s"] <= way["p99_s"] for way in model["ways"])


def test_prices_and_sizes_are_options(simulation: Any) -> None:
    world = simulation.World(replicas=10, regions=1, price_between=0.0, price_get=0.0, price_put=0.0)
    ways = simulation.Fleet(simulation.MODELS[0], world).simulate(simulation.WAYS[2])
    assert (ways["usd_per_hour"], ways["between_regions_bytes_per_hour"]) == (0, 0)


def test_the_table_of_a_region_that_is_cut_off() -> None:
    found = json.loads((ROOT / "benchmarks/results/mirrors.json").read_text())
    page = (ROOT / "docs/fleet.md").read_text()
    for text, value in (
        (
            "states of replicas that were not what was published",
            f"{len(found['wrong_states'])} of {found['states_checked']}",
        ),
        ("full weights fetched after the first sync", f"{found['full_bytes_after_the_first_sync']} bytes"),
        ("longest time without a new version, among all replicas", f"{found['longest_without_a_version_s']} s"),
        ("until the mirror had what it had missed", f"{found['mirror_caught_up_s']} s"),
    ):
        assert f"| {text} | {value} |" in page
    assert not found["wrong_states"]
    assert found["home_verifies"]
    assert found["mirror_verifies"]
    assert found["same_objects"]
    assert f"with the same {found['objects']} objects | yes |" in page


def test_the_table_of_the_spot_fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    found = json.loads((ROOT / "benchmarks/results/spot-fleet.json").read_text())
    spot_fleet = importlib.import_module("spot_fleet")
    assert spot_fleet.problems(found) == []
    assert "\n".join(spot_fleet.table(found)) in (ROOT / "docs/fleet.md").read_text()
