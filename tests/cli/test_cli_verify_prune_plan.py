"""verify, prune and plan as typed: what they print, what they exit with."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cli_support import invoke, invoke_json

from deltawire.bucket.run import Run
from deltawire.core import keys


def newest_delta(run: Path) -> Path:
    return run / Run.open(str(run)).manifest(3).links[0].objects[0].key


# ── verify ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_verify_says_good(run: Path) -> None:
    result = invoke("verify", run)
    assert result.stdout.startswith("good")
    assert "4 versions" in result.stdout
    value = invoke_json("verify", run)
    assert (value["ok"], value["versions"], value["proven"], value["failure"]) == (True, 4, 4, None)


def test_verify_names_the_bad_thing_and_exits_with_3(run: Path) -> None:
    delta = newest_delta(run)
    data = bytearray(delta.read_bytes())
    data[-1] ^= 1
    delta.write_bytes(data)
    result = invoke("verify", run, code=3)
    assert f"bad   version 3: deltas/{delta.name}" in result.stdout
    assert "HashMismatch" in result.stdout
    assert "what to do: " in result.stdout
    value = invoke_json("verify", run, "--quick", code=3)
    assert value["failure"]["version"] == 3
    assert invoke_json("verify", run, "--to", 2)["ok"]


def test_verify_of_what_is_not_there(run: Path, tmp_path: Path) -> None:
    invoke("verify", tmp_path / "nothing", code=4)
    assert "no version from 9 on; it has versions 0 to 3" in invoke("verify", run, "--from", 9, code=4).stderr
    assert "no version from 8 up to 9" in invoke("verify", run, "--from", "v8", "--to", 9, code=4).stderr
    assert invoke_json("verify", run, "--from", "-1")["versions"] == 1


# ── prune ────────────────────────────────────────────────────────────────────────────────────────────────────────────


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


def test_the_preview_says_what_the_deed_does(run: Path, checkpoints: list[Path]) -> None:
    invoke("publish", checkpoints[0], run, "--anchor")
    for grace in ("0s", "1h"):
        options = ("prune", run, "--keep-last", 1, "--grace", grace)
        preview, deed = invoke_json(*options), invoke_json(*options, "--apply")
        assert {**preview, "applied": True} == deed
    assert deed["gone"] == []
    assert preview["deleted"] == []


def test_prune_used_wrongly(run: Path) -> None:
    invoke("prune", run, "--grace", "soon", code=2)
    invoke("prune", run, "--keep", 99, code=4)


# ── plan ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_plan_for_people() -> None:
    text = invoke(
        "plan",
        "--params",
        "405e9",
        "--lr",
        "1e-6",
        "--bandwidth",
        "1Gbit",
        "--replicas",
        64,
        "--price-egress",
        0.09,
        "--all",
    ).stdout
    for words in (
        "a delta",
        "an anchor every",
        "fetch by a replica",
        "in the bucket",
        "measured",
        "extrapolated",
        "USD",
    ):
        assert words in text
    assert "benchmarks/costs_table.py" in text


def test_plan_begins_with_what_it_comes_to() -> None:
    text = invoke("plan", "--params", "7B", "--replicas", 8, columns=80).stdout
    headline = " ".join(text.split("\n  ")[0].split())
    assert headline.startswith("A version is a delta of 85.7 MB instead of 14 GB (163× smaller) and is on a replica")
    assert len(text.splitlines()) <= 20
    slow = invoke("plan", "--params", "7B", "--step-seconds", "100ms").stdout
    assert "longer than the 100 ms of a step" in " ".join(slow.split())


def test_plan_for_programs() -> None:
    value = invoke_json("plan", "--params", "7B", "--bandwidth", "10Gbit", "--steps-per-hour", 120)
    assert value["setup"]["params"] == 7e9
    assert value["setup"]["replica_bandwidth"] == 1.25e9
    assert value["setup"]["step_seconds"] == 30
    delta = value["figures"]["delta_bytes"]
    assert (delta["unit"], delta["basis"]) == ("bytes", "extrapolated")
    assert value["figures"]["density"]["basis"] == "measured"
    given = invoke_json("plan", "--params", "7B", "--density", 0.02)["figures"]["density"]
    assert (given["value"], given["basis"]) == (0.02, "given")


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--params", "many"),
        ("--params", "7B", "--bandwidth", "fast"),
        ("--params", "7B", "--dtype", "int4"),
        ("--params", "7B", "--dtype", "fp32"),
        ("--params", "7B", "--encoding", "zip"),
        ("--params", "7B", "--density", 1.5),
        ("--params", "7B", "--step-seconds", "30s", "--steps-per-hour", 60),
    ],
)
def test_plan_used_wrongly(options: tuple[object, ...]) -> None:
    invoke("plan", *options, code=2)
