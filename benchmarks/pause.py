"""How long a server stands still for a new version, and what its clients notice.

    VLLM_ENVIRONMENT/bin/python benchmarks/pause.py    # a real vLLM on the CPU (tests/engines/vllm/environment.sh)
    python benchmarks/pause.py --device cuda           # the part inside the pause, on a GPU, without vLLM

On a real server three ways to the same weights are compared, version by version, while clients stream: deltawire's
patch in place; a full reload of the checkpoint by vLLM (`reload_weights`); and vLLM's own sparse loader
(`load_checkpoint_weight_patches`), which is given what changed already decoded, in the worker's memory. The last two
are driven as trainers do, by vLLM's own /pause and /resume. After every version the runtime bytes are compared
with those of the other ways. In the table, in milliseconds:
    stop      until the engine stands still: the step that was running ends, caches are dropped
    apply     writing, as the worker sees it, or the call that does it
    pause     from asking the engine to stop until it goes on
    idle      the longest time between two steps of the model: what the sync costs the engine, measured alike for all
    applied   from asking for the version until it is served and proven
    gap       between two tokens, as streaming clients see it while all that goes on

On a GPU the placement map is traced through a module with the fused layouts of the Qwen3-0.6B shape: write, and digest
of all weights.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from _report import about, print_about, write_json
from deltawire.cli.ui import ended_by_sigterm
from deltawire.engines.live.launch import write_version

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / "engines" / name) for name in ("vllm", "live"))]
# a real server, tiny models and streaming clients are what the tests have too

SHAPES = {
    "125M": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12},
    "350M": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 24, "num_attention_heads": 16},
}
COMMON = {"vocab_size": 32000, "num_key_value_heads": 4, "head_dim": 64}


def spread(values: list[float]) -> dict[str, float]:
    """Milliseconds."""
    ordered = sorted(values)
    return {
        "p50": 1e3 * statistics.median(ordered),
        "p99": 1e3 * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
        "max": 1e3 * ordered[-1],
    }


# ── a real server ────────────────────────────────────────────────────────────────────────────────────────────────────


def on_a_server(options: argparse.Namespace) -> dict[str, Any]:
    return {"rows": [_one_shape(shape, options) for shape in options.shapes]}


def _one_shape(shape: str, options: argparse.Namespace) -> dict[str, Any]:
    from vllm_live import Server, Trainer, make_model

    with tempfile.TemporaryDirectory(prefix="deltawire-pause-") as name:
        folder = Path(name)
        model = make_model(folder / "model", "qwen3", **COMMON, **SHAPES[shape])
        trainer = Trainer(model, folder / "run")
        trainer.publish(0)
        server = Server(
            model, folder / "log", run=trainer.run, tp=options.tp,
            flags=["--worker-extension-cls", "vllm_test_plugin.Probe"], DELTAWIRE_FOLLOW="0",
        )  # fmt: skip
        try:
            server.wait()
            report = _measure(server, trainer, folder, options)
        finally:
            server.stop()
            trainer.close()
    _print(report)
    return report


def _measure(server: Any, trainer: Any, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    server.greedy([5, 9, 11])
    _rpc(server, "watch_steps")
    ways = {"deltawire": _patch, "full reload": _reload, "upstream patches": _upstream}
    seconds: dict[str, dict[str, list[float]]] = {way: {} for way in ways}
    gaps: dict[str, list[list[float]]] = {way: [] for way in ways}
    still = _gaps(server, None)
    idle = _longest_break(server)
    for number in range(options.versions + 1):
        before = {name: bits.copy() for name, bits in trainer.weights.items()}
        version = trainer.publish(options.density)
        write_version(str(trainer.run), version - 1, folder / "before")
        sums = []
        for name, way in ways.items():
            if sums:
                # the same step again, from where it started
                _to(server, version - 1)
            prepared = _prepare(name, server, trainer, before, version, folder)
            result: dict[str, float] = {}
            seen = _gaps(server, lambda w=way, v=version, p=prepared, r=result: r.update(w(server, v, p)))
            result["idle"] = _longest_break(server)
            sums.append(server.checksums())
            if number:
                # the first one warms up all three
                gaps[name].append(seen)
                for phase, value in result.items():
                    seconds[name].setdefault(phase, []).append(value)
            if name != "deltawire":
                # back to where the follower believes to be: it was not told of this
                _reload(server, version - 1, str(folder / "before"))
        _to(server, version)
        assert all(other == sums[0] for other in sums), "the ways lead to different weights"
    return {
        "parameters": sum(bits.size for bits in trainer.weights.values()),
        "density": options.density,
        "tp": options.tp,
        "versions": options.versions,
        "no sync": {"idle": spread([idle]), "gaps": spread(still)},
        **{
            name: {
                **{phase: spread(values) for phase, values in phases.items()},
                "gaps": spread([gap for seen in gaps[name] for gap in seen]),
                "longest gap": spread([max(seen) for seen in gaps[name]]),
            }
            for name, phases in seconds.items()
        },
    }


def _to(server: Any, version: int) -> None:
    server.http.post("/deltawire/sync", json={"version": version}).raise_for_status()


def _prepare(way: str, server: Any, trainer: Any, before: dict[str, Any], version: int, folder: Path) -> Any:
    """What each way has at hand before it pauses."""
    if way == "full reload":
        write_version(str(trainer.run), version, folder / "full")
        return str(folder / "full")
    if way == "upstream patches":
        import torch
        from safetensors.torch import save_file

        content = {}
        for name, bits in trainer.weights.items():
            old, new = before[name].reshape(-1), bits.reshape(-1)
            where = np.flatnonzero(old != new)
            content[f"{name}.shape"] = torch.tensor(bits.shape)
            content[f"{name}.indices"] = torch.from_numpy(where)
            content[f"{name}.new"] = torch.from_numpy(new[where].view(np.int16)).view(torch.bfloat16)
        save_file(content, folder / "patches.safetensors")
        _rpc(server, "read_patches", path=str(folder / "patches.safetensors"))
    return None


def _patch(server: Any, version: int, prepared: Any) -> dict[str, float]:
    clock = time.perf_counter()
    _to(server, version)
    applied = time.perf_counter() - clock
    return {**server.status()["timings"], "applied": applied}


def _rpc(server: Any, method: str, **arguments: Any) -> list[Any]:
    answer = server.http.post("/collective_rpc", json={"method": method, "kwargs": arguments})
    return answer.raise_for_status().json()["results"]  # type: ignore[no-any-return]


def _longest_break(server: Any) -> float:
    return max(map(float, _rpc(server, "longest_break")))


def _paused(server: Any, method: str, **arguments: Any) -> dict[str, float]:
    """As a trainer does it over HTTP. vLLM's own /pause sleeps 20 ms of its time."""
    clock = time.perf_counter()
    server.http.post("/pause", params={"mode": "keep", "clear_cache": True}).raise_for_status()
    stopped = time.perf_counter()
    _rpc(server, method, **arguments)
    written = time.perf_counter()
    server.http.post("/resume").raise_for_status()
    pause = time.perf_counter() - clock
    return {"stop": stopped - clock, "apply": written - stopped, "pause": pause, "applied": pause}


