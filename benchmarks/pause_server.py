"""What clients of a real vLLM notice of a sync: server, publisher and clients are processes of their own, on cores of
their own.

    python benchmarks/pause_server.py --shape 0.6B --encodings packed context --syncs 50 --out benchmarks/results

Phases, one after the other, against one server:
    control    versions are published to another run, which nobody follows: the same load without a sync
    packed …   versions are published to the run that the server follows, one at a time, at least a second apart
    rivals     with --rivals: vLLM's own full reload, driven as trainers do
    prefixes   with --prefixes: requests with one prefix under every version

For each version the longest gap between two tokens of any stream is taken, from when it is published until a moment
after it is served. The control phase is cut into windows of the same length. In milliseconds:
    gap        longest gap of a window: p50, p99, max over all syncs; of the control run beside it
    excess     gap of the syncs less gap of the control run, at p99 and max
    step       median time between two tokens of a stream
    served     from the commit of a version until it is served and proven, with the default poll and without it
    pause      as the server reports it: stop, apply, prove
`throughput` is tokens per second with a sync every ten seconds over tokens per second with none.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "engines" / "vllm"))

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 8192},
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
             "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936},
    "8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
           "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936},
}  # fmt: skip
PROMPT = 32
AFTER_S = 0.25
"""How long a window goes on once the version is served."""


# ── clients ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def read_streams(port: int, streams: int, tokens: int, out: Path) -> None:
    """Read completions until standard input ends; write when each token arrived, per stream and request."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), stop.set)
    rows: list[tuple[float, int, int]] = []

    async def stream(number: int) -> None:
        rng, request = random.Random(os.getpid() * 1000 + number), number << 20
        while not stop.is_set():
            request += 1
            body = json.dumps({
                "model": "m", "prompt": [rng.randrange(5, 200) for _ in range(PROMPT)],
                "max_tokens": tokens + rng.randrange(tokens // 4), "ignore_eos": True, "stream": True,
            })  # fmt: skip
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(
                f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
            )
            while data := await reader.read(1 << 16):
                now = time.monotonic()
                rows.extend([(now, request, number)] * data.count(b"data: {"))
                if stop.is_set():
                    break
            writer.close()

    await asyncio.gather(*(stream(number) for number in range(streams)))
    np.save(out, np.array(rows, np.float64))


class Clients:
    """Processes that read streams; `tokens` once stopped is [time, request] of every token."""

    def __init__(self, port: int, streams: int, cores: list[int], folder: Path, tokens: int) -> None:
        self._files, self._processes = [], []
        share = -(-streams // len(cores))
        for core in cores:
            self._files.append(folder / f"tokens-{core}-{time.monotonic_ns()}.npy")
            command = [sys.executable, __file__, "--as", "clients", str(port), str(share), str(tokens),
                       str(self._files[-1])]  # fmt: skip
            self._processes.append(_pinned(command, [core], stdin=subprocess.PIPE))

    def stop(self) -> list[np.ndarray]:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(b"x")
            process.stdin.close()
        for process in self._processes:
            process.wait(120)
        parts = [np.load(file) for file in self._files]
        streams = []
        for part in parts:
            ordered = part[np.lexsort((part[:, 0], part[:, 1]))]
            edges = np.flatnonzero(np.diff(ordered[:, 1])) + 1
            streams += np.split(ordered[:, 0], edges)
        return streams


# ── the publisher ────────────────────────────────────────────────────────────────────────────────────────────────────


def publish_versions(model: Path, runs: list[str]) -> None:
    """For each line `RUN ENCODING DENSITY` on standard input publish a version and print when it was committed."""
    from deltawire.core.change import regions
    from deltawire.core.full import Checkpoint
    from deltawire.trainer import Publisher

    source = Checkpoint(model)
    weights = {
        t.name: np.concatenate([source.region(r) for r in regions(t)]).reshape(t.shape).copy()
        for t in source.schema.tensors
    }
    rng = np.random.default_rng(1)
    publishers: dict[str, Any] = {}
    current: dict[str, str] = {}
    for line in sys.stdin:
        run, encoding, density = line.split()
        if current.get(run) != encoding:
            if run in publishers:
                publishers[run].close()
            publishers[run] = Publisher(run, files=model, encoding=encoding, anchor_ratio=100.0)
            current[run] = encoding
        every = round(1 / float(density)) if float(density) else 0
        for bits in weights.values() if every else ():
            flat = bits.reshape(-1)
            # one of each `every` weights: no two the same
            at = np.arange(flat.size // every) * every + rng.integers(0, every, flat.size // every)
            flat[at] += rng.integers(0, 2, at.size, np.uint16) * np.uint16(2) - np.uint16(1)
        result = publishers[run].publish(weights).result(600)
        print(json.dumps({"version": result.version, "at": time.monotonic()}), flush=True)


class Publisher:
    def __init__(self, model: Path, cores: list[int]) -> None:
        command = [sys.executable, __file__, "--as", "publisher", str(model)]
        self._process = _pinned(command, cores, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def publish(self, run: Path, encoding: str, density: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{run} {encoding} {density}\n".encode())
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())  # type: ignore[no-any-return]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def _pinned(command: list[str], cores: list[int], **options: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, preexec_fn=lambda: os.sched_setaffinity(0, cores), **options)


# ── the measurement ──────────────────────────────────────────────────────────────────────────────────────────────────


def measure(options: argparse.Namespace, report: dict[str, Any]) -> None:
    """Fill the report phase by phase: what is there when a later one fails was measured."""
    from vllm_live import Server, make_model

    cores = sorted(os.sched_getaffinity(0))
    half, quarter = max(1, len(cores) // 2), max(1, len(cores) // 4)
    server_cores, publisher_cores, client_cores = (
        cores[:half], cores[half : half + quarter] or cores, cores[half + quarter :] or cores,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="deltawire-pause-") as name:
        folder = Path(name)
        model = make_model(folder / "model", f"{options.family}-tied", max_position_embeddings=4096,
                           **SHAPES[options.shape])  # fmt: skip
        publisher = Publisher(model, publisher_cores)
        followed, other = folder / "run", folder / "other"
        publisher.publish(followed, "packed", 0)
        publisher.publish(other, "packed", 0)
        mine = os.sched_getaffinity(0)
        os.sched_setaffinity(0, server_cores)
        flags = ["--no-enforce-eager", "--enable-prompt-tokens-details", "--max-model-len", "4096",
                 "--max-num-seqs", str(max(64, options.streams)), *shlex.split(options.flags)]  # fmt: skip
        more = {"DELTAWIRE_POLL": str(options.poll), **dict(item.split("=", 1) for item in options.env)}
        server = Server(model, folder / "log", run=followed, flags=flags, **more)
        os.sched_setaffinity(0, mine)
        try:
            server.wait(limit=400)
            print(f"server is up: {server.status()}", flush=True)
            _phases(options, report, server, publisher, followed, other, client_cores, folder)
        except BaseException:
            print(server.tail())
            raise
        finally:
            server.stop()
            publisher.close()
            if options.log:
                options.log.write_bytes((folder / "log").read_bytes())


def _phases(
    options: argparse.Namespace, report: dict[str, Any], server: Any, publisher: Publisher, followed: Path, other: Path,
    cores: list[int], folder: Path,
) -> None:  # fmt: skip
    def clients() -> Clients:
        found = Clients(server.port, options.streams, cores, folder, options.tokens)
        time.sleep(3)
        return found

    # compile what is compiled on first use
    for encoding in options.encodings:
        server.until(version=publisher.publish(followed, encoding, options.density)["version"], limit=120)
    report |= {"shape": options.shape, "density": options.density, "streams": options.streams}
    reading = clients()
    windows = []
    for _ in range(options.syncs):
        began = time.monotonic()
        publisher.publish(other, options.encodings[0], options.density)
        time.sleep(max(0.0, began + 1.2 - time.monotonic()))
        windows.append((began, time.monotonic()))
    quiet = _Phase(reading.stop(), windows)
    report["control"] = quiet.figures()
    print(f"control: {report['control']}", flush=True)
    for encoding in options.encodings:
        reading, windows, served, pauses = clients(), [], [], []
        for _ in range(options.syncs):
            began = time.monotonic()
            made = publisher.publish(followed, encoding, options.density)
            status = server.until(version=made["version"], limit=60)
            done = time.monotonic()
            time.sleep(AFTER_S)
            windows.append((began, time.monotonic()))
            served.append(done - made["at"])
            pauses.append(status["timings"])
            time.sleep(max(0.0, began + 1.2 - time.monotonic()))
        phase = _Phase(reading.stop(), windows)
        report[encoding] = {
            **phase.figures(),
            "excess_gap_ms": {at: phase.gap(q) - quiet.gap(q) for at, q in (("p99", 99), ("max", 100))},
            "served_ms": _spread(served),
            **{f"{name}_ms": _spread([p[name] for p in pauses if name in p]) for name in
               ("pause", "stop", "apply", "prove", "decode", "fetch", "verify", "total")},
            "timeline": phase.timeline(),
        }  # fmt: skip
        shown = {k: v for k, v in report[encoding].items() if k != "timeline"}
        print(f"{encoding}: {shown}\n{server.status()}", flush=True)
    if options.throughput:
        rates = []
        for syncs in (False, True):
            reading = clients()
            began = time.monotonic()
            while time.monotonic() - began < options.throughput:
                step = time.monotonic()
                publisher.publish(followed if syncs else other, options.encodings[0], options.density)
                time.sleep(max(0.0, step + 10 - time.monotonic()))
            rates.append(_Phase(reading.stop(), [(began, time.monotonic())]).rate())
        report["throughput_ratio"] = rates[1] / rates[0]
        print(f"throughput: {rates}", flush=True)
    if options.rivals:
        report["rivals"] = _rivals(options, server, publisher, followed, clients, folder, quiet)
        print(f"rivals: {report['rivals']}", flush=True)
    if options.prefixes:
        report["prefixes"] = _prefixes(options, server, publisher, followed)
        print(f"prefixes: {report['prefixes']}", flush=True)
    report["status"] = server.status()


def _prefixes(options: argparse.Namespace, server: Any, publisher: Publisher, followed: Path) -> dict[str, int]:
    """Requests with one long prefix, some under every version: the first under each must find nothing in the cache."""
    prompt, across, within = [11 + i % 180 for i in range(600)], 0, 0
    for _ in range(options.syncs):
        server.until(version=publisher.publish(followed, options.encodings[0], options.density)["version"], limit=60)
        for number in range(options.prefixes // options.syncs):
            used = server.complete([*prompt, 5 + number], 1).json()["usage"]
            hit = (used.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            across, within = (across + (hit > 0), within) if number == 0 else (across, within + (hit > 0))
    return {"requests": options.prefixes, "versions": options.syncs, "hits_across": across, "hits_within": within}


def _rivals(
    options: argparse.Namespace, server: Any, publisher: Publisher, followed: Path, clients: Any, folder: Path,
    quiet: _Phase,
) -> dict[str, Any]:  # fmt: skip
    """A full reload by vLLM, as a trainer drives it: pause, reload_weights, resume."""
    from deltawire.engines.vllm.launch import write_version

    version = server.status()["version"]
    write_version(str(followed), version, folder / "full")
    reading, windows = clients(), []
    for _ in range(options.rivals):
        began = time.monotonic()
        server.http.post("/pause", params={"mode": "keep", "clear_cache": True}).raise_for_status()
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder / "full")}}
        server.http.post("/collective_rpc", json=body).raise_for_status()
        server.http.post("/resume").raise_for_status()
        time.sleep(AFTER_S)
        windows.append((began, time.monotonic()))
        time.sleep(1)
    phase = _Phase(reading.stop(), windows)
    return {"full reload": phase.figures()}


class _Phase:
    """Tokens of all streams, and the windows that are looked at."""

    def __init__(self, streams: list[np.ndarray], windows: list[tuple[float, float]]) -> None:
        self._streams, self._windows = [s for s in streams if s.size > 1], windows
        starts = np.concatenate([s[:-1] for s in self._streams])
        ends = np.concatenate([s[1:] for s in self._streams])
        order = np.argsort(ends)
        self._ends, self._gaps = ends[order], (ends - starts)[order]
        self._longest = [self._within(*window).max(initial=0.0) for window in windows]

    def _within(self, start: float, end: float) -> np.ndarray:
        first, last = np.searchsorted(self._ends, (start, end))
        return self._gaps[first:last]

    def gap(self, percentile: float) -> float:
        return 1e3 * float(np.percentile(self._longest, percentile))

    def rate(self) -> float:
        return sum(self._within(*window).size for window in self._windows) / sum(b - a for a, b in self._windows)

    def figures(self) -> dict[str, Any]:
        return {
            "longest_gap_ms": {name: self.gap(q) for name, q in (("p50", 50), ("p99", 99), ("max", 100))},
            "step_ms": 1e3 * float(np.median(self._gaps)),
            "tokens_per_s": self.rate(),
            "windows": len(self._windows),
        }

    def timeline(self) -> list[list[float]]:
        """Tokens per 5 ms around the sync whose longest gap is the median one: [ms from its start, tokens]."""
        typical = int(np.argsort(self._longest)[len(self._longest) // 2])
        start, end = self._windows[typical]
        counts, edges = np.histogram(self._ends, np.arange(start - 0.1, end, 0.005))
        return [[round(1e3 * (t - start), 1), int(n)] for t, n in zip(edges, counts, strict=False)]


def _spread(seconds: list[float]) -> dict[str, float]:
    if not seconds:
        return {}
    return {
        name: round(1e3 * float(np.percentile(seconds, q)), 3) for name, q in (("p50", 50), ("p99", 99), ("max", 100))
    }


def main() -> None:
    if sys.argv[1:2] == ["--as"]:
        if sys.argv[2] == "clients":
            port, streams, tokens, out = sys.argv[3:]
            asyncio.run(read_streams(int(port), int(streams), int(tokens), Path(out)))
        else:
            publish_versions(Path(sys.argv[3]), [])
        return
    from _report import about, print_about, write_json
    from deltawire.cli.common import ended_by_sigterm

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="0.6B")
    parser.add_argument("--family", default="qwen3")
    parser.add_argument("--encodings", nargs="+", default=["packed", "context"])
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--syncs", type=int, default=50)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1500, help="tokens of a completion, at least")
    parser.add_argument("--poll", type=float, default=1.0, help="DELTAWIRE_POLL of the server")
    parser.add_argument("--throughput", type=float, default=0.0, help="seconds for each of the two throughput phases")
    parser.add_argument("--rivals", type=int, default=0, help="how many full reloads by vLLM to measure")
    parser.add_argument("--prefixes", type=int, default=0, help="requests of the prefix phase (see DELTAWIRE_KV)")
    parser.add_argument("--flags", default="--gpu-memory-utilization 0.5", help="more flags of vllm serve, in quotes")
    parser.add_argument("--env", nargs="*", default=[], help="more environment of the server, NAME=VALUE")
    parser.add_argument("--out", type=Path, help="folder for the figures as JSON")
    parser.add_argument("--log", type=Path, help="file for the server's log")
    options = parser.parse_args()
    facts = about()
    print_about(facts)
    report: dict[str, Any] = {}
    try:
        with ended_by_sigterm():
            measure(options, report)
    finally:
        if options.out and report:
            write_json(options.out / "pause-server-cuda.json", {**facts, **report})


if __name__ == "__main__":
    main()
