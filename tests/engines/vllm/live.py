"""Against a real vLLM: `make test-vllm`. Not collected by the everyday run, whose environment has none."""

from __future__ import annotations

import json
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from vllm_fresh import fresh_checksums
from vllm_live import NodeServer, Server, Streams, Trainer, make_model, ranks, serving

import deltawire as dw
from deltawire.engines.live.launch import write_version
from deltawire_wordle.processes import free_port
from tests.engines.live.live_server import START_S
from tests.engines.live.live_tests import LiveTests, greedy

VERSIONS = 20
RANKS = ranks()
CELLS = [
    *(("qwen3_moe", tp) for tp in (1, 2) if tp <= RANKS),
    # a rank holds some experts whole, and not a part of each
    *([("qwen3_moe-ep", 2)] if RANKS > 1 else []),
    *((kind, tp) for kind in ("llama", "qwen3-tied", "qwen3") for tp in (1, 2) if tp <= RANKS),
]


class TestVllm(LiveTests):
    server = Server
    cells = dict.fromkeys(CELLS, VERSIONS)
    users = MappingProxyType({"VLLM_SERVER_DEV_MODE": "0"})
    hidden = ("/weight_info",)


def test_a_server_without_the_plugin_does_not_start(tmp_path: Path) -> None:
    """Without its name in VLLM_PLUGINS, vLLM would serve the weights it started with for ever, and look healthy."""
    model = make_model(tmp_path / "model", "llama")
    server = Server(model, tmp_path / "log", run=tmp_path / "run", VLLM_PLUGINS=None)
    try:
        said = server.ended()
    finally:
        server.kill()
    assert "DELTAWIRE_RUN is set, but nothing here follows it: start the server with VLLM_PLUGINS=deltawire" in said
    assert "Misconfigured: the weight-transfer back end is deltawire" in said


def test_a_run_without_a_tokenizer_is_served_by_token_ids(tmp_path: Path) -> None:
    trainer = Trainer(make_model(tmp_path / "model", "qwen3", tokenizer=False), tmp_path / "run")
    trainer.publish(0)
    with serving(None, tmp_path / "log", run=trainer.run) as server:
        # as TRL asks
        [choice] = server.complete([5, 9, 11], logprobs=0).json()["choices"]
        assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"]) == 24
        assert choice["weight_versions"] == [{"version": 0, "start": 0, "end": 24}]
        refused = server.http.post("/v1/completions", json={"model": server.name, "prompt": "t5 t9"})
        assert (refused.status_code, "Tokenizer not available" in refused.text) == (400, True)
        assert "has no tokenizer, so the server is started without one" in server.log.read_text()
    trainer.close()


# ── stages ───────────────────────────────────────────────────────────────────────────────────────────────────────────

PIPELINE: dict[str, Any] = {
    # on a CPU, vLLM 0.32 makes what travels between stages only when it warms up, and so never in eager mode
    "flags": [
        "--pipeline-parallel-size", "2", "--no-enforce-eager",
        "--compilation-config", '{"mode": "DYNAMO_TRACE_ONCE", "backend": "eager"}',
    ],
    "VLLM_CPU_OMP_THREADS_BIND": "0|1",
}  # fmt: skip


