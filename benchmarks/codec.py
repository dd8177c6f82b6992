"""Bits per changed element and speed of every encoding, on real deltas, beside the formats of others and the floors.

    python benchmarks/codec.py                     # trains its own deltas first (cached), a few minutes on two cores
    python benchmarks/codec.py --quick             # one delta of each model
    python benchmarks/codec.py --ours              # without the formats of others
    python benchmarks/codec.py --why-not           # what people would try instead, on one step of stories15M
    python benchmarks/codec.py --device cuda --full  # the full Qwen3-0.6B shape, trained on a GPU

Speeds are per core (one thread), the fastest of several runs; memcpy of the same weights is timed in the same run. So
is the least that writing a delta can take: every cache line that changes, fetched and changed once, by positions that
are known beforehand (`lines`). "dec M/s" is decode and apply the way a replay does it (`DeltaFile.patches`).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numba import njit

from _deltas import Delta, cached
from _formats import FORMATS, floors
from _report import about, best, print_about, write_json
from _rivals import Tried, rivals, write_pair
from _shapes import QWEN3_06B, SMALL
from deltawire.core.change import Change, blocks, compare
from deltawire.core.codecs import ENCODINGS, packed, planes
from deltawire.core.full import digest_of
from deltawire.core.scatter import gather, place
from deltawire.core.simd import prefetch
from deltawire.core.sparse import DeltaFile, write_delta
from deltawire.models import ModelView

Row = dict[str, Any]
WAYS = ("packed", "context")


def measure(delta: Delta, others: bool) -> Row:
    """All encodings, and the formats of others, on one delta."""
    changed, elements = delta.changed, delta.elements
    row: Row = {
        "delta": delta.name,
        "elements": elements,
        "changed": changed,
        "density": changed / elements,
        "floors": floors(delta.old, delta.new),
        "formats": [],
    }
    copies = {k: np.zeros_like(v) for k, v in delta.old.items()}
    row["memcpy_ns_per_weight"] = 1e9 / elements * best(lambda: [np.copyto(copies[k], v) for k, v in delta.old.items()])
    row["detect_ns_per_weight"] = 1e9 / elements * best(lambda: _detect(delta))
    row["digest_ns_per_weight"] = 1e9 / elements * best(lambda: digest_of(ModelView(delta.old), threads=1))
    row["packed_ns_per_change"] = _parts(delta, changed)
    for encoding in ENCODINGS:
        if encoding == planes.name:
            continue  # for dense blocks only, where `context` turns to it by itself
        row["formats"].append(_ours(delta, encoding, changed, elements))
    for format in FORMATS if others else ():
        row["formats"].append(_theirs(delta, format, changed, elements))
    return row


def _detect(delta: Delta) -> list[list[Change]]:
    old, new = ModelView(delta.old), ModelView(delta.new)
    return [[compare(r, old.region(r), new.region(r)) for r in block] for block in blocks(old.schema)]


def _encoded(found: list[list[Change]], encoding: str, base: ModelView) -> bytes:
    writer, file = write_delta(found, encoding, base.region, {}, threads=1)
    data = b"".join(file.chunks())
    writer.close()
    return data


def _ours(delta: Delta, encoding: str, changed: int, elements: int) -> Row:
    found, base = _detect(delta), ModelView(delta.old)
    data = _encoded(found, encoding, base)

    def encode() -> None:
        write_delta(found, encoding, base.region, {}, threads=1)[0].close()

    live = {k: v.reshape(-1).copy() for k, v in delta.old.items()}

    def decode() -> float:
        """Decode and write, as a replay does. Putting the old bits back is not timed."""
        clock = time.perf_counter()
        opened = DeltaFile(lambda start, length: data[start : start + length], len(data), base.schema)
        done = list(opened.changes(live.__getitem__, threads=1, write=True))
        seconds = time.perf_counter() - clock
        if any(not np.array_equal(live[k], v.reshape(-1)) for k, v in delta.new.items()):
            raise SystemExit(f"{encoding} did not reproduce {delta.name}")
        for change in (change for changes in done for change in changes):
            change.undo(live[change.region.tensor.name])
        return seconds

    encode_seconds, decode_seconds = best(encode), min(decode() for _ in range(6))
    return _row(encoding, len(data), changed, elements, encode_seconds, decode_seconds, ours=True)


def _parts(delta: Delta, changed: int) -> dict[str, float]:
    """Where the time of `packed` goes, and what memory allows, in nanoseconds per change."""
    found, base = _detect(delta), ModelView(delta.old)
    data = _encoded(found, packed.name, base)
    opened = DeltaFile(lambda start, length: data[start : start + length], len(data), base.schema)
    live = {k: v.reshape(-1).copy() for k, v in delta.old.items()}
    flat = [(change, live[change.region.tensor.name]) for block in found for change in block if change.count]

    def decode() -> None:
        for block in opened.blocks:
            opened.read(block)

    def staged() -> None:
        """All of it decoded before a bit is written: what a replica does with live weights."""
        for changes in list(opened.changes(live.__getitem__, threads=1)):
            for change in changes:
                change.write(live[change.region.tensor.name])

    def replayed() -> None:
        for _ in opened.changes(live.__getitem__, threads=1, write=True):
            pass

    work: dict[str, Callable[[], object]] = {
        "stream": lambda: [bits.max() for bits in live.values()],
        "lines": lambda: [_touch(bits, change.positions, *change.region.geometry) for change, bits in flat],
        "decode": decode,
        "gather": lambda: [
            gather(bits, change.positions, np.empty_like(change.old), *change.region.geometry) for change, bits in flat
        ],
        "scatter": lambda: [change.write(bits) for change, bits in flat],
        "staged": staged,
        "replayed": replayed,
        "digest": lambda: [change.digest() for change, _ in flat],
    }
    fastest = dict.fromkeys(work, float("inf"))
    # in turns, so that a busy neighbour disturbs all of them alike
    for _ in range(8):
        for name, call in work.items():
            for key, bits in live.items():
                np.copyto(bits, delta.old[key].reshape(-1))
            clock = time.perf_counter()
            call()
            fastest[name] = min(fastest[name], time.perf_counter() - clock)
    return {name: 1e9 * seconds / max(changed, 1) for name, seconds in fastest.items()}


@njit(nogil=True)  # type: ignore[untyped-decorator]
def _touch(bits: Any, positions: Any, base: int, width: int, stride: int) -> None:
    """Read and write every changed unit, each cache line asked for well ahead: nothing else is done."""
    start, last = np.int64(bits.ctypes.data), positions.size - 1
    for i in range(positions.size):
        prefetch(start + bits.itemsize * place(positions[min(i + 128, last)], base, width, stride))
        bits[np.uint64(place(positions[i], base, width, stride))] += 1


def _theirs(delta: Delta, format: Any, changed: int, elements: int) -> Row:
    flat = [(v.reshape(-1), delta.new[k].reshape(-1), v.shape[-1]) for k, v in delta.old.items()]
    coded = [format.encode(*tensor) for tensor in flat]
    decoded = [format.decode(c, old, columns) for c, (old, _, columns) in zip(coded, flat, strict=True)]
    if any(not np.array_equal(d, new) for d, (_, new, _) in zip(decoded, flat, strict=True)):
        raise SystemExit(f"{format.name} did not reproduce {delta.name}")
    encode_seconds = best(lambda: [format.encode(*tensor) for tensor in flat], 2, 2.0)
    decode_seconds = best(lambda: [format.decode(c, o, n) for c, (o, _, n) in zip(coded, flat, strict=True)], 2, 2.0)
    size = sum(map(len, coded))
    return _row(format.name, size, changed, elements, encode_seconds, decode_seconds, ours=False)


def _row(name: str, size: int, changed: int, elements: int, encode: float, decode: float, ours: bool) -> Row:
    return {
        "name": name,
        "ours": ours,
        "bytes": size,
        "bits_per_changed": 8 * size / max(changed, 1),
        "times_smaller": 2 * elements / max(size, 1),
        "encode_m_per_s": changed / encode / 1e6,
        "decode_m_per_s": changed / decode / 1e6,
        "encode_ns_per_weight": 1e9 * encode / elements,
        "decode_ns_per_weight": 1e9 * decode / elements,
    }


def show(row: Row) -> None:
    copy = row["memcpy_ns_per_weight"]
    print(f"{row['delta']}: {row['elements'] / 1e6:.0f} M weights, {100 * row['density']:.2f} % changed")
    floor = ", ".join(f"{name} {bits:.2f}" for name, bits in row["floors"].items())
    print(f"  bits per changed element: {floor}")
    print(
        f"  memcpy {copy:.2f} ns a weight; "
        + "; ".join(
            f"{what} {row[f'{what}_ns_per_weight']:.2f} ({row[f'{what}_ns_per_weight'] / copy:.1f} ×)"
            for what in ("detect", "digest")
        )
    )
    parts = ", ".join(f"{name} {ns:.1f}" for name, ns in row["packed_ns_per_change"].items())
    print(f"  ns a change: {parts}; lines alone allow {1e3 / row['packed_ns_per_change']['lines']:.0f} M/s")
    columns = f"{'bits':>6} {'MB':>8} {'× smaller':>9} {'enc M/s':>8} {'dec M/s':>8} {'enc ns/w':>8} {'dec ns/w':>8}"
    print(f"  {'format':34} {columns}")
    for f in row["formats"]:
        print(
            f"  {('* ' if f['ours'] else '  ') + f['name']:34} {f['bits_per_changed']:6.2f} {f['bytes'] / 1e6:8.3f} "
            f"{f['times_smaller']:9.1f} {f['encode_m_per_s']:8.1f} {f['decode_m_per_s']:8.1f} "
            f"{f['encode_ns_per_weight']:8.2f} {f['decode_ns_per_weight']:8.2f}"
        )
    print(flush=True)


def chart(rows: list[Row], path: Path) -> None:
    """Bits per changed element over density: one line per format, the floors dashed."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        print("no chart: matplotlib is not installed")
        return
    rows = sorted(rows, key=lambda row: row["density"])
    density = [100 * row["density"] for row in rows]
    figure, axes = plt.subplots(figsize=(9, 5.5))
    for name in [f["name"] for f in rows[0]["formats"]]:
        bits = [next(f for f in row["formats"] if f["name"] == name)["bits_per_changed"] for row in rows]
        ours = next(f for f in rows[0]["formats"] if f["name"] == name)["ours"]
        axes.plot(density, bits, marker="o", linewidth=2.5 if ours else 1, alpha=1 if ours else 0.6, label=name)
    for name in rows[0]["floors"]:
        axes.plot(density, [row["floors"][name] for row in rows], "--", color="gray", linewidth=1, label=name)
    axes.set(xscale="log", yscale="log", xlabel="% of weights changed", ylabel="bits per changed element")
    axes.set_yticks([5, 7, 10, 15, 20, 30, 48], ["5", "7", "10", "15", "20", "30", "48"])
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, ncol=2)
    axes.set_title("Real deltas: bits per changed element")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    print(f"wrote {path}")


