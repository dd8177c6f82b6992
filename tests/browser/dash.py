"""The page of a run in a real Chromium: it draws, its controls work, it follows, and it shows text as text."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser, Page, expect

from conftest import WIDTHS, View, scrolls_sideways
from deltawire.bucket.run import Run
from deltawire.core.manifest import SyncRecord
from deltawire.dash import PageServer, serve, write_page
from deltawire.store import LocalStore, ObjectStore, Store
from deltawire.trainer import Publisher
from tests.dash.dash_support import beat, long_run, real_run
from tests.support import trained

PANELS = ("time", "behind", "lanes", "replicas", "bytes", "changed", "metrics", "chain", "heat", "steps", "failures")
HOSTILE = "</script><img src=x onerror=alert(1)><b>bold</b>"


@pytest.fixture
def store() -> Store:
    return ObjectStore.from_url(f"memory://{uuid.uuid4()}")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run of 50 versions as a page of its own."""
    folder = tmp_path_factory.mktemp("file")
    store = LocalStore(folder / "run")
    real_run(store, 50, anchor_ratio=2.0)
    broken = (SyncRecord(49, 40, time.time() - 1, 0.5, 10, {"fetch": 0.4}, "the hash does not match", 3),)
    beat(store, Run.open(store), "broken", 40, syncs=broken, error="the hash does not match")
    write_page(store, folder / "run.html")
    return (folder / "run.html").as_uri()


@pytest.fixture
def live(store: Store) -> Iterator[PageServer]:
    with serve(store) as server:
        yield server


def panel(page: Page, name: str) -> Any:
    return page.locator(f"[data-panel={name}]")


def tip(page: Page) -> Any:
    return page.locator("#tip")


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_everything_is_drawn(file: str, view: View, width: int, dark: bool) -> None:
    page = view(file, width=width, dark=dark)
    expect(page.locator(".tile")).to_have_count(6)
    expect(page.locator(".tile .value").nth(1)).to_have_text("v49")
    for name in (*PANELS, "versions"):
        expect(panel(page, name)).to_be_visible()
        expect(panel(page, name).locator("h2")).not_to_be_empty()
        assert "could not be drawn" not in panel(page, name).inner_text()
    for name in ("time", "behind", "bytes", "changed", "metrics", "lanes", "heat"):
        assert (
            panel(page, name)
            .locator("canvas")
            .evaluate_all(
                "all => all.every(c => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some(v => v))"
            )
        )
    assert not scrolls_sideways(page)
    theme = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (theme == "rgb(15, 20, 26)") == dark


def test_figures_are_those_of_the_run(file: str, view: View) -> None:
    page = view(file)
    tiles = page.locator(".tile")
    expect(tiles.nth(0)).to_contain_text("in 49 deltas")
    expect(tiles.nth(3)).to_contain_text("9 behind")
    expect(panel(page, "failures")).to_contain_text("the hash does not match")
    expect(panel(page, "failures")).to_contain_text("3 times")
    expect(panel(page, "replicas").locator("tbody tr")).to_have_count(3)
    expect(panel(page, "versions").locator("tbody tr")).to_have_count(50)


def test_controls(file: str, view: View) -> None:
    page = view(file)
    for name, pressed in (("time", "Whole run"), ("behind", "Seconds"), ("lanes", "Timeline"), ("lanes", "Duration")):
        button = panel(page, name).get_by_role("button", name=pressed)
        button.click()
        expect(panel(page, name).get_by_role("button", name=pressed)).to_have_attribute("aria-pressed", "true")
    # seconds need another axis than versions, so another chart
    before = panel(page, "behind").locator(".uplot").element_handle()
    panel(page, "behind").get_by_role("button", name="Versions").click()
    assert not before.evaluate("node => node.isConnected")
    chain = panel(page, "chain")
    expect(chain.locator("svg")).to_contain_text("v49")
    chain.get_by_role("button", name="Earlier").click()
    expect(chain.locator("svg")).to_contain_text("v39")
    expect(chain.locator("svg")).not_to_contain_text("v49")
    chain.get_by_role("button", name="Newest").click()
    expect(chain.locator("svg")).to_contain_text("v49")
    theme = page.locator("#theme")
    for wanted in ("Light", "Dark", "Auto"):
        theme.click()
        expect(theme).to_have_text(wanted)


