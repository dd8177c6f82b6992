"""Live weights on a device: the same all-or-nothing, by kernels. On a CPU the kernels are plain torch."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from deltawire import Publisher, Replica  # noqa: E402
from deltawire.bucket.run import Run  # noqa: E402
from deltawire.bucket.verify import verify  # noqa: E402
from deltawire.core import full  # noqa: E402
from deltawire.core.codecs import context  # noqa: E402
from deltawire.core.digest import StateDigest  # noqa: E402
from deltawire.core.errors import DigestMismatch  # noqa: E402
from deltawire.models import ModelView, torch_bits  # noqa: E402
from deltawire.replica import device as device_module  # noqa: E402
from deltawire.replica import model as model_module  # noqa: E402
from deltawire.replica.device import DeviceShard, DeviceWeights  # noqa: E402
from deltawire.replica.model import open_weights  # noqa: E402
from deltawire.store import ObjectStore  # noqa: E402
from deltawire.trainer import SnapshotDetector, captures, pipeline  # noqa: E402
from deltawire.trainer.policy import AnchorPolicy  # noqa: E402
from tiled import encode_tiles  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]

pytestmark = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture(autouse=True)
def by_kernels() -> Iterator[None]:
    """Models in host memory too are patched as if they were on a device."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(model_module, "is_on_device", lambda tensors, schema: True)
        yield


@pytest.fixture
def store() -> ObjectStore:
    return ObjectStore.from_url(f"memory://{uuid.uuid4()}")


