"""Adapters beside the base weights: followed, loaded by all ranks or none, lent to requests, dropped when unneeded."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fastapi")

from prometheus_client import CollectorRegistry, generate_latest
from test_follower import loop, until

from deltawire.core import full, keys
from deltawire.core.change import whole
from deltawire.core.errors import VersionNotFound, VersionRefused
from deltawire.core.schema import Schema, TensorSpec
from deltawire.core.state import State
from deltawire.engines.control import FollowerMetrics
from deltawire.engines.live.adapters import KEPT, LEASE_S, AdapterFollower, Adapters, Loaded, Registry
from deltawire.trainer import Publisher

__all__ = ["loop"]

pytestmark = pytest.mark.usefixtures("forked_programs")


def make_base(folder: Path, seed: int = 0) -> Path:
    folder.mkdir()
    state = State(Schema.build([TensorSpec("model.q_proj.weight", "BF16", (8, 4096))]))
    for bits in state.tensors.values():
        bits[:] = np.random.default_rng(seed).integers(0, 1 << 16, bits.size, np.uint16)
    full.write_checkpoint(folder, state)
    return folder


class Trainer:
    """Publishes versions of an adapter for a base model."""

    def __init__(self, run: Path, base: Path) -> None:
        config = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "base_model_name_or_path": str(base)}
        self.run, self._rng = run, np.random.default_rng(1)
        self.publisher = Publisher(run, files={"adapter_config.json": json.dumps(config).encode()})
        # large enough for deltas to be smaller than full weights
        self.weights = {
            f"base_model.model.model.q_proj.lora_{half}.weight": self._rng.integers(0, 1 << 15, shape, np.uint16)
            for half, shape in (("A", (2, 4096)), ("B", (8, 2)))
        }

    def publish(self) -> int:
        for bits in self.weights.values():
            bits[0, 0] += 1
        return self.publisher.publish(self.weights).result(60).version


class Ranks(Adapters):
    """Two ranks that read what they load, and can fail."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.ranks: list[dict[str, dict[str, bytes]]] = [{}, {}]
        self.names: dict[str, Loaded] = {}
        self.fail = ""
        self.refused: set[str] = set()
        self.tried: list[str] = []
        self.added: list[str] = []
        self.given = 0
        self.learned: list[Any] = [None, None]
        """What each rank says of how versions are to be arranged."""
        self.asked: dict[int, int] = {}

    def new_id(self) -> int:
        self.given += 1
        return self.given

    async def call_ranks(self, operation: str, **adapter: Any) -> list[Any]:
        id, name = adapter["id"], adapter["name"]
        if operation == "unload":
            for rank in self.ranks:
                rank.pop(name, None)
            return [{}, {}]
        if operation == "stage":
            self.asked[id] = self.asked.get(id, 0) + 1
            # the first rank reads longer
            said = [{"arrangement": learned, "read_by_engine": "it learns"} for learned in self.learned]
            return [{"done": self.asked[id] > 1, **said[0]}, {"done": True, **said[1]}]
        self.tried.append(name)
        self.ranks[0][name] = {path.name: path.read_bytes() for path in sorted(Path(adapter["folder"]).iterdir())}
        await asyncio.sleep(0)
        if self.fail or name in self.refused:
            return [{"done": True}, {"error": self.fail or "refused"}]
        self.added.append(name)
        self.ranks[1][name] = self.ranks[0][name]
        return [{"done": True}, {"done": True}]

    def serve(self, loaded: Loaded) -> None:
        self.names |= {loaded.name: loaded, loaded.full_name: loaded}

    def withdraw(self, loaded: Loaded) -> None:
        del self.names[loaded.full_name]

    def held(self) -> list[str] | None:
        """What both ranks hold; None while they differ."""
        first, second = (sorted(rank) for rank in self.ranks)
        return first if first == second else None


