"""`make canary`: one line per package, whatever happens to it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import canary
from canary import PACKAGES, Package
from tests.contracts.contract import Changed, calls_only, find, takes


class Transfer:
    """What an adapter has."""

    def send_weights(self, iterator: object) -> None: ...


class Protocol:
    def send_weights(self, iterator: object) -> None: ...


class NewProtocol:
    def send_weights(self, iterator: object, step: int) -> None: ...
    def abort(self) -> None: ...


def test_a_contract_says_what_changed() -> None:
    find("json:JSONDecoder.decode")
    takes("json:dumps", "obj", "indent")
    calls_only(f"{__name__}:Protocol", Transfer)
    with pytest.raises(Changed, match=r"json:JSONDecoder\.undo is not there"):
        find("json:JSONDecoder.undo")
    with pytest.raises(Changed, match=r"no_such_package cannot be imported"):
        find("no_such_package:name")
    with pytest.raises(Changed, match=r"json:JSONDecoder.decode takes no _x, but self, s, _w"):
        takes("json:JSONDecoder.decode", "s", "_x")
    with pytest.raises(Changed, match=r"asks for abort, which Transfer has not"):
        calls_only(f"{__name__}:NewProtocol", Transfer)


def test_every_package_has_a_contract_and_a_live_test() -> None:
    root = Path(canary.ROOT)
    for package in PACKAGES.values():
        assert (root / "tests" / "contracts" / f"{package.name}.py").is_file()
        assert all((root / name).is_file() for name in package.live if name.startswith("tests/"))
        assert package.tested[0].isdigit()


def test_what_does_not_install_and_what_changed_are_a_line_each(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(version: str) -> Path:
        raise subprocess.CalledProcessError(1, "pip", "", "trying\nERROR: no wheel for this Python\n")

    monkeypatch.setattr(canary, "newest", lambda distribution: "9.9")
    monkeypatch.setattr(
        canary,
        "PACKAGES",
        {
            "trl": Package("trl", "trl", "1.16.0", fails, []),
            # this environment has none
            "deepspeed": Package("deepspeed", "deepspeed", "0.19.8", lambda version: Path(sys.executable), []),
        },
    )
    assert canary.main(["trl"]) == 2
    assert capsys.readouterr().out == "trl 9.9: could not be installed: ERROR: no wheel for this Python\n"
    assert canary.main(["--contracts", "--json"]) == 1
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["package"], first["result"]) == ("trl", "could not be installed")
    assert (second["newest"], second["tested"], second["result"]) == ("9.9", "0.19.8", "changed")
    assert second["reason"].startswith("deepspeed cannot be imported")
    with pytest.raises(SystemExit, match="2"):
        canary.main(["torchh"])
