"""A trainer is interrupted at each line of what publishes, goes on, and its replicas hold its own bits all the same."""

from __future__ import annotations

import signal
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from detector_support import Decoder, Trainer, raw, replica_model  # noqa: E402
from test_claim import Unconditional, owner  # noqa: E402

from deltawire import Publisher, Replica  # noqa: E402
from deltawire.bucket.run import Run  # noqa: E402
from deltawire.bucket.verify import verify  # noqa: E402
from deltawire.core import full, keys  # noqa: E402
from deltawire.core.errors import DigestMismatch, PublishFailed  # noqa: E402
from deltawire.core.parallel import Later  # noqa: E402
from deltawire.derive.followed import ViewDetector  # noqa: E402
from deltawire.models import ModelView  # noqa: E402
from deltawire.store import ObjectStore, Store  # noqa: E402
from deltawire.trainer import (  # noqa: E402
    adamw,
    background,
    captures,
    claim,
    commit,
    detectors,
    device,
    pending,
    pipeline,
    publisher,
    rebuild,
)
from deltawire.trainer import writer as version_writer  # noqa: E402
from deltawire.trainer.pending import PublishHandle  # noqa: E402
from deltawire.views import FP8_BLOCK  # noqa: E402
from deltawire.views.blocks import Blocks  # noqa: E402
from deltawire.views.host import BlockView  # noqa: E402
from interrupting import Interrupted, raising_at_each_line  # noqa: E402
from support import HookedStore, Model, blank, history, model, moved_bag, same, trained, verified  # noqa: E402
from view_models import weights as view_weights  # noqa: E402

WAIT = 60
KINDS = ["host", "snapshot", "streamed", "fused", "adamw"]
TRAINER: list[ModuleType] = [publisher, pipeline, rebuild, captures, background, detectors]


def memory() -> ObjectStore:
    return ObjectStore.from_url(f"memory://{uuid.uuid4()}")


class Gate:
    """Holds back the manifest of a version until it is opened."""

    def __init__(self, version: int) -> None:
        self.reached, self.open, self._key = threading.Event(), threading.Event(), keys.manifest(version)

    def __call__(self, moment: str, verb: str, key: str) -> None:
        if moment == "before" and verb == "put_if_absent" and key == self._key:
            self.reached.set()
            assert self.open.wait(WAIT)


def assert_published(store: Store, weights: list[Model]) -> None:
    """The newest version is the last of these, every version is one of them, in order, and a replica can follow."""
    digests = [str(full.digest_of(ModelView(each))) for each in weights]
    run = Run.open(store)
    found = [run.manifest(version).digest for version in run.listed()]
    assert found[-1] == digests[-1]
    places = [digests.index(digest) for digest in found]
    assert places == sorted(set(places)), places
    verified(store, lambda version: weights[places[version]])
    assert verify(run).ok
    copy = blank(weights[-1])
    Replica(store).sync(copy)
    assert same(copy, weights[-1])


def interrupted_publishes(**options: Any) -> Callable[[Interrupted], None]:
    """One version in flight, one that waits, one that is interrupted, and more after it."""

    def operation(interrupted: Interrupted) -> None:
        store, weights, gate = memory(), history(6, changes=9), Gate(1)
        publisher = Publisher(HookedStore(store, gate), anchor_every=2, **options)
        publisher.publish(weights[0]).result(WAIT)
        publisher.publish(weights[1])
        assert gate.reached.wait(WAIT)
        publisher.publish(weights[2])
        interrupted(lambda: publisher.publish(weights[3]))
        gate.open.set()
        interrupted(lambda: publisher.publish(weights[4]))
        publisher.publish(weights[5])
        publisher.flush(WAIT)
        publisher.close(WAIT)
        assert_published(store, weights)

    return operation


@pytest.mark.parametrize("options", [{}, {"encoding": "context"}], ids=["packed", "context"])
def test_publish_at_every_line(options: dict[str, Any]) -> None:
    assert len(raising_at_each_line(TRAINER, interrupted_publishes(**options))) > 100


