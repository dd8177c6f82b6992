"""The source tree in docs/design.md names every module, and only modules that exist."""

from __future__ import annotations

import re
from pathlib import Path

from documents import ROOT

SOURCE = ROOT / "src"


def tree() -> list[str]:
    """The paths of the tree, relative to src: two spaces per level, then the name; folders end in a slash."""
    page = (ROOT / "docs/design.md").read_text()
    (block,) = re.findall(r"^<!-- shown: the source tree -->\n```\n(.*?)^```", page, re.M | re.S)
    paths: list[str] = []
    folders: list[str] = []
    for line in filter(None, block.split("\n")):
        name = line.split()[0]
        del folders[(len(line) - len(line.lstrip())) // 2 :]
        paths.append("".join([*folders, name]))
        if name.endswith("/"):
            folders.append(name)
    return paths


def test_every_path_of_the_tree_exists() -> None:
    assert [path for path in tree() if not (SOURCE / path).exists()] == []


def test_every_module_is_in_the_tree() -> None:
    modules = {path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py") if not path.name.startswith("__")}
    assert sorted(modules - set(tree())) == []


def test_every_line_of_the_tree_says_what_the_module_does() -> None:
    page = (ROOT / "docs/design.md").read_text().partition("<!-- shown: the source tree -->")[2].partition("\n```\n")[2]
    for line in page.partition("\n```")[0].splitlines():
        assert not line or line == "deltawire/" or re.search(r"\S {2,}\S", line), f"docs/design.md: {line.strip()}"


def test_the_table_of_rooms_covers_every_module_and_says_about_how_large_they_are() -> None:
    page = (ROOT / "docs/design.md").read_text().partition("| tier | room |")[2].partition("\n\n")[0]
    said: dict[str, int] = {}
    where: dict[Path, str] = {}
    for cell, lines in re.findall(r"^\|[^|]*\| ([^|]*`) \|.*\| ([\d,]+) \|$", page, re.M):
        said[cell] = int(lines.replace(",", ""))
        for name in re.findall(r"`(.+?)`", cell):
            folder, names = re.match(r"(.*?)(?:\{(.*)\})?$", name).groups()  # type: ignore[union-attr]
            for pattern in [folder] if names is None else [folder + part for part in names.split(", ")]:
                start = SOURCE if pattern.startswith("deltawire_") else SOURCE / "deltawire"
                found = [path for ending in ("", ".py") for path in start.glob(pattern + ending)]
                assert found, pattern
                for path in found:
                    # a later row may name a file of an earlier one, which then is the later one's
                    where |= dict.fromkeys(path.rglob("*.py") if path.is_dir() else [path], cell)
    modules = {path for path in SOURCE.rglob("*.py") if path.parent != SOURCE / "deltawire"}
    assert modules <= where.keys()
    for cell, lines in said.items():
        real = sum(len(path.read_text().splitlines()) for path, room in where.items() if room == cell)
        assert abs(real - lines) <= max(100, 0.15 * real), f"{cell}: {real} lines"
