"""delegate as typed: the run's key names a keeper's."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_support import invoke, invoke_json

from deltawire.bucket.run import Run
from deltawire.bucket.trust import Trust, delegation


def test_the_runs_key_delegates_to_a_keeper(
    checkpoints: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, key, keeper = tmp_path / "signed", tmp_path / "a.key", tmp_path / "keeper.key"
    public, keepers = invoke("keygen", key).stdout.strip(), invoke("keygen", keeper).stdout.strip()
    invoke("publish", checkpoints[0], run, "--sign", key)
    assert "--sign PATH" in invoke("delegate", run, keepers, code=2).stderr
    assert "not trusted here" in invoke("delegate", run, keepers, "--sign", keeper, code=3).stderr
    assert "64 hex digits" in invoke("delegate", run, "ed25519:12", "--sign", key, code=2).stderr
    assert "64 hex digits" in invoke("delegate", keepers, run, "--sign", key, code=2).stderr  # in the wrong order
    assert invoke_json("delegate", run, keepers, "--sign", key)["by"] == public
    statement = delegation(Run.open(str(run)), keepers)
    assert statement is not None
    assert (statement.by, statement.key) == (public, keepers)
    # the keeper signs what it adds, and readers that trust the run's key use it
    monkeypatch.setenv("DELTAWIRE_STATE", str(tmp_path / "state"))
    for checkpoint in checkpoints[1:]:
        invoke("publish", checkpoint, run, "--sign", key)
    assert "must check what it reads" in invoke("keep", run, "--once", "--sign", keeper, code=2).stderr
    invoke("keep", run, "--once", "--since", 0, "--sign", keeper, "--trust", public)
    index = Run.open(str(run), trust=public).added.index()
    assert index is not None
    assert index.signer == keepers
    # readers that use the trainer's own links only
    refusing = Run.open(str(run), trust=Trust(public, refuse_delegated=True))
    refusing.newest()
    assert refusing.added.index() is None
    trusted = ("--trust", public, "--refuse-delegated")
    assert invoke_json("checkout", run, "-o", tmp_path / "out", *trusted)["version"] == len(checkpoints) - 1
    invoke("follow", run, "--dir", tmp_path / "followed", "--once", *trusted)
    for command in (("checkout", run, "-o", tmp_path / "not"), ("follow", run, "--dir", tmp_path / "not", "--once")):
        assert "no key is trusted" in invoke(*command, "--refuse-delegated", code=2).stderr
    monkeypatch.setenv("DELTAWIRE_TRUST", public)
    assert "links of delegated keys are accepted" in invoke("doctor", run).stdout
    monkeypatch.setenv("DELTAWIRE_REFUSE_DELEGATED", "1")
    assert "checked; links of delegated keys are refused" in invoke("doctor", run).stdout
    assert "would add such links" in invoke("keep", run, "--once", "--sign", keeper, code=2).stderr
    # verify checks what others may use
    value = invoke_json("verify", run)
    assert (value["ok"], {signer["key"] for signer in value["signers"]}) == (True, {public, keepers})


def test_its_help_says_that_the_key_is_trusted_with_the_weights() -> None:
    assert "trusted with the weights" in " ".join(invoke("delegate", "--help").stdout.split())


def test_an_unsigned_run_delegates_nothing(run: Path, tmp_path: Path) -> None:
    keeper = invoke("keygen", tmp_path / "a.key").stdout.strip()
    assert "is not signed" in invoke("delegate", run, keeper, "--sign", tmp_path / "a.key", code=3).stderr
