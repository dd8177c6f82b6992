"""Record the data of the interactive figures in docs/figures.

    python benchmarks/figures.py              all of them; a few minutes on two cores
    python benchmarks/figures.py flips bits   only these

Writes docs/figures/data/NAME.json; docs/figures/build.py puts it into the pages (`make figures` does both).

    flips   stories15M, a GRPO run at 1e-6: weights, Adam's updates, and how many weights a step of any rate changes
    bits    stories15M, one step of a GRPO run at 3e-6: what each idea of the codecs saves
    timeline  the measured tables of `deltawire plan`
    bucket  a real run in a folder: every request of a trainer that is killed once and of three replicas
    wordle  the run of benchmarks/wordle_gpu.py, from its result
    sync    phases and clients of benchmarks/pause_server.py, and what flipping each of 320 bits did to a sync
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import re
import signal
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

import deltawire as dw
from _deltas import Bits, Weights, cached, training
from _formats import _choose, _entropy
from _report import about
from deltawire import costs
from deltawire.cli.plan import Setup
from deltawire.core import keys
from deltawire.core.change import Change, blocks, compare, joined
from deltawire.core.codecs import packed
from deltawire.core.codecs.base import Coded, squeeze
from deltawire.core.codecs.context import encoder
from deltawire.core.dtypes import lookup
from deltawire.core.sparse import write_delta
from deltawire.core.ulps import in_ulps
from deltawire.models import ModelView
from deltawire.replica.model import ModelTarget, StagedModel
from deltawire.replica.target import Update
from deltawire.store import Fetched, Store, open_store

DATA = Path(__file__).parents[1] / "docs/figures/data"
RESULTS = Path(__file__).parent / "results"
Record = dict[str, Any]

LR = 1e-6
STEPS = (1, 4, 8)
BATCH = 2, 4, 32
"""Prompts, samples of each, tokens of each sample: small, so that two cores take a minute."""
RATES = [10 ** (-8 + n / 4) for n in range(25)]
PATCHES = {
    "model.layers.2.mlp.up_proj.weight": "a 16 × 16 corner of an MLP matrix",
    "model.layers.2.self_attn.q_proj.weight": "a 16 × 16 corner of an attention matrix",
    "model.layers.2.input_layernorm.weight": "256 weights of a norm",
}


# ── which weights change ─────────────────────────────────────────────────────────────────────────────────────────────


def moved(master: torch.Tensor, update: torch.Tensor, lr: float) -> torch.Tensor:
    """Which weights have other bf16 bits after a step at this rate."""
    return (master - lr * update).bfloat16().view(torch.int16) != master.bfloat16().view(torch.int16)


def adam_update(optimizer: torch.optim.Optimizer, tensor: torch.Tensor, step: int) -> torch.Tensor:
    """What AdamW multiplied by the learning rate in its last step."""
    state, group = optimizer.state[tensor], optimizer.param_groups[0]
    first, second = group["betas"]
    size = (state["exp_avg_sq"] / (1 - second**step)).sqrt() + group["eps"]
    return state["exp_avg"] / (1 - first**step) / size


def corner(tensor: torch.Tensor) -> list[float]:
    part = tensor[:16, :16] if tensor.ndim == 2 else tensor[:256]
    return [float(f"{x:.9g}") for x in part.detach().reshape(-1).tolist()]


def flips() -> Record:
    steps = []
    run = training("stories", LR, batch_size=BATCH)
    weights, optimizer = next(run)
    before = {k: v.detach().clone() for k, v in weights.items()}
    for step in range(1, max(STEPS) + 1):
        next(run)
        print(f"  step {step}", flush=True)
        if step in STEPS:
            updates = {k: adam_update(optimizer, v, step) for k, v in weights.items()}
            steps.append(_step(step, weights, before, updates))
        before = {k: v.detach().clone() for k, v in weights.items()}
    elements = sum(v.numel() for v in weights.values())
    result = json.loads((RESULTS / "density-stories15m.json").read_text())
    whole = [
        [float(name.removeprefix("AdamW ")), row["steady"]]
        for row in result["rows"]
        if re.fullmatch(r"AdamW \de-\d\d", name := row["row"])
    ]
    return {
        "elements": elements, "lr": LR, "rates": RATES, "steps": steps, "patches": PATCHES,
        "whole_runs": whole, "batch": BATCH,
    }  # fmt: skip


def _step(step: int, weights: Weights, before: Weights, updates: Weights) -> Record:
    elements = sum(v.numel() for v in weights.values())
    density = [sum(int(moved(before[k], u, lr).sum()) for k, u in updates.items()) / elements for lr in RATES]
    computed = {k: moved(before[k], u, LR) for k, u in updates.items()}
    really = {
        k: v.detach().bfloat16().view(torch.int16) != before[k].bfloat16().view(torch.int16) for k, v in weights.items()
    }
    return {
        "step": step,
        "density": [float(f"{share:.4g}") for share in density],
        # the run itself went on at LR: what it changed, and where the arithmetic above says otherwise
        "changed": sum(int(m.sum()) for m in really.values()),
        "differ": sum(int((computed[k] != really[k]).sum()) for k in really),
        "median_update": float(f"{np.median([float(u.abs().median()) for u in updates.values()]):.3g}"),
        "patches": {k: {"w": corner(before[k]), "u": corner(updates[k])} for k in PATCHES},
    }


# ── what each idea saves ─────────────────────────────────────────────────────────────────────────────────────────────


BITS_LR, BITS_STEP = 3e-6, 24
"""The delta of docs/codec.md's comparison with other tools."""