def weights(seed: int, device: str) -> dict[str, Any]:
    random = torch.Generator().manual_seed(seed)
    tensors = {
        "embed": torch.randn(300, 64, generator=random).bfloat16(),
        "norm": torch.randn(64, generator=random),
        "empty": torch.zeros(0, 4),
        "half": torch.randn(33, 7, generator=random).half(),
        "count": torch.tensor([seed, 1 << 40]),
        "scalar": torch.tensor(1.5),
    }
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def step(model: dict[str, Any], seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    for tensor in model.values():
        if tensor.is_floating_point() and tensor.numel():
            move = torch.rand(tensor.shape, generator=random) < 0.05
            tensor.copy_(torch.where(move.to(tensor.device), tensor * 1.01 + 0.01, tensor))
    model["count"][0] += 1


def replica_of(store: ObjectStore, **options: Any) -> Replica:
    return Replica(store, heartbeat=0, **options)


def equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return all(np.array_equal(torch_bits(a[name]), torch_bits(b[name])) for name in b)


def one_behind(model: dict[str, torch.Tensor], store: ObjectStore) -> tuple[Replica, Any, Any]:
    """A replica at version 0 of a run now at 1 (`model` from here on); its live weights, and a copy of them."""
    live = {name: torch.zeros_like(t) for name, t in model.items()}
    replica = replica_of(store)
    with Publisher(store, anchor_ratio=1e9) as publisher:
        publisher.publish(model).result(60)
        replica.sync(live)
        before = {name: t.clone() for name, t in live.items()}
        step(model, 1)
        publisher.publish(model).result(60)
    return replica, live, before


@pytest.mark.parametrize("encoding", ["raw", "packed", "context"])
def test_follows_bit_by_bit(device: str, store: ObjectStore, encoding: str) -> None:
    model = weights(1, device)
    live = {name: torch.zeros_like(t) for name, t in model.items()}
    replica = replica_of(store)
    with Publisher(store, encoding=encoding) as publisher:
        for version in range(5):
            publisher.publish(model).result(60)
            assert replica.sync(live) == version
            assert equal(live, model)
            step(model, version)
    assert {"decode", "stage", "apply", "prove"} <= replica.timings.keys()


@pytest.mark.parametrize("encoding", ["raw", "packed", "context"])
@pytest.mark.parametrize("most", [4096, 512])
def test_tensors_with_more_units_than_positions_can_count(
    device: str, store: ObjectStore, monkeypatch: pytest.MonkeyPatch, encoding: str, most: int
) -> None:
    """They are several pieces, of one memory or of two; the smaller ones are cut between the digest's blocks too."""
    monkeypatch.setattr(device_module, "MOST_UNITS", most)
    if encoding == "context":
        monkeypatch.setattr(context, "encode", encode_tiles)
    model = weights(1, device)
    model["head"] = model["embed"]
    live = {name: torch.zeros_like(t) for name, t in model.items()}
    replica = replica_of(store)
    with Publisher(store, encoding=encoding, anchor_ratio=1e9) as publisher:
        for version in range(3):
            publisher.publish(model).result(60)
            assert replica.sync(live) == version
            assert equal(live, model)
            step(model, version)
    assert Run.open(store).manifest(2).links[0].kind == "delta"
    target = open_weights(live, ModelView(model).schema)
    assert len(target.shard.pieces) > len(live) + 1
    before = target.digest()
    live["head"].view(torch.int16)[-1, 0] ^= 1
    assert target.digest() == before + StateDigest(1, 1)


def test_context_is_counted_where_the_weights_are(
    device: str, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In tiles, with rows that never move, in tensors that the run ties and this model does not."""
    monkeypatch.setattr(context, "encode", encode_tiles)
    monkeypatch.setattr(DeviceShard, "read", None)
    model = weights(1, device)
    model["wide"] = torch.randn(400, 512, generator=torch.Generator().manual_seed(5)).bfloat16().to(device)
    model["head"] = model["wide"]
    live = {name: torch.zeros_like(t) for name, t in model.items()}
    replica = replica_of(store)
    with Publisher(store, encoding="context", anchor_ratio=1e9) as publisher:
        for version in range(4):
            publisher.publish(model).result(60)
            assert replica.sync(live) == version
            assert equal(live, model)
            before = model["wide"][::3].clone()
            step(model, version)
            model["wide"][::3] = before
    assert Run.open(store).manifest(3).links[0].kind == "delta"


def test_a_weight_that_does_not_take_the_write_is_found_and_all_of_it_undone(
    device: str, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica, live, before = one_behind(weights(1, device), store)
    real = DeviceShard.write

    def faulty(shard: DeviceShard, patch: Any) -> None:
        real(shard, patch)
        live["embed"].view(torch.int16)[7, 7] ^= 1

    monkeypatch.setattr(DeviceShard, "write", faulty)
    with pytest.raises(DigestMismatch):
        replica.sync(live)
    undone = {name: t.clone() for name, t in live.items()}
    undone["embed"].view(torch.int16)[7, 7] ^= 1
    assert equal(undone, before)


def test_an_error_half_way_leaves_the_old_weights(
    device: str, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = weights(2, device)
    replica, live, before = one_behind(model, store)
    monkeypatch.setattr(DeviceWeights, "digest", lambda self: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        replica.sync(live)
    assert equal(live, before)
    assert replica.version == 0
    monkeypatch.undo()
    assert replica.sync(live) == 1
    assert equal(live, model)


def test_names_that_the_run_ties_and_the_model_does_not(device: str, store: ObjectStore) -> None:
    embed = weights(3, device)["embed"]
    model = {"embed": embed, "head": embed}
    live = {"embed": torch.zeros_like(embed), "head": torch.zeros_like(embed)}
    replica = replica_of(store)
    with Publisher(store) as publisher:
        for version in range(3):
            publisher.publish(model).result(60)
            replica.sync(live)
            assert equal(live, model)
            embed[version] += 1
    target = open_weights(live, ModelView(model).schema)
    whole = target.digest()
    live["head"].view(torch.int16)[0, 0] ^= 1
    assert target.digest() == whole + StateDigest(1, 1)


def test_tied_weights_are_taken_back_together(device: str, store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two memories for one tensor of the run: a failure after both were written, and one between them."""
    embed = weights(3, device)["embed"]
    live = {"embed": torch.zeros_like(embed), "head": torch.zeros_like(embed)}
    replica = replica_of(store)
    with Publisher(store, anchor_ratio=1e9) as publisher:
        publisher.publish({"embed": embed, "head": embed}).result(60)
        replica.sync(live)
        before = {name: t.clone() for name, t in live.items()}
        embed += 1
        publisher.publish({"embed": embed, "head": embed}).result(60)
    real = DeviceShard.write

    def interrupted(shard: DeviceShard, patch: Any) -> None:
        """As a launch that has written one of the two."""
        real(shard, patch)
        live["head"].copy_(before["head"])
        raise KeyboardInterrupt

    monkeypatch.setattr(DeviceShard, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        replica.sync(live)
    assert equal(live, before)
    monkeypatch.undo()
    monkeypatch.setattr(DeviceWeights, "digest", lambda self: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        replica.sync(live)
    assert equal(live, before)
    monkeypatch.undo()
    assert replica.sync(live) == 1
    assert equal(live, {"embed": embed, "head": embed})


@pytest.mark.parametrize("anchors", [False, True])
def test_regions_that_somebody_cut_in_another_way(
    device: str, store: ObjectStore, monkeypatch: pytest.MonkeyPatch, anchors: bool
) -> None:
    """A dense change travels in pieces, some of them columns of long rows; the next delta is cut as usual again.

    An anchor beside it holds the same weights: a snapshot on the device is taken over before it is written.
    """
    monkeypatch.setattr(captures, "PIECE_UNITS", 150)
    monkeypatch.setattr(captures, "READ_UNITS", 700)
    model = weights(6, device)
    model["wide"] = torch.randn(6, 400, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
    live = {name: torch.zeros_like(t) for name, t in model.items()}
    replica = replica_of(store)
    monkeypatch.setattr(AnchorPolicy, "wants_delta", lambda *_: True)
    options = {"anchor_every": 1} if anchors else {"anchor_ratio": 1e9}
    monkeypatch.setattr(pipeline, "most_pending", lambda nbytes: 64)
    with Publisher(store, detector=SnapshotDetector(), **options) as publisher:
        publisher.publish(model).result(60)
        replica.sync(live)
        for tensor in model.values():
            tensor += 1
        kinds = publisher.publish(model).result(60).kinds
        assert kinds == (("delta", "anchor") if anchors else ("delta",))
        replica.sync(live)
        assert equal(live, model)
        assert verify(Run.open(store)).ok
        model["norm"][5] += 1
        publisher.publish(model).result(60)
        assert replica.sync(live) == 2
        assert equal(live, model)


def test_digest_and_load(device: str) -> None:
    model, live = weights(4, device), weights(5, device)
    view = ModelView(model)
    target = open_weights(live, view.schema)
    assert target.digest() == full.digest_of(ModelView(live))
    target.shard.load(view)
    assert equal(live, model)


def test_weights_of_two_memories_are_read_once(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    embed = weights(3, device)["embed"]
    view, reads = ModelView({"embed": embed, "head": embed}), []
    live = {"embed": torch.zeros_like(embed), "head": torch.zeros_like(embed)}
    real = ModelView.region
    monkeypatch.setattr(ModelView, "region", lambda self, region: reads.append(region) or real(self, region))
    open_weights(live, view.schema).shard.load(view)
    assert len(reads) == 1
    assert equal(live, {"embed": embed, "head": embed})
