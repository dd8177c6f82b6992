"""Runs in a Hugging Face bucket, end to end: the real client against the stand-in."""

from __future__ import annotations

import itertools
import logging
import random
import threading
import traceback
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest

from deltawire import Publisher, Replica
from deltawire.bucket.run import Run
from deltawire.bucket.verify import verify
from deltawire.bucket.watch import watch
from deltawire.core import keys
from deltawire.core.errors import ObjectNotFound, PublishFailed, StoreError, WriterConflict
from deltawire.store import HubStore, open_store
from support import blank, heartbeats, history, same
from tests.hub_stand_in import Fault, HubStandIn


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTAWIRE_WRITER_RENEWAL", "0.5")


@pytest.fixture
def run(hub: HubStandIn) -> str:
    return f"hf://buckets/me/{uuid.uuid4().hex}/wordle"


def test_a_replica_follows_a_publisher(run: str) -> None:
    models = history(8)
    live = blank(models[0])
    with Publisher(run) as publisher:
        replica = Replica(run, id="one")
        for number, weights in enumerate(models):
            assert publisher.publish(weights).result(60).version == number
            assert replica.sync(live) == number
            assert same(live, weights)
    result = verify(Run.open(run))
    assert (result.failure, result.versions, result.warnings) == (None, 8, [])
    assert [beat.version for beat in heartbeats(Run.open(run))] == [7]


def test_a_trainer_that_crashed_is_followed_by_another(run: str) -> None:
    models = history(4)
    crashed = Publisher(run)
    for weights in models[:2]:
        crashed.publish(weights).result(60)
    with Publisher(run) as publisher:
        assert publisher.resume(models[1]) == 1
        for weights in models[2:]:
            publisher.publish(weights).result(60)
    with pytest.raises(WriterConflict, match="took over"):
        crashed.publish(models[0]).result(60)
    live = blank(models[0])
    assert Replica(run).sync(live) == 3
    assert same(live, models[3])


def test_data_that_shows_after_its_manifest(hub: HubStandIn, run: str) -> None:
    models = history(3)
    live = blank(models[0])
    with Publisher(run) as publisher:
        publisher.publish(models[0]).result(60)
        replica = Replica(run)
        replica.sync(live)
        hub.faults.add(Fault("addFile .*deltas/step_000001", late_s=1.0))
        publisher.publish(models[1]).result(60)
        with pytest.raises(ObjectNotFound):
            open_store(run).get(Run.open(run).manifest(1).links[0].objects[0].key)
        assert replica.sync(live) == 1
        assert same(live, models[1])


def test_a_manifest_that_shows_late_is_a_version_that_comes_late(hub: HubStandIn, run: str) -> None:
    models = history(2)
    live = blank(models[0])
    with Publisher(run) as publisher:
        publisher.publish(models[0]).result(60)
        replica = Replica(run)
        hub.faults.add(Fault("addFile .*versions/000001", late_s=1.0))
        publisher.publish(models[1]).result(60)
        seen = []
        stop = threading.Event()
        for version in replica.follow(live, poll=0.1, stop=stop):
            seen.append(version)
            if version == 1:
                stop.set()
    assert seen in ([0, 1], [1])
    assert same(live, models[1])