def test_publish_at_every_line_where_threads_write_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltawire.core.parallel.WORTH_THREADS", 1)
    monkeypatch.setenv("DELTAWIRE_THREADS", "2")
    raising_at_each_line([captures.Captures.capture, detectors.HostDetector], interrupted_publishes())


def streamed_publishes() -> Callable[[Interrupted], None]:
    """They compare, encode, upload and commit in the caller's thread."""

    def operation(interrupted: Interrupted) -> None:
        store, weights = memory(), history(4, changes=9)
        publisher = Publisher(store, anchor_every=2)
        for each in weights[:-1]:
            interrupted(lambda each=each: publisher.publish(each, wait=True))
        publisher.publish(weights[-1], wait=True)
        publisher.close(WAIT)
        assert_published(store, weights)

    return operation


def test_a_streamed_publish_at_every_line() -> None:
    raising_at_each_line([captures.Stream, pipeline.Pipeline._stream], streamed_publishes())


@pytest.mark.slow
def test_a_publish_that_waits_at_every_line() -> None:
    assert len(raising_at_each_line([*TRAINER, pending, version_writer, commit], streamed_publishes())) > 200


def test_close_after_a_publish_that_was_interrupted_at_every_line() -> None:
    """Nothing is published in between, which would make up for it."""

    def operation(interrupted: Interrupted) -> None:
        store, weights = memory(), history(2, changes=9)
        publisher = Publisher(store)
        interrupted(lambda: publisher.publish(weights[0]))
        with suppress(PublishFailed):
            publisher.close(WAIT)
        publisher.close(WAIT)
        with Publisher(store, continues=True) as after:
            after.publish(weights[1])
        assert Run.open(store).manifest(Run.open(store).newest() or 0).digest == str(
            full.digest_of(ModelView(weights[1]))
        )

    raising_at_each_line([background.Background.submit, background.Background._start], operation)


def test_flush_and_close_at_every_line() -> None:
    def operation(interrupted: Interrupted) -> None:
        store, weights = memory(), history(3, changes=9)
        publisher = Publisher(store)
        for each in weights:
            publisher.publish(each)
        interrupted(lambda: publisher.flush(WAIT))
        interrupted(lambda: publisher.close(WAIT))
        publisher.close(WAIT)
        assert_published(store, weights)

    raising_at_each_line([publisher, pipeline, background], operation)


def test_a_close_that_is_interrupted_keeps_no_other_thread_waiting() -> None:
    def operation(interrupted: Interrupted) -> None:
        store, weights = memory(), history(2)
        publisher = Publisher(store)
        for each in weights:
            publisher.publish(each)
        interrupted(lambda: publisher.close(WAIT))
        closing = threading.Thread(target=publisher.close, daemon=True)
        closing.start()
        closing.join(WAIT)
        assert not closing.is_alive()
        assert_published(store, weights)

    assert len(raising_at_each_line([Publisher._close, Publisher._uninterrupted], operation)) > 10


class Small(Trainer):
    def make_model(self) -> torch.nn.Module:
        return Decoder(8, layers=1)


class Training:
    """A trainer whose steps and publishes are interrupted, and what it held at each publish."""

    def __init__(self, kind: str, store: Store, **options: Any) -> None:
        self.trainer = Small(kind, store, anchor_every=2, **options)
        self.seen: list[str] = []

    def publish(self, **options: Any) -> Any:
        self.seen.append(str(full.digest_of(ModelView(self.trainer.tensors(), "bf16"))))
        return self.trainer.publish(**options)

    def assert_published(self, store: Store) -> None:
        run = Run.open(store)
        found = [run.manifest(version).digest for version in run.listed()]
        assert found[-1] == self.seen[-1]
        assert set(found) <= set(self.seen)
        assert verify(run).ok
        copy = replica_model(self.trainer)
        Replica(store).sync(copy)
        bits = self.trainer.bits()
        assert all((raw(copy[name]) == bits[name]).all() for name in bits)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_training_with_each_detector_at_every_line(kind: str) -> None:
    def operation(interrupted: Interrupted) -> None:
        store, gate = memory(), Gate(1)
        training = Training(kind, HookedStore(store, gate))
        training.publish().result(WAIT)
        training.trainer.step()
        training.publish()
        assert gate.reached.wait(WAIT)
        # a publish that compares with the bucket waits for what is in flight
        threading.Timer(0.02, gate.open.set).start()
        for _ in range(2):
            interrupted(training.trainer.step)
            interrupted(training.publish)
        training.trainer.step()
        training.publish()
        training.trainer.publisher.flush(WAIT)
        training.trainer.publisher.close(WAIT)
        training.assert_published(store)

    raising_at_each_line([*TRAINER, device, adamw], operation)


