"""A vLLM plugin for tests, loaded in every process of a server under test: faults on demand, and no AMX.

A fault is a file in the folder $VLLM_TEST_FAULTS, removed when it strikes:
    fail-<rank>     the rank fails in the middle of writing new weights
    stray-<rank>    the rank changes a weight that was to stay as it is
    stall-<rank>    the rank stops for ever in the middle of writing new weights, and `stalled-<rank>` says so
"""

from __future__ import annotations

import os
import time
from itertools import pairwise
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
    from deltawire.engines.vllm.device import DeviceShard
    from deltawire.engines.vllm.shard import HostShard

    for shard in (HostShard, DeviceShard):
        if shard.write.__name__ != "broken":
            shard.write = _broken(shard.write, folder)  # type: ignore[method-assign]


def _broken(write: Any, folder: Path) -> Any:
    def broken(self: Any, patch: Any) -> None:
        rank = torch.distributed.get_rank()
        struck = [kind for kind in ("fail", "stall", "stray") if (folder / f"{kind}-{rank}").exists()]
        for kind in struck:
            (folder / f"{kind}-{rank}").unlink()
        # on a GPU all of it is one launch: it is written, and not said to be
        write(self, patch[: len(patch) // 2] if self.audited and struck and struck != ["stray"] else patch)
        if struck == ["stray"]:
            _stray(self, patch)
        elif struck:
            if struck == ["stall"]:
                (folder / f"stalled-{rank}").touch()
                time.sleep(3600)
            raise OSError("a fault that a test asked for")

    return broken


def _stray(shard: Any, patch: Any) -> None:
    """Flip a bit of a weight: in host memory of the first that the patch leaves alone, on a device of any."""
    if not shard.audited:
        shard.pieces[0].view.view(torch.int16)[0, 0] ^= 1
        return
    written = set(patch[0].change.positions.tolist())
    bits = shard.read(patch[0].piece)
    position = next(p for p in range(bits.size) if p not in written)
    bits[divmod(position, bits.shape[1])] ^= 1


class Probe:
    """`--worker-extension-cls` for benchmarks/pause.py: when the model computes, and vLLM's own sparse loader."""

    def watch_steps(self) -> None:
        runner = self.model_runner  # type: ignore[attr-defined]
        compute, self.steps = runner.execute_model, []

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return compute(*args, **kwargs)
            finally:
                self.steps.append((begin, time.perf_counter()))

        runner.execute_model = timed

    def longest_break(self) -> float:
        """Seconds between two steps, since the last call."""
        steps, self.steps[:] = [*self.steps], []
        return max(after[0] - before[1] for before, after in pairwise(steps))

    def read_patches(self, path: str) -> None:
        """Before the pause: a safetensors file of `<tensor>.indices`, `<tensor>.values` and `<tensor>.shape`."""
        from safetensors.torch import load_file
        from vllm.model_executor.model_loader.checkpoint_weight_patch import CheckpointWeightPatch

        content = load_file(path)
        self.patches = [
            CheckpointWeightPatch(name, tuple(shape.tolist()), values.dtype, values, content[f"{name}.indices"])
            for name, shape, values in (
                (key.removesuffix(".shape"), content[key], content[f"{key.removesuffix('.shape')}.values"])
                for key in content
                if key.endswith(".shape")
            )
        ]

    def load_patches(self) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.checkpoint_weight_patch import load_checkpoint_weight_patches

        with set_current_vllm_config(self.vllm_config):  # type: ignore[attr-defined]
            load_checkpoint_weight_patches(self.model_runner.get_model(), self.patches)  # type: ignore[attr-defined]
