"""Peak memory and time of every command on hostile runs: under 1 GB beyond the declared model, however large it claims
to be.

    python benchmarks/hostile.py                 # 3 minutes, 2 GB of disk in TMPDIR
    python benchmarks/hostile.py --check         # exit 1 if a command needs more, or does not end
    python benchmarks/hostile.py --json out.json

Each run is a good one of three versions in which one thing was changed, hashes and sizes made to fit. Each command runs
in a process of its own; "beyond" is its peak less that of the same command on the good run. The model has 3 kB.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from blake3 import blake3

from _report import about, print_about, write_json
from deltawire.core import keys
from deltawire.core.schema import Schema, TensorSpec
from deltawire.store import LocalStore
from deltawire.trainer import Publisher

ALLOWED = 1 << 30
LIMIT_S = 300.0
COMMANDS = {
    "log": ["log", "RUN"],
    "show": ["show", "RUN"],
    "verify": ["verify", "RUN"],
    "checkout": ["checkout", "RUN", "-o", "OUT"],
    "show of two": ["show", "RUN@1", "@latest"],
    "prune": ["prune", "RUN", "--keep-last", "1"],
    "publish": ["publish", "OUT.good", "RUN"],
}
CHILD = """
import os, sys
from deltawire.cli import main

# VmHWM does not count files in memory
del os.memfd_create
report = sys.argv.pop(1)
try:
    main()
