"""log: what was published and who follows, in few requests."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

import numpy as np
import pytest
from cli_support import invoke, invoke_json

from deltawire.bucket.run import Run
from deltawire.bucket.versions import set_tag
from deltawire.core import keys
from deltawire.core.manifest import Heartbeat, dump
from deltawire.replica import Replica
from deltawire.store import Store
from deltawire.trainer import Publisher
from deltawire_wordle.counting import CountingStore
from support import history, publish


def test_versions_newest_first(run: Path) -> None:
    value = invoke_json("log", run)
    assert [version["version"] for version in value["versions"]] == [3, 2, 1, 0]
    assert [version["kind"] for version in value["versions"]] == ["delta", "delta", "delta", "anchor"]
    assert [version["base"] for version in value["versions"]] == [2, 1, 0, None]
    assert [version["step"] for version in value["versions"]] == [30, 20, 10, 0]
    newest = value["versions"][0]
    manifest = Run.open(str(run)).manifest(3)
    assert newest["bytes"] == manifest.links[0].objects[0].size
    assert newest["encoding"] == "packed"
    assert newest["changed_share"] == pytest.approx(manifest.changed / value["elements"], abs=1e-8)
    assert newest["times_smaller"] == pytest.approx(value["full_bytes"] / newest["bytes"], abs=0.01)
    assert value["replicas"] == []


def test_for_people(run: Path) -> None:
    text = invoke("log", run).stdout
    lines = text.splitlines()
    assert lines[0].startswith(run.as_uri())
    assert "v3" in text
    assert "×" in text
    assert "delta sizes " in text
    assert "replica" not in text


def test_how_many(run: Path) -> None:
    assert [v["version"] for v in invoke_json("log", run, "-n", 2)["versions"]] == [3, 2]
    assert len(invoke_json("log", run, "-n", 1, "--all")["versions"]) == 4


def test_more_than_one_way_to_a_version(tmp_path: Path) -> None:
    publish(tmp_path / "run", history(5), anchor_every=2, anchor_ratio=100)
    versions = invoke_json("log", tmp_path / "run")["versions"]
    assert versions[0]["also"] == ["anchor"]
    assert versions[1]["also"] == []
    assert "delta+anchor" in invoke("log", tmp_path / "run").stdout


def test_replicas(run: Path) -> None:
    weights = {name: np.zeros(shape, dtype) for name, shape, dtype in _arrays(run)}
    replica = Replica(run, id="box-1", strict=False)
    with pytest.raises(Exception, match=r"layer.scale"):
        replica.sync(weights)  # a numpy model cannot be fp8: this one never follows
    opened = Run.open(str(run))
    for beat in (
        Heartbeat(opened.info.run, "box-2", 1, 3, True, 1234.5, timings={"fetch": 0.25}),
        Heartbeat(opened.info.run, "box-3", 3, 3, False, time.time(), "disk \x1b[31mfull"),
        Heartbeat(opened.info.run, "box-4", None, 3, True, time.time()),
        Heartbeat("another", "stranger", 3, 3, True, time.time()),
    ):
        opened.store.put(keys.replica(beat.replica), dump(beat))
    # by the store's clock, whatever a replica says
    os.utime(run / keys.replica("box-4"), times=(time.time() - 7200,) * 2)
    replicas = {beat["replica"]: beat for beat in invoke_json("log", run)["replicas"]}
    assert {name: (beat["version"], beat["lag"], beat["health"]) for name, beat in replicas.items()} == {
        "box-1": (None, None, "failing"),
        "box-2": (1, 2, "ok"),
        "box-3": (3, 0, "failing"),
        "box-4": (None, None, "silent"),
    }
    assert (replicas["box-2"]["at"], replicas["box-2"]["timings"]) == (1234.5, {"fetch": 0.25})
    text = invoke("log", run).stdout
    assert "2.0 h" in text
    assert "disk \ufffd[31mfull" in text
    assert "stranger" not in text


def test_keepers_that_ended_are_not_listed(run: Path) -> None:
    store, name = Run.open(str(run)).store, Run.open(str(run)).info.run
    for number, seconds in ((1, 7200), (2, 3600), (3, 1800)):
        beat = Heartbeat(name, f"keeper-{number}", 3, 3, True, time.time(), role="keeper")
        store.put(keys.replica(beat.replica), dump(beat))
        os.utime(run / keys.replica(beat.replica), times=(time.time() - seconds,) * 2)
    # where none is at work, the last one says since when
    assert [beat["replica"] for beat in invoke_json("log", run)["replicas"]] == ["keeper-3"]
    store.put(keys.replica("keeper-4"), dump(Heartbeat(name, "keeper-4", 3, 3, True, time.time(), role="keeper")))
    assert [beat["replica"] for beat in invoke_json("log", run)["replicas"]] == ["keeper-4"]


def _arrays(run: Path) -> list[tuple[str, tuple[int, ...], type]]:
    kinds = {"BF16": np.uint16, "F32": np.float32, "I64": np.int64, "F8_E4M3": np.uint8}
    return [(t.name, t.shape, kinds[t.dtype]) for t in Run.open(str(run)).schema.tensors]


def test_a_run_without_versions_and_no_run(tmp_path: Path, run: Path) -> None:
    Run.create(str(tmp_path / "new"), Run.open(str(run)).schema)
    assert "no version yet" in invoke("log", tmp_path / "new", code=4).stderr
    invoke("log", tmp_path / "none", code=4)


def test_requests_grow_with_the_logarithm(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 300
    publish(store, history(count, changes=1))
    counting = CountingStore(store)
    monkeypatch.setattr("deltawire.bucket.run.open_store", lambda _: counting)
    assert len(invoke_json("log", "any", "--all")["versions"]) == count
    everything = counting.requests.total()
    assert everything <= math.log2(count) + 8
    counting.reset()
    assert len(invoke_json("log", "any")["versions"]) == 20
    assert counting.requests.total() <= everything


def test_a_line_per_version_at_80_columns(tmp_path: Path) -> None:
    with Publisher(tmp_path / "run", anchor_every=2, anchor_ratio=100) as publisher:
        for step, weights in enumerate(history(5)):
            figures = {"loss": 1.5 - step / 8, "reward": step / 3, "kl": 0.01, "entropy": 2.0, "len": 512.0}
            publisher.publish(weights, step=123456 + step, metrics=figures).result(60)
    set_tag(Run.open(str(tmp_path / "run")), 3, "best")
    for columns in (80, 100, 160):
        lines = invoke("log", tmp_path / "run", columns=columns).stdout.splitlines()
        assert all(len(line.rstrip()) <= columns for line in lines if not line.startswith("file:"))
        versions = [line.split()[0] for line in lines if line.lstrip().startswith("v")]
        assert versions == ["version", "v4", "v3", "v2", "v1", "v0"]
        assert "1.125" in "\n".join(lines), "the metrics that were published"
        assert any("v3 best" in line for line in lines)
    newest = invoke_json("log", tmp_path / "run")["versions"][0]
    assert newest["metrics"] == {"loss": 1.0, "reward": pytest.approx(4 / 3), "kl": 0.01, "entropy": 2.0, "len": 512.0}


def test_metrics_with_any_name(tmp_path: Path) -> None:
    with Publisher(tmp_path / "run") as publisher:
        publisher.publish(history(1)[0], metrics={"bytes": 7.0, "age": 8.0, "\x1b[2J": 9.0, "": 6.0}).result(60)
    text = invoke("log", tmp_path / "run").stdout
    assert "\x1b" not in text
    assert all(f" {figure}" in text for figure in "6789")


def test_a_summary_carries_a_few_metrics(store: Store) -> None:
    with Publisher(store) as publisher:
        publisher.publish(history(1)[0], metrics={"x" * 50: 1.0, **{f"m{i}": float(i) for i in range(20)}}).result(60)
    manifest = Run.open(store).manifest(0)
    assert len(manifest.metrics) == 21
    assert list(manifest.summary().metrics) == [f"m{i}" for i in range(6)]


def test_why_a_replica_fails_is_a_line_of_its_own(run: Path) -> None:
    opened = Run.open(str(run))
    error = "version 0 should have state digest a7cb61c08d15d396993107852cf0cf8f; call sync() again"
    opened.store.put(keys.replica("r1"), dump(Heartbeat(opened.info.run, "r1", 1, 2, False, time.time(), error)))
    assert f"r1: {error}" in invoke("log", run, columns=80).stdout
