"""The documentation site's table of contents; tests/browser/documentation.py builds it and opens it."""

from __future__ import annotations

from typing import Any

import yaml
from documents import ROOT

MADE = {"index.md", "api.md", "CONTRIBUTING.md", "CHANGELOG.md"}
"""Pages that docs/site_hooks.py makes."""


def listed(entries: Any) -> list[str]:
    if isinstance(entries, str):
        return [entries]
    values = entries.values() if isinstance(entries, dict) else entries
    return [page for entry in values for page in listed(entry)]


def test_every_page_is_in_the_table_of_contents_once() -> None:
    pages = listed(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    there = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(pages) == sorted(there | MADE)


def test_every_figure_is_shown() -> None:
    page = (ROOT / "docs/figures/index.md").read_text()
    for path in (ROOT / "docs/figures").glob("*.html"):
        assert f"]({path.name})" in page
