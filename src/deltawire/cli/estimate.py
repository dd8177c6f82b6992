"""What a run will cost, before it is started. Pure arithmetic on a few measured figures.

Each figure says how it is known:
    given         you said so
    exact         follows from what you said
    measured      printed by benchmarks/costs_table.py; speeds by benchmarks/codec.py, on MACHINE
    extrapolated  measured there, scaled to your size, density, cores or links

A version costs a delta; where replaying the deltas since the last anchor would cost more bytes than an anchor, it costs
an anchor too. That is the publisher's policy, and all the other figures follow from it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ..core.costs import AUTO, CODING, DTYPES, SCRIPT, SPEEDS, TIMED, TRAINING, UnknownCost, bits_at, density_at

Basis = Literal["given", "exact", "measured", "extrapolated"]
Unit = Literal["share", "bits", "bytes", "seconds", "versions", "times", "USD"]

DAY = 86400.0
MONTH = 30 * DAY
GB = 1e9


@dataclass(frozen=True, slots=True)
class Setup:
    params: float
    lr: float = 1e-6
    dtype: str = "bf16"
    density: float | None = None
    """Changed share per version, where it is known; else it follows from the learning rate."""
    encoding: str = "packed"
    """One of packed, context, raw and auto."""
    step_seconds: float = 60.0
    bandwidth: float = 125e6
    """Bytes per second from the trainer into the bucket."""
    replica_bandwidth: float = 125e6
    """Bytes per second from the bucket to one replica."""
    replicas: int = 1
    cores: int = 16
    """On either side."""
    anchor_ratio: float = 1.0
    """As the publisher's: an anchor once replaying costs more than so many times its bytes."""
    keep_last: int = 20
    """As `prune` has them."""
    grace: float = 3600.0
    price_storage: float | None = None
    """USD per GB and month."""
    price_egress: float | None = None
    """USD per GB."""


@dataclass(frozen=True, slots=True)
class Figure:
    section: str
    text: str
    value: float
    unit: Unit
    basis: Basis
    source: str
    """What it was measured by, or comes from."""


class Costs:
    """The figures by name, in the order in which they are best read."""

    def __init__(self) -> None:
        self.figures: dict[str, Figure] = {}
        self.section = ""
        """What the figures that are added next are about."""
        self.notes: list[str] = []
        """What follows from the setup and is easily overlooked."""

    def __getitem__(self, name: str) -> float:
        return self.figures[name].value

    def add(self, name: str, text: str, value: float, unit: Unit, source: str, basis: Basis = "extrapolated") -> float:
        self.figures[name] = Figure(self.section, text, value, unit, basis, source)
        return value


def estimate(setup: Setup) -> Costs:
    """All that can be said of a run in advance."""
    costs = Costs()
    for part in (_sizes, _times, _encodings, _per_day, _compared, _late_joiner, _money):
        part(setup, costs)
    return costs


def resolve(setup: Setup, density: float) -> str:
    """The encoding's own name: for `auto` the one that takes the least time from end to end."""
    if setup.encoding != AUTO:
        return setup.encoding
    return min(("packed", "context"), key=lambda name: _through(setup, density, name))


def _delta_bytes(setup: Setup, density: float, encoding: str) -> float:
    """At most an anchor's: a publisher sends whichever is smaller."""
    return min(setup.params * density * bits_at(density, encoding, setup.dtype) / 8, _anchor_bytes(setup))


def _anchor_bytes(setup: Setup) -> float:
    return setup.params * DTYPES[setup.dtype]


def _through(setup: Setup, density: float, encoding: str) -> float:
    """Seconds that depend on the encoding: code it, put it, fetch it, verify it, decode it."""
    coding, size = CODING[encoding], _delta_bytes(setup, density, encoding)
    changed = setup.params * density
    work = coding.encode(setup.params, changed) + coding.decode(setup.params, changed)
    hashing = size / (SPEEDS.hash * _hashing_cores(setup, size))
    return work / setup.cores + size / setup.bandwidth + size / setup.replica_bandwidth + hashing


def _hashing_cores(setup: Setup, size: float) -> int:
    """What is small is hashed where it arrives."""
    return setup.cores if size > 64 << 20 else 1


