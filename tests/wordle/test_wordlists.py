from __future__ import annotations

from importlib import resources
from pathlib import Path

import pytest

from deltawire_wordle.wordlists import LISTS, load


def test_the_lists_that_ship() -> None:
    toy, common, more = (set(load(name)) for name in ("toy", "scowl-10", "scowl-20"))
    assert (len(toy), len(common), len(more)) == (64, 595, 1355)
    assert toy < common < more


def test_the_notice_ships_with_the_words() -> None:
    notice = (resources.files("deltawire_wordle") / "words" / "COPYRIGHT").read_text("utf-8")
    assert "Copyright 2000-2011 by Kevin Atkinson" in notice
    assert "provided that the above copyright notice appears in all copies" in notice


def test_a_word_list_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "words.txt"
    path.write_text("# mine\nslate\n\nCRANE  # a bird\ncrane\n")
    assert load(str(path)) == ("crane", "slate")


@pytest.mark.parametrize(
    "content, complaint",
    [
        (b"crane\nbirds!\n", "line 2"),
        (b"", "no words"),
        (b"# only remarks\n", "no words"),
        (b"cr\xe5ne\n", "not UTF-8"),
        ("crâne\n".encode(), "line 1"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "words.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=complaint) as caught:
        load(str(path))
    assert "words.txt" in str(caught.value)


def test_an_unknown_name_lists_what_there_is() -> None:
    with pytest.raises(ValueError) as caught:
        load("scowl-99")
    assert all(name in str(caught.value) for name in LISTS)
