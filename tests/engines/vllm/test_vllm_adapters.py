"""What a vLLM server with adapters refuses at its start, and how a worker copies them. The rest needs vLLM:
live_adapters.py."""

from __future__ import annotations

import asyncio
import sys
import time
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi")

from deltawire.core.errors import Misconfigured, VersionRefused
from deltawire.engines.live.adapters import Loaded
from deltawire.engines.vllm import adapter_worker
from deltawire.engines.vllm import adapters as vllm_adapters
from deltawire.engines.vllm.adapters import VllmAdapters, require_room


def test_a_server_without_room_names_the_flags() -> None:
    with pytest.raises(Misconfigured, match="takes no adapters: add --enable-lora --max-loras 3 --max-cpu-loras 5"):
        require_room(None, 2, 1)
    for loras, memory in ((2, 5), (3, 4)):
        with pytest.raises(Misconfigured, match=f"need --max-loras 3 --max-cpu-loras 5; .* {loras} and {memory}"):
            require_room(SimpleNamespace(max_loras=loras, max_cpu_loras=memory), 2, 1)
    require_room(SimpleNamespace(max_loras=3, max_cpu_loras=5), 2, 1)


def test_a_name_that_is_taken_is_refused() -> None:
    room = SimpleNamespace(vllm_config=SimpleNamespace(lora_config=SimpleNamespace(max_loras=9, max_cpu_loras=9)))
    models = SimpleNamespace(is_base_model=lambda name: name == "chat", lora_requests={"static": None})
    for name in ("chat", "static"):
        with pytest.raises(Misconfigured, match=f"names '{name}', which this server already has"):
            VllmAdapters(room, models, {name: "s3://runs/lora"})


class Layer:
    def __init__(self) -> None:
        self.slots: dict[int, str] = {}

    def set_lora(self, slot: int, weights: str) -> None:
        self.slots[slot] = weights

    def reset_lora(self, slot: int) -> None:
        self.slots.pop(slot, None)


class Manager:
    """As much of vLLM's managers as a load uses: one reads adapters, the other has slots for them."""

    def __init__(self) -> None:
        self.modules = {f"layer {number}": Layer() for number in range(6)}
        self.lora_index_to_id: list[int | None] = [None, None]
        self._adapter_manager = self
        self.merged: list[str] = []

    def _load_adapter(self, request: Any) -> str:
        return f"weights of {request.name}"

    def _create_merged_loras_inplace(self, found: str) -> None:
        self.merged.append(found)

    def add_adapter(self, request: Any) -> bool:
        found = self._load_adapter(request)
        # vLLM has two objects, of which one calls the other
        slots = self._adapter_manager
        slots._create_merged_loras_inplace(found)
        slot = slots.lora_index_to_id.index(None)
        slots.lora_index_to_id[slot] = request.lora_int_id
        for name, module in slots.modules.items():
            if name == "layer 5":
                module.reset_lora(slot)
            else:
                module.set_lora(slot, found)
        return True

    def filled(self, slot: int) -> int:
        return sum(slot in layer.slots for layer in self.modules.values())


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    request = ModuleType("vllm.lora.request")
    request.LoRARequest = lambda name, id, folder: SimpleNamespace(name=name, lora_int_id=id)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.lora.request", request)
    # every copy takes longer than a turn
    monkeypatch.setattr(adapter_worker, "TURN_S", -1.0)
    made = SimpleNamespace(model_runner=SimpleNamespace(lora_manager=Manager()), device=SimpleNamespace(type="cpu"))
    made.call = partial(adapter_worker.call, made)
    return made


def stage(worker: Any, id: int) -> None:
    end = time.monotonic() + 60
    while not worker.call("stage", id, f"policy@{id}")["done"]:
        assert time.monotonic() < end


def register(worker: Any, id: int) -> None:
    stage(worker, id)
    assert worker.call("load", id) == {"done": False}


def test_an_adapter_is_copied_a_little_between_every_two_steps(worker: Any) -> None:
    manager = worker.model_runner.lora_manager
    register(worker, 7)
    assert (manager.lora_index_to_id, manager.merged, manager.filled(0)) == ([7, None], ["weights of policy@7"], 0)
    for copied in range(1, 6):
        assert worker.call("load", 7) == {"done": False}
        assert manager.filled(0) == copied
    # the layer that it has nothing for
    assert [worker.call("load", 7)["done"] for _ in range(2)] == [False, True]
    # another rank may need longer
    assert worker.call("load", 7) == {"done": True}
    assert manager.lora_index_to_id == [7, None]


def test_an_adapter_whose_slot_was_taken_is_not_copied_over_another(worker: Any) -> None:
    manager = worker.model_runner.lora_manager
    register(worker, 7)
    assert worker.call("load", 7) == {"done": False}
    manager.lora_index_to_id[0] = 8
    assert worker.call("load", 7) == {"done": True}
    assert manager.filled(0) == 1


def test_a_rank_that_fails_to_copy_is_an_error_and_drops_the_adapter(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager, dropped = worker.model_runner.lora_manager, []
    worker.remove_lora = dropped.append
    manager.modules["layer 2"].set_lora = lambda *args: 1 // 0

    async def call_ranks(client: Any, method: str, operation: str, **arguments: Any) -> list[Any]:
        # the other rank has copied all
        return [{"done": True}, worker.call(operation, **arguments)]

    monkeypatch.setattr(vllm_adapters, "call_ranks", call_ranks)
    adapters: Any = vllm_adapters.VllmAdapters.__new__(vllm_adapters.VllmAdapters)
    adapters._client, adapters._models = None, SimpleNamespace(lora_id_counter=SimpleNamespace(inc=lambda _: 7))
    loaded = Loaded("policy", 41, Path("folder"))
    with pytest.raises(VersionRefused, match="ZeroDivisionError"):
        asyncio.run(adapters.add(loaded))
    assert (manager.filled(0), loaded.id) == (2, 7)
    asyncio.run(adapters.remove(loaded))
    assert (dropped, worker.deltawire_loading) == ([7], {})


def test_what_a_rank_cannot_read_is_an_error_and_nothing_is_registered(worker: Any) -> None:
    manager = worker.model_runner.lora_manager
    manager._load_adapter = lambda request: 1 // 0
    stage(worker, 7)
    assert worker.call("load", 7) == {"error": "ZeroDivisionError: integer division or modulo by zero"}
    assert manager.lora_index_to_id == [None, None]
