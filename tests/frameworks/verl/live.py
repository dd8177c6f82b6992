"""Against a real verl on a CPU: `make test-trainers FRAMEWORK=verl`. The everyday run has no verl."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import verl
from hydra import compose, initialize_config_dir
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.import_utils import load_class_from_fqn
from verl.workers.config import CheckpointEngineConfig

import deltawire as dw
from deltawire.bucket.verify import verify
from deltawire.errors import Misconfigured, VersionRefused
from deltawire.frameworks import verl as adapter
from deltawire.models import ModelView

RANKS = 2
LIMIT = 400
PUBLISHED = ["full-untied", "full-tied", "shards-untied", "shards-tied", "nothing"]


def run_ranks(folder: Path, names: list[str]) -> list[int]:
    """Run scenarios on all ranks. Returns exit codes; what they printed is in FOLDER/log-RANK."""
    here = Path(__file__).parent
    command = [sys.executable, str(here / "verl_rank.py")]
    settings = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(here), os.environ.get("PYTHONPATH", "")]),
        "VERL_USE_EXTERNAL_MODULES": "cpu_platform",
        # verl registers its FSDP engine for CUDA only
        "VERL_ENGINE_DEVICE": "cuda",
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    (folder / "ranks").unlink(missing_ok=True)
    logs = [(folder / f"log-{rank}").open("w") for rank in range(RANKS)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(RANKS), str(folder), *names], env=settings, stdout=log, stderr=subprocess.STDOUT
        )
        for rank, log in enumerate(logs)
    ]
    try:
        return [rank.wait(LIMIT) for rank in ranks]
    finally:
        for rank, log in zip(ranks, logs, strict=True):
            rank.kill()
            log.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models: with a head of its own, and with one that is tied to the embedding."""
    folder = tmp_path_factory.mktemp("verl")
    for name, tied in (("untied", False), ("tied", True)):
        torch.manual_seed(3)
        config = Qwen3Config(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            vocab_size=512,
            tie_word_embeddings=tied,
        )
        Qwen3ForCausalLM(config).bfloat16().save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def trained(folder: Path) -> Path:
    codes = run_ranks(folder, [*PUBLISHED, "refused"])
    assert codes == [0] * RANKS, (folder / "log-0").read_text()[-6000:]
    return folder