def test_events_wake_a_watcher(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltawire.bucket.watch._LISTENING_S", 3600.0)
    models = history(3)
    seen: list[int] = []
    news, stop = threading.Condition(), threading.Event()

    def listen() -> None:
        # it would look by itself in an hour
        for version in watch(run, poll=3600.0, stop=stop):
            with news:
                seen.append(version)
                news.notify_all()

    with Publisher(run) as publisher:
        publisher.publish(models[0]).result(60)
        thread = threading.Thread(target=listen)
        thread.start()
        try:
            for number, weights in enumerate(models):
                if number:
                    publisher.publish(weights).result(60)
                with news:
                    assert news.wait_for(lambda number=number: number in seen, 120), seen
        finally:
            stop.set()
            thread.join(120)
    assert not thread.is_alive()


def test_a_publisher_outlives_a_hub_that_fails_now_and_then(hub: HubStandIn, run: str) -> None:
    models = history(6)
    with Publisher(run) as publisher:
        for number, weights in enumerate(models):
            hub.faults.add(
                Fault("POST .*/batch", status=500),
                Fault("POST /v1/shards", drop=True),
                Fault("POST .*/batch", drop=True, after=True),
                Fault("HEAD /buckets", status=429, retry_after=0),
            )
            assert publisher.publish(weights).result(100).version == number
            hub.faults.clear()
    result = verify(Run.open(run))
    assert (result.failure, result.versions) == (None, 6)


def test_what_a_version_costs(hub: HubStandIn, run: str) -> None:
    """The Hub counts requests per user, those of the API and those that resolve a path apart."""
    models = history(3)
    live = blank(models[0])

    def spent() -> tuple[int, int]:
        paths = [line.split()[1] for line in hub.requests]
        hub.requests.clear()
        return sum(path.startswith("/api/") for path in paths), sum(path.startswith("/buckets/") for path in paths)

    with Publisher(run) as publisher:
        replica = Replica(run, heartbeat=0)
        for weights in models[:2]:
            publisher.publish(weights).result(60)
        replica.sync(live)
        hub.requests.clear()
        publisher.publish(models[2]).result(60)
        publisher.flush()
        assert spent() == (3, 5)
        replica.sync(live)
        assert spent() <= (0, 4)


def test_no_secret_is_in_any_message(
    hub: HubStandIn, run: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    for logger in ("deltawire", "huggingface_hub", "httpx2"):
        caplog.set_level(logging.DEBUG, logger=logger)
    models, told = history(3), []
    with Publisher(run) as publisher:
        publisher.publish(models[0]).result(60)
        for fault in (Fault("POST .*/batch", times=50, status=403), Fault("GET .*-token", times=50, status=401)):
            hub.faults.add(fault)
            for call in (lambda: Publisher(run), lambda: Replica(run, id="one").sync(blank(models[0]))):
                try:
                    call()
                except StoreError:
                    told.append(traceback.format_exc())
            hub.faults.clear()
    assert told
    store = HubStore.from_url(run)
    told += [caplog.text, *capfd.readouterr()]
    told += [store.get(info.key).data.decode("latin-1") for info in store.list()]
    assert keys.RUN in {info.key for info in store.list()}
    for secret in (hub.token, hub.signature, *hub.xet_tokens.values()):
        assert not [text for text in told if secret in text]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_two_trainers_race_through_a_slow_hub(
    hub: HubStandIn, run: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests take uneven times, but less than a claim takes to settle: one stops, and what is published is whole."""
    monkeypatch.setenv("DELTAWIRE_WRITER_RENEWAL", "5")
    models, rng = history(7), random.Random(seed)
    with Publisher(run) as first:
        first.publish(models[0]).result(60)
    for _ in range(60):
        request_ = rng.choice(["POST .*/batch", "HEAD /buckets", "POST /v1/shards"])
        hub.faults.add(Fault(request_, delay_s=rng.uniform(0, 0.1)))

    def train(order: list[int]) -> bool:
        try:
            with Publisher(run) as publisher:
                for number in order:
                    publisher.publish(models[number]).result(60)
        except (WriterConflict, PublishFailed):
            return False
        return True

    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(train, ([1, 2, 3, 4], [5, 6, 5, 6])))
    # one after the other at most, where one of them was slow to begin
    opened = Run.open(run)
    writers = [opened.manifest(version).writer for version in opened.listed()]
    assert len([*itertools.groupby(writers)]) == len({*writers})
    assert sum(done) <= 1 or len(writers) == 9
    with Publisher(run) as last:
        last.publish(models[1]).result(60)
    result = verify(Run.open(run))
    assert result.failure is None
    live = blank(models[0])
    Replica(run, heartbeat=0).sync(live)
    assert same(live, models[1])
