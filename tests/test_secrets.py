"""Secrets are planted in the environment, everything is made to fail, and everything that was said is searched."""

from __future__ import annotations

import http.server
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import deltawire as dw
from deltawire.bucket.prune import Retention, prune
from deltawire.bucket.run import Run
from deltawire.core.errors import DeltawireError, PublishFailed
from deltawire.doctor import examine_store as examine
from deltawire.store import ObjectStore, Store, open_store
from deltawire_wordle.seaweed import SeaweedFS
from support import blank, history, publish

KEY = "AKIAPLANTEDKEYID"
SECRET = "pl4nted/secret+key/that%20must=never/show"
TOKEN = "FwoGPLANTEDsessionTOKENthatMustNeverShow"
HF = "hf_PLANTEDtokenThatMustNeverShow"
PLANTED = (SECRET, TOKEN, HF, "pl4nted", "PLANTEDsession", "PLANTEDtoken")


def silent_about_secrets(*said: str) -> None:
    for text in said:
        for secret in PLANTED:
            assert secret not in text, f"a secret in {text[:2000]!r}"


def everything_of(error: BaseException | None) -> Iterator[str]:
    """An exception as any reporter could show it: its words, its parts, what caused it, what was going on."""
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        found = waiting.pop()
        if found is None or id(found) in seen:
            continue
        seen.add(id(found))
        yield from (str(found), repr(found), repr(found.args), repr(getattr(found, "__dict__", {})))
        yield from getattr(found, "__notes__", ())
        waiting += [found.__cause__, found.__context__]


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    status, code = 403, "AccessDenied"
    requests = 0


