"""A vLLM plugin for tests, loaded in every process of a server under test: faults on demand (live_faults.py), no AMX,
and what vLLM's data parallelism lacks on a CPU.

$VLLM_TEST_REFUSE is a reason to refuse deltas: every version is then reloaded in full.
"""

from __future__ import annotations

import gc
import os
import time
from itertools import cycle, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch


def register() -> None:
    # some virtual machines advertise AMX and then trap on it; vLLM has no switch for that
    torch.cpu._is_amx_tile_supported = lambda: False
    _show_drafts()
    _exchange_tokens_on_a_cpu()
    _share_experts_on_a_cpu()
    if "LIVE_TEST_FAULTS" in os.environ:
        _break_writes()
    if reason := os.environ.get("VLLM_TEST_REFUSE"):
        # before the back end is imported: deltas are refused, and every version is reloaded by vLLM
        from deltawire.engines.vllm import guard

        guard.problems_of = lambda model, config: [reason]


def _show_drafts() -> None:
    """A call of workers: checksums of the draft model, which /weight_checker leaves out."""
    from vllm.v1.worker.worker_base import WorkerBase

    def digests(worker: Any) -> dict[str, str]:
        from vllm.model_executor.model_loader.weight_checksum import compute_tensor_digests

        return compute_tensor_digests(worker.get_draft_model())

    WorkerBase.test_draft_digests = digests


def _exchange_tokens_on_a_cpu() -> None:
    """Two collectives that vLLM's CPU communicator lacks, and that engines with experts in common need."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    def gather(self: Any, tensors: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
        if not isinstance(tensors, list):
            return gather(self, [tensors], dim, sizes)[0]
        found = []
        for mine in tensors:
            # the same size from all: they are cut again where they come out
            rows = sizes or [mine.shape[0]] * self.world_size
            padded = mine.new_zeros((max(rows), *mine.shape[1:]))
            padded[: mine.shape[0]] = mine
            parts = [torch.empty_like(padded) for _ in rows]
            torch.distributed.all_gather(parts, padded, group=self.device_group)
            found.append(torch.cat([part[:count] for part, count in zip(parts, rows, strict=True)]))
        return found

    def reduce_scatter(self: Any, tensor: Any, dim: int = -1, sizes: list[int] | None = None) -> Any:
        rows = sizes or [tensor.shape[0] // self.world_size] * self.world_size
        total = tensor.contiguous().clone()
        torch.distributed.all_reduce(total, group=self.device_group)
        start = sum(rows[: self.rank_in_group])
        return total[start : start + rows[self.rank_in_group]]

    CpuCommunicator.all_gatherv, CpuCommunicator.reduce_scatterv = gather, reduce_scatter  # type: ignore[method-assign]


def _share_experts_on_a_cpu() -> None:
    """vLLM's CPU kernel takes the number of an expert for its place, also on a rank that holds only some of them, and
    reads beyond them: with expert parallelism the first request ends the server."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    apply = CPUUnquantizedExperts.apply

    def applied(self: Any, *, topk_weights: Any, topk_ids: Any, expert_map: Any, **more: Any) -> None:
        if expert_map is not None:
            here = expert_map[topk_ids.long()]
            topk_weights = topk_weights.masked_fill(here < 0, 0)
            topk_ids = here.clamp(min=0).to(topk_ids.dtype)
        apply(self, topk_weights=topk_weights, topk_ids=topk_ids, expert_map=expert_map, **more)

    CPUUnquantizedExperts.apply = applied  # type: ignore[method-assign]


def _break_writes() -> None:
    from live_faults import break_writes
    from vllm.v1.worker.worker_base import WorkerBase

    import deltawire.engines.vllm as engine

    call = engine._call

    def faulty(worker: Any, operation: str, **arguments: Any) -> dict[str, Any]:
        # not at once: vLLM's start-up trips over modules of llvmlite that are already there
        break_writes()
        return call(worker, operation, **arguments)

    # whoever is registered first
    engine._call = WorkerBase.deltawire = faulty
    _break_adapters(Path(os.environ["LIVE_TEST_FAULTS"]))