def bits() -> Record:
    (delta,) = cached("stories", BITS_LR, (BITS_STEP,))
    old, new = delta.old, delta.new
    changes, base = _detect(old, new), ModelView(old)
    files = {}
    for encoding in ("raw", "packed", "context"):
        writer, file = write_delta(changes, encoding, base.region, {})
        files[encoding] = sum(map(len, file.chunks()))
        writer.close()
    tensors = {text: _ideas({k: old[k] for k in keys}, {k: new[k] for k in keys}) for text, keys in _parts(old).items()}
    return {"lr": BITS_LR, "step": BITS_STEP, "files": files, "tensors": tensors}


def _parts(old: Bits) -> dict[str, list[str]]:
    return {
        "embedding": ["model.embed_tokens.weight"],
        "MLP, one layer": ["model.layers.2.mlp.up_proj.weight"],
        "attention, one layer": ["model.layers.2.self_attn.q_proj.weight"],
        "all weights": list(old),
    }


def _detect(old: Bits, new: Bits) -> list[list[Change]]:
    one, two = ModelView(old), ModelView(new)
    return [[compare(r, one.region(r), two.region(r)) for r in block] for block in blocks(one.schema)]


def _tiles(block: list[Change], base: ModelView) -> list[Coded]:
    """A block in tiles and classes, whether that pays or not."""
    tiled = encoder.BlockEncoder(block, joined(block))
    (ranked,) = encoder.rank_together([tiled], base.region)
    return [coded for _, coded in tiled.code(ranked)]


def _stored(coded: Coded, *streams: str) -> int:
    """Bits of these streams as a file has them, or of all."""
    return 8 * sum(stream.stored for stream, _ in squeeze([coded.streams[name] for name in streams or coded.streams]))


