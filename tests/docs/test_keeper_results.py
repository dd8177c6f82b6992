"""The figures in docs/keeper.md are those that the benchmarks wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/keeper.md").read_text()


def results(name: str) -> Any:
    return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())


def test_a_trainer_on_a_slow_link() -> None:
    alone, kept = results("keeper")["runs"]
    assert (alone["keeper"], kept["keeper"]) == (False, True)
    assert alone["verified"]
    assert kept["verified"]
    for row in (
        f"| bytes the trainer sent | {alone['trainer_sent_bytes'] / 1e6:.1f} MB | "
        f"{kept['trainer_sent_bytes'] / 1e6:.1f} MB |",
        f"| anchors uploaded by the trainer | {alone['trainer_anchors']} | {kept['trainer_anchors']} |",
        f"| steps per minute | {alone['steps_per_minute']:g} | {kept['steps_per_minute']:g} |",
        f"| versions per minute | {alone['versions_per_minute']:g} | {kept['versions_per_minute']:g} |",
        f"the commit, median | {alone['commit_s']['median']} s | {kept['commit_s']['median']} s |",
        f"waits for an anchor | {alone['commit_s']['longest']} s | {kept['commit_s']['longest']} s |",
        f"in a replica, median | {alone['lag_s']['median']} s | {kept['lag_s']['median']} s |",
        f"99 of 100 | {alone['lag_s']['p99']} s | {kept['lag_s']['p99']} s |",
    ):
        assert row in PAGE, row


def test_catching_up() -> None:
    found = results("catch-up")
    assert found["verified"]
    for row in found["catch_up"]:
        what = "a server that joins" if row["behind"] is None else f"{row['behind']:,} behind"
        for name, label in (("without", "deltas and anchors"), ("with", "with skip deltas")):
            x = row[name]
            cells = (
                what,
                label,
                x["objects"],
                f"{x['requests']:,}",
                f"{x['bytes'] / 1e6:.1f} MB",
                f"{x['seconds']:.1f} s",
            )
            assert f"| {' | '.join(map(str, cells))} |" in PAGE, row
