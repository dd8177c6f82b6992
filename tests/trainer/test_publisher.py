"""What a trainer sees: publish returns at once, every version is exactly what was published, nothing is lost."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deltawire.bucket.replay import checkout
from deltawire.bucket.run import Run
from deltawire.bucket.verify import verify
from deltawire.core import full, keys
from deltawire.core.change import regions
from deltawire.core.codecs import ENCODINGS
from deltawire.core.errors import (
    PublisherClosed,
    PublishFailed,
    SchemaMismatch,
    StoreUnavailable,
    UnknownFormat,
    UnsafeName,
    UnsupportedDtype,
)
from deltawire.models import ModelView, torch_bits
from deltawire.replica import Replica
from deltawire.store import LocalStore, Retrying, Store
from deltawire.trainer import Publisher, SnapshotDetector, captures, pipeline
from deltawire.trainer.captures import Captures
from flaky_store import FlakyStore
from support import (
    HookedStore,
    Model,
    blank,
    copy,
    held,
    history,
    model,
    opened,
    publish,
    same,
    trained,
    verified,
)

WAIT = 120


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(30, 16)
        self.norm = torch.nn.BatchNorm1d(16)
        self.head = torch.nn.Linear(16, 30, bias=False)
        self.head.weight = self.embed.weight


def net_bits(module: torch.nn.Module) -> dict[str, bytes]:
    return {name: torch_bits(tensor).tobytes() for name, tensor in module.state_dict().items()}


def as_torch(weights: Model) -> dict[str, torch.Tensor]:
    tensors = {name: torch.from_numpy(array.copy()) for name, array in weights.items()}
    return {name: t.view(torch.bfloat16) if t.dtype == torch.uint16 else t for name, t in tensors.items()}


def shake(module: torch.nn.Module, seed: int, share: float = 0.05) -> None:
    """A training step, as far as bits are concerned."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for tensor in module.state_dict().values():
            if tensor.is_floating_point():
                tensor += (torch.rand(tensor.shape) < share) * 0.5
            else:
                tensor += 1


# ── what can be published ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_numpy_mappings(store: Store, encoding: str) -> None:
    versions = history(6)
    published = publish(store, versions, encoding=encoding)
    assert [p.version for p in published] == [0, 1, 2, 3, 4, 5]
    assert verified(store, versions) == 6
    assert all(p.digest == str(full.digest_of(ModelView(w))) for p, w in zip(published, versions, strict=True))


def test_a_torch_module(store: Store) -> None:
    net = Net().bfloat16()
    seen = []
    with Publisher(store) as publisher:
        for step in range(4):
            publisher.publish(net, step=step).result(WAIT)
            seen.append(net_bits(net))
            shake(net, step)
    assert Run.open(store).schema.ties == {"head.weight": "embed.weight"}
    for version, bits in enumerate(seen):
        other = Net().bfloat16()
        assert Replica(store, heartbeat=0).sync(other, version) == version
        assert net_bits(other) == bits
        assert other.head.weight is other.embed.weight


def test_a_real_optimizer_step(store: Store) -> None:
    """AdamW with fp32 weights at a small learning rate, bf16 on the wire: a small part changes, and the replica has
    every bit of it."""
    torch.manual_seed(0)

    def build() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))

    net, live = build(), build().bfloat16()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-5)
    replica = Replica(store, heartbeat=0)
    with Publisher(store, wire_dtype="bf16") as publisher:
        for step in range(5):
            result = publisher.publish(net).result(WAIT)
            assert replica.sync(live) == step
            assert net_bits(live) == {n: torch_bits(t.bfloat16()).tobytes() for n, t in net.state_dict().items()}
            data = torch.randn(8, 64)
            (net(data) - data).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert 0 < result.changed < 0.3 * sum(p.numel() for p in net.parameters())


def test_a_state_dict(store: Store) -> None:
    net = Net()
    with Publisher(store) as publisher:
        publisher.publish(net.state_dict()).result(WAIT)
    other = Net()
    Replica(store, heartbeat=0).sync(other.state_dict())
    # a state dict shares its module's memory, and travels as the module would
    assert net_bits(other) == net_bits(net.bfloat16().float())


