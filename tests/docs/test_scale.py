"""The tables of docs/scale.md are what the benchmarks found and what `deltawire plan` computes."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from deltawire.cli.plan import MODEL_COLUMNS, model_rows

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/scale.md").read_text()


def results(name: str) -> Any:
    return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())


@pytest.fixture(autouse=True)
def programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


@pytest.fixture
def growth() -> Any:
    return importlib.import_module("growth")


def test_growth_is_what_was_measured(growth: Any) -> None:
    found = results("growth")
    assert "\n".join(growth.table(found["fit"])) in PAGE
    assert "\n".join(growth.seconds(found["rows"], 0.01)) in PAGE
    fitted = growth.fit(found["rows"])
    for name, terms in found["fit"].items():
        assert fitted[name] == pytest.approx(terms), name


def test_a_fit_finds_the_terms_that_figures_were_made_of(growth: Any) -> None:
    def row(weights: float, share: float, ranks: int) -> dict[str, Any]:
        cost = 1e-3 + 2e-10 * weights + 7e-9 * weights * share + 0.02 * (ranks - 1)
        figures = dict.fromkeys(growth.FITTED, cost)
        memory = dict.fromkeys(growth.BYTES, 1e8 + 2 * weights)
        return {
            "weights": weights, "ranks": ranks, "share": share, "changed": weights * share, "generated": False,
            "cpu": figures, "memory": memory,
        }  # fmt: skip

    rows = [row(w, share, ranks) for w in (1e8, 3e8, 1e9) for share in growth.SHARES for ranks in (1, 2, 8)]
    found = growth.fit(rows)["held"]
    for name, value in (("constant", 1e-3), ("per_weight", 2e-10), ("per_change", 7e-9), ("per_rank", 0.02)):
        assert found[name] == pytest.approx(value, rel=1e-6), name
    assert found["worst_error"] < 1e-6
    memory = growth.fit(rows)["trainer"]
    assert memory["per_weight"] == pytest.approx(2)
    assert memory["per_change"] == pytest.approx(0, abs=1e-6)


def test_models_are_what_plan_computes() -> None:
    lines = [f"| {' | '.join(row)} |" for row in (list(MODEL_COLUMNS), *model_rows())]
    assert all(line in PAGE for line in lines), lines


def test_tensors_and_versions_are_what_was_measured() -> None:
    tensors, versions = results("many-tensors"), results("long-run")
    assert "\n".join(importlib.import_module("many_tensors").table(tensors["rows"])) in PAGE
    assert "\n".join(importlib.import_module("long_run").table(versions["asked"], versions["s3"]["asked"])) in PAGE
    assert all(found["about"]["command"] in PAGE for found in (tensors, versions))
    # whatever the figures: who needs little reads little, however long the run is
    asked = {(row["question"], row["version"]): row for row in versions["asked"] if "pruned" not in row}
    newest = versions["versions"] - 1
    for question in ("newest version", "catch up, 4 behind", "log -n 20", "dash, nothing new"):
        few, many = asked[question, versions["versions"] // 10 - 1], asked[question, newest]
        assert many["requests"] <= few["requests"] + 4, question
        assert many["bytes"] < 100_000, question
