"""The servers under fuzzing, on real sockets in this process: the rollout server and the environment server."""

from __future__ import annotations

import http.client
import json
import socket
import tempfile
import threading
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import mutate
from targets import Case, Wrong

from deltawire.core.errors import DeltawireError

PATIENCE = 60.0
"""Seconds that a client waits for an answer."""


class Answered(DeltawireError):
    """A server refused a request with a clear status."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")


def check_status(status: int) -> None:
    """4xx is a clear refusal and 503 asks to try again; every other server error is a finding."""
    if status >= 500 and status != 503:
        raise Wrong(f"the server answered {status}")
    if status >= 400:
        raise Answered(status)


def request(port: int, method: str, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)) as connection:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()


def send_raw(port: int, data: bytes) -> int | None:
    """Bytes as they are; the status of the first answer, None where the server only closed the connection."""
    with socket.create_connection(("127.0.0.1", port), PATIENCE) as connection:
        with suppress(OSError):  # it may have closed the connection already
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
        got = b""
        with suppress(ConnectionError):
            while len(got) < 1 << 20 and (part := connection.recv(1 << 16)):
                got += part
    line = got.split(b"\r\n", 1)[0].split()
    return int(line[1]) if len(line) > 1 and line[1].isdigit() else None


def raw_request(rng: Random, method: str, path: str, body: bytes, token: str) -> bytes:
    """A whole HTTP request with something odd in its head."""
    size = rng.choice((len(body), len(body), len(body), 0, -1, len(body) + 1, 10**9, 10**30, "x"))
    lines = [
        f"{method} {path} HTTP/{rng.choice(('1.1', '1.1', '1.0', '2', '9.9'))}",
        f"Host: {rng.choice(('localhost', 'x/health?', '', 'a' * 3000, '[::1', 'x/v1/models#'))}",
        rng.choice((f"Content-Length: {size}", "Transfer-Encoding: chunked", f"Content-Length: {len(body)}")),
        rng.choice(("", f"Authorization: Bearer {token}", "Authorization: \xff", "Authorization: Bearer")),
        rng.choice(("", "Expect: 100-continue", "Connection: upgrade", "Content-Encoding: gzip", "X: " + "y" * 70_000)),
    ]
    head = "\r\n".join(line for line in lines if line) + "\r\n\r\n"
    data = head.encode("latin-1", "replace") + body
    return mutate.of_bytes(rng, data) if rng.random() < 0.5 else data


class Rollouts:
    """The built-in rollout server: completions, chat, control routes, raw HTTP."""

    kinds = ("completions", "chat", "control", "http")
    _TOKEN = "correct horse"
    _CONTROL = (
        "GET /health", "GET /v1/models", "GET /metrics", "GET /is_paused", "POST /pause", "POST /resume",
        "GET /deltawire/status", "GET /deltawire/fingerprint", "POST /deltawire/pin", "POST /deltawire/unpin",
    )  # fmt: skip
    _COMPLETIONS: tuple[Any, ...] = (
        {"prompt": "hello", "max_tokens": 4, "temperature": 0, "logprobs": 2, "n": 2, "stop": ["x", "yz"]},
        {"prompt": [[5, 6, 7], [8]], "max_tokens": 3, "seed": 7, "top_p": 0.9, "top_k": 5, "min_p": 0.1,
         "return_token_ids": True, "stop_token_ids": [4], "ignore_eos": True, "min_tokens": 1},
        {"prompt": ["a", "b"], "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 3,
         "add_special_tokens": False, "echo": True, "model": "letters", "logit_bias": None, "user": "me"},
    )  # fmt: skip
    _CHATS: tuple[Any, ...] = (
        {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3, "logprobs": True, "top_logprobs": 2},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}, {"role": "a", "content": "b"}],
         "chat_template_kwargs": {"enable_thinking": False, "padding": "max_length", "max_length": 10**8},
         "continue_final_message": True, "add_generation_prompt": False, "max_completion_tokens": 3, "stream": True},
        {"messages": [{"role": "user", "content": "hello", "tool_calls": [{"id": "1"}]}], "tools": None,
         "chat_template_kwargs": {"chat_template": "{{ messages }}", "return_tensors": "np", "tokenize": False,
                                  "tools": [], "documents": [], "truncation": True, "return_dict": True}},
    )  # fmt: skip

    def __init__(self) -> None:
        from serving import checkpoint, publisher, serving, tiny_model

        self._stack = ExitStack()
        home = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="deltawire-fuzz-")))
        model = tiny_model()
        with publisher(home / "run", checkpoint(home / "model", model)) as made:
            made.publish(model).result(60)
        options: dict[str, Any] = {
            "token": self._TOKEN, "max_batch": 4, "max_queue": 32, "name": "letters", "max_model_len": 64,
        }  # fmt: skip
        server, _ = self._stack.enter_context(serving(home / "run", poll=1.0, **options))
        self._port = server.port
        self._guarded = {"authorization": f"Bearer {self._TOKEN}"}
        self._expected = self._greedy()

    def make(self, rng: Random, kind: str) -> Case:
        route, body = "/v1/completions", json.dumps(rng.choice(self._COMPLETIONS)).encode()
        if kind == "chat" or (kind == "http" and rng.random() < 0.3):
            route, body = "/v1/chat/completions", json.dumps(rng.choice(self._CHATS)).encode()
        if kind == "control":
            method, _, route = rng.choice(self._CONTROL).partition(" ")
            names = ("mode", "clear_cache", "dtype", "version", "wait", rng.choice(mutate.TEXTS)[:300])
            values = ("keep", "wait", "abort", "true", "bf16", "fp32", "0", "-1", rng.choice(mutate.TEXTS)[:300])
            query = "&".join(f"{_quoted(rng.choice(names))}={_quoted(rng.choice(values))}" for _ in range(2))
            body = mutate.of_json(rng, b'{"version": 0, "mode": "keep"}') if rng.random() < 0.5 else b""
            return Case(kind, f"{method} {route}?{query}", {"body": body})
        if kind == "http":
            body = body if rng.random() < 0.7 else mutate.of_json(rng, body)
            method, _, path = rng.choice((f"POST {route}", rng.choice(self._CONTROL))).partition(" ")
            return Case(kind, "raw", {"raw": raw_request(rng, method, path, body, "wrong horse")})
        return Case(kind, f"POST {route}", {"body": mutate.of_json(rng, body)})

    def run(self, case: Case) -> None:
        try:
            if case.action == "raw":
                status = send_raw(self._port, case.files["raw"] or b"")
                self._check_guard(case.files["raw"] or b"", status)
            else:
                method, _, path = case.action.partition(" ")
                headers = {"content-type": "application/json", **self._guarded}
                status, _ = request(self._port, method, path, case.files["body"] or b"", headers)
        finally:
            request(self._port, "POST", "/resume", b"", self._guarded)
            if self._greedy() != self._expected:
                raise Wrong("the server computes other tokens than before")
        check_status(status or 400)

    def _check_guard(self, raw: bytes, status: int | None) -> None:
        path = raw.split(b" ", 2)[1:2]
        if status == 200 and path and path[0].startswith((b"/pause", b"/resume", b"/deltawire")):
            raise Wrong("a control route answered without the token")

    def _greedy(self) -> Any:
        body = json.dumps({"prompt": "hello", "max_tokens": 3, "temperature": 0}).encode()
        status, answer = request(self._port, "POST", "/v1/completions", body, {})
        return status, [choice["text"] for choice in json.loads(answer).get("choices", ())]


class Environments:
    """The Wordle server: its HTTP routes and its WebSocket."""

    kinds = ("env", "websocket")
    _RESET: ClassVar = {"seed": 7, "episode_id": "e1"}
    _STEP: ClassVar = {"action": {"guess": "crane", "metadata": {}}, "seed": 7}
    _MESSAGES: tuple[Any, ...] = (
        {"type": "reset", "data": {"seed": 3, "episode_id": "e"}},
        {"type": "step", "data": {"guess": "crane", "metadata": {"a": 1}}},
        {"type": "state"},
        {"type": "close"},
    )

    def __init__(self) -> None:
        from deltawire.engines.access import listen
        from deltawire_wordle.env_server import create_app, make_server
        from deltawire_wordle.wordle import Rules
        from deltawire_wordle.wordlists import load

        listener = listen("127.0.0.1", 0)
        self._port = listener.getsockname()[1]
        up = threading.Event()
        server = make_server(create_app(Rules(load("toy"), 5), max_sessions=8, idle=5.0), 8)
        server.on_listening = up.set
        threading.Thread(target=server.run, args=([listener],), daemon=True).start()
        if not up.wait(PATIENCE):
            raise RuntimeError("the environment server did not start")

    def make(self, rng: Random, kind: str) -> Case:
        if kind == "websocket":
            messages = [json.dumps(self._MESSAGES[0]).encode()] * (rng.random() < 0.7)
            for _ in range(rng.randrange(1, 8)):
                made = json.dumps(rng.choice(self._MESSAGES)).encode()
                messages.append(mutate.of_json(rng, made) if rng.random() < 0.7 else made)
            how = rng.choice(("text", "text", "text", "binary"))
            return Case(kind, how, {str(number): message for number, message in enumerate(messages)})
        route, value = rng.choice((("/reset", self._RESET), ("/step", self._STEP)))
        body = mutate.of_json(rng, json.dumps(value).encode())
        if rng.random() < 0.2:
            return Case(kind, "raw", {"raw": raw_request(rng, "POST", route, body, "x")})
        return Case(kind, f"POST {route}", {"body": body})

    def run(self, case: Case) -> None:
        if case.kind == "websocket":
            self._talk(case)
        elif case.action == "raw":
            check_status(send_raw(self._port, case.files["raw"] or b"") or 400)
        else:
            headers = {"content-type": "application/json"}
            status, body = request(self._port, "POST", case.action[5:], case.files["body"] or b"", headers)
            json.loads(body)
            check_status(status)

    def _talk(self, case: Case) -> None:
        from websockets.exceptions import ConnectionClosed
        from websockets.sync.client import connect

        refused = False
        try:
            with connect(f"ws://127.0.0.1:{self._port}/ws", open_timeout=PATIENCE, max_size=None) as session:
                for message in case.files.values():
                    text = None if case.action == "binary" else _text(message or b"")
                    session.send((message or b"") if text is None else text)
                    kind = json.loads(session.recv(timeout=PATIENCE))["type"]
                    if kind not in ("observation", "state", "error"):
                        raise Wrong(f"an answer of the type {kind!r}")
                    refused |= kind == "error"
        except ConnectionClosed as closed:
            code = closed.rcvd.code if closed.rcvd else 1006
            if code not in (1000, 1001, 1007, 1009, 1013):
                raise Wrong(f"the session was closed with {code}") from None
        if refused:
            raise Answered(400)


def _text(message: bytes) -> str | None:
    with suppress(UnicodeDecodeError):
        return message.decode()
    return None


def _quoted(text: str) -> str:
    from urllib.parse import quote

    return quote(text.encode("utf-8", "surrogatepass"), safe="")