@pytest.mark.parametrize("wire", ["bf16", "fp16"])
def test_an_fp32_module_travels_in_the_wire_dtype(store: Store, wire: str) -> None:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[wire]
    net = Net()
    with Publisher(store, wire_dtype=wire) as publisher:
        first = publisher.publish(net).result(WAIT)
        with torch.no_grad():
            # below the wire's resolution: nothing to send
            net.embed.weight *= 1 + 2.0**-20
        quiet = publisher.publish(net).result(WAIT)
        shake(net, 1)
        publisher.publish(net).result(WAIT)
    names = {t.name: t.dtype for t in Run.open(store).schema.tensors}
    assert names["embed.weight"] == {"bf16": "BF16", "fp16": "F16"}[wire]
    assert names["norm.num_batches_tracked"] == "I64"
    assert first.changed > quiet.changed
    assert quiet.changed < 30 * 16 * 0.05
    other = Net().to(dtype)
    Replica(store, heartbeat=0).sync(other)
    expected = {n: t.to(dtype) if t.is_floating_point() else t for n, t in net.state_dict().items()}
    assert net_bits(other) == {n: torch_bits(t).tobytes() for n, t in expected.items()}
    assert net.embed.weight.dtype == torch.float32, "the trainer's weights are left alone"


def test_a_wire_dtype_that_does_not_exist(store: Store) -> None:
    with pytest.raises(UnsupportedDtype, match="known: auto"):
        Publisher(store, wire_dtype="fp4")


def test_a_checkpoint_folder(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(full, "SHARD_BYTES", 500)
    versions = history(3)
    with Publisher(store) as publisher:
        for step, weights in enumerate(versions):
            folder = tmp_path / str(step)
            folder.mkdir()
            full.write_checkpoint(folder, ModelView(weights))
            publisher.publish(full.Checkpoint(folder), wait=True)
    verified(store, versions)


def test_a_path_and_a_url_name_the_same_run(tmp_path: Path) -> None:
    versions = history(3)
    publish(tmp_path / "run", versions[:1])
    publish((tmp_path / "run").as_uri(), versions[:2][1:])
    publish(str(tmp_path / "run"), versions[2:])
    assert verified(LocalStore(tmp_path / "run"), versions) == 3
    live = blank(versions[0])
    assert Replica(tmp_path / "run").sync(live) == 2


def test_an_unknown_encoding_is_refused_at_once(store: Store) -> None:
    with pytest.raises(UnknownFormat):
        Publisher(store, encoding="psychic")


def test_weights_that_do_not_change_make_an_empty_version(store: Store) -> None:
    weights = model(rows=2000)
    published = publish(store, [weights, weights])
    assert published[1].changed == 0
    assert published[1].kinds == ("delta",)
    assert published[1].digest == published[0].digest
    verified(store, [weights, weights])


def test_a_weight_that_comes_back_does_not_travel_twice(store: Store) -> None:
    a = model(rows=500)
    b = trained(a, 1)
    publish(store, [a, b, a, b])
    verified(store, [a, b, a, b])


# ── what it says ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_step_metrics_and_timings_are_in_the_manifest(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "deltawire")
    versions = history(2)
    with Publisher(store, files={"config.json": b'{"architectures": ["Toy"]}'}) as publisher:
        publisher.publish(versions[0]).result(WAIT)
        handle = publisher.publish(versions[1], step=40, metrics={"reward": 0.25, "loss": np.float32(2)})
        publisher.flush(WAIT)
        assert handle.done()
        assert publisher.version == 1
    run = Run.open(store)
    manifest = run.manifest(1)
    assert run.info.model == "Toy"
    assert (manifest.step, manifest.metrics, manifest.parent) == (40, {"reward": 0.25, "loss": 2.0}, 0)
    assert {"held", "encode", "put"} <= manifest.timings.keys()
    count = sum(int((versions[0][n] != versions[1][n]).sum()) for n in versions[0])
    assert manifest.changed == handle.result().changed == count
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("v1 ")]
    assert len(lines) == 1
    assert "← v0" in lines[0]


def test_step_and_metrics_are_those_of_the_call(store: Store) -> None:
    """Where the caller goes on with the same dictionary while an upload waits; numbers of any kind."""
    may_go_on, metrics = threading.Event(), {"loss": torch.tensor(0.5)}

    def uploading(when: str, verb: str, key: str) -> None:
        if key.startswith(keys.ANCHORS):
            may_go_on.wait(WAIT)

    with Publisher(HookedStore(store, uploading)) as publisher:
        publisher.publish(model(), step=np.int64(40), metrics=metrics)
        metrics["loss"] += 1
        metrics["reward"] = torch.tensor(2.0)
        may_go_on.set()
        publisher.flush(WAIT)
        for wrong in ("40", 1.5):
            with pytest.raises(TypeError):
                publisher.publish(model(), step=wrong)  # type: ignore[arg-type]
    manifest = Run.open(store).manifest(0)
    assert (manifest.step, manifest.metrics) == (40, {"loss": 0.5})


