"""What clients and checkpoints may not do: hold the server up, fill its memory, pass its token, run their code."""

from __future__ import annotations

import ast
import contextlib
import json
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from pydantic import ValidationError
from serving import checkpoint, published_run, serving, tiny_model, tokenizer
from starlette.datastructures import URL
from starlette.requests import HTTPConnection

from deltawire.engines.server import Connections, RolloutServer, app
from deltawire.engines.server.loading import UntrustedCode, load
from deltawire.engines.server.requests import ChatRequest

TOKEN = "correct horse"
SAID = [{"role": "user", "content": "hi"}]
MOST = 12
SLOW_BODY = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 60\r\n\r\n{"
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published_run(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def served(run: Path) -> Iterator[tuple[RolloutServer, httpx.Client]]:
    """Waits for its clients for longer than any test takes."""
    limits = Connections(MOST, *[600.0] * 4)
    with serving(run, token=TOKEN, max_body=0.2, max_batch=4, max_queue=40, connections=limits) as it:
        yield it


@pytest.fixture(scope="module")
def impatient(run: Path) -> Iterator[RolloutServer]:
    """Waits for no client."""
    with serving(run, connections=Connections(MOST, *[0.2] * 4)) as (server, _):
        yield server


@pytest.fixture
def client(served: tuple[RolloutServer, httpx.Client]) -> httpx.Client:
    return served[1]


@pytest.fixture
def wire(served: tuple[RolloutServer, httpx.Client]) -> Iterator[Any]:
    """Opens raw connections."""
    with ExitStack() as opened:

        def connect(server: RolloutServer = served[0]) -> socket.socket:
            return opened.enter_context(socket.create_connection(("127.0.0.1", server.port), 120))

        yield connect


def spoken(connection: socket.socket, request: bytes) -> str:
    """All that comes back until the server closes."""
    connection.sendall(request)
    received = b""
    while part := connection.recv(65536):
        received += part
    return received.decode()


def connections(server: RolloutServer) -> int:
    """How many the server has open."""
    return len(server._server.server_state.connections)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.005)


# ── the token ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("host", ["x/health?", "x/v1/models#", "127.0.0.1/health?a="])
def test_the_host_header_does_not_pass_the_token(wire: Any, host: str) -> None:
    request = f"GET /deltawire/status HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
    assert spoken(wire(), request.encode()).startswith(("HTTP/1.1 401", "HTTP/1.1 400"))


def test_the_token_check_reads_no_url_made_of_headers(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    # what starlette before 1 made of the Host header x/health?
    monkeypatch.setattr(HTTPConnection, "url", property(lambda _: URL("http://x/health?/deltawire/status")))
    assert client.get("/deltawire/status").status_code == 401


# ── chat templates ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_only_variables_of_the_template_may_be_set(client: httpx.Client) -> None:
    def ask(**variables: Any) -> httpx.Response:
        body = {"messages": SAID, "max_tokens": 2, "return_token_ids": True, "chat_template_kwargs": variables}
        return client.post("/v1/chat/completions", json=body)

    assert ask(loud=True).json()["prompt_token_ids"] == tokenizer().encode("user:hi!a:")
    assert ask().json()["prompt_token_ids"] == tokenizer().encode("user:hi.a:")
    for other in (
        {"chat_template": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"},
        {"padding": "max_length", "max_length": 100_000_000},
        {"return_tensors": "pt"},
        {"tokenize": False},
        {"messages": []},
        {"bos_token": "x"},
        {"conversations": [], "loud": True},
    ):
        answer = ask(**other)
        assert answer.status_code == 400, other
        assert "is no variable of this chat template; it has: loud" in answer.json()["error"]["message"]
    assert ask(loud="x" * 9000).status_code == 413


# ── bodies ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "body, status",
    [
        (b'{"prompt": "\xff"}', 400),
        (b'{"prompt": "\xed\xa0\x80"}', 400),
        (b'{"prompt": "\\ud800"}', 400),
        (b'{"prompt": "\\ud800x"}', 400),
        (b'{"prompt": NaN}', 400),
        (b'{"prompt": "a", "temperature": NaN}', 400),
        (b'{"prompt": "a", "temperature": 1e999}', 400),
        (b'{"prompt": "a", "seed": ' + b"9" * 30 + b"}", 400),
        (b'{"prompt": "a", "max_tokens": ' + b"9" * 6000 + b"}", 400),
        (b'{"prompt": [' + b"9" * 6000 + b"]}", 400),
        (b'{"prompt": [99999999999999999999999]}', 400),
        (b'{"prompt": ' + b"[" * 60_000 + b"]" * 60_000 + b"}", 400),
        (b'{"prompt": "a", "logit_bias": ' + b'{"a":' * 900 + b"1" + b"}" * 900 + b"}", 400),
        (b'{"prompt": {"a": 1}}', 400),
        (b'{"prompt": null}', 400),
        (b'["prompt"]', 400),
        (b"null", 400),
        (b"", 400),
        (b"\x00", 400),
        (b'{"prompt": "a", "stop_token_ids": [' + b"1," * 300 + b"1]}", 400),
        (b'{"prompt": "a", "stop": 7}', 400),
        (b'{"prompt": "a", "stream_options": 7, "stream": true}', 400),
        (b'{"prompt": "a", "stream_options": {"include_usage": "yes"}, "stream": true}', 400),
        (b'{"prompt": "a", "unknown": Infinity}', 400),
        (b'{"prompt": [' + b'"a",' * 41 + b'"a"]}', 400),
        (b'{"prompt": "' + b"a" * 5000 + b'"}', 413),
        (b'{"prompt": ["a", "' + b"a" * 5000 + b'"]}', 413),
        (b'{"prompt": "' + b"a" * 300_000 + b'"}', 413),
        (b'{"prompt": "a\\u0000b", "seed": -9223372036854775808, "top_k": 9223372036854775807}', 200),
        (b'{"prompt": "a", "temperature": 1e-30, "min_p": 1, "top_p": 1e-300}', 200),
        (b'{"prompt": "a", "temperature": 1e300}', 200),
    ],
)
def test_no_body_ends_in_a_500(client: httpx.Client, body: bytes, status: int) -> None:
    answer = client.post("/v1/completions", content=body)
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/json"), answer.text
    if status != 200:
        assert answer.json()["error"]["code"] == status


@pytest.mark.parametrize(
    "messages, status",
    [
        ([], 400),
        ([{}], 200),
        ([{"role": None, "content": None}], 200),
        ([{"role": "user", "content": {"a": [1, {"b": None}]}}], 200),
        ([{"role": "user", "content": "\x00\x1f"}], 200),
        ([{"role": "user", "content": [7]}], 400),
        ([{"role": "user", "content": "x" * 5000}], 413),
        (["hi"], 400),
        ("hi", 400),
        ([SAID], 400),
    ],
)
def test_no_chat_ends_in_a_500(client: httpx.Client, messages: Any, status: int) -> None:
    for more in ({}, {"continue_final_message": True}):
        answer = client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 2, **more})
        assert answer.status_code in (status, 400), answer.text


