"""How a vLLM server that follows a run is started (live/launch.py)."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ...errors import MissingExtra
from ..live import ServerOptions, launch

BACKEND = '{"backend": "deltawire"}'
CPU_KV = "VLLM_CPU_KVCACHE_SPACE"
"""GiB for keys and values, which only vLLM's CPU backend reads."""
MEMORY_FLAGS = {"--gpu-memory-utilization", "--kv-cache-memory-bytes"}

WITHOUT_TOKENIZER = ("--skip-tokenizer-init", "--return-tokens-as-token-ids")
"""vLLM names the tokens of log-probabilities by their text, unless it is told otherwise."""


def find() -> list[str]:
    """The `vllm` program beside this Python, or on the path."""
    beside = Path(sys.executable).with_name("vllm")
    found = str(beside) if beside.is_file() else shutil.which("vllm")
    if not found:
        raise MissingExtra("vLLM is not installed here; serve without --engine vllm, or install it", "vllm")
    return [found, "serve"]


def prepare(
    options: ServerOptions, model: str | Path, command: Sequence[str], environment: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """The command line and environment of a vLLM server that follows a run, adapters, or both."""
    plugins = [name for name in environment.get("VLLM_PLUGINS", "").split(",") if name and name != "deltawire"]
    length = ["--max-model-len", str(options.max_model_len)] if options.max_model_len else []
    logprobs = ["--logprobs-mode", options.logprobs_mode]
    backend = ["--weight-transfer-config", BACKEND] if options.run else []
    without = launch.tokenizer_flags(
        options, model, WITHOUT_TOKENIZER, otherwise="--tokenizer",
        requests='/v1/completions takes token ids, gives them to a request with "return_token_ids": true, and refuses '
        "text",
    )  # fmt: skip
    variables = {**environment, "VLLM_PLUGINS": ",".join([*plugins, "deltawire"]), **options.variables()}
    flags = {part.partition("=")[0].replace("_", "-") for part in options.extra}
    if not variables.get(CPU_KV) and not MEMORY_FLAGS & flags:
        variables[CPU_KV] = str(kv_gib())
    return (
        [
            *command, str(model), *launch.listen_flags(options), *backend, *length, *logprobs, *_room(options),
            *without, *options.extra,
        ],
        variables,
    )  # fmt: skip


def kv_gib(root: Path = Path("/")) -> int:
    """GiB for the keys and values of a rank on a CPU: half of the memory of its node that is available. vLLM itself
    takes 92 % of all memory there, and does not start where other programs use more than the rest."""
    bytes_free = []
    with suppress(OSError):
        found = re.search(r"^MemAvailable:\s+(\d+) kB$", (root / "proc/meminfo").read_text(), re.MULTILINE)
        nodes = len([*(root / "sys/devices/system/node").glob("node[0-9]*")])
        bytes_free += [int(found[1]) * 1024 // max(1, nodes)] if found else []
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):
        # `max` where a container has no limit
        with suppress(OSError, ValueError):
            bytes_free.append(int((root / "sys/fs/cgroup" / limit).read_text()))
    return max(1, min(bytes_free, default=0) >> 31)


def _room(options: ServerOptions) -> list[str]:
    """Flags for the adapters that a server is to follow."""
    if not options.adapters:
        return []
    from .adapters import flags

    sizes = flags(len(options.adapters), options.adapters_keep)
    # all versions that are kept fit into a batch: requests do not wait for those that use an older one
    return ["--enable-lora", *(part for flag in sizes for part in (flag, str(max(sizes.values()))))]
