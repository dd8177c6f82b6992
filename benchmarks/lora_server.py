"""Adapters followed by a real vLLM: from publish to served, and what clients of the base model notice.

    VLLM_ENVIRONMENT/bin/python benchmarks/lora_server.py      # on the CPU (tests/engines/vllm/environment.sh)

A server follows two adapters while clients stream from its base model. Versions of both are published in turn, each
in a window of its own; windows without a version lie between them. In the table, in milliseconds:
    served    from the call of `publish` until new requests get the version, as the server's status shows it
    load      of that: all ranks register the version between two steps, after they have read it beside the model
    step      between two tokens of a base request, in windows without a version
    gap       the longest time between two tokens of a base request in a window
and the memory of all processes of the server after the first tenth of the versions and at the end.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from _report import about, print_about, write_json
from deltawire.cli.common import ended_by_sigterm
from pause import COMMON, SHAPES, spread


def measure(options: argparse.Namespace) -> dict[str, Any]:
    from vllm_adapters import AdapterTrainer, start
    from vllm_live import make_model

    with tempfile.TemporaryDirectory(prefix="deltawire-lora-") as name:
        folder = Path(name)
        model = make_model(folder / "model", "qwen3", **({**COMMON, **SHAPES[options.shape]} if options.shape else {}))
        trainers = {
            name: AdapterTrainer(folder / name, model, seed, options.rank)
            for seed, name in enumerate(("policy", "judge"))
        }
        for trainer in trainers.values():
            trainer.publish()
        runs = {name: trainer.run for name, trainer in trainers.items()}
        rank = ["--max-lora-rank", "64"]
        server = start(model, folder / "log", runs, *rank, tp=options.tp, DELTAWIRE_POLL=str(options.poll))
        try:
            server.wait()
            return _versions(server, trainers, options)
        finally:
            server.stop()


def _versions(server: Any, trainers: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    from vllm_adapters import adapter
    from vllm_live import Streams

    served, load, gaps, quiet, steps, memory = [], [], [], [], [], []
    with Streams(server, count=options.streams, tokens=400) as streams:
        while len(streams.gaps) < 50:
            time.sleep(0.1)
        for number in range(options.versions):
            name = [*trainers][number % len(trainers)]
            streams.gaps.clear()
            clock = time.perf_counter()
            version = trainers[name].publish()
            status = adapter(server, name, version=version, state="healthy")
            served.append(time.perf_counter() - clock)
            load.append(status["timings"]["load"])
            # at least one more token after the swap
            time.sleep(options.window)
            gaps.append(max(streams.gaps, default=0.0))
            window = time.perf_counter() - clock
            streams.gaps.clear()
            time.sleep(window)
            quiet.append(max(streams.gaps, default=0.0))
            steps += streams.gaps
            if number in (options.versions // 10, options.versions - 1):
                memory.append(_memory(server))
    assert not streams.failures, streams.failures
    statuses = server.status()["adapters"]
    return {
        "adapter_bytes": sum(2 * size[0] * size[1] for size in trainers["policy"].shapes.values()),
        "versions": options.versions,
        "failures": sum(status["failures"] for status in statuses),
        "loaded": {status["name"]: len(status["loaded"]) for status in statuses},
        "served": spread(served),
        "load": spread(load),
        "step": spread(steps),
        "longest gap, a version": spread(gaps),
        "longest gap, none": spread(quiet),
        "memory_mb": memory,
    }


def _memory(server: Any) -> float:
    """Megabytes that the processes of the server hold, shared ones counted once."""
    total = 0
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and os.getpgid(int(entry.name)) == server.process.pid:
                lines = (entry / "smaps_rollup").read_text().splitlines()
                total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        except (ProcessLookupError, FileNotFoundError):
            continue
    return round(total / 1e3, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[*SHAPES], help="the base model; a tiny one by default")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--versions", type=int, default=100)
    parser.add_argument("--streams", type=int, default=2)
    parser.add_argument("--poll", type=float, default=0.1)
    parser.add_argument("--window", type=float, default=0.2, metavar="SECONDS", help="after a version is served")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report = {"about": about(), **measure(options)}
    print_about(report["about"])
    for name in ("served", "load", "step", "longest gap, a version", "longest gap, none"):
        print(f"{name:24}", "  ".join(f"{key} {value:8.1f}" for key, value in report[name].items()))
    print({key: report[key] for key in ("adapter_bytes", "versions", "failures", "loaded", "memory_mb")})
    if options.json:
        write_json(options.json, report)


if __name__ == "__main__":
    with ended_by_sigterm():
        main()
