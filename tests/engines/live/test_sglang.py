"""SGLang's adapter without SGLang: schedulers of two ranks in threads, what a swap does to them, and salts."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("torch")

import httpx
import torch
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import StreamingResponse
from prometheus_client import REGISTRY
from test_follower import (
    Client,
    World,
    loop,
    test_a_rank_that_fails_half_way_takes_all_back,
    test_a_trainer_that_paused_the_server_finds_it_paused,
    test_what_cannot_be_put_back_stays_paused_until_it_is_loaded_anew,
    until,
)

from deltawire.core.errors import Misconfigured
from deltawire.engines.live.endpoint import Endpoint
from deltawire.engines.live.engine import Engine
from deltawire.engines.live.learn import copy_of
from deltawire.engines.live.messages import for_rank
from deltawire.engines.live.node import WorkerError
from deltawire.engines.options import ServerOptions
from deltawire.engines.sglang import SECRET, core, following, guard, hooks, register
from deltawire.store import ObjectStore, open_store

__all__ = [
    "loop",
    # what holds for any engine, with the `world` of this file
    "test_a_rank_that_fails_half_way_takes_all_back",
    "test_a_trainer_that_paused_the_server_finds_it_paused",
    "test_what_cannot_be_put_back_stays_paused_until_it_is_loaded_anew",
]

_here = threading.local()
"""The rank whose scheduler runs in this thread."""


class Message(SimpleNamespace):
    """Any of SGLang's requests between its processes."""


class Queued(SimpleNamespace):
    def __init__(self, extra_key: str | None = None, cache_salt: str | None = None) -> None:
        super().__init__(extra_key=extra_key, cache_salt=cache_salt)


class Scheduler:
    """One rank's scheduler, as far as a swap knows it."""

    def __init__(self, manager: Manager, number: int) -> None:
        self._manager, self.number = manager, number
        self.server_args, self.model_config = (
            manager.server_args,
            SimpleNamespace(quantization=None, dtype=torch.bfloat16),
        )
        self.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(model=manager.models[number]))
        self.ipc_channels = SimpleNamespace(send_to_tokenizer=self)
        self.result_queue: deque[Any] = deque()
        self.grammar_manager = SimpleNamespace(grammar_queue=[])
        self.waiting_queue: list[Any] = []
        self.version, self._engine_paused = "default", False
        self.done: list[str] = []

    def send_output(self, output: Any, request: Any) -> None:
        self.sent = output

    def process_batch_result(self, batch: Any, result: Any) -> None:
        core.process(lambda *_: self.done.append(f"{batch} under {self.version}"), self, batch, result)

    def record_weight_version_change(self, new_version: str) -> None:
        self.version = new_version

    def pause_generation(self, request: Any) -> None:
        self.done.append(request.mode)
        self._engine_paused = True

    def continue_generation(self, request: Any) -> None:
        self._engine_paused = False

    def flush_cache(self, empty_cache: bool) -> bool:
        assert self._engine_paused
        return self._manager.drops_caches


class Manager(Client):
    """SGLang's tokenizer manager, with its schedulers in this process."""

    def __init__(self, folder: Path, world: int, *options: Any) -> None:
        self.schedulers: list[Scheduler] = []
        self.is_pause = False
        super().__init__(folder, world, *options)
        self.server_args = SimpleNamespace(resolved_dict=dict)
        self.model_path = folder
        self.options = ServerOptions()
        self.schedulers = [Scheduler(self, number) for number in range(world)]
        self._threads, self._barrier = ThreadPoolExecutor(world), threading.Barrier(world)
        self._gathered: dict[int, Any] = {}

    def engine(self) -> Engine:
        from deltawire.engines.sglang.engine import SglangEngine

        return SglangEngine(self, self.options)

    @property
    def paused(self) -> bool:  # type: ignore[override]
        return self.is_pause or any(scheduler._engine_paused for scheduler in self.schedulers)

    @paused.setter
    def paused(self, value: bool) -> None:
        self.is_pause = value
        for scheduler in self.schedulers:
            scheduler._engine_paused = value

    async def dumper_control(self, request: Any) -> list[Any]:
        run = asyncio.get_running_loop().run_in_executor
        await asyncio.gather(*(run(self._threads, self._handle, s, request) for s in self.schedulers))
        return [self.schedulers[0].sent]

    def _handle(self, scheduler: Scheduler, request: Any) -> None:
        _here.number = scheduler.number
        if not hasattr(scheduler, "deltawire"):
            made = scheduler.deltawire = core.Core(scheduler)  # type: ignore[attr-defined]
            made._gather = lambda mine: self._gather(scheduler.number, mine)  # type: ignore[method-assign]
            rank = made._rank
            made._rank = SimpleNamespace(  # type: ignore[assignment]
                call=lambda text: self._call(scheduler.number, rank, text)
            )
        core.handle(None, scheduler, request)  # type: ignore[arg-type]

    def _call(self, number: int, rank: Any, text: str) -> Any:
        operation = type(for_rank(text)).__name__.lower()
        left = self.fail.get((number, operation), 0)
        if left:
            self.fail[number, operation] = left - 1
            return self._break(rank, operation)
        return rank.call(text)

    def _gather(self, number: int, mine: Any) -> list[Any]:
        self._gathered[number] = mine
        self._barrier.wait(60)
        answers = [answer for _, answer in sorted(self._gathered.items())]
        self._barrier.wait(60)
        return answers

    def _update_weight_version_if_provided(self, version: str) -> None:
        assert {scheduler.version for scheduler in self.schedulers} == {version}
        self.weight_version = version

    async def pause_generation(self, request: Any) -> None:  # type: ignore[override]
        self.paused = True

    async def continue_generation(self, request: Any) -> None:
        self.paused = False