def test_progress_is_reported(store: Store) -> None:
    told: dict[str, int] = {}
    total: dict[str, int] = {}

    def progress(phase: str, count: int, of: int) -> None:
        told[phase] = told.get(phase, 0) + count
        total[phase] = of

    weights = model()
    with Publisher(store) as publisher:
        result = publisher.publish(weights, wait=True, progress=progress).result()
    assert told["detect"] == sum(a.nbytes for a in weights.values())
    assert told["put"] == result.bytes
    told.clear()
    with Publisher(store, anchor_every=1, continues=True) as publisher:
        result = publisher.publish(trained(weights, 1), wait=True, progress=progress).result()
    assert result.kinds == ("delta", "anchor")
    assert told["put"] == result.bytes
    assert told.keys() == {"fetch", "detect", "put"}
    assert told == total, "every bar knows how much there is"


def test_companion_files_travel_once(store: Store) -> None:
    puts = []
    hooked = HookedStore(
        store, lambda moment, verb, key: puts.append(key) if (moment, verb) == ("before", "put") else None
    )
    versions = history(3)
    publish(hooked, versions, files={"config.json": b"{}", "chat_template.jinja": b"hello"})
    publish(hooked, [trained(versions[-1], 1)])
    assert sum(key.startswith("files/") for key in puts) == 2
    run = Run.open(store)
    for version in range(4):
        assert [file.name for file in run.manifest(version).files] == ["chat_template.jinja", "config.json"]


@pytest.mark.parametrize("name", ["model.py", "weights.bin", "../config.json", ".hidden.json"])
def test_what_may_not_go_with_the_weights(store: Store, name: str) -> None:
    with pytest.raises(UnsafeName), Publisher(store, files={name: b"x"}) as publisher:
        publisher.publish(model(), wait=True)


# ── the trainer goes on ──────────────────────────────────────────────────────────────────────────────────────────────


class Gate:
    """A hook that holds the first call that matches until it is opened."""

    def __init__(self, matches: Callable[[str, str, str], bool]) -> None:
        self.matches = matches
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, moment: str, verb: str, key: str) -> None:
        if not self.reached.is_set() and self.matches(moment, verb, key):
            self.reached.set()
            assert self.opened.wait(WAIT), "nobody opened the gate"


def test_publish_returns_before_the_upload_and_keeps_what_it_saw(store: Store) -> None:
    """The arrays are overwritten in place as soon as publish returns, as an optimizer does."""
    gate = Gate(lambda moment, verb, key: key.startswith("deltas/"))
    first, second = history(2)
    live = copy(first)
    with Publisher(HookedStore(store, gate)) as publisher:
        publisher.publish(live).result(WAIT)
        for name in live:
            live[name][...] = second[name]
        handle = publisher.publish(live)
        assert gate.reached.wait(WAIT)
        assert not handle.done()
        for array in live.values():
            array[...] = 77
        gate.opened.set()
        handle.result(WAIT)
    verified(store, [first, second])


def test_a_slow_bucket_makes_fewer_and_larger_versions(store: Store) -> None:
    gate = Gate(lambda moment, verb, key: key == keys.manifest(1))
    versions = history(13)
    with Publisher(HookedStore(store, gate)) as publisher:
        publisher.publish(versions[0], step=0).result(WAIT)
        handles = [publisher.publish(versions[1], step=1)]
        assert gate.reached.wait(WAIT)
        handles += [publisher.publish(weights, step=step) for step, weights in enumerate(versions[2:], 2)]
        assert not any(handle.done() for handle in handles)
        gate.opened.set()
        results = [handle.result(WAIT) for handle in handles]
    assert [r.version for r in results] == [1] + [2] * 11
    run = Run.open(store)
    assert run.newest() == 2
    assert run.manifest(2).step == 12
    assert verified(store, [versions[0], versions[1], versions[12]]) == 3
    assert verify(run).ok


