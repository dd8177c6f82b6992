"""import: a directory of another system's deltas becomes a run."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path
from typing import IO

import pytest
from cli_support import invoke, invoke_json, print_of, read_checkpoint, run_until_sigterm

GOLDEN = Path(__file__).parents[1] / "foreign" / "golden"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    with tarfile.open(GOLDEN / "slime-xor.tar") as archive:
        archive.extractall(tmp_path / "source", filter="data")
    return tmp_path / "source"


def test_what_is_there_is_imported_and_checked_out(source: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    said = invoke("import", source, run, "--base", GOLDEN / "base", "--once").stdout.splitlines()
    assert len(said) == 11
    assert said[0].startswith("v0 of base  anchor  100 % changed  the base")
    assert said[10].startswith("v10 of weight_v000010  delta  ")
    invoke("verify", run)
    invoke("checkout", f"{run}@0", "-o", tmp_path / "out")
    assert print_of(read_checkpoint(tmp_path / "out")) == print_of(read_checkpoint(GOLDEN / "base"))
    again = invoke("import", source, run, "--once")
    assert again.stderr == f"nothing to import: {source} has no version that is new\n"
    assert invoke("import", source, run, "--once", "--json").stdout == ""


def test_json_says_where_each_version_came_from(source: Path, tmp_path: Path) -> None:
    for number in range(2, 11):
        shutil.rmtree(source / f"weight_v{number:06d}")
    said = invoke("import", source, tmp_path / "run", "--base", GOLDEN / "base", "--once", "--json").stdout
    base, first = map(json.loads, said.splitlines())
    assert (base["kind"], base["version"], base["source_bytes"]) == ("base", 0, 0)
    assert (first["name"], first["kind"], first["source_version"]) == ("weight_v000001", "delta", "1")
    assert first["kinds"] == ["delta"]
    assert first["source_bytes"] == sum(path.stat().st_size for path in (source / "weight_v000001").glob("*.s*rs"))
    assert invoke_json("log", tmp_path / "run")["versions"][0]["metrics"]["source_version"] == 1.0


def test_a_damaged_version_ends_with_an_exit_code(source: Path, tmp_path: Path) -> None:
    (source / "weight_v000002" / "model-00000-of-00002.safetensors").write_bytes(b"short")
    done = invoke("import", source, tmp_path / "run", "--base", GOLDEN / "base", "--once", code=3)
    assert len(done.stdout.splitlines()) == 2
    assert "weight_v000002/model-00000-of-00002.safetensors: a safetensors file has at least" in done.stderr
    said = invoke("import", source, tmp_path / "none", "--once", code=3).stderr
    assert "weight_v000001 builds on a checkpoint that is not here: name it with --base" in said


def test_following_goes_on_until_sigterm(source: Path, tmp_path: Path) -> None:
    last = source / "weight_v000010"
    last.rename(tmp_path / "later")

    def client(stdout: IO[str], stderr: IO[str]) -> None:
        for _ in range(10):
            stdout.readline()
        (tmp_path / "later").rename(last)
        assert json.loads(stdout.readline())["source_version"] == "10"

    arguments = ("import", source, tmp_path / "run", "--base", GOLDEN / "base", "--json", "--poll", "0.05")
    assert run_until_sigterm(client, *arguments) == 0
