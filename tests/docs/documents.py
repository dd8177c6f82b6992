"""The code blocks of the documents, and the tag of each that says which suite runs it.

A tag is a comment on the line before the block:

    <!-- runs: everyday -->                        in `make test`; also `slow` (make test-all), `vllm` (make test-vllm)
                                                   and `trl` (make test-all, in an environment that has TRL)
    <!-- runs: everyday, with chat -->             after that scene of tests/docs/scenes.py has prepared what it needs
    <!-- runs: slow, until "now serving" -->       does not end by itself: until it prints this. Commands get a terminal
                                                   each, and run until the end of the page
    <!-- tested by: tests/test_soak.py::test -->   too large to run as typed; this test does the same thing
    <!-- shown: reason -->                         output, a picture, or what needs an account
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SUITES = ("everyday", "slow", "vllm", "trl")
PAGES = ("*.md", "docs/**/*.md", "examples/**/*.md", "deploy/**/*.md")
LANGUAGES = {"python": "python", "bash": "bash", "sh": "bash", "console": "bash"}

_TAG = re.compile(r"<!-- (runs|tested by|shown): (.+) -->\s*$")
_RUNS = re.compile(r'(\w+)(?:, with (\w+))?(?:, until "([^"]+)")?$')


@dataclass(frozen=True, slots=True)
class Block:
    page: str
    """Path of the document within the repository."""
    line: int
    """Line number of the first line of code."""
    language: str
    """What stands after the opening fence; empty for plain text."""
    code: str
    kind: str
    """`runs`, `tested by` or `shown`."""
    suite: str = ""
    """The suite that runs it, for `runs`."""
    scene: str = ""
    """Name of a scene in stage.py."""
    until: str = ""
    """What the block prints when it has done its work, if it does not end by itself."""
    reason: str = ""
    """The test, for `tested by`; why it is not run, for `shown`."""

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


@cache
def pages() -> tuple[str, ...]:
    found = {path.relative_to(ROOT).as_posix() for pattern in PAGES for path in ROOT.glob(pattern)}
    return tuple(sorted(found - {"CHANGELOG.md"}))


def blocks(page: str) -> list[Block]:
    """All code blocks of a page; ValueError names the first one without a proper tag."""
    return parse(page, (ROOT / page).read_text())


def parse(page: str, text: str) -> list[Block]:
    found: list[Block] = []
    lines = text.split("\n")
    at = 0
    while at < len(lines):
        line = lines[at]
        if line.startswith("```"):
            end = next((i for i in range(at + 1, len(lines)) if lines[i].startswith("```")), None)
            if end is None:
                raise ValueError(f"{page}:{at + 1}: this block has no end")
            found.append(_block(page, lines, at, end))
            at = end
        elif line.startswith("    ") and line.strip() and (at == 0 or not lines[at - 1].strip()):
            raise ValueError(f"{page}:{at + 1}: an indented block; put it between ``` fences, with a tag:\n{HOW}")
        at += 1
    return found


HOW = (__doc__ or "").split("\n\n", 1)[1]
"""What the message about a missing tag explains."""


def _block(page: str, lines: list[str], start: int, end: int) -> Block:
    language = lines[start][3:].strip()
    code = "\n".join(lines[start + 1 : end]) + "\n"
    tag = _TAG.match(lines[start - 1]) if start else None
    if tag is None:
        raise ValueError(
            f"{page}:{start + 1}: this block has no tag on the line before it. Say how it is tested:\n{HOW}"
        )
    kind, rest = tag.groups()
    if kind != "runs":
        return Block(page, start + 2, language, code, kind, reason=rest)
    runs = _RUNS.match(rest)
    if runs is None or runs[1] not in SUITES or language not in LANGUAGES:
        raise ValueError(f"{page}:{start}: cannot read this tag, or the block is neither bash nor python:\n{HOW}")
    suite, scene, until = (part or "" for part in runs.groups())
    return Block(page, start + 2, LANGUAGES[language], code, kind, suite, scene, until)


def to_run(suite: str) -> list[str]:
    """Pages with blocks of this suite. A page that cannot be read is left to the test of its tags."""
    found = []
    for page in pages():
        with suppress(ValueError):
            if any(block.suite == suite for block in blocks(page)):
                found.append(page)
    return found
