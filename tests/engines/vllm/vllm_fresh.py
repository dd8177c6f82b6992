"""What vLLM holds after loading a checkpoint: `vllm_fresh.py TP FOLDER…` prints the checksums of each, as JSON lines.

The model is made and loaded by vLLM's own `get_model`, in a process per rank, without an engine around it: what
`/weight_checker` of a server that was just started from the folder would say, for many folders at the price of one.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__)


def fresh_checksums(
    folders: Sequence[Path], tp: int, flags: Sequence[str] = (), *, fingerprints: bool = False
) -> list[dict[str, str]]:
    """Per folder, each a version of the same model, the checksums of all ranks, named as /weight_checker names them.
    With `fingerprints`, those that the test plugin computes on the device."""
    from vllm_live import environment

    from deltawire_wordle.processes import free_port

    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, str(HERE), str(tp), *map(str, folders)],
            env={
                **environment(tp), "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(tp),
                "FLAGS": " ".join(flags), "FINGERPRINTS": str(int(fingerprints)),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "VLLM_DIST_IDENT": str(port),
            },
            stdout=subprocess.PIPE,
        )
        for rank in range(tp)
    ]  # fmt: skip
    merged: list[dict[str, str]] = [{} for _ in folders]
    for rank in ranks:
        out, _ = rank.communicate(timeout=900)
        assert rank.returncode == 0
        lines = [line for line in out.decode().splitlines() if line.startswith('{"dp0')]
        assert len(lines) == len(folders)
        for all_ranks, line in zip(merged, lines, strict=True):
            all_ranks |= json.loads(line)
    return merged


def main() -> None:
    tp, folders = int(sys.argv[1]), sys.argv[2:]
    rank = int(os.environ["RANK"])
    import torch
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
    else:
        # vLLM's CPU worker does without this too
        torch.accelerator.empty_cache = lambda: None
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model
    from vllm.model_executor.model_loader.weight_checksum import compute_tensor_digests
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    compute = compute_tensor_digests
    if os.environ["FINGERPRINTS"] == "1":
        from vllm_test_plugin import fingerprints as compute
    flags = ["--model", folders[0], "--dtype", "bfloat16", "--max-model-len", "512", "--enforce-eager",
             "--tensor-parallel-size", str(tp), *os.environ["FLAGS"].split()]  # fmt: skip
    parsed = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(flags)
    # made once for all versions of a model: it takes as long as to load one
    made = EngineArgs.from_cli_args(parsed).create_engine_config()
    with set_current_vllm_config(made):
        init_distributed_environment(tp, rank, "env://", rank, backend="nccl" if torch.cuda.is_available() else "gloo")
        initialize_model_parallel(tp)
    for folder in folders:
        # a copy: a model leaves its layers in it
        config = copy.deepcopy(made)
        config.model_config.model = folder
        with set_current_vllm_config(config):
            digests = compute(get_model(vllm_config=config))
        print(json.dumps({f"dp0:pp0:pcp0:tp{rank}:{name}": value for name, value in digests.items()}), flush=True)


if __name__ == "__main__":
    main()