@pytest.mark.parametrize("seed", range(3))
def test_any_mixture_of_publishing_and_waiting(store: Store, seed: int) -> None:
    """With a bucket that takes its time: every version is one of the published states, in order, up to the last."""
    rng = np.random.default_rng(seed)
    delays = iter(rng.exponential(0.002, 10_000))

    def slow(moment: str, verb: str, key: str) -> None:
        if moment == "before":
            time.sleep(next(delays))

    versions = history(40, seed=seed, changes=3)
    options: dict[str, Any] = {"anchor_every": 5} if seed else {}
    with Publisher(HookedStore(store, slow), **options) as publisher:
        handles = []
        for step, weights in enumerate(versions):
            wait = bool(rng.random() < 0.1)
            handles.append(publisher.publish(weights, step=step, wait=wait))
            if rng.random() < 0.3:
                time.sleep(rng.exponential(0.01))
        publisher.flush(WAIT)
        reached = [handle.result(0).version for handle in handles]
    run = Run.open(store)
    assert reached == sorted(reached)
    assert run.manifest(reached[-1]).step == 39
    steps = [run.manifest(v).step for v in range(reached[-1] + 1)]
    assert steps == sorted(set(steps))
    assert all(steps[version] >= step for step, version in enumerate(reached)), "a version carries its own publish"
    verified(store, lambda version: versions[steps[version]])
    assert verify(run).ok


def test_an_anchor_holds_the_state_of_its_version_though_the_trainer_is_ahead(store: Store) -> None:
    """The anchor of version 1 uploads slowly; meanwhile later publishes move the publisher's only copy on."""
    gate = Gate(lambda moment, verb, key: moment == "during" and key.startswith("anchors/step_000001"))
    versions = history(8, changes=50)
    with Publisher(HookedStore(store, gate), anchor_every=1) as publisher:
        publisher.publish(versions[0]).result(WAIT)
        publisher.publish(versions[1])
        assert gate.reached.wait(WAIT)
        for weights in versions[2:]:
            publisher.publish(weights)
        gate.opened.set()
        publisher.flush(WAIT)
    run = Run.open(store)
    anchor = run.manifest(1).link("anchor", None)
    blob = store.get(anchor.objects[0].key).data
    file = full.FullFile(lambda start, length: blob[start : start + length], len(blob))
    for tensor in run.schema.tensors:
        for region in regions(tensor):
            assert file.region(region).tobytes() == versions[1][tensor.name].tobytes()
    verified(store, [versions[0], versions[1], versions[7]])


# ── failures ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Broken:
    """A hook that fails every matching call while `down`."""

    def __init__(self, matches: Callable[[str, str, str], bool]) -> None:
        self.matches, self.down, self.failed = matches, False, 0

    def __call__(self, moment: str, verb: str, key: str) -> None:
        if self.down and self.matches(moment, verb, key):
            self.failed += 1
            raise StoreUnavailable(f"{verb} {key} {moment}")


PLACES: dict[str, Callable[[str, str, str], bool]] = {
    "before-the-delta": lambda moment, verb, key: moment == "before" and key.startswith("deltas/"),
    "in-the-delta": lambda moment, verb, key: moment == "during" and key.startswith("deltas/"),
    "after-the-delta": lambda moment, verb, key: moment == "after" and key.startswith("deltas/"),
    "before-the-anchor": lambda moment, verb, key: moment == "before" and key.startswith("anchors/"),
    "in-the-anchor": lambda moment, verb, key: moment == "during" and key.startswith("anchors/"),
    "before-the-page": lambda moment, verb, key: moment == "before" and key.startswith("history/"),
    "before-the-manifest": lambda moment, verb, key: moment == "before" and key.startswith("versions/"),
    "after-the-manifest": lambda moment, verb, key: (moment, verb) == ("after", "put_if_absent"),
}
EVERYDAY = ("in-the-delta", "before-the-manifest", "after-the-manifest")


