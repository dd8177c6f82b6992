"""Waiting for servers, by what they answer to GET /deltawire/status."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from deltawire.errors import Misconfigured, VersionRefused
from deltawire.frameworks import servers
from deltawire.frameworks.servers import wait_for
from deltawire_wordle.processes import free_port

FOLLOWS = {"run": "s3://runs/policy", "state": "healthy", "reason": "", "version": 3}


class Server:
    """Answers one status after the other, and the last one again and again."""

    def __init__(self) -> None:
        self.answers: list[Any] = [FOLLOWS]
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = outer.answers[0] if len(outer.answers) == 1 else outer.answers.pop(0)
                self.send_response(200 if self.path == "/deltawire/status" else 404)
                self.end_headers()
                self.wfile.write(found if isinstance(found, bytes) else json.dumps(found).encode())

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.http.shutdown()
    made.http.server_close()


def test_it_returns_when_all_servers_have_the_version(
    server: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "SAY_EVERY_S", 0)
    starting = {**FOLLOWS, "version": None, "state": "starting", "reason": "catching up"}
    server.answers = [starting, {**FOLLOWS, "version": 2}, {**FOLLOWS, "version": 5}]
    with caplog.at_level(logging.WARNING):
        (status, again) = wait_for([server.url, f"{server.url}/"], 3, 10)
    assert status["version"] == again["version"] == 5
    assert f"waiting for version 3 on {server.url}: it is starting, at None. catching up" in caplog.text


def test_without_a_version_it_returns_what_servers_answer_now(server: Server) -> None:
    server.answers = [{**FOLLOWS, "version": None}]
    nobody = f"http://127.0.0.1:{free_port()}"
    first, second = wait_for([server.url, nobody], None, 10)
    assert (first["version"], second["version"], second["state"]) == (None, None, "not there")


def test_a_server_of_another_run_is_named_once(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for ours in ("s3://runs/policy", "s3://eu/policy,s3://runs/policy", "s3://runs/today", "s3://runs/today"):
            wait_for([server.url], 3, 10, ours)
    (warned,) = [record.getMessage() for record in caplog.records if "follows" in record.getMessage()]
    assert f"server {server.url} follows s3://runs/policy, and the trainer publishes to s3://runs/today" in warned


def test_a_server_that_does_not_get_there_is_named_with_its_reason(server: Server) -> None:
    with pytest.raises(VersionRefused, match=r"did not reach version 4 in 0\.1 s: it is healthy, at 3"):
        wait_for([server.url], 4, 0.1)
    server.answers = [{**FOLLOWS, "state": "failed", "reason": "another model"}]
    with pytest.raises(VersionRefused, match=r"it is failed, at 3\. another model"):
        wait_for([server.url], 4, 60)
    with pytest.raises(
        VersionRefused, match=r"did not reach version 0 in 0\.1 s: it is not there, at None\. .*refused"
    ):
        wait_for([f"http://127.0.0.1:{free_port()}"], 0, 0.1)


@pytest.mark.parametrize("answer", [b"<html>", {}, [], {**FOLLOWS, "run": None}])
def test_what_follows_no_run_is_refused_at_once(server: Server, answer: Any) -> None:
    server.answers = [answer]
    with pytest.raises(Misconfigured, match=r"start it with `deltawire serve --engine vllm RUN`, or with VLLM_PLUGINS"):
        wait_for([server.url], 0, 60)
    with pytest.raises(Misconfigured, match="404"):
        wait_for([f"{server.url}/v1"], 0, 60)
