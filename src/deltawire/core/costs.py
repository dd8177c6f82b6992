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

import itertools
import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

Basis = Literal["given", "exact", "measured", "extrapolated"]
Unit = Literal["share", "bits", "bytes", "seconds", "versions", "times", "USD"]

DAY = 86400.0
MONTH = 30 * DAY
GB = 1e9

# ── measured ─────────────────────────────────────────────────────────────────────────────────────────────────────────
# TRAINING, CONTEXT and the speed of hashing are printed by benchmarks/costs_table.py. The other speeds follow from
# benchmarks/results/codec-full-ours.json (a test compares them): Qwen3-0.6B at two learning rates, one thread.
# `costs_table.py --part speeds` prints the same figures for the machine at hand.

MACHINE = "one core of an Intel Xeon, a virtual machine of sixteen"
SCRIPT = "benchmarks/costs_table.py"
TIMED = "benchmarks/codec.py"


class Point(NamedTuple):
    """bf16 weights, normal(0, 0.02), under AdamW with an fp32 master."""

    lr: float
    changed: float
    # the share of weights whose bits a step changes, once the optimizer has warmed up
    first: float
    # the same for its first step: Adam starts with full-sized updates
    bits: float
    # per changed weight, packed


TRAINING = (
    Point(1e-07, 0.00127, 0.0059, 13.07),
    Point(3e-07, 0.00341, 0.0153, 11.56),
    Point(1e-06, 0.00968, 0.0422, 10.12),
    Point(3e-06, 0.0246, 0.102, 8.88),
    Point(1e-05, 0.0656, 0.251, 7.62),
    Point(3e-05, 0.152, 0.522, 6.51),
    Point(0.0001, 0.344, 0.873, 5.62),
    Point(0.0003, 0.608, 0.999, 5.65),
    Point(0.001, 0.841, 1, 6.26),
)