@pytest.mark.parametrize(
    "how, place",
    [
        # at every place in the background; by the other ways, which share the rest, at three
        pytest.param(how, place, marks=[] if how == "background" or place in EVERYDAY else pytest.mark.slow)
        for how in ("background", "streamed", "snapshot")
        for place in PLACES
    ],
)
def test_a_failure_is_raised_once_and_then_nothing_is_lost(store: Store, place: str, how: str) -> None:
    """Version 16 needs a delta, an anchor, a page of history and a manifest: it fails at each, and the next publish
    carries what it should have."""
    broken = Broken(PLACES[place])
    versions = history(22, changes=3)
    given, wait = [as_torch(w) if how == "snapshot" else w for w in versions], how != "background"
    options: dict[str, Any] = {"detector": SnapshotDetector()} if how == "snapshot" else {}
    options |= {"anchor_every": 4, "anchor_ratio": 1e9}
    with Publisher(HookedStore(store, broken), **options) as publisher:
        for weights in given[:16]:
            publisher.publish(weights, wait=wait).result(WAIT)
        broken.down = True
        if wait:
            with pytest.raises(StoreUnavailable):
                publisher.publish(given[16], wait=True)
        else:
            lost = publisher.publish(given[16])
            with pytest.raises(StoreUnavailable):
                lost.result(WAIT)
            with pytest.raises(PublishFailed, match="Nothing is lost") as caught:
                publisher.publish(given[17])
            assert isinstance(caught.value.__cause__, StoreUnavailable)
        assert broken.failed
        broken.down = False
        results = [publisher.publish(w, step=s, wait=wait).result(WAIT) for s, w in enumerate(given[18:], 18)]
    run = Run.open(store)
    states = {result.version: versions[step] for step, result in enumerate(results, 18)}
    # where only the answer was lost the version is there, and is what was published
    states |= dict(enumerate(versions[: min(states)]))
    verified(store, lambda version: states[version])
    assert min(states) == 0
    assert results[-1].version == run.newest()
    assert verify(run).ok
    live = blank(versions[0])
    Replica(store, heartbeat=0).sync(live)
    assert same(live, versions[21])


def test_a_failure_nobody_asked_about_is_raised_by_close(store: Store) -> None:
    broken = Broken(PLACES["before-the-delta"])
    versions = history(2)
    publisher = Publisher(HookedStore(store, broken))
    publisher.publish(versions[0]).result(WAIT)
    broken.down = True
    publisher.publish(versions[1])
    with pytest.raises(PublishFailed, match="is not in the bucket: publish it again with a new Publisher"):
        publisher.close()
    publisher.close()  # a second time there is nothing to say
    verified(store, versions[:1])


def test_close_says_that_a_later_version_carries_what_failed(store: Store) -> None:
    reached, fails = threading.Event(), threading.Event()

    def hook(when: str, verb: str, key: str) -> None:
        if PLACES["before-the-delta"](when, verb, key) and not reached.is_set():
            reached.set()
            assert fails.wait(WAIT)
            raise StoreUnavailable("once")

    versions = history(3)
    publisher = Publisher(HookedStore(store, hook))
    publisher.publish(versions[0]).result(WAIT)
    publisher.publish(versions[1])
    assert reached.wait(WAIT)
    publisher.publish(versions[2])
    fails.set()
    with pytest.raises(PublishFailed, match="a later version carries what this one should have"):
        publisher.close()
    verified(store, [versions[0], versions[2]])


def test_the_with_block_raises_it_too_but_not_over_another_error(store: Store) -> None:
    broken = Broken(PLACES["before-the-delta"])
    versions = history(3)
    hooked = HookedStore(store, broken)
    with pytest.raises(PublishFailed), Publisher(hooked) as publisher:
        publisher.publish(versions[0]).result(WAIT)
        broken.down = True
        publisher.publish(versions[1])
    with pytest.raises(ZeroDivisionError), Publisher(hooked) as publisher:
        publisher.publish(versions[2])
        1 / 0  # noqa: B018


def test_close_does_not_pretend_that_a_lost_change_was_published(store: Store) -> None:
    """The failure was raised and caught, nothing was published since: close() must say that something is missing."""
    broken = Broken(PLACES["before-the-delta"])
    versions = history(2)
    publisher = Publisher(HookedStore(store, broken))
    publisher.publish(versions[0]).result(WAIT)
    broken.down = True
    publisher.publish(versions[1])
    with pytest.raises(PublishFailed):
        publisher.flush(WAIT)
    with pytest.raises(PublishFailed, match="What was published last is not in the bucket"):
        publisher.close()


def test_failures_in_a_row_add_up(store: Store) -> None:
    broken = Broken(PLACES["before-the-manifest"])
    versions = history(8)
    with Publisher(HookedStore(store, broken)) as publisher:
        publisher.publish(versions[0]).result(WAIT)
        broken.down = True
        for weights in versions[1:6]:
            try:
                with pytest.raises(StoreUnavailable):
                    publisher.publish(weights).result(WAIT)
            except PublishFailed:
                pass
        broken.down = False
        try:
            publisher.publish(versions[6])
        except PublishFailed:
            publisher.publish(versions[6])
        publisher.publish(versions[7]).result(WAIT)
        publisher.flush()
        last = publisher.version
    run = Run.open(store)
    state = checkout(run, last)
    assert same(held(state, versions[7]), versions[7])
    assert verify(run).ok