def reports(folder: Path, name: str) -> list[Any]:
    return [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_step_is_proven_on_a_replica(trained: Path, name: str) -> None:
    """Versions are what two ranks hold after each step, in small deltas; a fresh model becomes the newest one."""
    said = reports(trained, name)
    run = dw.Run.open(str(trained / name))
    manifests = [run.manifest(version) for version in run.listed()]
    assert said[0]["digests"] == said[1]["digests"]
    if name != "nothing":  # where a slow bucket may merge steps
        assert [manifest.digest for manifest in manifests] == said[0]["digests"]
        assert [manifest.step for manifest in manifests] == [0, 1, 2, 3]
        for each in said:
            assert [told["deltawire/version"] for told in each["told"]] == [0, 1, 2, 3]
    assert manifests[-1].digest == said[0]["digests"][-1]
    whole = manifests[0].links[0].bytes
    for manifest in manifests[1:]:
        (link,) = manifest.links
        assert link.kind == "delta"
        assert link.bytes < whole / 10
    names = {tensor.name for tensor in run.schema.tensors}
    assert ("lm_head.weight" in names) == (not name.endswith("-tied"))

    source = "tied" if name.endswith("-tied") else "untied"
    model = AutoModelForCausalLM.from_config(
        Qwen3Config.from_pretrained(trained / source), dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    replica = dw.Replica(str(trained / name), heartbeat=0)
    assert replica.sync(model) == manifests[-1].version
    assert str(dw.digest_of(ModelView(model))) == said[0]["digests"][-1]


def test_the_first_version_has_the_bits_that_verl_loaded(trained: Path) -> None:
    for model in ("untied", "tied"):
        loaded = AutoModelForCausalLM.from_pretrained(trained / model, dtype=torch.bfloat16)
        for form in ("full", "shards"):
            manifest = dw.Run.open(str(trained / f"{form}-{model}")).manifest(0)
            assert manifest.digest == str(dw.digest_of(ModelView(loaded)))


def test_a_run_has_the_files_that_a_server_needs(trained: Path) -> None:
    for name in ("full-tied", "shards-tied"):
        manifest = dw.Run.open(str(trained / name)).manifest(3)
        assert {"config.json", "generation_config.json"} <= {file.name for file in manifest.files}


def test_names_and_shapes_that_are_not_the_checkpoints_are_refused_on_all_ranks(trained: Path) -> None:
    for said in reports(trained, "refused"):
        assert said["name"][0] == said["shape"][0] == "SchemaMismatch"
        assert "'actor.model.layers.0.self_attn.q_proj.weight'" in said["name"][1]
        assert "came as BF16 [63, 64], and in the run it is BF16 [64, 64]" in said["shape"][1]
    assert [m.step for m in map(dw.Run.open(str(trained / "refused")).manifest, (0, 1))] == [0, 1]


def test_a_rank_that_dies_ends_the_update_of_the_other_one(folder: Path, trained: Path) -> None:
    assert run_ranks(folder, ["killed"]) == [0, 9]
    kind, message = json.loads((folder / "killed-0.json").read_text())
    assert kind in ("RankLost", "PublishFailed"), message
    run = dw.Run.open(str(folder / "killed"))
    assert run.newest() == 0
    assert verify(run).ok


# ── settings, and a verl with another hook ───────────────────────────────────────────────────────────────────────────


def test_verl_finds_the_engine_by_its_entry_point() -> None:
    found = entry_points(group="verl.plugins")["deltawire"]
    assert found.value == "deltawire.frameworks.verl"
    code = "import verl; from verl.checkpoint_engine import CheckpointEngineRegistry as r; print(r.get('deltawire'))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT, check=True)
    assert "DeltawireEngine" in said.stdout


def engine(**options: Any) -> Any:
    return CheckpointEngineRegistry.new("deltawire", bucket_size=1, **{"run": "memory://verl", **options})


def test_an_engine_touches_nothing_before_its_first_update(tmp_path: Path) -> None:
    """verl makes one in every rollout worker too."""
    made = engine(run=str(tmp_path / "run"))
    assert made.prepare() == {}
    assert made.build_topology(2, 1, [{}] * 3) == ({}, {})
    made.init_process_group()
    made.finalize()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("change", ["argument", "method"])
def test_a_verl_with_another_hook_is_refused_with_both_versions(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if change == "argument":
        monkeypatch.setattr(CheckpointEngine, "send_weights", lambda self, weights: None)
    else:
        monkeypatch.setattr(CheckpointEngine, "__abstractmethods__", frozenset([*adapter.HOOK, "resize"]))
        monkeypatch.setattr(adapter.DeltawireEngine, "__abstractmethods__", frozenset())
    with pytest.raises(Misconfigured, match=rf"verl {verl.__version__} calls .* than verl {adapter.TESTED}"):
        engine()


def test_wrong_settings_are_named(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match=r"engine_kwargs\.deltawire\.run is missing"):
        engine(run="")
    with pytest.raises(Misconfigured, match="wait is one of servers, bucket, nothing, not 'sometimes'"):
        engine(wait="sometimes")
    with pytest.raises(Misconfigured, match=r"shards needs rollout\.checkpoint_manager_class=deltawire\.frameworks"):
        send(engine(shards=True, run=str(tmp_path)), iter(()))


def send(made: Any, weights: Any, step: int = 0) -> dict[str, float]:
    """Call an engine as an actor does, in an event loop of its own."""
    with ThreadPoolExecutor(1) as actor:
        return actor.submit(lambda: asyncio.run(made.send_weights(weights, global_steps=step))).result()


# ── the manager ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Actors:
    """A worker group of one actor, which is this process."""

    def __init__(self, weights: dict[str, torch.Tensor], **options: Any) -> None:
        self.weights, self.engine, self.modes = weights, engine(**options), list[str]()

    def update_weights(self, global_steps: int, mode: str) -> list[Any]:
        self.modes.append(mode)
        return [send(self.engine, iter(self.weights.items()), global_steps)]


class Server:
    """A rollout server: a replica, its status by HTTP, and an actor handle that takes steps."""

    def __init__(self, run: str) -> None:
        self.weights: dict[str, torch.Tensor] = {"w": torch.zeros(64, 8, dtype=torch.bfloat16)}
        self.replica, self.state, self.steps = dw.Replica(run, heartbeat=0), "healthy", list[int]()
        self.servers = [SimpleNamespace(set_global_steps=SimpleNamespace(remote=self._note))]
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = json.dumps(
                    {"run": run, "version": outer.replica.version, "state": outer.state, "reason": "a reason"}
                )
                self.send_response(200 if self.path == "/deltawire/status" else 404)
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        self.server_address = f"127.0.0.1:{self.http.server_port}"

    async def _note(self, step: int) -> None:
        self.steps.append(step)

    def sync(self) -> None:
        self.replica.sync(self.weights)

    def follow(self) -> None:
        """Until the first version is there."""
        while self.replica.version is None:
            with suppress(dw.errors.RunNotFound):
                self.sync()


@pytest.fixture
def _no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Actors of these tests answer at once."""
    monkeypatch.setattr(adapter.ray, "get", lambda answers: answers)


def managed(run: Path, **options: Any) -> tuple[Any, Actors, Server]:
    actors = Actors({"w": torch.randn(64, 8)}, run=str(run), **options)
    server = Server(str(run))
    config = CheckpointEngineConfig(backend="deltawire", engine_kwargs={"deltawire": {"run": str(run), **options}})
    return adapter.DeltawireManager(config, actors, [server]), actors, server


@pytest.mark.usefixtures("_no_ray")
def test_an_update_ends_when_the_servers_have_the_version(tmp_path: Path) -> None:
    manager, actors, server = managed(tmp_path / "run")
    threading.Thread(target=server.follow, daemon=True).start()
    figures = manager.update_weights(5)
    assert (figures["deltawire/version"], server.replica.version, server.steps) == (0, 0, [5])
    assert torch.equal(server.weights["w"], actors.weights["w"].bfloat16())
    assert actors.modes == ["deltawire"]


@pytest.mark.usefixtures("_no_ray")
def test_without_waiting_samples_have_the_step_of_the_version_that_made_them(tmp_path: Path) -> None:
    manager, actors, server = managed(tmp_path / "run", wait="bucket")
    manager.update_weights(3)
    assert server.steps == []
    server.sync()
    actors.weights["w"][0, 0] += 1
    assert manager.update_weights(4)["deltawire/version"] == 1
    assert server.steps == [3]


@pytest.mark.usefixtures("_no_ray")
def test_a_server_that_does_not_follow_is_named(tmp_path: Path) -> None:
    manager, _, server = managed(tmp_path / "run", timeout=0.3)
    with pytest.raises(VersionRefused, match=r"did not reach version 0 in 0\.3 s: it is healthy, at None\. a reason"):
        manager.update_weights(0)
    server.server_address += "/other"
    with pytest.raises(Misconfigured, match="VLLM_PLUGINS=deltawire"):
        manager.update_weights(0)


# ── the page ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_command_of_the_page_is_a_configuration_of_verl() -> None:
    """docs/verl.md's settings, composed and made into what verl's workers and manager get."""
    page = (Path(__file__).parents[3] / "docs" / "verl.md").read_text()
    command = page.partition("python3 -m verl.experimental.one_step_off_policy.main_ppo")[2].partition("```")[0]
    settings = [word for word in shlex.split(command.replace("\\\n", " ")) if not word.startswith("--")]
    folder = Path(verl.__file__).parent
    with initialize_config_dir(str(folder / "experimental/one_step_off_policy/config"), version_base=None):
        places = f"hydra.searchpath=[file://{folder}/trainer/config]"
        config = compose("one_step_off_ppo_trainer", [places, *settings])
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    assert (rollout.name, rollout.load_format, rollout.free_cache_engine) == ("vllm", "auto", False)
    assert rollout.engine_kwargs["vllm"] == {"weight_transfer_config": {"backend": "deltawire"}}
    manager = load_class_from_fqn(rollout.checkpoint_manager_class)
    made = manager(omega_conf_to_dataclass(config.actor_rollout_ref.rollout.checkpoint_engine), None, [])
    assert isinstance(made, adapter.DeltawireManager)
    options = made.config.engine_kwargs[made.backend]
    assert dict(options) == {"run": "s3://runs/policy", "files": "/models/policy", "shards": True}
    assert import_module(made.config.custom_backend_module) is adapter
    assert isinstance(CheckpointEngineRegistry.new(made.backend, bucket_size=1, **options), adapter.DeltawireEngine)
