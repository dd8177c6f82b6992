"""plan: what it prints, and figures that are plausible and those of the policies they speak of."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from cli_support import invoke, invoke_json

from deltawire.bucket.prune import Retention, plan_prune
from deltawire.cli import prune
from deltawire.cli.plan import GRACE, KEEP_LAST, PHASES, Setup, estimate, resolved
from deltawire.core import keys
from deltawire.core.manifest import Blob, Link, Manifest, Pruned
from deltawire.costs import DTYPES, UnknownCost
from deltawire.store import ObjectInfo
from deltawire.trainer.policy import AnchorPolicy


def costs(**changes: Any) -> dict[str, float]:
    return estimate(resolved(Setup(**{"params": 7e9, **changes})))


# ── as typed ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_plan_for_people() -> None:
    text = invoke("plan", "--params", "7B", "--replicas", 8, columns=80).stdout
    headline = " ".join(text.split("\n  ")[0].split())
    assert headline.startswith("A version is a delta of 85.7 MB instead of 14 GB (163× smaller) and is on a replica")
    for words in ("an anchor every", "fetch", "in the bucket", "joins late", "benchmarks/costs_table.py"):
        assert words in text
    slow = " ".join(invoke("plan", "--params", "7B", "--step-seconds", "100ms").stdout.split())
    assert "longer than the 100 ms of a step" in slow
    assert "versions span several steps" in slow


def test_plan_for_programs() -> None:
    value = invoke_json("plan", "--params", "7B", "--bandwidth", "10Gbit", "--encoding", "auto")
    assert value["setup"]["params"] == 7e9
    assert value["setup"]["replica_bandwidth"] == 1.25e9
    assert value["setup"]["encoding"] == "packed"
    assert value["figures"] == costs(bandwidth=1.25e9, replica_bandwidth=1.25e9)
    assert invoke_json("plan", "--params", "7B", "--density", 0.02)["figures"]["density"] == 0.02


def test_a_model_on_gpus_takes_its_share_of_what_one_gpu_was_measured_with() -> None:
    gpus = {"density": 0.01, "trainer_gpus": 8, "replica_gpus": 4}
    one, more = costs(**gpus), costs(**{**gpus, "params": 70e9, "trainer_gpus": 80, "replica_gpus": 40})
    for name in ("detect", "encode", "decode", "apply", "prove", "pause"):
        assert one[name] == pytest.approx(more[name])
    assert one["pause"] == one["apply"] + one["prove"] < costs(density=0.01)["pause"]
    assert one["put"] == costs(density=0.01)["put"]
    value = invoke_json("plan", "--params", "7B", "--density", 0.01, "--trainer-gpus", 8, "--replica-gpus", 4)
    assert value["figures"] == one
    assert "one H200" in invoke("plan", "--params", "7B", "--replica-gpus", 4).stdout


def test_a_table_of_models() -> None:
    text = invoke("plan", "--models", columns=140).stdout
    rows = invoke_json("plan", "--models")["models"]
    assert [row["name"] for row in rows] == ["8B", "70B", "235B-A22B", "1T"]
    assert all(row["name"] in text for row in rows)
    assert "Computed" in text
    assert rows[3]["sync"] > rows[0]["sync"]
    assert all(row["density"] == 0.01 for row in rows)


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--params", "7B", "--trainer-gpus", 8, "--encoding", "context"),
        ("--params", "many"),
        ("--params", "7B", "--bandwidth", "fast"),
        ("--params", "7B", "--dtype", "int4"),
        ("--params", "7B", "--dtype", "fp32"),
        ("--params", "7B", "--encoding", "zip"),
        ("--params", "7B", "--density", 1.5),
    ],
)
def test_wrong_arguments_of_plan_are_refused(options: tuple[object, ...]) -> None:
    invoke("plan", *options, code=2)


def test_what_follows_is_noted() -> None:
    assert any("outside of what was measured" in note for note in notes("--lr", 1e-9))
    assert any("every version will be an anchor" in note for note in notes("--density", 0.9, "--encoding", "raw"))
    assert notes("--density", 0.01) == []


def notes(*options: object) -> list[str]:
    return list(invoke_json("plan", "--params", "1B", *options)["notes"])


def test_prune_has_these_defaults() -> None:
    assert inspect.signature(prune.command).parameters["keep_last"].default == KEEP_LAST
    assert Retention().grace == GRACE


# ── the figures ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_nothing_is_made_up() -> None:
    with pytest.raises(UnknownCost, match="nothing was measured for the encoding 'zip'"):
        costs(encoding="zip")
    with pytest.raises(UnknownCost, match="bf16 only"):
        costs(dtype="fp32")
    with pytest.raises(UnknownCost, match="nothing to plan"):
        costs(lr=0.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_with_a_given_density(dtype: str) -> None:
    found = costs(dtype=dtype, density=0.01)
    assert found["anchor_bytes"] == 7e9 * DTYPES[dtype]
    assert all(value > 0 for value in found.values())


def test_the_published_order_of_magnitude() -> None:
    """7B at a usual learning rate: others send 108 MB as sparse indices and values; so small a delta is plausible."""
    found = costs(lr=1e-6)
    assert 50e6 < found["delta_bytes"] < 120e6
    assert 100 < found["smaller"] < 300


def test_twice_the_model_costs_twice_as_much() -> None:
    one, two = costs(params=10e9), costs(params=20e9)
    for name in ("delta_bytes", "anchor_bytes", *PHASES, "sync", "egress"):
        if name != "verify":
            assert two[name] == pytest.approx(2 * one[name]), name
    assert two["anchor_every"] == one["anchor_every"]


def test_more_replicas_fetch_more_and_store_nothing() -> None:
    one, many = costs(replicas=1), costs(replicas=64)
    assert many["egress"] == pytest.approx(64 * one["egress"])
    assert many["stored"] == one["stored"]


def test_a_slow_link_sends_fewer_versions() -> None:
    assert costs(params=405e9, bandwidth=125e6, step_seconds=10)["versions"] < 86400 / 10
    assert costs(params=1e9)["versions"] == 1440


def test_where_a_delta_does_not_pay_every_version_is_an_anchor() -> None:
    found = costs(density=0.9, encoding="raw")
    assert found["delta_bytes"] == found["anchor_bytes"]
    assert (found["anchor_every"], found["smaller"]) == (1, 1)
    assert found["stored"] == pytest.approx(found["versions"] * found["anchor_bytes"])
    assert found["join_bytes"] == found["anchor_bytes"]


@pytest.mark.parametrize(("bandwidth", "encoding"), [(1e6, "context"), (1e12, "packed")])
def test_auto_takes_what_is_there_first(bandwidth: float, encoding: str) -> None:
    link = {"bandwidth": bandwidth, "replica_bandwidth": bandwidth}
    assert resolved(Setup(7e9, encoding="auto", **link)).encoding == encoding
    assert costs(encoding="auto", **link)["sync"] == min(
        costs(encoding=e, **link)["sync"] for e in ("packed", "context")
    )


# ── against the policies themselves ──────────────────────────────────────────────────────────────────────────────────


def versions(found: dict[str, float], count: int) -> dict[int, Manifest]:
    """A run as the publisher's policy would make it, with deltas of the estimated size."""
    delta, anchor = round(found["delta_bytes"]), round(found["anchor_bytes"])
    manifests: dict[int, Manifest] = {}
    for version in range(count):
        links = []
        whole = AnchorPolicy().wants_anchor(version, delta, anchor, {v: m.summary() for v, m in manifests.items()})
        if version and AnchorPolicy().wants_delta(delta, anchor, whole):
            links = [Link("delta", version - 1, (Blob(keys.delta(version - 1, version, "0" * 8), delta, "0" * 32),))]
        if whole:
            links.append(Link("anchor", None, (Blob(keys.anchor(version, "0" * 8), anchor, "0" * 32),)))
        parent = version - 1 if version else None
        manifests[version] = Manifest("r", version, parent, "s", "0" * 32, tuple(links), 60.0 * version, "w")
    return manifests