def test_a_failure_while_another_publish_waits(store: Store) -> None:
    """Version 1 fails in flight with 2 waiting: 2 goes out with the changes of 1 in it."""
    gate = Gate(lambda moment, verb, key: key.startswith("deltas/"))
    broken = Broken(lambda moment, verb, key: moment == "after" and verb == "put" and key.startswith("deltas/"))

    def both(moment: str, verb: str, key: str) -> None:
        gate(moment, verb, key)
        if broken.failed == 0:
            broken(moment, verb, key)

    versions = history(4)
    with Publisher(HookedStore(store, both)) as publisher:
        publisher.publish(versions[0]).result(WAIT)
        broken.down = True
        first = publisher.publish(versions[1])
        assert gate.reached.wait(WAIT)
        second = publisher.publish(versions[2])
        gate.opened.set()
        with pytest.raises(StoreUnavailable):
            first.result(WAIT)
        assert second.result(WAIT).version == 1
        with pytest.raises(PublishFailed):
            publisher.publish(versions[3])
        publisher.publish(versions[3]).result(WAIT)
    verified(store, [versions[0], versions[2], versions[3]])


def test_head_that_cannot_be_moved_is_no_failure(store: Store) -> None:
    broken = Broken(lambda moment, verb, key: key == keys.HEAD and verb == "put")
    broken.down = True
    versions = history(4)
    publish(HookedStore(store, broken), versions)
    assert broken.failed == 4
    verified(store, versions)
    live = blank(versions[0])
    assert Replica(store, heartbeat=0).sync(live) == 3


def test_a_model_that_fails_while_it_is_read_loses_nothing(store: Store) -> None:
    """One publish waits while the next is interrupted half-way: the first still goes out, whole."""
    gate = Gate(lambda moment, verb, key: key == keys.manifest(1))
    versions = history(5)

    class Interrupted(ModelView):
        def region(self, region: Any) -> Any:
            if region.tensor.name == "steps":
                raise KeyboardInterrupt
            return super().region(region)

    with Publisher(HookedStore(store, gate)) as publisher:
        publisher.publish(versions[0]).result(WAIT)
        publisher.publish(versions[1])
        assert gate.reached.wait(WAIT)
        waiting = publisher.publish(versions[2])
        with pytest.raises(KeyboardInterrupt):
            publisher.publish(Interrupted(versions[3]))
        gate.opened.set()
        assert waiting.result(WAIT).version == 2
        publisher.publish(versions[4]).result(WAIT)
    verified(store, [*versions[:3], versions[4]])


@pytest.mark.parametrize("seed", range(4))
def test_through_a_bucket_that_drops_delays_truncates_and_repeats(store: Store, seed: int) -> None:
    flaky = FlakyStore(store, seed=seed, drop=0.15, delay=0.1, truncate_put=0.1, duplicate=0.2)
    patient = Retrying(flaky, attempts=20, sleep=lambda s: None)
    versions = history(20, seed=seed, changes=3)
    publish(patient, versions, anchor_every=6)
    # keys carry a writer's random mark, so which faults a seed gives differs: not that each kind came
    assert flaky.injected.total() > 10
    verified(store, versions)
    assert verify(Run.open(store)).ok


