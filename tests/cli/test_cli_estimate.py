"""`cli.estimate`: plausible, consistent with the policies it speaks of, and honest about what it knows."""

from __future__ import annotations

from typing import Any

import pytest

from deltawire.bucket.prune import Retention, plan_prune
from deltawire.cli.estimate import Costs, Setup, estimate
from deltawire.core import keys
from deltawire.core.costs import DTYPES, UnknownCost
from deltawire.core.manifest import Blob, Link, Manifest, Pruned
from deltawire.store import ObjectInfo
from deltawire.trainer.policy import AnchorPolicy


def costs(**changes: Any) -> Costs:
    return estimate(Setup(**{"params": 7e9, **changes}))


def test_nothing_is_made_up() -> None:
    with pytest.raises(UnknownCost, match="nothing was measured for the encoding 'zip'"):
        costs(encoding="zip")
    with pytest.raises(UnknownCost, match="bf16 only"):
        costs(dtype="fp32")
    with pytest.raises(UnknownCost, match="nothing to plan"):
        costs(lr=0.0)
    assert "outside of what was measured" in costs(lr=1e-9).notes[0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_with_a_given_density(dtype: str) -> None:
    found = costs(dtype=dtype, density=0.01)
    assert found["anchor_bytes"] == 7e9 * DTYPES[dtype]
    assert found.figures["density"].basis == "given"
    assert found.figures["bits_per_change"].basis == ("measured" if dtype == "bf16" else "extrapolated")


# ── the figures ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_figure_says_how_it_is_known() -> None:
    found = costs(price_storage=0.02, price_egress=0.09)
    for name, figure in found.figures.items():
        assert figure.source, name
        assert figure.value > 0, name
    assert {f.basis for f in found.figures.values()} == {"exact", "measured", "extrapolated"}
    assert found.figures["density"].basis == "measured"
    assert costs(lr=2e-6).figures["density"].basis == "extrapolated"


def test_the_published_order_of_magnitude() -> None:
    """7B at a usual learning rate: others send 108 MB as sparse indices and values; so small a delta is plausible."""
    found = costs(lr=1e-6)
    assert 50e6 < found["delta_bytes"] < 120e6
    assert 100 < found["smaller"] < 300
    assert found["first_delta_bytes"] > 3 * found["delta_bytes"]


def test_twice_the_model_costs_twice_as_much() -> None:
    one, two = costs(params=10e9), costs(params=20e9)
    for name in (
        "delta_bytes",
        "anchor_bytes",
        "detect",
        "encode",
        "put",
        "fetch",
        "decode",
        "apply",
        "sync",
        "egress",
    ):
        assert two[name] == pytest.approx(2 * one[name]), name
    assert two["anchor_every"] == one["anchor_every"]


def test_phases_add_up() -> None:
    found = costs()
    phases = ("detect", "encode", "put", "fetch", "verify", "decode", "apply", "prove")
    assert found["sync"] == pytest.approx(sum(found[name] for name in phases))


def test_more_replicas_fetch_more_and_store_nothing() -> None:
    one, many = costs(replicas=1), costs(replicas=64)
    assert many["egress"] == pytest.approx(64 * one["egress"])
    assert many["stored"] == one["stored"]


def test_a_slow_link_is_reported() -> None:
    found = costs(params=405e9, bandwidth=125e6, step_seconds=10)
    assert "versions will span several steps" in found.notes[0]
    assert found["versions"] < 86400 / 10
    assert costs(params=1e9).notes == []


def test_where_a_delta_does_not_pay_every_version_is_an_anchor() -> None:
    found = costs(density=0.9, encoding="raw")
    assert found["delta_bytes"] == found["anchor_bytes"]
    assert (found["anchor_every"], found["smaller"]) == (1, 1)
    assert found["stored"] == pytest.approx(found["versions"] * found["anchor_bytes"])
    assert found["join_bytes"] == found["anchor_bytes"]
    assert "every version will be an anchor" in found.notes[0]


def test_auto_takes_what_is_there_first() -> None:
    slow, fast = costs(encoding="auto", bandwidth=1e6, replica_bandwidth=1e6), costs(encoding="auto", bandwidth=1e12)
    assert slow["delta_bytes"] == slow["context_bytes"] < slow["packed_bytes"] < slow["raw_bytes"]
    near = costs(encoding="auto", bandwidth=1e12, replica_bandwidth=1e12)
    assert near["delta_bytes"] == near["packed_bytes"]
    for found in (slow, fast, near):
        assert found["sync"] == pytest.approx(min(found["packed_sync"], found["context_sync"]))


@pytest.mark.parametrize("encoding", ["packed", "context", "raw"])
def test_each_encoding_is_compared_as_it_is_planned(encoding: str) -> None:
    found, other = costs(encoding=encoding), costs(encoding="auto")
    assert found["sync"] == pytest.approx(other[f"{encoding}_sync"])
    assert found["delta_bytes"] == other[f"{encoding}_bytes"]


def test_money_only_where_there_is_a_price() -> None:
    assert not [name for name in costs().figures if name.startswith("usd")]
    found = costs(price_egress=0.1, replicas=2)
    assert found["usd_egress"] == pytest.approx(found["egress"] / 1e9 * 0.1)
    assert "usd_held" not in found.figures


# ── against the policies themselves ──────────────────────────────────────────────────────────────────────────────────


def versions(found: Costs, count: int) -> dict[int, Manifest]:
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
    setup = Setup(params=1e12, density=density, encoding="raw", bandwidth=1e15, keep_last=7, grace=600.0)
    found = estimate(setup)
    manifests = versions(found, 4 * int(found["anchor_every"]) + 200)
    most, here, pruned, marked, last = 0.0, {}, Pruned("r", ()), -1e9, -1e9
    for version, manifest in manifests.items():
        here[version] = manifest
        most = max(most, sum(link.bytes for m in here.values() for link in m.links))
        now = manifest.created
        if now - last >= 600.0:
            last = now
            listing = [ObjectInfo(keys.manifest(v), 0, m.created) for v, m in here.items()]
            listing.append(ObjectInfo(keys.PRUNED, 0, marked))
            plan = plan_prune(here, listing, Retention(last=7, grace=600.0), now, pruned)
            here = {v: m for v, m in here.items() if v not in plan.going}
            if plan.marked:
                pruned, marked = pruned.also(plan.marked), now
    assert found["held"] >= most
    assert found["held"] < 1.5 * most