def _reload(server: Any, version: int, folder: str) -> dict[str, float]:
    return _paused(server, "reload_weights", weights_path=folder)


def _upstream(server: Any, version: int, prepared: Any) -> dict[str, float]:
    return _paused(server, "load_patches")


def _gaps(server: Any, work: Any) -> list[float]:
    """What streaming clients see between two tokens while something is done (or nothing, for a few seconds)."""
    from vllm_live import Streams

    with Streams(server, count=2, tokens=100) as streams:
        time.sleep(0.5)
        work() if work else time.sleep(5)
        time.sleep(0.5)
    if streams.failures:
        raise RuntimeError(streams.failures[0])
    return streams.gaps


def _print(report: dict[str, Any]) -> None:
    print(
        f"\n{report['parameters'] / 1e6:.0f} M parameters, {report['density']:.1%} of them change per version, "
        f"TP={report['tp']}, {report['versions']} versions, medians in ms"
    )
    columns = ("stop", "apply", "pause", "idle", "applied")
    print(f"{'':<18}" + "".join(f"{name:>9}" for name in columns) + f"{'gap p50':>10}{'p99':>9}{'max':>9}")
    for name in ("no sync", "deltawire", "full reload", "upstream patches"):
        row = report[name]
        cells = [f"{row[column]['p50']:>9.1f}" if column in row else f"{'':>9}" for column in columns]
        gaps = [f"{row['gaps'][at]:>{width}.1f}" for at, width in (("p50", 10), ("p99", 9), ("max", 9))]
        print(f"{name:<18}" + "".join(cells) + "".join(gaps))
    for name in ("full reload", "upstream patches"):
        print(f"idle: 1/{report[name]['idle']['p50'] / report['deltawire']['idle']['p50']:.1f} of {name}")


