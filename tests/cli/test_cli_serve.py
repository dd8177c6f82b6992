"""`deltawire serve`: it starts, says where it is, and ends when told to."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

import httpx
import pytest
from typer.testing import CliRunner

pytest.importorskip("torch")

import torch

from deltawire import Publisher
from deltawire.cli import app, main
from deltawire.engines.live import launch
from deltawire.engines.options import ANSWERS, BUILTIN, FLOW, WHAT, WHERE, ServerOptions, settings
from tests import forks
from tests.engines.server.serving import checkpoint, nudge, publisher, tiny_model

COMMAND = [sys.executable, "-m", "deltawire.cli", "serve"]


@contextmanager
def process(*arguments: object, **environment: str) -> Iterator[subprocess.Popen[str]]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    started = forks.Popen(
        [*COMMAND, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    )
    try:
        yield started
    finally:
        if started.poll() is None:
            started.kill()
        started.communicate(timeout=120)


@contextmanager
def slow_clients(port: int) -> Iterator[None]:
    """Clients in every phase of a request, none of which goes on."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 60\r\n\r\n"
    with ExitStack() as opened:
        # the server may have given up one that is slow to send
        with suppress(OSError):
            for said in (b"", b"GET /hea", head, head + b'{"prompt"'):
                opened.enter_context(socket.create_connection(("127.0.0.1", port), 120)).sendall(said)
            deaf = opened.enter_context(socket.socket())
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            deaf.connect(("127.0.0.1", port))
            # as much as the kernel takes: the server stops reading from one that does not read
            deaf.setblocking(False)
            for _ in range(3000):
                deaf.send(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        yield


def refused(*arguments: str, **environment: str) -> str:
    answer = CliRunner().invoke(app, ["serve", *arguments], env=environment)
    assert answer.exit_code == 2
    # without the frame, which breaks lines
    return " ".join(answer.output.replace("│", " ").split())


def line(out: IO[str]) -> dict[str, Any]:
    return json.loads(out.readline())


def use(out: IO[str], trainer: torch.nn.Module, publish: Publisher) -> int:
    """What a client sees of a server, from its first line on. Returns its port."""
    lines = {value["event"]: value for value in (line(out), line(out))}
    assert lines["version"]["version"] == 0
    url, port = lines["listening"]["url"], lines["listening"]["port"]
    assert url == f"http://127.0.0.1:{port}"
    nudge(trainer, 1)
    publish.publish(trainer).result(60)
    assert line(out)["version"] == 1
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": "hello", "logprobs": 0}, timeout=120)
    assert answer.headers["deltawire-version"] == "1"
    assert answer.json()["model"] == "run"
    assert httpx.post(f"{url}/pause", timeout=120).status_code == 401
    return port


def test_serving_a_run_from_start_to_sigterm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In this process: the command in the main thread, its client in another one, which ends it by a signal."""
    trainer, ended = tiny_model(), threading.Event()
    read, write = os.pipe()
    monkeypatch.setenv("DELTAWIRE_TOKEN", "secret")
    monkeypatch.setattr(sys, "argv", ["deltawire", "serve", str(tmp_path / "run"), "--port", "0", "--json"])
    sys.argv += ["--poll", "0.02", "--threads", "1"]

    def client() -> None:
        with open(read) as out, slow_clients(use(out, trainer, publish)):
            os.kill(os.getpid(), signal.SIGTERM)
            assert ended.wait(120)
            assert "secret" not in out.read()

    with (
        publisher(tmp_path / "run", checkpoint(tmp_path / "model", trainer)) as publish,
        ThreadPoolExecutor(1) as pool,
    ):
        publish.publish(trainer).result(60)
        used = pool.submit(client)
        try:
            with open(write, "w") as out, monkeypatch.context() as patch, pytest.raises(SystemExit) as left:
                patch.setattr(sys, "stdout", out)
                main()
        finally:
            ended.set()
        used.result(120)
    assert left.value.code == 0
    said = capfd.readouterr().err
    assert "Traceback" not in said
    assert "secret" not in said


@pytest.mark.slow
@pytest.mark.parametrize("how, code", [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_serving_process_from_start_to_signal(tmp_path: Path, how: signal.Signals, code: int) -> None:
    trainer = tiny_model()
    with publisher(tmp_path / "run", checkpoint(tmp_path / "model", trainer)) as publish:
        publish.publish(trainer).result(60)
        with process(tmp_path / "run", "--port", 0, "--json", "--poll", 0.02, DELTAWIRE_TOKEN="secret") as it:
            assert it.stdout is not None
            with slow_clients(use(it.stdout, trainer, publish)):
                it.send_signal(how)
                out, said = it.communicate(timeout=120)
    assert it.returncode == code
    assert "Traceback" not in said
    assert "secret" not in out + said


@pytest.mark.slow
def test_it_can_be_ended_while_it_waits_for_a_run(tmp_path: Path) -> None:
    with process(tmp_path / "none", "--port", 0) as it:
        assert it.stderr is not None
        assert "waiting for it" in it.stderr.readline()
        it.terminate()
        it.communicate(timeout=120)
    assert it.returncode == 0


@pytest.mark.parametrize("engine", ["builtin", "vllm", "sglang"])
def test_a_port_that_is_taken(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # found before anything that takes long is imported
    monkeypatch.setitem(sys.modules, "deltawire.engines.server", None)
    monkeypatch.setitem(sys.modules, "deltawire.engines.live.launch", None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = refused(str(tmp_path / "none"), "--engine", engine, "--port", str(port))
    assert f"port {port} of 127.0.0.1 is in use" in said
    assert "--port" in said


def test_what_it_refuses() -> None:
    assert "--run" in refused("--engine", "vllm", "s3://runs/chat", "--adapter", "policy=s3://runs/lora")
    assert "203.0.113.7 is no address of this machine" in refused("run", "--host", "203.0.113.7", DELTAWIRE_TOKEN="x")
    assert "name a run" in refused()
    assert "DELTAWIRE_TOKEN" in refused("run", "--host", "0.0.0.0", DELTAWIRE_TOKEN="")
    assert "--engine vllm or sglang" in refused("run", "--", "--max-model-len", "9")
    assert "--folder is for --engine vllm or sglang" in refused("run", "--folder", "weights")
    assert "--folder is for --engine vllm RUN" in refused("--engine", "vllm", "m", "--run", "r", "--folder", "weights")
    assert "--adapter is for --engine vllm or sglang" in refused("base", "--adapter", "policy=run")
    assert "--kv version is for" in refused("run", DELTAWIRE_KV="version")
    for variable, text in (("DELTAWIRE_ADAPTERS", "policy=run"), ("DELTAWIRE_STAGING_MEMORY", "1")):
        assert f"{variable} is set, which is for --engine vllm or sglang" in refused("run", **{variable: text})
    # also where a flag takes its place
    assert "DELTAWIRE_POLL is 'soon'; it can be a number" in refused("run", "--poll", "1", DELTAWIRE_POLL="soon")
    assert "--threads is for the built-in server" in refused("run", "--engine", "vllm", "--threads", "1")
    assert "[-- FLAGS OF THE ENGINE]" in refused("run", "--engine", "sglang", "--tp-size", "2")


def test_adapters_that_are_named_wrongly() -> None:
    """Also where vLLM is not installed: what was typed is reported first."""
    for wrong in ("runs/lora", "=run", "policy=", "a b=run", ""):
        said = refused("--engine", "vllm", "base", "--adapter", "judge=run", "--adapter", wrong)
        assert f"--adapter has {wrong!r}; write NAME=RUN" in said
        assert "A-Z a-z 0-9" in said
    assert "--adapter names 'p' twice" in refused("--engine", "vllm", "base", "--adapter", "p=a", "--adapter", "p=b")
    assert "name the base model" in refused("--engine", "vllm", "--adapter", "policy=run")


def chosen(monkeypatch: pytest.MonkeyPatch, *arguments: str, **environment: str) -> ServerOptions:
    """What an engine would be started with."""
    found: list[ServerOptions] = []
    monkeypatch.setattr(launch, "launch", lambda engine, options: found.append(options) or sys.exit())
    answer = CliRunner().invoke(app, ["serve", "--engine", "vllm", "--port", "0", *arguments], env=environment)
    assert answer.exit_code == 0, answer.output
    return found[0]


def test_flags_come_before_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    variables = {
        "DELTAWIRE_RUN": "s3://runs/one@7", "DELTAWIRE_PIN": "v3", "DELTAWIRE_POLL": "5", "DELTAWIRE_KV": "keep",
        "DELTAWIRE_FOLLOW": "0", "DELTAWIRE_TOKEN": "secret", "DELTAWIRE_ADAPTERS": "policy=s3://runs/lora",
    }  # fmt: skip
    alone = chosen(monkeypatch, **variables)
    assert alone == ServerOptions(
        run="s3://runs/one", pin=7, poll=5, kv="keep", follow=False, token="secret",
        adapters={"policy": "s3://runs/lora"}, port=0, extra=[],
    )  # fmt: skip
    (tmp_path / "token").write_text("other\n")
    flags = ["--poll", "0.5", "--kv", "clear", "--token-file", str(tmp_path / "token"), "--version-wait", "0"]
    other = chosen(monkeypatch, "s3://runs/two", *flags, "--", "--max-num-seqs", "4", **variables)
    assert (other.run, other.pin, other.poll, other.kv) == ("s3://runs/two", "v3", 0.5, "clear")
    assert (other.token, other.version_wait, other.extra) == ("other", 0, ["--max-num-seqs", "4"])
    assert chosen(monkeypatch, "s3://runs/two@latest", **variables).pin is None
    both = chosen(monkeypatch, "base", "--adapter", "judge=s3://runs/judge", **variables)
    assert (both.model, both.run, both.adapters) == ("base", "s3://runs/one", {"judge": "s3://runs/judge"})


def test_help_has_every_option_under_what_it_is_for() -> None:
    text = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200"}).output
    panels = {part.partition(" ─")[0]: part for part in text.split("╭─ ")[1:]}
    assert [*panels] == ["Arguments", "Options", WHAT, WHERE, FLOW, ANSWERS, BUILTIN]
    for setting in settings():
        if setting.panel:
            (line,) = [line for line in panels[setting.panel].splitlines() if f" {setting.flag} " in line]
            assert len(line.split()) > 3, f"{setting.name} has no help"
            assert setting.variable in panels[setting.panel]
        elif setting.name not in ("run", "pin", "adapters", "token"):
            assert setting.variable in text.partition("╭─")[0]


@pytest.mark.parametrize("engine", ["builtin", "vllm", "sglang"])
@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_a_checkpoint_is_not_waited_for(
    engine: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("base").mkdir()
    Path("base", file).touch()
    assert "base is a checkpoint, not a run: add --run" in refused("base", "--engine", engine)


def installed(engine: str) -> bool:
    return (spec := find_spec(engine)) is not None and spec.origin is not None


@pytest.mark.parametrize("engine", [name for name in ("vllm", "sglang") if not installed(name)])
def test_without_the_engine_it_says_what_to_install(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a folder of the engine's name is not the engine
    (tmp_path / engine).mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert f"[{engine}]'" in refused("--engine", engine, "run", PATH="")


def test_it_serves_only_versions_of_trusted_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    with publisher(tmp_path / "run", checkpoint(tmp_path / "model", model)) as it:
        it.publish(model).result(60)
    # the command sets it for all its processes
    monkeypatch.setenv("DELTAWIRE_TRUST", "")
    monkeypatch.setenv("DELTAWIRE_STATE", str(tmp_path / "state"))
    result = CliRunner().invoke(app, ["serve", str(tmp_path / "run"), "--port", "0", "--trust", f"ed25519:{64 * '0'}"])
    assert result.exit_code == 3
    assert "version 0 of" in result.stderr
    assert "is not signed" in result.stderr


def test_a_refusal_of_delegated_keys_needs_a_trusted_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said at once, not by an engine after minutes; with a key, the engine's processes find it in the environment."""
    model = tiny_model()
    with publisher(tmp_path / "run", checkpoint(tmp_path / "model", model)) as it:
        it.publish(model).result(60)
    monkeypatch.setenv("DELTAWIRE_TRUST", "")
    monkeypatch.setenv("DELTAWIRE_REFUSE_DELEGATED", "")
    command = ["serve", str(tmp_path / "run"), "--port", "0", "--refuse-delegated"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert "no key is trusted: name the run's public key" in result.stderr
    result = CliRunner().invoke(app, [*command, "--trust", f"ed25519:{64 * '0'}"])
    assert "is not signed" in result.stderr
    assert os.environ["DELTAWIRE_REFUSE_DELEGATED"] == "1"
