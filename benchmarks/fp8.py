"""What a step costs as fp8 instead of bf16, on the versions of a bf16 run, such as one of benchmarks/real_models.py.

    python benchmarks/real_models.py --model stories15m --lr 1e-5 --steps 40 --keep scratch
    python benchmarks/fp8.py scratch/run-0 --model "stories15M, lr 1e-5"

Each version is derived as each view (deltawire.views), and the deltas between two versions are encoded. Only
the later half of a run counts, whose steps are steady. `changed` is counted in the matrices that the view converts;
`payload` is the whole delta, with embeddings and norms, which stay bf16, and with the scales. Floors are those of
docs/codec.md, for fp8 weights: positions by tensor and old exponent, steps in ulps of e4m3 by old exponent.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from _formats import floors
from _report import about, print_about, write_json
from deltawire.bucket.replay import checkout
from deltawire.bucket.run import Run
from deltawire.core.change import Change, blocks, compare
from deltawire.core.schema import Schema
from deltawire.core.sparse import write_delta
from deltawire.core.state import State
from deltawire.derive.followed import FollowedView, ViewDetector
from deltawire.views import VIEWS
from deltawire.views.blocks import SCALES, Blocks

HERE = Path(__file__).parent
ENCODINGS = ("packed", "context")


def copied(state: State) -> State:
    result = State(state.schema)
    result.tensors = {name: bits.copy() for name, bits in state.tensors.items()}
    return result


def differences(old: State, new: State) -> list[list[Change]]:
    return [[compare(r, old.region(r), new.region(r)) for r in block] for block in blocks(old.schema)]


def size(old: State, changes: Sequence[Sequence[Change]], encoding: str) -> int:
    writer, file = write_delta(changes, encoding, old.region, {})
    writer.close()
    return file.size


def only(changes: Sequence[Sequence[Change]], names: set[str]) -> list[list[Change]]:
    kept = [[change for change in block if change.region.tensor.name in names] for block in changes]
    return [block for block in kept if block]


def count(changes: Sequence[Sequence[Change]]) -> int:
    return sum(change.count for block in changes for change in block)


def measure(run: Run, late: Sequence[int], name: str) -> Iterator[dict[str, Any]]:
    """Each of these versions against the one before it."""
    grids = Blocks(run.schema, name)
    converted, scales = set(grids.grids), {name + SCALES for name in grids.grids}
    state = checkout(run, late[0] - 1)
    view, detector = FollowedView(state, grids), ViewDetector()
    detector.bind(view)
    detector.load(view)
    detector.detect(view, 1 << 60)().result()
    for version in late:
        print(f"version {version} of {late[-1]}", end="\r", flush=True)
        before, before_fp8 = copied(state), copied(detector.state)
        state = checkout(run, version, state, changed=view.note)
        clock = time.process_time()
        view.advance()
        detector.detect(view, 1 << 60)().result()
        seconds = time.process_time() - clock
        bf16, fp8 = differences(before, state), differences(before_fp8, detector.state)
        codes = only(fp8, converted)
        old, new = ({n: s.bits(n) for n in converted} for s in (before_fp8, detector.state))
        yield {
            "version": version,
            "changed_bf16": count(only(bf16, converted)),
            "changed_fp8": count(codes),
            "changed_scales": count(only(fp8, scales)),
            "changed_kept": count(bf16) - count(only(bf16, converted)),
            "payload_bf16": {name: size(before, bf16, name) for name in ENCODINGS},
            "payload_fp8": {name: size(before_fp8, fp8, name) for name in ENCODINGS},
            "matrices_bf16": {name: size(before, only(bf16, converted), name) for name in ENCODINGS},
            "matrices_fp8": {name: size(before_fp8, codes, name) for name in ENCODINGS},
            "floors_fp8": floors(old, new, "F8_E4M3"),
            "floors_bf16": floors({n: before.bits(n) for n in converted}, {n: state.bits(n) for n in converted}),
            "convert_s": seconds,
        }


def summary(schema: Schema, versions: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    grids = Blocks(schema, name)
    weights = sum(grid.tensor.elements for grid in grids.grids.values())

    def middle(*path: str) -> float:
        values = []
        for version in versions:
            value: Any = version
            for key in path:
                value = value[key]
            values.append(value)
        return median(values)

    def bits(kind: str, encoding: str) -> float:
        return median(8 * v[f"matrices_{kind}"][encoding] / v[f"changed_{kind}"] for v in versions)

    return {
        "elements": schema.elements,
        "converted": weights,
        "scales": grids.count,
        "full_bf16": schema.nbytes,
        "full_fp8": grids.schema.nbytes,
        "changed_bf16": middle("changed_bf16") / weights,
        "changed_fp8": middle("changed_fp8") / weights,
        "fewer": median(v["changed_bf16"] / v["changed_fp8"] for v in versions),
        "changed_scales": middle("changed_scales") / grids.count,
        "payload_bf16": {name: middle("payload_bf16", name) for name in ENCODINGS},
        "payload_fp8": {name: middle("payload_fp8", name) for name in ENCODINGS},
        "matrices_bf16": {name: middle("matrices_bf16", name) for name in ENCODINGS},
        "matrices_fp8": {name: middle("matrices_fp8", name) for name in ENCODINGS},
        "bits_bf16": {name: bits("bf16", name) for name in ENCODINGS},
        "bits_fp8": {name: bits("fp8", name) for name in ENCODINGS},
        "floors_fp8": {name: middle("floors_fp8", name) for name in versions[0]["floors_fp8"]},
        "floors_bf16": {name: middle("floors_bf16", name) for name in versions[0]["floors_bf16"]},
        "convert_ms": 1e3 * middle("convert_s"),
    }


def show(model: str, found: dict[str, Any]) -> None:
    print(f"\n{model}: {found['elements']:,} weights, {found['converted']:,} of them as fp8")
    print(f"  full        {found['full_bf16'] / 1e6:.1f} MB bf16, {found['full_fp8'] / 1e6:.1f} MB fp8")
    print(f"  changed     {found['changed_bf16']:.3%} → {found['changed_fp8']:.4%} of the matrices' weights, "
          f"{found['fewer']:.1f} × fewer; {found['changed_scales']:.2%} of the scales")  # fmt: skip
    for name in ENCODINGS:
        (whole, whole8), (part, part8) = ((found[f"{what}_bf16"][name] / 1e3, found[f"{what}_fp8"][name] / 1e3)
                                          for what in ("payload", "matrices"))  # fmt: skip
        print(f"  {name:10}  payload {whole:9.1f} → {whole8:9.1f} kB; matrices alone {part:9.1f} → {part8:9.1f} kB; "
              f"{found['bits_bf16'][name]:.2f} → {found['bits_fp8'][name]:.2f} bits per changed weight")  # fmt: skip
    for name, value in found["floors_fp8"].items():
        print(f"  {name:22}  {found['floors_bf16'][name]:.2f} → {value:.2f} bits")
    print(f"  convert     {found['convert_ms']:.1f} ms of CPU time a version")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="addresses of bf16 runs")
    parser.add_argument("--model", nargs="*", default=[], help="what to call each of them")
    parser.add_argument("--views", nargs="+", choices=VIEWS, default=VIEWS, help="%(default)s")
    parser.add_argument("--versions", type=int, default=10, help="at most so many of each, the latest (%(default)s)")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "fp8.json")
    given = parser.parse_args()
    facts = about()
    print_about(facts)
    results = []
    for number, address in enumerate(given.runs):
        run = Run.open(address)
        versions = [version for version in run.listed() if version]
        late = versions[len(versions) // 2 :][-given.versions :]
        name = given.model[number] if number < len(given.model) else Path(address).name
        for view in given.views:
            measured = list(measure(run, late, view))
            found = summary(run.schema, measured, view)
            results.append({"model": name, "view": view, "summary": found, "versions": measured})
            show(f"{name}, {view}", found)
    write_json(given.out, {"about": facts, "results": results})


if __name__ == "__main__":
    main()