MOVING: dict[str, list[Any]] = {
    "host": [detectors.HostDetector],
    "snapshot": [device.DeviceDetector._detect, device.DeviceCopy.take],
    "streamed": [device.PinnedCopy.take, device.PinnedCopy.changes],
    "fused": [device.FusedDetector.cast, device.FusedDetector.detect],
    "adamw": [
        adamw.LoggedParameters.take,
        adamw.DeltaAdamW._follow,
        adamw.DeltaAdamW._remember,
        adamw.DeltaAdamW._step_by_torch,
    ],
}
"""Where the weights captured last move."""


@pytest.mark.parametrize("kind", MOVING)
def test_each_detector_where_a_capture_is_taken(kind: str) -> None:
    """The everyday part of the test above: the lines between the detector's weights and the list of captures."""

    def operation(interrupted: Interrupted) -> None:
        store = memory()
        training = Training(kind, store)
        training.publish().result(WAIT)
        interrupted(training.trainer.step)
        interrupted(training.publish)
        training.publish()
        training.trainer.publisher.close(WAIT)
        training.assert_published(store)

    raising_at_each_line([captures.Captures.capture, *MOVING[kind]], operation)


def test_a_handler_that_publishes_within_a_publish_is_refused() -> None:
    """As people write it for SIGTERM: refused at once, and the publish that it interrupted ends as if nothing were."""
    store, weights, refused = memory(), history(3), []
    publisher = Publisher(store)
    publisher.publish(weights[0]).result(WAIT)

    def handler(*_: Any) -> None:
        calls = (lambda: publisher.publish(weights[2]), publisher.close, publisher.flush)
        for call in (*calls, lambda: publisher.resume(weights[1])):
            with pytest.raises(PublishFailed, match="Set a flag"):
                call()
            refused.append(call)

    class Signalling(ModelView):
        def region(self, region: Any) -> Any:
            if not refused:
                signal.raise_signal(signal.SIGUSR1)
            return super().region(region)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        assert publisher.publish(Signalling(weights[1])).result(WAIT).version == 1
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(refused) == 4
    publisher.publish(weights[2])
    publisher.close(WAIT)
    assert_published(store, weights)


def test_a_handler_that_publishes_at_any_line_of_a_publish_loses_nothing() -> None:
    """It is refused, or comes before or after."""
    publisher, weights, refused = Publisher(memory()), history(4), [0, 0]

    def publish() -> None:
        refused[0] += 1
        try:
            publisher.publish(weights[2])
        except PublishFailed as error:
            refused[1] += "Set a flag" in str(error)

    def operation(interrupted: Interrupted) -> None:
        nonlocal publisher
        store = memory()
        publisher = Publisher(store)
        interrupted(lambda: publisher.publish(weights[0]))
        interrupted(lambda: publisher.publish(weights[1]))
        publisher.publish(weights[3]).result(WAIT)
        publisher.close(WAIT)
        digests = [str(full.digest_of(ModelView(each))) for each in weights]
        run = Run.open(store)
        found = [run.manifest(version).digest for version in run.listed()]
        assert set(found) <= {*digests}
        assert found[-1] == digests[-1]

    raising_at_each_line(TRAINER, operation, handler=publish)
    assert refused[0] > refused[1] > 50


def test_a_handler_may_publish_while_its_thread_waits() -> None:
    """In `flush` nothing is half done."""
    store, weights, gate = memory(), history(3), Gate(1)
    publisher = Publisher(HookedStore(store, gate))
    publisher.publish(weights[0]).result(WAIT)
    publisher.publish(weights[1])
    assert gate.reached.wait(WAIT)

    def handler(*_: Any) -> None:
        publisher.publish(weights[2])
        gate.open.set()

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        publisher._pipeline.background.flush(
            WAIT, lambda: None if gate.open.is_set() else signal.raise_signal(signal.SIGUSR1)
        )
    finally:
        signal.signal(signal.SIGUSR1, before)
    publisher.close(WAIT)
    assert_published(store, weights)


