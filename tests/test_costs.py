"""`deltawire.costs`: the measured figures, plausible and those of the benchmarks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import deltawire as dw
from deltawire.costs import CODING, DEVICE, SPEEDS, TRAINING, bits_at, density_at


def test_measured_points_are_met_exactly() -> None:
    for point in TRAINING:
        assert density_at(point.lr) == pytest.approx(point.changed)
        assert density_at(point.lr, first=True) == pytest.approx(point.first)
        assert bits_at(point.changed, "packed") == pytest.approx(point.bits)


@given(st.floats(1e-9, 1e-2), st.floats(1.0001, 10))
def test_a_higher_learning_rate_never_changes_less(lr: float, factor: float) -> None:
    assert 0 < density_at(lr) <= density_at(lr * factor) <= 1
    assert density_at(lr) <= density_at(lr, first=True) <= 1


@given(st.floats(1e-6, 1))
def test_context_is_never_worse_than_packed_and_packed_never_than_raw(density: float) -> None:
    assert 3 < bits_at(density, "context") <= bits_at(density, "packed") < bits_at(density, "raw") == 48


def test_the_table_is_what_the_codec_does_today() -> None:
    """A coarse look; benchmarks/costs_table.py measures. Steps of one ulp are the codec's best case."""
    rng = np.random.default_rng(0)
    old = (rng.standard_normal(1 << 20, np.float32) * np.float32(0.02)).view(np.uint32) >> 16
    old = old.astype(np.uint16)
    for density in (0.01, 0.1):
        new = old.copy()
        where = np.flatnonzero(rng.random(old.size) < density)
        new[where] += rng.choice(np.array([1, 65535], np.uint16), where.size)
        bits = 8 * len(dw.encode({"w": old}, {"w": new}, threads=1)) / where.size
        assert 0.7 < bits / bits_at(density, "packed") < 1.05
    for density, lr in ((0.012, 3e-7), (0.08, 3e-6)):
        # a step of this size, which the smaller weights feel more often
        master = rng.standard_normal(1 << 20, np.float32) * np.float32(0.02)
        stepped = master + np.float32(lr) * rng.standard_normal(1 << 20, np.float32)
        one, two = ((w.view(np.uint32) >> 16).astype(np.uint16).reshape(-1, 1024) for w in (master, stepped))
        share = float(np.mean(one != two))
        assert 0.5 < share / density < 2
        bits = 8 * len(dw.encode({"w": one}, {"w": two}, "context", threads=1)) / (share * one.size)
        assert 0.8 < bits / bits_at(share, "context") < 1.2


def test_speeds_are_those_of_the_benchmark() -> None:
    """Costs per weight and per change: the line through the two densities that were measured."""
    path = Path(__file__).parents[1] / "benchmarks" / "results" / "codec-full-ours.json"
    few, many = json.loads(path.read_text())["rows"]
    assert SPEEDS.detect == pytest.approx(1e9 / many["detect_ns_per_weight"], rel=0.05)
    assert SPEEDS.prove == pytest.approx(1e9 / many["digest_ns_per_weight"], rel=0.05)
    assert SPEEDS.apply == pytest.approx(1e9 / many["packed_ns_per_change"]["scatter"], rel=0.05)
    for name, coding in CODING.items():
        for row in (few, many):
            found = next(f for f in row["formats"] if f["name"] == name)
            written = row["packed_ns_per_change"]["scatter"] * row["density"]
            for cost, measured in (
                (coding.encode, found["encode_ns_per_weight"]),
                # measured together with the write, which is a phase of its own here
                (coding.decode, found["decode_ns_per_weight"] - written),
            ):
                assert 1e9 * cost(1.0, row["density"]) == pytest.approx(measured, rel=0.15), name


def test_speeds_of_a_gpu_are_those_of_the_benchmark() -> None:
    path = Path(__file__).parents[1] / "benchmarks" / "results" / "held-cuda.json"
    figures = json.loads(path.read_text())
    held = next(row for row in figures["held"] if (row["detector"], row["bucket"]) == ("snapshot", "fast"))
    replica = figures["replica_ms"]["snapshot"]
    weights = 1e6 * held["weights_m"]
    changed = weights * held["changed_percent"] / 100
    for name, milliseconds, amount in (
        ("detect_weight", held["stream_ms"], weights),
        ("encode_change", held["encode_ms"], changed),
        ("decode_change", replica["decode"], changed),
        ("stage_change", replica["stage"], changed),
        ("apply_change", replica["apply"], changed),
        ("prove_weight", replica["prove"], weights),
    ):
        assert getattr(DEVICE, name) == pytest.approx(milliseconds / 1e3 / amount, rel=0.01), name
