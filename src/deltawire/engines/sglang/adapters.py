"""Adapters in an SGLang server: `DELTAWIRE_ADAPTERS="policy=s3://runs/lora, judge=…"`.

Every scheduler reads a new version in a thread beside the model (adapter_worker.py) and registers it between two steps,
under an id of its own. When all ranks have it, `policy` and `policy@41` in SGLang's registry of adapters point to it. A
request keeps the id that it began with, which is also part of the key of its prefixes in the cache.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

from fastapi import HTTPException

from ...errors import Misconfigured
from ..live import Adapters, Answer, Loaded
from .engine import call

_END_S = 10.0
"""Seconds that the schedulers have to end a request whose client is gone, until the version is dropped later."""


class SglangAdapters(Adapters):
    """The adapters of an SGLang server, given its tokenizer manager."""

    def __init__(self, manager: Any, runs: Mapping[str, str], **options: Any) -> None:
        for name in runs:
            if name == manager.served_model_name or name in manager.lora_registry.get_all_adapters():
                raise Misconfigured(f"DELTAWIRE_ADAPTERS names {name!r}, which this server already has: rename one")
        revision = manager.server_args.resolved_dict().get("revision")
        super().__init__(runs, source=str(manager.model_path), revision=revision, **options)
        self._manager, self._registered = manager, manager.lora_registry
        self._lend_to(manager)
        self._name_models()

    def followed(self, model: str) -> Any:
        # SGLang also takes `base:policy`
        return super().followed(model) or super().followed(self._own_name(model))

    def new_id(self) -> str:
        from sglang.srt.lora.lora_registry import LoRARef

        return str(LoRARef().lora_id)

    async def remove(self, loaded: Loaded) -> None:
        try:
            # its requests have ended here; the schedulers may hold one whose client is gone
            await asyncio.wait_for(self._registered.wait_for_unload(loaded.id), _END_S)
        except asyncio.TimeoutError as error:
            raise TimeoutError(f"schedulers did not end its requests within {_END_S:g} s") from error
        await super().remove(loaded)

    def serve(self, loaded: Loaded) -> None:
        names = self._registered._registry
        if loaded.full_name not in names:
            self._registered._register_adapter(self._reference(loaded, loaded.full_name))
        names[loaded.name] = self._reference(loaded, loaded.name)

    def withdraw(self, loaded: Loaded) -> None:
        del self._registered._registry[loaded.full_name]

    def _reference(self, loaded: Loaded, name: str) -> Any:
        from sglang.srt.lora.lora_registry import LoRARef

        return LoRARef(lora_id=loaded.id, lora_name=name, lora_path=str(loaded.folder), pinned=False)

    async def call_ranks(self, operation: str, **arguments: Any) -> list[Answer]:
        return await call(self._manager, "adapter", {"operation": operation, **arguments})

    def _own_name(self, model: str) -> str:
        return model.removeprefix(f"{self._manager.served_model_name}:")

    def _name_models(self) -> None:
        """Have requests name an adapter as their `model`, as with vLLM: SGLang takes any name for the base model."""
        from sglang.srt.entrypoints.openai.serving_base import OpenAIServingBase

        parse = OpenAIServingBase._parse_model_parameter

        def parsed(serving: Any, model: str) -> Any:
            return (model, self._own_name(model)) if self.followed(model) else parse(serving, model)

        OpenAIServingBase._parse_model_parameter = parsed

    def _lend_to(self, manager: Any) -> None:
        """Have every request use one version to its end."""
        generate = manager.generate_request

        def lent(request: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
            loaded, named = self._chosen(getattr(request, "lora_path", None))
            if loaded is None:
                return generate(request, *args, **kwargs)  # type: ignore[no-any-return]
            request.lora_path = loaded.full_name
            return self.lend(loaded, generate(request, *args, **kwargs), named=named)

        manager.generate_request = lent

    def _chosen(self, asked: Any) -> tuple[Loaded | None, bool]:
        """Return the version that a request gets, None if it asks for none of these, and whether it named it."""
        names = set(asked) if isinstance(asked, list) else {asked}
        followed = [name for name in names if name and self.followed(name)]
        if not followed:
            return None, False
        if len(names) > 1:
            raise HTTPException(400, "a request is answered by one adapter: send one request for each")
        name = self._own_name(followed[0])
        loaded = self.find(name)
        if loaded is None:
            raise HTTPException(404, f"The model `{name}` is not loaded any more: ask for a later version.")
        return loaded, name == loaded.full_name
