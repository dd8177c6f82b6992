"""Adapters in a scheduler of SGLang, one per rank. Runs between two steps of the model."""

from __future__ import annotations

import copy
from typing import Any

from ..live import Answer, LoadingAdapter


def call(scheduler: Any, operation: str, id: str, name: str = "", folder: str = "", key: str = "") -> Answer:
    """Do a part of the way of an adapter on this rank (`LoadingAdapter.call`). Of what `key` says nothing is needed:
    SGLang reads every version itself."""
    return LoadingAdapter.call(scheduler, lambda: _SGLangLoading(scheduler, id, name, folder), operation, id)


class _SGLangLoading(LoadingAdapter):
    """Reads an adapter in SGLang's own way to a new one, with a copy of its lists of them."""

    def __init__(self, scheduler: Any, id: str, name: str, folder: str) -> None:
        from sglang.srt.lora.lora_registry import LoRARef

        self._manager = manager = scheduler.tp_worker.model_runner.lora_manager
        super().__init__(manager.device)
        # ranks refuse a name that they have, also of a version that waits to be dropped
        self._reference = LoRARef(lora_id=id, lora_name=f"{name}#{id}", lora_path=folder, pinned=False)
        self._loader = copy.copy(manager)
        self._loader.configs, self._loader.loras, self._loader.lora_refs = {}, {}, dict(manager.lora_refs)

    def read(self) -> None:
        # not load_lora_adapter: that empties the cache of the device's memory to log what is free
        _require(self._loader._load_lora_adapter(self._reference))

    def put(self) -> bool:
        for kind in ("configs", "loras", "lora_refs"):
            id = self._reference.lora_id
            getattr(self._manager, kind)[id] = getattr(self._loader, kind).pop(id)
        return True

    def unload(self) -> None:
        _require(self._manager._unload_lora_adapter(self._reference))


def _require(result: Any) -> None:
    if not result.success:
        raise RuntimeError(result.error_message)
