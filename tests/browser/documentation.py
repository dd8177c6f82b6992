"""The documentation site, built as `make docs` does, in a real Chromium."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from playwright.sync_api import expect

from conftest import WIDTHS, View, scrolls_sideways

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Strict: a link that leads nowhere fails."""
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(
        build, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["index", "api", "limits", "tutorials/extending"])
def test_a_page_opens_without_another_host(name: str, width: int, site: Path, view: View) -> None:
    page = view((site / f"{name}.html").as_uri(), width=width)
    assert page.locator("h1").inner_text()
    assert not scrolls_sideways(page)


def test_the_api_is_made_of_docstrings(site: Path, view: View) -> None:
    page = view((site / "api.html").as_uri())
    expect(page.locator("body")).to_contain_text("Publish the model's present weights as the next version")
    # an aligned list of a docstring is a list
    expect(page.locator("li", has_text="recompute the digest of all live weights").first).to_be_visible()


def test_figures_are_embedded_and_as_high_as_they_need(site: Path, view: View) -> None:
    page = view((site / "figures" / "index.html").as_uri(), dark=True)
    frames = page.locator("iframe.figure")
    assert frames.count() == len(list((ROOT / "docs/figures").glob("*.html")))
    frames.first.scroll_into_view_if_needed()
    inner = page.frame_locator("iframe.figure").first
    expect(inner.locator("h1")).to_be_visible()
    expect(inner.locator("html")).to_have_attribute("data-theme", "dark")
    expect(frames.first).to_have_attribute("style", re.compile(r"height: \d+px"))
