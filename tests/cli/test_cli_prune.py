"""prune as typed: what it prints, what it exits with."""

from __future__ import annotations

import os
from pathlib import Path

from cli_support import invoke, invoke_json

from deltawire.core import keys


def test_prune_only_looks_unless_told_to(run: Path) -> None:
    before = sorted(run.rglob("*"))
    result = invoke("prune", run, "--keep-last", 1, "--grace", "0s")
    assert "nothing can go" in result.stdout, "the newest version needs all of them"
    orphan = run / keys.anchor(2, "deadbeef")
    orphan.write_bytes(b"garbage")
    result = invoke("prune", run, "--grace", "0s")
    assert "anchors and deltas" in result.stdout
    assert "add --apply" in result.stdout
    assert sorted(run.rglob("*")) == sorted([*before, orphan])


def test_prune_applies(run: Path, checkpoints: list[Path]) -> None:
    invoke("publish", checkpoints[0], run, "--anchor")
    value = invoke_json("prune", run, "--keep-last", 1, "--keep", 1, "--grace", "0s", "--apply")
    assert (value["applied"], value["newest"], value["gone"]) == (True, 4, [2, 3])
    assert value["kept"]["0"] == "on the way to one that stays"
    assert value["bytes"] > 0
    assert invoke_json("verify", run)["versions"] == 3
    assert [version["version"] for version in invoke_json("log", run)["versions"]] == [4, 1, 0]
    invoke("checkout", f"{run}@2", "-o", run.parent / "out", code=4)
    invoke("checkout", f"{run}@1", "-o", run.parent / "out")
    assert "what went" not in invoke("prune", run, "--keep-last", 1, "--keep", 1, "--grace", "0s").stdout


def test_prune_marks_first_and_says_when_it_goes(run: Path, checkpoints: list[Path]) -> None:
    invoke("publish", checkpoints[0], run, "--anchor")
    for path in run.rglob("*.*"):
        os.utime(path, (0, 0))
    marked = invoke_json("prune", run, "--keep-last", 1, "--grace", "1h", "--apply")
    assert (marked["marked"], marked["deleted"]) == ([0, 1, 2, 3], [])
    assert marked["marked_bytes"] > 0
    waiting = invoke("prune", run, "--keep-last", 1, "--grace", "1h", "--apply").stdout
    assert "0–3 wait: marked less than the grace period ago" in waiting
    os.utime(run / keys.PRUNED, (0, 0))
    assert invoke_json("prune", run, "--keep-last", 1, "--grace", "1h", "--apply")["gone"] == [0, 1, 2, 3]
    assert invoke_json("verify", run)["versions"] == 1


def test_the_preview_of_prune_equals_its_result(run: Path, checkpoints: list[Path]) -> None:
    invoke("publish", checkpoints[0], run, "--anchor")
    for grace in ("0s", "1h"):
        options = ("prune", run, "--keep-last", 1, "--grace", grace)
        preview, deed = invoke_json(*options), invoke_json(*options, "--apply")
        assert {**preview, "applied": True} == deed
    assert deed["gone"] == []
    assert preview["deleted"] == []


def test_wrong_arguments_of_prune_are_refused(run: Path) -> None:
    invoke("prune", run, "--grace", "soon", code=2)
    invoke("prune", run, "--keep", 99, code=4)
