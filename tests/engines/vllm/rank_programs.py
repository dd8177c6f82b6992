"""Programs of this folder that are ranks of a trainer, beside a server under test."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.engines.live.live_server import environment, python_path

HERE = Path(__file__).parent
RANKS, LIMIT = 2, 400


def settings(beside: Sequence[Path] = ()) -> dict[str, str]:
    """The environment of a rank. Its Python path begins with the folders `beside`."""
    return environment(
        PYTHONPATH=python_path(*beside, HERE, HERE.parents[2]), ONEDNN_MAX_CPU_ISA="AVX512_CORE_BF16",
        GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1", VLLM_NO_USAGE_STATS="1", DS_ACCELERATOR="cpu",
    )  # fmt: skip


def run_ranks(
    program: str, folder: Path, arguments: Sequence[str], beside: Sequence[Path] = (), python: Path | None = None
) -> None:
    """Run PROGRAM RANK RANKS FOLDER ARGUMENT… on all ranks. What they printed is in FOLDER/log-RANK."""
    (folder / "ranks").unlink(missing_ok=True)
    logs = [(folder / f"log-{rank}").open("w") for rank in range(RANKS)]
    command = [str(python or sys.executable), str(HERE / program)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(RANKS), str(folder), *arguments],
            env=settings(beside), stdout=log, stderr=subprocess.STDOUT,
        )
        for rank, log in enumerate(logs)
    ]  # fmt: skip
    try:
        assert [rank.wait(LIMIT) for rank in ranks] == [0] * RANKS, (folder / "log-0").read_text()[-6000:]
    finally:
        for rank, log in zip(ranks, logs, strict=True):
            rank.kill()
            log.close()
