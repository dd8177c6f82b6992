"""fleet: servers as a table, JSON, and files for Prometheus, nginx and HAProxy."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

import pytest
from cli_support import invoke, invoke_json, run_until_sigterm

from deltawire.bucket.run import Run
from deltawire.cli import fleet
from deltawire.core import keys
from deltawire.core.manifest import Heartbeat, dump
from deltawire.store import open_store
from tests.docs.documents import blocks
from tests.test_deltawire_fleet import HOSTILE


def beat(run: Path, name: str, address: str, version: int | None = 3, healthy: bool = True) -> None:
    store = open_store(str(run))
    value = Heartbeat(Run.open(store).info.run, name, version, 3, healthy, time.time(), address=address)
    store.put(keys.replica(name), dump(value))


def test_a_table_and_json(run: Path) -> None:
    assert "0 replicas" in invoke("fleet", run).stdout
    beat(run, "a", "10.0.0.1:8000")
    assert "1 replica with" in invoke("fleet", run).stdout
    beat(run, "b", "127.0.0.1:8000", version=1)
    text = invoke("fleet", run).stdout
    assert "newest version 3, 2 replicas with a heartbeat" in text
    assert "127.0.0.1:8000 (needs --allow)" in text
    value = invoke_json("fleet", run)
    assert [(r["replica"], r["version"], r["lag"], r["health"], r["address"]) for r in value["replicas"]] == [
        ("a", 3, 0, "ok", "10.0.0.1:8000"),
        ("b", 1, 2, "ok", "127.0.0.1:8000"),
    ]


def test_proxies_get_healthy_and_recent_servers(run: Path) -> None:
    beat(run, "a", "10.0.0.1:8000")
    beat(run, "behind", "10.0.0.2:8000", version=1)
    beat(run, "failing", "10.0.0.3:8000", healthy=False)
    beat(run, "starting", "10.0.0.4:8000", version=None)
    beat(run, "elsewhere", "192.0.2.1:8000")
    text = invoke("fleet", run, "--nginx", "-", "--max-lag", 1, "--allow", "10.0.0.0/8", "--name", "chat").stdout
    assert [line.strip() for line in text.splitlines()] == [
        "# written by deltawire fleet",
        "upstream chat {",
        "least_conn;",
        "server 10.0.0.1:8000 max_fails=1 fail_timeout=10s;",
        "keepalive 64;",
        "}",
    ]
    text = invoke("fleet", run, "--haproxy", "-", "--allow", "10.0.0.0/8").stdout
    assert [line.strip() for line in text.splitlines() if "server" in line] == [
        "server s1 10.0.0.1:8000 check",
        "server s2 10.0.0.2:8000 check",
    ]
    # those that fail are scraped too
    (group,) = json.loads(invoke("fleet", run, "--prometheus-sd", "-").stdout)
    assert group["targets"] == [f"10.0.0.{n}:8000" for n in (1, 2, 3, 4)] + ["192.0.2.1:8000"]


def test_hostile_addresses_never_reach_a_file(run: Path, tmp_path: Path) -> None:
    beat(run, "good", "10.0.0.1:8000")
    for number, address in enumerate(HOSTILE):
        beat(run, f"hostile-{number}", address)
    files = {option: tmp_path / option for option in ("nginx", "haproxy", "prometheus-sd")}
    options = [part for option, file in files.items() for part in (f"--{option}", file)]
    invoke("fleet", run, *options, "--allow", "0.0.0.0/0", "--allow", "::/0", "--allow", "a", "--allow", "host")
    assert files["nginx"].read_text() == fleet.nginx_upstream(["10.0.0.1:8000"], "deltawire")
    assert files["haproxy"].read_text() == fleet.haproxy_backend(["10.0.0.1:8000"], "deltawire")
    assert json.loads(files["prometheus-sd"].read_text())[0]["targets"] == ["10.0.0.1:8000"]


def test_a_configuration_without_a_server_is_never_written(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "upstream.conf"
    refused = invoke("fleet", run, "--nginx", file, code=4)
    assert "of 0 replicas none is a server that is healthy" in refused.stderr
    assert not file.exists()


@pytest.mark.parametrize(
    "options",
    [
        ["--watch"],
        ["--watch", "--nginx", "-"],
        ["--nginx", "-", "--name", "a b"],
        ["--allow", "a b"],
        ["--exec", "true"],
    ],
)
def test_options_that_do_not_fit(run: Path, options: list[str]) -> None:
    invoke("fleet", run, *options, code=2)


def test_a_folder_that_is_not_there_is_not_made(run: Path, tmp_path: Path) -> None:
    assert "no folder" in invoke("fleet", run, "--prometheus-sd", tmp_path / "typo" / "a.json", code=2).stderr
    assert not (tmp_path / "typo").exists()


@pytest.mark.parametrize("command", ["false", "no-such-command", "'"])
def test_a_command_that_fails_shows_in_the_exit_code(run: Path, tmp_path: Path, command: str) -> None:
    file = tmp_path / "a.json"
    assert "--exec: " in invoke("fleet", run, "--prometheus-sd", file, "--exec", command, code=1).stderr
    assert file.exists()


def test_watch_writes_what_changed_and_runs_a_command(run: Path, tmp_path: Path) -> None:
    file, told = tmp_path / "upstream.conf", tmp_path / "told"
    tell = f"{sys.executable} -c \"open('{told}', 'a').write('x')\""

    def client(_: IO[str], err: IO[str]) -> None:
        wait_for(file, "10.0.0.1:8000")
        # each change is one heartbeat: between two, the command may look
        beat(run, "a", "10.0.0.2:8000")
        wait_for(file, "10.0.0.2:8000")
        while not told.exists() or len(told.read_text()) < 2:
            time.sleep(0.05)
        # without any server the last configuration stays
        beat(run, "a", "10.0.0.2:8000", healthy=False)
        while "of 1 replicas none is a server that is healthy" not in err.readline():
            pass

    beat(run, "a", "10.0.0.1:8000")
    command = ("fleet", run, "--nginx", file, "--watch", "--every", 0.1, "--exec", tell)
    assert run_until_sigterm(client, *command) == 0
    assert file.read_text() == fleet.nginx_upstream(["10.0.0.2:8000"], "deltawire")
    assert told.read_text() == "xx"


def wait_for(file: Path, text: str) -> None:
    while not file.exists() or text not in file.read_text():
        time.sleep(0.05)


@pytest.mark.slow
def test_haproxy_takes_the_configuration(tmp_path: Path) -> None:
    """Debian's HAProxy; installed for the slow tests."""
    haproxy = shutil.which("haproxy", path="/usr/sbin:/usr/local/sbin:/usr/bin")
    assert haproxy, "apt-get install haproxy"
    (block,) = [block for block in blocks("docs/fleet.md") if block.language == "haproxy"]
    files = {"haproxy.cfg": block.code}
    files["backend.cfg"] = fleet.haproxy_backend(["10.0.0.1:8000", "[2001:db8::1]:80", "localhost:8000"], "deltawire")
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    command = [haproxy, "-c", *(part for name in files for part in ("-f", str(tmp_path / name)))]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
