"""A vLLM plugin for tests, loaded in every process of a server under test: faults on demand, and no AMX.

A fault is a file in the folder $VLLM_TEST_FAULTS, removed when it strikes:
    fail-<rank>     the rank fails in the middle of writing new weights
    stall-<rank>    the rank stops for ever in the middle of writing new weights, and `stalled-<rank>` says so
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch


def register() -> None:
    # some virtual machines advertise AMX and then trap on it; vLLM has no switch for that
    torch.cpu._is_amx_tile_supported = lambda: False
    if "VLLM_TEST_FAULTS" in os.environ:
        _break_writes(Path(os.environ["VLLM_TEST_FAULTS"]))


def _break_writes(folder: Path) -> None:
    from vllm.v1.worker.worker_base import WorkerBase

    import deltawire.engines.vllm as engine

    call = engine._call

    def faulty(worker: Any, operation: str, **arguments: Any) -> dict[str, Any]:
        # not at once: vLLM's start-up trips over modules of llvmlite that are already there
        _break_shards(folder)
        return call(worker, operation, **arguments)

    # whoever is registered first
    engine._call = WorkerBase.deltawire = faulty


def _break_shards(folder: Path) -> None:
    from deltawire.engines.vllm.shard import HostShard

    write = HostShard.write
    if write.__name__ == "broken":
        return

    def broken(self: HostShard, patch: list[Any]) -> None:
        rank = torch.distributed.get_rank()
        for kind in ("fail", "stall"):
            fault = folder / f"{kind}-{rank}"
            if fault.exists():
                fault.unlink()
                write(self, patch[: len(patch) // 2])
                if kind == "stall":
                    (folder / f"stalled-{rank}").touch()
                    time.sleep(3600)
                raise OSError("a fault that a test asked for")
        write(self, patch)

    HostShard.write = broken  # type: ignore[method-assign]


class PatchLoader:
    """`--worker-extension-cls`: vLLM's own sparse loader, for benchmarks/pause.py to compare with."""

    def load_patches(self, path: str) -> float:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.checkpoint_weight_patch import (
            CheckpointWeightPatch,
            load_checkpoint_weight_patches,
        )

        content: dict[str, Any] = torch.load(path, weights_only=True)
        patches = [CheckpointWeightPatch(n, tuple(s), v.dtype, v, i) for n, (s, i, v) in content.items()]
        clock = time.perf_counter()
        with set_current_vllm_config(self.vllm_config):  # type: ignore[attr-defined]
            load_checkpoint_weight_patches(self.model_runner.get_model(), patches)  # type: ignore[attr-defined]
        return time.perf_counter() - clock
