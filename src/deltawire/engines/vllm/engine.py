"""vLLM as a target sees it: its engine client, in the API server (`Engine` of ../live)."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from ..live import Answer, ServerOptions
from .drafts import draft_config


class VllmEngine:
    """One or more engine cores, each with its ranks."""

    name = "vLLM"

    def __init__(self, client: Any, options: ServerOptions) -> None:
        self._client, self._options = client, options
        config = client.vllm_config
        self.source = str(config.model_config.model)
        self.has_draft = draft_config(config) is not None
        self._engines = engines(client)
        first = getattr(client.engine_core, "engine_ranks_managed", [0])[0]
        self.first_rank = first * config.parallel_config.world_size if first else 0

    async def call(self, text: str) -> list[Answer]:
        return await call_ranks(self._client, "deltawire", text)

    async def swap(self, version: str, staged: list[int]) -> Answer:
        """One call to the engine core (core.py). Requests that are not to be kept are stopped before, and so are all
        if there are several engines."""
        keep = self._options.pause == "keep" and self._engines == 1
        stay = keep or await self._client.is_paused()
        clock = time.perf_counter()
        if not keep:
            # of several engines, none computes a step once this returns
            await self._client.sleep(level=0, mode=self._options.pause)
        answer = await self._swap_cores(version, staged)
        if not stay and "lost" not in answer:
            await self._client.wake_up(["scheduling"])
            answer["pause"] = time.perf_counter() - clock
        return answer

    async def _swap_cores(self, version: str, staged: list[int]) -> Answer:
        """Swap on all engines, or on none; they get the name when all of them have the weights."""
        clear = self._options.plugin_kv == "clear"
        if self._engines == 1:
            return (await call_cores(self._client, "deltawire_swap", version, clear, staged))[0]  # type: ignore[no-any-return]
        answers = await call_cores(self._client, "deltawire_swap", "", clear, staged)
        failed = [f"engine {n}: {answer['failure']}" for n, answer in enumerate(answers) if "failure" in answer]
        if failed:
            undone = await call_cores(self._client, "deltawire_undo", staged)
            lost = [answer["lost"] for answer in undone if "lost" in answer]
            return {"failure": failed[0]} | ({"lost": lost[0]} if lost else {})
        if version:
            await call_cores(self._client, "set_weight_version", version)
        return {phase: max(answer[phase] for answer in answers) for phase in ("stop", "apply", "prove")}

    async def hold(self) -> None:
        await self._client.pause_generation(mode="keep", clear_cache=False)

    async def stop(self) -> None:
        """What `pause_generation` does, without the 20 ms that it sleeps so that callers see outputs in a nicer order.
        Level 0 stops the scheduler and leaves all memory as it is."""
        client = self._client
        await client.sleep(level=0, mode="keep")
        if self._options.plugin_kv != "keep":
            dropped, *_ = await asyncio.gather(
                client.reset_prefix_cache(reset_running_requests=True, reset_connector=True),
                client.reset_mm_cache(),
                client.reset_encoder_cache(),
            )
            if not dropped:
                raise RuntimeError("keys and values of the old weights could not be dropped")

    async def set_version(self, version: str, resume: bool) -> None:
        await self._client.update_weight_version(version)
        if resume:
            await self._client.wake_up(["scheduling"])


def engines(client: Any) -> int:
    """Number of engine cores: one per data-parallel rank."""
    return len(getattr(client.engine_core, "core_engines", "1"))


async def call_cores(client: Any, method: str, *args: Any) -> list[Any]:
    """Call a method of every engine core."""
    core = client.engine_core
    if engines(client) == 1:
        return [await core.call_utility_async(method, *args)]
    return await core.call_utility_all_async(method, *args)  # type: ignore[no-any-return]


async def call_ranks(client: Any, method: str, what: str, **arguments: object) -> list[Answer]:
    """Call a method of every worker of every engine, between two steps."""
    found = await call_cores(client, "collective_rpc", method, None, (what,), arguments)
    return [answer for ranks in found for answer in ranks]
