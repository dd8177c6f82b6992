"""The source tree in docs/design.md names every module, and only modules that exist."""

from __future__ import annotations

import re

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
