"""A real vLLM follows one run to which trainers of all kinds publish, one after the other: `make test-vllm`."""

from __future__ import annotations

import json
from pathlib import Path

from rank_programs import RANKS, run_ranks
from vllm_live import Server, make_model

from tests import environments

KINDS = ("ddp", "fsdp2", "fsdp1", "generator", "shards")
ZERO = ("zero0", "zero1", "zero2", "zero3")


def test_a_server_has_the_bits_of_every_kind_of_trainer(tmp_path: Path) -> None:
    make_model(tmp_path / "model", "qwen3")
    deepspeed = environments.deepspeed()
    server = Server(None, tmp_path / "log", run=tmp_path / "served")
    address = str(server.http.base_url).rstrip("/")
    seen = set()
    try:
        for python, kinds in ((None, KINDS), (deepspeed, ZERO)):
            run_ranks("kinds_rank.py", tmp_path, [address, *kinds], python=python)
            for kind in kinds:
                for rank in range(RANKS):
                    for trained, served in json.loads((tmp_path / f"{kind}-{rank}.json").read_text()):
                        assert trained == served, kind
                        seen.add((kind, served))
        assert len(seen) == 2 * len(KINDS + ZERO)
        status = server.until(version=2 * len(KINDS + ZERO) - 1, state="healthy")
        assert status["guard"] == "patch"
    finally:
        server.stop()
