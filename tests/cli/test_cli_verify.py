"""verify as typed: what it prints, what it exits with."""

from __future__ import annotations

from pathlib import Path

from cli_support import invoke, invoke_json

from deltawire.bucket.run import Run


def newest_delta(run: Path) -> Path:
    return run / Run.open(str(run)).manifest(3).links[0].objects[0].key


def test_verify_reports_a_valid_run(run: Path) -> None:
    result = invoke("verify", run)
    assert result.stdout.startswith("good")
    assert "4 versions" in result.stdout
    value = invoke_json("verify", run)
    assert (value["ok"], value["versions"], value["proven"], value["failure"]) == (True, 4, 4, None)


def test_verify_names_the_bad_thing_and_exits_with_3(run: Path) -> None:
    delta = newest_delta(run)
    data = bytearray(delta.read_bytes())
    data[-1] ^= 1
    delta.write_bytes(data)
    result = invoke("verify", run, code=3)
    assert f"bad   version 3: deltas/{delta.name}" in result.stdout
    assert "HashMismatch" in result.stdout
    assert "what to do: " in result.stdout
    value = invoke_json("verify", run, "--quick", code=3)
    assert value["failure"]["version"] == 3
    assert invoke_json("verify", run, "--to", 2)["ok"]


def test_verify_of_what_is_not_there(run: Path, tmp_path: Path) -> None:
    invoke("verify", tmp_path / "nothing", code=4)
    assert "no version from 9 on; it has versions 0 to 3" in invoke("verify", run, "--from", 9, code=4).stderr
    assert "no version from 8 up to 9" in invoke("verify", run, "--from", "v8", "--to", 9, code=4).stderr
    assert invoke_json("verify", run, "--from", "-1")["versions"] == 1
