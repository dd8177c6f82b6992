"""The runs below an address, without a listing of their objects."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

from deltawire.bucket import browse
from deltawire.core import keys
from deltawire.core.errors import Unsupported
from deltawire.store import LocalStore, Store
from deltawire.store.base import Level
from support import model, publish


def test_runs_are_found_at_every_depth(tmp_path: Path) -> None:
    for place in ("one", "team/two"):
        publish(LocalStore(tmp_path / place), [model()])
    store = LocalStore(tmp_path)
    assert browse.find(store, 0) == []
    assert browse.find(store, 1) == ["one/"]
    assert browse.find(store, 5) == ["one/", "team/two/"]
    assert browse.find(LocalStore(tmp_path / "one"), 0) == [""]


def test_a_run_at_the_root_of_a_bucket_hides_no_other(tmp_path: Path) -> None:
    """Its own folders are not looked into, however many objects they have, and those of the others do not count."""
    publish(LocalStore(tmp_path), [model()])
    alone = browse.runs(LocalStore(tmp_path), 3, stored=True)[0].stored
    for place in ("one", "one/inside", "team/two"):
        publish(LocalStore(tmp_path / place), [model()])

    class Looked(LocalStore):
        seen: ClassVar[list[str]] = []

        def folders(self, prefix: str = "") -> Level:
            self.seen.append(prefix)
            return super().folders(prefix)

    assert browse.find(Looked(tmp_path), 3) == ["", "one/", "one/inside/", "team/two/"]
    assert sorted(Looked.seen) == ["", "one/", "one/inside/", "team/", "team/two/"]
    assert browse.runs(LocalStore(tmp_path), 0, stored=True)[0].stored == alone
    # all that a run has is known by name
    assert {key.partition("/")[0] + "/" for key in _keys(tmp_path / "team" / "two") if "/" in key} <= {*keys.FOLDERS}


def _keys(folder: Path) -> list[str]:
    return [item.key for item in LocalStore(folder).list()]


def test_a_listed_run_has_its_figures_or_what_is_wrong_with_it(tmp_path: Path) -> None:
    publish(LocalStore(tmp_path / "good"), [model()])
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "run.json").write_text("{")
    bad, good = browse.runs(LocalStore(tmp_path), 1, stored=True)
    assert bad.error
    assert bad.newest is None
    assert (good.newest, good.error) == (0, "")
    assert good.bytes == sum(array.nbytes for array in model().values())
    assert good.stored is not None
    assert good.stored > good.bytes // 2


def test_the_address_of_a_prefix_keeps_the_options_of_the_store() -> None:
    class Somewhere:
        url = "s3://bucket/runs?region=eu-west-1"

    assert browse.below(Somewhere(), "a b/") == "s3://bucket/runs/a%20b?region=eu-west-1"  # type: ignore[arg-type]
    assert browse.below(Somewhere(), "") == Somewhere.url  # type: ignore[arg-type]


def test_a_store_that_cannot_list_one_level_is_refused(store: Store) -> None:
    class Flat:
        url = "flat://"

    with pytest.raises(Unsupported, match="one level"):
        browse.find(Flat(), 1)  # type: ignore[arg-type]