@pytest.fixture(autouse=True)
def sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names that the adapter imports."""
    structs: Any = ModuleType("sglang.srt.managers.io_struct")
    for name in ("ContinueGenerationReqInput", "DumperControlReqInput", "DumperControlReqOutput"):
        setattr(structs, name, Message)
    structs.PauseGenerationReqInput = Message
    context: Any = ModuleType("sglang.srt.runtime_context")
    context.get_parallel = lambda: SimpleNamespace(tp_rank=_here.number, tp_size=2)
    loader: Any = ModuleType("sglang.srt.model_loader.utils")
    loader.set_default_torch_dtype = lambda dtype: nullcontext()
    for module in (structs, context, loader):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("sglang", "sglang.srt", "sglang.srt.managers", "sglang.srt.model_loader"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name in ("engine", "endpoint"):
        monkeypatch.delitem(sys.modules, f"deltawire.engines.sglang.{name}", raising=False)
    monkeypatch.setenv(SECRET, "a secret")


@pytest.fixture
def world(tmp_path: Path, store: ObjectStore, loop: asyncio.AbstractEventLoop) -> Iterator[World]:
    world = World(tmp_path, store, loop, 2, kind=Manager)
    yield world
    world.publisher.close()


def test_a_server_follows_and_what_was_in_flight_keeps_its_version(world: World) -> None:
    manager: Any = world.client
    assert world.follower.state == "starting"
    world.sync()
    assert (world.follower.state, world.target.guard) == ("healthy", "patch")
    for scheduler in manager.schedulers:
        scheduler.result_queue.append(("a batch", "its result"))
    version = world.publish()
    assert world.sync() == version
    world.holds(version)
    for scheduler in manager.schedulers:
        assert scheduler.done == ["a batch under 0"]
        # the loop takes the entry that it waits for, and does nothing a second time
        scheduler.process_batch_result(*scheduler.result_queue.popleft())
        assert (scheduler.done, scheduler.version) == (["a batch under 0"], str(version))


def test_a_server_that_cannot_drop_its_caches_stays_where_it_is(world: World) -> None:
    manager: Any = world.client
    manager.options = world.target.engine._options = ServerOptions(kv="clear")  # type: ignore[attr-defined]
    world.sync()
    version = world.publish()
    manager.drops_caches = False
    with pytest.raises(WorkerError, match="could not be dropped"):
        world.sync()
    world.holds(0)
    manager.drops_caches = True
    waiting = manager.schedulers[1].grammar_manager.grammar_queue
    waiting.append("a request")
    retracted = [scheduler.done.count("retract") for scheduler in manager.schedulers]
    with pytest.raises(WorkerError, match="rank 1: requests wait for their grammar"):
        world.sync()
    assert manager.schedulers[1].done.count("retract") == retracted[1]
    waiting.clear()
    assert world.sync() == version
    world.holds(version)
    assert all("retract" in scheduler.done for scheduler in manager.schedulers)


def test_cached_keys_and_values_are_found_by_requests_of_the_same_weights(world: World) -> None:
    manager: Any = world.client
    scheduler = manager.schedulers[0]
    world.sync()
    running, waiting, kept = Queued("mine"), Queued(), Queued(cache_salt="keep:me")
    for request in (running, waiting, kept):
        core.salt(scheduler, request)
    scheduler.waiting_queue += [waiting, kept]
    before = running.extra_key, waiting.extra_key
    assert before[0].startswith("mine@deltawire:0.")
    world.publish()
    world.sync()
    # it goes on to fill entries with keys and values of both versions, which nobody else may find
    assert running.extra_key == before[0]
    assert waiting.extra_key != before[1]
    assert kept.extra_key is None
    # retracted: all of it is computed anew
    core.salt(scheduler, running)
    assert running.extra_key.startswith("mine@deltawire:1.")
    salt = waiting.extra_key
    world.sync(0)
    world.sync(1)
    assert waiting.extra_key.startswith("@deltawire:1.")
    assert waiting.extra_key != salt


def test_what_cannot_be_followed_is_refused_before_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def server(**chosen: Any) -> Any:
        return SimpleNamespace(resolved_dict=lambda: {"tp_size": 2, "dp_size": 1, **chosen})

    guard.check_server(server())
    with pytest.raises(Misconfigured, match="--dp-size 2"):
        guard.check_server(server(dp_size=2))
    bare = {"model_path": str(tmp_path)}
    with pytest.raises(Misconfigured, match="has no tokenizer, and SGLang would fail"):
        guard.check_server(server(**bare))
    guard.check_server(server(**bare, tokenizer_path="Qwen/Qwen3-0.6B"))
    guard.check_server(server(**bare, skip_tokenizer_init=True))
    monkeypatch.setenv("DELTAWIRE_KV", "nonsense")
    with pytest.raises(Misconfigured, match="DELTAWIRE_KV"):
        guard.check_server(server())


def test_layers_are_noted_before_they_process_their_weights() -> None:
    class Method:
        def process_weights_after_loading(self, layer: Any) -> None:
            layer.weight = torch.nn.Parameter(layer.weight.data.t().contiguous(), requires_grad=False)

    layer: Any = torch.nn.Linear(3, 2, bias=False)
    layer.weight.loader = "its own"
    layer.quant_method = Method()
    model = torch.nn.Sequential(layer, torch.nn.LayerNorm(2))
    hooks.note(model, "cpu")
    layer.quant_method.process_weights_after_loading(layer)
    # a later load finds them processed
    hooks.note(model, "cpu")
    (found,) = hooks.hooked_layers(model)
    weight: Any = found.loaded["weight"]
    assert (found.name, weight.shape, weight.is_meta, weight.loader) == ("0", (2, 3), True, "its own")
    made = copy_of(layer)
    made._parameters["weight"] = weight
    found.hook(made)
    assert made.weight.shape == (3, 2)
    assert not layer.weight.is_meta


def test_a_client_cannot_call_the_schedulers() -> None:
    passed: list[Any] = []
    scheduler: Any = SimpleNamespace()
    for body in ({}, {"secret": ""}, {"secret": "no"}):
        asked = Message(method="deltawire", body={"operation": "undo", "arguments": {}, **body})
        core.handle(lambda _, request: passed.append(request), scheduler, asked)
        assert passed[-1] is asked
    assert not hasattr(scheduler, "deltawire")


def test_a_plugin_that_cannot_hook_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang would only log it, and serve the weights it started with."""
    monkeypatch.setenv("DELTAWIRE_RUN", "s3://runs/chat")
    for name in ("SGLANG_WARMUP_TIMEOUT", "DELTAWIRE_SECRET"):
        monkeypatch.setenv(name, "")
    monkeypatch.setitem(sys.modules, "sglang", None)
    with pytest.raises(SystemExit, match="cannot follow a run: ModuleNotFoundError"):
        register()


