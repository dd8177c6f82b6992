"""Adapters against a real vLLM: `make test-vllm`. Not collected by the everyday run, whose environment has none.

Two adapters are followed while clients stream from the base model. What every version answers is compared with a
server that was started with checkouts of these versions as its `--lora-modules`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from vllm_adapters import AdapterServer, AdapterTrainer, adapter, start
from vllm_fresh import fresh_checksums
from vllm_live import ON_GPU, Server, Streams, Trainer, make_model, ranks, serving

from deltawire.engines.live.launch import write_version
from deltawire.engines.names import EXACT_VERSION_HEADER, MIN_VERSION_HEADER, VERSION_HEADER
from tests.engines.live import live_server
from tests.engines.live.adapter_trainer import switch_all_ranks_or_none

# longer than a block of the prefix cache, and shorter. From 128 tokens on vLLM's kernels for GPUs add up in any order
PROMPTS = ([*range(4, 104 if ON_GPU else 304)], [5, 9, 11])


def greedy(server: Server, model: str) -> list[list[int]]:
    return [server.complete(p, model=model).json()["choices"][0]["token_ids"] for p in PROMPTS]


class Scene:
    def __init__(self, folder: Path) -> None:
        self.folder, self.model = folder, make_model(folder / "model", "qwen3")
        self.trainers = {
            name: AdapterTrainer(folder / name, self.model, seed) for seed, name in enumerate(("policy", "judge"))
        }
        self.tokens: dict[str, list[list[int]]] = {}
        """What versions answered, by their full names."""
        for trainer in self.trainers.values():
            trainer.publish()
        self.server = start(self.model, folder / "log", {n: t.run for n, t in self.trainers.items()}).wait()
        self.of_base = greedy(self.server, "m")

    def publish(self, name: str) -> int:
        version = self.trainers[name].publish()
        adapter(self.server, name, version=version, state="healthy")
        return version

    def note(self, name: str) -> int:
        """Ask the present version. Not by its full name, which would keep it loaded for a minute."""
        version: int = adapter(self.server, name)["version"]
        self.tokens[f"{name}@{version}"] = greedy(self.server, name)
        return version


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    made = Scene(tmp_path_factory.mktemp("adapters"))
    yield made
    made.server.stop()


def test_two_adapters_follow_beside_base_traffic(scene: Scene) -> None:
    server = scene.server
    for name in scene.trainers:
        scene.note(name)
    with Streams(server) as streams:
        for _ in range(4):
            for name in scene.trainers:
                scene.publish(name)
    assert not streams.failures
    assert streams.completions
    for name in scene.trainers:
        version = scene.note(name)
        assert server.status()["state"] == "healthy"
        assert adapter(server, name, loaded=[version - 1, version])["failures"] == 0
        assert greedy(server, f"{name}@{version}") == scene.tokens[f"{name}@{version}"]
        scene.tokens[f"{name}@{version - 1}"] = greedy(server, f"{name}@{version - 1}")
        gone = server.http.post("/v1/completions", json={"model": f"{name}@{version - 2}", "prompt": "t5"})
        assert gone.status_code == 404
    # the base is what it was, and no two versions say the same
    assert greedy(server, "m") == scene.of_base
    assert len({str(tokens) for tokens in (scene.of_base, *scene.tokens.values())}) == len(scene.tokens) + 1
    models = [model["id"] for model in server.http.get("/v1/models").json()["data"]]
    assert sorted(models) == ["judge", "judge@3", "judge@4", "m", "policy", "policy@3", "policy@4"]
    assert 'deltawire_adapter_version{adapter="judge"} 4.0' in server.http.get("/metrics").text


def test_an_answer_is_made_by_one_version(scene: Scene) -> None:
    before = scene.note("policy")
    body = {"prompt": PROMPTS[1], "max_tokens": 200, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    request = {"json": {**body, "model": "policy", "stream": True}, "timeout": 120}
    with httpx.stream("POST", f"{scene.server.http.base_url}/v1/completions", **request) as response:
        lines = response.iter_lines()
        events = [json.loads(next(line for line in lines if line.startswith("data: {"))[6:])]
        for _ in range(3):
            scene.publish("policy")
        events += [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert response.headers[VERSION_HEADER] == str(before)
    tokens = [token for event in events for token in event["choices"][0].get("token_ids") or ()]
    [spans] = [found for event in events if (found := event["choices"][0].get("weight_versions"))]
    assert spans == [{"version": before, "start": 0, "end": 200}]
    after = scene.note("policy")
    answer = scene.server.complete(PROMPTS[1], model="policy")
    assert answer.headers[VERSION_HEADER] == str(after)
    assert answer.json()["choices"][0]["weight_versions"] == [{"version": after, "start": 0, "end": 24}]
    assert tokens[:24] == scene.tokens[f"policy@{before}"][1]


def test_bounds_are_about_the_adapter(scene: Scene) -> None:
    server, present = scene.server, scene.note("policy")
    body = {"model": "policy", "prompt": "t5", "max_tokens": 2}

    def ask(header: str, version: int, **more: Any) -> httpx.Response:
        return server.http.post("/v1/completions", json={**body, **more}, headers={header: str(version)})

    assert ask(EXACT_VERSION_HEADER, present).headers[VERSION_HEADER] == str(present)
    assert ask(EXACT_VERSION_HEADER, present - 1).status_code == 409
    assert ask(EXACT_VERSION_HEADER, present - 1, model=f"policy@{present - 1}").status_code == 200
    # the base follows no run here
    assert ask(MIN_VERSION_HEADER, 0, model="m").status_code == 409
    publisher = threading.Thread(target=scene.trainers["policy"].publish)
    publisher.start()
    waited = ask(MIN_VERSION_HEADER, present + 1)
    publisher.join(60)
    assert (waited.status_code, waited.headers[VERSION_HEADER]) == (200, str(present + 1))


def test_a_leased_version_stays(scene: Scene) -> None:
    server, leased = scene.server, scene.note("judge")
    body = {"adapter": "judge", "version": leased, "seconds": 600}
    assert server.http.post("/deltawire/lease", json=body).json() == {"model": f"judge@{leased}", "seconds": 600}
    for _ in range(3):
        newest = scene.publish("judge")
    assert adapter(server, "judge", loaded=[leased, newest - 1, newest])
    assert greedy(server, f"judge@{leased}") == scene.tokens[f"judge@{leased}"]
    for wrong, status in (
        ({"version": 77}, 404),
        ({"adapter": "x"}, 404),
        ({"seconds": -1}, 400),
        ({"seconds": "1"}, 400),
    ):
        assert server.http.post("/deltawire/lease", json={**body, **wrong}).status_code == status


def test_every_version_answers_as_a_server_that_was_started_with_it(scene: Scene) -> None:
    names = sorted(scene.tokens)
    folders = {
        name: scene.trainers[name.partition("@")[0]].checkout(int(name.partition("@")[2]), scene.folder / name)
        for name in names
    }
    scene.server.stop()
    flags = ["--enable-lora", "--max-loras", "2", "--max-cpu-loras", str(len(names)), "--lora-modules"]
    flags += [f"{name}={folder}" for name, folder in folders.items()]
    with live_server.serving(AdapterServer, scene.model, scene.folder / "fresh.log", flags=flags) as fresh:
        assert greedy(fresh, "m") == scene.of_base
        for name in names:
            assert greedy(fresh, name) == scene.tokens[name], name


@pytest.mark.parametrize("tp", dict.fromkeys((1, ranks())))
def test_slots_hold_what_vllm_itself_puts_there(tmp_path: Path, tp: int) -> None:
    """Bit for bit on all ranks, also of versions that vLLM did not read: of ranks below the largest, of queries and
    values alone, of scales that round, and of float32. One number that is none is left to vLLM, once."""
    model = make_model(tmp_path / "model", "qwen3")
    trainers = {
        "policy": AdapterTrainer(tmp_path / "policy", model, 0, every_layer=True, lora_alpha=5, use_rslora=True),
        "judge": AdapterTrainer(tmp_path / "judge", model, 1, rank=6, float32=True, lora_alpha=7),
    }
    for trainer in trainers.values():
        trainer.publish()
    probe = ["--worker-extension-cls", "vllm_test_plugin.Probe"]
    server = start(model, tmp_path / "log", {n: t.run for n, t in trainers.items()}, *probe, tp=tp)
    try:
        server.wait(limit=500)
        for number in range(4):
            for name, trainer in trainers.items():
                version = number and trainer.publish()
                said = adapter(server, name, version=version, state="healthy")["read_by_engine"]
                assert bool(said) == (number < 2), said
        held = server.rpc("adapter_slots")
        loaded = [f"{name}@{v}" for name in trainers for v in adapter(server, name)["loaded"]]
        weights = trainers["policy"].weights
        weights[next(name for name in weights if "lora_B" in name)][0, 0] = np.nan
        adapter(server, "policy", version=trainers["policy"].publish(moved=False), state="healthy")
        assert "not finite" in server.log.read_text()
        adapter(server, "policy", version=trainers["policy"].publish(), state="healthy", read_by_engine="")
    finally:
        server.stop()
    flags = ["--enable-lora", "--max-loras", "5", "--max-cpu-loras", "5", *probe, "--lora-modules"]
    for full_name in loaded:
        name, _, version = full_name.partition("@")
        flags.append(f"{full_name}={trainers[name].checkout(int(version), tmp_path / full_name)}")
    with live_server.serving(AdapterServer, model, tmp_path / "fresh.log", flags=flags, tp=tp) as fresh:
        found = fresh.rpc("adapter_slots")
    assert len(loaded) == 4
    assert [len(set(slots)) for slots in found] == [4] * tp
    assert held == found


def test_all_ranks_switch_or_none(tmp_path: Path) -> None:
    switch_all_ranks_or_none(tmp_path, start, greedy, ranks(), "LoRA rank 32 is greater than max_lora_rank 16")


def test_adapters_beside_a_base_that_follows_a_run(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen3")
    trainer, adapters = Trainer(model, tmp_path / "run"), AdapterTrainer(tmp_path / "policy", model)
    trainer.publish(0)
    adapters.publish()
    flags = ["--enable-lora", "--max-loras", "2", "--max-cpu-loras", "3"]
    named = {"DELTAWIRE_ADAPTERS": f"policy={adapters.run}"}
    with serving(model, tmp_path / "log", run=trainer.run, flags=flags, **named) as server:
        status = adapter(server, "policy", state="healthy", version=0)
        # layers that LoRA wraps are patched like others
        assert (status["failures"], server.status()["guard"]) == (0, "patch")
        base, policy = greedy(server, "m"), greedy(server, "policy")
        assert server.complete([5]).headers[VERSION_HEADER] == "0"
        server.until(version=trainer.publish(0.2))
        assert "are for another base model" in adapter(server, "policy", state="degraded", version=0)["reason"]
        assert greedy(server, "m") != base
        assert greedy(server, "policy") != policy
        answer = server.complete([5], model="policy")
        assert (answer.headers[VERSION_HEADER], server.complete([5]).headers[VERSION_HEADER]) == ("0", "1")
        sums = {name.replace(".base_layer.", "."): value for name, value in server.checksums().items()}
    write_version(str(trainer.run), 1, tmp_path / "fresh")
    assert [sums] == fresh_checksums([tmp_path / "fresh"], 1)
    trainer.close()