class Handler(http.server.BaseHTTPRequestHandler):
    """Says no, and like the real S3 repeats in its answer what it was asked, the token included."""

    protocol_version = "HTTP/1.1"
    server: Server

    def do(self) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        self.server.requests += 1
        asked = "\n".join(f"{name}:{value}" for name, value in self.headers.items())
        body = (
            f"<Error><Code>{self.server.code}</Code><Message>as told</Message><AWSAccessKeyId>{KEY}</AWSAccessKeyId>"
            f"<CanonicalRequest>{self.command}\n{self.path}\n{asked}</CanonicalRequest>"
            f"<Token-0>{self.headers.get('x-amz-security-token')}</Token-0></Error>"
        ).encode()
        self.send_response(self.server.status)
        self.send_header("content-length", str(len(body)))
        self.send_header("connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = do

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def planted(server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    for name in [name for name in os.environ if name.startswith(("AWS_", "HF_"))]:
        monkeypatch.delenv(name)
    environment = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}",
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_SESSION_TOKEN": TOKEN,
        "HF_TOKEN": HF,
        "HOME": str(tmp_path),
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return environment


FAILURES = [
    (403, "AccessDenied"),
    (403, "SignatureDoesNotMatch"),
    (403, "InvalidAccessKeyId"),
    (403, "RequestTimeTooSkewed"),
    (400, "InvalidToken"),
    (400, "AuthorizationHeaderMalformed"),
    (404, "NoSuchBucket"),
    (404, "NoSuchKey"),
    (412, "PreconditionFailed"),
    (416, "InvalidRange"),
    (500, "InternalError"),
    (501, "NotImplemented"),
    (507, "InsufficientStorage"),
]


def ways_to_fail(store: Store) -> list[Callable[[], object]]:
    weights = history(1)[0]

    def publishing() -> None:
        with dw.Publisher(store) as publisher:
            publisher.publish(weights).result(120)

    return [
        lambda: store.get("key"),
        lambda: store.get_if_changed("key", '"etag"'),
        lambda: store.get_range("key", 0, 1),
        lambda: store.head("key"),
        lambda: store.put("key", b"x"),
        lambda: store.put("key", lambda: iter([bytes(20 << 20)])),
        lambda: store.put_if_absent("key", b"x"),
        lambda: [*store.list()],
        lambda: store.delete("key"),
        lambda: dw.Replica(store).sync(blank(weights)),
        lambda: Run.open(store),
        publishing,
    ]


@pytest.mark.parametrize(("status", "code"), FAILURES)
def test_stores_publishers_and_replicas(
    planted: dict[str, str], server: Server, caplog: pytest.LogCaptureFixture, status: int, code: str
) -> None:
    caplog.set_level(logging.DEBUG)
    server.status, server.code = status, code
    store = ObjectStore.from_url("s3://bucket/run", retries=0)
    silent_about_secrets(store.url, repr(store), repr(vars(store)))
    failed = 0
    for fail in ways_to_fail(store):
        try:
            fail()
        except (DeltawireError, PublishFailed) as error:
            failed += 1
            silent_about_secrets(*everything_of(error))
    assert failed >= 8
    assert server.requests >= failed
    report = examine(store)
    assert not report.healthy
    silent_about_secrets(caplog.text, repr(report))


def test_a_follower_that_goes_on(planted: dict[str, str], server: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    stop = threading.Event()
    replica = dw.Replica(ObjectStore.from_url("s3://bucket/run", retries=0))
    follower = threading.Thread(target=lambda: [*replica.follow(blank(history(1)[0]), poll=0.001, stop=stop)])
    follower.start()
    while "still at version None" not in caplog.text:
        assert follower.is_alive()
        time.sleep(0.01)
    stop.set()
    follower.join()
    silent_about_secrets(caplog.text, replica.trouble)


def test_addresses_with_a_secret_in_them(planted: dict[str, str]) -> None:
    for url in (
        f"s3://{KEY}:{TOKEN}@bucket/run",
        f"s3://bucket/run?secret_access_key={TOKEN}",
        f"s3://bucket/run?{TOKEN}",
        f"s3://bucket/run?endpoint=http://me:{TOKEN}@127.0.0.1:1",
        f"s3://bucket/run?endpoint=http://127.0.0.1:1?sig={TOKEN}",
        f"az://bucket/run?sig={TOKEN}",
    ):
        with pytest.raises(DeltawireError) as caught:
            open_store(url)
        silent_about_secrets(*everything_of(caught.value))


def test_what_is_stored(planted: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with keys that work: no object, heartbeat of a replica in trouble included, has them."""
    with SeaweedFS(tmp_path / "weed", access_key=KEY, secret_key=SECRET) as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("AWS_SESSION_TOKEN")
        versions = history(3)
        store = open_store("s3://deltawire/run")
        publish(store, versions)
        live = blank(versions[0])
        replica = dw.Replica(store, heartbeat=0.001, id="r")
        assert replica.sync(live) == 2
        prune(Run.open(store), Retention(last=1, grace=0))
        store.put("versions/000003.json", b"{")
        with pytest.raises(DeltawireError):
            replica.sync(live, 3)
        kept = [(info.key, store.get(info.key).data) for info in store.list()]
        assert {key.partition("/")[0] for key, _ in kept} >= {"run.json", "head.json", "versions", "replicas", "deltas"}
        for key, data in kept:
            silent_about_secrets(key, data.decode("latin-1"))


COMMANDS = [
    ["publish", "{checkpoint}", "{run}"],
    ["checkout", "{run}", "-o", "{out}"],
    ["log", "{run}"],
    ["show", "{run}@1"],
    ["verify", "{run}"],
    ["follow", "{run}", "--exec", "true", "--once"],
    ["prune", "{run}", "--apply"],
    ["doctor", "{run}"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=[command[0] for command in COMMANDS])
def test_the_command_line(planted: dict[str, str], server: Server, tmp_path: Path, command: list[str]) -> None:
    """In this process for speed; stdout, stderr and logs in full detail, text and JSON."""
    from typer.testing import CliRunner

    from deltawire.cli import app

    (tmp_path / "checkpoint").mkdir()
    header = json.dumps({"w": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "checkpoint/model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    names = {"checkpoint": tmp_path / "checkpoint", "run": "s3://bucket/run", "out": tmp_path / "out"}
    args = [part.format(**names) for part in command]
    for status, code in ((403, "SignatureDoesNotMatch"), (400, "AuthorizationHeaderMalformed"), (404, "NoSuchBucket")):
        server.status, server.code = status, code
        for more in ([], ["--json"]):
            result = CliRunner().invoke(app, ["-vv", *args, *more])
            assert result.exit_code not in (0, None)
            silent_about_secrets(result.output, result.stdout, result.stderr)
            silent_about_secrets(*everything_of(result.exception))


def test_a_crash_shows_no_secret_either(planted: dict[str, str], server: Server) -> None:
    """An uncaught error in a program of the user's: the whole traceback on stderr."""
    server.code = "SignatureDoesNotMatch"
    code = "import deltawire as dw; dw.Replica('s3://bucket/run').sync({})"
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", code],
        env=os.environ | planted,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode != 0
    assert "PermissionDenied: s3://bucket/run/run.json: 403 Forbidden: SignatureDoesNotMatch" in done.stderr
    silent_about_secrets(done.stdout, done.stderr)
