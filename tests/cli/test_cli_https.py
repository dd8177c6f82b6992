"""Commands on a run that is read over https: what only reads works, all else says what to name instead."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_support import invoke

from deltawire.bucket.run import Run
from deltawire.store import open_store
from support import heartbeats
from tests.web import WebServer, serving


@pytest.fixture
def server(run: Path) -> Iterator[WebServer]:
    with serving(open_store(run)) as server:
        yield server


def test_commands_that_read(run: Path, server: WebServer, tmp_path: Path) -> None:
    for version in ("", "@1", "@-2"):
        here = invoke("show", f"{run}{version}", "--json").stdout
        there = invoke("show", f"{server.url}{version}", "--json").stdout
        assert there.replace(server.url, "RUN") == here.replace(run.as_uri(), "RUN")
        invoke("checkout", f"{server.url}{version}", "-o", tmp_path / f"out{version}")
    invoke("follow", server.url, "--dir", tmp_path / "followed", "--once")
    assert json.loads(invoke("doctor", server.url, "--json").stdout)["healthy"]
    refused = invoke("show", f"{server.url}@17", code=4)
    assert "there is no version 17; it has versions 0 to" in refused.stderr


def test_commands_that_list_or_write(run: Path, server: WebServer, tmp_path: Path) -> None:
    for words in (
        ["log"],
        ["dash", "--out", tmp_path / "page.html"],
        ["fleet"],
        ["prune"],
        ["verify"],
        ["tag"],
        ["runs"],
    ):
        refused = invoke(*words, server.url, code=5)
        assert "has no listings, and this needs one" in refused.stderr.replace("\n", " "), words
    invoke("checkout", run, "-o", tmp_path / "model")
    for words in (["tag", f"{server.url}@1", "best"], ["keep", server.url, "--once"],
                  ["publish", tmp_path / "model", server.url]):  # fmt: skip
        refused = invoke(*words, code=5)
        assert "can only be read" in refused.stderr.replace("\n", " "), words


def test_heartbeats_of_a_follower(
    run: Path, server: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, named in enumerate((["--heartbeats", run], [])):
        if not named:
            monkeypatch.setenv("DELTAWIRE_HEARTBEATS", str(run))
        invoke("follow", server.url, "--dir", tmp_path / f"{number}", "--once", "--id", f"f{number}", *named)
    assert {beat.replica for beat in heartbeats(Run.open(run.as_uri()))} >= {"f0", "f1"}
