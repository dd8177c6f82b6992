"""The interactive figures of the documents, in a real Chromium."""

from __future__ import annotations

import itertools
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from playwright.sync_api import Page, expect

from conftest import WIDTHS, View, scrolls_sideways
from deltawire.cli.plan import Setup, estimate

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


# ── sync ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def changed_weights(page: Page) -> list[int]:
    found = page.evaluate("data.weights.old.map((old, i) => old === data.weights.new[i] ? -1 : i)")
    return [i for i in found if i >= 0]


def test_sync_plays_to_the_new_version(view: View) -> None:
    page = view(url("sync"))
    page.clock.install()
    page.get_by_role("button", name="Play").click()
    page.clock.run_for(20_000)
    expect(page.get_by_role("button", name="Again")).to_be_visible()
    expect(page.locator("#phase")).to_have_text("version 1")
    assert page.locator("#cells .new").count() == len(changed_weights(page)) > 0
    expect(page.locator("#digest")).to_contain_text("version 1")


def test_sync_can_be_stepped_and_dragged(view: View) -> None:
    page = view(url("sync"), still=True)
    for phase in ("verify", "decode", "stop", "write", "prove"):
        page.get_by_role("button", name="next phase").click()
        expect(page.locator("#phase")).to_contain_text(phase)
    page.get_by_role("button", name="previous phase").press("Enter")
    expect(page.locator("#phase")).to_contain_text("write")
    page.get_by_role("slider").press("Home")
    expect(page.locator("#phase")).to_contain_text("Press play")
    page.get_by_role("slider").press("End")
    expect(page.locator("#phase")).to_contain_text("version 1")


def test_sync_a_flipped_byte_is_refused_and_nothing_is_written(view: View) -> None:
    page = view(url("sync"), still=True)
    page.locator("#bytes button").nth(9).click()
    expect(page.locator("#error")).to_contain_text("HashMismatch: deltas/")
    expect(page.locator("#phase")).to_have_text("version 0")
    assert page.locator("#cells .new").count() == 0


def test_sync_a_flipped_bit_of_a_changed_weight_is_undone(view: View) -> None:
    page = view(url("sync"), still=True)
    page.locator("#cells button").nth(changed_weights(page)[0]).click()
    expect(page.locator("#error")).to_contain_text("DigestMismatch: version 1 should have state digest")
    expect(page.locator("#error")).to_contain_text("the previous weights were restored")
    expect(page.locator("#phase")).to_have_text("version 0")
    assert page.locator("#cells .new").count() == 0
    page.get_by_role("button", name="Without damage").click()
    expect(page.locator("#error")).to_be_hidden()


def test_sync_a_flipped_bit_elsewhere_is_found_and_repaired(view: View) -> None:
    page = view(url("sync"), still=True)
    other = next(i for i in range(256) if i not in changed_weights(page))
    page.locator("#cells button").nth(other).click()
    expect(page.locator("#error")).to_contain_text("changed by something other than this replica")
    expect(page.locator("#phase")).to_have_text("version 1")


def test_sync_bytes_and_weights_can_be_reached_by_keyboard(view: View) -> None:
    page = view(url("sync"), still=True)
    page.locator("#bytes button").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    expect(page.locator("#bytes button").nth(9)).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#error")).to_contain_text("HashMismatch")


# ── flips ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_flips_dragging_the_learning_rate_changes_more_weights(view: View) -> None:
    page = view(url("flips"))
    knob = page.get_by_role("slider", name="learning rate")
    before = page.locator(".cell.flipped").count(), page.locator("#lr").inner_text()
    box = page.locator("#knob circle").bounding_box()
    assert box
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + 150, y, steps=5)
    page.mouse.up()
    after = page.locator(".cell.flipped").count(), page.locator("#lr").inner_text()
    assert after[0] > before[0]
    assert float(after[1]) > 3 * float(before[1])
    knob.press("Home")
    expect(page.locator("#lr")).to_have_text("1e-8")
    knob.press("End")
    expect(page.locator("#lr")).to_have_text("1e-2")
    assert page.locator(".cell.flipped").count() > 200