def test_pointing_at_a_chart_tells_its_values(file: str, view: View) -> None:
    page = view(file)
    for name, said in (("bytes", "to fetch"), ("changed", "changed"), ("time", "trainer"), ("heat", "version")):
        surface = (
            panel(page, name).locator(".u-over, canvas").last
            if name != "heat"
            else panel(page, name).locator("canvas").first
        )
        surface.scroll_into_view_if_needed()
        box = surface.bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + box["height"] * 0.5)
        expect(tip(page)).to_contain_text(said)


def test_a_drag_zooms_and_a_double_click_shows_all(file: str, view: View) -> None:
    page = view(file)
    over = panel(page, "changed").locator(".u-over")
    over.scroll_into_view_if_needed()
    box = over.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.75, box["y"] + 50, steps=4)
    page.mouse.up()
    page.mouse.move(box["x"] + 2, box["y"] + 50)
    expect(tip(page)).to_contain_text("v25")
    page.mouse.dblclick(box["x"] + 40, box["y"] + 50)
    page.mouse.move(box["x"] + 1, box["y"] + 50)
    expect(tip(page)).to_contain_text("v0")


def test_keys_reach_everything(file: str, view: View) -> None:
    page = view(file)
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    seen = set()
    for _ in range(80):
        page.keyboard.press("Tab")
        name = page.evaluate(
            "document.activeElement.closest('[data-panel]')?.dataset.panel ?? document.activeElement.id"
        )
        seen.add(name)
    assert {*PANELS, "versions"} - {"steps"} <= seen
    assert "theme" in seen
    for name, said in (("bytes", "v49"), ("lanes", "sync in all"), ("chain", "proven by"), ("heat", "changed")):
        panel(page, name).locator("[aria-roledescription=chart]").first.focus()
        page.keyboard.press("ArrowLeft" if name != "heat" else "End")
        expect(tip(page)).to_be_visible()
        expect(tip(page)).to_contain_text(said)
        page.keyboard.press("Escape")
        expect(tip(page)).to_be_hidden()


def test_a_new_version_appears(live: PageServer, store: Store, view: View) -> None:
    weights = real_run(store, 5)
    page = view(live.url)
    newest = page.locator(".tile .value").nth(1)
    expect(newest).to_have_text("v4")
    expect(page.locator("#state")).to_have_text("live")
    took = []
    with Publisher(store, encoding="packed") as publisher:
        publisher.resume(weights[-1])
        for version in range(5, 8):
            weights.append(trained(weights[-1], version))
            publisher.publish(weights[-1], metrics={"reward": 1.0}).result(120)
            began = time.monotonic()
            expect(newest).to_have_text(f"v{version}")
            took.append(time.monotonic() - began)
    print("seconds until a version was on the page:", [round(t, 2) for t in took])
    expect(panel(page, "versions").locator("tbody tr").first).to_contain_text("v7")


def test_a_run_that_appears_later(live: PageServer, store: Store, view: View) -> None:
    page = view(live.url)
    expect(page.locator("#empty")).to_contain_text("There is no run at this address yet")
    real_run(store, 3)
    expect(page.locator(".tile .value").nth(1)).to_have_text("v2")
    expect(page.locator("#empty")).to_be_hidden()


