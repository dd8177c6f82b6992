"""Find what an SGLang server cannot follow a run with, and reasons not to patch its model."""

from __future__ import annotations

from typing import Any

from ...errors import Misconfigured
from ..live import ServerOptions, lacks_tokenizer

_NEEDED = {
    "dp_size": (1, "data-parallel ranks do not switch together yet"),
    "pp_size": (1, "pipeline stages do not switch together yet"),
    "nnodes": (1, "all ranks of a server must be on one node"),
    "tokenizer_worker_num": (1, "one HTTP server follows for all ranks"),
    "disaggregation_mode": ("null", "prefill and decode servers share keys and values, and would switch one by one"),
    "enable_pdmux": (False, "prefill and decode run at the same time, and no step is the last"),
    "weight_cache_mode": ("off", "its weights are shared with other servers"),
}
"""Settings of SGLang that a server needs that follows a run, and why."""


def check_server(server_args: Any, *args: Any, **kwargs: Any) -> None:
    """Raise Misconfigured for settings that cannot work, before a model is loaded."""
    chosen, config = server_args.resolved_dict(), ServerOptions.read()
    if config.adapters:
        _require_room(chosen, len(config.adapters), config.adapters_keep)
    for name, (needed, reason) in _NEEDED.items():
        if chosen.get(name, needed) != needed:
            flag = f"--{name.replace('_', '-')}"
            raise Misconfigured(f"this server can follow no run with {flag} {chosen[name]}: {reason}")
    source = chosen.get("tokenizer_path") or chosen.get("model_path", "")
    if not chosen.get("skip_tokenizer_init") and lacks_tokenizer(source):
        raise Misconfigured(
            f"{source} has no tokenizer, and SGLang would fail once the model is loaded: start it with "
            "--tokenizer-path NAME, or with --skip-tokenizer-init to answer only /generate, with token ids"
        )


def adapter_flags(adapters: int) -> dict[str, int]:
    """What SGLang needs at least for so many adapters: in one batch, together with the base model and with a version
    that takes the place of another."""
    return {"--max-loras-per-batch": adapters + 2}


def _require_room(chosen: dict[str, Any], adapters: int, keep: int) -> None:
    """Raise Misconfigured if requests would wait for each other's adapters, or SGLang would drop versions in use."""
    [(flag, least)] = adapter_flags(adapters).items()
    if not chosen.get("enable_lora"):
        raise Misconfigured(
            f"DELTAWIRE_ADAPTERS is set, but this server takes no adapters: add --enable-lora {flag} {least} "
            "--max-lora-rank RANK --lora-target-modules all"
        )
    if chosen["max_loras_per_batch"] < least:
        raise Misconfigured(f"{adapters} adapters need {flag} {least}; this server has {chosen['max_loras_per_batch']}")
    loaded, least = chosen.get("max_loaded_loras"), adapters * (1 + keep) + 1
    if loaded is not None and loaded < least:
        raise Misconfigured(
            f"{adapters} adapters with {keep} older versions each (DELTAWIRE_ADAPTERS_KEEP) need --max-loaded-loras "
            f"{least} or none; this server has {loaded}"
        )


def problems_of(model: Any, server_args: Any, model_config: Any) -> list[str]:
    """Reasons to refuse deltas that the placement map cannot show: weights that are not the ones computed with."""
    from ..live import common_problems

    problems, chosen = common_problems(model, model_config), server_args.resolved_dict()
    for name, reason in {
        "enable_lora": "the server was started with LoRA, which wraps the layers",
        "lora_paths": "the server was started with LoRA, which wraps the layers",
        "enable_eplb": "the server moves experts between ranks (EPLB)",
        "torchao_config": "the server quantizes its weights (torchao)",
        "cpu_offload_gb": "the server keeps some of its weights in host memory",
    }.items():
        if chosen.get(name):
            problems.append(reason)
    return problems
