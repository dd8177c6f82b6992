"""keygen as typed, and what signs and reads with its keys."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_support import invoke, invoke_json

from deltawire.core.signing import SigningKey


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTAWIRE_STATE", str(tmp_path / "state"))


def test_a_key_is_made_once_and_only_its_public_part_is_printed(tmp_path: Path) -> None:
    path = tmp_path / "a.key"
    printed = invoke("keygen", path).stdout.strip()
    assert printed == SigningKey.read(path).public
    assert path.stat().st_mode & 0o777 == 0o600
    assert "never overwritten" in invoke("keygen", path, code=2).stderr
    assert "cannot be written" in invoke("keygen", tmp_path / "none" / "a.key", code=2).stderr
    assert invoke_json("keygen", tmp_path / "b.key").keys() == {"path", "public"}


def test_a_signed_run_on_the_command_line(checkpoints: list[Path], tmp_path: Path) -> None:
    run, key = tmp_path / "signed", tmp_path / "a.key"
    public, other = invoke("keygen", key).stdout.strip(), invoke("keygen", tmp_path / "b.key").stdout.strip()
    invoke("publish", checkpoints[0], run, "--sign", key)
    assert "deltawire: version 0 of" in invoke("publish", checkpoints[1], run, code=6).stderr
    invoke("publish", checkpoints[1], run, "--sign", key)
    # read by those who trust the key, another key, and none
    assert invoke_json("checkout", run, "-o", tmp_path / "out", "--trust", public)["version"] == 1
    refused = invoke("checkout", run, "-o", tmp_path / "not", "--trust", other, code=3).stderr
    assert "not trusted here" in refused
    assert not (tmp_path / "not").exists()
    assert "not checked: no trusted key" in invoke("checkout", run, "-o", tmp_path / "unchecked").stdout
    assert f"signed by {public}, checked" in invoke("checkout", run, "-o", tmp_path / "too", "--trust", public).stdout
    assert f"signed by {public}, checked" in invoke("show", run, "--trust", public).stdout
    assert invoke_json("show", f"{run}@0", "@1", "--trust", public)["changed"]
    invoke("show", f"{run}@0", "@1", "--trust", other, code=3)
    assert f"signed by {public}, not checked" in invoke("show", run).stdout
    assert invoke_json("log", run, "--trust", public)["newest"] == 1
    invoke("log", run, "--trust", other, code=3)
    invoke("follow", run, "--dir", tmp_path / "followed", "--once", "--trust", public)
    invoke("follow", run, "--dir", tmp_path / "followed", "--once", "--trust", other, code=3)


def test_verify_says_who_signed_what(checkpoints: list[Path], tmp_path: Path) -> None:
    run, key, following = tmp_path / "signed", tmp_path / "a.key", tmp_path / "b.key"
    public, next_key = invoke("keygen", key).stdout.strip(), invoke("keygen", following).stdout.strip()
    invoke("publish", checkpoints[0], run, "--sign", key)
    invoke("publish", checkpoints[1], run, "--sign", key, "--next-key", next_key)
    invoke("publish", checkpoints[2], run, "--sign", following, "--trust", public)
    value = invoke_json("verify", run, "--trust", public)
    assert value["signers"] == [
        {"key": public, "signed": "manifests", "versions": [[0, 1]]},
        {"key": next_key, "signed": "manifests", "versions": [[2, 2]]},
    ]
    assert (value["ok"], value["signatures_checked"]) == (True, True)
    assert f"manifests of version 0–1 signed by {public}" in invoke("verify", run, "--trust", public).stdout
    assert "nobody checked it" in invoke("verify", run).stdout
    failure = invoke_json("verify", run, "--trust", next_key, code=3)["failure"]
    assert (failure["error"], failure["version"]) == ("SignatureError", 0)


def test_doctor_says_whether_signatures_are_checked(
    checkpoints: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, key = tmp_path / "signed", tmp_path / "a.key"
    public = invoke("keygen", key).stdout.strip()
    invoke("publish", checkpoints[0], run, "--sign", key)
    assert f"signed by {public}, not checked" in invoke("doctor", run).stdout
    monkeypatch.setenv("DELTAWIRE_TRUST", public)
    assert f"signed by {public}, checked" in invoke("doctor", run).stdout