def _ideas(old: Bits, new: Bits) -> Record:
    """Bits per changed weight: which of them changed, and which way, by every idea; and the floors."""
    base, changed = ModelView(old), sum(int((old[k] != new[k]).sum()) for k in old)
    found = [kept for block in _detect(old, new) if (kept := [c for c in block if c.count])]
    plain = [packed.encode(block, base.region) for block in found]
    with patch.object(encoder, "FEW_CHANGES", 1 << 62):  # no levels
        by_class = [part for block in found for part in _tiles(block, base)]
    leveled = [part for block in found for part in _tiles(block, base)]
    floor = {"which": 0.0, "which_by_class": 0.0}
    seen, hit, steps = np.zeros(256), np.zeros(256), []
    for name, bits in old.items():
        a, b = bits.reshape(-1), new[name].reshape(-1)
        mask, size = a != b, (a >> 7) & 0xFF
        n, k = np.bincount(size, minlength=256), np.bincount(size[mask], minlength=256)
        floor["which"] += _choose(a.size, int(k.sum()))
        floor["which_by_class"] += sum(_choose(float(x), float(y)) for x, y in zip(n, k, strict=True) if y)
        seen, hit = seen + n, hit + k
        steps.append((size[mask], in_ulps(a[mask], b[mask], lookup("BF16"))))
    sizes, ulps = (np.concatenate([pair[i] for pair in steps]) for i in (0, 1))
    way = _entropy(np.unique(ulps, return_counts=True)[1])
    way_by_class = sum(_entropy(np.unique(ulps[sizes == e], return_counts=True)[1]) for e in np.unique(sizes))
    per = lambda total: round(total / changed, 3)  # noqa: E731
    tensor = next(iter(old)) if len(old) == 1 else "model.layers.2.mlp.up_proj.weight"
    return {
        "name": tensor if len(old) == 1 else "",
        "shape": list(old[tensor].shape) if len(old) == 1 else [],
        "elements": sum(v.size for v in old.values()),
        "changed": changed,
        "which": {
            "index": 32,
            "gaps": per(sum(_stored(c, "gaps", "low") for c in plain)),
            "classes": per(sum(map(_stored, by_class)) - way_by_class),
            "levels": per(sum(map(_stored, leveled)) - way_by_class),
        },
        "way": {
            "value": 16,
            "ulps": per(sum(_stored(c, "steps", "wide") for c in plain)),
            "by_class": per(way_by_class),
        },
        "floors": {
            "order0": [per(floor["which"]), per(way)],
            "context": [per(floor["which_by_class"]), per(way_by_class)],
        },
        "ulps": {str(u): int((ulps == u).sum()) for u in (-3, -2, -1, 1, 2, 3)},
        "classes": [[int(e), int(seen[e]), int(hit[e])] for e in np.flatnonzero(seen)],
        **_window(old[tensor], new[tensor]),
    }


ROWS = COLUMNS = 64


def _window(old: Any, new: Any) -> Record:
    """A piece of a matrix, and its first changes as every idea would write them."""
    per_row = (old != new).sum(1)
    # the first rows of the tensor with a change: the first rows of an embedding are tokens that never occur
    first = int(np.flatnonzero(per_row)[0])
    a, b = old[first : first + ROWS, :COLUMNS], new[first : first + ROWS, :COLUMNS]
    flat, size = (old != new).reshape(-1), ((old >> 7) & 0xFF).reshape(-1)
    samples, last, start = [], -1, first * old.shape[1]
    for at in np.flatnonzero(flat[start:])[:12] + start:
        own = np.flatnonzero(size[: at + 1] == size[at])
        before = np.flatnonzero(flat[own[:-1]])
        values = [float(f"{x:.5g}") for x in _floats(np.array([old.flat[at], new.flat[at]], np.uint16))]
        step = int(in_ulps(old.reshape(-1)[at : at + 1], new.reshape(-1)[at : at + 1], lookup("BF16"))[0])
        gap = (
            int(at - last - 1) if samples else int(at - (np.flatnonzero(flat[:at])[-1] if flat[:at].any() else -1) - 1)
        )
        rank = len(own) - 2 - (int(before[-1]) if before.size else -1)
        samples.append([int(at), gap, int(size[at]), rank, *values, step])
        last = at
    return {
        "window": {
            "row": first,
            "size": ((a >> 7) & 0xFF).reshape(-1).tolist(),
            "changed": np.flatnonzero(a.reshape(-1) != b.reshape(-1)).tolist(),
        },
        "samples": samples,
        "rows": np.quantile(np.sort(per_row), np.linspace(0, 1, 65), method="nearest").astype(int).tolist(),
        "quiet_rows": int((per_row == 0).sum()),
    }


def _floats(half: Any) -> list[float]:
    return (half.astype(np.uint32) << 16).view(np.float32).tolist()  # type: ignore[no-any-return]


# ── one sync, and what a flipped bit does to it ──────────────────────────────────────────────────────────────────────

