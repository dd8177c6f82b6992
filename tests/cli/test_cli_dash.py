"""`deltawire dash`: the page, the trace and the JSON of a run; what it serves is in tests/dash."""

from __future__ import annotations

import json
import time
import urllib.request
from pathlib import Path
from typing import IO

import pytest
from cli_support import invoke, run_until_sigterm

from deltawire.core import keys


def test_a_page_and_a_trace(run: Path, tmp_path: Path) -> None:
    said = invoke("dash", run, "--out", tmp_path / "run.html", "--trace", tmp_path / "trace.json").stdout
    assert "newest version             v3" in said
    assert str(tmp_path / "run.html") in said
    assert 'id="data">{"url":' in (tmp_path / "run.html").read_text()
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_json(run: Path) -> None:
    found = json.loads(invoke("dash", run, "--json").stdout)
    assert (found["newest"], found["totals"]["deltas"], found["problem"]) == (3, 3, "")
    assert found["headline"]["smaller"] > 1
    assert found["versions"]["step"] == [0, 10, 20, 30]


def test_what_cannot_be(run: Path, tmp_path: Path) -> None:
    assert "no run" in invoke("dash", tmp_path / "nothing", "--json", code=4).stderr
    assert "--out" in invoke("dash", run, "--every", "5", code=2).stderr
    assert "--port" in invoke("dash", run, "--json", "--port", "1", code=2).stderr
    for option in ("--out", "--trace"):
        # before the run is read: there is none
        for target, why in ((tmp_path / "none" / "x", "no folder"), (tmp_path, "is a folder")):
            said = invoke("dash", tmp_path / "nothing", option, target, code=2).stderr
            assert option in said
            assert why in said
    assert "DELTAWIRE_TOKEN" in invoke("dash", run, "--host", "0.0.0.0", "--port", "0", code=2).stderr
    assert "leave out @2" in invoke("dash", f"{run}@2", "--json", code=2).stderr


def test_it_serves_until_it_is_ended(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def client(out: IO[str], err: IO[str]) -> None:
        url = out.readline().split(" at ")[1].split(";")[0]
        with urllib.request.urlopen(f"{url}api/run", timeout=120) as answer:
            assert json.load(answer)["document"]["newest"] == 3

    monkeypatch.setenv("DELTAWIRE_TOKEN", "")
    assert run_until_sigterm(client, "dash", run, "--port", 0) == 0


def test_a_page_that_cannot_be_written_is_tried_again(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "site" / "run.html"
    out.parent.mkdir()

    def client(_: IO[str], err: IO[str]) -> None:
        assert err.readline() == f"writing {out} every 0.1 s; Ctrl-C ends it\n"
        # its folder is gone for a while
        out.parent.rename(tmp_path / "moved")
        assert "--out: cannot write" in err.readline()
        out.parent.mkdir()
        while not out.exists():
            time.sleep(0.05)

    assert run_until_sigterm(client, "dash", run, "--out", out, "--every", 0.1) == 0


def test_what_can_be_read_of_a_damaged_run_is_written_and_the_command_fails(run: Path, tmp_path: Path) -> None:
    manifest = run / keys.manifest(3)
    manifest.chmod(0o644)
    manifest.write_text("{")
    said = invoke("dash", run, "--out", tmp_path / "run.html", code=1)
    assert "deltawire verify" in said.stderr
    assert '"newest":2' in (tmp_path / "run.html").read_text()
