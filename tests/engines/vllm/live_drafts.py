"""Draft models that follow with their model, against a real vLLM with speculative decoding: `make test-vllm`.

MiMo has one dense layer for the token after the next one. GLM-4.5 has one with experts, and its checkpoint has the
embedding and the head once more for that layer, which no server computes with: here they move apart from the model's.
An EAGLE head has a checkpoint of its own, in a folder within that of its model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm_live import Server, Streams, Trainer, make_model, serving

from deltawire.bucket.run import Run
from deltawire.doctor import examine_server as examine
from deltawire.engines.live.launch import write_version
from tests.engines.live.live_tests import greedy

HIDDEN = 128
VERSIONS = 3


def speculative(model: Path, kind: str) -> list[str]:
    method = {"method": "eagle", "model": str(model / "draft")} if kind == "eagle" else {"method": "mtp"}
    return ["--speculative-config", json.dumps({**method, "num_speculative_tokens": 1})]


def make_drafting(folder: Path, kind: str) -> Path:
    """A tiny random model, and in its checkpoint a layer that predicts the token after the next one."""
    import torch
    from safetensors.torch import load_file, save_file

    def read(name: str) -> Any:
        return json.loads((folder / name).read_text())

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape).mul(0.08).to(torch.bfloat16)

    if kind == "eagle":
        make_model(folder, "llama")
        head = {
            name.removeprefix("model."): t
            for name, t in load_file(folder / "model.safetensors").items()
            if name.startswith("model.layers.0.") and "input_layernorm" not in name
        }
        (folder / "draft").mkdir()
        save_file({**head, "fc.weight": random(HIDDEN, 2 * HIDDEN)}, folder / "draft" / "model.safetensors")
        (folder / "draft" / "config.json").write_text(json.dumps(read("config.json") | {"num_hidden_layers": 1}))
        return folder
    if kind == "mimo":
        make_model(folder, "qwen2")
        weights = load_file(folder / "model.safetensors")
        layer, last = "model.mtp_layers.0.", "model.layers.1."
        norms, project, changed = ("token_layernorm", "hidden_layernorm", "final_layernorm"), "input_proj", {}
        changed["architectures"] = ["MiMoForCausalLM"]
        weights |= {layer + name.removeprefix(last): t.clone() for name, t in weights.items() if name.startswith(last)}
    else:
        make_model(
            folder, "glm4_moe", num_hidden_layers=3, moe_intermediate_size=64, n_routed_experts=4, n_shared_experts=1,
            num_experts_per_tok=2, first_k_dense_replace=1, n_group=1, topk_group=1, use_qk_norm=True,
        )  # fmt: skip
        weights = load_file(folder / "model.safetensors")
        # as vLLM holds a router: it is reloaded where a run has it in bf16
        routers = ("mlp.gate.weight", "e_score_correction_bias")
        weights |= {name: t.float() for name, t in weights.items() if name.endswith(routers)}
        layer, norms, project, changed = "model.layers.2.", ("enorm", "hnorm", "shared_head.norm"), "eh_proj", {}
        # the last of three is taken for the one that predicts
        changed["num_hidden_layers"] = 2
        weights[layer + "embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
        weights[layer + "shared_head.head.weight"] = weights["lm_head.weight"].clone()
    weights |= {f"{layer}{name}.weight": torch.ones(HIDDEN, dtype=torch.bfloat16) for name in norms}
    weights[f"{layer}{project}.weight"] = random(HIDDEN, 2 * HIDDEN)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(read("config.json") | changed | {"num_nextn_predict_layers": 1}))
    return folder


def training(model: Path, run: Path) -> Trainer:
    trainer = Trainer(model, run)
    # the router, as floats and not as bits
    trainer.weights = {n: b.view(np.float32) if b.dtype == np.uint32 else b for n, b in trainer.weights.items()}
    return trainer


def checksums(server: Server) -> list[Any]:
    """Of the model and of the draft."""
    answer = server.http.post("/collective_rpc", json={"method": "test_draft_digests"}).raise_for_status().json()
    return [server.checksums(), answer["results"]]


def drafted(server: Server) -> float:
    """Number of tokens that were proposed."""
    lines = server.http.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:spec_decode_num_draft_tokens_total"))


@pytest.mark.parametrize("kind", ("mimo", "eagle", "glm4_moe"))
def test_a_draft_in_the_run_follows_with_its_model(tmp_path: Path, kind: str) -> None:
    faults, noted = tmp_path / "faults", {}
    faults.mkdir()
    model = make_drafting(tmp_path / "model", kind)
    trainer = training(model, tmp_path / "run")
    trainer.publish(0)
    flags, more = speculative(model, kind), {"LIVE_TEST_FAULTS": str(faults)}
    with serving(model, tmp_path / "log", run=trainer.run, flags=flags, **more) as server:
        status = server.status()
        assert (status["version"], status["guard"], status["draft"]) == (0, "patch", "follows")
        with Streams(server) as streams:
            for _ in range(VERSIONS):
                version = trainer.publish()
                server.until(version=version, state="healthy")
                noted[version] = checksums(server)
            # a rank fails in the middle of its write: both models are put back, and proven to be
            (faults / "fail-0").touch()
            version = trainer.publish()
            server.until(failures=1)
            server.until(version=version, state="healthy")
            noted[version] = checksums(server)
        assert streams.failures == []
        live = server.http.get("/deltawire/digest").raise_for_status().json()
        assert live == {"version": version, "digest": Run.open(str(trainer.run)).manifest(version).digest}
        tokens = greedy(server)
        assert drafted(server) > 0
        verdicts = {finding.check: finding.verdict for finding in examine(str(server.http.base_url)).findings}
        assert verdicts["draft"] == "ok"
    assert "was taken back on all ranks" in (tmp_path / "log").read_text()
    trainer.close()
    assert len({json.dumps(sums[1]) for sums in noted.values()}) == len(noted)
    write_version(str(trainer.run), version, tmp_path / "fresh")
    flags = speculative(tmp_path / "fresh", kind)
    with serving(tmp_path / "fresh", tmp_path / "fresh.log", flags=flags) as fresh:
        assert checksums(fresh) == noted[version]
        assert greedy(fresh) == tokens


@pytest.mark.parametrize("kind", ("mimo", "eagle", "glm4_moe"))
def test_a_draft_in_the_run_is_reloaded_with_its_model(tmp_path: Path, kind: str) -> None:
    model = make_drafting(tmp_path / "model", kind)
    trainer = training(model, tmp_path / "run")
    trainer.publish(0)
    refused = {"VLLM_TEST_REFUSE": "a test asked for it"}
    with serving(model, tmp_path / "log", run=trainer.run, flags=speculative(model, kind), **refused) as server:
        status = server.status()
        assert (status["guard"], status["draft"]) == ("reload: a test asked for it", "follows")
        for _ in range(2):
            version = trainer.publish()
            server.until(version=version, state="healthy")
        sums, tokens = checksums(server), greedy(server)
    trainer.close()
    write_version(str(trainer.run), version, tmp_path / "fresh")
    flags = speculative(tmp_path / "fresh", kind)
    with serving(tmp_path / "fresh", tmp_path / "fresh.log", flags=flags) as fresh:
        assert checksums(fresh) == sums
        assert greedy(fresh) == tokens


def test_a_draft_that_is_not_in_the_run_stays(tmp_path: Path) -> None:
    model = make_drafting(tmp_path / "model", "mimo")
    trainer = Trainer(model, tmp_path / "run")
    trainer.weights = {name: bits for name, bits in trainer.weights.items() if "mtp_layers" not in name}
    trainer.publish(0)
    with serving(model, tmp_path / "log", run=trainer.run, flags=speculative(model, "mimo")) as server:
        before = checksums(server)
        version = trainer.publish()
        status = server.until(version=version, state="degraded")
        assert (status["guard"], status["draft"]) == ("patch", "at version 0: the run carries no weights for it")
        assert status["reason"] == f"draft model is {status['draft']}"
        after = checksums(server)
        own = [name for name in before[1][0] if "mtp_layers" in name]
        assert own
        assert all(before[1][0][name] == after[1][0][name] for name in own)
        assert before[0] != after[0]
        verdicts = {finding.check: finding.verdict for finding in examine(str(server.http.base_url)).findings}
        assert verdicts["draft"] == "warning"
    trainer.close()