LAYER = "model.layers.2."
SIDE = 16
BIT = 2
"""The bit that is flipped, counted from the lowest: of a byte of the object, and of a bf16 weight's mantissa."""


def sync() -> Record:
    """Phases and clients are those of benchmarks/pause_server.py on an H200. The flipped bits are of this machine."""
    (delta,) = cached("stories", BITS_LR, (BITS_STEP,))
    old, new = ({k: v for k, v in bits.items() if k.startswith(LAYER)} for bits in (delta.old, delta.new))
    name = f"{LAYER}mlp.up_proj.weight"
    with TemporaryDirectory() as folder:
        with dw.Publisher(folder) as publisher:
            publisher.publish(old, wait=True)
            publisher.publish(new, wait=True)
        return {**_phases(), "name": name, "bit": BIT, **_flipped(folder, old, new, name)}


def _phases() -> Record:
    run = json.loads((RESULTS / "pause-server-cuda.json").read_text())["runs"][0]
    ours = run["packed"]
    ways = {"quiet": run["control"], "delta": ours, "reload": run["rivals"]["ways"]["full reload"]}
    names = ("fetch", "verify", "decode", "stop", "apply", "prove", "pause", "total")
    return {
        "machine": {key: run[key] for key in ("device", "streams", "weights", "density", "command")},
        "bytes": ours["bytes"], "changed": ours["changed"], "syncs": ours["windows"],
        "step_ms": round(ours["step_ms"], 3),
        "phases": {name: ours[f"{name}_ms"]["p50"] for name in names},
        "gap_ms": {name: way["longest_gap_ms"] for name, way in ways.items()},
        "tokens": {name: [[round(at), tokens] for at, tokens in way["timeline"]] for name, way in ways.items()},
    }  # fmt: skip


class _Damaged:
    """A store whose delta of version 1 has one bit flipped."""

    def __init__(self, inner: Store, key: str) -> None:
        self._inner, self._key, self.at = inner, key, -1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        data = bytearray(self._inner.get_range(key, start, length))
        if key == self._key and start <= self.at < start + length:
            data[self.at - start] ^= 1 << BIT
        return bytes(data)

    def get(self, key: str, *, limit: int | None = None) -> Any:
        fetched = self._inner.get(key, limit=limit)
        if key != self._key or self.at < 0:
            return fetched
        data = bytearray(fetched.data)
        data[self.at] ^= 1 << BIT
        return replace(fetched, data=bytes(data))


class _Struck(ModelTarget):
    """A model one weight of which is hit after the write and before the proof."""

    hit: Callable[[], None] = staticmethod(lambda: None)

    def stage(self, update: Update) -> StagedModel:
        staged = super().stage(update)
        write = staged.write

        def written() -> None:
            write()
            self.hit()

        staged.write = written
        return staged


def _flipped(folder: str, old: Bits, new: Bits, name: str) -> Record:
    store = open_store(folder)
    (key,) = [info.key for info in store.list("deltas/")]
    data = store.get(key).data
    first = len(data) // 2
    part, damaged = data[first : first + 64], _Damaged(store, key)
    objects = []
    for at in range(first, first + 64):
        damaged.at = at
        model = {k: v.copy() for k, v in old.items()}
        objects.append(_try(damaged, model, model, old))
    memory = []
    for row, column in np.ndindex(SIDE, SIDE):
        model = {k: v.copy() for k, v in old.items()}
        target = _Struck(model)
        struck = iter([True])

        def hit(row: int = row, column: int = column, model: Bits = model, struck: Any = struck) -> None:
            if next(struck, False):
                model[name][row, column] ^= 1 << BIT

        target.hit = hit
        memory.append(_try(store, target, model, old))
    a, b = old[name][:SIDE, :SIDE].reshape(-1), new[name][:SIDE, :SIDE].reshape(-1)
    return {
        "object": {
            "key": key,
            "bytes": len(data),
            "first": first,
            "hex": part.hex(),
            "flips": objects,
        },
        "weights": {"old": a.tolist(), "new": b.tolist(), "flips": memory},
    }