@pytest.mark.skipif(RANKS < 2, reason="needs two GPUs")
def test_two_stages_with_a_tied_embedding_at_both_ends(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen3-tied")
    trainer = Trainer(model, tmp_path / "run")
    trainer.publish(0)
    with serving(model, tmp_path / "log", run=trainer.run, **PIPELINE) as server:
        assert server.status()["guard"] == "patch"
        with Streams(server) as streams:
            for _ in range(5):
                version = trainer.publish()
                server.until(version=version, state="healthy")
        assert streams.failures == []
        sums, tokens = server.checksums(), greedy(server)
    assert any(":pp1:" in name for name in sums)
    write_version(str(trainer.run), version, tmp_path / "fresh")
    trainer.close()
    with serving(tmp_path / "fresh", tmp_path / "fresh.log", **PIPELINE) as fresh:
        assert fresh.checksums() == sums
        assert greedy(fresh) == tokens


# ── two nodes ────────────────────────────────────────────────────────────────────────────────────────────────────────


TENSOR = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--distributed-executor-backend", "mp"]
DATA = ["--data-parallel-size", "2", "--enable-expert-parallel"]


@pytest.mark.skipif(RANKS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("kind, tp", [("qwen3", 2), ("qwen3_moe", 1)])
def test_ranks_on_two_nodes_follow_as_one(tmp_path: Path, kind: str, tp: int) -> None:
    """A rank on each of two nodes that share no memory and no temporary files: each fetches from the bucket, and what
    fails on the second leaves both at the old version. TP=2, or two engines that share experts."""
    faults, away = tmp_path / "faults", tmp_path / "away"
    faults.mkdir()
    model = make_model(tmp_path / "model", kind)
    trainer = Trainer(model, tmp_path / "run")
    trainer.publish(0)
    away.symlink_to(trainer.run)
    port = str(free_port())
    if tp == 2:
        first = [*TENSOR, "--master-port", port]
        second = [*first, "--headless", "--node-rank", "1"]
    else:
        local = ["--data-parallel-size-local", "1", "--data-parallel-address", "127.0.0.1"]
        first = [*DATA, *local, "--data-parallel-rpc-port", port]
        second = [*first, "--headless", "--data-parallel-start-rank", "1"]
    more = {"tp": tp, "LIVE_TEST_FAULTS": str(faults)}
    other = NodeServer(model, tmp_path / "log2", 1, flags=second, run=away, **more)
    server = NodeServer(model, tmp_path / "log", 0, flags=first, run=trainer.run, **more)
    noted = {}
    try:
        server.wait()
        assert server.status()["guard"] == "patch"
        with Streams(server) as streams:
            for _ in range(5):
                version = trainer.publish()
                server.until(version=version, state="healthy")
                noted[version] = server.checksums()
            # the second node cannot reach the bucket
            away.unlink()
            newest = trainer.publish()
            status = server.until(state="degraded")
            assert "the node of rank 1: RunNotFound" in status["reason"]
            assert (status["version"], server.checksums()) == (version, noted[version])
            away.symlink_to(trainer.run)
            server.until(version=newest, state="healthy")
            noted[newest] = server.checksums()
            # its rank fails in the middle of the write
            (faults / "fail-1").touch()
            failures = server.status()["failures"]
            newest = trainer.publish()
            server.until(failures=failures + 1)
            server.until(version=newest, state="healthy")
            noted[newest] = server.checksums()
        assert streams.failures == []
        assert {span["version"] for c in streams.completions for span in c["spans"]} <= {*range(newest + 1)}
        tokens = greedy(server)
    finally:
        server.stop()
        other.stop()
    trainer.close()
    assert "rank 1: located" in (tmp_path / "log2").read_text()
    assert f"was taken back on all ranks: {'rank 1' if tp == 2 else 'engine 1'}" in (tmp_path / "log").read_text()
    write_version(str(trainer.run), newest, tmp_path / "fresh")
    flags = [] if tp == 2 else DATA
    with serving(
        tmp_path / "fresh", tmp_path / "fresh.log", tp=tp, flags=flags, VLLM_CPU_OMP_THREADS_BIND="0|1"
    ) as fresh:
        assert fresh.checksums() == noted[newest]
        assert greedy(fresh) == tokens
    assert len({json.dumps(sums) for sums in noted.values()}) == 7


# ── several engines ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.skipif(RANKS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("kind", ("qwen3", "qwen3_moe"))
def test_data_parallel_ranks_follow_as_one(tmp_path: Path, kind: str) -> None:
    """Two engines, and as many API servers, of which one follows: all engines switch or none. Engines hold the same
    dense model, or each of them half of the experts, in which case they take every step together."""
    flags = ["--data-parallel-size", "2", *(["--enable-expert-parallel"] if kind == "qwen3_moe" else [])]
    faults = tmp_path / "faults"
    faults.mkdir()
    model = make_model(tmp_path / "model", kind)
    trainer = Trainer(model, tmp_path / "run")
    trainer.publish(0)
    more = {"LIVE_TEST_FAULTS": str(faults), "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    with serving(model, tmp_path / "log", run=trainer.run, flags=flags, **more) as server:
        assert server.status()["guard"] == "patch"
        with Streams(server, count=4) as streams:
            for _ in range(VERSIONS):
                version = trainer.publish()
                server.until(version=version, state="healthy")
            assert server.status()["failures"] == 0
            # the first rank of an engine, and of both where they do not share a group
            (faults / "fail-0").touch()
            newest = trainer.publish()
            server.until(failures=1)
            server.until(version=newest, state="healthy")
        assert streams.failures == []
        assert {span["version"] for c in streams.completions for span in c["spans"]} <= {*range(newest + 1)}
        sums, tokens = server.checksums(), greedy(server)
    said = (tmp_path / "log").read_text()
    assert "was taken back on all ranks: engine" in said
    assert all(f"rank {rank}: located" in said for rank in range(2))
    write_version(str(trainer.run), newest, tmp_path / "fresh")
    trainer.close()
    with serving(tmp_path / "fresh", tmp_path / "fresh.log", flags=flags, **more) as fresh:
        assert fresh.checksums() == sums
        assert greedy(fresh) == tokens


def test_all_api_servers_end_with_a_run_of_another_model(tmp_path: Path) -> None:
    """One of two finds that the run cannot be followed; the other must not go on with the weights they started with."""
    other = Trainer(make_model(tmp_path / "other", "llama", hidden_size=64), tmp_path / "run")
    other.publish(0)
    other.close()
    model = make_model(tmp_path / "model", "llama")
    server = Server(model, tmp_path / "log", run=other.run, flags=["--api-server-count", "2"])
    try:
        server.process.wait(START_S)
    finally:
        server.kill()
    assert "this server cannot follow" in (tmp_path / "log").read_text()


# ── live models with experts, and layouts that cannot be patched ──────────────────────────────────────────────────────


@pytest.mark.parametrize("kind, guard", [("mixtral", "patch"), ("deepseek_v3", "reload: ")])
def test_a_live_model_with_experts_is_followed(tmp_path: Path, kind: str, guard: str) -> None:
    """transformers keeps experts in one tensor, a checkpoint has them one by one, and vLLM's kernel may pack them.
    Latent attention computes with matrices that it made from weights: its own loader makes them anew."""
    import torch
    from transformers import AutoModelForCausalLM

    folder, run, noted = make_model(tmp_path / "model", kind), tmp_path / "run", {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert any(parameter.ndim == 3 for parameter in model.parameters())
    with dw.Publisher(run) as publisher:
        publisher.publish(model).result(600)
        with serving(folder, tmp_path / "log", run=run) as server:
            status = server.status()
            assert (status["version"], status["guard"][: len(guard)]) == (0, guard)
            assert guard == "patch" or "computes with W_U" in status["guard"]
            noted[0] = server.checksums()
            for _ in range(2):
                for parameter in model.parameters():
                    # a step up or down for one weight in fifty
                    bits = parameter.data.view(torch.int16)
                    bits.add_((torch.rand(bits.shape) < 0.02).to(torch.int16))
                version = publisher.publish(model).result(600).version
                server.until(version=version, state="healthy")
                noted[version] = server.checksums()
            assert server.status()["failures"] == 0
    for version in noted:
        write_version(str(run), version, tmp_path / f"v{version}")
    assert [*noted.values()] == fresh_checksums([tmp_path / f"v{version}" for version in noted], 1)
    assert len({json.dumps(sums) for sums in noted.values()}) == 3