# ── the parts ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _sizes(setup: Setup, costs: Costs) -> None:
    costs.section = "each version"
    density = _density(setup, costs)
    encoding = resolve(setup, density)
    bits, on_point = bits_at(density, encoding, setup.dtype), setup.dtype == "bf16"
    exact = encoding == "raw"
    source = "int32 index and value" if exact else f"{SCRIPT}, at the density above"
    basis: Basis = "exact" if exact else "measured" if on_point else "extrapolated"
    chosen = f"{encoding}, chosen by auto" if setup.encoding == AUTO else encoding
    costs.add("bits_per_change", f"bits per changed weight, {chosen}", bits, "bits", source, basis)
    anchor, delta = _anchor_bytes(setup), _delta_bytes(setup, density, encoding)
    if delta == anchor:
        costs.notes.append("a delta is no smaller than the weights: every version will be an anchor")
    costs.add("delta_bytes", "a delta", delta, "bytes", "weights × density × bits")
    if setup.density is None:
        first = density_at(setup.lr, first=True)
        size = _delta_bytes(setup, first, encoding)
        text = "the delta after the optimizer's first step"
        costs.add("first_delta_bytes", text, size, "bytes", f"{first:.1%} changed, {SCRIPT}")
    costs.add("anchor_bytes", "an anchor", anchor, "bytes", f"weights × {DTYPES[setup.dtype]} bytes", "exact")
    # the policy anchors at the first version at which the deltas since the last anchor outweigh it
    every = 1 if delta == anchor else math.floor(setup.anchor_ratio * anchor / delta) + 1
    costs.add("anchor_every", "an anchor every", every, "versions", "deltas since the last one > its bytes")


def _density(setup: Setup, costs: Costs) -> float:
    text = "weights that change"
    if setup.density is not None:
        return costs.add("density", text, setup.density, "share", "you said so", "given")
    if setup.dtype != "bf16":
        raise UnknownCost(f"how many weights change was measured for bf16 only; for {setup.dtype} give the density")
    if setup.lr < TRAINING[0].lr or setup.lr > TRAINING[-1].lr:
        costs.notes.append(f"the learning rate lies outside of what was measured ({SCRIPT})")
    known = any(math.isclose(setup.lr, point.lr) for point in TRAINING)
    source = f"{SCRIPT}: AdamW at this learning rate" + ("" if known else ", between its points")
    density = density_at(setup.lr)
    return costs.add("density", text, density, "share", source, "measured" if known else "extrapolated")


def _times(setup: Setup, costs: Costs) -> None:
    """One phase after the other, without the round trips: those are for the network you have to say."""
    costs.section = "time of a version"
    changed, delta, cores = setup.params * costs["density"], costs["delta_bytes"], setup.cores
    coding = CODING[resolve(setup, costs["density"])]
    core, wire = f"{TIMED} × {cores} cores", "bytes ÷ bandwidth"
    hashing = _hashing_cores(setup, delta)
    rows: tuple[tuple[str, str, float, str], ...] = (
        ("detect", "detect: compare with the last version", setup.params / (SPEEDS.detect * cores), core),
        ("encode", "encode", coding.encode(setup.params, changed) / cores, core),
        ("put", "put into the bucket", delta / setup.bandwidth, wire),
        ("fetch", "fetch by a replica", delta / setup.replica_bandwidth, wire),
        ("verify", "verify the object's hash", delta / (SPEEDS.hash * hashing), f"{SCRIPT} × {hashing} cores"),
        ("decode", "decode", coding.decode(setup.params, changed) / cores, core),
        ("apply", "apply to the live weights", changed / SPEEDS.apply, f"{TIMED}, one core"),
        ("prove", "prove: digest of all live weights", setup.params / (SPEEDS.prove * cores), core),
    )
    for name, text, seconds, source in rows:
        costs.add(name, text, seconds, "seconds", source)
    total = sum(seconds for _, _, seconds, _ in rows)
    costs.add("sync", "from the trainer's weights to the replica's", total, "seconds", "sum")


def _encodings(setup: Setup, costs: Costs) -> None:
    """All of them side by side: what a delta takes, and how long the sync with it."""
    costs.section, density = "encodings compared", costs["density"]
    fixed = costs["sync"] - _through(setup, density, resolve(setup, density))
    for name in CODING:
        size = _delta_bytes(setup, density, name)
        source = f"{bits_at(density, name, setup.dtype):.1f} bits per change"
        costs.add(f"{name}_bytes", f"{name}, a delta", size, "bytes", source)
        seconds = fixed + _through(setup, density, name)
        source = f"{TIMED} × {setup.cores} cores, bytes ÷ bandwidth"
        costs.add(f"{name}_sync", f"{name}, the whole way", seconds, "seconds", source)