def _try(store: Any, target: Any, model: Bits, old: Bits) -> Record:
    """Sync to version 0, then to version 1 with the damage; what came of it."""
    with dw.Replica(store, heartbeat=0) as replica:
        replica.sync(target, 0)
        steps: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: steps.append(record.getMessage().split(": ", 1)[-1])  # type: ignore[method-assign]
        log = logging.getLogger("deltawire")
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        found: Record = {"error": None, "message": ""}
        try:
            replica.sync(target, 1)
        except dw.errors.DeltawireError as error:
            found = {"error": type(error).__name__, "message": str(error)}
        finally:
            log.removeHandler(handler)
        return {
            **found,
            "version": replica.version,
            "untouched": all(np.array_equal(model[k], old[k]) for k in old),
            "log": steps,
        }


# ── broadcast or deltas ──────────────────────────────────────────────────────────────────────────────────────────────


def timeline() -> Record:
    """The measured tables that `deltawire plan` starts from."""
    setup = Setup(7e9, lr=LR, replicas=16)
    shown = ("params", "lr", "encoding", "bandwidth", "replicas", "cores", "step_seconds")
    return {
        "training": [point._asdict() for point in costs.TRAINING],
        "context": costs.CONTEXT,
        "speeds": asdict(costs.SPEEDS),
        "coding": {name: coding._asdict() for name, coding in costs.CODING.items()},
        "bytes_per_weight": costs.DTYPES["bf16"],
        "parallel_hash_above": 64 << 20,
        "timed_on": costs.MACHINE,
        "setup": {name: getattr(setup, name) for name in shown},
    }


# ── a run as it lands in the bucket ──────────────────────────────────────────────────────────────────────────────────

KILLED_AT = 7
"""The version whose writer is killed: its data is in the bucket, its manifest is not."""


class _Logged:
    """A store that appends every request to a file: who, what, which object, how many bytes."""

    def __init__(self, folder: str, actor: str, file: Path, killed_at: int | None = None) -> None:
        self._inner, self._actor, self._file, self._killed_at = open_store(folder), actor, file, killed_at

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name not in ("get", "get_if_changed", "get_range", "put", "put_if_absent", "delete"):
            return found

        def call(key: str, *arguments: Any, **options: Any) -> Any:
            if name == "put_if_absent" and self._killed_at is not None and key == keys.manifest(self._killed_at):
                os.kill(os.getpid(), signal.SIGKILL)
            answer = found(key, *arguments, **options)
            size = len(answer) if isinstance(answer, bytes) else len(answer.data) if isinstance(answer, Fetched) else 0
            if name.startswith("put"):
                size = self._inner.head(key).size
            with self._file.open("a") as file:
                file.write(json.dumps([self._actor, name, key, size]) + "\n")
            return answer

        return call


def _trainer(folder: str, log: Path, first: int, killed_at: int | None, orders: Any) -> None:
    """Publish one version for each order: the weights after so many steps, the same in every process."""
    with dw.Publisher(_Logged(folder, "trainer", log, killed_at), anchor_every=5) as publisher:
        for version in range(first, 99):
            if orders.recv() is None:
                return
            publisher.publish(_weights(version), wait=True)
            orders.send(publisher.version)


def _weights(version: int) -> Bits:
    """A small model after so many steps, each of which moves about 1 % of the weights by an ulp."""
    random = np.random.default_rng(0)
    model = {f"layer.{n}.weight": random.integers(0x3C00, 0x3D80, (256, 256)).astype(np.uint16) for n in range(4)}
    for _ in range(version):
        for bits in model.values():
            bits += (random.random(bits.shape) < 0.01).astype(np.uint16)
    return model


