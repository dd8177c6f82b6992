"""The first quarter of an hour of a new user, timed: from `git clone` to a served version of a model of their own.

    make walk

Clones this repository to a temporary folder and runs the blocks of the section "Your own model, served" of
docs/quickstart.md in order, as typed, with a fresh virtual environment that the first of them makes. Only ports and
paths below /tmp are others.
"""

from __future__ import annotations

import subprocess
import tempfile
import time
from pathlib import Path

from documents import ROOT, Block, blocks
from stage import PATIENCE_S, SUBSTITUTIONS, Stage

PAGE = "docs/quickstart.md"
SECTION = "## Your own model, served"


class Walk(Stage):
    """A folder with a real clone; nothing of this environment is used."""

    substitutions = tuple(pair for pair in SUBSTITUTIONS if pair[1].startswith(("{folder}", "{port}", "curl")))

    def lay_out(self) -> None:
        subprocess.run(["git", "clone", "-q", str(ROOT), str(self.clone)], check=True)
        for name in ("VIRTUAL_ENV", "PYTHONPATH"):
            self.environment.pop(name, None)

    def run_python(self, block: Block, code: str) -> None:
        program = self.folder / f"block-{block.line}.py"
        program.write_text(code)
        self.run_bash(block, f"python {program}")


def steps() -> list[Block]:
    """The blocks of the section."""
    before, _, after = (ROOT / PAGE).read_text().partition(SECTION)
    first = before.count("\n")
    last = first + after.split("\n## ")[0].count("\n")
    return [block for block in blocks(PAGE) if first < block.line <= last and block.kind != "shown"]


def main() -> None:
    began = time.monotonic()
    PATIENCE_S.update(dict.fromkeys(("", *PATIENCE_S), 1800))
    with tempfile.TemporaryDirectory(prefix="deltawire-walk-") as folder, Walk(Path(folder), None, folder) as walk:
        print(f"{time.monotonic() - began:5.0f} s  git clone", flush=True)
        for block in steps():
            walk.run_block(block)
            first = block.code.strip().splitlines()[0]
            print(f"{time.monotonic() - began:5.0f} s  {block.place}  {first}", flush=True)


if __name__ == "__main__":
    main()
