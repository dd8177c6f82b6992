"""How an SGLang server that follows a run is started (live/launch.py)."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from ...errors import MissingExtra
from ..live import ServerOptions, launch
from .guard import adapter_flags

ON_A_CPU = (
    ("--device", "cpu"),
    ("--attention-backend", "torch_native"),
    ("--sleep-on-idle",),
)
"""Where there is no accelerator: plain PyTorch, and no core for a scheduler that waits for requests."""

RANK = 16
"""Of adapters at most, unless a flag says otherwise: SGLang has no default, vLLM has this one."""


def find() -> list[str]:
    """SGLang's server in this Python."""
    spec = find_spec("sglang")
    # a mere folder of that name on the path is a package without an origin
    if spec is None or spec.origin is None:
        raise MissingExtra("SGLang is not installed here; serve without --engine sglang, or install it", "sglang")
    return [sys.executable, "-m", "sglang.launch_server"]


def prepare(
    options: ServerOptions,
    model: str | Path,
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    accelerated: bool | None = None,
) -> tuple[list[str], dict[str, str]]:
    """The command line and environment of an SGLang server that follows a run. Without an accelerator it is started on
    the CPU; flags in `options.extra` come last, and replace those that are chosen here."""
    if accelerated is None:
        import torch

        accelerated = torch.accelerator.is_available()
    variables = options.variables()
    if plugins := [name for name in environment.get("SGLANG_PLUGINS", "").split(",") if name]:
        # a list of plugins allows no others
        variables["SGLANG_PLUGINS"] = ",".join(dict.fromkeys([*plugins, "deltawire"]))
    variables["SGLANG_RETURN_ORIGINAL_LOGPROB"] = str(options.logprobs_mode == "raw_logprobs").lower()
    chosen = []
    if not accelerated:
        variables["SGLANG_USE_CPU_ENGINE"] = "1"
        given = {flag.partition("=")[0] for flag in options.extra}
        chosen = [part for flag in ON_A_CPU if flag[0] not in given for part in flag]
    without = launch.tokenizer_flags(
        options, model, ["--skip-tokenizer-init"], otherwise="--tokenizer-path",
        requests='only /generate answers, with "output_ids" to "input_ids"',
    )  # fmt: skip
    length = ["--context-length", str(options.max_model_len)] if options.max_model_len else []
    return (
        [
            *command, "--model-path", str(model), *launch.listen_flags(options), *_room(options), *length,
            *chosen, *without, *options.extra,
        ],
        {**environment, **variables},
    )  # fmt: skip


def _room(options: ServerOptions) -> list[str]:
    """Flags for the adapters that a server is to follow."""
    if not options.adapters:
        return []
    sizes = adapter_flags(len(options.adapters)) | {"--max-lora-rank": RANK}
    pairs = [part for flag, least in sizes.items() for part in (flag, str(least))]
    return ["--enable-lora", *pairs, "--lora-target-modules", "all"]
