"""`deltawire import`: bytes of the same versions in other systems' formats and in ours, and seconds per version.

    python benchmarks/imports.py                 ten versions of stories15M, trained here; needs npm once
    python benchmarks/imports.py --weights 200   seconds of versions of a synthetic model of 200 million weights

Seconds are those of importing a version from a folder into a folder, beside what nobody can do without: to inflate what
changed and to pass over the weights once, with as many threads; the fastest version counts.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from _report import about, print_about, write_json

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "foreign"))

from writers import Model, write_base, write_delta, write_skyrl

from deltawire import FullFile, Region
from deltawire.core.container import open_file
from deltawire.core.parallel import default_threads
from deltawire.foreign import Importer

FORMATS = ("xor", "overwrite", "skyrl")


def trained(lr: float, warm: int, versions: int) -> Iterator[Model]:
    from _deltas import bits_of, training

    run = training("stories", lr, batch_size=(2, 4, 24))
    for step, (weights, _) in zip(range(warm + versions + 1), run, strict=False):
        if step >= warm:
            yield bits_of(weights)


def synthetic(millions: int, density: float, versions: int) -> Iterator[Model]:
    rng = np.random.default_rng(0)
    side = 4096
    names = [f"layers.{n}.weight" for n in range(max(1, millions * 1_000_000 // (side * side)))]
    now = {
        name: (rng.standard_normal((side, side), np.float32).view(np.uint32) >> 16).astype(np.uint16) for name in names
    }
    yield now
    for _ in range(versions):
        after = {}
        for name, bits in now.items():
            after[name] = bits.copy()
            where = rng.integers(0, bits.size, round(density * bits.size))
            after[name].reshape(-1)[where] += 1
        now = after
        yield now


def write(root: Path, history: Iterator[Model], formats: tuple[str, ...]) -> int:
    """All versions in all formats; the number of weights."""
    before: Model = {}
    for number, weights in enumerate(history):
        if number == 0:
            write_base(root / "base", weights)
        for name in formats if number else ():
            if name == "skyrl":
                write_skyrl(root / name, number, before, weights)
            else:
                write_delta(root / name, number, before, weights, name)
        before = weights
    return sum(array.size for array in before.values())


def floor(folder: Path, base: Model) -> float:
    """Seconds to inflate the tensors of a version and to pass over the weights before it, on all threads."""
    payloads = []
    for path in folder.glob("*.safetensors"):
        file = FullFile(*open_file(path))
        payloads += [file.region(Region(t, 0, t.rows, 0, t.columns)).tobytes() for t in file.tensors]

    def inflate(data: bytes) -> None:
        size = zstandard.get_frame_parameters(data).content_size
        # faster than `decompress`
        reader, view = zstandard.ZstdDecompressor().stream_reader(data), np.empty(size, np.uint8).data
        while n := reader.readinto(view):
            view = view[n:]

    def read(array: np.ndarray) -> None:
        flat = array.reshape(-1).view(np.uint8)
        np.bitwise_xor.reduce(flat[: flat.size // 8 * 8].view(np.uint64))

    with ThreadPoolExecutor(default_threads()) as pool:
        began = time.perf_counter()
        list(pool.map(inflate, payloads))
        list(pool.map(read, base.values()))
        return time.perf_counter() - began


def take(root: Path, name: str, encoding: str) -> dict[str, Any]:
    run = root / "run"
    shutil.rmtree(run, ignore_errors=True)
    base = {}
    for tensor in (file := FullFile(*open_file(root / "base" / "model.safetensors"))).tensors:
        base[tensor.name] = file.region(Region(tensor, 0, tensor.rows, 0, tensor.columns))
    theirs, ours, seconds, floors = 0, 0, [], []
    with Importer(root / name, run, base=root / "base", encoding=encoding, anchor_ratio=1e9) as importer:
        for imported in importer.follow(once=True):
            if imported.kind == "base":
                continue
            folder = root / name / imported.name
            theirs += sum(path.stat().st_size for path in folder.iterdir())
            ours += imported.published.bytes
            seconds.append(imported.seconds)
            floors.append(floor(folder, base))
    return {
        "format": name, "encoding": encoding, "versions": len(seconds), "theirs": theirs, "ours": ours,
        "seconds": min(seconds), "floor_seconds": min(floors),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=int, help="millions, of a synthetic model")
    parser.add_argument("--density", type=float, default=0.01, help="share of its weights that change")
    parser.add_argument("--lr", type=float, default=3e-6)
    parser.add_argument("--warm", type=int, default=16, help="steps before the first version")
    parser.add_argument("--versions", type=int, default=10)
    parser.add_argument("--folder", type=Path, help="where the versions lie meanwhile")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    facts = about()
    print_about(facts)
    with tempfile.TemporaryDirectory(dir=chosen.folder) as made:
        root = Path(made)
        formats = ("xor", "overwrite") if chosen.weights else FORMATS
        history = (
            synthetic(chosen.weights, chosen.density, chosen.versions)
            if chosen.weights
            else trained(chosen.lr, chosen.warm, chosen.versions)
        )
        weights = write(root, history, formats)
        print(f"{weights:,} weights, {chosen.versions} versions\n")
        print("| format | theirs | ours | of theirs | encoding | s per version | inflate + pass | ratio |")
        print("|---|---|---|---|---|---|---|---|")
        rows = []
        for name in formats:
            for encoding in ("packed",) if chosen.weights else ("packed", "context"):
                row = take(root, name, encoding)
                rows.append(row)
                print(
                    f"| {name} | {row['theirs'] / 1e6:.2f} MB | {row['ours'] / 1e6:.2f} MB "
                    f"| {100 * row['ours'] / row['theirs']:.0f} % | {encoding} | {row['seconds']:.3f} "
                    f"| {row['floor_seconds']:.3f} | {row['seconds'] / row['floor_seconds']:.1f} |",
                    flush=True,
                )
    if chosen.out:
        write_json(chosen.out, {"about": facts, "weights": weights, "rows": rows})


if __name__ == "__main__":
    main()