def test_schedulers_are_held_until_the_weights_are_named() -> None:
    scheduler = SimpleNamespace(_engine_paused=False)
    core.hold(None, scheduler)
    assert scheduler._engine_paused


def test_other_servers_on_the_machine_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DELTAWIRE_RUN", "SGLANG_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    assert not following()
    monkeypatch.setenv("SGLANG_PLUGINS", "mine,deltawire")
    assert following()
    monkeypatch.setenv("SGLANG_PLUGINS", "mine")
    monkeypatch.setenv("DELTAWIRE_RUN", "s3://runs/chat")
    assert following()


def test_adapters_need_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DELTAWIRE_RUN", raising=False)
    monkeypatch.setenv("DELTAWIRE_ADAPTERS", "policy=s3://runs/lora, judge=s3://runs/judge")
    assert following()

    def check(**chosen: Any) -> None:
        guard.check_server(SimpleNamespace(resolved_dict=lambda: chosen))

    with pytest.raises(Misconfigured, match="add --enable-lora --max-loras-per-batch 4 --max-lora-rank RANK"):
        check(enable_lora=None)
    with pytest.raises(Misconfigured, match="2 adapters need --max-loras-per-batch 4; this server has 3"):
        check(enable_lora=True, max_loras_per_batch=3)
    with pytest.raises(Misconfigured, match="need --max-loaded-loras 5 or none; this server has 4"):
        check(enable_lora=True, max_loras_per_batch=4, max_loaded_loras=4)
    check(enable_lora=True, max_loras_per_batch=4, max_loaded_loras=5)
    check(enable_lora=True, max_loras_per_batch=8, max_loaded_loras=None)


# ── the HTTP server ──────────────────────────────────────────────────────────────────────────────────────────────────