def _per_day(setup: Setup, costs: Costs) -> None:
    costs.section = "per day"
    delta, anchor, every = costs["delta_bytes"], costs["anchor_bytes"], costs["anchor_every"]
    # beside an anchor there is no delta of more than half its bytes
    deltas = 1.0 if 2 * delta <= anchor else 1 - 1 / every
    stored = deltas * delta + anchor / every
    busy = costs["encode"] + stored / setup.bandwidth
    interval = max(setup.step_seconds, busy)
    basis: Basis
    if busy > setup.step_seconds:
        costs.notes.append(
            f"the trainer's link takes {busy:,.0f} s for a version but a step takes {setup.step_seconds:,.0f} s: "
            "versions will span several steps, and change more weights than one step does"
        )
        basis, source = "extrapolated", "all that the trainer's link takes"
    else:
        basis, source = "exact", f"a step every {setup.step_seconds:,.0f} s"
    versions = costs.add("versions", "versions", DAY / interval, "versions", source, basis)
    source = "versions × (delta + its share of an anchor)"
    costs.add("stored", "put and stored", versions * stored, "bytes", source)
    # a version is young for one grace period, waits to be marked for at most another, and goes after a third
    kept = setup.keep_last + math.ceil(3 * setup.grace / interval)
    span = kept + every - 1
    held = span * delta * (delta != anchor) + (1 + (span - 1) // every) * anchor
    source = f"at most, with `prune --keep-last {setup.keep_last}` once in every grace period"
    costs.add("held", "in the bucket at any time, pruned", held, "bytes", source)
    egress = versions * (deltas * delta + (1 - deltas) * anchor) * setup.replicas
    costs.add("egress", "fetched by replicas", egress, "bytes", f"every delta to {setup.replicas:,} replicas")


def _compared(setup: Setup, costs: Costs) -> None:
    costs.section = "full weights instead"
    anchor, delta = costs["anchor_bytes"], costs["delta_bytes"]
    seconds = anchor / setup.bandwidth + anchor / setup.replica_bandwidth + anchor / (SPEEDS.hash * setup.cores)
    costs.add("full_sync", "put, fetch and verify", seconds, "seconds", "bytes ÷ bandwidth")
    text, source = "fetched by replicas, per version", f"an anchor to {setup.replicas:,} replicas"
    costs.add("full_egress", text, anchor * setup.replicas, "bytes", source, "exact")
    costs.add("smaller", "a delta is smaller", anchor / delta, "times", "anchor ÷ delta")
    times = seconds / costs["sync"]
    costs.add("faster", "and there sooner", times, "times", "all phases of both")


def _late_joiner(setup: Setup, costs: Costs) -> None:
    costs.section = "a replica that joins late"
    deltas = costs["anchor_every"] - 1
    for name, text, replayed in (("join", "on average", deltas / 2), ("join_worst", "at worst", deltas)):
        size = costs["anchor_bytes"] + replayed * costs["delta_bytes"]
        costs.add(f"{name}_bytes", f"{text}, fetches", size, "bytes", f"an anchor and {replayed:,.0f} deltas")
        each = costs["decode"] + costs["apply"] + costs["prove"]
        # the anchor is proven as it lies on disk, and once more as loaded
        seconds = size / setup.replica_bandwidth + 2 * costs["prove"] + replayed * each
        costs.add(f"{name}_seconds", f"{text}, takes", seconds, "seconds", "as above")


def _money(setup: Setup, costs: Costs) -> None:
    costs.section = "money"
    if (price := setup.price_storage) is not None:
        source, grown = f"{price:g} USD per GB and month", costs["stored"] * MONTH / DAY
        costs.add("usd_held", "storage per month, pruned", costs["held"] / GB * price, "USD", source)
        costs.add("usd_stored", "storage in the second month, never pruned", grown / GB * price, "USD", source)
    if (price := setup.price_egress) is not None:
        source, full = f"{price:g} USD per GB", costs["full_egress"] * costs["versions"]
        costs.add("usd_egress", "fetching per day", costs["egress"] / GB * price, "USD", source)
        text = "fetching per day, were all versions full weights"
        costs.add("usd_full_egress", text, full / GB * price, "USD", source)
