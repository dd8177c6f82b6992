"""Every detector finds exactly what changed, over real training and over anything else that may happen to weights."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from detector_support import Decoder, Trainer, changed_elements, raw, replica_model  # noqa: E402

from deltawire import Publisher, Replica  # noqa: E402
from deltawire.bucket.run import Run  # noqa: E402
from deltawire.bucket.verify import verify  # noqa: E402
from deltawire.core import full  # noqa: E402
from deltawire.core.codecs import context  # noqa: E402
from deltawire.core.errors import SchemaMismatch  # noqa: E402
from deltawire.models import ModelView  # noqa: E402
from deltawire.store import ObjectStore  # noqa: E402
from deltawire.trainer import DeltaAdamW, FusedDetector, HostDetector, SnapshotDetector, pipeline  # noqa: E402
from deltawire.trainer.detectors import TooLarge  # noqa: E402
from support import HookedStore  # noqa: E402
from tiled import encode_tiles  # noqa: E402

WAIT = 60
KINDS = ["host", "snapshot", "streamed", "fused", "adamw"]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]

pytestmark = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    # tensors this small only make threads wait for each other
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def store() -> ObjectStore:
    # a run in memory: what is tried here is what travels, not how a disk keeps it
    return ObjectStore.from_url(f"memory://{uuid.uuid4()}")


@pytest.mark.parametrize("kind", ["snapshot", "fused", "adamw"])
def test_old_weights_are_counted_where_they_are(
    kind: str, device: str, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`context` with several captures on their way: none of their old weights comes to the host, and a trainer does not
    wait until a batch of them is coded."""
    monkeypatch.setattr("deltawire.core.sparse.BATCH_UNITS", 1)
    monkeypatch.setattr("deltawire.trainer.device.DeviceDetector._counts_on_device", lambda self: True)
    monkeypatch.setattr("deltawire.core.codecs.context.encoder.HostBlock", None)
    coded: list[int] = []
    later = threading.Event()

    def encode(blocks: Any, before: Any, each: Any, finish: Any, counting: Any) -> Any:
        # captures come meanwhile: what is counted must be what was, not what is
        old = [before.block([change.region for change in changes]) for changes in blocks]
        assert later.wait(WAIT)
        del old
        found = [encode_tiles(changes, before) for changes in blocks]
        coded.extend(len(block.streams["tiles"]) for parts in found for _, block in parts)
        return [*map(finish, blocks, found)]

    monkeypatch.setattr(context, "encode_together", encode)
    trainer = Trainer(kind, store, device, encoding="context")
    trainer.publish()
    trainer.publisher.flush()
    expected = {}
    for _ in range(3):
        trainer.step()
        handle, bits = trainer.publish(), trainer.bits()
        expected[handle] = bits
    trainer.step()
    later.set()
    live, replica = replica_model(trainer), Replica(store, heartbeat=0)
    for version, bits in {handle.result(WAIT).version: bits for handle, bits in expected.items()}.items():
        replica.sync(live, version)
        assert all(np.array_equal(raw(live[name]), found) for name, found in bits.items())
    assert sum(coded) > 0


