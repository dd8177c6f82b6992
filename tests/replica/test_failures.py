"""What is not tried again for now, and what is passed over."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from deltawire.core.chain import Step
from deltawire.core.errors import VersionRefused
from deltawire.replica import Replica
from deltawire.replica.failures import Failures
from deltawire.replica.model import ModelTarget
from deltawire.replica.target import Update
from deltawire.store import Store
from support import copy, model, publish, same


@pytest.mark.parametrize("refused", [{3}, {3, 4}, {4, 5}])
def test_follow_every_version_but_those_that_are_refused(
    store: Store, monkeypatch: pytest.MonkeyPatch, refused: set[int]
) -> None:
    """They are tried once and passed over, whether they are the newest or not."""
    # other weights each: no delta leads to one of them through another
    versions = [model(seed) for seed in range(7)]
    publish(store, versions)
    stage, tried = ModelTarget.stage, []

    def refuse(target: ModelTarget, update: Update) -> Any:
        if update.final:
            assert update.version not in tried
            tried.append(update.version)
        if update.final and update.version in refused:
            raise VersionRefused("a reason")
        return stage(target, update)

    monkeypatch.setattr(ModelTarget, "stage", refuse)
    live = copy(versions[1])
    reached = [version for version in range(1, 7) if version not in refused]
    seen, stop = [], threading.Event()
    for version in Replica(store, heartbeat=0).follow(live, poll=0.002, every=True, stop=stop):
        seen.append(version)
        if version == 6:
            stop.set()
    assert seen == reached
    assert tried == [2, 3, 4, 5, 6]
    assert same(live, versions[6])


def test_a_refusal_holds_until_its_cause_is_gone_or_a_later_version_is_reached() -> None:
    failures, ended = Failures(), False
    failures.refuse(3, VersionRefused("another base", has_ended=lambda: ended))
    assert (failures.is_refused(3), failures.is_refused(4)) == (True, False)
    assert (failures.why_refused(3), failures.why_refused(None)) == ("another base", "")
    failures.reached(2)
    assert failures.is_refused(3)
    ended = True
    assert not failures.is_refused(3)
    failures.reached(3)
    assert failures.why_refused(3) == ""


def test_the_same_failure_in_a_row_counts() -> None:
    """A link that the store did not give is lost, and a version that could not be reached passed over, the second
    time; anything else in between begins anew."""
    failures, links = Failures(), [Step(2, "delta", 1, 10), Step(3, "delta", 2, 10)]
    assert [failures.is_lost(links[n]) for n in (0, 1, 0, 0)] == [False, False, False, True]
    assert [failures.skip(version) for version in (2, 3, 3)] == [False, False, True]
    assert failures.skipped == 3
