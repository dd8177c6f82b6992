"""Adapters followed by a real vLLM: from publish to served, and what clients of the base model notice.

    VLLM_ENVIRONMENT/bin/python benchmarks/lora_server.py      # on the CPU (tests/engines/vllm/environment.sh)
    DEVICE=cuda python benchmarks/lora_server.py --shape 0.6B --streams 32 --rank 32

A server follows two adapters of all linear layers while clients stream from its base model and from both adapters.
Server, clients and trainer are processes of their own, on cores of their own where there are enough. Versions of both
adapters are published in turn, each in a window of its own; after each comes a control window of the same length, in
which a version is published to a run that nobody follows. In milliseconds:
    publish   the trainer's own part: from the call of `publish` until the version is committed
    served    from then until new requests get the version, as the server's status shows it: the wait for the poll too
    total     the same from when the server has noticed it; fetch, decode, stage, load: parts of it
    load      all ranks read the version beside the model, register it between steps and copy it to their devices
    step      median time between two tokens of a base request
    gap       the longest time between two tokens of any base request in a window, with a version and in the control
    excess    one less the other; a list of all windows is in the result
and the memory of all processes of the server, and of its device, after the first tenth of the versions and at the end.
`--compare N` repeats it with N versions that vLLM reads itself in the workers, as it does where it arranges adapters in
a way that cannot be learned.
`--profile` also shows what the worker did in the longest gaps.
`--seconds` ends it with the versions that were measured by then; `--turns FOLDER` waits, with the server up, for a file
`versions` there, and writes `versions.done` after it (as in pause_server.py).
"""

from __future__ import annotations

import argparse
import os
import shlex
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

import pause_server
from _report import about, print_about, write_json
from deltawire.cli.ui import ended_by_sigterm
from pause_server import SHAPES, Clients, Gaps

ADAPTERS = ("policy", "judge")
ASK_S = 0.02
"""Between two questions for the status, in windows with and without a version."""


