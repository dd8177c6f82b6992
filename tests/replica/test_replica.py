"""What a rollout server sees: weights that are always a version, the right one, and can prove it."""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from blake3 import blake3

from deltawire.bucket import fetch as fetching
from deltawire.bucket.run import Run
from deltawire.core import full, keys
from deltawire.core.change import Change
from deltawire.core.errors import (
    DeltawireError,
    DigestMismatch,
    FolderError,
    HashMismatch,
    RunNotFound,
    SchemaMismatch,
    StoreUnavailable,
    VersionNotFound,
)
from deltawire.core.manifest import Blob
from deltawire.models import ModelView, torch_bits
from deltawire.replica import Replica
from deltawire.replica.host import HostShard
from deltawire.replica.shard import PieceChange
from deltawire.store import Retrying, Store
from deltawire.trainer import Publisher
from flaky_store import FlakyStore
from support import HookedStore, Model, blank, copy, delta_key, history, model, publish, same, spoil, trained

WAIT = 120


def digest(weights: Any) -> str:
    return str(full.digest_of(ModelView(weights)))


# ── sync ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_version_in_order(store: Store) -> None:
    versions = history(8)
    publish(store, versions)
    live = blank(versions[0])
    replica = Replica(store, heartbeat=0)
    assert replica.version is None
    for version, weights in enumerate(versions):
        assert replica.sync(live, version) == version
        assert replica.version == version
        assert same(live, weights)


def test_any_version_from_any_other(store: Store) -> None:
    """Forwards by deltas, backwards by an anchor."""
    versions = history(7)
    publish(store, versions, anchor_every=3, anchor_ratio=1e9)
    live = blank(versions[0])
    replica = Replica(store, heartbeat=0)
    rng = np.random.default_rng(0)
    for version in rng.integers(0, 7, 40):
        assert replica.sync(live, int(version)) == version
        assert same(live, versions[version])


def test_the_newest_by_default(store: Store) -> None:
    versions = history(3)
    publish(store, versions)
    live = blank(versions[0])
    replica = Replica(store, heartbeat=0)
    assert replica.sync(live) == 2
    assert same(live, versions[2])
    assert (replica.newest, replica.lag) == (2, 0)
    publish(store, [trained(versions[2], 1)])
    assert replica.sync(live) == 3
    assert replica.lag == 0


def test_a_version_that_does_not_exist_changes_nothing(store: Store) -> None:
    """Not what is known to be newest either: a follower would wait for a version after it for ever."""
    versions = history(4)
    publish(store, versions[:3])
    live = blank(versions[0])
    replica = Replica(store, heartbeat=0)
    replica.sync(live)
    with pytest.raises(VersionNotFound):
        replica.sync(live, 77)
    assert (replica.version, replica.newest, replica.lag) == (2, 2, 0)
    publish(store, versions[3:])
    assert next(replica.follow(live, poll=0.001)) == 3


def test_arrays_keep_their_memory(store: Store) -> None:
    """A server holds pointers to its weights: they are patched, never replaced."""
    versions = history(3)
    publish(store, versions)
    live = blank(versions[0])
    addresses = {name: array.ctypes.data for name, array in live.items()}
    replica = Replica(store, heartbeat=0)
    for version in range(3):
        replica.sync(live, version)
    assert {name: array.ctypes.data for name, array in live.items()} == addresses


def test_a_version_that_does_not_exist(store: Store) -> None:
    versions = history(2)
    publish(store, versions)
    live = copy(versions[1])
    replica = Replica(store, heartbeat=0)
    replica.sync(live)
    for version in (7, -3):
        with pytest.raises(VersionNotFound):
            replica.sync(live, version)
        assert same(live, versions[1])
        assert replica.version == 1
    # and it knows no newer one because of it
    assert replica.sync(live) == 1


