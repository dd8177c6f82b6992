"""Adapters of an SGLang server without SGLang: its registry and two ranks, as far as adapters know them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("torch")

import httpx
from fastapi import FastAPI, Request
from prometheus_client import REGISTRY
from test_follower import loop, until
from test_sglang import sglang

from deltawire.engines.live.adapters import DROP_AGAIN_S, Loaded
from deltawire.engines.sglang import adapter_worker

__all__ = ["loop", "sglang"]


@dataclass(frozen=True)
class LoRARef:
    lora_id: str = field(default_factory=lambda: uuid4().hex)
    lora_name: str | None = None
    lora_path: str | None = None
    pinned: bool | None = None


class LoRARegistry:
    """SGLang's names of adapters, and how many requests each has in the schedulers."""

    def __init__(self) -> None:
        self._registry: dict[str, LoRARef] = {}
        self._counters: dict[str, int] = {}

    def get_all_adapters(self) -> dict[str, LoRARef]:
        return dict(self._registry)

    def _register_adapter(self, reference: Any) -> None:
        assert reference.lora_name not in self._registry
        self._registry[reference.lora_name] = reference
        self._counters[reference.lora_id] = 0

    def acquire(self, name: str) -> str:
        found = self._registry[name].lora_id
        self._counters[found] += 1
        return found

    def release(self, found: str) -> None:
        self._counters[found] -= 1

    async def wait_for_unload(self, found: str) -> None:
        while self._counters.get(found):
            await asyncio.sleep(0.001)
        self._counters.pop(found, None)


class LoRAManager:
    """The adapters of one rank."""

    def __init__(self) -> None:
        self.configs: dict[str, Any] = {}
        self.loras: dict[str, Any] = {}
        self.lora_refs: dict[str, LoRARef] = {}
        self.device = SimpleNamespace(type="cpu")

    def load_lora_adapter(self, reference: LoRARef) -> Any:
        raise AssertionError("this empties the cache of the device's memory while the model runs")

    unload_lora_adapter = load_lora_adapter

    def _load_lora_adapter(self, reference: LoRARef) -> Any:
        if reference.lora_name in {each.lora_name for each in self.lora_refs.values()}:
            return SimpleNamespace(success=False, error_message=f"{reference.lora_name} is already loaded")
        for kind in (self.configs, self.loras, self.lora_refs):
            kind[reference.lora_id] = reference
        return SimpleNamespace(success=True)

    def _unload_lora_adapter(self, reference: LoRARef) -> Any:
        for kind in (self.configs, self.loras, self.lora_refs):
            kind.pop(reference.lora_id, None)
        return SimpleNamespace(success=True)


class Manager:
    """SGLang's tokenizer manager, with the adapters of two ranks."""

    def __init__(self, folder: Path) -> None:
        self.model_path, self.served_model_name = folder / "base", "policy:7b"
        self.server_args = SimpleNamespace(resolved_dict=lambda: {"host": "127.0.0.1", "port": 30000})
        self.lora_registry = LoRARegistry()
        self.ranks = [LoRAManager(), LoRAManager()]
        self._schedulers = [
            SimpleNamespace(tp_worker=SimpleNamespace(model_runner=SimpleNamespace(lora_manager=rank)))
            for rank in self.ranks
        ]

    async def dumper_control(self, request: Any) -> list[Any]:
        assert request.body["operation"] == "adapter"
        answers = [adapter_worker.call(each, **request.body["arguments"]) for each in self._schedulers]
        return [SimpleNamespace(success=True, response=answers)]

    def generate_request(self, request: Any) -> Any:
        raise NotImplementedError

    def held(self) -> list[str]:
        """The folders of the versions that the ranks hold."""
        first, second = (
            sorted(Path(str(ref.lora_path)).name for ref in rank.lora_refs.values()) for rank in self.ranks
        )
        assert first == second
        return first