@pytest.mark.parametrize("total", [20, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_training_is_followed_bit_by_bit(kind: str, total: int, device: str, store: ObjectStore) -> None:
    """Real steps, a publish after one to seven of them: the replica is equal, and exactly what changed travels."""
    trainer = Trainer(kind, store, device, anchor_every=min(25, total // 8))
    live, replica = replica_model(trainer), Replica(store, heartbeat=0)
    rng = np.random.default_rng(0)
    last: dict[str, np.ndarray] | None = None
    steps = 0
    while steps < total:
        for _ in range(int(rng.integers(1, 8))):
            trainer.step(lr=float(rng.choice([1e-6, 1e-5, 1e-4])))
            steps += 1
        published = trainer.publish().result(WAIT)
        now = trainer.bits()
        replica.sync(live)
        assert all(np.array_equal(raw(live[name]), now[name]) for name in now), published
        if last is not None:
            # the bits are right, so recall is 1; as many as differ, so precision is 1
            assert published.changed == changed_elements(last, now, trainer.tensors())
        last = now
    trainer.publisher.close()
    assert verify(Run.open(store)).ok


@pytest.mark.parametrize("kind", KINDS)
def test_merged_failed_and_anchored_versions(kind: str, device: str, store: ObjectStore) -> None:
    """Publishes that merge while the bucket is slow, with anchors of versions the trainer has long left behind."""
    reached, opened = threading.Event(), threading.Event()

    def gate(moment: str, verb: str, key: str) -> None:
        if "anchors/" in key and "000000" not in key and not reached.is_set():
            reached.set()
            assert opened.wait(WAIT)

    trainer = Trainer(kind, HookedStore(store, gate), device, anchor_every=1)
    trainer.publish().result(WAIT)
    trainer.step()
    first, expected = trainer.publish(), trainer.bits()
    assert reached.wait(WAIT)
    waiting = []
    for _ in range(4):
        trainer.step()
        waiting.append(trainer.publish())
    assert trainer.publisher.queue == 2
    # the trainer goes on while the anchor of version 1 is read: it must still be version 1
    trainer.step()
    opened.set()
    assert first.result(WAIT).version == 1
    assert {handle.result(WAIT).version for handle in waiting} == {2}
    assert waiting[0].result().publishes == 4
    assert waiting[0].result().publishes == 4
    live = replica_model(trainer)
    Replica(store, heartbeat=0).sync(live, 1)
    assert all(np.array_equal(raw(live[name]), expected[name]) for name in expected)
    trainer.publish().result(WAIT)
    trainer.publisher.close()
    assert verify(Run.open(store)).ok


@pytest.mark.parametrize("encoding", ["raw", "packed", "context"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_encoding(kind: str, encoding: str, device: str, store: ObjectStore) -> None:
    trainer = Trainer(kind, store, device, encoding=encoding)
    live, replica = replica_model(trainer), Replica(store, heartbeat=0)
    for _ in range(4):
        trainer.publish().result(WAIT)
        replica.sync(live)
        assert all(np.array_equal(raw(live[name]), bits) for name, bits in trainer.bits().items())
        trainer.step()
    trainer.publisher.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_dense_change_is_streamed(
    kind: str, device: str, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "most_pending", lambda nbytes: 64)
    trainer = Trainer(kind, store, device)
    live, replica = replica_model(trainer), Replica(store, heartbeat=0)
    for _ in range(4):
        trainer.publish().result(WAIT)
        replica.sync(live)
        assert all(np.array_equal(raw(live[name]), bits) for name, bits in trainer.bits().items())
        trainer.step(lr=1e-2)
    trainer.publisher.close()


@pytest.mark.parametrize("memory", ["device", "host"])
@pytest.mark.parametrize("seed", range(6))
def test_any_bits_of_any_dtype(seed: int, memory: str, device: str) -> None:
    """Noise of every width, NaNs and both zeros included: a snapshot finds what the core's compare finds."""
    rng = np.random.default_rng(seed)
    dtypes = [torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.uint8, torch.float8_e4m3fn]
    live: dict[str, Any] = {}
    for number, dtype in enumerate(dtypes):
        shape = (int(rng.integers(1, 400)), int(rng.integers(1, 300)))
        noise = torch.from_numpy(rng.integers(0, 256, (shape[0], shape[1] * dtype.itemsize), np.uint8))
        live[f"t{number}"] = noise.view(dtype).to(device)
    live["empty"] = torch.zeros(0, 3, device=device)
    view = ModelView(live)
    mine, core = SnapshotDetector(memory), HostDetector()
    for detector in (mine, core):
        detector.bind(view)
        assert detector.load(view) == full.digest_of(view)
    for density in (0.0, 0.001, 0.2, 1.0):
        for tensor in live.values():
            flips = torch.from_numpy(rng.random(tuple(tensor.view(torch.uint8).shape)) < density).to(device)
            tensor.view(torch.uint8).bitwise_xor_(flips.to(torch.uint8))
        found = []
        for detector in (mine, core):
            found.append(detector.detect(view, 1 << 40)().result())
        assert found[0].shift == found[1].shift
        for a, b in zip(*(what.blocks for what in found), strict=True):
            for x, y in zip(a, b, strict=True):
                assert x.region == y.region
                assert all(np.array_equal(getattr(x, f), getattr(y, f)) for f in ("positions", "old", "new"))
        regions = [region for block in mine.plan for region in block]
        assert all(np.array_equal(mine.region(r), core.region(r)) for r in regions)
    with pytest.raises(TooLarge):
        live["t0"].zero_()
        mine.detect(view, 8)
    mine.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_trainer_that_starts_again(kind: str, device: str, store: ObjectStore) -> None:
    """The same weights go on with a delta; other weights get one that leads back to the trainer's truth."""
    first = Trainer(kind, store, device)
    first.publish().result(WAIT)
    first.step()
    first.publish().result(WAIT)
    first.publisher.close()
    for steps in (1, 3):
        again = Trainer(kind, store, device)
        for _ in range(steps):
            again.step()
        if kind == "fused":
            again.detector.cast(again.tensors())
        for _ in range(2):
            published = again.publish().result(WAIT)
            assert published.kinds == ("delta",)
            again.step()
        again.publisher.close()
    live = replica_model(again)
    Replica(store, heartbeat=0).sync(live)
    assert verify(Run.open(store)).ok


def test_weights_that_something_else_wrote_are_compared_with_the_bucket(
    device: str, store: ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Trainer("adamw", store, device)
    trainer.publish().result(WAIT)
    trainer.step()
    with torch.no_grad():
        trainer.model.layers[0].up.weight[3, 5] = 0.125
    caplog.set_level(logging.WARNING, "deltawire")
    trainer.publish().result(WAIT)
    assert "something else than DeltaAdamW.step" in caplog.text
    for _ in range(2):
        trainer.step()
        trainer.publish().result(WAIT)
    live = replica_model(trainer)
    Replica(store, heartbeat=0).sync(live)
    assert all(np.array_equal(raw(live[name]), bits) for name, bits in trainer.bits().items())
    trainer.publisher.close()


def test_what_comes_back_did_not_change(device: str, store: ObjectStore) -> None:
    """Steps there and back between two publishes, by a learning rate of the other sign."""
    parameter = torch.nn.Parameter(torch.linspace(-1, 1, 1000, device=device))
    optimizer = DeltaAdamW([parameter], lr=1e-2, betas=(0.0, 0.0), eps=0.0, weight_decay=0.0)
    with Publisher(store, detector=optimizer, wire_dtype="bf16") as publisher:
        publisher.publish({"w": parameter}).result(WAIT)
        start = parameter.detach().clone()
        for sign in (1.0, -1.0):
            parameter.grad = torch.full_like(parameter, sign)
            optimizer.step()
        moved = int((start.bfloat16().view(torch.int16) != parameter.detach().bfloat16().view(torch.int16)).sum())
        assert optimizer._log is not None
        optimizer._log.settle()
        assert optimizer._log.count > 500 > moved
        assert publisher.publish({"w": parameter}).result(WAIT).changed == moved


def test_names_are_those_of_the_checkpoint(device: str) -> None:
    model = Decoder().to(device)
    plain = ModelView(model).schema
    assert ModelView(torch.compile(model, backend="eager")).schema == plain
    wrapped = torch.nn.DataParallel(model)
    assert ModelView(wrapped).schema == plain
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model.layers[0] = checkpoint_wrapper(model.layers[0])
    assert ModelView(torch.compile(model, backend="eager")).schema == plain


def test_a_view_knows_tensors_that_lie_where_they_did(device: str) -> None:
    model = {"a": torch.zeros(4, 4, device=device), "b": torch.ones(3, device=device)}
    first = ModelView(model)
    again = ModelView(dict(model), known=first.known)
    assert again.known is first.known is not None
    assert again.schema is first.schema
    for name, other in (
        ("moved", {**model, "a": model["a"].clone()}),
        ("reshaped", {**model, "a": model["a"].view(2, 8)}),
        ("transposed", {**model, "a": model["a"].T}),
        ("another dtype", {**model, "a": model["a"].view(torch.int32)}),
        ("tied", {**model, "c": model["a"]}),
        ("renamed", {"c": model["a"], "b": model["b"]}),
        ("numpy", {name: tensor.cpu().numpy() for name, tensor in model.items()}),
    ):
        view = ModelView(other, known=first.known)
        assert view.known is not first.known, name
        assert view.schema == ModelView(other).schema, name
    cast = ModelView(model, "bf16", known=first.known)
    assert {t.dtype for t in cast.schema.tensors} == {"BF16"}
    # nothing tells two empty tensors apart
    assert ModelView({**model, "empty": torch.zeros(0, device=device)}, known=first.known).known is None


def test_what_travels_by_default(device: str) -> None:
    model = Decoder().to(device)
    dtypes = {t.name: t.dtype for t in ModelView(model, "auto").schema.tensors}
    assert dtypes["embed.weight"] == "BF16"
    assert dtypes["steps"] == "I64"
    assert {t.dtype for t in ModelView(model.half(), "auto").schema.tensors} == {"F16", "I64"}
    assert {t.dtype for t in ModelView({"w": torch.zeros(3, device=device)}, "auto").schema.tensors} == {"F32"}
    assert ModelView(model).schema.ties == {"head.weight": "embed.weight"}


def test_a_detector_that_does_not_fit(device: str) -> None:
    model = Decoder().to(device)
    stranger = DeltaAdamW([torch.nn.Parameter(torch.zeros(3, device=device))])
    own = DeltaAdamW([p for p in model.parameters() if p.requires_grad])
    numpy = {"w": np.zeros(3, np.float32)}
    for detector, wire, weights, why in (
        (FusedDetector({}), "bf16", model, "is missing"),
        (stranger, "bf16", model, "none of this model's parameters"),
        (own, None, model, "in bf16"),
        (SnapshotDetector(), None, numpy, "torch models"),
    ):
        store = ObjectStore.from_url(f"memory://{uuid.uuid4()}")
        publisher = Publisher(store, detector=detector, wire_dtype=wire)
        with pytest.raises(SchemaMismatch, match=why):
            publisher.publish(weights)
        publisher.close()


def test_figures_of_a_published_version(device: str, store: ObjectStore) -> None:
    trainer = Trainer("snapshot", store, device)
    trainer.publish().result(WAIT)
    trainer.step()
    published = trainer.publish().result(WAIT)
    assert published.timings.keys() == {"held", "encode", "put"}
    assert 0 < published.density < 1
    trainer.publisher.close()
