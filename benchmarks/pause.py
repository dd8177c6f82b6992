"""How long a server stands still for a new version, and what its clients notice.

    VLLM_ENVIRONMENT/bin/python benchmarks/pause.py    # a real vLLM on the CPU (tests/engines/vllm/environment.sh)
    python benchmarks/pause.py --device cuda           # the part inside the pause, on a GPU, without vLLM

On a real server three ways to the same weights are compared, version by version, while clients stream: deltawire's
patch in place; a full reload of the checkpoint by vLLM (`reload_weights`); and vLLM's own sparse loader
(`load_checkpoint_weight_patches`), which is given what changed already decoded. All three pause alike. After every
version the runtime bytes are compared with those of the other ways.

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
from deltawire.engines.vllm.launch import write_version

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "engines" / "vllm"))
# a real server, tiny models and streaming clients are what the tests have too

SHAPE = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "vocab_size": 32000,
         "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64}  # fmt: skip


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
    from vllm_live import Server, Trainer, make_model

    folder = Path(tempfile.mkdtemp(prefix="deltawire-pause-"))
    sizes = {**SHAPE, "num_hidden_layers": options.layers}
    model = make_model(folder / "model", "qwen3", **sizes)
    trainer = Trainer(model, folder / "run")
    trainer.publish(0)
    parameters = sum(bits.size for bits in trainer.weights.values())
    print(f"{parameters / 1e6:.0f} M parameters, {options.density:.1%} of them change per version\n")
    server = Server(
        model, folder / "log", run=trainer.run, tp=options.tp,
        flags=["--worker-extension-cls", "vllm_test_plugin.PatchLoader"], DELTAWIRE_FOLLOW="0",
    ).wait()  # fmt: skip
    try:
        server.greedy([5, 9, 11])
        ways = {"deltawire": _patch, "full reload": _reload, "upstream patches": _upstream}
        found: dict[str, dict[str, Any]] = {name: {"pause": [], "applied": [], "gaps": []} for name in ways}
        still = _gaps(server, None)
        for number in range(options.versions + 1):
            before = {name: bits.copy() for name, bits in trainer.weights.items()}
            version = trainer.publish(options.density)
            write_version(str(trainer.run), version - 1, folder / "before")
            sums = []
            for name, way in ways.items():
                if sums:
                    # the same step again, from where it started
                    _to(server, version - 1)
                prepared = _prepare(name, trainer, before, version, folder)
                result: dict[str, float] = {}
                gaps = _gaps(server, lambda w=way, v=version, p=prepared, r=result: r.update(w(server, v, p)))
                sums.append(server.checksums())
                if number:
                    # the first one compiles
                    found[name]["pause"].append(result["pause"])
                    found[name]["applied"].append(result["applied"])
                    found[name]["gaps"] += gaps
                if name != "deltawire":
                    # back to where the follower believes to be: it was not told of this
                    _reload(server, version - 1, str(folder / "before"))
            _to(server, version)
            assert all(other == sums[0] for other in sums), "the ways lead to different weights"
    finally:
        server.stop()
        trainer.close()
    report: dict[str, Any] = {
        "parameters": parameters,
        "density": options.density,
        "tp": options.tp,
        "still": spread(still),
    }
    for name, figures in found.items():
        report[name] = {what: spread(values) for what, values in figures.items()}
    _print(report, list(ways))
    return report


def _to(server: Any, version: int) -> None:
    server.http.post("/deltawire/sync", json={"version": version}).raise_for_status()


def _prepare(way: str, trainer: Any, before: dict[str, Any], version: int, folder: Path) -> Any:
    """What each way has at hand before it pauses."""
    if way == "full reload":
        write_version(str(trainer.run), version, folder / "full")
        return str(folder / "full")
    if way == "upstream patches":
        import torch

        content = {}
        for name, bits in trainer.weights.items():
            old, new = before[name].reshape(-1), bits.reshape(-1)
            where = np.flatnonzero(old != new)
            values = torch.from_numpy(new[where].view(np.int16)).view(torch.bfloat16)
            content[name] = (list(bits.shape), torch.from_numpy(where), values)
        torch.save(content, folder / "patches.pt")
        return str(folder / "patches.pt")
    return None


def _patch(server: Any, version: int, prepared: Any) -> dict[str, float]:
    clock = time.perf_counter()
    _to(server, version)
    applied = time.perf_counter() - clock
    return {"pause": server.status()["timings"]["pause"], "applied": applied}


def _paused(server: Any, method: str, **arguments: Any) -> dict[str, float]:
    clock = time.perf_counter()
    server.http.post("/pause", params={"mode": "keep", "clear_cache": True}).raise_for_status()
    server.http.post("/collective_rpc", json={"method": method, "kwargs": arguments}).raise_for_status()
    server.http.post("/resume").raise_for_status()
    seconds = time.perf_counter() - clock
    return {"pause": seconds, "applied": seconds}


def _reload(server: Any, version: int, folder: str) -> dict[str, float]:
    return _paused(server, "reload_weights", weights_path=folder)


def _upstream(server: Any, version: int, path: str) -> dict[str, float]:
    return _paused(server, "load_patches", path=path)


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


def _print(report: dict[str, Any], ways: list[str]) -> None:
    print(f"{'ms':<18}{'pause p50':>10}{'p99':>9}{'applied p50':>13}{'gap p50':>10}{'p99':>9}{'max':>9}")
    still = report["still"]
    print(f"{'no sync':<18}{'':>10}{'':>9}{'':>13}{still['p50']:>10.1f}{still['p99']:>9.1f}{still['max']:>9.1f}")
    for name in ways:
        pause, applied, gaps = (report[name][key] for key in ("pause", "applied", "gaps"))
        print(
            f"{name:<18}{pause['p50']:>10.1f}{pause['p99']:>9.1f}{applied['p50']:>13.1f}"
            f"{gaps['p50']:>10.1f}{gaps['p99']:>9.1f}{gaps['max']:>9.1f}"
        )
    ours = report["deltawire"]["pause"]["p50"]
    for name in ways[1:]:
        print(f"pause: 1/{report[name]['pause']['p50'] / ours:.1f} of {name}")


# ── on a GPU, without vLLM ───────────────────────────────────────────────────────────────────────────────────────────


def on_a_device(options: argparse.Namespace) -> dict[str, Any]:
    import torch

    report: dict[str, Any] = {"device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu"}
    for world in options.worlds:
        report[f"rank of {world}"] = _one_rank(world, options)
    return report


def _one_rank(world: int, options: argparse.Namespace) -> dict[str, Any]:
    import torch
    from vllm_fused import Fused

    from deltawire.core.change import Change
    from deltawire.engines.vllm.placement import trace
    from deltawire.engines.vllm.shard import PieceChange, open_shard

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
    parser.add_argument("--versions", type=int, default=10)
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--device", choices=("vllm", "cpu", "cuda"), default="vllm")
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2], help="tensor-parallel degrees, without vLLM")
    parser.add_argument("--out", type=Path, help="folder for the figures as JSON")
    options = parser.parse_args()
    facts = about()
    print_about(facts)
    report = on_a_server(options) if options.device == "vllm" else on_a_device(options)
    if options.out:
        write_json(options.out / "pause.json", {**facts, **report})


if __name__ == "__main__":
    main()
