"""Find reasons not to patch a model that vLLM runs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ...errors import Misconfigured
from ..live import common_problems

log = logging.getLogger("deltawire")


def problems_of(model: nn.Module, config: Any) -> list[str]:
    """Reasons to refuse deltas that the placement map cannot show: weights that are not the ones computed with."""
    problems = common_problems(model, config.model_config)
    if getattr(config, "lora_config", None) and config.model_config.is_moe:
        problems.append("the server was started with LoRA, which wraps the experts")
    if getattr(config.parallel_config, "enable_eplb", False):
        problems.append("the server moves experts between ranks (EPLB)")
    for name, module in model.named_modules():
        # a closure has data: a packed weight, or the handle of one
        if getattr(getattr(module, "cpu_linear", None), "__closure__", None):
            problems.append(f"{name!r} computes with a repacked copy of its weight; start with VLLM_PLUGINS=deltawire")
            break
    return problems


def require_host(address: str) -> str:
    """The address at which other nodes reach this one. vLLM has none to tell where there is no default route."""
    if address in ("", "0.0.0.0", "::"):
        raise Misconfigured(f"vLLM says that this node has the address {address!r}: set VLLM_HOST_IP on every node")
    return address


def hold_experts(runner: Any) -> None:
    """Keep EPLB from moving experts until a reload was tried: that compares memory before and after."""
    if getattr(runner, "eplb_state", None) is not None:
        runner.eep_eplb_suppressed = True
        log.info("EPLB moves no experts until a version is loaded: the first reload is compared with what was there")


def have_experts_moved(runner: Any) -> bool:
    """Whether EPLB has moved experts from where vLLM's loader puts them."""
    state = getattr(runner, "eplb_state", None)
    if state is None:
        return False
    moved = state.model_states[runner.model_config.compute_hash()]
    return not torch.equal(moved.physical_to_logical_map_buffer, _first_places(state, moved))


@contextmanager
def experts_in_first_places(runner: Any) -> Iterator[None]:
    """Around a reload: vLLM's loader puts experts where they were at the start, but routes requests to where EPLB has
    moved them since. Afterwards they are routed to where experts are, and EPLB begins anew."""
    state = getattr(runner, "eplb_state", None)
    if state is None:
        yield
        return
    # experts on their way to another rank are of the old weights
    state.drain_async()
    yield
    moved = state.model_states[runner.model_config.compute_hash()]
    state.update_mapping(runner.model_config, _first_places(state, moved))
    moved.expert_load_window.zero_()
    runner.eep_eplb_suppressed = False


def _first_places(state: Any, moved: Any) -> torch.Tensor:
    first = torch.full_like(moved.physical_to_logical_map_buffer, -1)
    placed = state.build_initial_global_physical_to_logical_map(
        moved.model.num_routed_experts, moved.model.num_redundant_experts
    )
    first[:, : len(placed)] = torch.tensor(placed, dtype=first.dtype)
    return first


def pack_again(model: nn.Module) -> None:
    """Have experts packed for their kernel by the next reload."""
    for module in model.modules():
        forget_kernel(getattr(module, "quant_method", None))


def forget_kernel(method: Any) -> None:
    """On a CPU, vLLM 0.32 packs experts only when it makes their kernel: without this, processing weights once more
    would put plain ones in the place of packed ones."""
    if type(method).__name__ == "UnquantizedFusedMoEMethod" and method.unquantized_backend.name == "CPU":
        method.moe_kernel = None
