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
pytest.importorskip("torch")

import msgspec
import torch
from safetensors.torch import load_file, save_file

from deltawire.core import full
from deltawire.core.change import whole
from deltawire.core.errors import Misconfigured, VersionRefused
from deltawire.core.schema import Schema
from deltawire.engines.live import arrangement
from deltawire.engines.live.adapter_worker import FILE
from deltawire.engines.live.adapters import Loaded
from deltawire.engines.live.arrangement import Arrangement
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


class Weights:
    """An adapter as vLLM holds it."""

    def __init__(self, id: int, loras: dict[str, Any]) -> None:
        self.id, self.loras, self.modules_to_save = id, loras, dict[str, Any]()

    @classmethod
    def from_lora_tensors(cls, *, lora_model_id: int, tensors: dict[str, Any], dtype: Any, **_: Any) -> Weights:
        loras: dict[str, Any] = {}
        for name, tensor in tensors.items():
            module, _, half = name.partition(".lora_")
            layer = loras.setdefault(module, SimpleNamespace(scaling=SCALING))
            setattr(layer, f"lora_{half}", tensor.to(dtype))
        return cls(lora_model_id, loras)


class Manager:
    """As much of vLLM's managers as a load uses: one reads adapters, the other has slots for them."""

    def __init__(self) -> None:
        self.modules = {f"layer {number}": Layer() for number in range(6)}
        self.lora_index_to_id: list[int | None] = [None, None]
        self._adapter_manager = self
        self._lora_model_cls = Weights
        self.lora_config = SimpleNamespace(lora_dtype=torch.bfloat16)
        self.read: list[str] = []
        """The folders that it has read."""

    def _load_adapter(self, request: Any) -> Any:
        self.read.append(str(request.folder))
        return self._lora_model_cls.from_lora_tensors(
            lora_model_id=request.lora_int_id, tensors=load_file(Path(request.folder, "adapter_model.safetensors")),
            dtype=self.lora_config.lora_dtype, model_vocab_size=320,
        )  # fmt: skip

    def _create_merged_loras_inplace(self, found: Any) -> None:
        for layer in found.loras.values():
            layer.lora_b *= layer.scaling
            layer.scaling = 1
        parts = [found.loras.pop(f"layer 0.{name}", None) for name in "qkv"]
        found.loras["layer 0"] = SimpleNamespace(
            lora_a=[part and part.lora_a for part in parts], lora_b=[part and part.lora_b for part in parts]
        )

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
                module.set_lora(slot, found.loras[name])
        return True

    def filled(self, slot: int) -> int:
        return sum(slot in layer.slots for layer in self.modules.values())


SCALING = 2.4


def make_versions(folder: Path, count: int) -> Schema:
    """Folders of versions of an adapter, of float32 as PEFT trains them."""
    made = torch.Generator().manual_seed(0)
    shapes = {"A": (4, 32), "B": (24, 4)}
    modules = ["layer 0.q", "layer 0.v", *(f"layer {number}" for number in range(1, 5))]
    for version in range(count):
        (folder / str(version)).mkdir()
        save_file(
            {
                f"{module}.lora_{half.lower()}": torch.randn(shape, generator=made)
                for module in modules
                for half, shape in shapes.items()
            },
            folder / str(version) / "adapter_model.safetensors",
        )
    return full.Checkpoint(folder / "0").schema


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    request = ModuleType("vllm.lora.request")
    request.LoRARequest = lambda name, id, folder: SimpleNamespace(  # type: ignore[attr-defined]
        lora_name=name, lora_int_id=id, folder=folder
    )
    monkeypatch.setitem(sys.modules, "vllm.lora.request", request)
    # every copy takes longer than a turn
    monkeypatch.setattr(adapter_worker, "TURN_S", -1.0)
    made = SimpleNamespace(model_runner=SimpleNamespace(lora_manager=Manager()), device=SimpleNamespace(type="cpu"))
    made.call, made.folder, made.schema = partial(adapter_worker.call, made), tmp_path, make_versions(tmp_path, 4)
    made.remove_lora = lambda id: None
    return made


def stage(worker: Any, id: int, version: int = 0, key: str = "a config") -> dict[str, Any]:
    end, folder = time.monotonic() + 60, str(worker.folder / str(version))
    while not (answer := worker.call("stage", id, f"policy@{version}", folder, key))["done"]:
        assert time.monotonic() < end
    return answer  # type: ignore[no-any-return]


