"""The measured figures behind `deltawire plan`, printed as they stand in src/deltawire/core/costs.py.

    python benchmarks/costs_table.py                # five minutes on a quiet machine
    python benchmarks/costs_table.py --part speeds  # only that
    python benchmarks/costs_table.py --quick        # small arrays: a look, not a measurement

Weights are normal(0, 0.02) with an fp32 master, as large models are initialised; AdamW (betas 0.9 and 0.999) steps
them by gradients that are pure noise, which is what a policy gradient mostly is. Counted are the bf16 weights that a
step changes. Trained weights are larger here and there and change less: benchmarks/codec.py trains some.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import numpy as np
from blake3 import blake3

import deltawire as dw
from _report import about, best, print_about
from deltawire.core.change import blocks, compare
from deltawire.core.full import digest_of
from deltawire.core.sparse import DeltaFile, write_delta
from deltawire.models import ModelView

Bits = np.ndarray

RATES = (1e-7, 3e-7, 1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3)
DENSITIES = (0.001, 0.003, 0.01, 0.03, 0.1)
STEADY = 60
"""Steps after which the density hardly falls any more."""


def bf16(values: np.ndarray) -> Bits:
    """Rounded to nearest even, as bits."""
    u = values.view(np.uint32)
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)


def normal(n: int, rng: np.random.Generator) -> np.ndarray:
    return rng.standard_normal(n, np.float32) * np.float32(0.02)


def steps(lr: float, n: int, rng: np.random.Generator) -> Iterator[tuple[Bits, Bits]]:
    """(before, after) of one AdamW step after the other."""
    w = normal(n, rng)
    m, v = np.zeros(n, np.float32), np.zeros(n, np.float32)
    before, t = bf16(w), 0
    while True:
        t += 1
        g = rng.standard_normal(n, np.float32)
        m += np.float32(0.1) * (g - m)
        v += np.float32(0.001) * (g * g - v)
        w -= np.float32(lr / (1 - 0.9**t)) * m / (np.sqrt(v / np.float32(1 - 0.999**t)) + np.float32(1e-8))
        after = bf16(w)
        yield before, after
        before = after


def packed_bits(old: Bits, new: Bits) -> float:
    shape = (-1, 4096)
    blob = dw.encode({"w": old.reshape(shape)}, {"w": new.reshape(shape)}, "packed", threads=1)
    return 8 * len(blob) / np.count_nonzero(old != new)


def by_learning_rate(n: int) -> None:
    print("TRAINING: (learning rate, share changed by a step, by the first step, bits per change in `packed`)")
    for lr in RATES:
        trail = steps(lr, n, np.random.default_rng(0))
        old, new = next(trail)
        first = np.mean(old != new)
        for _ in range(STEADY - 1):
            old, new = next(trail)
        print(f"    Point({lr:g}, {np.mean(old != new):.3g}, {first:.3g}, {packed_bits(old, new):.2f}),", flush=True)


def by_density(n: int) -> None:
    print("the same codec where every step is ±1 ulp, at random: its best case")
    rng = np.random.default_rng(0)
    old = bf16(normal(n, rng))
    for density in DENSITIES:
        new = ulps(old, density, rng)
        print(f"    {100 * density:5.1f} % changed   {packed_bits(old, new):5.2f} bits per change", flush=True)


def ulps(old: Bits, density: float, rng: np.random.Generator) -> Bits:
    new = old.copy()
    where = np.flatnonzero(rng.random(old.size) < density)
    new[where] += rng.choice(np.array([1, 65535], np.uint16), where.size)
    return new


def speeds(n: int) -> None:
    """One thread, at 1 % changed."""
    n *= 4  # well past any cache
    rng = np.random.default_rng(0)
    old = bf16(normal(n, rng)).reshape(-1, 4096)
    new = ulps(old.reshape(-1), 0.01, rng).reshape(old.shape)
    before, after = ModelView({"w": old}), ModelView({"w": new})
    found = [[compare(r, before.region(r), after.region(r)) for r in block] for block in blocks(before.schema)]
    changed = sum(change.count for block in found for change in block)
    writer, file = write_delta(found, "packed", before.region, {}, threads=1)
    blob = b"".join(file.chunks())
    writer.close()
    live = old.reshape(-1).copy()

    def decode() -> list[list[object]]:
        opened = DeltaFile(lambda start, length: blob[start : start + length], len(blob), before.schema)
        return list(opened.changes(before.bits, threads=1))  # type: ignore[arg-type]

    def encode() -> None:
        write_delta(found, "packed", before.region, {}, threads=1)[0].close()

    def apply() -> None:
        for block in found:
            for change in block:
                change.write(live)

    def detect() -> object:
        return [[compare(r, before.region(r), after.region(r)) for r in block] for block in blocks(before.schema)]

    print("SPEEDS, per core")
    whole = memoryview(old).cast("B")
    work: dict[str, tuple[Callable[[], object], float, str]] = {
        "detect": (detect, n, "weights/s"),
        "encode": (encode, changed, "changes/s"),
        "hash": (lambda: blake3(whole).digest(), whole.nbytes, "bytes/s"),
        "decode": (decode, changed, "changes/s"),
        "apply": (apply, changed, "changes/s"),
        "prove": (lambda: digest_of(before, threads=1), n, "weights/s"),
    }
    for name, (call, amount, unit) in work.items():
        print(f"    {name}={amount / best(call):.2g},  # {unit}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="smaller arrays")
    parts = {"training": by_learning_rate, "ulps": by_density, "speeds": speeds}
    parser.add_argument("--part", choices=parts, help="only this one")
    options = parser.parse_args()
    print_about(about())
    for name, part in parts.items():
        if options.part in (None, name):
            part(1 << (20 if options.quick else 24))


if __name__ == "__main__":
    main()
