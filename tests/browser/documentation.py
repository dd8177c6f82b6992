"""The documentation site, built as `make docs` does, in a real Chromium."""

from __future__ import annotations

import functools
import http.server
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
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


class Served(http.server.ThreadingHTTPServer):
    """The site on loopback, and what was asked of it that is not there."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
        self.missing: list[str] = []

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.server_port}/{name}"


class Handler(http.server.SimpleHTTPRequestHandler):
    server: Served

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        self.server.missing.append(f"{code} {self.path}")
        super().send_error(code, message, explain)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="session")
def served(site: Path) -> Iterator[Served]:
    server = Served(site)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_no_page_asks_for_something_that_is_not_there(site: Path, served: Served, view: View) -> None:
    names = sorted(str(path.relative_to(site)) for path in site.rglob("*.html"))
    assert {"index.html", "figures/index.html", "figures/timeline.html"} <= {*names}
    for name in names:
        page = view(served.url(name), still=True)
        page.wait_for_load_state("networkidle")
        # a page without one makes browsers ask for /favicon.ico, unseen by playwright
        assert page.locator("link[rel~=icon]").count() == 1, name
        page.context.close()
    assert served.missing == []


def test_code_and_diagrams_of_the_front_page_are_not_cut_off(served: Served, view: View) -> None:
    page = view(served.url("index.html"), width=1280)
    assert page.locator("pre > code").count() > 5
    cut = (
        "nodes => nodes.filter(code => code.scrollWidth > code.clientWidth).map(code => code.textContent.slice(0, 200))"
    )
    assert page.eval_on_selector_all("pre > code", cut) == []


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
