"""The interactive figures: each page is what its parts make, alone, and small. tests/browser/figures.py opens them."""

from __future__ import annotations

import json
import re
import runpy

import pytest
from documents import ROOT

FOLDER = ROOT / "docs" / "figures"
BUILD = runpy.run_path(str(FOLDER / "build.py"))
PAGES = BUILD["names"]()


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_what_its_parts_and_its_recorded_data_make(name: str) -> None:
    built = (FOLDER / f"{name}.html").read_text()
    assert built == BUILD["build"](name), "run `python docs/figures/build.py`"


@pytest.mark.parametrize("name", PAGES)
def test_a_page_needs_nothing_else(name: str) -> None:
    text = (FOLDER / f"{name}.html").read_text()
    assert len(text) < 300_000
    assert set(re.findall(r"https?://[^\s\"')<]+", text)) <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"""(?:src|href)\s*=\s*["'](?!data:)|@import|url\(""", text)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_says_by_what_it_was_recorded(name: str) -> None:
    about = json.loads((FOLDER / "data" / f"{name}.json").read_text())["about"]
    assert about["command"] == f"python benchmarks/figures.py {name}"
    assert about["command"] in (FOLDER / "parts" / f"{name}.html").read_text()
