"""What a vLLM worker does with adapters. Runs between two steps of the model, so nothing heavy is imported here, and
what takes long is done in a thread, or a little between every two steps."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Any

from ..live.turns import short_turns

TURN_S = 0.0005
"""Seconds of copying to the device between two steps."""


def call(worker: Any, operation: str, id: int, name: str = "", folder: str = "") -> dict[str, Any]:
    """The method that the API server reaches through `collective_rpc("deltawire_adapter", …)`.

    stage     begin to read an adapter, in a thread
    staged    whether it has been read
    load      register what was read
    copy      copy a part of it to its place on the device; whether that was the last
    unload    drop it, whatever of it is there

    Errors are returned: vLLM loses count of the ranks' answers if one of them raises.
    """
    loading: dict[int, _Loading] = worker.__dict__.setdefault("deltawire_loading", {})
    try:
        if operation == "stage":
            loading[id] = _Loading(worker, id, name, folder)
        elif operation == "staged":
            return {"done": not loading[id].is_alive()}
        elif operation == "load":
            loading[id].register()
        elif operation == "copy":
            # some ranks are done before others
            if id not in loading or loading[id].proceed():
                loading.pop(id, None)
                return {"done": True}
            return {"done": False}
        else:
            loading.pop(id, None)
            worker.remove_lora(id)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {}


class _Loading(threading.Thread):
    """An adapter on its way to the device: read and merged as vLLM does, but beside the model; then registered; then
    copied in turns with steps of the model, none of which uses it yet."""

    def __init__(self, worker: Any, id: int, name: str, folder: str) -> None:
        from vllm.lora.request import LoRARequest

        super().__init__(name="deltawire-adapter", daemon=True)
        self._device, self._manager = worker.device, worker.model_runner.lora_manager
        self._adapters = self._manager._adapter_manager
        self._request = LoRARequest(name, id, folder)
        self._error: Exception | None = None
        self._found: Any = None
        self._copies: deque[Callable[[], None]] = deque()
        self._slot: int | None = None
        self.start()

    def run(self) -> None:
        try:
            if self._device.type != "cpu":
                import torch

                # pinned memory belongs to the device of the thread that allocates it
                torch.accelerator.set_device_index(self._device)
            with short_turns():
                found = self._manager._load_adapter(self._request)
                self._adapters._create_merged_loras_inplace(found)
            self._found = found
        except Exception as error:
            self._error = error

    def register(self) -> None:
        """Have vLLM add the adapter, less what was done already, and note what it copies instead of copying it."""
        self.join()
        if self._error is not None:
            raise self._error
        # of both only the attributes are copied: lists of adapters and slots are those of the model
        manager, adapters = copy(self._manager), copy(self._adapters)
        manager._adapter_manager = adapters
        manager._load_adapter = lambda request: self._found
        adapters._create_merged_loras_inplace = lambda found: None
        adapters.modules = {name: _Noting(module, self._copies) for name, module in self._adapters.modules.items()}
        if not manager.add_adapter(self._request):
            raise RuntimeError("vLLM did not add it")
        self._slot = self._place()

    def proceed(self) -> bool:
        """Copy for a moment; whether all is copied. If requests for other adapters have taken the slot, nothing is left
        to do: vLLM copies the adapter again when a request needs it."""
        end = time.perf_counter() + TURN_S
        while self._copies and self._place() == self._slot:
            self._copies.popleft()()
            if time.perf_counter() > end:
                return False
        return True

    def _place(self) -> int | None:
        places, id = self._adapters.lora_index_to_id, self._request.lora_int_id
        return places.index(id) if id in places else None


class _Noting:
    """Stands for a layer while vLLM puts an adapter in place, and notes what it is told to copy."""

    def __init__(self, module: Any, copies: deque[Callable[[], None]]) -> None:
        self.set_lora = lambda *args: copies.append(partial(module.set_lora, *args))
        self.reset_lora = lambda *args: copies.append(partial(module.reset_lora, *args))
