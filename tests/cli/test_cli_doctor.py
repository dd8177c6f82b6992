"""`deltawire doctor`: it finds what is wrong with a store, says what to do, and leaves nothing behind."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
from cli_support import invoke, invoke_json

from deltawire.store import ObjectStore
from deltawire_wordle.seaweed import SeaweedFS

CHECKS = {
    "extras", "cache", "create", "read back", "create again", "overwrite", "conditional get", "ranged read", "list",
    "latency", "clock", "upload in parts", "download in ranges", "announcements", "delete", "run",
}  # fmt: skip


def test_a_folder(run: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    value = invoke_json("doctor", run)
    assert value["healthy"] is True
    assert {check["check"] for check in value["checks"]} == CHECKS
    assert {check["verdict"] for check in value["checks"]} == {"ok"}
    assert "newest version 3" in next(check["detail"] for check in value["checks"] if check["check"] == "run")
    assert value["figures"].keys() == {
        "latency_s", "clock_skew_s", "upload_bytes_per_s", "download_bytes_per_s",
    }  # fmt: skip
    assert before.keys() == {*run.rglob("*")}, "nothing stays behind"


def test_a_folder_that_was_not_there_is_not_left(tmp_path: Path) -> None:
    assert invoke_json("doctor", tmp_path / "new" / "run")["healthy"] is True
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "empty").mkdir()
    invoke("doctor", tmp_path / "empty")
    assert [path.name for path in tmp_path.iterdir()] == ["empty"], "what was there stays"


def test_a_bucket(seaweed: SeaweedFS, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in seaweed.environment.items():
        monkeypatch.setenv(name, value)
    place = f"s3://deltawire/{uuid.uuid4()}/run"
    said = invoke("doctor", place).stdout
    assert "✓ create again" in said
    assert "✓ upload in parts" in said
    assert "✗" not in said
    assert [*ObjectStore.from_url(place).list()] == []


def test_wrong_keys(seaweed: SeaweedFS, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (seaweed.environment | {"AWS_SECRET_ACCESS_KEY": "hunter2"}).items():
        monkeypatch.setenv(name, value)
    result = invoke("doctor", "s3://deltawire/run", code=5)
    assert "✗ create" in result.stdout
    assert "check AWS_SECRET_ACCESS_KEY" in result.stdout
    assert "does not do what a run needs: create, run" in result.stderr
    assert "hunter2" not in result.stdout + result.stderr
    value = invoke_json("doctor", "s3://deltawire/run", code=5)
    assert value["healthy"] is False
    assert {check["verdict"] for check in value["checks"] if check["check"] == "list"} == {"skipped"}


def test_an_invalid_address_is_refused() -> None:
    assert "there is no store for ftp://" in invoke("doctor", "ftp://host/run", code=2).stderr
