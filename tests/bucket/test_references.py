"""A manifest may name a model on the Hub as the start of its run. It is fetched only if the run explains its size."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

COMMIT = "0" * 40
FETCH = """
import sys
from deltawire.bucket.references import find_reference
from deltawire.core.errors import ReferenceUnavailable
for line in sys.stdin:
    try:
        folder = find_reference("org/model", int(line))
        print(sorted((path.name, path.stat().st_size) for path in folder.iterdir()), flush=True)
    except ReferenceUnavailable as error:
        print(error, flush=True)
"""


class Hub(http.server.BaseHTTPRequestHandler):
    """What the Hub's client asks when it fetches a model of two small files."""

    protocol_version = "HTTP/1.1"
    files = {"config.json": b"{}", "model.safetensors": bytes(5000)}  # noqa: RUF012
    fetched: list[str] = []  # noqa: RUF012

    def answer(self, body: bytes) -> None:
        name = self.path.rpartition("/")[2]
        if self.path.startswith("/api/"):
            tree = [{"type": "file", "path": n, "size": len(d), "oid": n} for n, d in self.files.items()]
            siblings = [{"rfilename": name} for name in self.files]
            whole = {"id": "org/model", "sha": COMMIT, "siblings": siblings}
            body = json.dumps(tree if "/tree/" in self.path else whole).encode()
        self.send_response(200)
        self.send_header("x-repo-commit", COMMIT)
        self.send_header("etag", f'"{name}"')
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.answer(self.files.get(self.path.rpartition("/")[2], b""))

    def do_GET(self) -> None:
        name = self.path.rpartition("/")[2]
        if name in self.files:
            self.fetched.append(name)
        self.answer(self.files.get(name, b""))

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def client(home: Path, **environment: str) -> Iterator[Callable[[int], str]]:
    """A process, because the Hub's client reads its settings when it is imported. Asks for at most so many bytes."""
    with subprocess.Popen(
        [sys.executable, "-c", FETCH],
        env={**os.environ, "HF_HOME": str(home), **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        asked, answers = process.stdin, process.stdout

        def found(most: int) -> str:
            print(most, file=asked, flush=True)
            return answers.readline().strip()

        yield found


def test_a_model_of_the_hub_that_is_larger_than_the_run_explains(tmp_path: Path) -> None:
    whole = "[('config.json', 2), ('model.safetensors', 5000)]"
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        with client(tmp_path, HF_ENDPOINT=endpoint, HF_HUB_OFFLINE="0") as found:
            assert "5,002 bytes would be fetched; the run's model explains 5,001" in found(5001)
            assert Hub.fetched == []
            assert found(5002) == whole
            assert sorted(Hub.fetched) == ["config.json", "model.safetensors"]
            # what is here costs nothing, with and without the Hub
            assert found(0) == whole
        server.shutdown()
    with client(tmp_path, HF_ENDPOINT=endpoint, HF_HUB_OFFLINE="1") as found:
        assert found(0) == whole
