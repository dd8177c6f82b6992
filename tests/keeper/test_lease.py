"""Which of several keepers works."""

from __future__ import annotations

import pytest

from deltawire.core import keys
from deltawire.core.manifest import dump
from deltawire.keeper import lease as module
from deltawire.keeper.lease import KeeperLease, Lease
from keeping import Kept, fresh, settings


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    settings(monkeypatch)


@pytest.fixture
def kept() -> Kept:
    return fresh(2)


def test_one_works_and_the_other_takes_its_place_when_it_ends(kept: Kept) -> None:
    one, other = Lease(kept.run, "one"), Lease(kept.run, "other")
    assert one.hold()
    assert not other.hold()
    assert other.holder == "one"
    one.release()
    assert other.hold()
    assert not one.hold()
    one.release()  # not its own: it stays
    assert other.hold()
    assert not one.hold()


def test_a_dead_keeper_is_replaced_by_the_clock_of_the_store(kept: Kept) -> None:
    assert Lease(kept.run, "dead").hold()
    assert not Lease(kept.run, "other", lease_s=60.0).hold()
    # nobody renews it, and any time is too long
    assert Lease(kept.run, "other", lease_s=-1.0).hold()
    assert Lease(kept.run, "dead").holder == ""
    assert not list(kept.store.list(keys.CLOCK))


def test_of_two_that_take_it_together_the_last_one_has_it(kept: Kept) -> None:
    other = Lease(kept.run, "other")

    def meanwhile(seconds: float) -> None:
        assert seconds == module.SETTLE_S
        kept.store.put(keys.KEEPER, dump(KeeperLease(kept.run.info.run, "other", 0.0)))

    assert not Lease(kept.run, "one", sleep=meanwhile).hold()
    assert other.hold()


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b" " * 100_000, b'{"run":"x","keeper":"y","at":1}'])
def test_what_is_no_lease_of_this_run_keeps_nobody_away(kept: Kept, content: bytes) -> None:
    kept.store.put(keys.KEEPER, content)
    assert Lease(kept.run, "one").hold()
    assert not Lease(kept.run, "other").hold()
