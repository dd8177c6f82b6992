"""Ways to a version that lead over others, and around what cannot be used."""

from __future__ import annotations

import pytest

import keeping
from deltawire import digest_of
from deltawire.core.errors import HashMismatch, MissingBase, StoreUnavailable
from deltawire.keeper.keeper import KeeperOptions
from deltawire.models import ModelView
from deltawire.replica import Replica
from deltawire.replica.host import HostShard
from deltawire.store import Store
from keeping import Kept
from support import HookedStore, copy, delta_key, history, publish, same, spoil


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Kept:
    """A run whose keeper has added skip deltas: 4 → 6, 4 → 7 and others."""
    keeping.settings(monkeypatch)
    kept = keeping.fresh(8)
    kept.keep(KeeperOptions(since=0, anchors=False))
    return kept


def test_a_detour_never_shows_older_weights(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """At version 5, with the delta to 6 spoilt, the way to 7 leads over version 0 and 4. Nobody is served those."""
    live = copy(kept.weights[5])
    replica = Replica(kept.store, heartbeat=0)
    replica.sync(live, 5)
    spoil(kept.store, delta_key(kept.store, 6))
    known = {digest_of(ModelView(weights)): version for version, weights in enumerate(kept.weights)}
    seen: list[int | None] = []
    real = HostShard.load
    monkeypatch.setattr(
        HostShard, "load", lambda self, source: (seen.append(known.get(digest_of(ModelView(live)))), real(self, source))
    )
    assert replica.sync(live) == 7
    assert seen == [5], "from 5 to 7 in one go"
    assert same(live, kept.weights[7])


def test_a_detour_that_fails_changes_nothing(kept: Kept) -> None:
    live = copy(kept.weights[5])
    replica = Replica(kept.store, heartbeat=0)
    replica.sync(live, 5)
    spoil(kept.store, delta_key(kept.store, 6))
    spoil(kept.store, kept.run.manifest(0).link("anchor", None).objects[0].key)
    with pytest.raises(HashMismatch):
        replica.sync(live)
    assert replica.version == 5
    assert same(live, kept.weights[5])


def test_an_object_that_the_store_fails_to_give_again_is_lost(store: Store) -> None:
    """It may be late; after some attempts the object is to blame, and a follower of every version may go on."""
    versions = history(3)
    publish(store, versions, anchor_ratio=1e9)
    key = delta_key(store, 2)

    def hook(moment: str, verb: str, asked: str) -> None:
        if asked == key:
            raise StoreUnavailable("500 Internal Server Error")

    live = copy(versions[1])
    replica = Replica(HookedStore(store, hook), heartbeat=0)
    with pytest.raises(StoreUnavailable):
        replica.sync(live)
    assert replica.rejected == []
    with pytest.raises(MissingBase, match="as good as lost, after 2 tries: 500 Internal"):
        replica.sync(live)
    assert [(step.version, type(error)) for step, error in replica.rejected] == [(2, StoreUnavailable)]
    assert same(live, versions[1])