class Scene:
    def __init__(self, folder: Path, loop: asyncio.AbstractEventLoop) -> None:
        self.loop, self.base = loop, make_base(folder / "base")
        self.trainer = Trainer(folder / "run", self.base)

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def follow(self, **options: Any) -> Ranks:
        async def make() -> Ranks:
            runs = {"policy": str(self.trainer.run)}
            return Ranks(runs, **{"source": str(self.base), "poll": 0.01, "heartbeat": 0, **options})

        self.adapters: Ranks = self.run(make())
        self.adapters.start()
        return self.adapters

    def until(self, **expected: Any) -> dict[str, Any]:
        def reached() -> bool:
            [status] = self.adapters.status()
            return all(status[key] == value for key, value in expected.items())

        until(reached)
        return self.adapters.status()[0]

    def begin(self, model: str) -> Callable[[], None]:
        """A request that runs until what is returned is called."""
        stopped = asyncio.Event()

        async def outputs() -> AsyncIterator[int]:
            yield 1
            await stopped.wait()

        async def start() -> asyncio.Task[None]:
            loaded = self.adapters.names[model]
            lent = self.adapters.lend(loaded, outputs(), named=model == loaded.full_name)
            assert await anext(lent) == 1

            async def rest() -> None:
                async for _ in lent:
                    pass

            return asyncio.create_task(rest())

        task = self.run(start())

        def stop() -> None:
            self.loop.call_soon_threadsafe(stopped.set)
            self.run(asyncio.wait_for(task, 60))

        return stop


@pytest.fixture
def scene(tmp_path: Path, loop: asyncio.AbstractEventLoop) -> Iterator[Scene]:
    made = Scene(tmp_path, loop)
    yield made
    made.trainer.publisher.close()
    if hasattr(made, "adapters"):
        made.adapters.stop(60)


def test_versions_are_loaded_as_folders_of_peft_and_older_ones_dropped(scene: Scene) -> None:
    adapters = scene.follow(keep=1)
    # there may be no run yet
    assert scene.until(state="starting")["version"] is None
    assert adapters.health("idle", "no run")[0] == "starting"
    for _ in range(4):
        version = scene.trainer.publish()
        status = scene.until(state="healthy", version=version)
        until(lambda: adapters.held() == [f"policy@{n}" for n in range(max(0, version - 1), version + 1)])  # noqa: B023
    assert (status["name"], status["failures"], status["newest"]) == ("policy", 0, 3)
    assert scene.until(loaded=[2, 3])
    assert adapters.names["policy"].version == 3
    assert adapters.health("idle", "no run") == ("healthy", "")
    content = adapters.ranks[1]["policy@3"]
    assert sorted(content) == ["adapter_config.json", "adapter_model.safetensors"]
    folder = adapters.names["policy"].folder
    held = full.Checkpoint(folder)
    for name, bits in scene.trainer.weights.items():
        assert np.array_equal(held.region(whole(held.schema.by_name()[name])).reshape(bits.shape), bits)
    # of the versions that were dropped nothing is left on disk
    until(lambda: len([*folder.parent.iterdir()]) == 2)


WANTED = {"dtype": "BF16", "parts": [[["base_model.model.model.q_proj.lora_A.weight", 0.5]]]}


def make_finite(trainer: Trainer) -> None:
    for bits in trainer.weights.values():
        bits &= 0x3FFF
        bits |= 0x2000


def test_later_versions_are_arranged_as_all_ranks_want_them(scene: Scene) -> None:
    make_finite(scene.trainer)
    adapters = scene.follow()
    adapters.learned = [WANTED, WANTED]
    for version in range(3):
        scene.trainer.publish()
        scene.until(state="healthy", version=version)
        arranged = adapters.ranks[1][f"policy@{version}"].get("arranged")
        assert (arranged is None) == (version == 0)
    bits = scene.trainer.weights["base_model.model.model.q_proj.lora_A.weight"].reshape(-1)
    halves = ((bits.astype(np.uint32) << 16).view(np.float32) / 2).view(np.uint32) >> 16
    assert arranged is not None
    assert np.array_equal(np.frombuffer(arranged, np.uint16), halves)
    # once all ranks have read it, it takes no memory
    assert sorted(path.name for path in adapters.names["policy"].folder.iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors",
    ]  # fmt: skip


