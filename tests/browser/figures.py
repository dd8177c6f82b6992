"""The interactive figures of the documents, in a real Chromium."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from conftest import WIDTHS, View, scrolls_sideways

FOLDER = Path(__file__).parents[2] / "docs" / "figures"
PAGES = sorted(path.stem for path in FOLDER.glob("*.html"))


def url(name: str) -> str:
    return (FOLDER / f"{name}.html").as_uri()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", PAGES)
def test_a_page_fits_its_window_and_has_a_heading(name: str, width: int, dark: bool, view: View) -> None:
    """The fixture adds: no error, and no request."""
    page = view(url(name), width=width, dark=dark)
    assert page.locator("h1").inner_text()
    assert not scrolls_sideways(page)
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == (
        "rgb(20, 23, 27)" if dark else "rgb(255, 255, 255)"
    )


@pytest.mark.parametrize("name", PAGES)
def test_every_control_has_a_name_and_can_be_reached_by_keyboard(name: str, view: View) -> None:
    page = view(url(name), still=True)
    unnamed = page.evaluate("""() => [...document.querySelectorAll("button, input, [role=slider], [role=button]")]
        .filter(e => !(e.ariaLabel || e.getAttribute("aria-labelledby") || e.textContent.trim() || e.labels?.length))
        .map(e => e.outerHTML.slice(0, 120))""")
    assert unnamed == []
    seen = set()
    for _ in range(12):
        page.keyboard.press("Tab")
        seen.add(page.evaluate("document.activeElement.outerHTML.slice(0, 200)"))
    assert len(seen) >= 4


# ── bits ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def totals(page: Page) -> list[float]:
    return [float(text) for text in page.locator(".idea .total b").all_inner_texts()]


def test_bits_every_idea_shows_how_it_writes_the_same_changes(view: View) -> None:
    page = view(url("bits"))
    ideas, sent = page.locator("button.idea"), page.locator("#sent tr").first
    expect(ideas.first).to_have_attribute("aria-pressed", "true")
    assert "#" in sent.inner_text()
    ideas.nth(2).click()
    expect(sent).to_contain_text("skip")
    expect(sent).to_contain_text("ulp")
    page.keyboard.press("ArrowDown")
    expect(ideas.nth(3)).to_be_focused()
    expect(page.locator("#window-title")).to_contain_text("sorted by exponent")
    expect(page.locator("#said")).to_contain_text("exponent")


def test_bits_no_idea_costs_more_than_the_one_before(view: View) -> None:
    page = view(url("bits"))
    for name in page.locator("#tensors input").all():
        name.check(force=True)
        *ideas, floor = totals(page)
        assert ideas == sorted(ideas, reverse=True)
        assert ideas[0] == 48
        assert floor < ideas[2]