CONTEXT = (
    (0.00161, 8.60),
    (0.00469, 7.57),
    (0.0121, 6.77),
    (0.0333, 5.95),
    (0.0806, 5.25),
    (0.198, 4.58),
    (0.402, 5.59),
    (0.697, 5.82),
)
"""(share changed, bits per changed weight): `context` on weights like these, after one step of noise."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """Per second and core."""

    detect: float
    # weights compared
    hash: float
    # bytes of an object
    apply: float
    # changes written into live weights; one core only, whatever there is
    prove: float
    # weights whose digest is recomputed


SPEEDS = Speeds(
    detect=2.5e09,
    hash=5e09,
    apply=1.67e08,
    prove=2.1e09,
)


class Coding(NamedTuple):
    """Seconds on one core: so much per weight, so much per change."""

    encode_weight: float
    encode_change: float
    decode_weight: float
    decode_change: float

    def encode(self, weights: float, changed: float) -> float:
        return weights * self.encode_weight + changed * self.encode_change

    def decode(self, weights: float, changed: float) -> float:
        return weights * self.decode_weight + changed * self.decode_change


CODING = {
    "packed": Coding(2e-11, 5.66e-09, 6.91e-12, 7.15e-09),
    "context": Coding(6.95e-10, 1.3e-07, 9.69e-10, 8.41e-08),
    "raw": Coding(3.1e-11, 3.45e-09, 0, 1.16e-08),
}

AUTO = "auto"
"""Whichever of packed and context is there first: what the publisher does for every version anew."""

# ── what is asked ────────────────────────────────────────────────────────────────────────────────────────────────────

DTYPES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 1}
"""Bytes per weight."""


@dataclass(frozen=True, slots=True)
class Setup:
    params: float
    lr: float = 1e-6
    dtype: str = "bf16"
    density: float | None = None
    # changed share per version, where it is known; else it follows from the learning rate
    encoding: str = "packed"
    # packed, context, raw or auto
    step_seconds: float = 60.0
    bandwidth: float = 125e6
    # bytes per second from the trainer into the bucket
    replica_bandwidth: float = 125e6
    # bytes per second from the bucket to one replica
    replicas: int = 1
    cores: int = 16
    # on either side
    anchor_ratio: float = 1.0
    # as the publisher's: an anchor once replaying costs more than so many times its bytes
    keep_last: int = 20
    # as `prune` has them
    grace: float = 3600.0
    price_storage: float | None = None
    # USD per GB and month
    price_egress: float | None = None
    # USD per GB


@dataclass(frozen=True, slots=True)
class Figure:
    section: str
    text: str
    value: float
    unit: Unit
    basis: Basis
    source: str
    # what it was measured by, or comes from


class UnknownCost(ValueError):
    """A setup for which nothing was measured: saying so is better than a guess."""


class Costs:
    """The figures by name, in the order in which they are best read."""

    def __init__(self) -> None:
        self.figures: dict[str, Figure] = {}
        self.notes: list[str] = []
        # what follows from the setup and is easily overlooked

    def __getitem__(self, name: str) -> float:
        return self.figures[name].value

    def add(self, section: str, name: str, text: str, value: float, unit: Unit, basis: Basis, source: str) -> float:
        self.figures[name] = Figure(section, text, value, unit, basis, source)
        return value


def estimate(setup: Setup) -> Costs:
    """All that can be said of a run in advance."""
    costs = Costs()
    for part in (_sizes, _times, _encodings, _per_day, _compared, _late_joiner, _money):
        part(setup, costs)
    return costs


# ── density and bits ─────────────────────────────────────────────────────────────────────────────────────────────────


def density_at(lr: float, *, first: bool = False) -> float:
    """The share of bf16 weights that one optimizer step changes."""
    return _interpolate(lr, [(p.lr, p.first if first else p.changed) for p in TRAINING])


def bits_at(density: float, encoding: str, dtype: str = "bf16") -> float:
    """Bits per changed weight."""
    if encoding == "raw":
        return 8.0 * (4 + DTYPES[dtype])  # an int32 index and the value
    if encoding not in CODING:
        known = ", ".join((*CODING, AUTO))
        raise UnknownCost(f"nothing was measured for the encoding {encoding!r}; known: {known}")
    packed = _interpolate(density, [(p.changed, p.bits) for p in TRAINING])
    return packed if encoding == "packed" else min(packed, _interpolate(density, list(CONTEXT)))


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


def _interpolate(x: float, points: list[tuple[float, float]]) -> float:
    """On the line between two points in log-log. Below the first on its continuation, above the last as there."""
    if not x > 0:
        raise UnknownCost(f"a learning rate or density of {x:g} changes nothing: there is nothing to plan")
    if x >= points[-1][0]:
        return points[-1][1]
    (x0, y0), (x1, y1) = next(pair for pair in itertools.pairwise(points) if x <= pair[1][0])
    return y0 * math.exp(math.log(y1 / y0) * math.log(x / x0) / math.log(x1 / x0))


# ── the parts ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _sizes(setup: Setup, costs: Costs) -> None:
    section = "each version"
    density = _density(setup, costs)
    encoding = resolve(setup, density)
    bits, on_point = bits_at(density, encoding, setup.dtype), setup.dtype == "bf16"
    exact = encoding == "raw"
    source = "int32 index and value" if exact else f"{SCRIPT}, at the density above"
    basis: Basis = "exact" if exact else "measured" if on_point else "extrapolated"
    chosen = f"{encoding}, chosen by auto" if setup.encoding == AUTO else encoding
    costs.add(section, "bits_per_change", f"bits per changed weight, {chosen}", bits, "bits", basis, source)
    anchor, delta = _anchor_bytes(setup), _delta_bytes(setup, density, encoding)
    if delta == anchor:
        costs.notes.append("a delta is no smaller than the weights: every version will be an anchor")
    source = "weights × density × bits"
    costs.add(section, "delta_bytes", "a delta", delta, "bytes", "extrapolated", source)
    if setup.density is None:
        first = density_at(setup.lr, first=True)
        size = _delta_bytes(setup, first, encoding)
        text = "the delta after the optimizer's first step"
        costs.add(section, "first_delta_bytes", text, size, "bytes", "extrapolated", f"{first:.1%} changed, {SCRIPT}")
    costs.add(section, "anchor_bytes", "an anchor", anchor, "bytes", "exact", f"weights × {DTYPES[setup.dtype]} bytes")
    # the policy anchors at the first version at which the deltas since the last anchor outweigh it
    every = 1 if delta == anchor else math.floor(setup.anchor_ratio * anchor / delta) + 1
    source = "deltas since the last one > its bytes"
    costs.add(section, "anchor_every", "an anchor every", every, "versions", "extrapolated", source)


def _density(setup: Setup, costs: Costs) -> float:
    section, text = "each version", "weights that change"
    if setup.density is not None:
        return costs.add(section, "density", text, setup.density, "share", "given", "you said so")
    if setup.dtype != "bf16":
        raise UnknownCost(f"how many weights change was measured for bf16 only; for {setup.dtype} give the density")
    if setup.lr < TRAINING[0].lr or setup.lr > TRAINING[-1].lr:
        costs.notes.append(f"the learning rate lies outside of what was measured ({SCRIPT})")
    known = any(math.isclose(setup.lr, point.lr) for point in TRAINING)
    source = f"{SCRIPT}: AdamW at this learning rate" + ("" if known else ", between its points")
    density = density_at(setup.lr)
    return costs.add(section, "density", text, density, "share", "measured" if known else "extrapolated", source)


def _times(setup: Setup, costs: Costs) -> None:
    """One phase after the other, without the round trips: those are for the network you have to say."""
    section = "time of a version"
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
        costs.add(section, name, text, seconds, "seconds", "extrapolated", source)
    total = sum(seconds for _, _, seconds, _ in rows)
    costs.add(section, "sync", "from the trainer's weights to the replica's", total, "seconds", "extrapolated", "sum")


def _encodings(setup: Setup, costs: Costs) -> None:
    """All of them side by side: what a delta takes, and how long the sync with it."""
    section, density = "encodings compared", costs["density"]
    fixed = costs["sync"] - _through(setup, density, resolve(setup, density))
    for name in CODING:
        size = _delta_bytes(setup, density, name)
        source = f"{bits_at(density, name, setup.dtype):.1f} bits per change"
        costs.add(section, f"{name}_bytes", f"{name}, a delta", size, "bytes", "extrapolated", source)
        seconds = fixed + _through(setup, density, name)
        source = f"{TIMED} × {setup.cores} cores, bytes ÷ bandwidth"
        costs.add(section, f"{name}_sync", f"{name}, the whole way", seconds, "seconds", "extrapolated", source)


def _per_day(setup: Setup, costs: Costs) -> None:
    section = "per day"
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
    versions = costs.add(section, "versions", "versions", DAY / interval, "versions", basis, source)
    source = "versions × (delta + its share of an anchor)"
    costs.add(section, "stored", "put and stored", versions * stored, "bytes", "extrapolated", source)
    # a version is young for one grace period, waits to be marked for at most another, and goes after a third
    kept = setup.keep_last + math.ceil(3 * setup.grace / interval)
    span = kept + every - 1
    held = span * delta * (delta != anchor) + (1 + (span - 1) // every) * anchor
    source = f"at most, with `prune --keep-last {setup.keep_last}` once in every grace period"
    costs.add(section, "held", "in the bucket at any time, pruned", held, "bytes", "extrapolated", source)
    egress = versions * (deltas * delta + (1 - deltas) * anchor) * setup.replicas
    source = f"every delta to {setup.replicas:,} replicas"
    costs.add(section, "egress", "fetched by replicas", egress, "bytes", "extrapolated", source)


def _compared(setup: Setup, costs: Costs) -> None:
    section = "full weights instead"
    anchor, delta = costs["anchor_bytes"], costs["delta_bytes"]
    seconds = anchor / setup.bandwidth + anchor / setup.replica_bandwidth + anchor / (SPEEDS.hash * setup.cores)
    costs.add(section, "full_sync", "put, fetch and verify", seconds, "seconds", "extrapolated", "bytes ÷ bandwidth")
    text, source = "fetched by replicas, per version", f"an anchor to {setup.replicas:,} replicas"
    costs.add(section, "full_egress", text, anchor * setup.replicas, "bytes", "exact", source)
    costs.add(section, "smaller", "a delta is smaller", anchor / delta, "times", "extrapolated", "anchor ÷ delta")
    times = seconds / costs["sync"]
    costs.add(section, "faster", "and there sooner", times, "times", "extrapolated", "all phases of both")


def _late_joiner(setup: Setup, costs: Costs) -> None:
    section = "a replica that joins late"
    deltas = costs["anchor_every"] - 1
    for name, text, replayed in (("join", "on average", deltas / 2), ("join_worst", "at worst", deltas)):
        size = costs["anchor_bytes"] + replayed * costs["delta_bytes"]
        source = f"an anchor and {replayed:,.0f} deltas"
        costs.add(section, f"{name}_bytes", f"{text}, fetches", size, "bytes", "extrapolated", source)
        each = costs["decode"] + costs["apply"] + costs["prove"]
        # the anchor is proven as it lies on disk, and once more as loaded
        seconds = size / setup.replica_bandwidth + 2 * costs["prove"] + replayed * each
        costs.add(section, f"{name}_seconds", f"{text}, takes", seconds, "seconds", "extrapolated", "as above")


def _money(setup: Setup, costs: Costs) -> None:
    section = "money"
    rows: list[tuple[str, str, float, str]] = []
    if setup.price_storage is not None:
        price, source = setup.price_storage, f"{setup.price_storage:g} USD per GB and month"
        rows.append(("usd_held", "storage per month, pruned", costs["held"] / GB * price, source))
        grown = costs["stored"] * MONTH / DAY
        rows.append(("usd_stored", "storage in the second month, never pruned", grown / GB * price, source))
    if setup.price_egress is not None:
        source = f"{setup.price_egress:g} USD per GB"
        rows.append(("usd_egress", "fetching per day", costs["egress"] / GB * setup.price_egress, source))
        full = costs["full_egress"] * costs["versions"] / GB * setup.price_egress
        rows.append(("usd_full_egress", "fetching per day, were all versions full weights", full, source))
    for name, text, value, source in rows:
        costs.add(section, name, text, value, "USD", "extrapolated", source)
