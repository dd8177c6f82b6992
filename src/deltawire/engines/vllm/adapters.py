"""Adapters in a vLLM server: `DELTAWIRE_ADAPTERS="policy=s3://runs/lora, judge=…"`.

Every worker reads a new version in a thread beside the model (adapter_worker.py), registers it under an id and a name
of its own, `policy@41`, and copies it to the device, a little between every two steps. When all ranks have it, the name
`policy` in vLLM's list of models points to it. A request keeps the id that it began with. vLLM's prefix cache finds
keys and values by name and folder of an adapter, which no two versions share.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

from ...errors import Misconfigured
from ..live import Adapters, Answer, Loaded
from .engine import call_ranks


def flags(adapters: int, keep: int = 1) -> dict[str, int]:
    """Return what vLLM needs at least for so many adapters: in one batch, and in memory with their older versions. One
    more of each is for a version that is being loaded."""
    return {"--max-loras": adapters + 1, "--max-cpu-loras": adapters * (1 + keep) + 1}


def require_room(config: Any, adapters: int, keep: int) -> None:
    """Raise Misconfigured if vLLM was started with less, given its LoRA config: it would drop versions in use."""
    needed = flags(adapters, keep)
    text = " ".join(f"{flag} {least}" for flag, least in needed.items())
    if config is None:
        raise Misconfigured(f"DELTAWIRE_ADAPTERS is set, but this server takes no adapters: add --enable-lora {text}")
    if any(has < least for has, least in zip((config.max_loras, config.max_cpu_loras), needed.values(), strict=True)):
        raise Misconfigured(
            f"{adapters} adapters with {keep} older versions each (DELTAWIRE_ADAPTERS_KEEP) need {text}; this server "
            f"has room for {config.max_loras} and {config.max_cpu_loras}"
        )


class VllmAdapters(Adapters):
    """The adapters of a vLLM server. `models` is vLLM's list of what requests can name."""

    def __init__(self, client: Any, models: Any, runs: Mapping[str, str], *, keep: int = 1, **options: Any) -> None:
        require_room(client.vllm_config.lora_config, len(runs), keep)
        for name in runs:
            if models.is_base_model(name) or name in models.lora_requests:
                raise Misconfigured(f"DELTAWIRE_ADAPTERS names {name!r}, which this server already has: rename one")
        served = client.vllm_config.model_config
        super().__init__(runs, source=str(served.model), revision=served.revision, keep=keep, **options)
        self._client, self._models = client, models
        self._by_id: dict[int, Loaded] = {}
        self._lend_to(client)
        self._count_together(client.output_processor.lora_states)

    def new_id(self) -> int:
        return int(self._models.lora_id_counter.inc(1))

    def serve(self, loaded: Loaded) -> None:
        self._by_id[loaded.id] = loaded
        self._models.lora_requests[loaded.full_name] = _request(loaded, loaded.full_name)
        self._models.lora_requests[loaded.name] = _request(loaded, loaded.name)

    def withdraw(self, loaded: Loaded) -> None:
        self._by_id.pop(loaded.id, None)
        # vLLM's own route may have unloaded it
        self._models.lora_requests.pop(loaded.full_name, None)

    async def call_ranks(self, operation: str, **arguments: Any) -> list[Answer]:
        return await call_ranks(self._client, "deltawire_adapter", operation, **arguments)

    def _lend_to(self, client: Any) -> None:
        """Have every request use one version to its end."""
        generate = client.generate

        def lent(*args: Any, lora_request: Any = None, **kwargs: Any) -> AsyncIterator[Any]:
            loaded = None if lora_request is None else self._chosen(lora_request)
            if loaded is None:
                return generate(*args, lora_request=lora_request, **kwargs)  # type: ignore[no-any-return]
            # under the full name: vLLM takes two requests for one adapter if they name it alike
            outputs = generate(*args, lora_request=_request(loaded, loaded.full_name), **kwargs)
            return self.lend(loaded, outputs, named=lora_request.lora_name == loaded.full_name)

        client.generate = lent

    def _count_together(self, counts: Any) -> None:
        """Have vLLM count the requests of all versions under one name: its metrics keep every label for ever."""
        update = counts._request_update

        def updated(request: str, name: str | None, **state: bool) -> None:
            known = self.followed(name) if name else None
            update(request, known[0].name if known else name, **state)

        counts._request_update = updated

    def _chosen(self, lora_request: Any) -> Loaded | None:
        """Return the version that a request gets; None if its adapter is none of these."""
        name = lora_request.lora_name
        loaded = self._by_id.get(lora_request.lora_int_id) or self.find(name)
        if loaded is None and self.followed(name):
            from vllm.exceptions import VLLMNotFoundError

            raise VLLMNotFoundError(f"The model `{name}` is not loaded any more: ask for a later version.")
        return loaded


def _request(loaded: Loaded, name: str) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, loaded.id, str(loaded.folder))
