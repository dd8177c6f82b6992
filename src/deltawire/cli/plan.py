"""`deltawire plan`: estimate what a run costs, by plain arithmetic on the measured figures of costs.py."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Annotated

from typer import BadParameter, Option

from ..costs import (
    AUTO,
    CODING,
    DEVICE,
    DEVICE_MACHINE,
    DTYPES,
    MACHINE,
    SPEEDS,
    TRAINING,
    UnknownCost,
    bits_at,
    density_at,
)
from . import ui
from .quantities import count, rate, seconds

PHASES = ("detect", "encode", "put", "fetch", "verify", "decode", "apply", "prove")
"""What happens to a version between the trainer's weights and the replica's."""
DAY = 86400.0
KEEP_LAST, GRACE = 20, 3600.0
"""The defaults of `prune`."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The setup that a run is planned for."""

    params: float
    lr: float = 1e-6
    dtype: str = "bf16"
    density: float | None = None
    """Changed share per version, where it is known; else it follows from the learning rate."""
    encoding: str = "packed"
    step_seconds: float = 60.0
    bandwidth: float = 125e6
    """Bytes per second from the trainer into the bucket."""
    replica_bandwidth: float = 125e6
    """Bytes per second from the bucket to one replica."""
    replicas: int = 1
    cores: int = 16
    """On either side; with GPUs, sixteen to each."""
    trainer_gpus: int = 0
    """Among which the trainer's weights are divided; 0 if they are compared in host memory."""
    replica_gpus: int = 0
    """Among which the weights of a replica are divided; 0 if they are in host memory."""


def command(
    params: Annotated[
        float | None, Option(parser=count, metavar="COUNT", help="Weights of the model: 405e9, 405B, 600M.")
    ] = None,
    lr: Annotated[float, Option(min=0, help="Learning rate (AdamW, bf16 weights with an fp32 master).")] = 1e-6,
    bandwidth: Annotated[
        float, Option(parser=rate, metavar="RATE", help="From the trainer into the bucket: 1Gbit, 2GB/s.")
    ] = "1Gbit",  # type: ignore[assignment]  # parsed like what is typed
    replicas: Annotated[int, Option(min=0, help="Number of replicas that follow.")] = 1,
    replica_bandwidth: Annotated[
        float | None,
        Option(parser=rate, metavar="RATE", help="From the bucket to each replica; by default as --bandwidth."),
    ] = None,
    step_seconds: Annotated[
        float, Option(parser=seconds, metavar="TIME", help="Time between two versions: 45s, 2min.")
    ] = "60s",  # type: ignore[assignment]
    density: Annotated[
        float | None,
        Option(min=0, max=1, help="Share of weights that changes per version, if you know it (`log` shows it)."),
    ] = None,
    dtype: Annotated[str, Option(help="dtype of the published weights: bf16, fp16, fp32, fp8.")] = "bf16",
    encoding: Annotated[str, Option(help="How deltas are coded: packed, context, auto or raw.")] = "packed",
    cores: Annotated[int, Option(min=1, help="Cores that deltawire may use, on the trainer and on each replica.")] = 16,
    trainer_gpus: Annotated[
        int, Option(min=0, help="GPUs of the trainer, each with its share of the weights and 16 cores.")
    ] = 0,
    replica_gpus: Annotated[int, Option(min=0, help="GPUs of each replica, in the same way.")] = 0,
    models: Annotated[
        bool, Option("--models", help="A table of four models, from 8B to 1T, on GPUs as such runs have them.")
    ] = False,
    json: ui.JsonOption = False,
) -> None:
    """Estimate what a run costs: sizes, times, storage, traffic.

    Needs no run and no bucket. Sizes and speeds were measured on random weights
    under AdamW. Trained weights change less: give the share that `log` shows of a
    run of yours as --density.

    \b
    Examples
      deltawire plan --params 7B --replicas 8
      deltawire plan --params 405e9 --lr 1e-6 --bandwidth 1Gbit --replicas 64
      deltawire plan --params 600M --step-seconds 10s --density 0.012
      deltawire plan --params 7B --bandwidth 100Mbit --encoding auto
      deltawire plan --params 70B --trainer-gpus 32 --replica-gpus 4
      deltawire plan --models
    """
    if models:
        found = [{"name": m.name, **asdict(m.setup), **estimate(m.setup)} for m in MODELS]
        ui.emit({"models": found}, _render_models, json)
        return
    if params is None:
        raise BadParameter("say how many weights the model has, as --params 70B", param_hint="--params")
    if dtype not in DTYPES:
        raise BadParameter(f"{dtype!r} is unknown; known: {', '.join(DTYPES)}", param_hint="--dtype")
    down = replica_bandwidth or bandwidth
    setup = Setup(
        params, lr, dtype, density, encoding, step_seconds, bandwidth, down, replicas, cores, trainer_gpus, replica_gpus
    )
    try:
        if setup.encoding not in ("packed", AUTO) and max(trainer_gpus, replica_gpus):
            raise UnknownCost(f"on GPUs only `packed` was measured, and not {setup.encoding}")
        setup = replace(setup, encoding="packed") if max(trainer_gpus, replica_gpus) else resolved(setup)
        costs = estimate(setup)
    except UnknownCost as error:
        raise BadParameter(str(error)) from None
    value = {"setup": asdict(setup), "figures": costs, "notes": _notes(setup, costs)}
    ui.emit(value, lambda out: _render(out, setup, costs), json)


