"""Word lists: those that ship (excerpts from SCOWL, see words/COPYRIGHT) and files of one's own."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from .wordle import well_formed

LISTS = {
    "toy": ("toy.txt",),  # 64 words, what the small policy plays
    "scowl-10": ("scowl-10.txt",),  # the most common words
    "scowl-20": ("scowl-10.txt", "scowl-20.txt"),  # and the next most common
}
_LARGEST = 16 * 1024 * 1024


def load(name: str) -> tuple[str, ...]:
    """The words of a list that ships, by name, or of a file with one word per line; sorted, each once.

    Files may hold empty lines and comments (#). Upper case counts as lower case.
    """
    if name in LISTS:
        folder = resources.files(__package__) / "words"
        return _parse("\n".join((folder / file).read_text("utf-8") for file in LISTS[name]), name)
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"{name} is no file and none of the lists that ship: {', '.join(LISTS)}")
    if path.stat().st_size > _LARGEST:
        raise ValueError(f"{name} is larger than {_LARGEST // 2**20} MiB; that is no list of five-letter words")
    try:
        return _parse(path.read_text("utf-8"), name)
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 text ({error.reason} at byte {error.start})") from None


def _parse(text: str, name: str) -> tuple[str, ...]:
    words = set()
    for number, line in enumerate(text.splitlines(), 1):
        word = line.partition("#")[0].strip().lower()
        if word and not well_formed(word):
            raise ValueError(f"{name}, line {number}: {word[:40]!r} is not a word of five letters a-z")
        if word:
            words.add(word)
    if not words:
        raise ValueError(f"{name} has no words")
    return tuple(sorted(words))
