"""What a vLLM worker does with adapters. Runs between two steps of the model, so nothing heavy is imported here."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


def call(worker: Any, operation: str, id: int, name: str = "", folder: str = "") -> dict[str, Any]:
    """The method that the API server reaches through `collective_rpc("deltawire_adapter", …)`.

    stage     begin to read an adapter, in a thread
    staged    whether it has been read
    load      register what was read
    unload    drop it, whatever of it is there

    Errors are returned: vLLM loses count of the ranks' answers if one of them raises.
    """
    reading: dict[int, _Reading] = worker.__dict__.setdefault("deltawire_reading", {})
    try:
        from vllm.lora.request import LoRARequest

        manager = worker.model_runner.lora_manager
        if operation == "stage":
            read = manager._load_adapter
            reading[id] = _Reading(lambda: read(LoRARequest(name, id, folder)), worker.device)
        elif operation == "staged":
            return {"done": not reading[id].is_alive()}
        elif operation == "load":
            # vLLM's own way to a new adapter, which would read it here and now
            manager._load_adapter = lambda request: reading[id].result()
            try:
                if not worker.add_lora(LoRARequest(name, id, folder)):
                    raise RuntimeError("vLLM did not add it")
            finally:
                del manager._load_adapter, reading[id]
        else:
            reading.pop(id, None)
            worker.remove_lora(id)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {}


class _Reading(threading.Thread):
    """Reads an adapter beside the model. `result` waits for it, and raises what it raised."""

    def __init__(self, read: Callable[[], Any], device: Any) -> None:
        super().__init__(name="deltawire-adapter", daemon=True)
        self._read, self._device = read, device
        self._error: Exception | None = None
        self._found: Any = None
        self.start()

    def run(self) -> None:
        try:
            if self._device.type != "cpu":
                import torch

                # pinned memory belongs to the device of the thread that allocates it
                torch.accelerator.set_device_index(self._device)
            self._found = self._read()
        except Exception as error:
            self._error = error

    def result(self) -> Any:
        self.join()
        if self._error is not None:
            raise self._error
        return self._found
