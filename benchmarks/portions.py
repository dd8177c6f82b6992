"""What a version of a large model takes on its device, and in a pause: with room for all of it, and for a part.

    python benchmarks/portions.py                                   # 30.5 G weights on an H200: two minutes
    python benchmarks/portions.py --weights 20e6 --device cpu       # a try, by plain torch

The weights are random bf16 matrices as the experts of Qwen3-30B-A3B have them. What changes is made on the device and
written where the decoder of a server writes it, then staged, written, proven, taken back and proven again, for every
`--room` (GB of the device; "default": what a server takes, "all": without a limit). No engine computes beside it.
    staged     from the decoder's files to the device, the prediction included
    device     most bytes that were allocated meanwhile, beside the weights, tables for plans and digests included
    here, away portions on the device and in host memory
    write      the new bits, until the device has written them
    digest     of all weights, which the pause has too
    undo       the old bits
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from _report import about, print_about, write_json

ROWS, COLUMNS = 768, 2048
TILE = 1 << 16


def make_moves(views: list[Any], density: float, path: Path) -> int:
    """Write moves by one step for about so many of the units; return how many there are."""
    import torch

    from deltawire.core.change import NUMBER_STEPS
    from deltawire.engines.live import arrays

    generator = torch.Generator(views[0].device).manual_seed(1)
    tiles = -(-ROWS * COLUMNS // TILE)
    most = int(len(views) * ROWS * COLUMNS * density * 1.1) + 1000
    positions, values = np.empty(most, np.uint16), np.empty(most, np.uint16)
    counts, at = [], 0
    for view in views:
        where = (torch.rand(ROWS * COLUMNS, device=view.device, generator=generator) < density).nonzero().reshape(-1)
        counts.append(torch.bincount(where // TILE, minlength=tiles).cpu().numpy())
        positions[at : at + where.numel()] = (where % TILE).to(torch.int32).cpu().numpy()
        values[at : at + where.numel()] = (where % 2).to(torch.int32).cpu().numpy()
        at += where.numel()
    starts = np.append(0, np.cumsum(np.concatenate(counts)))
    kind = NUMBER_STEPS
    arrays.write(path, {f"starts.{kind}": starts, f"positions.{kind}": positions[:at], f"values.{kind}": values[:at]})
    return at


def measure(pieces: list[Any], room: int | None, path: Path, changed: int, repeats: int, before: int) -> dict[str, Any]:
    import torch

    from deltawire.core.change import NUMBER_STEPS
    from deltawire.engines.live import arrays
    from deltawire.replica.device import DeviceShard

    cuda = pieces[0].view.device.type == "cuda"

    def synchronize() -> None:
        if cuda:
            torch.cuda.synchronize()

    def timed(work: Callable[[], object]) -> tuple[float, Any]:
        synchronize()
        clock = time.perf_counter()
        result = work()
        synchronize()
        return time.perf_counter() - clock, result

    shard, groups = DeviceShard(pieces, room=room), [0] * len(pieces)
    times: dict[str, list[float]] = {name: [] for name in ("staged", "write", "digest", "undo")}
    peak = 0
    for turn in range(repeats + 1):
        present = shard.digests(groups)[0]
        if cuda:
            torch.cuda.reset_peak_memory_stats()

        def stage() -> tuple[Any, Any]:
            patch = shard.receive(arrays.open_stored(path), [(NUMBER_STEPS, changed)], {}, {})
            return patch, shard.shifts(patch, groups)[0]

        took, (patch, shift) = timed(stage)
        found = {"staged": took, "write": timed(lambda p=patch: shard.write(p))[0]}  # type: ignore[misc]
        found["digest"], digests = timed(lambda: shard.digests(groups))
        assert digests[0] == present + shift, "these are not the weights that were predicted"
        found["undo"] = timed(lambda p=patch: shard.undo(p))[0]  # type: ignore[misc]
        assert shard.digests(groups)[0] == present, "these are not the weights from before"
        if cuda:
            peak = max(peak, torch.cuda.max_memory_allocated() - before)
        portions = len(patch._here), len(patch._away)
        del patch
        # the first one compiles
        for name, seconds in found.items() if turn else ():
            times[name].append(seconds)
    figures = {f"{name}_ms": [round(1e3 * seconds, 3) for seconds in seen] for name, seen in times.items()}
    return {"room": room, "device_bytes": peak, "here": portions[0], "away": portions[1], **figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=float, default=30.5e9)
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--room", nargs="+", default=["all", "default", "0"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, help="file for the figures as JSON")
    options = parser.parse_args()
    facts = about()
    print_about(facts)
    import torch

    from deltawire.core.change import whole
    from deltawire.core.schema import TensorSpec
    from deltawire.engines.live import arrays
    from deltawire.replica.portions import room_beside
    from deltawire.replica.shard import Piece

    count = max(1, round(options.weights / (ROWS * COLUMNS)))
    views = [torch.empty((ROWS, COLUMNS), dtype=torch.bfloat16, device=options.device) for _ in range(count)]
    for view in views:
        view.normal_(0, 0.02)
    specs = [TensorSpec(f"experts.{number}.weight", "BF16", (ROWS, COLUMNS)) for number in range(count)]
    pieces = [Piece(whole(spec), view) for spec, view in zip(specs, views, strict=True)]
    weights = 2 * count * ROWS * COLUMNS
    before = torch.cuda.memory_allocated() if options.device == "cuda" else 0
    with arrays.folder() as name:
        path = Path(name) / "moves"
        changed = make_moves(views, options.density, path)
        print(
            f"{weights / 2e9:.1f} G weights, {changed / 1e6:.1f} M changes, {path.stat().st_size / 1e9:.2f} GB of moves"
        )
        rows = []
        for text in options.room:
            room = None if text == "all" else room_beside(weights, None if text == "default" else float(text))
            row = measure(pieces, room, path, changed, options.repeats, before)
            rows.append({"asked": text, **row})
            phases = {name: np.median(row[f"{name}_ms"]) for name in ("staged", "write", "digest", "undo")}
            shown = ", ".join(f"{name} {ms:.1f} ms" for name, ms in phases.items())
            share = row["device_bytes"] / weights
            print(f"room {text}: {row['device_bytes'] / 1e6:.0f} MB ({share:.2%}), {row['here']} portions here and "
                  f"{row['away']} away; {shown}", flush=True)  # fmt: skip
    if options.out:
        write_json(options.out, {**facts, "weight_bytes": weights, "changed": changed, "rows": rows})


if __name__ == "__main__":
    main()
