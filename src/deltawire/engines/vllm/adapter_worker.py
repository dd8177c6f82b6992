"""Adapters in a vLLM worker. Runs between two steps of the model, so nothing heavy is imported here."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Any

from ..live import Answer, LoadingAdapter

TURN_S = 0.0005
"""Seconds of copying to the device between two steps."""


def call(worker: Any, operation: str, id: int, name: str = "", folder: str = "") -> Answer:
    """Do a part of the way of an adapter on this rank (`LoadingAdapter.call`). The API server reaches this method
    through `collective_rpc("deltawire_adapter", …)`."""
    return LoadingAdapter.call(worker, lambda: _VLLMLoading(worker, id, name, folder), operation, id)


class _VLLMLoading(LoadingAdapter):
    """Reads and merges an adapter as vLLM does, but beside the model; then registers it; then copies it in turns with
    steps of the model, none of which uses it yet."""

    def __init__(self, worker: Any, id: int, name: str, folder: str) -> None:
        from vllm.lora.request import LoRARequest

        super().__init__(worker.device)
        self._worker, self._manager = worker, worker.model_runner.lora_manager
        self._adapters = self._manager._adapter_manager
        self._request = LoRARequest(name, id, folder)
        self._found: Any = None
        self._copies: deque[Callable[[], None]] = deque()
        self._slot: int | None = None

    def read(self) -> None:
        found = self._manager._load_adapter(self._request)
        self._adapters._create_merged_loras_inplace(found)
        self._found = found

    def put(self) -> bool:
        """Register the adapter, then copy for a moment. If requests for other adapters have taken the slot, nothing is
        left to do: vLLM copies the adapter again when a request needs it."""
        if self._found is not None:
            self._register(self._found)
            self._found = None
            return False
        end = time.perf_counter() + TURN_S
        while self._copies and self._place() == self._slot:
            self._copies.popleft()()
            if time.perf_counter() > end:
                return False
        self._copies.clear()
        return True

    def unload(self) -> None:
        self._worker.remove_lora(self._request.lora_int_id)

    def _register(self, found: Any) -> None:
        """Have vLLM add the adapter, less what was done already, and note what it copies instead of copying it."""
        # of both only the attributes are copied: lists of adapters and slots are those of the model
        manager, adapters = copy(self._manager), copy(self._adapters)
        manager._adapter_manager = adapters
        manager._load_adapter = lambda request: found
        adapters._create_merged_loras_inplace = lambda found: None
        adapters.modules = {name: _Noting(module, self._copies) for name, module in self._adapters.modules.items()}
        if not manager.add_adapter(self._request):
            raise RuntimeError("vLLM did not add it")
        self._slot = self._place()

    def _place(self) -> int | None:
        places, id = self._adapters.lora_index_to_id, self._request.lora_int_id
        return places.index(id) if id in places else None


class _Noting:
    """Stands for a layer while vLLM puts an adapter in place, and notes the copies that it should make."""

    def __init__(self, module: Any, copies: deque[Callable[[], None]]) -> None:
        self.set_lora = lambda *args: copies.append(partial(module.set_lora, *args))
        self.reset_lora = lambda *args: copies.append(partial(module.reset_lora, *args))