def test_versions_that_ranks_want_arranged_differently_are_read_by_the_engine(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    adapters = scene.follow()
    adapters.learned = [WANTED, {**WANTED, "dtype": "F32"}]
    for version in range(3):
        scene.trainer.publish()
        assert scene.until(state="healthy", version=version)["read_by_engine"] == "its ranks arrange it differently"
        assert "arranged" not in adapters.ranks[1][f"policy@{version}"]
    assert len([record for record in caplog.records if "are read by the engine" in record.message]) == 1


def test_a_version_that_cannot_be_arranged_is_read_by_the_engine(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    make_finite(scene.trainer)
    adapters = scene.follow()
    adapters.learned = [WANTED, WANTED]
    scene.trainer.publish()
    scene.until(state="healthy", version=0)
    # no number
    scene.trainer.weights["base_model.model.model.q_proj.lora_A.weight"][0, 1] = 0x7FC1
    scene.trainer.publish()
    scene.until(state="healthy", version=1)
    assert "arranged" not in adapters.ranks[1]["policy@1"]
    assert "policy@1 is read by the engine: some weights are not finite" in caplog.text


def test_a_process_that_is_lost_between_two_versions_is_started_again(scene: Scene) -> None:
    adapters = scene.follow()
    scene.trainer.publish()
    scene.until(state="healthy", version=0)
    adapters.decoder.do(lambda decoder: decoder._process.kill())
    scene.trainer.publish()
    assert scene.until(state="healthy", version=1)["failures"] == 0


def test_a_request_keeps_its_version_until_it_ends(scene: Scene) -> None:
    adapters = scene.follow(keep=0)
    first = scene.trainer.publish()
    scene.until(version=first)
    end = scene.begin("policy")
    second = scene.trainer.publish()
    scene.until(version=second, loaded=[first, second])
    assert adapters.names["policy"].version == second
    assert adapters.names[f"policy@{first}"].folder.is_dir()
    end()
    until(lambda: adapters.held() == [f"policy@{second}"])
    assert f"policy@{first}" not in adapters.names


def test_no_request_can_name_a_version_while_another_is_dropped(scene: Scene) -> None:
    adapters = scene.follow(keep=0)
    named: list[set[str]] = []
    remove = adapters.remove

    async def removed(loaded: Loaded) -> None:
        named.append({*adapters.names})
        await remove(loaded)

    for number in range(3):
        scene.trainer.publish()
        scene.until(version=number)
        adapters.names["policy"].requests += 1
    adapters.remove = removed  # type: ignore[method-assign]

    async def end() -> None:
        for number in range(2):
            adapters.names[f"policy@{number}"].requests -= 1
            adapters._sweep_soon()

    scene.run(end())
    until(lambda: adapters.held() == ["policy@2"])
    assert named == [{"policy", "policy@2"}] * 2


def test_requests_that_are_dropped_unread_give_their_version_back(scene: Scene) -> None:
    adapters = scene.follow(keep=0)
    scene.trainer.publish()
    scene.until(version=0)

    async def outputs() -> AsyncIterator[int]:
        yield 1

    async def lend() -> None:
        adapters.lend(adapters.names["policy"], outputs(), named=False)
        gc.collect()

    scene.run(lend())
    until(lambda: adapters.names["policy"].requests == 0)


def test_a_failed_load_leaves_all_ranks_and_names_as_they_were(scene: Scene) -> None:
    adapters = scene.follow()
    scene.trainer.publish()
    scene.until(version=0, state="healthy")
    adapters.fail = "LoRA rank 64 is greater than max_lora_rank 16."
    scene.trainer.publish()
    status = scene.until(state="degraded", version=0)
    assert "policy@1 cannot be loaded, nothing has changed: rank 1: LoRA rank 64" in status["reason"]
    assert adapters.health("idle", "") == ("degraded", f"adapter policy: {status['reason']}")
    assert adapters.names["policy"].version == 0
    until(lambda: adapters.held() == ["policy@0"])
    adapters.fail = ""
    adapters.followers["policy"].command(None)
    scene.until(state="healthy", version=1)
    assert adapters.names["policy"].version == 1


def test_a_refused_version_is_left_alone_until_there_is_a_later_one_or_time_has_passed(scene: Scene) -> None:
    adapters = scene.follow()
    scene.trainer.publish()
    scene.until(version=0, state="healthy")
    replica = adapters.followers["policy"].replica
    looks, look = [0], replica._next

    def looked(*args: Any) -> int | None:
        looks[0] += 1
        return look(*args)

    replica._next = looked  # type: ignore[method-assign]
    adapters.refused = {"policy@1"}
    scene.trainer.publish()
    reason = scene.until(state="degraded")["reason"]
    before = looks[0]
    until(lambda: looks[0] > before + 20)
    assert adapters.tried == ["policy@0", "policy@1"]
    assert scene.until(state="degraded")["reason"] == reason
    refusals = replica._failures._refusals
    refusals[1] = replace(refusals[1], until=0.0)
    until(lambda: adapters.tried == ["policy@0", "policy@1", "policy@1"])
    scene.trainer.publish()
    scene.until(state="healthy", version=2)


def refuse_after_passing_one_through(scene: Scene, **options: Any) -> tuple[AdapterFollower, Ranks]:
    """Version 0 is served, 1 was passed through on the way to 2, and 2 was refused."""
    scene.trainer.publish()
    adapters = scene.follow(pins={"policy": 0}, **options)
    scene.until(version=0, state="healthy")
    adapters.refused = {"policy@2"}
    for _ in range(2):
        scene.trainer.publish()
    follower = adapters.followers["policy"]
    follower.command(None, pin=True)
    assert scene.until(state="degraded", version=0, newest=2)["lag"] == 2
    assert follower.replica.version == 1
    return follower, adapters


def test_heartbeats_name_the_version_that_is_served(scene: Scene) -> None:
    """Not one on the way to a version that was refused, which is in host memory alone."""
    follower, _ = refuse_after_passing_one_through(scene, heartbeat=0.01)
    beat = scene.trainer.run / keys.replica(follower.replica.id)
    until(lambda: (said := json.loads(beat.read_text())).get("error") and said["version"] == 0)


@pytest.mark.parametrize("pin", (True, False), ids=("pin", "sync"))
def test_a_version_that_was_passed_through_can_be_served(scene: Scene, pin: bool) -> None:
    follower, adapters = refuse_after_passing_one_through(scene)
    follower.command(1, pin=pin)
    assert (follower.version, adapters.names["policy"].version) == (1, 1)


def test_a_new_version_does_not_wait_for_the_drop_of_an_older_one(scene: Scene) -> None:
    adapters = scene.follow(keep=0)
    scene.trainer.publish()
    scene.until(version=0)
    dropped, remove = asyncio.Event(), adapters.remove

    async def removed(loaded: Loaded) -> None:
        await dropped.wait()
        await remove(loaded)

    adapters.remove = removed  # type: ignore[method-assign]
    try:
        scene.trainer.publish()
        scene.until(version=1, state="healthy", loaded=[1])
    finally:
        scene.loop.call_soon_threadsafe(dropped.set)
    until(lambda: adapters.held() == ["policy@1"])


def test_a_version_is_loaded_again_only_after_it_was_dropped(scene: Scene) -> None:
    adapters = scene.follow(keep=0)
    scene.trainer.publish()
    scene.until(version=0)
    begun, dropped, remove = threading.Event(), asyncio.Event(), adapters.remove

    async def removed(loaded: Loaded) -> None:
        begun.set()
        await dropped.wait()
        await remove(loaded)

    adapters.remove = removed  # type: ignore[method-assign]
    scene.trainer.publish()
    assert begun.wait(60)
    follower = adapters.followers["policy"]
    back = threading.Thread(target=follower.command, args=(0,), kwargs={"pin": True})
    back.start()
    try:
        until(lambda: bool(adapters._dropping["policy@0"]._waiters))  # type: ignore[attr-defined]
        assert adapters.tried == ["policy@0", "policy@1"]
    finally:
        scene.loop.call_soon_threadsafe(dropped.set)
        back.join(60)
    scene.until(version=0, loaded=[0])
    until(lambda: adapters.held() == ["policy@0"])


def test_a_leased_version_stays_loaded_until_the_lease_ends(scene: Scene) -> None:
    adapters = scene.follow(keep=0)
    scene.trainer.publish()
    scene.until(version=0)

    async def lease(version: int) -> None:
        adapters.lease("policy", version, 1000)

    scene.run(lease(0))
    scene.trainer.publish()
    scene.until(version=1, loaded=[0, 1])
    with pytest.raises(VersionNotFound, match=r"policy@7 is not loaded; \[0, 1\] are"):
        scene.run(lease(7))
    # as long as the longest of its leases
    scene.begin("policy@0")()
    adapters._registry._clock = lambda: time.monotonic() + LEASE_S + 1
    scene.trainer.publish()
    scene.until(version=2, loaded=[0, 2])
    adapters._registry._clock = lambda: time.monotonic() + 1001
    scene.trainer.publish()
    scene.until(version=3, loaded=[3])


def test_a_version_that_cannot_be_loaded_is_no_obstacle_for_later_ones(scene: Scene) -> None:
    """Their deltas lead through it, but only in host memory."""
    adapters = scene.follow()
    scene.trainer.publish()
    scene.until(version=0, state="healthy")
    adapters.refused = {"policy@1", "policy@2"}
    for _ in range(2):
        scene.trainer.publish()
        scene.until(state="degraded", version=0)
    scene.trainer.publish()
    scene.until(state="healthy", version=3)
    assert scene.until()["loaded"] == [0, 3]


def test_a_late_server_loads_only_the_version_that_it_serves(scene: Scene) -> None:
    for _ in range(4):
        scene.trainer.publish()
    adapters = scene.follow()
    scene.until(state="healthy", version=3, loaded=[3])
    assert adapters.added == ["policy@3"]


def test_an_adapter_of_another_base_is_refused(scene: Scene, tmp_path: Path) -> None:
    scene.trainer.publish()
    adapters = scene.follow(source=str(make_base(tmp_path / "other", seed=9)))
    status = scene.until(state="failed")
    assert "are for another base model" in status["reason"]
    assert "start it from the checkpoint" in status["reason"]
    assert (status["version"], adapters.held(), adapters.names) == (None, [], {})
    assert adapters.health("healthy", "")[0] == "failed"


def test_adapters_of_a_base_that_has_moved_stay_where_they_are(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltawire.replica.failures.REFUSED_S", 1e9)
    scene.trainer.publish()
    digest = full.digest_of(full.Checkpoint(scene.base))
    base = SimpleNamespace(caught_up=threading.Event(), replica=SimpleNamespace(digest=digest))
    adapters = scene.follow(base=lambda: base)
    # before the base is a version, nothing can be compared
    assert scene.until(state="starting")["version"] is None
    base.caught_up.set()
    scene.until(state="healthy", version=0)
    base.replica.digest = digest + digest
    assert "are for another base model" in scene.until(state="degraded")["reason"]
    failures = scene.until()["failures"]
    scene.trainer.publish()
    until(lambda: scene.until()["failures"] > failures)
    assert (adapters.names["policy"].version, adapters.held()) == (0, ["policy@0"])
    # once it is back, they go on at the next poll
    base.replica.digest = digest
    scene.until(state="healthy", version=1)
    # a base that begins to follow: the event loop, which it needs for that, asks for the status and must not wait
    base.caught_up = threading.Event()
    assert "another base" not in adapters.followers["policy"]._adapter.misfit(wait=False)
    assert adapters.status()[0]["version"] == 1


def test_a_run_of_full_weights_is_no_adapter(scene: Scene, tmp_path: Path) -> None:
    with Publisher(tmp_path / "full") as publisher:
        publisher.publish({"w": np.zeros(8, np.uint16)}).result(60)
    scene.trainer.run = tmp_path / "full"
    scene.follow()
    assert "has full weights, and this is an adapter" in scene.until(state="failed")["reason"]


def test_a_pinned_adapter_goes_back_and_stays(scene: Scene) -> None:
    for _ in range(3):
        scene.trainer.publish()
    adapters = scene.follow(pins={"policy": 1})
    scene.until(state="healthy", version=1, pin=1)
    adapters.followers["policy"].command("latest", pin=True)
    assert scene.until(version=2)["pin"] == 2
    # still loaded, and current again
    adapters.followers["policy"].command(1, pin=True)
    assert adapters.names["policy"].version == 1
    assert scene.until(version=1)["loaded"] == [1, 2]


def test_the_registry_keeps_what_is_used_named_or_recent() -> None:
    now = [0.0]
    registry = Registry(1, clock=lambda: now[0])
    made = [Loaded("policy", version, Path(str(version))) for version in range(5)]
    for loaded in made[:3]:
        registry.put(loaded)
    assert registry.find("policy") is made[2]
    assert (registry.find("policy@0"), registry.find("policy@7"), registry.find("judge")) == (made[0], None, None)
    made[0].requests = 1
    assert registry.take_unneeded() == []
    made[0].requests = 0
    registry.name(made[0])
    assert registry.take_unneeded() == []
    now[0] = LEASE_S
    assert registry.take_unneeded() == [made[0]]
    assert registry.versions("policy") == [1, 2]
    registry.put(made[1])
    assert registry.current("policy") is made[1]


def test_clients_keep_a_limited_number_of_versions() -> None:
    registry = Registry(0, clock=lambda: 0.0)
    made = [Loaded("policy", version, Path(str(version))) for version in range(2 * KEPT + 1)]
    for loaded in made:
        registry.put(loaded)
    for loaded in made[:KEPT]:
        registry.lease(loaded, 600)
    with pytest.raises(VersionRefused, match=r"policy@8 cannot be leased: \[0, 1, 2, .*end one with 0 seconds"):
        registry.lease(made[KEPT], 600)
    registry.lease(made[0], 900)
    # leases of others are no reason to interrupt a request
    made[KEPT].requests = 1
    for number, loaded in enumerate(made[KEPT:-1]):
        registry.name(loaded)
        loaded.named_until -= number
    assert registry.take_unneeded() == made[KEPT + 1 : -1]
    made[KEPT].requests = 0
    for loaded in made[:2]:
        registry.lease(loaded, 0)
        registry.name(loaded)
    for loaded in (made[0], made[KEPT]):
        loaded.named_until += 1
    assert registry.take_unneeded() == [made[1]]
    assert registry.versions("policy") == [0, *range(2, KEPT + 1), 2 * KEPT]
    registry.lease(made[KEPT], 600)


def test_a_version_has_one_timer_however_often_it_is_named(scene: Scene) -> None:
    adapters = scene.follow()
    scene.trainer.publish()
    scene.until(version=0)
    loaded, timers = adapters.names["policy"], set()
    for _ in range(3):
        scene.begin("policy@0")()
        timers.add(loaded.timer)
    assert len(timers) == 3
    assert [timer.cancelled() for timer in timers if timer is not loaded.timer] == [True, True]


def test_metrics_name_every_adapter(scene: Scene) -> None:
    adapters = scene.follow()
    scene.trainer.publish()
    scene.until(version=0, syncs=1)
    registry = CollectorRegistry()
    registry.register(FollowerMetrics(lambda: adapters.followers, "adapter"))
    text = generate_latest(registry).decode()
    for line in (
        'deltawire_adapter_version{adapter="policy"} 0.0',
        'deltawire_adapter_lag_versions{adapter="policy"} 0.0',
        'deltawire_adapter_state{adapter="policy",state="healthy"} 1.0',
        'deltawire_adapter_syncs_total{adapter="policy"} 1.0',
        'deltawire_adapter_failures_total{adapter="policy"} 0.0',
    ):
        assert line in text
