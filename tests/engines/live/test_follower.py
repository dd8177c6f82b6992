"""All of a following server but vLLM itself: ranks of a fused model, the follower, a run; and what can go wrong."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import msgspec  # noqa: E402
from fused import Drafting, Fused, Hook  # noqa: E402

from deltawire.core.change import Region  # noqa: E402
from deltawire.core.errors import NotRestored, SchemaMismatch, VersionNotFound  # noqa: E402
from deltawire.core.full import write_checkpoint  # noqa: E402
from deltawire.engines.live import arrays  # noqa: E402
from deltawire.engines.live import rank as rank_module  # noqa: E402
from deltawire.engines.live.channel import Caller  # noqa: E402
from deltawire.engines.live.engine import Engine  # noqa: E402
from deltawire.engines.live.follower import EngineFollower  # noqa: E402
from deltawire.engines.live.layout import arrange, sums_of  # noqa: E402
from deltawire.engines.live.messages import (  # noqa: E402
    Digest,
    Forget,
    Listen,
    Locate,
    SetGroups,
    StageReload,
    for_rank,
)
from deltawire.engines.live.node import WorkerError  # noqa: E402
from deltawire.engines.live.rank import Rank  # noqa: E402
from deltawire.engines.live.swap import Apply, Undo  # noqa: E402
from deltawire.engines.live.target import EngineTarget  # noqa: E402
from deltawire.engines.options import ServerOptions  # noqa: E402
from deltawire.engines.vllm.core import swap, undo  # noqa: E402
from deltawire.engines.vllm.engine import VllmEngine  # noqa: E402
from deltawire.replica import host, portions  # noqa: E402
from deltawire.replica.device import DeviceShard  # noqa: E402
from deltawire.store import ObjectStore, Store  # noqa: E402
from deltawire.trainer import Publisher  # noqa: E402
from support import Bag, moved_bag, random_bag  # noqa: E402

pytestmark = pytest.mark.usefixtures("forked_programs")

SIZES = {"hidden": 256, "ffn": 512, "heads": 4, "kv": 2, "vocab": 300, "layers": 1}


def as_model(bag: Bag) -> dict[str, np.ndarray]:
    return {t.name: bag.bits(t.name).reshape(t.shape) for t in bag.schema.tensors}


class PauseState(Enum):
    UNPAUSED, PAUSED_NEW, PAUSED_ALL = range(3)


class Core:
    """What vLLM's engine core is to a swap, and how its client reaches it."""

    batch_queue = ()

    def __init__(self, client: Client) -> None:
        self._client, self.scheduler = client, self

    async def call_utility_async(self, method: str, *arguments: Any) -> Any:
        if method == "collective_rpc":
            name, _, args, kwargs = arguments
            return await self._client.collective_rpc(name, args, kwargs)
        assert method == "deltawire_swap"
        return swap(self, *arguments)

    async def call_utility_all_async(self, method: str, *arguments: Any) -> list[Any]:
        return [one.call(method, *arguments) for one in self._client.engines]

    @property
    def pause_state(self) -> PauseState:
        return PauseState.PAUSED_ALL if self._client.paused else PauseState.UNPAUSED

    def set_pause_state(self, state: PauseState) -> None:
        self._client.paused = state is not PauseState.UNPAUSED

    def collective_rpc(self, method: str, args: tuple[str, ...], kwargs: Any) -> list[Any]:
        return self._client.everywhere(method, args, kwargs)

    def reset_prefix_cache(self, reset_running_requests: bool, reset_connector: bool) -> bool:
        assert self._client.paused
        return self._client.drops_caches

    def reset_mm_cache(self) -> None: ...

    def reset_encoder_cache(self) -> None: ...

    def set_weight_version(self, version: str) -> None:
        self._client.weight_version = version