def deltas(options: argparse.Namespace) -> list[Delta]:
    if options.full:
        return [d for lr in (5e-7, 1e-6) for d in cached("qwen3", lr, (24,), options.device, QWEN3_06B)]
    rates = (1e-6,) if options.quick else (1e-6, 3e-6, 1e-5)
    found = [d for lr in rates for d in cached("qwen3", lr, (20,), options.device, SMALL)]
    rates = (3e-6,) if options.quick else (1e-6, 3e-6, 1e-5)
    return found + [d for lr in rates for d in cached("stories", lr, (24,), options.device)]


def why_not(device: str) -> Row:
    """Other ways to move the same step, as bytes and seconds; one thread where the tool lets us choose."""
    (delta,) = cached("stories", 3e-6, (24,), device)
    formats = {format.name: format for format in FORMATS}
    with TemporaryDirectory(prefix="deltawire-why-not-") as folder:
        pair = write_pair(delta.old, delta.new, Path(folder))
        full = pair.new.stat().st_size
        tried = [Tried("full weights", full, 0.0, None), *rivals(pair)]
    row = _theirs(delta, formats["dense XOR, zstd-1"], delta.changed, delta.elements)
    tried.append(_tried(row, "XOR + zstd-1 (our own)", delta))
    tried += [_tried(_ours(delta, name, delta.changed, delta.elements), f"**`{name}`**", delta) for name in WAYS]
    print(f"{delta.name}: {delta.elements / 1e6:.1f} M weights, {100 * delta.changed / delta.elements:.2f} % changed\n")
    print("| | kB | of full | encode | decode and apply |\n|---|---|---|---|---|")
    for one in tried:
        if one.size is None:
            print(f"| {one.name} | {one.remark} | | | |")
            continue
        decode = "" if one.decode_s is None else f"{1e3 * one.decode_s:,.0f} ms"
        encode = f"{1e3 * one.encode_s:,.0f} ms" if one.encode_s else ""
        print(f"| {one.name} | {one.size / 1e3:,.0f} | {100 * one.size / full:.2f} % | {encode} | {decode} |")
    found = {"delta": delta.name, "elements": delta.elements, "changed": delta.changed, "full": full}
    return {**found, "tried": [asdict(one) for one in tried]}


def _tried(row: Row, name: str, delta: Delta) -> Tried:
    seconds = [row[f"{way}_ns_per_weight"] * delta.elements / 1e9 for way in ("encode", "decode")]
    return Tried(name, row["bytes"], *seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one delta of each model")
    parser.add_argument("--full", action="store_true", help="the full Qwen3-0.6B shape instead (a GPU's work)")
    parser.add_argument(
        "--ours", action="store_true", help="without the formats of others, which take most of the time"
    )
    parser.add_argument("--why-not", action="store_true", help="zstd, xdelta3, bsdiff, Xet and ModelExpress instead")
    parser.add_argument("--device", default="cpu", help="where to train the deltas")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for JSON and chart")
    options = parser.parse_args()
    facts = about()
    print_about(facts)
    if options.why_not:
        write_json(options.out / "codec-why-not.json", {**facts, **why_not(options.device)})
        return
    rows = []
    for delta in deltas(options):
        rows.append(measure(delta, not options.ours))
        show(rows[-1])
    name = "codec" + "-full" * options.full + "-ours" * options.ours
    write_json(options.out / f"{name}.json", {**facts, "rows": rows})
    if not options.ours:
        chart(rows, options.out / f"{name}.svg")


if __name__ == "__main__":
    main()