def _break_adapters(folder: Path) -> None:
    """While there is a file adapter-<rank>, the rank finds no adapter where it should be."""
    from vllm.v1.worker.worker_base import WorkerBase

    from deltawire.engines.vllm import adapter_worker

    call = adapter_worker.call

    def faulty(worker: Any, operation: str, **arguments: Any) -> dict[str, Any]:
        if operation == "stage" and (folder / f"adapter-{torch.distributed.get_rank()}").exists():
            arguments["folder"] = "/a/fault/that/a/test/asked/for"
        return call(worker, operation, **arguments)

    adapter_worker.call = WorkerBase.deltawire_adapter = faulty


class Probe:
    """`--worker-extension-cls` for benchmarks: when the model computes, what it allocates, and other ways to new
    weights: vLLM's own sparse loader, and ModelExpress."""

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

    def note_staging(self, on: bool) -> dict[str, Any]:
        """Note when the model computes and when staging does what, or stop that. Returns [name, begin, end] of each
        call and the begin of each step, by the clock of `time.monotonic`, since it was switched on."""
        from triton import knobs

        from deltawire import kernels
        from deltawire.engines.live.rank import Rank
        from deltawire.kernels import triton_ops
        from deltawire.replica.device import DeviceShard

        if not on:
            gc.callbacks.remove(self.collecting)
            for owner, name, original in self.replaced:
                setattr(owner, name, original)
            return {"calls": self.noted, "steps": self.begun}
        self.noted: list[tuple[str, float, float]] = []
        self.begun: list[float] = []
        self.replaced = [
            (owner, name, getattr(owner, name))
            for owner, names in (
                (DeviceShard, ("count", "receive", "digests_beside", "_send", "_patch", "write", "digests")),
                (DeviceShard, ("_fetch",)),
                (Rank, ("_require_in_place",)),
                (kernels, ("read_sheet",)),
                (triton_ops, ("class_counts", "place", "resolve", "digest_change")),
            )
            for name in names
        ]
        for owner, name, original in self.replaced:
            setattr(owner, name, _timed(original, name, self.noted))

        def collecting(phase: str, info: dict[str, int]) -> None:
            if phase == "start":
                self.collecting_since = time.monotonic()
            else:
                self.noted.append((f"gc {info['generation']}", self.collecting_since, time.monotonic()))

        self.collecting = collecting
        gc.callbacks.append(collecting)
        # what Triton compiles while a model is served, it holds up
        self.replaced.append((knobs.runtime, "jit_post_compile_hook", knobs.runtime.jit_post_compile_hook))
        knobs.runtime.jit_post_compile_hook = lambda **_: self.noted.append(
            ("compiled", time.monotonic() - 1e-6, time.monotonic())
        )
        runner = self.model_runner  # type: ignore[attr-defined]
        compute = runner.execute_model

        def step(*args: Any, **kwargs: Any) -> Any:
            self.begun.append(time.monotonic())
            return compute(*args, **kwargs)

        self.replaced.append((runner, "execute_model", compute))
        runner.execute_model = step
        return {}

    def note_adapters(self, on: bool) -> dict[str, Any]:
        """The same of calls that concern adapters: those of the API server by their names, and vLLM's own in them."""
        from vllm.lora.model_manager import LoRAModelManager
        from vllm.lora.worker_manager import WorkerLoRAManager

        from deltawire.engines.vllm.adapter_worker import _VLLMLoading

        runner = self.model_runner  # type: ignore[attr-defined]
        if not on:
            for owner, name, original in self.replaced:
                setattr(owner, name, original)
            return {"calls": self.noted, "steps": self.begun}
        self.noted, self.begun = [], []
        self.replaced = [
            (owner, name, getattr(owner, name))
            for owner, name in (
                (WorkerLoRAManager, "_load_adapter"),
                (LoRAModelManager, "_add_adapter"),
                (LoRAModelManager, "activate_adapter"),
                (_VLLMLoading, "read"),
                (self, "deltawire_adapter"),
                (runner, "execute_model"),
            )
        ]
        for owner, name, original in self.replaced[:4]:
            setattr(owner, name, _timed(original, name, self.noted))
        called, compute = self.replaced[4][2], self.replaced[5][2]

        def call(operation: str, **arguments: Any) -> Any:
            return _timed(called, operation, self.noted)(operation, **arguments)

        def step(*args: Any, **kwargs: Any) -> Any:
            self.begun.append(time.monotonic())
            return compute(*args, **kwargs)

        self.deltawire_adapter, runner.execute_model = call, step
        return {}

    def adapter_slots(self) -> list[str]:
        """A checksum of each slot that holds an adapter: of everything that the model computes with for it."""
        import hashlib

        manager = self.model_runner.lora_manager._adapter_manager  # type: ignore[attr-defined]
        found = []
        for slot, id in enumerate(manager.lora_index_to_id):
            sums = hashlib.sha256()
            for _, module in sorted(manager.modules.items()) if id else ():
                # some layers have one tensor of each kind, others one for each of their parts
                both = (module.lora_a_stacked, module.lora_b_stacked)
                for stacked in (s for half in both for s in ([half] if torch.is_tensor(half) else half)):
                    sums.update(stacked[slot].cpu().contiguous().view(torch.uint8).numpy().tobytes())
            found += [sums.hexdigest()] if id else []
        return sorted(found)

    def let_vllm_read(self) -> None:
        """Have vLLM read all versions of adapters from now on."""
        for _, learned in self.deltawire_learned.values():  # type: ignore[attr-defined]
            learned.refused, learned.proven = "a test has asked for it", False

    def device_memory(self) -> dict[str, int]:
        """Bytes that are allocated on the device now, at most since the last call, and in use of the whole device."""
        if not torch.cuda.is_available():
            return {"now": 0, "peak": 0, "used": 0}
        free, total = torch.cuda.mem_get_info()
        found = {"now": torch.cuda.memory_allocated(), "peak": torch.cuda.max_memory_allocated(), "used": total - free}
        torch.cuda.reset_peak_memory_stats()
        return found

    def fingerprints(self) -> dict[str, str]:
        return fingerprints(self.model_runner.get_model())  # type: ignore[attr-defined]

    def read_patches(self, path: str) -> None:
        """Before the pause: a safetensors file of `<tensor>.indices`, `<tensor>.shape` and `<tensor>.new`; perhaps of
        `<tensor>.old`, to go back."""
        from safetensors.torch import load_file
        from vllm.model_executor.model_loader.checkpoint_weight_patch import CheckpointWeightPatch

        device = next(self.model_runner.get_model().parameters()).device  # type: ignore[attr-defined]
        content = {name: tensor.to(device) for name, tensor in load_file(path).items()}
        names = [key.removesuffix(".shape") for key in content if key.endswith(".shape")]
        self.patches = {
            way: [
                CheckpointWeightPatch(
                    name, tuple(content[f"{name}.shape"].tolist()), content[f"{name}.{way}"].dtype,
                    content[f"{name}.{way}"], content[f"{name}.indices"],
                )
                for name in names
            ]
            for way in ("new", "old")
            if f"{names[0]}.{way}" in content
        }  # fmt: skip

    def load_patches(self, way: str = "new") -> None:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.checkpoint_weight_patch import load_checkpoint_weight_patches

        with set_current_vllm_config(self.vllm_config):  # type: ignore[attr-defined]
            load_checkpoint_weight_patches(self.model_runner.get_model(), self.patches[way])  # type: ignore[attr-defined]
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def read_model_express(self, path: str, checkpoint: str, copy: str) -> str:
        """Before the pause: the same patches as a delta of ModelExpress, there and back, and the checkpoint of the host
        that it changes. Returns why it cannot."""
        import shutil

        import numpy as np
        from safetensors.torch import load_file

        try:
            from modelexpress_rl import utils
            from modelexpress_rl.inference.engines.vllm.installer import _VllmInstaller
        except ImportError as error:
            return f"not installed ({error.name})"
        shutil.copytree(checkpoint, copy)
        _, locations, _ = utils.index_checkpoint_tensors(Path(copy) / "model.safetensors")
        content, bits = load_file(path), np.fromfile(Path(copy) / "model.safetensors", np.uint8)
        coded: dict[str, Any] = {}
        sums: dict[str, dict[str, str]] = {"new": {}, "old": {}}
        for name, (_, start, size) in locations.items():
            old = bits[start : start + size]
            new = old.copy()
            where = content[f"{name}.indices"].numpy()
            new.view(np.int16)[where] = content[f"{name}.new"].view(torch.int16).numpy()
            delta, changed = utils.compute_delta(new, old)
            if changed:
                coded[name] = utils.compress_delta(delta)
                for way, data in (("new", new), ("old", old)):
                    checksum = utils.checksum_factory("adler32")
                    checksum.update(data)
                    sums[way][name] = checksum.hexdigest()
        self.express = _ModelExpress(locations, coded, sums, Path(copy))
        config = self.vllm_config  # type: ignore[attr-defined]
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        device = next(model.parameters()).device
        self.installer = _VllmInstaller(
            model=model, vllm_config=config, model_config=config.model_config, device=device
        )
        return ""

    def load_model_express(self) -> None:
        """What its back end does in the pause, once it has fetched a delta."""
        self.installer.install_checkpoint(self.express.apply())