class EngineCore(Core):
    """One of several engines: its ranks are those of a data-parallel rank."""

    def __init__(self, client: Client, number: int) -> None:
        super().__init__(client)
        self._number = number

    def call(self, method: str, *arguments: Any) -> Any:
        if method == "collective_rpc":
            operation, _, args, kwargs = arguments
            return self._mine(operation, args, kwargs)
        work = {"deltawire_swap": swap, "deltawire_undo": undo, "set_weight_version": Core.set_weight_version}
        return work[method](self, *arguments)  # type: ignore[operator]

    def collective_rpc(self, method: str, args: tuple[str, ...], kwargs: Any) -> list[Any]:
        return self._mine(method, args, kwargs)

    def _mine(self, method: str, args: tuple[str, ...], kwargs: Any) -> list[Any]:
        # no engine may compute a step with weights of its own
        assert not isinstance(for_rank(args[0]), Apply | Undo) or self._client.paused
        return self._client.everywhere(method, args, kwargs, only=self._number)


class Client:
    """What vLLM's engine client is to the follower, with its workers in this process."""

    def __init__(self, folder: Path, world: int, hook: Hook | None = None, engines: int = 1) -> None:
        self.models = [Fused(rank=n % world, world=world, **SIZES) for n in range(world * engines)]
        self.engines = [EngineCore(self, number) for number in range(engines)]
        self.hook = hook
        layers = [model.hooked(hook) for model in self.models]
        self.ranks = [
            Rank(
                model, number, hooks=lambda _, n=number: layers[n],  # type: ignore[misc]
                reload=lambda folder, model=model: self._reload(model, Path(folder)),  # type: ignore[misc]
            )
            for number, model in enumerate(self.models)
        ]  # fmt: skip
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(model=str(folder)))
        self.paused = False
        self.weight_version = "default"
        self.fail: dict[tuple[int, str], int] = {}
        """(rank, operation) → how many times it fails."""
        self.seen_unpaused: list[str] = []
        self.drops_caches = True
        self.stray: Callable[[], None] | None = None
        """Done once, in the next pause, after new weights were written."""
        self.engine_core = Core(self)
        self.engine_core.core_engines = self.engines  # type: ignore[attr-defined]

    def engine(self) -> Engine:
        return VllmEngine(self, ServerOptions(kv="clear"))

    async def collective_rpc(self, method: str, args: tuple[str, ...] = (), kwargs: Any = None) -> list[Any]:
        return self.everywhere(method, args, kwargs)

    def everywhere(self, method: str, args: tuple[str, ...] = (), kwargs: Any = None, only: int = 0) -> list[Any]:
        message = for_rank(args[0])
        operation = type(message).__name__.lower()
        if operation in ("apply", "undo") and not self.paused:
            self.seen_unpaused.append(operation)
        answers = []
        each = len(self.ranks) // len(self.engines)
        for number, rank in [*enumerate(self.ranks)][only * each : (only + 1) * each]:
            left = self.fail.get((number, operation), 0)
            if left:
                self.fail[number, operation] = left - 1
                answers.append(self._break(rank, operation))
            else:
                answers.append(rank.call(args[0]))
        if operation == "apply" and self.stray is not None:
            self.stray()
            self.stray = None
        return answers

    def _break(self, rank: Rank, operation: str) -> dict[str, Any]:
        """Fail in the middle: some of the weights are written, nobody takes them back."""
        if operation == "apply":
            shard: Any = rank._weights
            write = shard.write
            # on a device all of it is one launch
            shard.write = lambda patch: write(patch[: len(patch) // 2] if shard.audited else patch)
            rank._written = rank._staged
            rank._staged.write()  # type: ignore[union-attr]
            shard.write = write
        return {"error": "OSError: a fault that a test asked for"}

    def _reload(self, model: Fused, folder: Path) -> None:
        from safetensors.torch import load_file

        fresh = Fused(rank=model.rank, world=model.world, **SIZES)
        fresh.load(load_file(folder / "model.safetensors").items(), self.hook)
        for live, new in zip(model.parameters(), fresh.parameters(), strict=True):
            live.data.copy_(new.data)

    async def is_paused(self) -> bool:
        return self.paused

    async def sleep(self, level: int, mode: str) -> None:
        assert level == 0
        self.paused = True

    async def wake_up(self, tags: list[str]) -> None:
        assert tags == ["scheduling"]
        self.paused = False

    async def reset_prefix_cache(self, reset_running_requests: bool, reset_connector: bool) -> bool:
        assert self.paused
        return self.drops_caches

    async def reset_mm_cache(self) -> None: ...

    async def reset_encoder_cache(self) -> None: ...

    async def pause_generation(self, mode: str, clear_cache: bool) -> None:
        self.paused = True

    async def update_weight_version(self, version: str) -> None:
        self.weight_version = version

    def bytes(self) -> list[dict[str, bytes]]:
        return [{n: p.view(torch.int16).numpy().tobytes() for n, p in m.named_parameters()} for m in self.models]


class World:
    """A run with some versions, and a server that started from the first of them."""

    def __init__(
        self, folder: Path, store: Store, loop: asyncio.AbstractEventLoop, world: int, hook: Hook | None = None,
        engines: int = 1, kind: type[Client] = Client, encoding: str = "context",
    ) -> None:  # fmt: skip
        self.store = store
        self.publisher = Publisher(store, encoding=encoding, anchor_ratio=100.0)
        self.bags = [random_bag(Fused(world=1, **SIZES).schema(), 1)]
        self.publisher.publish(as_model(self.bags[0])).result()
        write_checkpoint(folder, self.bags[0])
        self.client = kind(folder, world, hook, engines)
        for model in self.client.models:
            model.load(tensors(self.bags[0]), hook)
        self.target = EngineTarget(self.client.engine(), loop)
        self.target.run(self.target.hold())
        self.follower = EngineFollower(store, self.target, heartbeat=0, poll=0.01)

    def publish(self, density: float = 0.02, **options: Any) -> int:
        self.bags.append(moved_bag(self.bags[-1], len(self.bags), density))
        return self.publisher.publish(as_model(self.bags[-1]), **options).result().version

    def sync(self, version: int | None = None) -> int:
        return self.follower.replica.sync(self.target, version)

    def expected(self, version: int) -> list[dict[str, bytes]]:
        fresh = [Fused(rank=m.rank, world=m.world, **SIZES) for m in self.client.models]
        for model in fresh:
            model.load(tensors(self.bags[version]), self.client.hook)
        return [{n: p.view(torch.int16).numpy().tobytes() for n, p in m.named_parameters()} for m in fresh]

    def holds(self, version: int) -> None:
        # a version is visible before all of its sync is done
        with self.follower.replica.lock:
            assert self.follower.version == version
            assert self.client.weight_version == str(version)
            assert self.client.bytes() == self.expected(version)
            assert not self.client.paused
            assert self.client.seen_unpaused == []


def tensors(bag: Bag) -> list[tuple[str, torch.Tensor]]:
    return [(n, torch.from_numpy(a.view(np.int16).copy()).view(torch.bfloat16)) for n, a in as_model(bag).items()]


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture
def world(tmp_path: Path, store: ObjectStore, loop: asyncio.AbstractEventLoop) -> Iterator[World]:
    world = World(tmp_path, store, loop, 2)
    yield world
    world.publisher.close()


def test_a_server_finds_out_what_it_is_catches_up_and_is_served(world: World) -> None:
    assert world.follower.state == "starting"
    assert world.client.paused
    world.publish()
    newest = world.publish()
    assert world.sync() == newest
    assert (world.follower.state, world.target.guard) == ("healthy", "patch")
    world.holds(newest)
    assert {"decode", "apply", "prove", "pause", "total"} <= world.follower.phases.keys()


@pytest.mark.parametrize("rank", (0, 1))
def test_a_rank_that_fails_half_way_takes_all_back(world: World, rank: int) -> None:
    world.sync()
    version = world.publish()
    world.client.fail[rank, "apply"] = 1
    with pytest.raises(WorkerError, match=f"rank {rank}"):
        world.sync()
    world.holds(0)
    assert world.follower.state == "degraded"
    assert world.sync() == version
    world.holds(version)
    assert world.follower.state == "healthy"


def test_weights_that_were_given_other_memory_are_not_patched(world: World) -> None:
    """What a delta would write to is no longer what the model computes with."""
    assert world.sync() == 0
    *_, weight = world.client.models[1].parameters()
    weight.data = weight.data.clone()
    world.publish()
    with pytest.raises(WorkerError, match=r"rank 1: .*is no longer the model's"):
        world.sync()
    assert world.follower.version == 0
    assert world.follower.state == "degraded"


@pytest.mark.parametrize("rank", (None, 0, 3))
def test_all_engines_switch_or_none(
    tmp_path: Path, store: ObjectStore, loop: asyncio.AbstractEventLoop, rank: int | None
) -> None:
    """Two data-parallel ranks of two ranks each: if one rank fails, all engines are put back before any goes on."""
    world = World(tmp_path, store, loop, 2, engines=2)
    assert world.sync() == 0
    assert world.target.guard == "patch"
    version = world.publish()
    if rank is not None:
        world.client.fail[rank, "apply"] = 1
        with pytest.raises(WorkerError, match=f"engine {rank // 2}: rank {rank % 2}"):
            world.sync()
        world.holds(0)
    assert world.sync() == version
    world.holds(version)
    world.client.models[3].norm.data.view(torch.int16)[0] ^= 1
    # a copy of one engine that differs is found: only full weights lead anywhere from there
    assert world.sync(world.publish()) == version + 1
    world.holds(version + 1)
    world.publisher.close()


def test_ranks_on_another_node_are_refused_by_engines_without_nodes(world: World) -> None:
    world.client.ranks[1].node = "another"
    with pytest.raises(WorkerError, match="this rank is on another node"):
        world.sync()


def test_what_cannot_be_put_back_stays_paused_until_it_is_loaded_anew(world: World) -> None:
    world.sync()
    world.publish()
    world.client.fail |= {(1, "apply"): 1, (1, "undo"): 1}
    with pytest.raises(NotRestored):
        world.sync()
    assert (world.follower.state, world.follower.version, world.client.paused) == ("paused", None, True)
    # nobody knows what these weights are: only full weights lead anywhere from here
    assert world.sync() == 1
    world.holds(1)
    assert world.follower.state == "healthy"


@pytest.mark.parametrize("ranks", ((0, 1), (1,)), ids=("all copies", "one copy"))
def test_weights_that_somebody_else_changed_are_found_out(world: World, ranks: tuple[int, ...]) -> None:
    world.sync()
    for rank in ranks:
        world.client.models[rank].norm.data.view(torch.int16)[0] ^= 1
    world.publish()
    paused_at_swap = []
    swap = world.target.swap
    world.target.swap = lambda staged: (paused_at_swap.append(world.client.paused), swap(staged))  # type: ignore[method-assign,assign,func-returns-value]
    # found before the pause, so that the delta is not blamed; nothing is served until full weights are there
    assert world.sync() == 1
    assert paused_at_swap == [True, True]
    world.holds(1)


@pytest.mark.parametrize("drops_caches", [True, False])
def test_a_stray_write_in_the_pause_is_found_after_it(world: World, drops_caches: bool) -> None:
    """What is written is proven in the pause; what was to stay as it is, in the audit. The server stops at once."""
    world.sync()
    version = world.publish(density=0.01)
    norm = [model.norm.data.view(torch.int16) for model in world.client.models]
    still = np.flatnonzero(world.bags[0].bits("norm.weight") == world.bags[1].bits("norm.weight"))[0]

    def stray() -> None:
        for bits in norm:
            bits[still] ^= 1
        world.client.drops_caches = drops_caches

    world.client.stray = stray
    with pytest.raises(NotRestored, match="other weights than those of the update"):
        world.sync()
    assert (world.follower.state, world.follower.version, world.client.paused) == ("paused", None, True)
    world.client.drops_caches = True
    assert world.sync() == version
    world.holds(version)
    assert world.follower.state == "healthy"


def test_a_write_that_does_not_arrive_is_taken_back(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.sync()
    version = world.publish()
    write, lost = host.scatter_and_look, [False]

    def lossy(*args: Any) -> bool:
        return lost.pop() if lost else write(*args)

    monkeypatch.setattr(host, "scatter_and_look", lossy)
    with pytest.raises(WorkerError, match="does not hold what was written"):
        world.sync()
    world.holds(0)
    assert world.sync() == version
    world.holds(version)


def test_what_was_staged_late_is_not_written(world: World) -> None:
    """A rank that holds another version staged than the one that was checked writes nothing, and no other rank does."""
    world.sync()
    rank, swap, late = world.client.ranks[1], world.target._swap, []

    async def noted(staged: Any, name: bool = True) -> None:
        late.append(rank._staged)
        rank._staged = late[0]
        await swap(staged, name)

    world.target._swap = noted  # type: ignore[method-assign]
    assert world.publish() == world.sync() == 1
    world.publish()
    with pytest.raises(WorkerError, match=r"rank 1: .*not what was checked"):
        world.sync()
    world.holds(1)
    world.target._swap = swap  # type: ignore[method-assign]
    assert world.sync() == 2
    world.holds(2)


def test_a_rank_that_listens_anew_answers_no_older_caller(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are answered one after the other, those of a socket that was replaced not at all; it leaves no thread."""
    rank, order = world.client.ranks[0], []
    begun, end, work = threading.Event(), threading.Event(), rank._do

    def slowly(message: Any) -> dict[str, Any]:
        if isinstance(message, Listen):
            return work(message)
        if isinstance(message, Forget):
            begun.set()
            assert end.wait(60)
        order.append("older" if isinstance(message, Forget) else "newer")
        return {}

    def caller() -> Caller:
        folder = arrays.folder()
        folders.append(folder)
        answer = rank.call(Listen(rank.node, [0], Path(folder.name).name, "").text())
        return Caller(answer["socket"])

    folders: list[Any] = []
    monkeypatch.setattr(rank, "_do", slowly)
    threads = {*threading.enumerate()}
    older = caller()
    (thread,) = {*threading.enumerate()} - threads
    older.send(Forget())
    assert begun.wait(60)
    newer = caller()
    newer.send(Digest())
    end.set()
    assert (older.receive(60), newer.receive(60), order) == ({}, {}, ["older", "newer"])
    assert "listens elsewhere" in older.call(Forget(), 60)["error"]
    assert newer.call(Digest(), 60) == {}
    older.close()
    thread.join(60)
    assert not thread.is_alive()


def test_a_server_that_cannot_drop_its_caches_stays_where_it_is(world: World) -> None:
    world.sync()
    version = world.publish()
    world.client.drops_caches = False
    with pytest.raises(WorkerError, match="could not be dropped"):
        world.sync()
    world.holds(0)
    world.client.drops_caches = True
    assert world.sync() == version
    world.holds(version)


def test_going_back_and_staying_there(world: World) -> None:
    for _ in range(3):
        world.publish()
    world.sync()
    assert world.sync(1) == 1
    world.holds(1)
    world.follower.command(1, pin=True)
    assert world.follower._stay() == 1


@pytest.fixture
def followed(world: World) -> Iterator[World]:
    """A world whose follower is at work."""
    world.sync()
    thread = threading.Thread(target=world.follower.loop, daemon=True)
    thread.start()
    yield world
    world.follower.stop()
    thread.join()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("pin", (True, False), ids=("pin", "sync"))
def test_a_mistyped_version_is_refused_and_changes_nothing(followed: World, pin: bool) -> None:
    follower = followed.follower
    for wrong in (77, -9, "beest"):
        with pytest.raises(VersionNotFound):
            follower.command(wrong, pin=pin)
        assert (follower.pin, follower.replica.newest, follower.replica.lag, follower.replica.failures) == (
            None,
            0,
            0,
            0,
        )
        assert (follower.state, follower.reason) == ("healthy", "")
    followed.publish()
    until(lambda: follower.version == 1)
    followed.holds(1)
    # a pin that cannot be replaced stays as well
    follower.command(0, pin=True)
    with pytest.raises(VersionNotFound):
        follower.command(77, pin=pin)
    assert (follower.pin, follower.version, follower.state) == (0, 0, "healthy")
    follower.command(None, pin=True)
    until(lambda: follower.version == 1)


def test_a_pin_that_could_not_be_reached_leaves_the_server_following(followed: World) -> None:
    follower = followed.follower
    followed.publish()
    until(lambda: follower.version == 1)
    followed.client.fail[0, "apply"] = 1
    with pytest.raises(WorkerError, match="rank 0"):
        follower.command(0, pin=True)
    assert (follower.pin, follower.replica.failures) == (None, 1)
    # it serves what it should, so nothing is wrong with it
    until(lambda: follower.state == "healthy")
    followed.publish()
    until(lambda: follower.version == 2)
    followed.holds(2)


def test_a_trainer_that_paused_the_server_finds_it_paused(world: World) -> None:
    world.sync()
    world.publish()
    world.client.paused = True
    assert world.sync() == 1
    assert world.client.paused
    assert world.client.bytes() == world.expected(1)


def test_full_weights_replace_a_foreign_start(
    tmp_path: Path, store: ObjectStore, loop: asyncio.AbstractEventLoop
) -> None:
    """A server that loaded another checkpoint of the same shape: patched to none of its versions, loaded to one."""
    world = World(tmp_path, store, loop, 2)
    other = random_bag(world.bags[0].schema, 99)
    write_checkpoint(tmp_path, other)
    for model in world.client.models:
        model.load_weights(tensors(other))
    assert world.sync() == 0
    world.holds(0)
    world.publisher.close()


def test_repacked_weights_are_never_patched(
    tmp_path: Path, store: ObjectStore, loop: asyncio.AbstractEventLoop
) -> None:
    """Same shapes, other order, as CPU kernels do with experts. A plain reload would undo the packing: it refuses."""
    world = World(tmp_path, store, loop, 1)
    packed = world.client.models[0].gate_up[0].data
    packed.copy_(packed.flip(0).clone())
    assert world.sync() == 0
    assert world.target.guard.startswith("reload: memory is not laid out like the checkpoint")
    world.publish()
    # not the second time either, when a reload changes nothing any more; and not to the version it seems to be
    for version in (None, None, 0):
        with pytest.raises(NotRestored, match="can follow no run"):
            world.sync(version)
        assert (world.follower.state, world.client.paused) == ("paused", True)
    world.publisher.close()


def test_where_a_reload_is_seen_to_do_no_harm_it_is_used(
    tmp_path: Path, store: ObjectStore, loop: asyncio.AbstractEventLoop
) -> None:
    world = World(tmp_path, store, loop, 2)
    world.client.ranks[1]._problems = lambda model: ["a kernel computes with copies"]
    assert world.sync() == 0
    assert world.target.guard == "reload: a kernel computes with copies"
    assert world.publish() == world.sync()
    world.holds(1)
    world.publisher.close()


def other_run(store: str, names: Callable[[str], str], rows: int = 0) -> None:
    """A run whose first version has other names than this server's checkpoint, or more rows."""
    bag = random_bag(Fused(world=1, **SIZES).schema(), 1)
    weights = {
        names(name): np.pad(bits, [(0, rows), *[(0, 0)] * (bits.ndim - 1)]) for name, bits in as_model(bag).items()
    }
    with Publisher(store) as publisher:
        publisher.publish(weights).result()


@pytest.mark.parametrize(
    "names, rows, said",
    [
        (lambda name: name.replace("gate.", "gate_up."), 0, "only the run has '0.gate_up.weight'"),
        (lambda name: f"base.{name}", 0, "only the run has 'base.0.down.weight', .* and 9 more"),
        (lambda name: name, 8, r"'0.down.weight', .*: \[256, 512\] in .*, \[264, 512\] in the run"),
    ],
    ids=("fused", "prefixed", "larger"),
)
def test_a_run_of_other_names_or_shapes_is_refused_before_anything_is_touched(
    world: World, tmp_path: Path, names: Callable[[str], str], rows: int, said: str
) -> None:
    before = world.client.bytes()
    store = str(tmp_path / "other")
    other_run(store, names, rows)
    ended: list[bool] = []
    follower = EngineFollower(store, world.target, heartbeat=0, on_failure=lambda: ended.append(True))
    follower.loop()
    assert (follower.state, ended, world.client.paused) == ("failed", [True], True)
    assert re.search(said, follower.reason)
    assert world.client.bytes() == before


def test_a_loader_that_ignores_names_is_found_out(world: World, tmp_path: Path) -> None:
    """It raises nothing, and leaves weights as they are: those of another version, or random ones."""
    for model in world.client.models:
        load = model.load_weights
        known = {t.name for t in model.schema().tensors}
        model.load_weights = lambda weights, load=load, known=known: load((n, t) for n, t in weights if n in known)  # type: ignore[method-assign]
    store = str(tmp_path / "other")
    other_run(store, lambda name: f"base.{name}")
    with pytest.raises(SchemaMismatch, match=r"only .* has '0.down.weight'"):
        EngineFollower(store, world.target, heartbeat=0).command(None)


@pytest.mark.parametrize("wrapped", (False, True), ids=("plain", "with LoRA"))
def test_a_run_that_ties_what_the_server_holds_apart_is_refused(world: World, tmp_path: Path, wrapped: bool) -> None:
    """Its loader is given one of the two names, and would serve the other with whatever lies there."""
    for model in world.client.models:
        head = torch.nn.Linear(SIZES["hidden"], SIZES["vocab"], bias=False)
        model.head = torch.nn.ModuleDict({"base_layer": head}) if wrapped else head
    before = world.client.bytes()
    weights = as_model(random_bag(Fused(world=1, **SIZES).schema(), 1))
    with Publisher(str(tmp_path / "tied")) as publisher:
        publisher.publish({**weights, "head.weight": weights["embed.weight"]}).result()
    with pytest.raises(SchemaMismatch, match=r"'head.weight' is tied to it, but this server holds them apart"):
        EngineFollower(str(tmp_path / "tied"), world.target, heartbeat=0).command(None)
    assert world.client.bytes() == before


@pytest.mark.parametrize("harmful", (False, True), ids=("plain", "harmful"))
def test_weights_that_the_engine_moved_are_put_back_before_reloads_are_compared(harmful: bool) -> None:
    model = torch.nn.Linear(4, 4, bias=False)
    first, moved = model.weight.detach().clone(), [True]

    def reload(folder: str) -> None:
        with torch.no_grad():
            model.weight.copy_(first if not harmful else model.weight + 1)
        moved[0] = False

    with torch.no_grad():
        model.weight.copy_(first.flip(0))
    rank = Rank(model, 0, reload=reload)
    rank.has_moved = lambda: moved[0]
    staged = rank.call(StageReload("", unchanged=True, prove=False).text())["staged"]
    answer = rank.call(Apply([staged]).text())
    assert ("gave other ones" in answer.get("error", "")) == harmful
    assert torch.equal(model.weight, first) != harmful


def test_a_rank_whose_loader_drops_tensors_is_not_patched(world: World) -> None:
    world.client.models[0].load_weights = lambda weights: [_ for _ in weights]  # type: ignore[method-assign]
    world.sync()
    assert "does not use" in world.target.guard or "holds" in world.target.guard


def test_a_draft_model_that_cannot_follow_is_logged(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.target.engine.has_draft = True
    world.sync()
    assert (world.follower.state, world.follower.reason) == ("healthy", "")
    assert "draft model stays at version 0" in caplog.text
    world.publish()
    world.sync()
    assert world.follower.state == "degraded"
    assert world.follower.reason.startswith("draft model is at version 0")
    world.holds(1)


def test_a_draft_model_in_the_run_is_one_with_its_model(tmp_path: Path) -> None:
    """Located, filled beside where no model computes with it, reloaded and compared."""
    model = Fused(**SIZES)
    draft = Drafting(model)
    bag = random_bag(draft.schema(), 3)
    write_checkpoint(tmp_path, bag)
    for one in (draft, model):
        one.load_weights(tensors(bag))
    rank = Rank(model, 0, reload=lambda folder: None)
    rank.draft, rank.reload_draft = draft, lambda folder: draft.out.data.add_(1)
    answer = rank.call(Locate(bag.schema, 0, str(tmp_path)).text())
    assert (answer["draft"], answer["problems"]) == (True, [])
    regions = msgspec.convert(answer["pieces"], list[Region])
    layout = arrange(bag.schema, [regions])
    rank.call(SetGroups([list(layout.groups[0])]).text())
    assert layout.total([sums_of(rank.call(Digest().text())["sums"])]) == bag.digest()
    staged = rank.call(StageReload(str(tmp_path), unchanged=True, prove=False).text())["staged"]
    assert "gave other ones" in rank.call(Apply([staged]).text())["error"]
    other = Fused(**SIZES).schema()
    assert rank.call(Locate(other, 0, str(tmp_path)).text())["draft"] is False


def test_a_draft_model_in_the_run_is_at_the_version_of_its_model(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.target.engine.has_draft = True
    assert world.follower.draft == ""
    for rank in world.client.ranks:
        # shares all of its weights
        rank.draft = rank._model
    world.sync()
    world.publish()
    world.sync()
    assert (world.follower.state, world.follower.draft) == ("healthy", "follows")
    assert "draft model stays" not in caplog.text
    world.holds(1)


@pytest.mark.parametrize("room", [None, 0, 500_000])
def test_ranks_on_devices_are_staged_from_the_decoder_and_swapped_in_the_same_way(
    tmp_path: Path,
    store: ObjectStore,
    loop: asyncio.AbstractEventLoop,
    monkeypatch: pytest.MonkeyPatch,
    room: int | None,
) -> None:
    """By plain torch, on a CPU: a delta, full weights that differ little, and ones that differ in most; also where a
    version has no room on its device, or not enough for all of it. A stray write is found in the swap."""

    def on_device(pieces: Any, gb: float | None) -> DeviceShard:
        assert (None if gb is None else portions.room_beside(0, gb)) == room
        return DeviceShard(pieces, room=room)

    monkeypatch.setattr(rank_module, "open_shard", on_device)
    monkeypatch.setattr(portions, "_LEAST_CHANGES", 100)
    if room is not None:
        monkeypatch.setenv("DELTAWIRE_STAGING_MEMORY", f"{room / 1e9:.9f}")
    world = World(tmp_path, store, loop, 2)
    try:
        assert world.sync() == 0
        assert world.publish() == world.sync()
        world.holds(1)
        world.client.fail[1, "apply"] = 1
        with pytest.raises(WorkerError, match="rank 1"):
            world.sync(0)
        world.holds(1)
        still = world.client.models[1].norm.data.view(torch.int16)

        with monkeypatch.context() as patched:
            write = DeviceShard.write

            def stray(shard: DeviceShard, patch: Any) -> None:
                still.bitwise_xor_(1)
                write(shard, patch)
                patched.undo()

            patched.setattr(DeviceShard, "write", stray)
            with pytest.raises(NotRestored, match=r"predicted for them.*not the weights from before"):
                world.sync(0)
        assert (world.follower.state, world.client.paused) == ("paused", True)
        assert world.sync(0) == 0
        world.holds(0)
        assert world.publish(density=0.9) == world.sync() == 2
        world.holds(2)
        world.client.fail[0, "apply"] = 1
        with pytest.raises(NotRestored, match="written over the previous ones"):
            world.sync(0)
        assert (world.follower.state, world.client.paused) == ("paused", True)
        assert world.sync(0) == 0
        world.holds(0)
    finally:
        world.publisher.close()
        if world.target._here._decoder is not None:
            world.target._here._decoder.close()
