"""Ways to a version: the cheapest, another around a bad link, and none."""

from __future__ import annotations

import pytest

from deltawire.bucket.run import Run
from deltawire.bucket.walk import Walker
from deltawire.core.chain import Step
from deltawire.core.errors import DeltawireError, HashMismatch, MissingBase, StoreUnavailable
from deltawire.store import Store
from deltawire.trainer import Publisher
from support import history


@pytest.fixture
def run(store: Store) -> Run:
    with Publisher(store, anchor_every=2, anchor_ratio=1e9) as publisher:
        for weights in history(5):
            publisher.publish(weights).result(60)
    return Run.open(store)


def kinds(steps: list[Step]) -> list[tuple[int, str]]:
    return [(step.version, step.kind) for step in steps]


def test_what_is_left_out_is_planned_around(run: Run) -> None:
    walker = Walker(run)
    first = walker.plan(3, 4)
    assert kinds(first) == [(4, "delta")]
    walker.leave_out(first)
    assert kinds(walker.plan(3, 4)) == [(4, "anchor")]
    walker.leave_out(walker.plan(3, 4))
    with pytest.raises(MissingBase):
        walker.plan(3, 4)
    # what was bad may be repaired since: another attempt begins anew
    assert Walker(run).plan(3, 4) == first


@pytest.mark.parametrize("failure", [HashMismatch("bad"), StoreUnavailable("away")], ids=["damaged", "away"])
def test_it_goes_on_until_no_way_is_left(run: Run, failure: DeltawireError) -> None:
    walker, tried = Walker(run), []

    def go(steps: list[Step]) -> DeltawireError:
        tried.append(kinds(steps))
        walker.leave_out(steps[-1:])
        return failure

    # an object that stays away is as good as lost; damage is named as it is
    with pytest.raises(HashMismatch if isinstance(failure, HashMismatch) else MissingBase, match=str(failure)):
        walker.reach(4, lambda: 3, go)
    assert tried == [[(4, "delta")], [(4, "anchor")]]


def test_a_manifest_that_was_replaced_excuses_its_link_once(run: Run, store: Store) -> None:
    walker = Walker(run)
    (step,) = walker.plan(3, 4)
    assert not walker.renew(step)
    key = "versions/000004.json"
    data = store.get(key).data
    store.put(key, data.replace(b'"changed":', b'"changed":1', 1))
    assert walker.renew(step)
    assert not walker.renew(step)