# ── little memory ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_change_too_dense_to_hold_is_streamed(store: Store, encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`publish` then returns after the commit, with the same bits in the bucket."""
    captured: list[str] = []
    versions = history(5, changes=40)
    monkeypatch.setattr(pipeline, "most_pending", lambda nbytes: 64)
    with Publisher(store, encoding=encoding) as publisher:
        # the first version has nothing to hold but the copy of the model
        publisher.publish(versions[0]).result(WAIT)
        monkeypatch.setattr(Captures, "settle", lambda *_: captured.append("background"))
        for weights in versions[1:]:
            handle = publisher.publish(weights)
            assert handle.done()
    assert captured == []
    verified(store, versions)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_dense_regions_are_coded_in_pieces(store: Store, encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By rows, and where a row is longer than a piece by columns; beside regions of the same block that are sparse."""
    monkeypatch.setattr(captures, "PIECE_UNITS", 150)
    monkeypatch.setattr(captures, "READ_UNITS", 700)
    rng = np.random.default_rng(0)
    first = {
        "narrow": rng.integers(0, 1 << 16, (300, 7), np.uint16),
        "sparse": rng.integers(0, 1 << 16, (50, 100), np.uint16),
        "wide": rng.integers(0, 1 << 16, (6, 400), np.uint16),
        "words": rng.integers(0, 1 << 62, (40, 11), np.int64),
    }
    second = {name: array + array.dtype.type(1) for name, array in first.items()}
    second["sparse"] = first["sparse"].copy()
    second["sparse"][7, 7] ^= 1
    with Publisher(store, encoding=encoding, anchor_ratio=1e9) as publisher:
        for weights in (first, second, trained(second, 3)):
            publisher.publish(weights, wait=True)
    verified(store, [first, second, trained(second, 3)])
    assert verify(Run.open(store)).ok
    link = Run.open(store).manifest(1).links[0]
    if encoding != "raw":
        assert link.kind == "delta"
        blob = store.get(link.objects[0].key).data
        blocks = opened(blob, Run.open(store).schema).blocks
        assert len(blocks) > 20
        assert max(block.changed for block in blocks) <= 150


def test_streaming_waits_for_what_is_in_flight(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "most_pending", lambda nbytes: 2000)
    gate = Gate(lambda moment, verb, key: key == keys.manifest(1))
    versions = history(4, changes=2)
    dense = trained(versions[3], 5, changes=200)
    with Publisher(HookedStore(store, gate)) as publisher:
        publisher.publish(versions[0]).result(WAIT)
        publisher.publish(versions[1])
        assert gate.reached.wait(WAIT)
        publisher.publish(versions[2])
        threading.Timer(0.05, gate.opened.set).start()
        assert publisher.publish(dense).result(0).version == 3
        publisher.publish(versions[3]).result(WAIT)
    verified(store, [*versions[:3], dense, versions[3]])


def test_a_failed_stream_after_a_failed_background_publish(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "most_pending", lambda nbytes: 2000)
    broken = Broken(PLACES["before-the-manifest"])
    versions = history(4, changes=2)
    dense = trained(versions[2], 5, changes=200)
    with Publisher(HookedStore(store, broken)) as publisher:
        publisher.publish(versions[0])
        publisher.flush()
        broken.down = True
        with pytest.raises(StoreUnavailable):
            publisher.publish(versions[1]).result(WAIT)
        with pytest.raises(PublishFailed):
            publisher.flush()
        with pytest.raises(StoreUnavailable):
            publisher.publish(dense)
        broken.down = False
        publisher.publish(dense)
        publisher.publish(versions[3]).result(WAIT)
    verified(store, [versions[0], dense, versions[3]])


# ── closed ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_closed_publisher(store: Store) -> None:
    publisher = Publisher(store)
    publisher.publish(model())
    publisher.close()
    publisher.close()
    with pytest.raises(PublisherClosed):
        publisher.publish(model())
    with pytest.raises(PublisherClosed):
        publisher.flush()
    assert Run.open(store).newest() == 0, "close publishes what waits"


def test_a_closed_publisher_has_freed_its_copy_of_the_model(store: Store) -> None:
    publisher = Publisher(store)
    publisher.publish(model()).result(WAIT)
    detector = weakref.ref(publisher._pipeline._opened().captures.detector)
    publisher.close()
    # the publisher itself is still there
    gc.collect()
    assert detector() is None
    assert publisher.version == 0


def test_a_publisher_that_never_published(store: Store) -> None:
    Publisher(store).close()
    assert not [*store.list()]


def test_flush_can_time_out(store: Store) -> None:
    gate = Gate(lambda moment, verb, key: key == keys.manifest(0))
    publisher = Publisher(HookedStore(store, gate))
    publisher.publish(model())
    with pytest.raises(TimeoutError):
        publisher.flush(0.05)
    gate.opened.set()
    publisher.close()
    assert Run.open(store).newest() == 0


def test_a_model_that_changes_shape_is_refused(store: Store) -> None:
    weights = model()
    with Publisher(store) as publisher:
        publisher.publish(weights).result(WAIT)
        for other in (
            {**weights, "more": np.zeros(2)},
            {n: a for n, a in weights.items() if n != "scale"},
            model(rows=7),
        ):
            with pytest.raises(SchemaMismatch):
                publisher.publish(other)
        publisher.publish(trained(weights, 1)).result(WAIT)
    verified(store, [weights, trained(weights, 1)])


def test_a_bucket_that_lost_a_version_is_noticed(store: Store) -> None:
    """A version that nobody can rebuild is never built upon: the next one carries full weights and no delta."""
    versions: list[Model] = history(3)
    publish(store, versions)
    run = Run.open(store)
    manifest = run.manifest(2)
    import msgspec

    forged = msgspec.structs.replace(manifest, digest="0" * 32)
    store.put(keys.manifest(2), msgspec.json.encode(forged))
    newest = trained(versions[2], 9)
    with Publisher(store) as publisher:
        published = publisher.publish(newest, wait=True).result(WAIT)
    assert (published.version, published.kinds) == (3, ("anchor",))
    live = blank(newest)
    assert Replica(store, heartbeat=0).sync(live) == 3
    assert same(live, newest)


def test_an_object_that_stays_unavailable_does_not_stop_a_trainer(store: Store) -> None:
    """A server that has lost part of its disk answers 500 for one object for good, and goes on with all others."""
    versions: list[Model] = history(2)
    publish(store, versions)
    newest = trained(versions[1], 9)

    def hook(when: str, verb: str, key: str) -> None:
        if when == "before" and verb == "get_range" and key.startswith("anchors/"):
            raise StoreUnavailable("500 Internal Server Error")

    with Publisher(HookedStore(store, hook)) as publisher:
        published = publisher.publish(newest, wait=True).result(WAIT)
    assert (published.version, published.kinds) == (2, ("anchor",))
    live = blank(newest)
    assert Replica(store, heartbeat=0).sync(live) == 2
    assert same(live, newest)


# ── children of a script that publishes ──────────────────────────────────────────────────────────────────────────────

PUBLISHES = """
import multiprocessing, sys
import numpy as np
import deltawire as dw

def publish(run, value):
    with dw.Publisher(run) as publisher:
        publisher.publish({"w": np.full(4, value, np.float32)})
"""
UNGUARDED = """
publish(sys.argv[1], 1)
child = multiprocessing.get_context("spawn").Process(target=print, args=("the child ran",))
child.start()
child.join()
print("exit code", child.exitcode)
"""
GUARDED = """
if __name__ == "__main__":
    publish(sys.argv[1], 1)
    child = multiprocessing.get_context("spawn").Process(target=publish, args=(sys.argv[1], 2))
    child.start()
    child.join()
    print("exit code", child.exitcode)
"""


HELD = """
with dw.Publisher(sys.argv[1], takeover=TAKEOVER) as publisher:
    publisher.publish({"w": np.full(4, 1, np.float32)}, wait=True)
    child = multiprocessing.get_context("spawn").Process(target=print, args=("the child ran",))
    child.start()
    child.join()
    publisher.publish({"w": np.full(4, 2, np.float32)}, wait=True)
print("exit code", child.exitcode)
"""


@pytest.mark.parametrize(
    "main, said, newest", [(UNGUARDED, "exit code 1", 0), (GUARDED, "exit code 0", 1)], ids=["not", "guarded"]
)
def test_a_child_that_runs_the_script_again_publishes_nothing(
    tmp_path: Path, main: str, said: str, newest: int
) -> None:
    """As TRL's rollout worker does, and every process that is spawned."""
    script = tmp_path / "train.py"
    script.write_text(PUBLISHES + main)
    done = subprocess.run([sys.executable, script, tmp_path / "run"], capture_output=True, text=True, timeout=WAIT)
    assert done.stdout.splitlines() == [said]
    assert ("Guard your script" in done.stderr) == (main == UNGUARDED), done.stderr
    assert Run.open(tmp_path / "run").newest() == newest


@pytest.mark.parametrize("takeover", [False, True])
def test_a_child_that_runs_the_script_again_leaves_the_run_to_its_parent(tmp_path: Path, takeover: bool) -> None:
    publish(LocalStore(tmp_path / "run"), [{"w": np.zeros(4, np.float32)}])
    script = tmp_path / "train.py"
    script.write_text(PUBLISHES + HELD.replace("TAKEOVER", str(takeover)))
    done = subprocess.run([sys.executable, script, tmp_path / "run"], capture_output=True, text=True, timeout=WAIT)
    assert done.stdout.splitlines() == ["exit code 1"], done.stderr
    assert "Guard your script" in done.stderr
    assert Run.open(tmp_path / "run").newest() == 2
