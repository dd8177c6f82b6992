"""`deltawire doctor --server`: what each mistake looks like from outside, and the next step."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from deltawire import doctor
from deltawire.cli import app
from deltawire.core.errors import BadURL
from deltawire.doctor import examine_server as examine
from deltawire.trainer import Publisher

GOOD = {
    "engine": "vllm", "model": "chat", "state": "healthy", "reason": "", "run": "file:///runs/chat", "version": 4,
    "newest": 4, "lag": 0, "pin": None, "signatures": "checked", "guard": "patch",
}  # fmt: skip


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the servers here answer late."""
    monkeypatch.setattr(doctor, "TIMEOUT_S", 120.0)


@contextmanager
def server(status: dict[str, Any] | None, token: str = "", control: int = 400) -> Iterator[str]:
    """Answers as an engine would. Without `status`, as one that knows nothing of deltawire."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/health":
                self._say(200 if status is None or status["state"] in ("healthy", "degraded") else 503, {})
            elif self.path == "/deltawire/status" and status is not None:
                self._say(200, status)
            else:
                self._say(404, {"detail": "Not Found"})

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            right = not token or self.headers.get("authorization") == f"Bearer {token}"
            self._say(control if right else 401, {})

        def _say(self, code: int, value: Any) -> None:
            body = json.dumps(value).encode()
            self.send_response(code)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_port}"
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


def findings(url: str, **options: Any) -> dict[str, tuple[str, str]]:
    return {finding.check: (finding.verdict, finding.detail) for finding in examine(url, **options).findings}


def test_a_server_that_follows_is_well() -> None:
    with server(GOOD) as url:
        found = findings(url)
    assert [*found] == ["answers", "plugin", "run", "state", "signatures", "version", "lag", "guard", "token"]
    assert {verdict for verdict, _ in found.values()} == {"ok"}


@pytest.mark.parametrize(
    "change, check, verdict, step",
    [
        ({"run": None, "state": "idle", "version": None}, "run", "failed", "DELTAWIRE_RUN"),
        ({"state": "degraded", "reason": "HashMismatch: bad"}, "state", "warning", "HashMismatch: bad; .*log"),
        ({"state": "paused", "reason": "NotRestored", "version": None}, "state", "failed", "restart"),
        ({"state": "starting", "version": None}, "version", "failed", "no version"),
        ({"newest": 9, "lag": 5}, "lag", "warning", "5 behind version 9"),
        ({"newest": 9, "lag": 5, "pin": 4}, "lag", "ok", "pinned"),
        ({"signatures": "unchecked"}, "signatures", "ok", "DELTAWIRE_TRUST"),
        ({"signatures": "own"}, "signatures", "ok", "links of delegated keys are refused"),
        ({"guard": "reload: the server quantizes"}, "guard", "warning", "quantizes; .*full load"),
    ],
)
def test_errors_name_the_next_step(change: dict[str, Any], check: str, verdict: str, step: str) -> None:
    with server({**GOOD, **change}) as url:
        found = findings(url)
    assert found[check][0] == verdict
    assert re.search(step, found[check][1])


def test_a_server_that_follows_adapters(tmp_path: Path) -> None:
    """With or without a run of its own; a run that is named is looked for among all."""
    place = tmp_path / "lora"
    with Publisher(place) as publisher:
        publisher.publish({"w": np.zeros(4, np.uint16)}).result(60)
    policy = {**GOOD, "name": "policy", "run": f"file://{place}", "version": 0, "newest": 0}
    judge = {**policy, "name": "judge", "run": "file:///runs/judge", "state": "failed", "reason": "no such base"}
    alone = {**GOOD, "run": None, "version": None, "newest": None, "adapters": [policy, judge]}
    with server(alone) as url:
        found = findings(url)
        assert found["policy: state"][0] == found["policy: lag"][0] == "ok"
        assert found["judge: state"][0] == "failed"
        assert "run" not in found
        found = findings(url, run=str(place))
        assert found["policy: version"] == ("ok", "0")
        assert not any(check.startswith("judge") for check in found)
        found = findings(url, run=str(tmp_path / "other"))
        assert found["run"][0] == "failed"
        assert "file:///runs/judge" in found["run"][1]
    with server({**GOOD, "adapters": [policy]}) as url:
        assert {"run", "version", "policy: version"} <= {*findings(url)}


def test_a_server_without_the_plugin() -> None:
    with server(None) as url:
        found = findings(url)
        assert found["plugin"][0] == "failed"
        assert "VLLM_PLUGINS=deltawire" in found["plugin"][1]
        result = CliRunner().invoke(app, ["doctor", "--server", url, "--json"])
    assert result.exit_code == 1
    value = json.loads(result.stdout)
    assert (value["healthy"], [check["check"] for check in value["checks"]]) == (False, ["answers", "plugin"])


def test_an_absent_server_and_invalid_answers() -> None:
    with server(GOOD) as url:
        pass
    found = findings(url)
    assert found["answers"][0] == "failed"
    assert found["answers"][1] == f"nothing listens at {url}: start the server, or check host and port"
    with pytest.raises(BadURL, match="http://host:port"):
        examine("localhost:8000")
    for wrong in ("ftp://x", "http://", "http://127.0.0.1:port", "http://127.0.0.1:99999", "http://[::1"):
        assert CliRunner().invoke(app, ["doctor", "--server", wrong]).exit_code == 2, wrong
    assert CliRunner().invoke(app, ["doctor"]).exit_code == 2


def test_what_listens_is_no_http_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"

        def greet() -> None:
            client, _ = listening.accept()
            with client, suppress(OSError):
                client.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
                # one that closes before it has read all of a request resets the connection
                while client.recv(65536):
                    pass

        thread = threading.Thread(target=greet)
        thread.start()
        found = findings(url)
        thread.join()
    assert found["answers"][0] == "failed"
    assert "does not speak HTTP: check the port" in found["answers"][1]
    with server(GOOD) as url:
        assert "does not speak TLS: write http://" in findings(url.replace("http:", "https:"))["answers"][1]
        assert "leave out /v1" in findings(f"{url}/v1")["plugin"][1]


def test_the_token() -> None:
    with server(GOOD, token="secret") as url:
        assert "control routes ask for one" in findings(url)["token"][1]
        assert findings(url, token="secret")["token"] == ("ok", "control routes ask for one, and take this one")
        wrong = findings(url, token="other")["token"]
        assert wrong[0] == "failed"
        assert "other" not in wrong[1].replace("another", "")
    with server(GOOD, control=403) as url:
        assert findings(url)["token"][0] == "warning"


def test_the_run_that_is_named(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    with Publisher(run) as publisher:
        for step in range(3):
            publisher.publish({"w": np.full((4, 4), step, np.uint16)}).result(60)
    with server({**GOOD, "run": f"file://{run}", "version": 1, "newest": 1}) as url:
        found = findings(url, run=run)
        assert found["run"] == ("ok", f"file://{run}, newest version 2")
        assert found["lag"][0] == "warning"  # the bucket knows better than the server
        assert findings(url, run=str(tmp_path / "rum"))["run"][0] == "failed"
        assert findings(url, run=f"{run}@-2")["version"] == ("ok", "1")
        assert findings(url, run=f"{run}@v0")["version"] == ("failed", "1, not 0 as asked for here")
        assert "it has versions 0 to 2" in findings(url, run=f"{run}@9")["run"][1]
    with server(GOOD) as url:
        assert "it follows file:///runs/chat, not" in findings(url, run=run)["run"][1]
