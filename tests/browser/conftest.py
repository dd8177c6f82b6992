"""Pages in a real Chromium (Debian's package `chromium`), driven by playwright. Run by `make test-browser`.

`view(url)` opens a page in a fresh context. When the test ends, the fixture fails it if the page wrote an error to the
console, threw one, or asked for anything outside its own origin.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import urlsplit

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

View: TypeAlias = "Callable[..., Page]"

WIDTHS = (1280, 390)
"""Pixels: a laptop and a phone."""


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    # the everyday tests find this file too, where playwright is not installed
    from playwright.sync_api import expect, sync_playwright

    # busy machines are slow to draw
    expect.set_options(timeout=120_000)

    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.fail("these tests need a chromium on the PATH: apt-get install chromium")
    with sync_playwright() as playwright:
        # containers often have no user namespaces and a small /dev/shm
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield started
        started.close()


@pytest.fixture
def view(browser: Browser) -> Iterator[View]:
    """Open a page: `view(url, width=390, dark=True, still=True)`; `still` asks for reduced motion."""
    contexts: list[Any] = []
    wrong: list[str] = []

    def open_page(url: str, *, width: int = 1280, dark: bool = False, still: bool = False, height: int = 900) -> Page:
        context = browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme="dark" if dark else "light",
            reduced_motion="reduce" if still else "no-preference",
        )
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda said: wrong.append(f"console: {said.text}") if said.type == "error" else None)
        page.on("pageerror", lambda error: wrong.append(f"thrown: {error}"))
        page.on(
            "request", lambda request: wrong.append(f"asked for {request.url}") if _foreign(request.url, url) else None
        )
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not wrong, "\n".join(wrong)


def _foreign(asked: str, page: str) -> bool:
    one, own = urlsplit(asked), urlsplit(page)
    return one.scheme not in ("data", "blob") and (one.scheme, one.netloc) != (own.scheme, own.netloc)


def scrolls_sideways(page: Page) -> bool:
    return bool(page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth"))
