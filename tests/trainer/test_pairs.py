"""`publish` of an iterator of (name, tensor): weights that come one by one, by one process and by several ranks."""

from __future__ import annotations

import gc
import logging
import os
import re
import threading
import tracemalloc
import uuid
import weakref
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltawire import Publisher, Replica
from deltawire.bucket.run import Run
from deltawire.bucket.verify import verify
from deltawire.core import full, keys
from deltawire.core.change import Region, blocks, pieces
from deltawire.core.errors import (
    DeltawireError,
    DivergedRun,
    PublisherClosed,
    PublishFailed,
    SchemaMismatch,
    UnsafeName,
    UnsupportedDtype,
    UnsupportedTensor,
    VersionNotFound,
)
from deltawire.core.signing import SigningKey
from deltawire.core.state import State
from deltawire.models import ModelView
from deltawire.store import LocalStore, ObjectStore, Store
from deltawire.trainer import HostDetector, background, captures, detectors, pairs, pipeline, publisher, rebuild
from deltawire.trainer.pairs import OneByOne
from deltawire.views import FP8_BLOCK
from deltawire.views.blocks import Blocks
from deltawire.views.host import BlockView
from interrupting import Interrupted, raising_at_each_line
from support import (
    HookedStore,
    Model,
    blank,
    densities,
    history,
    model,
    moved_bag,
    random_bag,
    same,
    schemas,
    seeds,
    trained,
    verified,
)
from view_models import weights as view_weights

WAIT = 60


def memory() -> ObjectStore:
    return ObjectStore.from_url(f"memory://{uuid.uuid4()}")


def one_by_one(weights: Model, order: Iterable[str] | None = None) -> Iterator[tuple[str, np.ndarray]]:
    """Every array in one buffer of the iterator's own, which the next one overwrites."""
    buffer = np.empty(max(array.nbytes for array in weights.values()), np.uint8)
    for name in order or weights:
        array = weights[name]
        place = buffer[: array.nbytes].view(array.dtype).reshape(array.shape)
        place[...] = array
        yield name, place
        buffer[:] = 0xA5


def assert_published(store: Store, weights: list[Model]) -> None:
    """The newest version is the last of these, and every version is one of them."""
    digests = [str(full.digest_of(ModelView(each))) for each in weights]
    run = Run.open(store)
    places = [digests.index(run.manifest(version).digest) for version in run.listed()]
    assert places[-1] == len(weights) - 1
    assert places == sorted(places)
    verified(store, lambda version: weights[places[version]])
    assert verify(run).ok
    copy = blank(weights[-1])
    Replica(store, heartbeat=0).sync(copy)
    assert same(copy, weights[-1])


# ── what is published ────────────────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=40, deadline=None)
@given(
    schemas(), seeds, st.lists(st.tuples(densities, st.sampled_from(["capture", "wait", "model", "new"])), max_size=5)
)
def test_every_version_is_what_came_in_whatever_order(schema: Any, seed: int, steps: list[tuple[float, str]]) -> None:
    """Also tensors that come twice, publishes of a whole model in between, and a publisher that is new."""
    store, bag, rng = memory(), random_bag(schema, seed), np.random.default_rng(seed)
    publisher, digests = Publisher(store, continues=True), []
    for density, how in [(0.0, "capture"), *steps]:
        bag = moved_bag(bag, int(rng.integers(1 << 30)), density)
        digests.append(str(bag.digest()))
        if how == "new":
            publisher.close(WAIT)
            publisher = Publisher(store, continues=True)
        model: Any = bag
        if how != "model":
            names = [tensor.name for tensor in schema.tensors]
            shapes = schema.by_name()
            arrays = {n: _array(bag.tensors[n], shapes[n]) for n in names}
            order = [*rng.permutation(names), *rng.choice(names, 2)]
            model = ((str(name), arrays[name]) for name in order)
        publisher.publish(model, wait=how == "wait").result(WAIT)
    publisher.close(WAIT)
    run = Run.open(store)
    assert [run.manifest(version).digest for version in run.listed()] == digests
    assert run.schema == schema
    assert verify(run).ok