@pytest.mark.parametrize(
    ("kind", "within"),
    [("adamw", (adamw.DeltaAdamW, "_remember")), ("fused", (device.FusedDetector, "_joined"))],
    ids=["adamw", "fused"],
)
@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
def test_a_handler_that_publishes_within_a_step_is_refused(
    kind: str, within: tuple[type, str], first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where an optimizer or a cast keeps account itself, half of a step cannot be told from what was published."""
    store, refused = memory(), []
    training = Training(kind, store)
    if not first:
        training.publish().result(WAIT)
        training.trainer.step()

    def handler(*_: Any) -> None:
        with pytest.raises(PublishFailed, match="Set a flag"):
            training.trainer.publish()
        refused.append(True)

    place, name = within
    inner = getattr(place, name)

    def signalling(*given: Any) -> Any:
        if not refused:
            signal.raise_signal(signal.SIGUSR1)
        return inner(*given)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(place, name, signalling)
            training.trainer.step()
    finally:
        signal.signal(signal.SIGUSR1, before)
    # nothing keeps account before the first publish, which may come at any moment
    assert bool(refused) is not first
    training.publish()
    training.trainer.publisher.close(WAIT)
    training.assert_published(store)


def test_a_handler_may_publish_and_wait_wherever_its_thread_waits() -> None:
    """The thread of a version needs nothing of those who wait for it, at whatever line a signal finds them."""
    publisher, weights = Publisher(memory()), history(4)

    def publish_and_wait() -> None:
        published.append(publisher.publish(weights[2]).result(WAIT).version)

    published: list[int] = []

    def operation(interrupted: Interrupted) -> None:
        nonlocal publisher
        store, gate = memory(), Gate(1)
        publisher = Publisher(HookedStore(store, gate))
        publisher.publish(weights[0]).result(WAIT)
        handle = publisher.publish(weights[1])
        assert gate.reached.wait(WAIT)
        threading.Timer(0.01, gate.open.set).start()

        def wait() -> None:
            assert publisher.queue
            assert repr(publisher)
            handle.result(WAIT)
            publisher.flush(WAIT)

        interrupted(wait)
        publisher.publish(weights[3])
        publisher.close(WAIT)
        assert_published(store, weights)

    where = [Later, PublishHandle, background, Publisher.flush, Publisher.version, Publisher.queue, Publisher.__repr__]
    done = raising_at_each_line(where, operation, handler=publish_and_wait)
    assert len(published) == len(done) > 20


def test_an_anchor_of_other_weights_than_the_chain_is_not_committed() -> None:
    """Whatever made them differ, the trainer finds it, not its replicas; the cure is an anchor of the weights."""
    store, weights = memory(), history(5)
    publisher = Publisher(store, anchor_every=2)
    for each in weights[:2]:
        publisher.publish(each).result(WAIT)
    captured = publisher._pipeline._opened().captures
    captured.detector.state.bits("layer.weight")[3] ^= 1  # type: ignore[attr-defined]
    changed = trained(weights[1], 77)
    changed["layer.weight"].reshape(-1)[3] = weights[1]["layer.weight"].reshape(-1)[3] ^ 1
    handle = publisher.publish(changed)
    with pytest.raises(DigestMismatch, match="contradicts what it published"):
        handle.result(WAIT)
    assert Run.open(store).newest() == 1
    with pytest.raises(PublishFailed, match="the next version will be an anchor"):
        publisher.publish(weights[2])
    assert publisher.publish(weights[3]).result(WAIT).kinds == ("anchor",)
    assert publisher.publish(weights[4]).result(WAIT).kinds == ("delta",)
    publisher.close(WAIT)
    assert_published(store, [*weights[:2], weights[3], weights[4]])


@pytest.mark.parametrize("wait", [False, True], ids=["captured", "streamed"])
@pytest.mark.parametrize("kind", ["plain", "view", "adapter", "reference"])
def test_two_answers_are_compared_for_every_anchor(
    kind: str, wait: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Version 2 has an anchor of weights that the chain does not lead to. The cure is an anchor of the trainer's."""
    store, options = memory(), {"anchor_every": 2, "anchor_ratio": 1e9}
    weights: list[Any] = history(6)
    if kind == "view":
        options["view"] = "fp8-block"
        weights = [view_weights(0)]
        for seed in range(5):
            weights.append(moved_bag(weights[-1], seed, 0.01))
    elif kind == "reference":
        (tmp_path / "base").mkdir()
        full.write_checkpoint(tmp_path / "base", ModelView(weights[0]))
        options["reference"] = tmp_path / "base"
    elif kind == "adapter":
        pytest.importorskip("peft")
        from test_adapters import adapter, optimizer_of, peft_model, train

        trained_model = peft_model()
        optimizer = optimizer_of(trained_model)

    publisher, seen = Publisher(store, **options), []
    put = version_writer.VersionWriter._put

    def spoiled(writer: Any, terms: Any, pending: Any, kinds: Any, *rest: Any) -> Any:
        if kinds[1] and terms.version == 2:
            monkeypatch.undo()
            changes = pending.changes
            state = (changes.owner if isinstance(changes, captures.Capture) else changes._captures).detector.state
            state.bits(max(state.schema.tensors, key=lambda tensor: tensor.units).name)[5] ^= 1
        return put(writer, terms, pending, kinds, *rest)

    monkeypatch.setattr(version_writer.VersionWriter, "_put", spoiled)

    def publish(number: int) -> Any:
        model = weights[number]
        if kind == "adapter":
            train(trained_model, optimizer)
            model = adapter(trained_model)
        if kind == "view":
            seen.append(str(full.digest_of(BlockView(model, Blocks(model.schema, FP8_BLOCK)))))
        else:
            tensors = model.state_dict() if kind == "adapter" else model
            seen.append(str(full.digest_of(ModelView(tensors, "bf16" if kind == "adapter" else None))))
        return publisher.publish(model, wait=wait).result(WAIT)

    for number in range(2 - (kind == "reference")):
        # a reference is version 0 itself
        publish(number)
    with pytest.raises(DigestMismatch, match="contradicts what it published"):
        publish(2)
        publish(3)
    assert Run.open(store).newest() == 1
    if not wait:
        with pytest.raises(PublishFailed, match="the next version will be an anchor"):
            publish(3)
    cured = publish(4)
    assert (cured.version, cured.kinds) == (2, ("anchor",))
    assert publish(5).kinds == ("delta",)
    publisher.close(WAIT)
    run = Run.open(store)
    found = [run.manifest(version).digest for version in run.listed()]
    assert set(found) <= {*seen}
    assert found[-1] == seen[-1]
    assert verify(run).ok


def test_a_capture_that_does_not_start_from_the_newest_version_is_not_committed() -> None:
    store, weights = memory(), history(4)
    publisher = Publisher(store)
    for each in weights[:2]:
        publisher.publish(each).result(WAIT)
    captured = publisher._pipeline._opened().captures
    captured._digest -= captured._digest
    with pytest.raises(DigestMismatch):
        publisher.publish(weights[2]).result(WAIT)
    with pytest.raises(PublishFailed):
        publisher.publish(weights[2])
    publisher.publish(weights[3])
    publisher.close(WAIT)
    assert_published(store, [*weights[:2], weights[3]])


@pytest.mark.parametrize("refuses", [True, False], ids=["put-if-absent", "claim"])
def test_a_commit_at_every_line(refuses: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A manifest that is there was committed by this trainer, whatever it has heard; head is only a hint."""
    monkeypatch.setenv("DELTAWIRE_WRITER_RENEWAL", "0.1")

    def operation(interrupted: Interrupted) -> None:
        store, versions = memory(), [model(0)]
        publisher = Publisher(store if refuses else Unconditional(store), anchor_every=2)
        publisher.publish(versions[0], wait=True)
        for seed in range(3):
            versions.append(trained(versions[-1], seed))
            interrupted(lambda: publisher.publish(versions[-1], wait=True))
        versions.append(trained(versions[-1], 9))
        publisher.publish(versions[-1], wait=True)
        publisher.close()
        run = Run.open(store)
        assert verify(run).ok
        assert run.head_hint() == run.newest()
        digests = [str(full.digest_of(ModelView(each))) for each in versions]
        places = [digests.index(run.manifest(version).digest) for version in run.listed()]
        assert places == sorted(set(places))
        assert places[-1] == len(versions) - 1

    raising_at_each_line([commit.Committer, claim.Claim.check, claim.Claim.confirm], operation)


@pytest.mark.parametrize("refuses", [True, False], ids=["put-if-absent", "claim"])
def test_a_claim_at_every_line(refuses: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program takes the run again, from itself, and leaves it to the next one when it has closed."""
    monkeypatch.setenv("DELTAWIRE_WRITER_RENEWAL", "0.02")
    weights = history(3, changes=9)

    def operation(interrupted: Interrupted) -> None:
        store, made = memory(), list[Publisher]()
        run = store if refuses else Unconditional(store)
        with Publisher(run) as before:
            before.publish(weights[0], wait=True)
        interrupted(lambda: made.append(Publisher(run)))
        publisher = made[0] if made else Publisher(run)
        publisher.publish(weights[1], wait=True)
        interrupted(publisher.close)
        publisher.close()
        assert owner(store).ended, owner(store)
        with Publisher(run) as after:
            after.publish(weights[2], wait=True)
        assert_published(store, weights)

    places = raising_at_each_line([claim.Claim], operation)
    assert {"take", "_until_free", "release", "drop"} <= {place.code.co_name for place in places}


def test_interrupted_commits_are_found_again() -> None:
    """A commit that was interrupted after its manifest was created is not another trainer's."""
    store, weights = memory(), [model(0)]
    fail = True

    def hook(moment: str, verb: str, key: str) -> None:
        nonlocal fail
        if fail and (moment, verb, key) == ("after", "put_if_absent", keys.manifest(1)):
            fail = False
            raise KeyboardInterrupt

    publisher = Publisher(HookedStore(store, hook))
    for seed in range(3):
        weights.append(trained(weights[-1], seed))
        try:
            publisher.publish(weights[-2], wait=True)
        except KeyboardInterrupt:
            assert not fail
    publisher.publish(weights[-1], wait=True)
    publisher.close(WAIT)
    assert_published(store, weights)


def test_an_optimizer_interrupted_between_its_step_and_its_log() -> None:
    """Torch's fused step is no write by autograd's count: the optimizer has to know by itself that its log lacks it."""

    def operation(interrupted: Interrupted) -> None:
        store = memory()
        training = Training("adamw", store)
        training.publish().result(WAIT)
        training.trainer.step()
        interrupted(training.trainer.step)
        training.publish()
        training.trainer.publisher.close(WAIT)
        training.assert_published(store)

    raising_at_each_line([adamw.DeltaAdamW._step_by_torch], operation)


@pytest.mark.parametrize("kind", [detectors.HostDetector, ViewDetector])
def test_a_thread_of_an_abandoned_stream_writes_to_nothing_that_counts(kind: type[detectors.HostDetector]) -> None:
    """Nor where the user's own detector is loaded again."""
    before, after = {"w": np.zeros(8, "float32")}, {"w": np.ones(8, "float32")}
    detector = kind()
    detector.bind(ModelView(before))
    stream = captures.Stream(captures.Captures(detector, detector.load(ModelView(before))), ModelView(after), None)
    digest = detector.load(ModelView(before))
    # as a worker that an interrupt has left at work
    stream._encode(detector.plan[0], "packed")
    assert full.digest_of(detector.state) == digest


def test_a_thread_of_an_abandoned_capture_writes_to_nothing_that_counts() -> None:
    before, after = {"w": np.zeros(8, "float32")}, {"w": np.ones(8, "float32")}
    detector = detectors.HostDetector()
    detector.bind(ModelView(before))
    detector.load(ModelView(before))
    late = detector.detect(ModelView(after), 1 << 20)
    digest = detector.load(ModelView(before))
    late()
    assert full.digest_of(detector.state) == digest
