"""tag: names for versions, and versions by every name they have, wherever one is taken."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_support import invoke, invoke_json, read_checkpoint


def test_set_list_move_delete(run: Path) -> None:
    assert invoke_json("tag", run)["tags"] == {}
    assert invoke("tag", f"{run}@1", "best").stdout == "best → v1\n"
    assert invoke("tag", f"{run}@latest", "best").stdout == "best → v3 (was v1)\n"
    invoke("tag", run, "last")
    assert {name: tag["version"] for name, tag in invoke_json("tag", run)["tags"].items()} == {"best": 3, "last": 3}
    assert "best" in invoke("tag", run).stdout
    assert invoke("tag", run, "--delete", "last").stdout == "last deleted\n"
    assert list(invoke_json("tag", run)["tags"]) == ["best"]
    invoke("tag", run, "--delete", "last", code=4)


@pytest.mark.parametrize("name", ["v3", "latest", "7", "a/b", "-x"])
def test_bad_names(run: Path, name: str) -> None:
    invoke("tag", run, "--", name, code=2)
    assert not (run / "tags").exists()


def test_wrong_arguments_are_refused(run: Path) -> None:
    invoke("tag", f"{run}@1", code=2)
    invoke("tag", f"{run}@1", "--delete", "best", code=2)
    invoke("tag", f"{run}@77", "best", code=4)


@pytest.mark.parametrize("version", ["v2", "2", "-2", "best"])
def test_a_version_by_every_name(run: Path, tmp_path: Path, checkpoints: list[Path], version: str) -> None:
    invoke("tag", f"{run}@2", "best")
    assert invoke_json("checkout", f"{run}@{version}", "-o", tmp_path / "out")["version"] == 2
    assert read_checkpoint(tmp_path / "out") == read_checkpoint(checkpoints[2])
    assert invoke_json("show", f"{run}@{version}")["version"] == 2
    assert invoke_json("log", f"{run}@{version}")["newest"] == 2
    assert "2" in invoke_json("prune", run, "--keep", version, "--keep-last", 0)["kept"]
    assert invoke_json("verify", run, "--from", version, "--to", version)["versions"] == 1


def test_an_unknown_version_names_the_range(run: Path, tmp_path: Path) -> None:
    invoke("tag", f"{run}@2", "best")
    for version in ("9", "v9", "-7", "worst"):
        result = invoke("checkout", f"{run}@{version}", "-o", tmp_path / "out", code=4)
        assert "it has versions 0 to 3 and the tags best" in result.stderr
    assert "@-7 is before its first version" in invoke("show", f"{run}@-7", code=4).stderr


@pytest.mark.parametrize(
    "text, expected",
    [("", None), ("@latest", None), ("@v2", 2), ("@77", 77), ("@-2", 2), ("@best", 1)],
)
def test_what_serve_stays_at(run: Path, text: str, expected: int | None) -> None:
    from deltawire.cli.serve import _followed

    invoke("tag", f"{run}@1", "best")
    followed = _followed(f"{run}{text}")
    assert (followed["run"], followed.get("pin")) == (str(run), expected)
    # a number needs no run yet: the server waits for it
    assert _followed("/nowhere@v3") == {"run": "/nowhere", "pin": 3}