# ── the arithmetic ───────────────────────────────────────────────────────────────────────────────────────────────────


def resolved(setup: Setup) -> Setup:
    """The setup with the encoding that `auto` chooses: the one that takes the least time from end to end."""
    if setup.encoding != AUTO:
        return setup
    return min((replace(setup, encoding=name) for name in ("packed", "context")), key=lambda s: estimate(s)["sync"])


def estimate(setup: Setup) -> dict[str, float]:
    """The figures of a run by name: shares, bits, bytes, and seconds without round trips.

    A version costs a delta; where replaying the deltas since the last anchor would cost more bytes than an anchor, it
    costs an anchor too. That is the publisher's policy, and all the other figures follow from it.
    """
    params, cores = setup.params, setup.cores
    density = _density(setup)
    bits = bits_at(density, setup.encoding, setup.dtype)
    changed, anchor, coding = params * density, params * DTYPES[setup.dtype], CODING[setup.encoding]
    # a publisher sends whichever is smaller
    delta = min(params * density * bits / 8, anchor)
    every = 1 if delta == anchor else math.floor(anchor / delta) + 1
    phases = {
        "detect": params / (SPEEDS.detect * cores),
        "encode": coding.encode(params, changed) / cores,
        "put": delta / setup.bandwidth,
        "fetch": delta / setup.replica_bandwidth,
        # what is small is hashed where it arrives
        "verify": delta / (SPEEDS.hash * (cores if delta > 64 << 20 else 1)),
        "decode": coding.decode(params, changed) / cores,
        "apply": changed / SPEEDS.apply,
        "prove": params / (SPEEDS.prove * cores),
    }
    if gpus := setup.trainer_gpus:
        phases |= {"detect": params * DEVICE.detect_weight / gpus, "encode": changed * DEVICE.encode_change / gpus}
    if gpus := setup.replica_gpus:
        phases |= {
            "verify": delta / (SPEEDS.hash * 16 * gpus),
            "decode": changed * (DEVICE.decode_change + DEVICE.stage_change) / gpus,
            "apply": changed * DEVICE.apply_change / gpus,
            "prove": params * DEVICE.prove_weight / gpus,
        }
    sync = sum(phases.values())
    full_sync = anchor / setup.bandwidth + anchor / setup.replica_bandwidth + anchor / (SPEEDS.hash * cores)
    # beside an anchor there is no delta of more than half its bytes
    deltas = 1.0 if 2 * delta <= anchor else 1 - 1 / every
    stored = deltas * delta + anchor / every
    interval = max(setup.step_seconds, phases["encode"] + stored / setup.bandwidth)
    versions = DAY / interval
    # a version is young for one grace period, waits to be marked for at most another, and goes after a third
    span = KEEP_LAST + math.ceil(3 * GRACE / interval) + every - 1
    replayed = (every - 1) / 2
    joined = anchor + replayed * delta
    # the anchor is proven as it lies on disk, and once more as loaded
    replaying = 2 * phases["prove"] + replayed * (phases["decode"] + phases["apply"] + phases["prove"])
    return {
        "density": density,
        "bits_per_change": bits,
        "delta_bytes": delta,
        "anchor_bytes": anchor,
        "anchor_every": every,
        **phases,
        "sync": sync,
        "pause": phases["apply"] + phases["prove"],
        "full_sync": full_sync,
        "smaller": anchor / delta,
        "faster": full_sync / sync,
        "versions": versions,
        "stored": versions * stored,
        "held": span * delta * (delta != anchor) + (1 + (span - 1) // every) * anchor,
        "egress": versions * (deltas * delta + (1 - deltas) * anchor) * setup.replicas,
        "full_egress": anchor * setup.replicas,
        "join_bytes": joined,
        "join_seconds": joined / setup.replica_bandwidth + replaying,
    }


@dataclass(frozen=True, slots=True)
class Example:
    """A model, and hardware that runs of its size use."""

    name: str
    setup: Setup


_NODE = 3.125e9
"""Bytes per second between a node of eight GPUs and a bucket: 25 Gbit/s."""


def _example(name: str, params: float, trainer_gpus: int, replica_gpus: int) -> Example:
    up, down = (_NODE * max(gpus / 8, 1) for gpus in (trainer_gpus, 8))
    setup = Setup(
        params, density=0.01, bandwidth=up, replica_bandwidth=down, trainer_gpus=trainer_gpus, replica_gpus=replica_gpus
    )
    return Example(name, setup)


MODELS = (
    _example("8B", 8e9, 8, 1),
    _example("70B", 70e9, 32, 4),
    _example("235B-A22B", 235e9, 64, 8),
    _example("1T", 1e12, 256, 16),
)


def _density(setup: Setup) -> float:
    if setup.density is not None:
        return setup.density
    if setup.dtype != "bf16":
        raise UnknownCost(f"how many weights change was measured for bf16 only; for {setup.dtype} give the density")
    return density_at(setup.lr)


# ── for people ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _notes(setup: Setup, costs: dict[str, float]) -> list[str]:
    """Consequences of the setup that are easily overlooked."""
    notes = []
    if setup.density is None:
        if not TRAINING[0].lr <= setup.lr <= TRAINING[-1].lr:
            notes.append("the learning rate lies outside of what was measured")
        notes.append(f"the optimizer's first step changes more: {ui.percent(density_at(setup.lr, first=True), 1)}")
    if costs["delta_bytes"] == costs["anchor_bytes"]:
        notes.append("a delta is no smaller than the weights: every version will be an anchor")
    interval = DAY / costs["versions"]
    if interval > 1.001 * setup.step_seconds:
        notes.append(
            f"the trainer's link takes {ui.duration(interval)} for a version but a step takes "
            f"{ui.duration(setup.step_seconds)}: versions span several steps and change more weights"
        )
    return notes


MODEL_COLUMNS = (
    "model", "GPUs", "version", "held", "encode", "put", "fetch", "stage", "pause", "in all", "copy per GPU",
)  # fmt: skip


def model_rows() -> list[list[str]]:
    """The table of `--models`, as text."""
    rows = []
    for example in MODELS:
        setup, costs = example.setup, estimate(example.setup)
        phases = (ui.duration(costs[name]) for name in ("detect", "encode", "put", "fetch", "decode", "pause", "sync"))
        gpus = f"{setup.trainer_gpus} → {setup.replica_gpus}"
        copy = ui.size(costs["anchor_bytes"] / setup.trainer_gpus)
        rows.append([example.name, gpus, ui.size(costs["delta_bytes"]), *phases, copy])
    return rows


def _render_models(out: ui.Console) -> None:
    ui.print_table(out, MODEL_COLUMNS, model_rows(), left=("model",), drop=("copy per GPU", "stage", "encode"))
    out.print(
        f"Computed, for 1 % changed weights as packed: figures measured on {DEVICE_MACHINE} and 0.6 B weights, divided "
        "by the number of GPUs. 25 Gbit/s for each node of eight to and from the bucket; every node fetches the whole "
        "version. Without round trips, and without waiting for ranks.",
        soft_wrap=True,
    )


def _render(out: ui.Console, setup: Setup, costs: dict[str, float]) -> None:
    fits = "within" if costs["sync"] <= setup.step_seconds else "longer than"
    out.print(
        f"A version is a delta of {ui.size(costs['delta_bytes'])} instead of {ui.size(costs['anchor_bytes'])} "
        f"({ui.times(costs['anchor_bytes'], costs['delta_bytes'])} smaller) and is on a replica "
        f"{ui.duration(costs['sync'])} after the step, {fits} the {ui.duration(setup.step_seconds)} of a step; "
        f"full weights would take {ui.duration(costs['full_sync'])}."
    )
    changes = f"{ui.percent(costs['density'], 1)}, {costs['bits_per_change']:.1f} bits each as {setup.encoding}"
    join = f"{ui.size(costs['join_bytes'])}, {ui.duration(costs['join_seconds'])}"
    for text, shown in (
        ("weights that change", changes),
        ("phases", ui.durations({name: costs[name] for name in PHASES})),
        ("versions per day", f"{costs['versions']:,.0f}, an anchor every {costs['anchor_every']:,.0f}"),
        ("put per day", ui.size(costs["stored"])),
        ("in the bucket, pruned", f"at most {ui.size(costs['held'])}"),
        ("fetched per day", f"{ui.size(costs['egress'])} by all replicas"),
        ("a replica that joins late", f"{join} on average"),
    ):
        out.print(f"  {text:<26} {shown}", soft_wrap=True)
    for note in _notes(setup, costs):
        out.print(f"note: {note}", soft_wrap=True)
    out.print(
        f"Measured by benchmarks/costs_table.py and benchmarks/codec.py on {MACHINE}, and scaled; without round trips."
        + (f" GPUs: by benchmarks/held.py on {DEVICE_MACHINE}." if setup.trainer_gpus or setup.replica_gpus else ""),
        soft_wrap=True,
    )