@pytest.fixture(autouse=True)
def lora(sglang: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The names that adapters import beside those of the `sglang` of test_sglang.py."""
    registry: Any = ModuleType("sglang.srt.lora.lora_registry")
    registry.LoRARef = LoRARef
    serving: Any = ModuleType("sglang.srt.entrypoints.openai.serving_base")
    serving.OpenAIServingBase = type(
        "OpenAIServingBase", (), {"_parse_model_parameter": lambda _, model: (model, None)}
    )
    for module in (registry, serving):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("sglang.srt.lora", "sglang.srt.entrypoints", "sglang.srt.entrypoints.openai"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.delitem(sys.modules, "deltawire.engines.sglang.adapters", raising=False)


class Scene:
    """The adapters of a server that keeps only what is used, without followers."""

    def __init__(self, folder: Path, loop: asyncio.AbstractEventLoop) -> None:
        self._folder, self._loop, self.manager = folder, loop, Manager(folder)
        self.adapters: Any = self.run(self._made())

    async def _made(self) -> Any:
        from deltawire.engines.sglang.adapters import SglangAdapters

        return SglangAdapters(self.manager, {"policy": str(self._folder / "run")}, keep=0, heartbeat=0)

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def folder(self, version: int) -> Path:
        folder = self._folder / str(version)
        folder.mkdir(exist_ok=True)
        return folder

    def load(self, version: int) -> None:
        """Load a version, and wait until what it replaces was dropped or could not be."""
        self.run(self.adapters._load(Loaded("policy", version, self.folder(version))))
        until(lambda: not self.adapters._tasks)


@pytest.fixture
def scene(tmp_path: Path, loop: asyncio.AbstractEventLoop) -> Scene:
    return Scene(tmp_path, loop)


@pytest.fixture
def server(tmp_path: Path, loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A server that follows adapters and no run of weights, with a token; every route answers what it was sent."""
    monkeypatch.delenv("DELTAWIRE_RUN", raising=False)
    monkeypatch.setenv("DELTAWIRE_ADAPTERS", f"policy={tmp_path / 'run'}")
    monkeypatch.setenv("DELTAWIRE_TOKEN", "a token")
    from deltawire.engines.sglang.endpoint import SGLangServer

    app = FastAPI()

    @app.post("/{path:path}")
    async def echo(request: Request) -> Any:
        return await request.json()

    made = SGLangServer(Manager(tmp_path))
    made.attach(app)

    def send(path: str, body: Any, **headers: str) -> httpx.Response:
        async def one() -> httpx.Response:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as http:
                return await http.post(path, json=body, headers=headers)

        return asyncio.run_coroutine_threadsafe(one(), loop).result(60)

    living = app.router.lifespan_context(app)
    asyncio.run_coroutine_threadsafe(living.__aenter__(), loop).result(60)
    yield send
    assert made.adapters is not None
    made.adapters.stop(60)
    asyncio.run_coroutine_threadsafe(living.__aexit__(None, None, None), loop).result(60)
    REGISTRY.unregister(made.metrics)


def test_the_base_and_the_adapters_change_only_by_their_runs(server: Any) -> None:
    refused = server("/update_weights_from_disk", {})
    assert (refused.status_code, "fit only the weights it was started with" in refused.text) == (409, True)
    for route in ("/load_lora_adapter", "/load_lora_adapter_from_tensors", "/unload_lora_adapter"):
        refused = server(route, {"lora_name": "policy"}, authorization="Bearer a token")
        assert (refused.status_code, "follows adapters (policy)" in refused.text) == (409, True)
    for route in ("/pause_generation", "/weights_checker"):
        assert server(route, {}).status_code == 401
        assert server(route, {}, authorization="Bearer a token").status_code == 200


def test_routes_that_the_base_model_answers_refuse_the_name_of_an_adapter(server: Any) -> None:
    for route in ("/v1/responses", "/v1/score", "/v1/rerank", "/v1/classify", "/api/chat", "/api/generate"):
        for model in ("policy", "policy@3", "policy:7b:policy", "policy:latest"):
            refused = server(route, {"model": model, "input": "x"})
            assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")
            assert f"{route} is answered by the base model alone: ask for policy" in refused.text
        for body in ({"model": "policy:7b", "input": "x"}, {"input": "x"}, ["policy"]):
            answer = server(route, body)
            assert (answer.status_code, answer.json()) == (200, body)
    assert server("/v1/tokenize", {"model": "policy"}).status_code == 200


def test_versions_are_read_and_dropped_without_emptying_the_cache_of_the_device(scene: Scene) -> None:
    for version in range(3):
        scene.load(version)
        assert scene.manager.held() == [str(version)]
    assert sorted(scene.manager.lora_registry.get_all_adapters()) == ["policy", "policy@2"]


def test_what_the_schedulers_still_use_is_dropped_later_and_can_be_loaded_again(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry, later = scene.manager.lora_registry, []
    monkeypatch.setattr(sys.modules[type(scene.adapters).__module__], "_END_S", 0.01)
    monkeypatch.setattr(scene.adapters, "_loop", SimpleNamespace(
        create_task=asyncio.ensure_future, call_later=lambda seconds, work: later.append((seconds, work))
    ))  # fmt: skip
    scene.load(0)
    # of a client that is gone
    request = registry.acquire("policy@0")
    scene.load(1)
    [(seconds, again)] = later
    assert (seconds, scene.manager.held()) == (DROP_AGAIN_S, ["0", "1"])
    scene.load(0)
    assert scene.manager.held() == ["0", "0"]
    assert registry.acquire("policy") == registry.acquire("policy@0") != request
    registry.release(request)
    scene._loop.call_soon_threadsafe(again)
    until(lambda: scene.manager.held() == ["0"])
    assert [*scene.manager.ranks[0].loras] == [registry.acquire("policy")]


def test_a_version_that_waits_to_be_dropped_behind_another_can_be_loaded_again(scene: Scene) -> None:
    registry, adapters = scene.manager.lora_registry, scene.adapters
    for version in (0, 1):
        scene.load(version)
        adapters._registry.current("policy").requests += 1
    scene.load(2)
    request = registry.acquire("policy@0")

    async def back() -> None:
        for version in (0, 1):
            adapters._registry.find(f"policy@{version}").requests -= 1
        adapters._sweep_soon()
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_later(0.05, registry.release, request)
        await adapters._load(Loaded("policy", 1, scene.folder(1)))

    scene.run(back())
    until(lambda: not adapters._tasks and scene.manager.held() == ["1"])
    assert [*scene.manager.ranks[0].loras] == [registry.acquire("policy@1")]