def test_detail_on_demand(store: Store, view: View) -> None:
    long_run(store, 3000, 20)
    with serve(store) as server:
        page = view(server.url)
        expect(page.locator(".tile .value").nth(1)).to_have_text("v2,999")
        lanes = panel(page, "lanes")
        lanes.get_by_role("button", name="Show all 20").click()
        expect(lanes.get_by_role("button", name="Show 12")).to_be_visible()
        steps = panel(page, "steps")
        steps.get_by_role("spinbutton", name="Version").fill("17")
        steps.get_by_role("button", name="Compute").click()
        expect(steps).to_contain_text("v17")
        chain = panel(page, "chain")
        for _ in range(9):
            chain.get_by_role("button", name="Earlier").click()
        expect(chain.locator("svg circle[r='6']").first).to_be_visible()
        before = page.locator("[data-panel=heat] .sub").inner_text()
        panel(page, "heat").get_by_role("button", name="Read more versions").click()
        expect(page.locator("[data-panel=heat] .sub")).not_to_have_text(before)
        # a zoom into the merged past shows single versions
        over = panel(page, "changed").locator(".u-over")
        over.scroll_into_view_if_needed()
        box = over.bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + box["width"] * 0.2, box["y"] + 50)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + 50, steps=4)
        page.mouse.up()
        expect(tip(page)).not_to_contain_text("mean")
        page.wait_for_timeout(500)
        page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 60)
        expect(tip(page)).to_be_visible()
        expect(tip(page)).not_to_contain_text("mean")


def test_hostile_text_is_text(tmp_path: Path, view: View) -> None:
    store = LocalStore(tmp_path / "run")
    rng = np.random.default_rng(0)
    weights = {HOSTILE: rng.integers(0, 1 << 16, (64, 16), np.uint16), "plain": rng.integers(0, 9, (32,), np.uint16)}
    with Publisher(store, encoding="packed") as publisher:
        for version in range(4):
            names = (HOSTILE[:40], "__proto__", "constructor") if version else ()
            publisher.publish(weights, metrics=dict.fromkeys(names, 1.0)).result(120)
            weights = {
                name: array ^ (np.arange(array.size).reshape(array.shape) == version) for name, array in weights.items()
            }
    run = Run.open(store)
    failed = (SyncRecord(3, 2, time.time() - 1, 0.1, 1, {HOSTILE[:30]: 0.1}, HOSTILE),)
    beat(store, run, "r", 2, error=HOSTILE, syncs=failed)
    write_page(store, tmp_path / "run.html")
    with serve(store) as server:
        for url in ((tmp_path / "run.html").as_uri(), server.url):
            page = view(url)
            dialogs: list[Any] = []
            page.on("dialog", lambda dialog, dialogs=dialogs: (dialogs.append(dialog), dialog.dismiss()))
            expect(panel(page, "failures")).to_contain_text(HOSTILE)
            expect(panel(page, "metrics")).to_contain_text(HOSTILE[:40])
            panel(page, "heat").locator("canvas").first.focus()
            page.keyboard.press("Home")
            expect(tip(page)).to_contain_text(HOSTILE)
            panel(page, "lanes").locator("canvas").focus()
            page.keyboard.press("End")
            expect(tip(page)).to_contain_text(HOSTILE[:100])
            assert page.locator("img, main b:has-text('bold'), .tip b b").count() == 0
            assert dialogs == []
            assert "could not be drawn" not in page.inner_text("main")


def test_no_script_runs_but_those_of_the_page(file: str, browser: Browser) -> None:
    # what is refused is an error in the console, so not by `view`
    page = browser.new_page()
    page.goto(file)
    blocked = page.evaluate(
        """() => new Promise((done) => {
            addEventListener('securitypolicyviolation', (event) => done(event.effectiveDirective));
            const node = document.createElement('script');
            node.textContent = 'window.ran = true';
            document.body.append(node);
        })"""
    )
    assert blocked.startswith("script-src")
    assert page.evaluate("window.ran") is None
    page.close()


