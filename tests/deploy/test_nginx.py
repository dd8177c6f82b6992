"""A real nginx, configured by `deltawire fleet` and docs/fleet.md, in front of two real servers."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from deltawire.bucket.run import Run
from deltawire.fleet import Fleet, Member
from deltawire_wordle.processes import free_port
from servers import Server
from tests.docs.documents import blocks
from tests.engines.server.serving import published_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TOKEN = "correct-horse"
BODY = {"prompt": "hello", "temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def nginx() -> str:
    """Debian's nginx; installed for the slow tests."""
    found = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin")
    assert found, "apt-get install nginx-light"
    return found


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return published_run(tmp_path)


def serve(run: Path, log: Path, token_file: Path) -> Server:
    port = free_port()
    command = [sys.executable, "-m", "deltawire.cli", "serve", str(run), "--port", str(port), "--guard-all"]
    return Server([*command, "--token-file", str(token_file), "--poll", "0.1", "--threads", "1"], port, log=log)


@pytest.fixture
def two(run: Path, tmp_path: Path) -> Iterator[list[Server]]:
    (tmp_path / "token").write_text(TOKEN)
    with (
        serve(run, tmp_path / "a.log", tmp_path / "token") as a,
        serve(run, tmp_path / "b.log", tmp_path / "token") as b,
    ):
        for server in (a, b):
            server.wait(state="healthy")
        yield [a, b]


def configured(folder: Path, port: int) -> Path:
    """The block of docs/fleet.md as the whole configuration of an nginx of this folder."""
    (block,) = [block for block in blocks("docs/fleet.md") if block.language == "nginx"]
    code = block.code
    for printed, meant in (
        ("/etc/nginx/deltawire-upstream.conf", str(folder / "upstream.conf")),
        ("127.0.0.1:8080", f"127.0.0.1:{port}"),
        ("TOKEN", TOKEN),
    ):
        assert code.count(printed) == 1, printed
        code = code.replace(printed, meant)
    places = "".join(
        f"    {name}_temp_path {folder}/{name};\n" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    whole = f"daemon off;\npid {folder}/nginx.pid;\nerror_log {folder}/error.log info;\nevents {{}}\n"
    (folder / "nginx.conf").write_text(f"{whole}http {{\n    access_log {folder}/access.log;\n{places}{code}}}\n")
    return folder / "nginx.conf"


def answers(client: httpx.Client, count: int = 8) -> list[httpx.Response]:
    return [client.post("/v1/completions", json=BODY) for _ in range(count)]


def members(run: Path) -> list[Member]:
    fleet = Fleet(Run.open(str(run)))
    fleet.read()
    return fleet.members(None)


def test_two_servers_behind_one_address(nginx: str, run: Path, two: list[Server], tmp_path: Path) -> None:
    port, upstream = free_port(), tmp_path / "upstream.conf"
    conf = configured(tmp_path, port)
    reload = f"{nginx} -c {conf} -e {tmp_path / 'error.log'} -s reload"
    fleet = [sys.executable, "-m", "deltawire.cli", "fleet", str(run), "--nginx", str(upstream), "--fresh", "25"]
    fleet += ["--allow", "127.0.0.0/8"]
    while len([member for member in members(run) if member.serves()]) < 2:
        time.sleep(0.1)
    subprocess.run(fleet, check=True)
    assert upstream.read_text().count("server 127.0.0.1:") == 2
    proxy = Server([nginx, "-c", str(conf), "-e", str(tmp_path / "error.log")], port, log=tmp_path / "nginx.log")
    watching = Server([*fleet, "--watch", "--every", "0.2", "--exec", reload], 0, log=tmp_path / "fleet.log")
    with proxy, watching, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        proxy.wait(state="healthy")

        # the proxy adds the token, which the servers ask for
        assert httpx.post(two[0].url + "/v1/completions", json=BODY).status_code == 401
        (first, *rest) = answers(client)
        assert first.status_code == 200
        assert {answer.text.partition('"choices"')[2] for answer in rest} == {first.text.partition('"choices"')[2]}
        # but opens no control route
        assert client.post("/pause").status_code == client.get("/deltawire/status").status_code == 404

        # both are used
        assert all(metric(server, "deltawire_generated_tokens_total") > 0 for server in two)

        # streams come in pieces, not at their end, and bounds pass through
        with client.stream("POST", "/v1/completions", json={**BODY, "stream": True, "max_tokens": 200}) as stream:
            assert stream.headers["deltawire-version"] == "0"
            pieces = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
        assert len(pieces) > 100
        asked = {"deltawire-exact-version": "0"}
        assert client.post("/v1/completions", json=BODY, headers=asked).status_code == 200

        # one server dies: no request fails, and after a while it is left out
        two[0].kill()
        assert {answer.status_code for answer in answers(client, 20)} == {200}
        address = two[1].url.removeprefix("http://")
        while upstream.read_text().count("server 127") != 1:
            time.sleep(0.2)
        assert f"server {address} " in upstream.read_text()
        assert {answer.status_code for answer in answers(client)} == {200}

        # the other ends in order: it takes its address back, and the last configuration stays
        two[1].end()
        assert address not in {member.address for member in members(run)}
        while "none is healthy" not in watching.said:
            time.sleep(0.2)
        assert f"server {address} " in upstream.read_text()


def metric(server: Server, name: str) -> float:
    text = httpx.get(server.url + "/metrics", headers={"Authorization": f"Bearer {TOKEN}"}).text
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))