def bucket() -> Record:
    steps: list[Record] = []
    with TemporaryDirectory() as place:
        folder, log = f"{place}/run", Path(place) / "log"
        log.touch()
        models: dict[str, Bits] = {}
        replicas: dict[str, dw.Replica] = {}
        read = 0

        def note(actor: str, text: str, kind: str) -> None:
            nonlocal read
            lines = log.read_text().splitlines()
            requests, read = [json.loads(line)[1:] for line in lines[read:]], len(lines)
            objects = sorted([info.key, info.size] for info in open_store(folder).list())
            at = {name: replica.version for name, replica in replicas.items()}
            steps.append(
                {"actor": actor, "kind": kind, "text": text, "requests": requests, "objects": objects, "at": at}
            )

        def start(first: int, killed_at: int | None = None) -> tuple[Any, Any]:
            ours, theirs = multiprocessing.Pipe()
            made = multiprocessing.get_context("fork").Process(
                target=_trainer, args=(folder, log, first, killed_at, theirs), daemon=True
            )
            made.start()
            theirs.close()
            return made, ours

        def publish(orders: Any) -> None:
            orders.send(True)
            version = orders.recv()
            kind = (
                "anchor"
                if any(k.startswith("anchors/") and f"_{version:06d}." in k for k in _keys_in(folder))
                else "delta"
            )
            note("trainer", f"publishes version {version}", kind)

        def sync(name: str, kind: str = "sync", text: str = "") -> None:
            if name not in replicas:
                models[name] = {k: np.zeros_like(v) for k, v in _weights(0).items()}
                replicas[name] = dw.Replica(_Logged(folder, name, log), id=name.replace(" ", "-"))
            before = replicas[name].version
            version = replicas[name].sync(models[name])
            if not all(np.array_equal(models[name][k], v) for k, v in _weights(version).items()):
                raise SystemExit(f"{name} does not hold version {version}")
            moved = (
                f"is at version {version}" if version != before else f"finds nothing new, stays at version {version}"
            )
            note(name, text or moved, kind)

        process, orders = start(0, killed_at=KILLED_AT)
        publish(orders)
        sync("replica 1", text="joins: fetches the anchor")
        sync("replica 2", text="joins: fetches the anchor")
        for version in range(1, KILLED_AT):
            publish(orders)
            sync("replica 1")
            if version < 3:
                sync("replica 2")
            if version == 2:
                note("replica 2", "falls asleep", "sleep")
        sync("replica 3", "join", "joins late: the newest anchor and the deltas after it")
        orders.send(True)
        process.join()
        if process.exitcode != -signal.SIGKILL:
            raise SystemExit(f"the writer was to be killed, but ended with {process.exitcode}")
        note("trainer", f"is killed: the data of version {KILLED_AT} is there, its manifest is not", "killed")
        sync("replica 1", "nothing")
        process, orders = start(KILLED_AT)
        publish(orders)
        sync("replica 1")
        sync("replica 3")
        sync("replica 2", "wake", "wakes up and takes the cheapest way to the newest version")
        orders.send(None)
        process.join()
    return {"killed_at": KILLED_AT, "elements": 4 * 256 * 256, "steps": steps}


def _keys_in(folder: str) -> list[str]:
    return [info.key for info in open_store(folder).list()]


def write(name: str, record: Record) -> None:
    DATA.mkdir(parents=True, exist_ok=True)
    path = DATA / f"{name}.json"
    path.write_text(json.dumps(record, separators=(",", ":"), ensure_ascii=False) + "\n")
    print(f"wrote {path} ({path.stat().st_size / 1e3:.0f} kB)")


def wordle() -> Record:
    """What benchmarks/wordle_gpu.py measured on a GPU."""
    found = json.loads((RESULTS / "wordle-gpu.json").read_text())
    kept = ("seed", "solved_first", "solved_last", "bytes_per_step", "curve")
    return {
        "run": {name: found[name] for name in ("machine", "versions", "date", "command")},
        "arms": {
            name: [{key: seed[key] for key in kept} for seed in found[name]["seeds"]]
            for name in ("deltas", "full", "none")
            if name in found
        },
    }


FIGURES: dict[str, Callable[[], Record]] = {
    "flips": flips,
    "bits": bits,
    "sync": sync,
    "timeline": timeline,
    "bucket": bucket,
    "wordle": wordle,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", nargs="*", help=f"which of {', '.join(FIGURES)}; all by default")
    chosen = parser.parse_args().figures or list(FIGURES)
    facts = {k: v for k, v in about().items() if k != "command"}
    for name in chosen:
        print(name)
        write(name, {"about": {**facts, "command": f"python benchmarks/figures.py {name}"}, **FIGURES[name]()})


if __name__ == "__main__":
    main()
