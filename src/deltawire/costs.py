"""What changes and what coding it costs: the measured figures that `auto` and `deltawire plan` start from.

TRAINING, CONTEXT and the speed of hashing are printed by benchmarks/costs_table.py. The other speeds follow from
benchmarks/results/codec-full-ours.json (a test compares them): Qwen3-0.6B at two learning rates, one thread.
`costs_table.py --part speeds` prints the same figures for the machine at hand.

    from deltawire import costs

    costs.density_at(1e-6), costs.bits_at(0.01, "packed")       # share of weights, and bits per changed weight
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

__all__ = [
    "AUTO",
    "CODING",
    "CONTEXT",
    "DEVICE",
    "DEVICE_MACHINE",
    "DTYPES",
    "MACHINE",
    "SPEEDS",
    "TRAINING",
    "UnknownCost",
    "bits_at",
    "density_at",
]

MACHINE = "one core of an Intel Xeon, a virtual machine of sixteen"


class Point(NamedTuple):
    """bf16 weights, normal(0, 0.02), under AdamW with an fp32 master."""

    lr: float
    changed: float
    """The share of weights whose bits a step changes, once the optimizer has warmed up."""
    first: float
    """The share that the first step changes: Adam starts with full-sized updates."""
    bits: float
    """Bits per changed weight, packed."""


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
    """Weights compared."""
    hash: float
    """Bytes of an object."""
    apply: float
    """Changes written into live weights, always on one core."""
    prove: float
    """Weights whose digest is recomputed."""


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


@dataclass(frozen=True, slots=True)
class Device:
    """Seconds on one GPU with sixteen cores of its host: so much per weight or change that it holds, as `packed`."""

    detect_weight: float
    """Compare with the copy on the device, while the training stream waits."""
    encode_change: float
    """Copy to the host, sort, encode."""
    decode_change: float
    stage_change: float
    """Copy to the device, gather the old bits, predict the digest."""
    apply_change: float
    prove_weight: float


DEVICE = Device(
    detect_weight=4.35e-12,
    encode_change=4.8e-09,
    decode_change=4.29e-09,
    stage_change=4.95e-09,
    apply_change=5.03e-11,
    prove_weight=9.78e-13,
)
"""An H200, Qwen3-0.6B's shape with 1.3 % changed: benchmarks/results/held-cuda.json (a test compares them)."""

DEVICE_MACHINE = "one H200 with sixteen cores"

AUTO = "auto"
"""The one of packed and context that arrives first, chosen by the publisher for each version."""

DTYPES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 1}
"""Bytes per weight."""


class UnknownCost(ValueError):
    """Nothing was measured for this setup."""


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


def _interpolate(x: float, points: list[tuple[float, float]]) -> float:
    """Interpolate between points in log-log. Extrapolates below the first point; constant above the last."""
    if not x > 0:
        raise UnknownCost(f"a learning rate or density of {x:g} changes nothing: there is nothing to plan")
    if x >= points[-1][0]:
        return points[-1][1]
    (x0, y0), (x1, y1) = next(pair for pair in itertools.pairwise(points) if x <= pair[1][0])
    return y0 * math.exp(math.log(y1 / y0) * math.log(x / x0) / math.log(x1 / x0))
