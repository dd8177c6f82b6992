"""plan as typed: what it prints, what it exits with."""

from __future__ import annotations

import pytest
from cli_support import invoke, invoke_json


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
def test_wrong_arguments_of_plan_are_refused(options: tuple[object, ...]) -> None:
    invoke("plan", *options, code=2)