@pytest.mark.parametrize("wire", [None, "bf16"])
def test_what_is_on_a_device_is_compared_there(wire: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same code on a CPU: dtypes of every width, cast or not, sparse and dense."""
    torch = pytest.importorskip("torch")
    from deltawire.trainer import device

    compared = []

    def counting(*given: Any) -> Any:
        compared.append(given[0])
        return inner(*given)

    inner = device.compare_there
    monkeypatch.setattr(device, "compare_there", counting)
    monkeypatch.setattr(pairs, "_is_on_device", lambda tensor: tensor.is_contiguous())
    random, store = torch.Generator().manual_seed(4), memory()
    kinds = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8]
    kinds += [torch.float8_e4m3fn, torch.bool]
    weights = {str(kind): (10 * torch.randn(50, 9, generator=random)).to(kind) for kind in kinds}
    weights |= {"empty": torch.zeros(0, 3), "scalar": torch.ones(()), "turned": torch.ones(7, 5).t()}
    digests = []
    with Publisher(store, wire_dtype=wire) as publisher:
        for share in (0.0, 0.01, 0.3, 1.0):
            for tensor in weights.values():
                moved = torch.rand(tensor.shape, generator=random) < share
                tensor[moved] = (10 * torch.randn(tensor.shape, generator=random)).to(tensor.dtype)[moved]
            digests.append(str(full.digest_of(ModelView(weights, wire))))
            publisher.publish(weights.items()).result(WAIT)
    assert len(compared) == 3 * (len(kinds) + 1)
    assert [Run.open(store).manifest(version).digest for version in range(4)] == digests
    assert verify(Run.open(store)).ok


def _array(bits: np.ndarray, spec: Any) -> Any:
    torch = pytest.importorskip("torch")
    from deltawire.models import torch_dtype

    if not bits.size:
        return torch.empty(spec.shape, dtype=torch_dtype(spec.dtype))
    signed = torch.from_numpy(bits.view(f"i{bits.itemsize}" if bits.itemsize > 1 else np.uint8).copy())
    return signed.view(torch_dtype(spec.dtype)).reshape(spec.shape)


def elements_of(weights: Model) -> np.ndarray:
    """All elements one after the other, as numbers that are equal where the bits are."""
    return np.concatenate(
        [array.reshape(-1).view(f"u{array.itemsize}").astype(np.uint64) for array in weights.values()]
    )


def test_later_publishes_send_what_changed_and_nothing_else() -> None:
    store, weights = memory(), history(4)
    with Publisher(store, anchor_ratio=1e9) as publisher:
        published = [
            publisher.publish(one_by_one(each, sorted(each, reverse=bool(n % 2)))).result(WAIT)
            for n, each in enumerate(weights)
        ]
    assert [each.kinds for each in published] == [("anchor",), ("delta",), ("delta",), ("delta",)]
    views = [elements_of(each) for each in weights]
    assert [each.changed for each in published[1:]] == [int((a != b).sum()) for a, b in pairwise(views)]
    assert_published(store, weights)


def test_publish_returns_before_the_upload_and_several_captures_wait() -> None:
    store, weights, reached, opened = memory(), history(5), threading.Event(), threading.Event()

    def hook(moment: str, verb: str, key: str) -> None:
        if (moment, verb, key) == ("before", "put_if_absent", keys.manifest(1)):
            reached.set()
            assert opened.wait(WAIT)

    publisher = Publisher(HookedStore(store, hook), anchor_every=2)
    publisher.publish(one_by_one(weights[0])).result(WAIT)
    publisher.publish(one_by_one(weights[1]))
    assert reached.wait(WAIT)
    handles = [publisher.publish(one_by_one(each)) for each in weights[2:]]
    assert publisher.queue == 2
    with pytest.raises(TimeoutError):
        publisher.flush(0.01)
    opened.set()
    publisher.flush(WAIT)
    assert {handle.result().version for handle in handles} == {2}
    publisher.close(WAIT)
    assert_published(store, weights)


@pytest.mark.parametrize("wire", [None, "bf16"])
def test_torch_tensors_are_cast_to_the_wire_dtype(wire: str | None) -> None:
    torch = pytest.importorskip("torch")
    store, random = memory(), torch.Generator().manual_seed(3)
    kinds = {"a": torch.float32, "b": torch.bfloat16, "c": torch.float16, "d": torch.int64}
    weights = {name: (100 * torch.randn(40, 7, generator=random)).to(kind) for name, kind in kinds.items()}
    weights["a"][0, 0], weights["b"][1, 1] = float("nan"), float("inf")
    with Publisher(store, wire_dtype=wire) as publisher:
        for _ in range(2):
            publisher.publish((n, t.t()) for n, t in weights.items()).result(WAIT)
            weights["a"][3] *= 2
    expected = ModelView({n: t.t() for n, t in weights.items()}, wire)
    dtypes = {tensor.name: tensor.dtype for tensor in Run.open(store).schema.tensors}
    assert dtypes == {"a": "BF16" if wire else "F32", "b": "BF16", "c": "BF16" if wire else "F16", "d": "I64"}
    weights["a"][3] /= 2
    assert Run.open(store).manifest(1).digest == str(full.digest_of(expected))


def test_a_reference_is_version_zero_and_a_view_and_a_signature_work(tmp_path: Path) -> None:
    weights = history(3)
    (tmp_path / "base").mkdir()
    full.write_checkpoint(tmp_path / "base", ModelView(weights[0]))
    store = memory()
    with Publisher(store, reference=tmp_path / "base", sign=SigningKey.generate()) as publisher:
        published = [publisher.publish(one_by_one(each)).result(WAIT) for each in weights[1:]]
    run = Run.open(store)
    assert [link.kind for link in run.manifest(0).links] == ["reference"]
    assert [each.kinds for each in published] == [("delta",), ("delta",)]
    assert run.manifest(2).digest == str(full.digest_of(ModelView(weights[2])))
    viewed, store = [view_weights(0)], memory()
    viewed += [moved_bag(viewed[0], 1, 0.01)]
    with Publisher(store, view="fp8-block") as publisher:
        for each in viewed:
            shapes = each.schema.by_name()
            publisher.publish((n, _array(bits, shapes[n])) for n, bits in each.tensors.items()).result(WAIT)
    digests = [Run.open(store).manifest(version).digest for version in (0, 1)]
    assert digests == [str(full.digest_of(BlockView(each, Blocks(each.schema, FP8_BLOCK)))) for each in viewed]


def test_a_restarted_trainer_continues_and_resumes(caplog: pytest.LogCaptureFixture) -> None:
    store, weights = memory(), history(4)
    for number, given_detector in ((0, None), (1, HostDetector()), (2, None)):
        with Publisher(store, continues=True, detector=given_detector) as publisher:
            publisher.publish(one_by_one(weights[number]), wait=number == 1).result(WAIT)
    with Publisher(store) as publisher:
        with pytest.raises(DivergedRun):
            publisher.resume(one_by_one(weights[1]))
        assert publisher.resume(one_by_one(weights[2])) == 2
        publisher.publish(one_by_one(weights[3]))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert Run.open(store).manifest(3).links[0].kind == "delta"
    assert_published(store, weights)


def test_a_dense_change_is_streamed_and_then_deltas_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "most_pending", lambda nbytes: 1)
    store, weights = memory(), [*history(2), model(7), trained(model(7), 8)]
    with Publisher(store) as publisher:
        for each in weights:
            publisher.publish(one_by_one(each)).result(WAIT)
    assert_published(store, weights)


def test_a_model_and_pairs_are_versions_of_one_run_with_ties() -> None:
    """What shares memory in a module is stored once; its other name may come too, or alone, or not."""
    torch = pytest.importorskip("torch")
    from detector_support import Decoder

    net, store = Decoder(8, layers=1).to(torch.bfloat16), memory()
    tied = net.state_dict()
    assert tied["head.weight"].data_ptr() == tied["embed.weight"].data_ptr()
    with Publisher(store) as publisher:
        publisher.publish(net).result(WAIT)
        for left_out in ("head.weight", "embed.weight", None):
            with torch.no_grad():
                net.embed.weight[3] += 1
            publisher.publish((n, t.clone()) for n, t in tied.items() if n != left_out).result(WAIT)
            assert Run.open(store).manifest(publisher.version or 0).digest == str(full.digest_of(ModelView(net)))
        untied = {**tied, "head.weight": tied["head.weight"] + 1}
        for order in (list, reversed):
            with pytest.raises(SchemaMismatch, match=r"'(head|embed)\.weight' (is tied to|came twice)"):
                publisher.publish(order(list(untied.items())))
        with torch.no_grad():
            net.embed.weight[4] += 1
        publisher.publish(net).result(WAIT)
    assert verify(Run.open(store)).ok
    assert Run.open(store).newest() == 4


# ── what is refused ──────────────────────────────────────────────────────────────────────────────────────────────────


def broken_off(weights: Model) -> Iterator[tuple[str, Any]]:
    yield "embed.weight", weights["embed.weight"]
    yield "layer.bias", weights["layer.bias"]
    raise ZeroDivisionError("a gather failed")


def instead(weights: Model, name: str, other: Any) -> Iterator[tuple[str, Any]]:
    return ((n, other if n == name else array) for n, array in weights.items())


REFUSED: dict[str, tuple[Any, type[DeltawireError], str]] = {
    "breaks off": (broken_off, PublishFailed, r"after 'layer.bias': ZeroDivisionError: a gather failed"),
    "left out": (lambda w: [p for p in w.items() if p[0] != "scale"], SchemaMismatch, "ended without 'scale'"),
    "twice": (lambda w: [*w.items(), ("steps", w["steps"] + 1)], SchemaMismatch, "'steps' came twice with different"),
    "twice, other shape": (
        lambda w: [*w.items(), ("steps", w["steps"][:2])],
        SchemaMismatch,
        r"'steps' came twice, as I64 \[3\] and as I64 \[2\]",
    ),
    "shape": (lambda w: instead(w, "layer.weight", w["embed.weight"]), SchemaMismatch, r"'layer.weight' came as"),
    "dtype": (lambda w: instead(w, "layer.bias", np.ones(16, np.float16)), SchemaMismatch, "'layer.bias'"),
    "new": (lambda w: [*w.items(), ("extra", w["scale"])], SchemaMismatch, "'extra' came as .* does not have it"),
    "nothing": (lambda w: iter(()), SchemaMismatch, "brought nothing: was it used before"),
    "none": (lambda w: [*w.items(), None, ("steps", w["steps"])], UnsupportedTensor, "not NoneType"),
    "no pairs": (lambda w: w.values(), UnsupportedTensor, "brings pairs"),
    "no name": (lambda w: [(3, w["scale"])], UnsafeName, "named by strings"),
    "bad name": (lambda w: [("../scale", w["scale"])], UnsafeName, "scale"),
    "no tensor": (lambda w: instead(w, "scale", [3.0]), UnsupportedTensor, "'scale'"),
    "bad dtype": (lambda w: instead(w, "scale", np.ones((), np.complex128)), UnsupportedDtype, "'scale'"),
}


@pytest.mark.parametrize("wait", [False, True], ids=["captured", "streamed"])
@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_refused_publishes_nothing_and_the_next_publish_works(kind: str, wait: bool) -> None:
    bring, error, message = REFUSED[kind]
    store, weights = memory(), history(4)
    with Publisher(store) as publisher:
        publisher.publish(one_by_one(weights[0])).result(WAIT)
        for number in (1, 2):
            with pytest.raises(error, match=message):
                publisher.publish(bring(weights[number]), wait=wait)
        publisher.flush(WAIT)
        assert Run.open(store).newest() == 0
        publisher.publish(one_by_one(weights[3]), wait=wait).result(WAIT)
    assert_published(store, [weights[0], weights[3]])


@pytest.mark.parametrize("kind", ["breaks off", "twice", "twice, other shape", "nothing", "none", "bad dtype"])
def test_what_is_refused_first_makes_no_run(kind: str) -> None:
    bring, error, message = REFUSED[kind]
    store, weights = memory(), history(1)
    with Publisher(store) as publisher:
        with pytest.raises(error, match=message):
            publisher.publish(bring(weights[0]))
        assert not list(store.list(""))
        publisher.publish(one_by_one(weights[0]))
    assert_published(store, weights)


@pytest.mark.parametrize("stopped", [KeyboardInterrupt, UnsupportedDtype])
def test_a_generator_that_was_read_in_part_makes_no_run_of_what_is_left(
    stopped: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Published once more, as a loop of attempts does, it would be half a model."""
    store, weights, ends = memory(), history(1), []

    def bring() -> Iterator[tuple[str, Any]]:
        try:
            for number, pair in enumerate(weights[0].items()):
                if number == 2 and stopped is UnsupportedDtype:
                    yield "bad", np.ones(3, np.complex128)
                yield pair
        finally:
            ends.append(True)

    def take(source: OneByOne, pair: Any) -> str:
        if pair[0] == "layer.bias" and stopped is KeyboardInterrupt:
            raise KeyboardInterrupt
        return whole(source, pair)

    whole, generator = OneByOne._take, bring()
    with Publisher(store) as publisher:
        with monkeypatch.context() as patched, pytest.raises(stopped):
            patched.setattr(OneByOne, "_take", take)
            publisher.publish(generator)
        # what it holds open, such as a gather, has ended too
        assert ends
        with pytest.raises(SchemaMismatch, match="was it used before"):
            publisher.publish(generator)
        assert not list(store.list(""))
        publisher.publish(one_by_one(weights[0]))
    assert_published(store, weights)


def test_a_generator_that_uses_its_own_publisher_is_refused() -> None:
    store, weights = memory(), history(3)
    publisher = Publisher(store)
    publisher.publish(weights[0]).result(WAIT)
    calls = (lambda: publisher.publish(weights[2]), publisher.flush, publisher.close, publisher.weights)
    for call in (*calls, lambda: publisher.resume(weights[0])):

        def bring(call: Any = call) -> Iterator[tuple[str, Any]]:
            yield from weights[1].items()
            call()

        with pytest.raises(PublishFailed, match=r"after 'steps'.*generator of weights"):
            publisher.publish(bring())
    publisher.publish(weights[2])
    publisher.close()
    assert_published(store, [weights[0], weights[2]])


def test_the_weights_of_a_run_are_there_before_the_first_publish_and_between() -> None:
    store, weights = memory(), history(4)

    def published_last(publisher: Publisher) -> str:
        return str(full.digest_of(publisher.weights()))

    digests = [str(full.digest_of(ModelView(each))) for each in weights]
    with Publisher(store) as publisher:
        with pytest.raises(VersionNotFound):
            publisher.weights()
        publisher.publish(weights[0])
        assert published_last(publisher) == digests[0]
    with Publisher(store, continues=True) as publisher:
        assert published_last(publisher) == digests[0]
        publisher.publish(one_by_one(weights[1])).result(WAIT)
        assert published_last(publisher) == digests[1]
        # what it has itself is no change
        assert publisher.publish(publisher.weights()).result(WAIT).changed == 0
        publisher.publish(weights[2], wait=True)
        assert published_last(publisher) == digests[2]
        publisher.publish(weights[3])
    with pytest.raises(PublisherClosed):
        publisher.weights()
    verified(store, lambda version: weights[max(0, version - (version > 1))])


def test_a_process_that_a_generator_forks_does_not_publish(tmp_path: Path) -> None:
    """A child that goes on with the generator would wait for a thread that it does not have."""
    weights, children = history(3), list[int]()
    publisher = Publisher(tmp_path / "run")
    publisher.publish(weights[0]).result(WAIT)

    def bring() -> Iterator[tuple[str, Any]]:
        yield from list(weights[1].items())[:2]
        children.append(os.fork())
        yield from list(weights[1].items())[2:]

    code = 1
    try:
        version = publisher.publish(bring()).result(WAIT).version
    except PublishFailed as error:
        code = 0 if "before this process was forked" in str(error) else 2
    finally:
        if not children[0]:
            os._exit(code)
    assert os.waitpid(children[0], 0)[1] == 0
    assert version == 1
    publisher.publish(weights[2])
    publisher.close()
    assert_published(LocalStore(tmp_path / "run"), weights)


def test_an_optimizer_that_notes_changes_cannot_compare_what_comes_one_by_one() -> None:
    pytest.importorskip("torch")
    from detector_support import Trainer

    trainer = Trainer("adamw", memory())
    with pytest.raises(SchemaMismatch, match="leave out detector="):
        trainer.publisher.publish(trainer.tensors().items())


def test_memory_is_one_copy_and_one_tensor() -> None:
    """The tensor before is gone when the next one is made; and nothing of the model's size is allocated again."""
    count, size = 24, 1 << 20
    alive: list[weakref.ref[np.ndarray]] = []

    def bring(step: int) -> Iterator[tuple[str, np.ndarray]]:
        for number in range(count):
            assert all(ref() is None for ref in alive), "an earlier tensor is still there"
            tensor = np.full(size, number, np.uint16)
            tensor[step * 7] ^= 1
            alive.append(weakref.ref(tensor))
            yield f"layers.{number}", tensor
            del tensor

    with Publisher(memory()) as publisher:
        publisher.publish(bring(0)).result(WAIT)
        publisher.publish(bring(1)).result(WAIT)
        gc.collect()
        tracemalloc.start()
        publisher.publish(bring(2)).result(WAIT)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    # one tensor, and scratch of its comparison
    assert peak < 2 * size * count / 2, f"{peak:,} bytes"


@pytest.mark.parametrize("dense", [False, True])
def test_any_region_of_what_came_can_be_read(dense: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By rows and columns, across the plan's own cuts."""
    monkeypatch.setattr(pairs, "blocks", lambda schema: blocks(schema, 64))
    before = model(0, rows=20)
    after = model(1, rows=20) if dense else trained(before, 1)
    state = State(ModelView(before).schema)
    state.load(ModelView(before))
    source = OneByOne(None, state.schema, state)
    source.read(iter(after.items()), to_the_end=False)
    expected = ModelView(after)
    for tensor in state.schema.tensors:
        for region in pieces(Region(tensor, 0, tensor.rows, 0, tensor.columns), 35):
            assert np.array_equal(source.region(region), expected.region(region))
        for column in range(0, tensor.columns, 5):
            region = Region(tensor, tensor.rows // 3, tensor.rows // 2, column, min(5, tensor.columns - column))
            assert np.array_equal(source.region(region), expected.region(region))
    assert str(full.digest_of(source)) == str(full.digest_of(expected))


# ── interrupts ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_ctrl_c_within_the_iterator_loses_nothing() -> None:
    store, weights = memory(), history(4)

    def stopped() -> Iterator[tuple[str, Any]]:
        yield from list(weights[2].items())[:3]
        raise KeyboardInterrupt

    with Publisher(store) as publisher:
        publisher.publish(one_by_one(weights[0])).result(WAIT)
        publisher.publish(one_by_one(weights[1]))
        with pytest.raises(KeyboardInterrupt):
            publisher.publish(stopped())
        published = publisher.publish(one_by_one(weights[3])).result(WAIT)
    assert published.kinds == ("delta",)
    assert_published(store, [weights[0], weights[1], weights[3]])


@pytest.mark.parametrize("wait", [False, True], ids=["captured", "streamed"])
def test_pairs_at_every_line(wait: bool) -> None:
    """Everything that publishes, with an exception at each line in turn."""

    def operation(interrupted: Interrupted) -> None:
        store, weights = memory(), history(4, changes=9)
        publisher = Publisher(store, anchor_every=2)
        interrupted(lambda: publisher.publish(one_by_one(weights[0]), wait=wait))
        publisher.publish(one_by_one(weights[1]))
        interrupted(lambda: publisher.publish(one_by_one(weights[2]), wait=wait))
        publisher.publish(one_by_one(weights[3]), wait=wait)
        publisher.close(WAIT)
        assert_published(store, weights)

    where = [pairs, pipeline.Pipeline, captures.Captures, captures.Stream, detectors.HostDetector]
    done = raising_at_each_line(where if wait else [*where, publisher, background, rebuild], operation)
    assert sum("pairs.py" in str(place) for place in done) > 40


# ── several ranks ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two ranks that gather together. In the last scenario rank 1 is killed."""
    pytest.importorskip("torch")
    from test_shards import run_ranks

    scenarios = "pairs,pairs_refused,pairs_resume,early,pairs_interrupted/pairs_out_of_step/pairs_given_up/pairs_killed"
    return run_ranks([], tmp_path_factory.mktemp("pairs"), scenarios, 2, dies=1)


def test_rank_0_publishes_what_all_ranks_gather(two: Any) -> None:
    from test_shards import assert_same_run

    manifests = assert_same_run(two, "pairs")
    assert {"delta", "anchor"} == {link.kind for manifest in manifests[1:] for link in manifest.links}
    for report in two.reports:
        assert report["pairs versions"] == list(range(6)), "all ranks are told"
    assert two.reports[1]["pairs put"] == 0


def test_all_ranks_raise_and_the_next_publish_works(two: Any) -> None:
    from test_shards import assert_same_run

    expected = {
        "dtype": ("SchemaMismatch", "'up.weight'"),
        "name": ("SchemaMismatch", r"'up\.(weight|other)'"),
        "left out": ("SchemaMismatch", "'up.weight'"),
        "twice": ("SchemaMismatch", "'up.weight' came twice with different bits"),
        "broke off": ("PublishFailed", "after 'scale': ArithmeticError: no gather"),
        "a model": ("SchemaMismatch", "a second one for the other kind"),
    }
    for report in two.reports:
        for what, (kind, message) in expected.items():
            for rank in (0, 1) if what != "a model" else (0,):
                # other bits of a rank that does not write are not looked at
                if (what, rank) == ("twice", 1):
                    continue
                found = report[f"pairs {what} {rank}"]
                assert found[0] == kind, (what, rank, found)
                assert re.search(message, found[1]), (what, rank, found)
    assert len(assert_same_run(two, "pairs-refused")) == 2


def test_ranks_continue_a_run_and_publish_a_view(two: Any) -> None:
    from test_shards import assert_same_run

    manifests = assert_same_run(two, "pairs-resume")
    assert [manifest.links[0].kind for manifest in manifests] == ["anchor", "delta", "delta", "delta"]
    assert len(assert_same_run(two, "pairs-view")) == 2
    assert Run.open(str(two.folder / "pairs-view")).schema.by_name()["up.weight"].dtype == "F8_E4M3"
    for report in two.reports:
        assert report["pairs resumed"] == 1
        assert report["pairs diverged"][0] == "DivergedRun"
        assert report["pairs view"][0] == report["pairs view other"][0] == "SchemaMismatch"


def test_a_publisher_may_be_made_before_its_ranks_meet(two: Any) -> None:
    """The run is there after the first start, and no rank takes it from another one."""
    run = Run.open(str(two.folder / "early"))
    assert [run.manifest(version).step for version in run.listed()] == [0, 1]
    for report in two.reports:
        for version in range(2):
            assert report[f"early weights {version}"][0] == "Misconfigured"


def test_ranks_of_different_steps_are_told_so(two: Any) -> None:
    for report in two.reports:
        assert report["pairs steps"] == report["pairs after"]
        assert report["pairs steps"][0] == "OutOfStep"
        said = "rank 0: publish 2 of weights one by one, step=1, rank 1: publish 2 of weights one by one, step=2"
        assert said in report["pairs steps"][1]


def test_ranks_that_give_up_wait_for_nobody(two: Any) -> None:
    """Without `part` the close of rank 0 would wait as long as others may be late."""
    for report in two.reports:
        for what in ("pairs given up", "pairs given up, close"):
            assert report[what][0] == "OutOfStep", report[what]


def test_a_rank_that_is_interrupted_within_pairs_makes_no_wrong_version(two: Any) -> None:
    for report in two.reports:
        outcomes = report["interrupted-pairs"]
        assert outcomes["lost"] > 20
        # where what was captured moves no message is sent, and training goes on
        assert outcomes["went on"] > 5


def test_a_rank_that_dies_within_the_iterator_leaves_the_run_at_the_version_before(two: Any) -> None:
    survivor, killed = two.reports
    assert survivor["pairs killed"][0] == survivor["pairs after death"][0] == "RankLost"
    assert "pairs killed" not in killed
    run = Run.open(str(two.folder / "pairs-killed"))
    assert run.newest() == 0
    assert verify(run).ok
