"""The measured figures behind `deltawire plan`, printed as they stand in src/deltawire/costs.py.

    python benchmarks/costs_table.py                # some minutes on a quiet machine
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
from deltawire.core.change import Change, blocks, compare
from deltawire.core.full import digest_of
from deltawire.core.parallel import ordered_map
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


def bits_per_change(old: Bits, new: Bits, encoding: str) -> float:
    shape = (-1, 4096)
    blob = dw.encode({"w": old.reshape(shape)}, {"w": new.reshape(shape)}, encoding, threads=1)
    return 8 * len(blob) / np.count_nonzero(old != new)


def by_learning_rate(n: int) -> None:
    print("TRAINING: (learning rate, share changed by a step, by the first step, bits per change in `packed`)")

    def point(lr: float) -> str:
        trail = steps(lr, n, np.random.default_rng(0))
        old, new = next(trail)
        first = np.mean(old != new)
        for _ in range(STEADY - 1):
            old, new = next(trail)
        return f"Point({lr:g}, {np.mean(old != new):.3g}, {first:.3g}, {bits_per_change(old, new, 'packed'):.2f}),"

    for line in ordered_map(point, RATES):
        print(f"    {line}", flush=True)


def context_bits(n: int) -> None:
    """The smaller a weight, the likelier it changes: what `context` lives on. One step of noise is enough for that."""
    print("CONTEXT: (share changed, bits per change in `context`)")
    for size in (3e-8, 1e-7, 3e-7, 1e-6, 3e-6, 1e-5, 3e-5, 1e-4):
        stepped = Stepped(n, size)
        bits = 8 * len(stepped.encoded("context")) / stepped.changed
        print(f"    ({stepped.changed / n:.3g}, {bits:.2f}),", flush=True)


def by_density(n: int) -> None:
    print("the same codec where every step is ±1 ulp, at random: its best case")
    rng = np.random.default_rng(0)
    old = bf16(normal(n, rng))
    for density in DENSITIES:
        new = ulps(old, density, rng)
        bits = bits_per_change(old, new, "packed")
        print(f"    {100 * density:5.1f} % changed   {bits:5.2f} bits per change", flush=True)


def ulps(old: Bits, density: float, rng: np.random.Generator) -> Bits:
    new = old.copy()
    where = np.flatnonzero(rng.random(old.size) < density)
    new[where] += rng.choice(np.array([1, 65535], np.uint16), where.size)
    return new


class Stepped:
    """Weights before and after one step of this size, in bf16: the smaller a weight, the likelier it changes."""

    def __init__(self, n: int, lr: float) -> None:
        rng = np.random.default_rng(0)
        w = normal(n, rng)
        self.old = bf16(w).reshape(-1, 4096)
        self.new = bf16(w + np.float32(lr) * rng.standard_normal(n, np.float32)).reshape(-1, 4096)
        self.before, self.after = ModelView({"w": self.old}), ModelView({"w": self.new})
        self.found = self.detect()
        self.changed = sum(change.count for block in self.found for change in block)

    def detect(self) -> list[list[Change]]:
        old, new = self.before.region, self.after.region
        return [[compare(r, old(r), new(r)) for r in block] for block in blocks(self.before.schema)]

    def encoded(self, encoding: str) -> bytes:
        writer, file = write_delta(self.found, encoding, self.before.region, {}, threads=1)
        blob = b"".join(file.chunks())
        writer.close()
        return blob

    def coding(self, encoding: str) -> tuple[float, float]:
        """Seconds to encode and to decode."""
        blob = self.encoded(encoding)

        def decode() -> None:
            opened = DeltaFile(lambda start, length: blob[start : start + length], len(blob), self.before.schema)
            for _ in opened.changes(self.before.bits, threads=1):
                pass

        return best(lambda: self.encoded(encoding)), best(decode)


def speeds(n: int) -> None:
    """One thread, on weights of which about 1 % and 3 % change."""
    n *= 4  # well past most caches
    some, more = Stepped(n, 2e-7), Stepped(n, 8e-7)
    print(f"SPEEDS, per second and core, {100 * some.changed / n:.2f} % changed")
    live = some.old.reshape(-1).copy()
    whole = memoryview(some.old).cast("B")

    def apply() -> None:
        for block in some.found:
            for change in block:
                change.write(live)

    work: dict[str, tuple[Callable[[], object], float, str]] = {
        "detect": (some.detect, n, "weights"),
        "hash": (lambda: blake3(whole).digest(), whole.nbytes, "bytes"),
        "apply": (apply, some.changed, "changes"),
        "prove": (lambda: digest_of(some.before, threads=1), n, "weights"),
    }
    for name, (call, amount, unit) in work.items():
        print(f"    {name}={amount / best(call):.2g},  # {unit}", flush=True)
    print(
        f"CODING, seconds per weight and per change: the line through {some.changed / n:.2%} and {more.changed / n:.2%}"
    )
    for encoding in ("packed", "context", "raw"):
        figures = []
        for few, many in zip(some.coding(encoding), more.coding(encoding), strict=True):
            per_change = max(many - few, 0.0) / (more.changed - some.changed)
            per_weight = max(few - per_change * some.changed, 0.0) / n
            figures += [f"{per_weight:.2g}", f"{per_change:.2g}"]
        print(f'    "{encoding}": Coding({", ".join(figures)}),', flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="smaller arrays")
    parts = {"training": by_learning_rate, "context": context_bits, "ulps": by_density, "speeds": speeds}
    parser.add_argument("--part", choices=parts, help="only this one")
    options = parser.parse_args()
    print_about(about())
    for name, part in parts.items():
        if options.part in (None, name):
            part(1 << (20 if options.quick else 24))


if __name__ == "__main__":
    main()
