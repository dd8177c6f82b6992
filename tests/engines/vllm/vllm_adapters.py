"""A vLLM server that follows adapters alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_live import BIN, Server

from tests.engines.live.adapter_trainer import AdapterTrainer, adapter

__all__ = ["AdapterServer", "AdapterTrainer", "adapter", "start"]


class AdapterServer(Server):
    """`vllm serve` without a weight-transfer back end."""

    def program(self, model: Path) -> list[str]:
        return [str(BIN / "vllm"), "serve", str(model)]

    def rpc(self, method: str, **arguments: Any) -> list[Any]:
        """Call a method of `vllm_test_plugin.Probe` on every rank."""
        answer = self.http.post("/collective_rpc", json={"method": method, "kwargs": arguments})
        return answer.raise_for_status().json()["results"]  # type: ignore[no-any-return]


def start(model: Path, log: Path, adapters: Mapping[str, Path], *flags: str, **options: Any) -> AdapterServer:
    """A server that follows these runs, by the names of adapters."""
    versions = str(2 * len(adapters) + 1)
    room = ["--enable-lora", "--max-loras", versions, "--max-cpu-loras", versions]
    named = ", ".join(f"{name}={run}" for name, run in adapters.items())
    return AdapterServer(model, log, flags=[*room, *flags], DELTAWIRE_ADAPTERS=named, **options)