# ── on a GPU, without vLLM ───────────────────────────────────────────────────────────────────────────────────────────


def on_a_device(options: argparse.Namespace) -> dict[str, Any]:
    import torch

    report: dict[str, Any] = {"device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu"}
    for world in options.worlds:
        report[f"rank of {world}"] = _one_rank(world, options)
    return report


def _one_rank(world: int, options: argparse.Namespace) -> dict[str, Any]:
    import torch
    from fused import Fused

    from deltawire.core.change import Change
    from deltawire.engines.live.placement import open_shard, trace
    from deltawire.replica.shard import PieceChange

    sizes = {"hidden": 1024, "heads": 16, "kv": 8, "ffn": 3072, "vocab": 151936, "layers": 28}
    model = Fused(**sizes, world=world, device=options.device, bias=False)
    for parameter in model.parameters():
        parameter.data.view(torch.int16).random_()
    placement = trace(model, model.load_weights, model.schema())
    assert not placement.problems, placement.problems[0]
    shard = open_shard(placement.pieces)
    groups = [0] * len(shard.pieces)
    rng = np.random.default_rng(0)
    changes = []
    for number, piece in enumerate(shard.pieces):
        where = np.flatnonzero(rng.random(piece.region.units) < options.density).astype(np.uint32)
        old = shard.read(number).reshape(-1)[where]
        changes.append(PieceChange(number, Change(piece.region, where, old, old + np.uint16(1))))
    predicted = shard.digests(groups)[0]
    for item in changes:
        predicted += item.change.digest()
    patch = shard.prepare(changes)

    def timed(work: Callable[[], object]) -> list[float]:
        times = []
        for _ in range(options.versions + 3):
            _synchronize(options.device)
            clock = time.perf_counter()
            work()
            _synchronize(options.device)
            times.append(time.perf_counter() - clock)
        return times[3:]

    write, digest = timed(lambda: shard.write(patch)), timed(lambda: shard.digests(groups))
    both = timed(lambda: (shard.write(patch), shard.digests(groups)))
    assert shard.digests(groups)[0] == predicted, "the digest after writing is not the one predicted"
    shard.undo(patch)
    units, changed = sum(p.region.units for p in shard.pieces), sum(c.change.count for c in changes)
    print(
        f"rank of {world}: {units / 1e6:.0f} M weights, {changed / 1e6:.2f} M change; "
        f"write {1e3 * statistics.median(write):.2f} ms, digest {1e3 * statistics.median(digest):.2f} ms, "
        f"both {1e3 * statistics.median(both):.2f} ms"
    )
    figures = {"write": spread(write), "digest": spread(digest), "pause part": spread(both)}
    return {"units": units, "changed": changed, **figures}


def _synchronize(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", type=int, default=5)
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--shapes", nargs="+", choices=tuple(SHAPES), default=["125M"])
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--device", choices=("vllm", "cpu", "cuda"), default="vllm")
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2], help="tensor-parallel degrees, without vLLM")
    parser.add_argument("--out", type=Path, help="folder for the figures as JSON")
    options = parser.parse_args()
    facts = about()
    print_about(facts)
    with ended_by_sigterm():
        # the server must not outlive this
        report = on_a_server(options) if options.device == "vllm" else on_a_device(options)
    if options.out:
        write_json(options.out / "pause.json", {**facts, **report})


if __name__ == "__main__":
    main()