def test_weights_are_recognised_by_their_digest(store: Store) -> None:
    """A server started from a checkpoint of version 2 fetches version 3's delta, and nothing else."""
    versions = history(4)
    publish(store, versions)
    fetched: list[str] = []
    hooked = HookedStore(store, lambda moment, verb, key: fetched.append(key) if moment == "before" else None)
    live = copy(versions[2])
    assert Replica(hooked, heartbeat=0).sync(live) == 3
    assert [key for key in fetched if key.startswith(("anchors/", "deltas/"))] == [delta_key(store, 3)]
    again = copy(versions[3])
    fetched.clear()
    assert Replica(hooked, heartbeat=0).sync(again) == 3
    assert not [key for key in fetched if key.startswith(("anchors/", "deltas/"))]


def test_another_model_for_the_same_replica(store: Store) -> None:
    versions = history(3)
    publish(store, versions)
    first, second = blank(versions[0]), blank(versions[0])
    replica = Replica(store, heartbeat=0)
    replica.sync(first)
    assert replica.sync(second) == 2
    assert same(second, versions[2])


def test_a_follower_does_not_keep_every_manifest(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltawire.bucket.run.KEPT_MANIFESTS", 5)
    versions = history(30, changes=1)
    publish(store, versions)
    live = copy(versions[0])
    replica = Replica(store, heartbeat=0)
    for version in range(30):
        replica.sync(live, version)
    assert same(live, versions[29])
    assert replica._run is not None
    assert len(replica._run._manifests) <= 5
    # and what it no longer keeps it can still read
    assert replica.sync(live, 3) == 3
    assert same(live, versions[3])


def test_timings_and_progress(store: Store) -> None:
    versions = history(2)
    results = publish(store, versions)
    live = blank(versions[0])
    replica = Replica(store, heartbeat=0)
    told: list[int] = []
    replica.sync(live, progress=told.append)
    assert sum(told) == sum(result.bytes for result in results[:1]) + results[1].bytes
    assert replica.timings.keys() >= {"fetch", "decode", "apply"}
    assert all(seconds >= 0 for seconds in replica.timings.values())


def test_large_objects_go_through_a_file(store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In parts, with reads that return less than asked for, and nothing left behind."""
    monkeypatch.setattr(fetching, "IN_MEMORY", 100)
    monkeypatch.setattr(fetching, "PART", 300)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    real = os.pread
    versions = history(4)
    publish(store, versions, anchor_ratio=1e9)
    monkeypatch.setattr(fetching.os, "pread", lambda fd, length, start: real(fd, min(length, 300), start))
    live = blank(versions[0])
    assert Replica(store, heartbeat=0).sync(live) == 3
    assert same(live, versions[3])
    spoil(store, delta_key(store, 3))
    with pytest.raises(HashMismatch):
        Replica(store, heartbeat=0).sync(blank(versions[0]))
    assert not [*tmp_path.iterdir()]


def test_objects_that_are_not_small_are_copied_by_the_system(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python holds its lock while it copies memory, for which a server's threads wait: files are copied without it."""
    monkeypatch.setattr(fetching, "SMALL", 100)
    for size, in_file in ((100, False), (101, hasattr(os, "memfd_create"))):
        data = bytes(range(256)) * 2
        key = f"deltas/{size}"
        store.put(key, data[:size])
        blob = Blob(key, size, blake3(data[:size]).hexdigest(length=16))
        with fetching.fetch(store, blob) as fetched:
            assert (fetched._descriptor >= 0) == in_file
            assert fetched.read(7, 50) == data[7:57]
        with monkeypatch.context() as short:
            short.setattr(type(store), "get_range", lambda *_, less=data[: size - 1]: less)
            with pytest.raises(HashMismatch):
                fetching.fetch(store, blob)


def test_no_room_for_a_large_object(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "IN_MEMORY", 100)
    versions = history(2)
    publish(store, versions)

    def full_disk(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(fetching.os, "pwrite", full_disk)
    live = copy(versions[0])
    replica = Replica(store, heartbeat=0)
    with pytest.raises(FolderError, match="TMPDIR"):
        replica.sync(live)
    assert same(live, versions[0])
    assert replica.version == 0


# ── targets ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_torch_module_with_tied_buffers_and_empty_tensors(store: Store) -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(11, 6)
            self.head = torch.nn.Linear(6, 11, bias=False)
            self.head.weight = self.embed.weight
            self.norm = torch.nn.BatchNorm1d(6)
            self.register_buffer("nothing", torch.zeros(0, 3, dtype=torch.int64))

    torch.manual_seed(0)
    source, target = Net().bfloat16(), Net().bfloat16()
    publish(store, [source])
    assert Replica(store, heartbeat=0).sync(target) == 0
    for name, tensor in source.state_dict().items():
        assert torch_bits(target.state_dict()[name]).tolist() == torch_bits(tensor).tolist()
    assert target.embed.weight.requires_grad


def test_a_parameter_that_is_not_contiguous(store: Store) -> None:
    """Read as a copy, written back whole: NaN payloads and −0 survive that too."""
    rng = np.random.default_rng(0)
    first = rng.integers(0, 1 << 16, (80, 60), np.uint16)
    first[0, :4] = 0x7FC1, 0xFFC1, 0x8000, 0x7F81
    second = first.copy()
    second[1, :4] = 0x7FA1, 0xFFFF, 0x8000, 0x0001
    assert publish(store, [{"w": first}, {"w": second}], anchor_ratio=1e9)[1].kinds == ("delta",)
    storage = torch.zeros(60, 80, dtype=torch.bfloat16)
    live = {"w": storage.T}
    assert not live["w"].is_contiguous()
    replica = Replica(store, heartbeat=0)
    for version, expected in enumerate((first, second)):
        replica.sync(live, version)
        assert torch_bits(live["w"]).reshape(80, 60).tolist() == expected.tolist()
        assert storage.T.view(torch.int16).numpy().view(np.uint16).tolist() == expected.tolist()


@pytest.mark.parametrize("kind", [np.matrix, np.ma.MaskedArray])
def test_subclasses_of_arrays(store: Store, kind: type[Any]) -> None:
    """They keep a shape of their own, which kernels do not know: a delta ended `follow` with an error of numba."""
    versions = [{"w": np.full((80, 60), 7, np.uint16)}, {"w": np.full((80, 60), 7, np.uint16)}]
    versions[1]["w"][3, 5] = 9
    assert publish(store, versions, anchor_ratio=1e9)[1].kinds == ("delta",)
    plain = np.zeros((80, 60), np.uint16)
    replica = Replica(store, heartbeat=0)
    for version, expected in enumerate(versions):
        replica.sync({"w": plain.view(kind)}, version)
        assert plain.tolist() == expected["w"].tolist()


def test_strict_and_not(store: Store) -> None:
    versions = history(2)
    publish(store, versions)
    more = {**blank(versions[0]), "rotary.cache": np.full(5, 7.0, np.float32)}
    with pytest.raises(SchemaMismatch, match="strict=False"):
        Replica(store, heartbeat=0).sync(more)
    assert same(more, {**blank(versions[0]), "rotary.cache": more["rotary.cache"]})
    assert Replica(store, heartbeat=0, strict=False).sync(more) == 1
    assert same({n: more[n] for n in versions[1]}, versions[1])
    assert more["rotary.cache"].tolist() == [7.0] * 5
    less = {n: a for n, a in blank(versions[0]).items() if n != "scale"}
    with pytest.raises(SchemaMismatch):
        Replica(store, heartbeat=0, strict=False).sync(less)


def test_a_read_only_array(store: Store) -> None:
    versions = history(2)
    publish(store, versions)
    live = copy(versions[0])
    live["scale"].flags.writeable = False
    with pytest.raises(SchemaMismatch, match="writable"):
        Replica(store, heartbeat=0).sync(live)
    assert same(live, versions[0])


def test_an_alias_with_memory_of_its_own_is_part_of_the_proof(store: Store) -> None:
    """The run ties head to embed. Here they are two arrays: both must be right for the weights to have a name."""
    first = np.arange(4000, dtype=np.uint16).reshape(1000, 4)
    second = first + np.uint16(1)
    both = [{"embed": a, "head": a} for a in (first, second)]
    assert publish(store, both, anchor_ratio=1e9)[1].kinds == ("delta",)
    live = {"embed": second.copy(), "head": np.zeros_like(second)}
    replica = Replica(store, heartbeat=0)
    assert replica.sync(live) == 1
    assert live["head"].tolist() == second.tolist()
    # changed behind its back, the alias alone
    replica.sync(live, 0)
    live["head"][9, 3] ^= 1
    assert replica.sync(live, 1) == 1
    assert live["head"].tolist() == live["embed"].tolist() == second.tolist()


# ── all or nothing ───────────────────────────────────────────────────────────────────────────────────────────────────


class Boom(Exception):
    pass


def writes(store: Store, live: Model) -> int:
    """How many changes the newest delta has."""
    count = 0
    real = HostShard.put

    def counted(self: HostShard, item: PieceChange) -> None:
        nonlocal count
        count += 1
        real(self, item)

    HostShard.put = counted  # type: ignore[method-assign]
    try:
        Replica(store, heartbeat=0).sync(copy(live))
    finally:
        HostShard.put = real  # type: ignore[method-assign]
    return count


@pytest.mark.parametrize("encoding", ["packed", "raw"])
@pytest.mark.parametrize("error", [Boom, KeyboardInterrupt, MemoryError], ids=lambda e: e.__name__)
def test_a_write_that_fails_is_undone_whole(
    store: Store, monkeypatch: pytest.MonkeyPatch, encoding: str, error: type[BaseException]
) -> None:
    """At every change, before it, half-way through it and after it."""
    versions = history(2, changes=9)
    publish(store, versions, encoding=encoding)
    real = HostShard.put
    total = writes(store, versions[0])
    assert total >= 4
    for k in range(total):
        for moment in ("before", "half", "after"):
            calls = iter(range(1000))

            def failing(
                self: HostShard, item: PieceChange, k: int = k, moment: str = moment, calls: Any = calls
            ) -> None:
                if next(calls) != k:
                    real(self, item)
                    return
                if moment == "half":
                    change, half = item.change, item.change.count // 2
                    part = Change(change.region, change.positions[:half], change.old[:half], change.new[:half])
                    real(self, PieceChange(item.piece, part))
                elif moment == "after":
                    real(self, item)
                raise error

            live = copy(versions[0])
            replica = Replica(store, heartbeat=0)
            replica.sync(live, 0)
            monkeypatch.setattr(HostShard, "put", failing)
            with pytest.raises(error):
                replica.sync(live)
            monkeypatch.setattr(HostShard, "put", real)
            assert same(live, versions[0]), f"change {k}, {moment}"
            assert replica.version == 0
            assert replica.sync(live) == 1
            assert same(live, versions[1])


def test_a_write_that_fails_on_a_parameter_that_is_not_contiguous(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    first = {n: rng.integers(0, 1 << 16, (40, 30), np.uint16) for n in "abc"}
    second = {n: a ^ (rng.random((40, 30)) < 0.05).astype(np.uint16) for n, a in first.items()}
    assert publish(store, [first, second], anchor_ratio=1e9)[1].kinds == ("delta",)
    live = {n: torch.zeros(30, 40, dtype=torch.bfloat16).T for n in "abc"}
    replica = Replica(store, heartbeat=0)
    replica.sync(live, 0)
    real = HostShard.put
    seen: list[str] = []

    def failing(self: HostShard, item: PieceChange) -> None:
        real(self, item)
        seen.append(item.change.region.tensor.name)
        if len(seen) == 2:
            raise Boom

    monkeypatch.setattr(HostShard, "put", failing)
    with pytest.raises(Boom):
        replica.sync(live)
    assert all(torch_bits(live[n]).tolist() == first[n].reshape(-1).tolist() for n in "abc")


def test_a_delta_that_is_written_wrong_is_taken_back(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug, or a memory error, between the stage and the weights: the proof finds it, the old weights come back."""
    versions = history(2)
    publish(store, versions, anchor_ratio=1e9)
    live = copy(versions[0])
    replica = Replica(store, heartbeat=0)
    replica.sync(live, 0)
    real = HostShard.put

    def wrong(self: HostShard, item: PieceChange) -> None:
        change = item.change
        new = change.new ^ change.new.dtype.type(1)
        real(self, PieceChange(item.piece, Change(change.region, change.positions, change.old, new)))

    undo = HostShard.undo

    def rightly(self: HostShard, patch: Any) -> None:
        monkeypatch.setattr(HostShard, "put", real)
        undo(self, patch)

    monkeypatch.setattr(HostShard, "put", wrong)
    monkeypatch.setattr(HostShard, "undo", rightly)
    with pytest.raises(DigestMismatch):
        replica.sync(live)
    assert same(live, versions[0])
    assert replica.version == 0


def test_an_anchor_that_breaks_off_leaves_weights_without_a_name(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Full weights cannot be undone; until they are whole nobody may call them a version."""
    versions = [model(1), model(2)]
    publish(store, versions)
    live = copy(versions[0])
    replica = Replica(store, heartbeat=0)
    replica.sync(live, 0)
    real = HostShard.load

    def half(self: HostShard, source: Any) -> None:
        self.read(0)[:] = 0
        raise Boom

    monkeypatch.setattr(HostShard, "load", half)
    with pytest.raises(Boom):
        replica.sync(live)
    assert replica.version is None
    monkeypatch.setattr(HostShard, "load", real)
    assert replica.sync(live) == 1
    assert same(live, versions[1])


# ── proof ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_without_proof_the_result_is_the_same(store: Store) -> None:
    versions = history(5)
    publish(store, versions)
    live = blank(versions[0])
    replica = Replica(store, heartbeat=0, prove=False)
    for version in range(5):
        replica.sync(live, version)
        assert same(live, versions[version])
    assert "prove" not in replica.timings


# ── follow ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def following(replica: Replica, live: Any, until: int, **options: Any) -> Iterator[int]:
    stop = threading.Event()
    ends = time.monotonic() + WAIT
    for version in replica.follow(live, poll=0.002, stop=stop, **options):
        yield version
        if version >= until:
            return
        assert time.monotonic() < ends, "the follower does not get there"


def test_follow_sees_what_is_published_while_it_watches(store: Store) -> None:
    versions = history(12)
    live = blank(versions[0])

    def work() -> None:
        with Publisher(store) as publisher:
            for weights in versions:
                publisher.publish(weights).result(WAIT)
                time.sleep(0.003)

    # it waits for the run to appear
    trainer = threading.Timer(0.05, work)
    trainer.start()
    seen = []
    for version in following(Replica(store, heartbeat=0), live, 11):
        seen.append(version)
        assert same(live, versions[version])
    trainer.join()
    assert seen == sorted(set(seen))
    assert seen[-1] == 11


def test_follow_every_version(store: Store) -> None:
    versions = history(9)
    publish(store, versions)
    live = copy(versions[2])
    seen = []
    for version in following(Replica(store, heartbeat=0), live, 8, every=True):
        seen.append(version)
        assert same(live, versions[version])
    assert seen == [2, 3, 4, 5, 6, 7, 8], "from the version the model came with"


def test_follow_only_the_newest(store: Store) -> None:
    versions = history(9)
    publish(store, versions)
    assert [*following(Replica(store, heartbeat=0), blank(versions[0]), 8)] == [8]


def test_follow_stops_when_told(store: Store) -> None:
    """In the middle of a wait, too."""
    versions = history(1)
    publish(store, versions)
    stop = threading.Event()
    follower = Replica(store, heartbeat=0).follow(blank(versions[0]), poll=10_000, stop=stop)
    assert next(follower) == 0
    threading.Timer(0.05, stop.set).start()
    assert [*follower] == []


@pytest.mark.parametrize("seed", range(3))
def test_follow_through_a_bucket_that_is_away_now_and_then(store: Store, seed: int) -> None:
    """No retries below it: every third request fails, and gets are cut. It never holds weights that are no version."""
    versions = history(15, seed=seed)
    live = blank(versions[0])
    flaky = FlakyStore(store, seed=seed, drop=0.3, truncate_read=0.1)

    def work() -> None:
        with Publisher(store) as publisher:
            for weights in versions:
                publisher.publish(weights).result(WAIT)
                time.sleep(0.005)

    trainer = threading.Thread(target=work)
    trainer.start()
    for version in following(Replica(flaky, heartbeat=0), live, 14):
        assert same(live, versions[version])
    trainer.join()
    # a follower that was slow has asked for little
    while not (flaky.injected["drop_before"] and flaky.injected["truncate_read"]):
        with suppress(DeltawireError):
            Replica(flaky, heartbeat=0).sync(live)
        assert same(live, versions[14])


def test_a_manifest_that_arrives_before_its_data(store: Store) -> None:
    """A bucket that shows puts late and out of order: the follower waits, and gets there."""
    versions = history(12)
    flaky = FlakyStore(store, seed=3, reorder=0.5, max_late=6)
    live = blank(versions[0])

    def work() -> None:
        with Publisher(flaky) as publisher:
            for weights in versions:
                publisher.publish(weights).result(WAIT)
                time.sleep(0.004)
        flaky.settle()

    trainer = threading.Thread(target=work)
    trainer.start()
    for version in following(Replica(store, heartbeat=0), live, 11):
        assert same(live, versions[version])
    trainer.join()
    assert flaky.injected["reorder"]


def test_each_line_of_the_log_has_the_bytes_of_its_own_link(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "deltawire")
    versions = history(3)
    publish(store, versions, anchor_ratio=1e9)
    Replica(store, heartbeat=0).sync(blank(versions[0]))
    logged = {record.args[1]: record.args[3] * 1e6 for record in caplog.records if "MB  %.0f ms" in record.msg}
    run = Run.open(store)
    assert logged == {n: pytest.approx(sum(link.bytes for link in run.manifest(n).links)) for n in range(3)}


def test_follow_outlives_a_bad_delta(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "deltawire")
    versions = history(5)
    publish(store, versions[:3], anchor_ratio=1e9)
    live = copy(versions[1])
    key = delta_key(store, 2)
    good = store.get(key).data
    spoil(store, key)
    stop = threading.Event()
    replica = Replica(store, heartbeat=0.001, id="r")
    seen: list[int] = []

    def work() -> None:
        seen.extend(replica.follow(live, poll=0.005, stop=stop))

    follower = threading.Thread(target=work)
    follower.start()
    deadline = time.monotonic() + WAIT
    beat: dict[str, Any] = {"healthy": True}
    # the log comes first, then the heartbeat
    while beat["healthy"] and time.monotonic() < deadline:
        time.sleep(0.005)
        if "still at version 1" in caplog.text:
            beat = json.loads(store.get(keys.replica("r")).data)
    assert same(live, versions[1])
    assert (beat["version"], beat["newest"], beat["healthy"]) == (1, 2, False)
    assert "hash" in beat["error"]
    # repaired: it goes on by itself
    store.put(key, good)
    while 2 not in seen and time.monotonic() < deadline:
        time.sleep(0.005)
    publish(store, versions[3:])
    while 4 not in seen and time.monotonic() < deadline:
        time.sleep(0.005)
    stop.set()
    follower.join()
    assert seen[-1] == 4
    assert same(live, versions[4])
    beat = json.loads(store.get(keys.replica("r")).data)
    assert (beat["version"], beat["healthy"], "error" in beat) == (4, True, False)


def test_follow_outlives_a_delta_for_another_model(store: Store) -> None:
    """A hostile object that names tensors this run does not have is trouble like any other."""
    versions = history(3)
    publish(store, versions[:2], anchor_ratio=1e9)
    from blake3 import blake3
    from safetensors.numpy import save

    info = json.loads(store.get(keys.RUN).data)
    data = save(
        {"other.indices": np.zeros(1, np.int32), "other.values": np.zeros(1, np.float32)},
        {"run": info["run"], "base_version": "0", "model_version": "1", "encoding": "raw"},
    )
    manifest = json.loads(store.get(keys.manifest(1)).data)
    entry = manifest["links"][0]["objects"][0]
    entry.update(size=len(data), hash=blake3(data).hexdigest(length=16))
    store.put(entry["key"], data)
    store.put(keys.manifest(1), json.dumps(manifest).encode())
    live = copy(versions[0])
    replica = Replica(store, heartbeat=0)
    replica.sync(live, 0)
    stop = threading.Event()
    threading.Timer(0.2, stop.set).start()
    assert [*replica.follow(live, poll=0.005, stop=stop)] == []
    assert same(live, versions[0])


def test_follow_refuses_another_model(store: Store) -> None:
    publish(store, history(1))
    with pytest.raises(SchemaMismatch):
        next(Replica(store, heartbeat=0).follow({"w": np.zeros(3, np.float32)}, poll=0.001))


def test_follow_finds_a_version_that_head_does_not_name(store: Store) -> None:
    """Its writer died between the manifest and head, and nobody published since."""
    versions = history(3)
    publish(store, versions[:2])
    live = blank(versions[0])
    replica = Replica(store, heartbeat=0)
    follower = replica.follow(live, poll=0.001)
    assert next(follower) == 1
    head = store.get(keys.HEAD).data
    publish(store, versions[2:])
    store.put(keys.HEAD, head)
    assert next(follower) == 2
    assert same(live, versions[2])


def test_sync_says_when_the_bucket_is_away(store: Store) -> None:
    versions = history(2)
    publish(store, versions)
    down = False

    def hook(moment: str, verb: str, key: str) -> None:
        if down:
            raise StoreUnavailable("away")

    live = copy(versions[0])
    replica = Replica(HookedStore(store, hook), heartbeat=0)
    replica.sync(live, 0)
    down = True
    with pytest.raises(StoreUnavailable):
        replica.sync(live)
    assert same(live, versions[0])
    assert replica.version == 0
    down = False
    assert replica.sync(live) == 1


@pytest.mark.parametrize("seed", range(4))
def test_sync_through_retries(store: Store, seed: int) -> None:
    versions = history(10, seed=seed)
    publish(store, versions, anchor_every=4)
    flaky = FlakyStore(store, seed=seed, drop=0.2, delay=0.2, truncate_read=0.02)
    live = blank(versions[0])
    replica = Replica(Retrying(flaky, attempts=20, sleep=lambda s: None), heartbeat=0)
    reached = 0
    for version in range(10):
        try:
            replica.sync(live, version)
            reached += 1
        except Exception:
            # a JSON cut by the network is no reason to retry for a store: it is one for the caller
            assert replica.version is None or same(live, versions[replica.version])
            continue
        assert same(live, versions[version])
    assert reached >= 5


def test_no_run_yet(store: Store) -> None:
    live = model()
    kept = copy(live)
    with pytest.raises(RunNotFound):
        Replica(store).sync(live)
    assert same(live, kept)
    assert not [*store.list()]