def test_flips_what_flips_is_what_bfloat16_rounds(view: View) -> None:
    """The page's arithmetic against torch's, for every recorded weight, at several rates."""
    page = view(url("flips"))
    record = page.evaluate("data.steps.map(step => step.patches)")
    for lr in (1e-7, 1e-6, 1e-5, 1e-4, 1e-3):
        found = page.evaluate(
            """lr => data.steps.map(step => Object.values(step.patches).map(p =>
               p.w.map((w, i) => { const one = look(w, p.u[i], Math.fround(lr)); return [one.old, one.now]; })))""",
            lr,
        )
        for patches, pairs in zip(record, found, strict=True):
            for patch, pair in zip(patches.values(), pairs, strict=True):
                w, u = torch.tensor(patch["w"]), torch.tensor(patch["u"])
                moved = (w - torch.tensor(lr) * u).bfloat16().view(torch.int16).int() & 0xFFFF
                old = w.bfloat16().view(torch.int16).int() & 0xFFFF
                assert [list(both) for both in zip(old.tolist(), moved.tolist(), strict=True)] == pair


def test_flips_arrow_keys_choose_a_weight_and_it_is_explained(view: View) -> None:
    page = view(url("flips"))
    page.locator(".cell").first.click()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".cell").nth(17)).to_have_attribute("aria-pressed", "true")
    expect(page.locator("#said")).to_contain_text("Its ulp is")
    assert len(page.locator("#bits").inner_text()) > 30


def test_flips_the_first_step_changes_more_than_later_ones(view: View) -> None:
    page = view(url("flips"))
    shares = []
    for step in page.locator("#steps input").all():
        step.check(force=True)
        shares.append(float(page.locator("#share").inner_text().split()[0]))
    assert shares[0] > shares[-1]


# ── timeline ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_timeline_computes_what_deltawire_plan_does(view: View) -> None:
    page = view(url("timeline"))
    grid = itertools.product(
        (3e8, 7e9, 4e11), (3e-8, 1e-6, 4e-6, 1e-2), ("packed", "context", "raw"), (6e6, 125e6, 5e10)
    )
    for params, lr, encoding, bandwidth in grid:
        setup = Setup(
            params, lr=lr, encoding=encoding, bandwidth=bandwidth, replica_bandwidth=bandwidth, replicas=17, cores=8
        )
        wanted = estimate(setup)
        found = page.evaluate("setup => plan(setup)", asdict(setup))
        assert len(found) >= 15
        for name, value in found.items():
            assert value == pytest.approx(wanted[name], rel=1e-9), (name, setup)


def test_timeline_the_sliders_move_the_bars(view: View) -> None:
    page = view(url("timeline"))

    def idle() -> str:
        return page.locator("#nccl-idle").inner_text()

    before = idle()
    page.get_by_role("slider", name="model size").press("End")
    larger = idle()
    page.get_by_role("slider", name="bandwidth").press("End")
    assert len({before, larger, idle()}) == 3
    lanes = page.locator("#nccl svg > text").count()
    page.get_by_role("slider", name="replicas").press("Home")
    assert page.locator("#nccl svg > text").count() < lanes
    expect(page.locator("#replicas-out")).to_have_text("1")


def test_timeline_says_when_nccl_is_the_better_choice(view: View) -> None:
    page = view(url("timeline"))
    page.get_by_role("slider", name="bandwidth").press("End")
    page.get_by_role("slider", name="model size").press("Home")
    expect(page.locator("#verdict")).to_contain_text("use NCCL")


# ── bucket ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_bucket_can_be_stepped_through_to_the_end(view: View) -> None:
    page = view(url("bucket"))
    forward, said = page.get_by_role("button", name="next step"), page.locator("#said")
    seen = [said.inner_text()]
    while forward.is_enabled():
        forward.click()
        seen.append(said.inner_text())
    for text in ("falls asleep", "joins late", "is killed", "finds nothing new", "wakes up"):
        assert any(text in one for one in seen), text
    expect(page.get_by_role("button", name="Again")).to_be_visible()
    page.get_by_role("slider").press("Home")
    expect(said).to_contain_text("publishes version 0")
    page.keyboard.press("ArrowRight")
    expect(said).to_contain_text("joins")


def test_bucket_a_killed_writer_leaves_what_no_manifest_names(view: View) -> None:
    page = view(url("bucket"))
    steps = page.evaluate("data.steps")
    killed = next(i for i, step in enumerate(steps) if step["kind"] == "killed")
    page.get_by_role("slider").fill(str(killed))
    assert page.locator("#picture rect[stroke-dasharray='4 3']").count() == 1
    page.get_by_role("slider").fill(str(len(steps) - 1))
    assert page.locator("#picture rect[stroke-dasharray='4 3']").count() == 1
    assert set(steps[-1]["at"].values()) == {steps[killed]["at"]["replica 1"] + 1}


def test_bucket_plays(view: View) -> None:
    page = view(url("bucket"))
    page.clock.install()
    page.get_by_role("button", name="Play").click()
    page.clock.run_for(90_000)
    expect(page.locator("#said")).to_contain_text("wakes up")