def fingerprints(model: Any) -> dict[str, str]:
    """Two sums of each parameter's bits, multiplied by numbers that depend on their places, modulo 2^64: what takes
    vLLM's own SHA-256 a minute for 60 GB takes a device seconds. Of the parameters that vLLM's checksums are of."""
    from vllm.model_executor.model_loader.weight_checksum import _weights

    return {name: _fingerprint(weight.detach().contiguous().reshape(-1)) for name, weight in _weights(model)}


def _fingerprint(weights: torch.Tensor) -> str:
    units = weights.view(torch.uint8 if weights.dtype.itemsize % 2 else torch.int16)
    sums = torch.zeros(2, dtype=torch.int64, device=weights.device)
    for start in range(0, units.numel(), 1 << 24):
        part = units[start : start + (1 << 24)].to(torch.int64)
        at = torch.arange(start, start + part.numel(), device=weights.device)
        for lane, odd in enumerate((0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F)):
            mixed = (at + 1) * (odd - (1 << 64))
            mixed = (mixed ^ (mixed >> 29)) * (0xBF58476D1CE4E5B9 - (1 << 64))
            sums[lane] += ((mixed ^ (mixed >> 32)) * part).sum()
    first, second = ((value + (1 << 64)) % (1 << 64) for value in sums.tolist())
    return f"{tuple(weights.shape)} {weights.dtype} {first:016x}{second:016x}"


def _timed(work: Any, name: str, noted: list[tuple[str, float, float]]) -> Any:
    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = time.monotonic()
        try:
            return work(*args, **kwargs)
        finally:
            noted.append((name, begin, time.monotonic()))

    return timed


class _ModelExpress:
    """ModelExpress's checkpoint on the host, and a delta that leads there and back."""

    def __init__(self, locations: Any, coded: dict[str, Any], sums: dict[str, dict[str, str]], folder: Path) -> None:
        from safetensors.numpy import save

        self._locations, self._names, self._folder = locations, [*coded], folder
        self._shards = cycle([save(coded, metadata=sums["new"]), save(coded, metadata=sums["old"])])

    def apply(self) -> Path:
        from modelexpress_rl.inference import receiver

        receiver._LocalCheckpoint._apply_shards(
            SimpleNamespace(locations=self._locations), {"shard": (next(self._shards), self._names)},
            index_metadata={"checksum_format": "adler32", "compression_format": "zstd"},
        )  # fmt: skip
        return self._folder