@pytest.mark.parametrize("wrong", [{"messages": [1] * 5000}, {"messages": SAID, "stop": [1] * 5000}])
def test_what_is_wrong_thousands_of_times_is_counted_a_few_times(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as error:
        ChatRequest.model_validate(wrong)
    assert error.value.error_count() < 20


def test_large_requests_are_not_all_held_at_once(served: tuple[RolloutServer, httpx.Client], wire: Any) -> None:
    server, client = served
    server.held += app.BODIES_AT_ONCE * server.max_body
    try:
        answer = client.post("/v1/completions", json={"prompt": "a"})
    finally:
        server.held -= app.BODIES_AT_ONCE * server.max_body
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 200
    assert server.held == 0


# ── slow clients ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_request_that_does_not_arrive_is_given_up(impatient: RolloutServer, wire: Any) -> None:
    for request in (b"", b"POST /v1/comp", SLOW_BODY):
        told = ""
        while not told:
            # a request that is sent after the server has closed is answered by a reset
            with contextlib.suppress(ConnectionError):
                told = spoken(wire(impatient), request)
        assert told.startswith("HTTP/1.1 408")


def test_a_client_that_drips_its_header_gains_nothing(impatient: RolloutServer, wire: Any) -> None:
    slow, told = wire(impatient), b""
    with contextlib.suppress(ConnectionError):  # one drip after the server has closed, and the kernel drops the answer
        while not select.select([slow], [], [], 0.05)[0]:
            slow.sendall(b"G")
        told = slow.recv(65536)
    assert told.startswith(b"HTTP/1.1 408") or told == b""


def test_half_open_connections_keep_nobody_out(wire: Any) -> None:
    for number in range(4 * MOST):
        wire().sendall(b"GET /health HT" if number % 2 else SLOW_BODY)
        assert spoken(wire(), HEALTH).startswith("HTTP/1.1 200")


def test_where_all_connections_have_requests_another_is_told_so(
    served: tuple[RolloutServer, httpx.Client], wire: Any, client: httpx.Client
) -> None:
    server, _ = served
    # those of the tests before are gone, but for the client's own
    until(lambda: connections(server) <= 1)
    server.scheduler.pause("keep")
    try:
        body = json.dumps({"prompt": "a", "max_tokens": 2}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        asking = [wire() for _ in range(MOST)]
        for connection in asking:
            connection.sendall(head + body)
        until(lambda: server.scheduler.waiting == MOST)
        refused = spoken(wire(), b"")
        assert refused.startswith("HTTP/1.1 503")
        assert refused.endswith("try again now")
    finally:
        server.scheduler.resume()
    for connection in asking:
        assert connection.recv(12) == b"HTTP/1.1 200"


def test_a_client_that_does_not_read_is_disconnected(run: Path, wire: Any) -> None:
    with serving(run, connections=Connections(MOST, *[600.0] * 3, write=0.2)) as (server, _):
        deaf = wire(server)
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        deaf.setblocking(False)
        until(lambda: connections(server) == 1)

        def is_gone() -> bool:
            # judged by the server: what a client notices of it depends on its kernel
            with contextlib.suppress(OSError):
                deaf.send(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 1000)
            return connections(server) == 0

        until(is_gone)
        assert server.health == ("healthy", "")


# ── deadlines ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_answer_that_takes_too_long_is_ended(run: Path) -> None:
    with serving(run, request_timeout=0.3) as (server, client):
        server.scheduler.pause("keep")
        answer = client.post("/v1/completions", json={"prompt": "a"})
        assert answer.status_code == 504
        assert "--request-timeout" in answer.json()["error"]["message"]
        with client.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}) as stream:
            assert '"finish_reason":"abort"' in stream.read().decode()
        assert server.scheduler.waiting == 0


