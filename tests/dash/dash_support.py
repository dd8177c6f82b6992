"""Runs for the page: a real one with replicas, and a long one that is written record by record."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from deltawire.bucket.run import Run
from deltawire.core import history, keys
from deltawire.core.manifest import Blob, Head, Heartbeat, Link, Manifest, Summary, SyncRecord, dump
from deltawire.core.schema import Schema, TensorSpec
from deltawire.core.sparse import DataFile, write_delta
from deltawire.replica import Replica
from deltawire.store import Store
from deltawire.trainer import Publisher
from support import Model, blank, diff, moved_bag, random_bag, same
from support import history as versions_of

DIGEST = "0" * 32


def real_run(store: Any, count: int = 12, replicas: tuple[str, ...] = ("near", "far"), **options: Any) -> list[Model]:
    """A run of a small model with metrics, and replicas that followed it."""
    weights = versions_of(count)
    live = {name: blank(weights[0]) for name in replicas}
    following = {name: Replica(store, id=name, heartbeat=1000) for name in replicas}
    with Publisher(store, encoding="packed", **options) as publisher:
        for step, model in enumerate(weights):
            publisher.publish(model, step=10 * step, metrics={"reward": step / 10}).result(120)
            for number, (name, replica) in enumerate(following.items()):
                if step % (number + 1) == 0:
                    replica.sync(live[name])
    assert same(live[replicas[0]], weights[-1])
    return weights


def beat(store: Store, run: Run, name: str, version: int | None, **fields: Any) -> Heartbeat:
    """Write a heartbeat by hand."""
    made = Heartbeat(run.info.run, name, version, version, True, fields.pop("at", time.time()), **fields)
    store.put(keys.replica(name), dump(made))
    return made


def long_run(store: Store, count: int = 10_000, replicas: int = 64) -> Run:
    """A run of many versions and replicas, written without weights: the same delta stands for each."""
    schema = Schema.build(TensorSpec(f"layers.{n}.weight", "BF16", (16, 16)) for n in range(40))
    run = Run.create(store, schema, "long")
    bag = random_bag(schema, 0)
    writer, file = write_delta(diff(bag, moved_bag(bag, 1, 0.02)), "packed", bag.region, {}, threads=1)
    with writer:
        blob = b"".join(file.chunks())
    begun = time.time() - 6 * count
    rng = np.random.default_rng(0)
    summaries: list[Summary] = []
    for version in range(count):
        links = [] if version else [_link("anchor", None, keys.anchor(0, "0" * 8), file)]
        if version:
            links.append(_link("delta", version - 1, keys.delta(version - 1, version, "0" * 8), file))
        if version and version % 512 == 0:
            links.append(_link("anchor", None, keys.anchor(version, "0" * 8), file))
        metrics = {"reward": float(rng.normal(version / count)), "kl": 0.01}
        manifest = Manifest(
            run.info.run, version, version - 1 if version else None, run.info.schema_hash, DIGEST, tuple(links),
            begun + 6 * version, "writer", step=version, changed=int(rng.integers(50, 150)) if version else 0,
            metrics=metrics, timings={"held": 0.001, "encode": 0.01, "put": 0.02},
            recent=tuple(summaries[history.recent_start(version) :]) if version == count - 1 else (),
        )  # fmt: skip
        summaries.append(manifest.summary())
        store.put(keys.manifest(version), dump(manifest))
        for link in links:
            store.put(link.objects[0].key, blob)
    for end in history.pages(count - 1):
        page = history.Page(run.info.run, end, tuple(summaries[end - history.span(end) : end]))
        store.put(keys.history(end), dump(page))
    store.put(keys.HEAD, dump(Head(run.info.run, count - 1)))
    phases = {"fetch": 0.05, "verify": 0.002, "decode": 0.02, "stage": 0.001, "apply": 0.004, "prove": 0.01}
    for number in range(replicas):
        lag = number % 3
        reached = range(max(count - 24 - lag, 1), count - lag)
        syncs = tuple(SyncRecord(v, v - 1, begun + 6 * v + 0.5 + number / 50, 0.09, len(blob), phases) for v in reached)
        beat(store, run, f"replica-{number:02d}", count - 1 - lag, syncs=syncs, timings=phases)
    return run


def _link(kind: Any, base: int | None, key: str, file: DataFile) -> Link:
    blob = Blob(key, file.size, file.hash, file.head_size, file.head_hash)
    return Link(kind, base, (blob,), "packed" if kind == "delta" else "", changed=100)
