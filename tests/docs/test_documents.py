"""Every command and snippet of the documents runs, taken from the documents; a block without a tag fails here."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from documents import ROOT, blocks, pages, parse, to_run
from pip_check import main as pip
from scenes import SCENES
from stage import Stage

from deltawire_wordle.seaweed import SeaweedFS


@pytest.fixture
def stage(tmp_path: Path, seaweed: SeaweedFS) -> Iterator[Stage]:
    with Stage(tmp_path, seaweed, f"s3://deltawire/{tmp_path.name}") as made:
        yield made


@pytest.mark.parametrize("page", to_run("everyday"))
def test_everyday(page: str, stage: Stage) -> None:
    stage.run_all(blocks(page), "everyday", SCENES)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", to_run("slow"))
def test_slow(page: str, stage: Stage) -> None:
    stage.run_all(blocks(page), "slow", SCENES)


# ── the tags ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("page", pages())
def test_every_block_has_a_tag(page: str) -> None:
    """A failure here says what to write above a new block."""
    for block in blocks(page):
        if block.kind == "tested by":
            assert_test_exists(block.reason, block.place)
        elif block.scene:
            assert block.scene in SCENES, f"{block.place}: tests/docs/scenes.py has no {block.scene!r}"


def assert_test_exists(name: str, place: str) -> None:
    path, _, function = name.partition("::")
    file = ROOT / path
    assert file.is_file(), f"{place}: there is no {path}"
    if function:
        assert re.search(rf"def {re.escape(function)}\(", file.read_text()), f"{place}: {path} has no {function}"


@pytest.mark.parametrize(
    "text",
    [
        "```bash\nls\n```",  # no tag
        "<!-- runs: everyday -->\n\n```bash\nls\n```",  # not on the line before
        "<!-- runs: sometimes -->\n```bash\nls\n```",
        "<!-- runs: everyday -->\n```\nls\n```",  # in which language?
        "text\n\n    indented",
        "<!-- shown: why -->\n```\nnever ends",
    ],
)
def test_a_block_without_a_proper_tag_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="page:"):
        parse("page", text)


def test_tags_are_read() -> None:
    (block,) = parse("page", '<!-- runs: slow, with trl, until "now serving" -->\n```python\nx\n```')
    assert (block.suite, block.scene, block.until, block.line) == ("slow", "trl", "now serving", 3)
    (block,) = parse("page", "<!-- shown: a picture -->\n```\n──\n```")
    assert (block.kind, block.reason) == ("shown", "a picture")


@pytest.mark.parametrize("words", ["deltawire", "-e .[tourch]", "numppy", "deltawire[hub]"])
def test_what_cannot_be_installed_is_refused(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert pip(["install", *words.split()])


def test_installing_from_the_clone_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert pip(["install", "-e", ".[torch,hub]", "vllm==0.33.0"]) is None


# ── the table of compatibility ───────────────────────────────────────────────────────────────────────────────────────


def test_every_cell_of_the_compatibility_tables_names_a_test_that_exists() -> None:
    tables, _, tests = (ROOT / "docs/compatibility.md").read_text().partition("## The tests")
    named = dict(re.findall(r"^(\d+)\. `(.+)`$", tests, re.M))
    for name in named.values():
        assert_test_exists(name, "docs/compatibility.md")
    assert set(re.findall(r"\[(\d+)\]", tables)) == set(named)


def test_no_cell_of_the_compatibility_tables_is_left_open() -> None:
    """Tested, should work, or no."""
    said = re.compile(r"\[\d+\]|should work|\bno\b|as dense|reloaded whole|not tried|what all tests run on")
    for line in (ROOT / "docs/compatibility.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("| ") else []
        refused = any(cell.startswith("no:") for cell in cells)
        for cell in cells[2:]:
            header = cells[0] in ("trainer", "weights")
            assert header or said.search(cell) or (refused and not cell), f"{cells[0]!r}: {cell!r}"


# ── figures ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("model", ["stories15m", "smollm2"])
def test_the_tables_of_density_are_the_results(model: str) -> None:
    """Row for row as benchmarks/density.py printed them; no row is missing, and none is from another run."""
    name = f"benchmarks/results/density-{model}.json"
    result = json.loads((ROOT / name).read_text())
    page = (ROOT / "docs/density.md").read_text()
    assert result["about"]["command"] in page
    table = page.partition(f"`{name}`")[2].partition("\n## ")[0]
    printed = [line for line in table.splitlines() if line.startswith("| ")][1:]
    expected = []
    for row in result["rows"]:
        bits, part = row["bits_per_change"], row["of_full"]
        cells = [row["row"], f"{row['start']:.2%}", f"{row['steady']:.2%}", f"{bits['packed']:.1f}"]
        cells += [f"{bits['context']:.1f}", f"{part['packed']:.2%}", f"{part['context']:.2%}"]
        expected.append(f"| {' | '.join(cells)} |".replace("%", " %"))
    assert printed == expected


# ── links ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("page", pages())
def test_every_link_leads_somewhere(page: str) -> None:
    """To a file, and to a heading of it; also a page, test, benchmark or result that is only named."""
    text = (ROOT / page).read_text()
    for path, heading in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)]+))?\)", text):
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), f"{page}: there is no {path}"
        if heading:
            headings = re.findall(r"^#+ (.+)$", target.read_text(), re.M)
            assert heading in {_anchor(one) for one in headings}, f"{page}: {path} has no heading #{heading}"
    for path in re.findall(
        r"(?<![\w./-])((?:docs|tests|benchmarks|examples|src)/[\w./-]+\.(?:md|py|json|svg|sh))\b", text
    ):
        found = (ROOT / path).exists() or page.startswith("deploy/")
        assert found, f"{page}: there is no {path}"


def _anchor(heading: str) -> str:
    """As GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