@pytest.mark.parametrize("density", [0.01, 0.05, 0.2, 0.33])
def test_anchors_come_as_often_as_the_publisher_makes_them(density: float) -> None:
    found = costs(params=1e12, density=density, encoding="raw")
    every = int(found["anchor_every"])
    manifests = versions(found, 3 * every + 1)
    assert [v for v, m in manifests.items() if m.links[-1].kind == "anchor"] == [0, every, 2 * every, 3 * every]


@pytest.mark.parametrize("density", [0.01, 0.1, 0.2, 0.3])
def test_what_is_put_is_what_the_publisher_makes_and_never_more_than_full_weights(density: float) -> None:
    found = costs(params=1e12, density=density, encoding="raw", bandwidth=1e15)
    every = int(found["anchor_every"])
    made = [m for v, m in versions(found, 3 * every + 1).items() if v]
    put = sum(blob.size for m in made for link in m.links for blob in link.objects)
    assert found["stored"] / found["versions"] == pytest.approx(put / len(made))
    assert put <= len(made) * found["anchor_bytes"]


@pytest.mark.parametrize("density", [0.02, 0.1])
def test_a_pruned_run_holds_no_more_than_estimated(density: float) -> None:
    found = costs(params=1e12, density=density, encoding="raw", bandwidth=1e15)
    manifests = versions(found, 4 * int(found["anchor_every"]) + 500)
    most, here, pruned, marked, last = 0.0, {}, Pruned("r", ()), -1e9, -1e9
    for version, manifest in manifests.items():
        here[version] = manifest
        most = max(most, sum(link.bytes for m in here.values() for link in m.links))
        now = manifest.created
        if now - last >= GRACE:
            last = now
            listing = [ObjectInfo(keys.manifest(v), 0, m.created) for v, m in here.items()]
            listing.append(ObjectInfo(keys.PRUNED, 0, marked))
            plan = plan_prune(here, listing, Retention(last=KEEP_LAST, grace=GRACE), now, pruned)
            here = {v: m for v, m in here.items() if v not in plan.going}
            if plan.marked:
                pruned, marked = pruned.also(plan.marked), now
    assert found["held"] >= most
    assert found["held"] < 1.5 * most