def test_tokenizing_that_never_ends_holds_up_neither_others_nor_the_end(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "PREPARE_S", 0.3)
    stuck = threading.Event()

    class Stuck:
        def encode(self, *_: Any, **__: Any) -> list[int]:
            stuck.wait()
            return []

    try:
        with serving(run) as (server, client):
            server.reader = server.reader.__class__(Stuck(), None, 256, 10)
            for _ in range(app.PREPARED_AT_ONCE + 1):
                answer = client.post("/v1/completions", json={"prompt": "a"})
                assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert client.get("/health").status_code == 200
    finally:
        stuck.set()


# ── code ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "file, said, named",
    [
        ("config.json", {"model_type": "mine", "auto_map": {"AutoConfig": "evil.Config"}}, "evil.Config"),
        ("config.json", {"attn_implementation": "someone/attention"}, "someone/attention"),
        (
            "tokenizer_config.json",
            {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}},
            "evil.Tokenizer",
        ),
    ],
)
def test_code_of_a_checkpoint_is_never_run(
    file: str, said: dict[str, Any], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint(tmp_path / "model", tiny_model())
    written = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps({**written, **said}))
    (folder / "tokenizer.json").unlink()
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    # a person at a terminal who would say yes
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(UntrustedCode, match=named):
        load(str(folder), dtype=torch.float32)
    assert not (tmp_path / "ran").exists()


def test_code_that_transformers_has_itself_is_used_instead(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model", tiny_model())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModelForCausalLM": "evil.Model"}}))
    assert type(load(str(folder), dtype=torch.float32).model).__name__ == "Qwen3ForCausalLM"


def test_nothing_in_the_project_trusts_remote_code() -> None:
    """Where it is not said, transformers asks a person at a terminal."""
    root = Path(__file__).parents[3]
    careless = []
    for path in (file for place in ("src", "examples", "benchmarks") for file in (root / place).rglob("*.py")):
        text = path.read_text()
        # a call that is looked for below names one of them
        if "trust_remote_code" not in text and "Auto" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                loads = ast.unparse(node.func).startswith("Auto") and node.func.attr in (
                    "from_pretrained",
                    "from_config",
                )
                said = [keyword for keyword in node.keywords if keyword.arg == "trust_remote_code"]
                if (loads and not said) or any(ast.unparse(keyword.value) != "False" for keyword in said):
                    careless.append(f"{path.relative_to(root)}:{node.lineno}")
    assert not careless
