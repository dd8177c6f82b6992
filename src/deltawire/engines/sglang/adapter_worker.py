"""What a scheduler of SGLang does with adapters, one per rank. Runs between two steps of the model."""

from __future__ import annotations

import copy
import threading
from typing import Any

from ..live.channel import Answer


def call(scheduler: Any, operation: str, id: str, name: str = "", folder: str = "") -> Answer:
    """What all ranks do at the same step.

    stage     begin to read an adapter, in a thread
    staged    whether it has been read
    load      register what was read
    unload    drop it, whatever of it is there

    Errors are returned: every rank must learn of those of the others.
    """
    reading: dict[str, _Reading] = scheduler.__dict__.setdefault("deltawire_reading", {})
    try:
        from sglang.srt.lora.lora_registry import LoRARef

        manager = scheduler.tp_worker.model_runner.lora_manager
        reference = LoRARef(lora_id=id, lora_name=name, lora_path=folder, pinned=False)
        if operation == "stage":
            reading[id] = _Reading(manager, reference)
        elif operation == "staged":
            return {"done": not reading[id].is_alive()}
        elif operation == "load":
            reading.pop(id).register(manager)
        else:
            reading.pop(id, None)
            _require(manager._unload_lora_adapter(reference))
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {}


class _Reading(threading.Thread):
    """Reads an adapter beside the model: SGLang's own way to a new one, with a copy of its lists of them."""

    def __init__(self, manager: Any, reference: Any) -> None:
        super().__init__(name="deltawire-adapter", daemon=True)
        self._beside, self._reference = copy.copy(manager), reference
        self._beside.configs, self._beside.loras, self._beside.lora_refs = {}, {}, dict(manager.lora_refs)
        self._error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            if self._beside.device.type != "cpu":
                import torch

                # pinned memory belongs to the device of the thread that allocates it
                torch.accelerator.set_device_index(self._beside.device)
            # not load_lora_adapter: that empties the cache of the device's memory to log what is free
            _require(self._beside._load_lora_adapter(self._reference))
        except Exception as error:
            self._error = error

    def register(self, manager: Any) -> None:
        """Let requests use what was read; raises what reading it has raised."""
        self.join()
        if self._error is not None:
            raise self._error
        for kind in ("configs", "loras", "lora_refs"):
            id = self._reference.lora_id
            getattr(manager, kind)[id] = getattr(self._beside, kind)[id]


def _require(result: Any) -> None:
    if not result.success:
        raise RuntimeError(result.error_message)
