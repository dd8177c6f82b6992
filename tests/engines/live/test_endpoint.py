"""The plugin as vLLM calls it: what it refuses at start, its routes, and that what it logs is seen."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("torch")

import httpx
from fastapi import FastAPI, Response
from prometheus_client import REGISTRY
from test_follower import World, loop, until
from test_live_adapters import Scene
from torch import nn

from deltawire.bucket.run import Run
from deltawire.bucket.versions import set_tag
from deltawire.core.errors import Misconfigured
from deltawire.engines import vllm as plugin
from deltawire.engines.live import endpoint
from deltawire.engines.live.follower import EngineFollower
from deltawire.engines.vllm.endpoint import Plugin
from deltawire.engines.vllm.guard import problems_of, require_host
from deltawire.store import open_store
from support import heartbeats

__all__ = ["loop"]


class Server:
    """vLLM's part: an app with the plugin's routes, an engine client, arguments."""

    def __init__(self, world: World, loop: asyncio.AbstractEventLoop, **args: Any) -> None:
        self.client = world.client
        self.client.generate = None  # type: ignore[attr-defined]
        self.client.vllm_config.weight_transfer_config = SimpleNamespace(backend=args.pop("backend", "deltawire"))
        usual = {"host": "127.0.0.1", "served_model_name": None, "model": "a/folder", "tokenizer": None}
        self.args = SimpleNamespace(**{**usual, **args})
        self.plugin, self.app, self._loop = Plugin(), FastAPI(), loop
        self.state: Any = None
        self.app.add_api_route("/health", lambda: Response(status_code=200), methods=["GET"])
        self.plugin.attach_router(self.app)

    def start(self) -> Server:
        self._run(self.plugin.init_state(self.client, self.state, self.args))
        return self

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(120)

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
                return await http.request(method, path, **options)

        return self._run(send())  # type: ignore[no-any-return]

    def get(self, path: str) -> Any:
        return self.request("GET", path).json()

    def stop(self) -> None:
        REGISTRY.unregister(self.plugin.metrics)
        if self.plugin.follower is not None:
            # its thread would log into other tests
            self.plugin.follower.stop(60)
        if self.plugin.elsewhere is not None:
            self._run(self.plugin.elsewhere.close())


@pytest.fixture
def world(tmp_path: Path, loop: asyncio.AbstractEventLoop) -> Iterator[World]:
    (tmp_path / "model").mkdir()
    made = World(tmp_path / "model", open_store(str(tmp_path / "run")), loop, 1)
    yield made
    made.publisher.close()


@pytest.fixture
def make(world: World, loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    made: list[Server] = []

    def one(run: str = "", args: dict[str, Any] | None = None, **environment: str) -> Server:
        for name, value in {"DELTAWIRE_RUN": run, "DELTAWIRE_POLL": "0.01", **environment}.items():
            monkeypatch.setenv(name, value)
        made.append(Server(world, loop, **(args or {})))
        return made[-1]

    yield one
    for server in made:
        server.stop()


def test_names_are_those_of_all_engines(world: World, make: Any, tmp_path: Path) -> None:
    server = make(f"{tmp_path}/run", {"served_model_name": ["chat"]}).start()
    until(lambda: server.get("/deltawire/status")["state"] == "healthy")
    status = server.get("/deltawire/status")
    assert (status["engine"], status["model"], status["version"], status["guard"]) == ("vllm", "chat", 0, "patch")
    health = server.request("GET", "/health")
    assert (health.status_code, health.json()) == (200, {"state": "healthy"})
    refused = server.request("POST", "/deltawire/pin", json={"version": 77})
    assert refused.status_code == 404
    assert server.get("/deltawire/status") == status
    world.client.fail[0, "apply"] = world.client.fail[0, "undo"] = 1000
    world.publish()
    # weights without a version show before the reason does
    until(lambda: "a fault" in server.get("/deltawire/status")["reason"])
    health = server.request("GET", "/health")
    assert (health.status_code, health.json()["state"]) == (503, "paused")
    assert server.request("GET", "/health_generate").status_code == 503
    assert "a fault that a test asked for" in health.json()["reason"]


def test_an_engine_that_was_not_run_is_named_once(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: {"vllm": "0.34.0"}[name])
    make(f"{tmp_path}/run").start()
    assert caplog.text.count("vllm 0.34.0 was not tested with deltawire, only 0.29 to 0.33") == 1


def test_a_tokenizer_that_vllm_made_up_is_named(make: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """vLLM builds an empty one from config.json, refuses text and answers with none."""
    run, folder = f"{tmp_path}/run", tmp_path / "bare"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for args in ({"tokenizer": "Qwen/Qwen3-0.6B"}, {"skip_tokenizer_init": True}, {}):
        make(run, {"model": str(folder), **args}).start()
        said = [line for line in caplog.messages if "made up an empty one" in line]
        assert len(said) == (args == {})
    assert said[0].startswith(f"{folder} has no tokenizer")
    (folder / "tokenizer.json").write_text("{}")
    caplog.clear()
    make(run, {"model": str(folder)}).start()
    assert "made up" not in caplog.text


def test_versions_are_written_as_everywhere(world: World, make: Any, tmp_path: Path) -> None:
    world.publish()
    world.publish()
    set_tag(Run.open(str(tmp_path / "run")), 1, "best")
    server = make(f"{tmp_path}/run", DELTAWIRE_PIN="best").start()
    until(lambda: server.get("/deltawire/status")["state"] == "healthy")
    assert server.get("/deltawire/status")["pin"] == 1
    for text, version in (("v0", 0), ("@best", 1), ("-2", 1), ("latest", 2), (0, 0)):
        status = server.request("POST", "/deltawire/pin", json={"version": text}).json()
        assert (status["version"], status["pin"]) == (version, version)
    for wrong in (77, "v77", "beest", "no version"):
        refused = server.request("POST", "/deltawire/pin", json={"version": wrong})
        assert refused.status_code == 404
        assert "it has versions 0 to 2 and the tags best" in refused.json()["detail"]
    assert server.request("POST", "/update_weights", json={"version": "best"}).json()["version"] == 1
    assert server.request("POST", "/update_weights", json={"version": 1.5}).status_code == 400
    with pytest.raises(Misconfigured, match=r"DELTAWIRE_PIN is 'v1\.5': .*it has versions 0 to 2"):
        make(f"{tmp_path}/run", DELTAWIRE_PIN="v1.5").start()


def test_requests_get_the_versions_they_accept(world: World, make: Any, tmp_path: Path) -> None:
    server = make(f"{tmp_path}/run", DELTAWIRE_VERSION_WAIT="60", DELTAWIRE_ADDRESS="10.0.0.5:8000").start()
    server.app.add_api_route("/v1/completions", lambda: {"choices": []}, methods=["POST"])

    def ask(**bound: str) -> httpx.Response:
        return server.request(
            "POST", "/v1/completions", headers={f"deltawire-{k}-version": v for k, v in bound.items()}
        )

    until(lambda: server.get("/deltawire/status")["state"] == "healthy")
    assert ask(min="0").headers["deltawire-version"] == "0"
    assert ask(min="newest").status_code == 400
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(ask, min="1")
        until(lambda: server.plugin.follower.listeners)
        world.publish()
        assert waiting.result(60).headers["deltawire-version"] == "1"
    past = ask(exact="0")
    assert (past.status_code, past.json()["error"]["version"]) == (409, 1)
    until(lambda: heartbeats(Run.open(str(tmp_path / "run")))[0].address == "10.0.0.5:8000")


def test_a_server_without_a_run_has_no_version(make: Any) -> None:
    server = make().start()
    server.app.add_api_route("/v1/completions", lambda: {"choices": []}, methods=["POST"])
    refused = server.request("POST", "/v1/completions", headers={"deltawire-min-version": "0"})
    assert (refused.status_code, refused.json()["error"]["version"]) == (409, None)


def test_a_run_that_is_mistyped_leaves_the_server_free_for_the_right_one(make: Any, tmp_path: Path) -> None:
    server = make().start()
    assert server.get("/health")["state"] == "idle"
    for wrong, status in ((f"{tmp_path}/rum", 404), ("s4://runs/chat", 400)):
        assert server.request("POST", "/update_weights", json={"run": wrong}).status_code == status
        assert server.get("/deltawire/status")["state"] == "idle"
    answer = server.request("POST", "/update_weights", json={"run": f"{tmp_path}/run"})
    assert (answer.status_code, answer.json()["version"]) == (200, 0)


def test_one_of_several_api_servers_follows_and_the_others_pass_on(
    world: World, make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.publish()
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv(plugin.SOCKETS, folder)
        servers = []
        for index in range(2):
            world.client.engine_core.client_index = index  # type: ignore[attr-defined]
            servers.append(make(f"{tmp_path}/run", {"api_server_count": 2}, DELTAWIRE_TOKEN="secret").start())
        first, second = servers
        assert second.plugin.follower is None
        until(lambda: second.get("/deltawire/status")["state"] == "healthy")
        # the sync is counted a moment after the version is served
        until(lambda: second.get("/deltawire/status") == first.get("/deltawire/status"))
        assert second.request("GET", "/health").status_code == 200
        # commands reach the one that follows, and its answers come back
        assert second.request("POST", "/deltawire/pin", json={"version": 0}).status_code == 401
        bearer = {"Authorization": "Bearer secret"}
        answer = second.request("POST", "/deltawire/pin", json={"version": 0}, headers=bearer)
        assert (answer.status_code, answer.json()["version"]) == (200, 0)
        assert second.request("POST", "/deltawire/pin", json={"version": 77}, headers=bearer).status_code == 404
        assert second.request("POST", "/deltawire/pin", json={"version": None}, headers=bearer).status_code == 200
        assert second.request("POST", "/update_weights", json={"version": 1}, headers=bearer).json()["version"] == 1
        # what samples are labelled with
        until(lambda: second.plugin.version() == 1)
        first.plugin.follower.failure = RuntimeError("the run has a different model")
        assert second.request("GET", "/health").status_code == 503


def test_requests_that_name_the_first_run_at_once_begin_one_follower(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, made, both, answers = make().start(), [], threading.Event(), []
    # what other API servers pass on is answered by an app in a thread of its own
    others = FastAPI()
    server.plugin.attach_routes(others)
    named = {"json": {"run": f"{tmp_path}/run"}}

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(others), base_url="http://server") as http:
            return await http.post("/update_weights", **named)

    with ThreadPoolExecutor() as pool:

        def follower(*args: Any, **options: Any) -> Any:
            made.append(None)
            if len(made) == 1:
                answers.append(pool.submit(lambda: asyncio.run(ask())))
                both.wait(0.3)
            both.set()
            return EngineFollower(*args, **options)

        monkeypatch.setattr(endpoint, "EngineFollower", follower)
        assert server.request("POST", "/update_weights", **named).json()["version"] == 0
        assert answers[0].result(60).json()["version"] == 0
    assert len(made) == 1


def test_one_of_several_api_servers_ends_all_of_them(world: World, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[Any] = []
    monkeypatch.setattr(os, "kill", lambda *given: killed.append(given))
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: SimpleNamespace(pid=4711))
    world.client.engine_core.client_index = 0  # type: ignore[attr-defined]
    monkeypatch.setattr("deltawire.engines.vllm.endpoint.serve", lambda app: None)
    make(args={"api_server_count": 2}).start().plugin.end()
    # a single one may be the child of anything
    make().start().plugin.end()
    assert killed == [(4711, signal.SIGTERM), (os.getpid(), signal.SIGTERM)]


def test_where_no_client_can_be_sent_no_address_is_said(make: Any, tmp_path: Path) -> None:
    odd = make(f"{tmp_path}/run", {"host": "gpu_1"}, DELTAWIRE_TOKEN="secret").start()
    until(lambda: odd.get("/deltawire/status")["state"] == "healthy")
    local = make(f"{tmp_path}/run", {"host": None, "uds": "/run/vllm.sock"}, DELTAWIRE_TOKEN="").start()
    until(lambda: local.get("/deltawire/status")["state"] == "healthy")
    assert [server.plugin._address for server in (odd, local)] == ["", ""]
    # only this machine has a Unix socket
    assert local.request("POST", "/deltawire/sync", json={}).status_code == 200


def test_a_server_makes_its_own_folder_for_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plugin.SOCKETS, "/of/another/server")
    plugin._make_folder.cache_clear()
    plugin._make_folder()
    mine = os.environ[plugin.SOCKETS]
    assert Path(mine).is_dir()
    plugin._make_folder()
    assert os.environ[plugin.SOCKETS] == mine
    # the processes that it starts use the same
    plugin._make_folder.cache_clear()
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: SimpleNamespace(pid=4711))
    plugin._make_folder()
    assert os.environ[plugin.SOCKETS] == mine
    Path(mine).rmdir()


def test_a_server_that_cannot_follow_its_run_does_not_start(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "deltawire")
    with pytest.raises(Misconfigured, match="--weight-transfer-config"):
        make("s3://runs/chat", {"backend": None}).start()
    server = make("s3://runs/chat")
    server.client.vllm_config.parallel_config = SimpleNamespace(local_engines_only=True)
    server.client.vllm_config.model_config.is_moe = True
    with pytest.raises(Misconfigured, match="must switch together"):
        server.start()
    server.client.vllm_config.model_config.is_moe = False
    make("", {"backend": None}).start()
    assert "can follow no run: start it with --weight-transfer-config" in caplog.text
    make("", {"host": None}).start()
    assert "set DELTAWIRE_TOKEN" in caplog.text
    assert "set DELTAWIRE_RUN" in caplog.text


def test_a_server_that_cannot_follow_adapters_does_not_start(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "deltawire")
    server = make("", {"backend": None}, DELTAWIRE_ADAPTERS="policy=s3://runs/lora")
    server.client.vllm_config.lora_config = None
    server.state = SimpleNamespace(openai_serving_models=None)
    with pytest.raises(Misconfigured, match="add --enable-lora --max-loras 2 --max-cpu-loras 3"):
        server.start()
    # adapters need no weight-transfer back end
    assert "can follow no run" not in caplog.text
    server.args.api_server_count = 2
    with pytest.raises(Misconfigured, match="--api-server-count 1"):
        server.start()
    server.args.api_server_count = 1
    server.client.vllm_config.parallel_config = SimpleNamespace(nnodes=2)
    with pytest.raises(Misconfigured, match="serve them on one node"):
        server.start()


def test_leases_need_the_token_and_a_version(make: Any, tmp_path: Path, loop: asyncio.AbstractEventLoop) -> None:
    (tmp_path / "adapter").mkdir()
    scene = Scene(tmp_path / "adapter", loop)
    server = make("", {"backend": None, "host": "0.0.0.0"}, DELTAWIRE_TOKEN="secret")

    def post(path: str, token: str = "secret", **body: Any) -> int:
        headers = {"Authorization": f"Bearer {token}"}
        return server.request("POST", f"/deltawire/{path}", json=body, headers=headers).status_code  # type: ignore[no-any-return]

    try:
        scene.trainer.publish()
        server.plugin.adapters = adapters = scene.follow()
        scene.until(version=0)
        good = {"adapter": "policy", "version": 0, "seconds": 600}
        assert post("lease", "wrong", **good) == 401
        assert adapters.names["policy"].leased_until == 0
        assert post("lease", **good) == 200
        assert adapters.names["policy"].leased_until > 0
        for wrong in ({"adapter": ["policy"]}, {"adapter": {}}, {"adapter": None}, {"seconds": True}, {"seconds": -1}):
            assert post("lease", **{**good, **wrong}) == 400, wrong
        assert (post("lease", **{**good, "adapter": "judge"}), post("lease", **{**good, "version": 7})) == (404, 404)
        for path in ("pin", "sync"):
            assert post(path, adapter=["policy"], version=0) == 400
        assert post("lease", **{**good, "seconds": 0}) == 200
        assert adapters.names["policy"].leased_until == 0
    finally:
        scene.trainer.publisher.close()
        scene.adapters.stop(60)


def test_reasons_not_to_patch_that_memory_does_not_show() -> None:
    def reasons(**config: Any) -> list[str]:
        model = SimpleNamespace(
            quantization=config.pop("quantization", None), hf_config=SimpleNamespace(**config), is_moe=config.get("moe")
        )
        parallel = SimpleNamespace(enable_eplb=config.get("eplb", False))
        lora = config.get("lora")
        return problems_of(
            nn.Linear(2, 2), SimpleNamespace(model_config=model, parallel_config=parallel, lora_config=lora)
        )

    assert reasons() == []
    assert reasons(quantization="fp8") == ["the server quantizes its weights (fp8)"]
    # a checkpoint that is quantized already: what its layers do with it is learned
    assert reasons(quantization="fp8", quantization_config={"quant_method": "fp8"}) == []
    assert "EPLB" in reasons(eplb=True)[0]
    assert reasons(lora=True) == []
    assert "LoRA" in reasons(lora=True, moe=True)[0]


def test_an_address_that_no_other_node_can_reach_is_refused() -> None:
    assert require_host("10.0.0.2") == "10.0.0.2"
    for address in ("0.0.0.0", "::", ""):
        with pytest.raises(Misconfigured, match="set VLLM_HOST_IP"):
            require_host(address)


@contextmanager
def fresh_logger() -> Iterator[logging.Logger]:
    """deltawire's logger as it is in a fresh process."""
    log, root = logging.getLogger("deltawire"), logging.getLogger()
    before = log.handlers, log.level, log.propagate, root.handlers
    log.handlers, log.propagate, root.handlers = [], True, []
    try:
        yield log
    finally:
        log.handlers, level, log.propagate, root.handlers = before
        log.setLevel(level)


def test_what_deltawire_logs_is_written_once_by_vllms_handlers() -> None:
    class Written(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    lines: list[str] = []
    vllm, handler = logging.getLogger("vllm"), Written()
    vllm.setLevel(logging.NOTSET)
    vllm.propagate = False
    with fresh_logger() as log:
        plugin.log_to_vllm()
        plugin.log_to_vllm()
        # vLLM configures its logging after plugins were loaded, and something gives the root logger a handler
        vllm.setLevel(logging.INFO)
        vllm.addHandler(handler)
        logging.getLogger().addHandler(handler)
        log.warning("version %d is bad", 4)
        log.info("serving v3")
        log.debug("not this")
    vllm.removeHandler(handler)
    assert lines == ["version 4 is bad", "serving v3"]


def test_a_logger_that_somebody_configured_is_left_alone() -> None:
    with fresh_logger() as log:
        log.addHandler(logging.NullHandler())
        plugin.log_to_vllm()
        assert len(log.handlers) == 1
        assert log.propagate
