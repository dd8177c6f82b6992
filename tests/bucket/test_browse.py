"""The runs below an address, without a listing of their objects."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltawire.bucket import browse
from deltawire.core.errors import Unsupported
from deltawire.store import LocalStore, Store
from support import model, publish


def test_runs_are_found_at_every_depth_and_not_below_another_run(tmp_path: Path) -> None:
    for place in ("one", "team/two", "team/two/inside"):
        publish(LocalStore(tmp_path / place), [model()])
    store = LocalStore(tmp_path)
    assert browse.find(store, 0) == []
    assert browse.find(store, 1) == ["one/"]
    assert browse.find(store, 5) == ["one/", "team/two/"]
    assert browse.find(LocalStore(tmp_path / "one"), 0) == [""]


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