def register(worker: Any, id: int) -> None:
    stage(worker, id)
    assert worker.call("load", id) == {"done": False}


def test_an_adapter_is_copied_a_little_between_every_two_steps(worker: Any) -> None:
    manager = worker.model_runner.lora_manager
    register(worker, 7)
    assert (manager.lora_index_to_id, manager.filled(0)) == ([7, None], 0)
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
    adapters._arrangements = {}
    loaded = Loaded("policy", 41, worker.folder / "0")
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


def arrange(worker: Any, version: int, answer: dict[str, Any]) -> None:
    """What the decoder's process does with a version, once a rank has said what it has learned."""
    folder, wanted = worker.folder / str(version), msgspec.convert(answer["arrangement"], Arrangement)
    source = full.Checkpoint(folder)
    bits = {tensor.name: source.region(whole(tensor)) for tensor in source.schema.tensors}
    arrangement.arrange(bits.__getitem__, source.schema.by_name(), wanted, folder / FILE, 1)


def found(worker: Any, id: int) -> dict[str, Any]:
    """The parts that a rank has read, as bits."""
    made = worker.deltawire_loading[id]._found
    assert made.id == id
    return {
        f"{name} {half} {number}": part if part is None else part.view(torch.int16).tolist()
        for name, layer in made.loras.items()
        for half in ("lora_a", "lora_b")
        for number, part in enumerate(adapter_worker._listed(getattr(layer, half)))
    }


def test_later_versions_are_what_vllm_would_read_and_are_not_read_by_it(worker: Any) -> None:
    manager = worker.model_runner.lora_manager
    answer = stage(worker, 1, 0)
    assert answer["read_by_engine"] == "the first version of its config"
    for version in (1, 2, 3):
        arrange(worker, version, answer)
        answer = stage(worker, version + 1, version)
        assert answer["read_by_engine"] == ("the version that was read both ways" if version == 1 else "")
        assert len(manager.read) == min(version + 1, 2)
        own = Manager()._load_adapter(SimpleNamespace(lora_int_id=version + 1, folder=worker.folder / str(version)))
        manager._create_merged_loras_inplace(own)
        worker.deltawire_loading["own"] = SimpleNamespace(_found=own)
        own.id = "own"
        assert found(worker, version + 1) == found(worker, "own")  # type: ignore[arg-type]
        assert found(worker, version + 1)["layer 0 lora_b 1"] is None
    # of another config nothing is known, although the file is there
    assert stage(worker, 9, 3, key="another")["read_by_engine"] == "the first version of its config"
    assert len(manager.read) == 3


def test_experts_that_vllm_stacks_are_learned_too(worker: Any) -> None:
    manager = worker.model_runner.lora_manager

    def stacked(found: Any) -> None:
        parts = [found.loras.pop(f"layer {number}") for number in (3, 1)]
        a, b = (torch.stack([getattr(part, half) for part in parts]) for half in ("lora_a", "lora_b"))
        found.loras["layer 3"] = SimpleNamespace(lora_a=[a], lora_b=[b * SCALING])

    manager._create_merged_loras_inplace = stacked
    answer = stage(worker, 1, 0)
    arrange(worker, 1, answer)
    arrange(worker, 2, stage(worker, 2, 1))
    assert stage(worker, 3, 2)["read_by_engine"] == ""


def turned(found: Any) -> None:
    found.loras["layer 1"].lora_b = found.loras["layer 1"].lora_b.flip(0).contiguous()


def cut(found: Any) -> None:
    found.loras["layer 1"].lora_b = found.loras["layer 1"].lora_b[:1]


def save(found: Any) -> None:
    found.modules_to_save = {"score": None}


@pytest.mark.parametrize(
    "rearrange, why",
    ((turned, "lora_b of layer 1 was arranged otherwise than by vLLM"), (cut, r"layer 1.lora_b'] become [1, 4]"),
     (save, "modules_to_save: score")),
)  # fmt: skip
def test_what_cannot_be_learned_is_read_by_vllm_which_says_so(worker: Any, rearrange: Any, why: str) -> None:
    manager = worker.model_runner.lora_manager
    manager._create_merged_loras_inplace = rearrange
    for version in range(3):
        answer = stage(worker, version + 1, version)
        if answer["arrangement"] is not None:
            arrange(worker, version + 1, answer)
    assert why in answer["read_by_engine"]
    assert (answer["arrangement"], len(manager.read)) == (None, 3)
