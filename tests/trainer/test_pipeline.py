"""Runs over time: anchors, references, resuming, and two trainers that want the same run."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deltawire.bucket.run import Run
from deltawire.bucket.verify import verify
from deltawire.core import full, keys
from deltawire.core.digest import StateDigest
from deltawire.core.errors import (
    DigestMismatch,
    DivergedRun,
    Misconfigured,
    MissingBase,
    ReferenceUnavailable,
    SchemaMismatch,
    WriterConflict,
)
from deltawire.core.manifest import Summary, SummaryLink
from deltawire.core.schema import Schema
from deltawire.core.state import State
from deltawire.models import ModelView
from deltawire.replica import Replica
from deltawire.store import LocalStore, Store
from deltawire.trainer import Publisher, claim
from deltawire.trainer.captures import Capture, Captures, Weights
from deltawire.trainer.claim import Claim
from deltawire.trainer.detectors import HostDetector
from deltawire.trainer.policy import AnchorPolicy
from support import (
    HookedStore,
    Model,
    blank,
    copy,
    densities,
    history,
    model,
    moved_bag,
    publish,
    random_bag,
    same,
    schemas,
    seeds,
    trained,
    verified,
)

WAIT = 120


def kinds(store: Store) -> list[str]:
    """Per version, the links it has: a for an anchor, d for a delta, r for a reference."""
    run = Run.open(store)
    newest = run.newest()
    assert newest is not None
    letters = []
    for version in range(newest + 1):
        links = run.manifest(version).links
        letters.append("".join("s" if x.kind == "delta" and x.base != version - 1 else x.kind[0] for x in links))
    return letters


# ── anchors ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def summaries(*versions: list[tuple[str, int | None, int]]) -> dict[int, Summary]:
    return {
        v: Summary(v, v - 1 if v else None, "", 0.0, None, 0, tuple(SummaryLink(k, b, n, 1, "") for k, b, n in links))
        for v, links in enumerate(versions)
    }


def test_the_first_version_is_an_anchor(store: Store) -> None:
    publish(store, history(1))
    assert kinds(store) == ["a"]


def test_policy_counts_what_a_newcomer_would_replay() -> None:
    policy = AnchorPolicy(ratio=1.0)
    known = summaries([("anchor", None, 1000)], [("delta", 0, 400)], [("delta", 1, 400)])
    assert not policy.wants_anchor(3, 200, 1000, known)
    assert policy.wants_anchor(3, 201, 1000, known)
    assert AnchorPolicy(ratio=0.5).wants_anchor(3, 1, 1000, known)
    assert not AnchorPolicy(ratio=10).wants_anchor(3, 5000, 1000, known)
    # what counts are the bytes since the last anchor
    known = summaries([("anchor", None, 1000)], [("delta", 0, 900)], [("delta", 1, 50), ("anchor", None, 1000)])
    assert not policy.wants_anchor(3, 900, 1000, known)
    assert AnchorPolicy().wants_anchor(0, 0, 1000, {})


@pytest.mark.parametrize("changed", [0.3, 0.7, 1.0])
def test_dense_training_costs_no_more_than_full_weights(store: Store, changed: float) -> None:
    """Weights drawn anew, the worst that a delta can meet."""
    draw = np.random.default_rng(0)
    weights = draw.normal(size=100_000).astype(np.float16)
    with Publisher(store) as publisher:
        for _ in range(9):
            publisher.publish({"w": weights}, wait=True)
            anew = draw.random(weights.size) < changed
            weights = np.where(anew, draw.normal(size=weights.size), weights).astype(np.float16)
    put = sum(entry.size for entry in store.list() if entry.key.endswith(".safetensors"))
    assert put <= 9 * (weights.nbytes + 1000)


def test_policy_with_a_fixed_cadence() -> None:
    policy = AnchorPolicy(every=3, ratio=1e9)
    known = summaries([("anchor", None, 10)], [("delta", 0, 1)], [("delta", 1, 1)])
    assert not policy.wants_anchor(2, 1, 10, {0: known[0], 1: known[1]})
    assert policy.wants_anchor(3, 1, 10, known)


def test_a_fixed_cadence_in_a_run(store: Store) -> None:
    publish(store, history(10), anchor_every=3, anchor_ratio=1e9)
    assert kinds(store) == ["a", "d", "d", "da", "d", "d", "da", "d", "d", "da"]


@pytest.mark.parametrize("every", [0, -1])
def test_a_cadence_that_is_none_is_refused(store: Store, every: int) -> None:
    with pytest.raises(Misconfigured, match=f"anchor_every={every}"):
        Publisher(store, anchor_every=every)


def test_the_ratio_in_a_run(store: Store) -> None:
    """An anchor as soon as replaying the deltas since the last one would cost more than it."""
    versions = [model(rows=300)]
    while len(versions) < 25:
        versions.append(trained(versions[-1], len(versions), changes=200))
    publish(store, versions)
    run = Run.open(store)
    since = 0
    for version in range(1, 25):
        links = {link.kind: link for link in run.manifest(version).links}
        since += links["delta"].bytes
        assert ("anchor" in links) == (since > run.schema.nbytes), version
        if "anchor" in links:
            since = 0
    assert sum("a" in k for k in kinds(store)) >= 3
    verified(store, versions)


def test_a_dense_change_is_an_anchor_only(store: Store) -> None:
    versions = [model(1), model(2), trained(model(2), 3)]
    published = publish(store, versions)
    assert published[1].kinds == ("anchor",)
    assert kinds(store)[:2] == ["a", "a"]
    verified(store, versions)
    live = copy(versions[0])
    replica = Replica(store, heartbeat=0)
    replica.sync(live, 0)
    assert replica.sync(live, 1) == 1
    assert same(live, versions[1])


def test_the_cadence_counts_after_a_resume(store: Store) -> None:
    versions = history(7)
    publish(store, versions[:2], anchor_every=3, anchor_ratio=1e9)
    publish(store, versions[2:5], anchor_every=3, anchor_ratio=1e9)
    publish(store, versions[5:], anchor_every=3, anchor_ratio=1e9)
    assert kinds(store) == ["a", "d", "d", "da", "d", "d", "da"]


# ── references ───────────────────────────────────────────────────────────────────────────────────────────────────────


def folder(path: Path, weights: Model) -> Path:
    path.mkdir()
    with patch.object(full, "SHARD_BYTES", 600):
        full.write_checkpoint(path, ModelView(weights))
    return path


def test_a_reference_saves_the_first_upload(store: Store, tmp_path: Path) -> None:
    versions = history(4)
    base = folder(tmp_path / "base", versions[0])
    publish(store, versions[1:], reference=base, anchor_ratio=1e9)
    assert kinds(store) == ["r", "d", "d", "d"]
    assert not [*store.list("anchors/")]
    verified(store, versions)
    # a replica on this machine finds the folder by the name the run has for it
    live = blank(versions[0])
    assert Replica(store, heartbeat=0).sync(live) == 3
    assert same(live, versions[3])
    assert verify(Run.open(store)).ok


def test_a_replica_is_told_where_the_reference_is(store: Store, tmp_path: Path) -> None:
    versions = history(3)
    base = folder(tmp_path / "base", versions[0])
    publish(store, versions[1:], reference=base, anchor_ratio=1e9)
    moved = base.rename(tmp_path / "elsewhere")
    live = blank(versions[0])
    with pytest.raises(ReferenceUnavailable):
        Replica(store, heartbeat=0).sync(live)
    assert same(live, blank(live))
    assert Replica(store, heartbeat=0, reference=moved).sync(live) == 2
    assert same(live, versions[2])


def test_a_replica_that_holds_the_reference_needs_no_folder(store: Store, tmp_path: Path) -> None:
    versions = history(3)
    base = folder(tmp_path / "base", versions[0])
    publish(store, versions[1:], reference=base, anchor_ratio=1e9)
    base.rename(tmp_path / "gone")
    live = copy(versions[0])
    assert Replica(store, heartbeat=0).sync(live) == 2
    assert same(live, versions[2])


def test_a_reference_that_is_not_the_one(store: Store, tmp_path: Path) -> None:
    """Same shapes, other weights: found by the digest, before a weight is touched."""
    versions = history(3)
    publish(store, versions[1:], reference=folder(tmp_path / "base", versions[0]), anchor_ratio=1e9)
    other = folder(tmp_path / "other", model(99))
    live = blank(versions[0])
    with pytest.raises(DigestMismatch):
        Replica(store, heartbeat=0, reference=other).sync(live)
    assert same(live, blank(live))
    wrong = folder(tmp_path / "wrong", model(0, rows=3))
    with pytest.raises(SchemaMismatch):
        Replica(store, heartbeat=0, reference=wrong).sync(live)


def test_an_anchor_frees_newcomers_from_the_reference(store: Store, tmp_path: Path) -> None:
    versions = history(4)
    base = folder(tmp_path / "base", versions[0])
    publish(store, versions[1:], reference=base, anchor_every=2, anchor_ratio=1e9)
    assert kinds(store) == ["r", "d", "da", "d"]
    base.rename(tmp_path / "gone")
    live = blank(versions[0])
    assert Replica(store, heartbeat=0).sync(live) == 3
    assert same(live, versions[3])


def test_a_reference_that_cannot_be_had_when_publishing(store: Store, tmp_path: Path) -> None:
    with pytest.raises(ReferenceUnavailable), Publisher(store, reference=tmp_path / "nowhere") as publisher:
        publisher.publish(model())


def test_a_reference_of_another_model_when_publishing(store: Store, tmp_path: Path) -> None:
    base = folder(tmp_path / "base", model(0, rows=3))
    with pytest.raises(SchemaMismatch), Publisher(store, reference=base) as publisher:
        publisher.publish(model())


def test_a_reference_that_spells_a_tied_tensor_out(store: Store, tmp_path: Path) -> None:
    """transformers leaves tied heads out of a checkpoint, others write them twice: both are the same model."""
    shared = np.random.default_rng(0).integers(0, 1 << 16, (500, 8), np.uint16)
    tied = {"embed": shared, "head": shared}
    base = folder(tmp_path / "base", {"embed": shared, "head": shared.copy()})
    new = {"embed": shared ^ np.uint16(1)}
    new["head"] = new["embed"]
    assert ModelView(tied).schema.ties
    publish(store, [new], reference=base, anchor_ratio=1e9)
    live = blank({"embed": shared})
    live["head"] = live["embed"]
    assert Replica(store, heartbeat=0).sync(live) == 1
    assert same(live, new)


def test_a_tied_run_on_a_replica_that_does_not_tie(store: Store) -> None:
    """And the other way round: what is tied in the run is written to every name a model has for it."""
    shared = np.arange(4000, dtype=np.uint16).reshape(1000, 4)
    first, second = {"embed": shared, "head": shared}, {}
    second["embed"] = second["head"] = shared + np.uint16(1)
    assert publish(store, [first, second], anchor_ratio=1e9)[1].kinds == ("delta",)
    untied = {"embed": np.zeros_like(shared), "head": np.zeros_like(shared)}
    replica = Replica(store, heartbeat=0)
    for version, expected in enumerate((first, second)):
        assert replica.sync(untied, version) == version
        assert same(untied, expected)
    without = {"embed": np.zeros_like(shared)}
    assert Replica(store, heartbeat=0).sync(without) == 1
    assert same(without, {"embed": second["embed"]})


# ── resuming ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_same_weights_are_adopted_without_a_download(store: Store) -> None:
    versions = history(4)
    publish(store, versions[:2])
    gets: list[str] = []
    hooked = HookedStore(store, lambda moment, verb, key: gets.append(key) if verb in ("get", "get_range") else None)
    with Publisher(hooked) as publisher:
        assert publisher.version == 1
        publisher.publish(versions[1]).result(WAIT)
        publisher.publish(versions[2]).result(WAIT)
    assert not [key for key in gets if key.startswith(("anchors/", "deltas/"))]
    verified(store, [*versions[:2], versions[1], versions[2]])


def test_other_weights_continue_from_what_the_bucket_has(store: Store) -> None:
    """A trainer restarted from an older checkpoint, or from anywhere: the delta is against the newest version."""
    versions = history(5)
    publish(store, versions[:3])
    back = trained(versions[0], 77)
    publish(store, [back, versions[4]])
    verified(store, [*versions[:3], back, versions[4]])


def test_resume_says_whether_these_are_the_newest_weights(store: Store) -> None:
    versions = history(3)
    publish(store, versions)
    with Publisher(store) as publisher:
        with pytest.raises(DivergedRun, match="is at version 2; these weights are version 1"):
            publisher.resume(versions[1])
        with pytest.raises(DivergedRun, match="no version of it"):
            publisher.resume(trained(versions[2], 5))
        assert publisher.resume(versions[2]) == 2
        publisher.publish(trained(versions[2], 6)).result(WAIT)
    verified(store, [*versions, trained(versions[2], 6)])


def test_resume_of_nothing(store: Store) -> None:
    with Publisher(store) as publisher, pytest.raises(DivergedRun, match="no version"):
        publisher.resume(model())


def test_another_model_is_refused(store: Store) -> None:
    publish(store, history(2))
    other = {"w": np.zeros(4, np.float32)}
    with Publisher(store) as publisher:
        with pytest.raises(SchemaMismatch):
            publisher.publish(other)
        with pytest.raises(SchemaMismatch):
            publisher.resume(other)
    assert Run.open(store).newest() == 1
    # nor with the same names in another dtype
    with pytest.raises(SchemaMismatch), Publisher(store) as publisher:
        publisher.publish({**model(), "scale": np.array(1, np.float16)})


def test_a_torch_trainer_resumes_a_numpy_run(store: Store) -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 16, (6, 5), np.uint16)
    publish(store, [{"weight": bits}])
    layer = torch.nn.Linear(5, 6, bias=False).bfloat16()
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16))
    with Publisher(store) as publisher:
        assert publisher.resume(layer) == 0
        with torch.no_grad():
            layer.weight[0, 0] = 1.0
        assert publisher.publish(layer).result(WAIT).changed == 1


def test_a_run_that_crashed_between_data_and_manifest(store: Store) -> None:
    """What no manifest names is garbage, whatever its name."""
    versions = history(3)
    publish(store, versions[:2])
    store.put(keys.delta(1, 2, "deadbeef"), b"half of a delta")
    store.put(keys.history(16), b"{")
    publish(store, versions[2:])
    verified(store, versions)


def test_a_head_left_behind_by_a_crash(store: Store) -> None:
    versions = history(5)
    publish(store, versions[:4])
    head = store.get(keys.HEAD).data.replace(b'"version":3', b'"version":1')
    store.put(keys.HEAD, head)
    published = publish(store, versions[4:])
    assert published[0].version == 4
    verified(store, versions)


# ── two writers ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("wait", [False, True], ids=["background", "streamed"])
def test_the_second_live_writer_loses_cleanly(store: Store, wait: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = history(6)
    publish(store, versions[:1])
    first, second = Publisher(store), Publisher(store)
    # whatever the claim says, the manifest is the last word
    monkeypatch.setattr(Claim, "check", lambda claim: None)
    first.publish(versions[1], wait=wait).result(WAIT)
    with pytest.raises(WriterConflict, match="another writer committed version 1"):
        second.publish(model(50), wait=wait).result(WAIT)
    # it stays lost, and says so every time
    for _ in range(2):
        with pytest.raises(WriterConflict):
            second.publish(model(51), wait=wait).result(WAIT)
    if not wait:
        with pytest.raises(WriterConflict):
            second.close()
    for weights in versions[2:]:
        first.publish(weights, wait=wait).result(WAIT)
    first.close()
    verified(store, versions)
    assert verify(Run.open(store)).ok


def test_a_writer_that_was_replaced_loses(store: Store) -> None:
    """A job that was thought dead comes back: the one that took over goes on, the other is told."""
    versions = history(20)
    old = Publisher(store)
    for weights in versions[:16]:
        old.publish(weights).result(WAIT)
    new = Publisher(store)
    # version 16 also writes a page of history: the loser must not spoil it
    new.publish(versions[16]).result(WAIT)
    with pytest.raises(WriterConflict):
        old.publish(model(99)).result(WAIT)
    for weights in versions[17:]:
        new.publish(weights).result(WAIT)
    new.close()
    verified(store, versions)
    assert verify(Run.open(store)).ok


def test_many_writers_race_for_every_version(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each opens the run anew after a conflict, as a restarted job would. Every version is somebody's, whole, also if
    no claim kept them apart."""
    monkeypatch.setattr(Claim, "check", lambda claim: None)
    candidates: dict[str, Model] = {}
    lock = threading.Lock()
    errors: list[BaseException] = []

    def race(me: int) -> None:
        try:
            for attempt in range(6):
                weights = trained(model(0), 1000 * me + attempt)
                with lock:
                    candidates[str(full.digest_of(ModelView(weights), threads=1))] = weights
                publisher = Publisher(store)
                try:
                    publisher.publish(weights).result(WAIT)
                    publisher.close()
                except WriterConflict:
                    pass
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=race, args=(me,)) for me in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    run = Run.open(store)
    count = verified(store, lambda version: candidates[run.manifest(version).digest])
    assert count >= 6
    assert verify(run).ok


