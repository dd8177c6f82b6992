"""What an image does, without Docker: its install lines in a clean virtual environment, then its start command."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml
from dockerfiles import Dockerfile
from test_deploy_files import DEPLOY, ROOT

import environments
from deltawire.bucket.run import Run
from deltawire.bucket.verify import verify
from deltawire.trainer import Publisher
from deltawire_wordle import small_policy
from deltawire_wordle.processes import free_port
from deltawire_wordle.seaweed import SeaweedFS
from servers import Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made as the READMEs say, from the tree as it is."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder), "."]
    subprocess.run(command, check=True, cwd=ROOT)
    (made,) = folder.iterdir()
    return made


def prepared(path: Path, wheel: Path, folder: Path) -> tuple[Dockerfile, Path, dict[str, str]]:
    """The image's files in its working directory, and the environment of a container."""
    file, app = Dockerfile.read(path), folder / "app"
    app.mkdir()
    context = ROOT if path.parent == DEPLOY else path.parent
    for rest in file.all("COPY"):
        for source in rest.split()[:-1]:
            found = wheel if source.endswith(".whl") else context / source
            shutil.copytree(found, app / source) if found.is_dir() else shutil.copy(found, app)
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    home = folder / "home"
    home.mkdir()
    # nothing of the tests' own environment but how packages and programs are found
    kept = {name: value for name, value in os.environ.items() if name.startswith("PIP_") or name == "LANG"}
    path_ = f"{folder / 'venv' / 'bin'}:{os.environ['PATH']}"
    return file, app, {**kept, **file.environment, "HOME": str(home), "PATH": path_}


def install(file: Dockerfile, app: Path, env: Mapping[str, str]) -> None:
    for line in file.installs():
        if line.endswith("vllm==0.33.0"):
            continue  # for GPUs, and several GB
        subprocess.run(["sh", "-ec", line], check=True, cwd=app, env={**env, "PIP_QUIET": "1"})


def test_the_wordle_space(wheel: Path, tmp_path: Path) -> None:
    file, app, env = prepared(DEPLOY / "wordle-env" / "Dockerfile", wheel, tmp_path)
    install(file, app, env)
    # torch, which the environment has no use for, did not come along
    assert not list((tmp_path / "venv" / "lib").glob("python*/site-packages/torch"))
    port = free_port()
    settings = {"PORT": str(port), "WORDS": "toy", "GUESSES": "5"}
    with Server(file.command, port, env={**env, **settings}, cwd=app, log=tmp_path / "log") as server:
        assert server.wait("/health") == {"status": "healthy"}
        assert "5 tries; 64 words" in server.get("/metadata")["description"]
        check_health(file, env, port)
        assert server.end(signal.SIGTERM) in (0, -signal.SIGTERM, 128 + signal.SIGTERM)


def test_the_vllm_space(wheel: Path, tmp_path: Path) -> None:
    file, app, env = prepared(DEPLOY / "vllm-rollout" / "Dockerfile", wheel, tmp_path)
    install(file, app, env)
    run, port = (tmp_path / "run").as_uri(), free_port()
    with Publisher(run, wire_dtype="bf16", files=small_policy.FOLDER) as publisher:
        publisher.publish(small_policy.load(), wait=True)
    # from here on with the environment that has a vLLM for CPUs, and this deltawire
    vllm = environments.engine("vllm")
    env |= {"PATH": f"{vllm.parent}:{os.environ['PATH']}", "PORT": str(port), "HF_HUB_OFFLINE": "1"}
    refused = subprocess.run(file.command, cwd=app, env=env, capture_output=True, text=True)
    assert refused.returncode != 0
    assert "set MODEL" in refused.stderr
    settings = {
        "MODEL": str(small_policy.FOLDER), "DELTAWIRE_RUN": run, "DELTAWIRE_TOKEN": "a long random string",
        "VLLM_ARGS": "--dtype bfloat16 --enforce-eager --max-model-len 64 --max-num-seqs 4",
    }  # fmt: skip
    env |= environments.VLLM_ON_A_CPU | settings
    with Server(file.command, port, env=env, cwd=app, log=tmp_path / "log") as server:
        server.wait("/health")
        # named as the trainer names it
        assert server.get("/v1/models")["data"][0]["id"] == str(small_policy.FOLDER)
        check_health(file, env, port)
        assert "a long random string" not in server.said
        assert server.end(signal.SIGTERM) in (0, -signal.SIGTERM, 128 + signal.SIGTERM)


def check_health(file: Dockerfile, env: Mapping[str, str], port: int) -> None:
    """The image's own health check says yes, and no where nobody listens."""
    words = json.loads(file.last("HEALTHCHECK").partition("CMD ")[2])
    for where, healthy in ((port, True), (free_port(), False)):
        done = subprocess.run(words, env={**env, "PORT": str(where)}, capture_output=True)
        assert (done.returncode == 0) == healthy


# ── the compose file ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def box(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    folder = tmp_path_factory.mktemp("box")
    file, app, env = prepared(DEPLOY / "Dockerfile", wheel, folder)
    install(file, app, env)
    return app, env


def test_the_boxes_of_the_compose_file(box: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    """Its own command lines as processes of this machine; only hosts and ports differ, and the run is short."""
    app, env = box
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    names = ("environment", "rollout-1", "rollout-2")
    ports = {name: free_port() for name in names}

    def command(name: str, *more: str) -> list[str]:
        words = services[name]["command"]
        for other, port in ports.items():
            words = words.replace(f"http://{other}:7860", f"http://127.0.0.1:{port}")
        return [*shlex.split(words.replace("--port 7860", f"--port {ports.get(name)}")), *more]

    with SeaweedFS(options={"bucket": "runs"}) as bucket:
        inside = {**env, **bucket.environment, "DELTAWIRE_TOKEN": "a long random string"}
        servers = {name: Server(command(name), ports[name], env=inside, cwd=app, log=tmp_path / name) for name in names}
        try:
            servers["environment"].wait("/health")
            trainer = command("trainer", "--steps", "5", "--games", "32")
            done = subprocess.run(trainer, env=inside, cwd=app, capture_output=True, text=True, timeout=600)
            assert done.returncode == 0, done.stderr
            assert '"event": "done"' in done.stdout.splitlines()[-1]
            for name in names[1:]:
                servers[name].wait("/health")
            for name in names:
                assert servers[name].end(signal.SIGTERM) in (0, -signal.SIGTERM, 128 + signal.SIGTERM)
                assert "a long random string" not in servers[name].said
        finally:
            for server in servers.values():
                server.kill()
        run = Run.open(bucket.store("runs/wordle"))
        assert run.manifest(run.newest() or 0).step == 5
        assert verify(run).ok
