"""Adapters against a real SGLang: `make test-sglang`. Not collected by the everyday run, whose environment has none.

SGLang's layers for adapters pin memory, which needs an accelerator: on a CPU the test plugin leaves that out, and the
adapters are computed by its back end in plain PyTorch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
from sglang_live import Server

from deltawire.engines.live.launch import write_version
from deltawire.engines.names import EXACT_VERSION_HEADER, MIN_VERSION_HEADER, VERSION_HEADER
from tests.engines.live.adapter_trainer import AdapterTrainer, adapter, switch_all_ranks_or_none
from tests.engines.live.live_server import ON_GPU, Streams, Trainer, make_model

PROMPTS = ([*range(4, 104)], [5, 9, 11])


def start(model: Path, log: Path, adapters: Mapping[str, Path], *flags: str, **options: Any) -> Server:
    """A server that takes adapters, and follows these runs by their names."""
    room = ["--enable-lora", "--max-loras-per-batch", "6", "--max-lora-rank", "16", "--lora-target-modules", "all"]
    device = [] if ON_GPU else ["--lora-backend", "torch_native"]
    named = ", ".join(f"{name}={run}" for name, run in adapters.items())
    more = {"DELTAWIRE_ADAPTERS": named or None, "SGLANG_TEST_UNPINNED": None if ON_GPU else "1"}
    return Server(model, log, flags=[*room, *device, *flags], **{**more, **options})


def greedy(server: Server, model: str) -> list[list[int]]:
    return [server.complete(p, model=model).json()["choices"][0]["token_ids"] for p in PROMPTS]


def test_two_adapters_follow_beside_base_traffic(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen3")
    trainers = {name: AdapterTrainer(tmp_path / name, model, seed) for seed, name in enumerate(("policy", "judge"))}
    for trainer in trainers.values():
        trainer.publish()
    server = start(model, tmp_path / "log", {name: trainer.run for name, trainer in trainers.items()})
    said: dict[str, list[list[int]]] = {}
    try:
        server.wait()
        of_base = greedy(server, "m")
        with Streams(server) as streams:
            for _ in range(3):
                for name, trainer in trainers.items():
                    adapter(server, name, version=trainer.publish(), state="healthy")
        assert not streams.failures
        assert streams.completions
        for name in trainers:
            status = adapter(server, name, loaded=[2, 3])
            assert (status["failures"], server.status()["state"]) == (0, "healthy")
            said |= {f"{name}@3": greedy(server, name), f"{name}@2": greedy(server, f"{name}@2")}
            assert greedy(server, f"m:{name}@3") == greedy(server, f"{name}@3") == said[f"{name}@3"]
            gone = server.http.post("/v1/completions", json={"model": f"{name}@1", "prompt": "t5"})
            assert (gone.status_code, "is not loaded any more" in gone.text) == (404, True)
        assert greedy(server, "m") == of_base
        assert len({str(tokens) for tokens in (of_base, *said.values())}) == 5
        models = [each["id"] for each in server.http.get("/v1/models").json()["data"]]
        assert sorted(models) == ["judge", "judge@2", "judge@3", "m", "policy", "policy@2", "policy@3"]
        assert 'deltawire_adapter_version{adapter="judge"} 3.0' in server.http.get("/metrics").text
        an_answer_is_made_by_one_version(server, trainers["policy"], said["policy@3"][1])
        bounds_are_about_the_adapter(server)
        nothing_changes_or_answers_beside_the_runs(server)
        assert greedy(server, "m") == of_base
    finally:
        server.stop()
    # every version answers as a server that was started with it
    folders = {
        name: trainers[name.partition("@")[0]].checkout(int(name.partition("@")[2]), tmp_path / name) for name in said
    }
    fresh = start(model, tmp_path / "fresh.log", {}, "--lora-paths", *(f"{name}={at}" for name, at in folders.items()))
    try:
        fresh.wait()
        assert greedy(fresh, "m") == of_base
        for name, tokens in said.items():
            assert greedy(fresh, f"m:{name}") == tokens, name
    finally:
        fresh.stop()


def an_answer_is_made_by_one_version(server: Server, trainer: AdapterTrainer, expected: list[int]) -> None:
    body = {"prompt": PROMPTS[1], "max_tokens": 200, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    request = {"json": {**body, "model": "policy", "stream": True}, "timeout": 120}
    with httpx.stream("POST", f"{server.http.base_url}/v1/completions", **request) as response:
        lines = response.iter_lines()
        events = [json.loads(next(line for line in lines if line.startswith("data: {"))[6:])]
        for _ in range(2):
            adapter(server, "policy", version=trainer.publish(), state="healthy")
        events += [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert response.headers[VERSION_HEADER] == "3"
    tokens = [token for event in events for token in event["choices"][0].get("token_ids") or ()]
    [spans] = [found for event in events if (found := event["choices"][0].get("weight_versions"))]
    assert spans == [{"version": 3, "start": 0, "end": 200}]
    assert tokens[: len(expected)] == expected
    # SGLang's own route, whose streams begin before it is known who answers
    own = {"input_ids": PROMPTS[1], "lora_path": "policy", "sampling_params": {"max_new_tokens": 4}}
    for streams in (False, True):
        answer = server.http.post("/generate", json={**own, "stream": streams})
        assert (answer.status_code, answer.headers[VERSION_HEADER]) == (200, "5")


def bounds_are_about_the_adapter(server: Server) -> None:
    def ask(header: str, version: int, model: str = "policy") -> httpx.Response:
        body = {"model": model, "prompt": "t5", "max_tokens": 2}
        return server.http.post("/v1/completions", json=body, headers={header: str(version)})

    assert ask(EXACT_VERSION_HEADER, 5).headers[VERSION_HEADER] == "5"
    assert ask(EXACT_VERSION_HEADER, 4).status_code == 409
    assert ask(EXACT_VERSION_HEADER, 4, "policy@4").status_code == 200
    assert ask(EXACT_VERSION_HEADER, 4, "m:policy@4").status_code == 200
    # the base follows no run here
    assert ask(MIN_VERSION_HEADER, 0, "m").status_code == 409


def nothing_changes_or_answers_beside_the_runs(server: Server) -> None:
    for route in ("/update_weights_from_disk", "/unload_lora_adapter"):
        refused = server.http.post(route, json={"model_path": "/nowhere", "lora_name": "policy"})
        assert (refused.status_code, "this server follows adapters" in refused.text) == (409, True)
    for route, prompt in (("/v1/responses", "input"), ("/api/generate", "prompt")):
        refused = server.http.post(route, json={"model": "policy", prompt: "t5"})
        assert (refused.status_code, "is answered by the base model alone" in refused.text) == (400, True)
    answer = server.http.post(
        "/api/generate", json={"model": "m", "prompt": "t5", "stream": False, "options": {"num_predict": 2}}
    )
    assert answer.status_code == 200, answer.text


def test_all_ranks_switch_or_none(tmp_path: Path) -> None:
    switch_all_ranks_or_none(tmp_path, start, greedy, 1 if ON_GPU else 2, "with rank 32 is incompatible")


def test_adapters_beside_a_base_that_follows_a_run(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen3")
    trainer, adapters = Trainer(model, tmp_path / "run"), AdapterTrainer(tmp_path / "policy", model)
    trainer.publish(0)
    adapters.publish()
    server = start(model, tmp_path / "log", {"policy": adapters.run}, run=trainer.run)
    try:
        server.wait()
        status = adapter(server, "policy", state="healthy", version=0)
        assert (status["failures"], server.status()["guard"][:7]) == (0, "reload:")
        base, policy = greedy(server, "m"), greedy(server, "policy")
        assert server.complete([5]).headers[VERSION_HEADER] == "0"
        server.until(version=trainer.publish(0.2), failures=0)
        assert "are for another base model" in adapter(server, "policy", state="degraded", version=0)["reason"]
        assert greedy(server, "m") != base
        assert greedy(server, "policy") != policy
        answer = server.complete([5], model="policy")
        assert (answer.headers[VERSION_HEADER], server.complete([5]).headers[VERSION_HEADER]) == ("0", "1")
        sums = server.checksums()
    finally:
        server.stop()
    write_version(str(trainer.run), 1, tmp_path / "fresh")
    trainer.close()
    [fresh] = Server.fresh_checksums([tmp_path / "fresh"], 1)
    assert _plain_names(sums) == _plain_names(fresh)


def _plain_names(sums: dict[str, Any]) -> Any:
    """Without what LoRA adds to the names of layers."""
    return json.loads(json.dumps(sums).replace(".base_layer.", "."))
