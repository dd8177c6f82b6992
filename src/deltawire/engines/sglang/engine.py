"""SGLang as a target sees it: its tokenizer manager, in the HTTP server (`Engine` of ../live)."""

from __future__ import annotations

import os
import time
from typing import Any

from sglang.srt.managers.io_struct import (
    ContinueGenerationReqInput,
    DumperControlReqInput,
    PauseGenerationReqInput,
)

from ..live import Answer, ServerOptions
from . import NAME, SECRET


async def call(manager: Any, operation: str, arguments: dict[str, Any]) -> list[Answer]:
    """Call all ranks, between two steps (core.py)."""
    body = {"operation": operation, "arguments": arguments, "secret": os.environ[SECRET]}
    (found,) = await manager.dumper_control(DumperControlReqInput(method=NAME, body=body))
    if not found.success:
        raise RuntimeError(f"the scheduler does not answer {operation!r}: {found.error}")
    return found.response  # type: ignore[no-any-return]


class SglangEngine:
    """One scheduler per rank, all of which take every step together."""

    name = "SGLang"
    first_rank = 0

    def __init__(self, manager: Any, options: ServerOptions) -> None:
        self._manager, self._options = manager, options
        self.source = str(manager.model_path)
        # prompt lookup has no weights; all others have, in a checkpoint of their own or in layers that are not followed
        self.has_draft = manager.server_args.resolved_dict().get("speculative_algorithm") not in (None, "NGRAM")

    async def call(self, text: str) -> list[Answer]:
        return await call(self._manager, "rank", {"text": text})

    async def swap(self, version: str, staged: list[int]) -> Answer:
        """One call to the schedulers (core.py). Requests that are not to be kept are waited for or stopped before."""
        manager, clock = self._manager, time.perf_counter()
        if self._options.pause == "keep" or manager.is_pause:
            return await self._swap(version, staged)
        if self._options.pause == "wait":
            # as SGLang's own updates do: requests that come now wait, those before them end
            async with manager.model_update_lock.writer_lock:
                answer = await self._swap(version, staged)
        else:
            await manager.pause_generation(PauseGenerationReqInput(mode="abort"))
            answer = await self._swap(version, staged)
            if "lost" not in answer:
                await self._resume()
        return answer | {"pause": time.perf_counter() - clock}

    async def _swap(self, version: str, staged: list[int]) -> Answer:
        what = {"version": version, "clear": self._options.plugin_kv == "clear", "staged": staged}
        (answer,) = await call(self._manager, "swap", what)
        if version and "failure" not in answer:
            self._manager._update_weight_version_if_provided(version)
        return answer

    async def hold(self) -> None:
        await self._manager.pause_generation(PauseGenerationReqInput(mode="in_place"))

    async def stop(self) -> None:
        """Retracted requests are computed anew. What else is cached is dropped by the next swap, or not found again:
        the name that the weights get next is another salt."""
        mode = "in_place" if self._options.plugin_kv == "keep" else "retract"
        await self._manager.pause_generation(PauseGenerationReqInput(mode=mode))

    async def set_version(self, version: str, resume: bool) -> None:
        await call(self._manager, "name", {"version": version})
        self._manager._update_weight_version_if_provided(version)
        if resume:
            await self._resume()

    async def _resume(self) -> None:
        await self._manager.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))