finally:
    with open(report, "w") as file:
        file.write(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def weights(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    made = rng.integers(0, 1 << 16, (96, 16), np.uint16)
    made[: step + 1, 0] += step
    return {"w": made}


def good_run(place: Path) -> None:
    with Publisher(str(place), anchor_ratio=1e9, files={"config.json": b"{}"}) as publisher:
        for step in range(3):
            publisher.publish(weights(step)).result(60)


def edit(run: Path, key: str, change: Callable[[dict[str, Any]], Any]) -> None:
    value = json.loads((run / key).read_bytes())
    change(value)
    LocalStore(run).put(key, json.dumps(value).encode())


def zeros(run: Path, key: str, size: int) -> None:
    """An object that takes no disk."""
    (run / key).parent.mkdir(exist_ok=True)
    with open(run / key, "wb") as file:
        file.truncate(size)


def newest(run: Path, **changes: Any) -> None:
    edit(run, keys.manifest(2), lambda manifest: manifest.update(changes))


# ── hostile runs ─────────────────────────────────────────────────────────────────────────────────────────────────────


def a_companion_of_3_gb(run: Path) -> None:
    zeros(run, keys.file("0" * 32), 3 << 30)
    newest(run, files=[{"name": "a.json", "key": keys.file("0" * 32), "size": 3 << 30, "hash": "0" * 32}])


def an_object_forty_times(run: Path) -> None:
    key, size = keys.anchor(2, "0123abcd"), 60 << 20
    zeros(run, key, size)
    blob = {"key": key, "size": size, "hash": blake3(bytes(size)).hexdigest(length=16)}
    newest(run, links=[{"kind": "anchor", "objects": [blob] * 40}])


def a_version_of_2_to_the_40(run: Path) -> None:
    value = json.loads((run / keys.manifest(2)).read_bytes())
    value |= {"version": 1 << 40, "parent": (1 << 40) - 1}
    LocalStore(run).put(keys.manifest(1 << 40), json.dumps(value).encode())
    edit(run, keys.HEAD, lambda head: head.update(version=1 << 40))


def a_model_of_3_tb(run: Path) -> None:
    schema = Schema.build([TensorSpec("w", "U8", (3 * 10**12,))])
    tensors = {"tensors": [["w", "U8", [3 * 10**12]]], "ties": {}}
    edit(run, keys.RUN, lambda info: info.update(schema=tensors, schema_hash=schema.hash))
    for version in range(3):
        edit(run, keys.manifest(version), lambda manifest: manifest.update(schema=schema.hash))


def a_head_without_end(run: Path) -> None:
    (run / keys.HEAD).unlink()
    (run / keys.HEAD).symlink_to("/dev/zero")


def records_of_2_gb(run: Path) -> None:
    for key in (keys.HEAD, keys.PRUNED, keys.manifest(2), keys.history(16)):
        zeros(run, key, 2 << 30)


def a_run_json_of_2_gb(run: Path) -> None:
    zeros(run, keys.RUN, 2 << 30)


def records_as_large_as_allowed(run: Path) -> None:
    """200,000 tensors, 200,000 pruned ranges, a manifest that names 20,000 objects: all of it valid."""
    tensors = [[f"layer.{n:06d}.weight", "U8", [1, 1, 1, 1]] for n in range(200_000)]
    schema = Schema.build([TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in tensors])
    edit(run, keys.RUN, lambda info: info.update(schema={"tensors": tensors, "ties": {}}, schema_hash=schema.hash))
    for version in range(3):
        edit(run, keys.manifest(version), lambda manifest: manifest.update(schema=schema.hash))
    objects = [{"key": keys.anchor(2, f"{n:08x}"), "size": 8, "hash": "0" * 32} for n in range(20_000)]
    edit(run, keys.manifest(2), lambda manifest: manifest["links"].append({"kind": "anchor", "objects": objects}))
    spans = [[number, number] for number in range(10, 400_010, 2)]
    run_id = json.loads((run / keys.RUN).read_bytes())["run"]
    LocalStore(run).put(keys.PRUNED, json.dumps({"run": run_id, "versions": spans}).encode())


def an_index_that_unpacks_to_40_mb(run: Path) -> None:
    link = json.loads((run / keys.manifest(2)).read_bytes())["links"][0]
    place = run / link["objects"][0]["key"]
    blob = place.read_bytes()
    header = json.loads(blob[8 : 8 + int.from_bytes(blob[:8], "little")])
    plain = b'{"tensors": [], "blocks": [' + b"{}," * (13 << 20) + b"{}]}"
    packed = zstandard.ZstdCompressor(19).compress(plain)
    made = {"__metadata__": {**header["__metadata__"], "index_size": str(len(plain))}}
    made["index"] = {"dtype": "U8", "shape": [len(packed)], "data_offsets": [0, len(packed)]}
    text = json.dumps(made).encode()
    data = len(text).to_bytes(8, "little") + text + packed
    place.write_bytes(data)
    objects = [{"key": link["objects"][0]["key"], "size": len(data), "hash": blake3(data).hexdigest(length=16)}]
    newest(run, links=[{**link, "objects": objects}])


def twenty_thousand_heartbeats(run: Path) -> None:
    info = json.loads((run / keys.RUN).read_bytes())
    beat = {"run": info["run"], "version": 2, "newest": 2, "healthy": False, "at": time.time(), "error": "x" * 12_000}
    (run / keys.REPLICAS).mkdir(exist_ok=True)
    for number in range(20_000):
        (run / keys.replica(f"r{number}")).write_text(json.dumps({**beat, "replica": f"r{number}"}))


HOSTILE = {
    name: make
    for name, make in list(globals().items())
    if getattr(make, "__annotations__", {}) == {"run": "Path", "return": "None"}
}


# ── measuring ────────────────────────────────────────────────────────────────────────────────────────────────────────


def measure(command: list[str], home: Path) -> dict[str, Any]:
    out = home / "peak"
    began = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-c", CHILD, str(out), *command],
            capture_output=True, text=True, timeout=LIMIT_S, check=False,
            env={**os.environ, "DELTAWIRE_THREADS": "2", "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"exit": None, "seconds": LIMIT_S, "peak": 0}
    if "Traceback" in done.stderr:
        raise SystemExit(f"{command}: {done.stderr}")
    return {"exit": done.returncode, "seconds": round(time.monotonic() - began, 1), "peak": int(out.read_text()) << 10}


def visit(home: Path, hostile: Callable[[Path], None] | None) -> dict[str, dict[str, Any]]:
    found = {}
    for name, words in COMMANDS.items():
        run, out = home / "run", home / "out"
        shutil.copytree(home / "good", run, symlinks=True)
        if hostile:
            hostile(run)
        places = {"RUN": str(run), "OUT": str(out), "OUT.good": str(home / "folder")}
        found[name] = measure([places.get(word, word.replace("RUN@", f"{run}@")) for word in words], home)
        shutil.rmtree(run)
        shutil.rmtree(out, ignore_errors=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help="exit 1 if a command needs more than 1 GB, or does not end"
    )
    parser.add_argument("--json", type=Path, default=None, help="write the figures to this file")
    parser.add_argument("--only", choices=HOSTILE, default=None, help="this run alone")
    arguments = parser.parse_args()
    facts = about()
    print_about(facts)
    rows: dict[str, dict[str, dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(prefix="deltawire-hostile-") as folder:
        home = Path(folder)
        good_run(home / "good")
        measure(["checkout", str(home / "good"), "-o", str(home / "folder")], home)
        base = visit(home, None)
        print("| run | " + " | ".join(COMMANDS) + " |\n|---|" + "---|" * len(COMMANDS))
        for name, make in HOSTILE.items():
            if arguments.only in (None, name):
                rows[name] = visit(home, make)
                for command, cell in rows[name].items():
                    cell["beyond"] = max(cell["peak"] - base[command]["peak"], 0)
                cells = (f"{c['beyond'] >> 20} MB, {c['seconds']} s, exit {c['exit']}" for c in rows[name].values())
                print(f"| {name.replace('_', ' ')} | " + " | ".join(cells) + " |", flush=True)
    if arguments.json:
        write_json(arguments.json, {**facts, "good": base, "hostile": rows})
    bad = [name for name, row in rows.items() for c in row.values() if c["exit"] is None or c["beyond"] > ALLOWED]
    print(f"over 1 GB or without end: {', '.join(sorted(set(bad))) or 'none'}")
    return 1 if arguments.check and bad else 0


if __name__ == "__main__":
    sys.exit(main())