def test_of_two_that_create_the_run_one_wins(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    schema = ModelView(model()).schema
    runs: list[Run] = []
    threads = [threading.Thread(target=lambda: runs.append(Run.create(store, schema))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({run.info.run for run in runs}) == 1


def test_a_rerun_under_the_same_name_is_another_run(tmp_path: Path) -> None:
    """Somebody empties the folder and trains again: a replica of the old run must not mix the two."""
    import shutil

    versions = history(4)
    publish(tmp_path / "run", versions[:2], anchor_ratio=1e9)
    live = blank(versions[0])
    replica = Replica(tmp_path / "run", heartbeat=0)
    replica.sync(live)
    shutil.rmtree(tmp_path / "run")
    publish(tmp_path / "run", history(4, seed=5), anchor_ratio=1e9)
    from deltawire.core.errors import ForeignObject

    with pytest.raises((ForeignObject, MissingBase)):
        replica.sync(live)
    assert same(live, versions[1])
    # a new replica takes what is there
    assert Replica(tmp_path / "run", heartbeat=0).sync(live) == 3


# ── captures ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@given(
    schema=schemas(),
    seed=seeds,
    moves=st.lists(st.tuples(st.sampled_from(["capture", "merge", "settle", "fold"]), densities, seeds), max_size=12),
)
def test_any_pending_state_can_be_read_from_the_one_copy(
    schema: Schema, seed: int, moves: list[tuple[str, float, int]]
) -> None:
    """Captures come, merge, settle and fold in any order; each pending one must still give its weights and digest."""
    newest = random_bag(schema, seed)
    captures = Captures(HostDetector().holding(State(schema)), StateDigest())
    captures.settle(captures.capture(newest, 1 << 30))
    pending: list[tuple[Capture, Any, Any]] = []  # (capture, weights before, weights after)
    for move, density, step in moves:
        if move in ("capture", "merge"):
            before, newest = newest, moved_bag(newest, step, density)
            if move == "merge" and pending:
                last, first_before, _ = pending.pop()
                both = captures.capture(newest, 1 << 30)
                captures.fold(last, both)
                pending.append((both, first_before, newest))
            else:
                pending.append((captures.capture(newest, 1 << 30), before, newest))
        elif move == "settle" and pending:
            capture, _, _ = pending.pop(0)
            captures.settle(capture)
        elif move == "fold" and len(pending) > 1:
            (a, before, _), (b, _, after) = pending[0], pending[1]
            captures.fold(a, b)
            pending[:2] = [(b, before, after)]
        for capture, before, after in pending:
            assert capture.digest() == after.digest()
            for block in captures.plan:
                for region in block:
                    assert capture.weights(region).tolist() == after.region(region).tolist()
                    assert Weights(captures, capture, undone=True)(region).tolist() == before.region(region).tolist()
            shift = sum((c.digest() for block in capture.result().blocks for c in block), StateDigest())
            assert capture.result().shift == shift
    assert captures.digest == newest.digest()


def test_continuing_a_run_by_accident_is_logged(
    store: Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = history(3)
    publish(store, versions[:2])
    assert not [r for r in caplog.records if r.levelname == "WARNING"]
    publish(store, [versions[1], versions[2]])  # starts from what is there: a training that goes on
    publish(store, [trained(versions[2], 5)], continues=True)
    assert not [r for r in caplog.records if r.levelname == "WARNING"]
    publish(store, history(2, seed=8))  # by a publisher of this process, as in a notebook
    assert not [r for r in caplog.records if r.levelname == "WARNING"]
    monkeypatch.setattr(claim, "_marks", set())
    publish(store, history(2, seed=9))
    said = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(said) == 1
    assert "is at version 6" in said[0]
    assert "an address of its own" in said[0]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_metric_that_is_no_number_does_not_spoil_the_run(store: Store, value: float) -> None:
    with Publisher(store) as publisher:
        publisher.publish(history(1)[0], metrics={"loss": value, "reward": 1.0}).result(60)
    assert Run.open(store).manifest(0).metrics == {"reward": 1.0}