def measure(options: argparse.Namespace) -> dict[str, Any]:
    from vllm_adapters import AdapterTrainer, start
    from vllm_live import ON_GPU

    cores = sorted(os.sched_getaffinity(0))
    half, quarter = max(1, len(cores) // 2), max(1, len(cores) // 4)
    with tempfile.TemporaryDirectory(prefix="deltawire-lora-", dir=options.scratch) as name:
        folder = Path(name)
        sizes = pause_server._sizes(options.shape, options.layers)
        model = pause_server.make_model(folder / "model", sizes, "cuda" if ON_GPU else "cpu")
        trainers = {
            name: AdapterTrainer(folder / name, model, seed, options.rank, every_layer=True, small_steps=True)
            for seed, name in enumerate(ADAPTERS)
        }
        nobody = AdapterTrainer(folder / "nobody", model, 9, options.rank, every_layer=True, small_steps=True)
        for trainer in (*trainers.values(), nobody):
            trainer.publish()
        flags = [
            "--max-lora-rank", str(max(16, options.rank)), "--max-model-len", "4096", "--no-enforce-eager",
            "--max-num-seqs", str(max(64, options.streams + 2)), "--worker-extension-cls", "vllm_test_plugin.Probe",
            *shlex.split(options.flags),
        ]  # fmt: skip
        runs = {name: trainer.run for name, trainer in trainers.items()}
        server = start(model, folder / "log", runs, *flags, tp=options.tp, DELTAWIRE_POLL=str(options.poll))
        try:
            server.wait(limit=500)
            if len(cores) > 3:
                # not before: what is compiled at the start may use all cores
                pause_server._pin_session(server.process.pid, cores[:half])
                os.sched_setaffinity(0, cores[half : half + quarter])
            clients = cores[half + quarter :] if len(cores) > 3 else cores
            pause_server.wait_for_turn(options.turns, "versions")
            found = _Measurement(server, trainers, nobody, options, folder, clients).run()
            pause_server.end_turn(options.turns, "versions")
            return found
        except BaseException:
            print(server.tail())
            raise
        finally:
            server.stop()
            if options.log:
                options.log.write_bytes((folder / "log").read_bytes())


@dataclass(frozen=True, slots=True)
class _Version:
    """When its window began, with the call of `publish`; when it was committed, and served; when both windows ended."""

    began: float
    committed: float
    served: float
    ended: float
    control_ended: float
    timings: dict[str, float]
    """How long the server's phases took."""
    read_by_engine: str


class _Measurement:
    """Versions of all adapters in turn, under streams."""

    def __init__(
        self,
        server: Any,
        trainers: dict[str, Any],
        nobody: Any,
        options: argparse.Namespace,
        folder: Path,
        cores: list[int],
    ) -> None:
        self.server, self.trainers, self.nobody, self.options = server, trainers, nobody, options
        self.folder, self.cores = folder, cores
        self.memory: list[dict[str, float]] = []

    def run(self) -> dict[str, Any]:
        options, trainers = self.options, self.trainers
        found = {
            "shape": options.shape,
            "rank": options.rank,
            "streams": options.streams,
            "adapter_bytes": sum(2 * size[0] * size[1] for size in trainers["policy"].shapes.values()),
            **self._figures(options.versions, remember=True),
            "version_bytes": int(np.median([size for trainer in trainers.values() for size in trainer.sizes])),
            "memory_mb": self.memory,
        }
        if options.compare:
            _rpc(self.server, "let_vllm_read")
            found["read_by_vllm"] = self._figures(options.compare)
        statuses = self.server.status()["adapters"]
        return found | {
            "failures": sum(status["failures"] for status in statuses),
            "loaded": {status["name"]: len(status["loaded"]) for status in statuses},
        }

    def _figures(self, versions: int, remember: bool = False) -> dict[str, Any]:
        from vllm_live import Streams

        base = Clients(self.server.port, self.options.streams, self.cores, self.folder, self.options.tokens)
        with ExitStack() as mine:
            others = [
                mine.enter_context(Streams(SimpleNamespace(http=self.server.http, name=name), 1, 100))  # type: ignore[arg-type]
                for name in self.trainers
            ]
            # until requests have begun at many different times
            time.sleep(self.options.settle)
            # the first two of each are for what is compiled on first use
            for number in range(-2 * len(self.trainers), 0):
                self._version(number)
            if self.options.profile:
                _rpc(self.server, "note_adapters", on=True)
            rows: list[_Version] = []
            end = time.monotonic() + self.options.seconds
            while len(rows) < versions and time.monotonic() < end:
                rows.append(self._version(len(rows)))
                if remember and len(rows) == max(1, versions // 10):
                    self.memory.append(_memory(self.server))
            if remember:
                self.memory.append(_memory(self.server))
            noted = _rpc(self.server, "note_adapters", on=False)[0] if self.options.profile else None
            gaps = Gaps(base.stop())
        for streams in others:
            assert not streams.failures, streams.failures
        windows = [(row.began, row.ended) for row in rows]
        control = [(row.ended, row.control_ended) for row in rows]
        both = [*windows, *control]
        longest, in_control = gaps.longest(windows), gaps.longest(control)
        spread = pause_server._spread
        at = {"p50": 50, "p99": 99, "max": 100}
        return {
            "windows": len(rows),
            "publish_ms": spread([row.committed - row.began for row in rows]),
            "served_ms": spread([row.served - row.committed for row in rows]),
            **{
                f"{phase}_ms": spread([row.timings[phase] for row in rows])
                for phase in ("fetch", "decode", "stage", "load", "total")
            },
            "step_ms": round(1e3 * float(np.median(np.concatenate([gaps.within(window) for window in both]))), 3),
            "gap_with_version_ms": spread(longest),
            "gap_control_ms": spread(in_control),
            "excess_ms": {
                name: round(1e3 * float(np.percentile(longest, q) - np.percentile(in_control, q)), 3)
                for name, q in at.items()
            },
            "gaps_ms": {
                "with_version": [round(1e3 * gap, 1) for gap in longest],
                "control": [round(1e3 * gap, 1) for gap in in_control],
            },
            "window_s": round(float(np.median([end - start for start, end in both])), 3),
            "tokens_per_s": {
                "with_version": round(float(np.mean([gaps.rate(window) for window in windows])), 1),
                "control": round(float(np.mean([gaps.rate(window) for window in control])), 1),
            },
            "read_by_engine": sum(bool(row.read_by_engine) for row in rows),
            **({"profile": pause_server._explained(gaps, windows, noted)} if noted else {}),
        }

    def _version(self, number: int) -> _Version:
        """Publish a version, and then for as long again one that nobody follows."""
        from vllm_adapters import adapter

        name = [*self.trainers][number % len(self.trainers)]
        for trainer in (self.trainers[name], self.nobody):
            trainer.step()
        began = time.monotonic()
        version = self.trainers[name].publish()
        committed = time.monotonic()
        status = adapter(self.server, name, version=version, state="healthy", every=ASK_S)
        served = time.monotonic()
        time.sleep(self.options.window)
        ended = time.monotonic()
        self.nobody.publish()
        while (now := time.monotonic()) < 2 * ended - began:
            self.server.status()
            time.sleep(ASK_S)
        # an older server does not say it
        read_by_engine = status.get("read_by_engine", "always")
        return _Version(began, committed, served, ended, now, status["timings"], read_by_engine)


def _rpc(server: Any, method: str, **arguments: Any) -> list[Any]:
    answer = server.http.post("/collective_rpc", json={"method": method, "kwargs": arguments})
    return answer.raise_for_status().json()["results"]  # type: ignore[no-any-return]


def _memory(server: Any) -> dict[str, float]:
    """Megabytes that the processes of the server hold, shared ones counted once, and that its first rank has allocated
    on the device."""
    total = 0
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and os.getpgid(int(entry.name)) == server.process.pid:
                lines = (entry / "smaps_rollup").read_text().splitlines()
                total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        except (ProcessLookupError, FileNotFoundError):
            continue
    return {"host": round(total / 1e3, 1), "device": round(_rpc(server, "device_memory")[0]["now"] / 1e6, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[*SHAPES], default="tiny", help="the base model")
    parser.add_argument("--layers", type=int, default=0, help="another number of layers than the shape has")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--versions", type=int, default=100)
    parser.add_argument("--streams", type=int, default=2, help="requests of the base model at a time")
    parser.add_argument("--tokens", type=int, default=400, help="tokens of a completion, on average")
    parser.add_argument("--settle", type=float, default=3.0, help="seconds of streaming before anything is measured")
    parser.add_argument("--poll", type=float, default=0.1)
    parser.add_argument("--window", type=float, default=0.2, metavar="SECONDS", help="after a version is served")
    parser.add_argument("--flags", default="", help="more flags of vllm serve, in quotes")
    parser.add_argument("--compare", type=int, default=0, metavar="VERSIONS", help="measure vLLM's own reading too")
    parser.add_argument("--seconds", type=float, default=3600.0, help="measure for this long at most")
    parser.add_argument("--turns", type=Path, help="folder with a file that says when it may begin")
    parser.add_argument("--profile", action="store_true", help="note what the worker does in the longest gaps")
    parser.add_argument("--scratch", type=Path, help="where model and buckets go while it runs")
    parser.add_argument("--out", type=Path, help="file for the figures as JSON")
    parser.add_argument("--log", type=Path, help="file for the server's log")
    options = parser.parse_args()
    facts = about()
    print_about(facts)
    report = {**facts, **measure(options)}
    for name, value in report.items():
        if name not in facts:
            print(f"{name:24} {value}")
    if options.out:
        write_json(options.out, report)


if __name__ == "__main__":
    with ended_by_sigterm():
        main()