async def _generate(self: Any, body: Any) -> Any:
    """What SGLang's tokenizer manager gives: outputs of which only the last has spans; of a batch, all at once."""
    spans = [{"version": self.weight_version, "start": 0, "end": 2}]
    done = {"text": "b", "meta_info": {"finish_reason": {"type": "length"}, "weight_versions": spans}}
    if isinstance(body, list):
        yield [done] * len(body)
    else:
        yield {"text": "a", "index": 0, "meta_info": {"finish_reason": None}}
        yield {**done, "index": 0}


@pytest.fixture
def server(
    tmp_path: Path, world: World, loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """An app of SGLang's with the plugin, as it is after its start."""
    monkeypatch.setenv("DELTAWIRE_RUN", str(tmp_path / "followed"))
    monkeypatch.setenv("DELTAWIRE_POLL", "0.01")
    monkeypatch.setenv("DELTAWIRE_VERSION_WAIT", "0.05")
    from deltawire.engines.sglang.endpoint import SGLangServer

    manager: Any = world.client
    manager.server_args = SimpleNamespace(resolved_dict=lambda: {"host": "127.0.0.1", "port": 30000})
    manager.served_model_name = "chat"
    monkeypatch.setattr(Manager, "generate_request", _generate, raising=False)
    app = FastAPI()
    app.add_api_route("/health", lambda: Response(status_code=200), methods=["GET"])

    @app.post("/generate")
    async def generate(request: Request) -> Any:
        body = await request.json()
        if body["stream"]:
            outputs = manager.generate_request(body["text"])
            lines = ("data: " + json.dumps(one, separators=(",", ":")) + "\n\n" async for one in outputs)
            return StreamingResponse(lines, media_type="text/event-stream")
        return [one async for one in manager.generate_request(body["text"])][-1]

    made = SGLangServer(manager)
    made.attach(app)

    def send(method: str, path: str, **options: Any) -> httpx.Response:
        async def one() -> httpx.Response:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as http:
                return await http.request(method, path, **options)

        return asyncio.run_coroutine_threadsafe(one(), loop).result(60)

    living = app.router.lifespan_context(app)
    asyncio.run_coroutine_threadsafe(living.__aenter__(), loop).result(60)
    yield send
    made.follower.stop(60)  # type: ignore[union-attr]
    asyncio.run_coroutine_threadsafe(living.__aexit__(None, None, None), loop).result(60)
    REGISTRY.unregister(made.metrics)


@pytest.fixture
def store(tmp_path: Path) -> Any:
    return open_store(str(tmp_path / "followed"))


def test_the_server_says_what_it_serves(world: World, server: Any) -> None:
    until(lambda: server("GET", "/deltawire/status").json()["state"] == "healthy")
    status = server("GET", "/deltawire/status").json()
    assert (status["engine"], status["model"], status["version"], status["guard"]) == ("sglang", "chat", 0, "patch")
    assert server("GET", "/health").json() == {"state": "healthy"}
    assert "deltawire_version 0.0" in server("GET", "/metrics").text
    world.publish()
    assert server("POST", "/deltawire/sync", json={}).json()["version"] == 1
    assert server("GET", "/deltawire/digest").json()["version"] == 1


def test_outputs_name_their_versions_and_bounds_hold(world: World, server: Any) -> None:
    until(lambda: server("GET", "/deltawire/status").json()["state"] == "healthy")
    expected = [{"version": 0, "start": 0, "end": 2}]
    batch = server("POST", "/generate", json={"text": ["x", "y"], "stream": False})
    assert batch.headers["deltawire-version"] == "0"
    assert [one["weight_versions"] for one in batch.json()] == [expected] * 2
    stream = server("POST", "/generate", json={"text": "x", "stream": True}).text.split("\n\n")
    first, last = (json.loads(event.removeprefix("data: ")) for event in stream[:2])
    assert "weight_versions" not in first
    assert last["weight_versions"] == expected
    asked = {"text": "x", "stream": False}
    assert server("POST", "/generate", json=asked, headers={"deltawire-min-version": "0"}).status_code == 200
    for method in ("POST", "PUT"):
        refused = server(method, "/generate", json=asked, headers={"deltawire-exact-version": "7"})
        assert (refused.status_code, refused.json()["error"]["version"]) == (409, 0)


def test_sglangs_own_routes_change_nothing_behind_the_follower(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for route in ("/update_weights_from_disk", "/update_weight_version", "/release_memory_occupation"):
        assert server("POST", route, json={}).status_code == 409
    # no such routes here: the application was asked
    assert server("POST", "/pause_generation", json={}).status_code == 404
    monkeypatch.setattr(Endpoint, "authorize", _unauthorized)
    for route in ("/pause_generation", "/weights_checker"):
        assert server("POST", route, json={}).status_code == 401


def _unauthorized(self: Any, request: Request) -> None:
    raise HTTPException(401, "no token")