def test_the_token_is_asked_for_and_a_wrong_one_is_refused(store: Store, browser: Browser) -> None:
    real_run(store, 3)
    with serve(store, token="s3cret") as server:
        # a refused request is an error in the console, so not by `view`
        page = browser.new_page()
        page.goto(server.url)
        expect(page.locator("#ask")).to_be_visible()
        expect(page.locator("#panels")).to_be_hidden()
        expect(page.locator("#tiles .tile")).to_have_count(0)
        page.get_by_label("This page needs the token").fill("wrong")
        page.keyboard.press("Enter")
        expect(page.locator("#ask")).to_contain_text("not the server's")
        page.locator("#token").fill("s3cret")
        page.keyboard.press("Enter")
        expect(page.locator(".tile .value").nth(1)).to_have_text("v2")
        page.close()
        page = browser.new_page()
        page.goto(f"{server.url}#token=s3cret")
        expect(page.locator(".tile .value").nth(1)).to_have_text("v2")
        steps = panel(page, "steps")
        field = steps.get_by_role("spinbutton", name="Version")
        expect(field).to_have_attribute("max", "2")
        field.evaluate("field => { field.form.noValidate = true; }")
        field.fill("777")
        steps.get_by_role("button", name="Compute").click()
        expect(steps).to_contain_text("no version 777")
        expect(page.locator("#state")).to_have_text("live")
        assert "s3cret" not in page.url
        page.close()


def test_the_server_ends_and_comes_back(store: Store, browser: Browser) -> None:
    real_run(store, 3)
    page = browser.new_page()
    with serve(store) as server:
        page.goto(server.url)
        expect(page.locator(".tile .value").nth(1)).to_have_text("v2")
        port = server.server_address[1]
    expect(page.locator("#state")).to_contain_text("connection lost")
    with serve(store, port):
        expect(page.locator("#state")).to_have_text("live")
    page.close()


def test_a_file_that_is_written_again_updates_an_open_page(store: Store, tmp_path: Path, view: View) -> None:
    import functools
    import http.server
    import threading

    weights = real_run(store, 3)
    write_page(store, tmp_path / "index.html")
    # servers tell browsers the time of a file in whole seconds: two files of one second are the same to them
    os.utime(tmp_path / "index.html", (0, 0))
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True).start()
    try:
        page = view(f"http://127.0.0.1:{server.server_address[1]}/index.html")
        expect(page.locator(".tile .value").nth(1)).to_have_text("v2")
        with Publisher(store) as publisher:
            publisher.resume(weights[-1])
            publisher.publish(trained(weights[-1], 3)).result(120)
        write_page(store, tmp_path / "index.html")
        expect(page.locator(".tile .value").nth(1)).to_have_text("v3")
    finally:
        server.shutdown()


def test_ten_thousand_versions_and_64_replicas(tmp_path: Path, view: View) -> None:
    store: Store = ObjectStore.from_url(f"memory://{uuid.uuid4()}")
    long_run(store)
    for item in store.list():
        # LocalStore would wait for the disk 20,000 times
        path = tmp_path / "run" / item.key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(store.get(item.key).data)
    began = time.perf_counter()
    with serve(tmp_path / "run") as server:
        page = view(server.url)
        expect(page.locator(".tile .value").nth(1)).to_have_text("v9,999")
        expect(panel(page, "versions").locator("tbody tr")).to_have_count(50)
        seconds = time.perf_counter() - began
        expect(panel(page, "replicas").locator("tbody tr")).to_have_count(64)
        page.close()
    print(f"live page of 10,000 versions and 64 replicas: {seconds:.2f} s")
    write_page(tmp_path / "run", tmp_path / "run.html")
    began = time.perf_counter()
    page = view((tmp_path / "run.html").as_uri())
    expect(panel(page, "versions").locator("tbody tr")).to_have_count(50)
    print(f"file of {(tmp_path / 'run.html').stat().st_size / 1e3:,.0f} kB: {time.perf_counter() - began:.2f} s")
    assert not scrolls_sideways(page)
