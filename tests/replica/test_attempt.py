"""Ways to a version that lead over others, and around what cannot be used."""

from __future__ import annotations

import pytest

from deltawire.core.errors import HashMismatch, MissingBase, StoreUnavailable
from deltawire.replica import Replica
from deltawire.replica.host import HostShard
from deltawire.store import Store
from support import HookedStore, copy, delta_key, history, publish, same, spoil


def test_a_detour_never_shows_older_weights(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """At version 5, with the delta to 6 spoilt, the way to 8 leads over version 0 and 4. Nobody is served those."""
    versions = history(9)
    publish(store, versions, skip_every=4, anchor_ratio=1e9)
    live = copy(versions[5])
    replica = Replica(store, heartbeat=0)
    replica.sync(live, 5)
    spoil(store, delta_key(store, 6))
    seen: list[int] = []
    real = HostShard.load
    monkeypatch.setattr(
        HostShard,
        "load",
        lambda self, source: (seen.extend(v for v in range(9) if same(live, versions[v])), real(self, source)),
    )
    assert replica.sync(live) == 8
    assert seen == [5], "from 5 to 8 in one go"
    assert same(live, versions[8])


def test_a_detour_that_fails_changes_nothing(store: Store) -> None:
    versions = history(9)
    publish(store, versions, skip_every=4, anchor_ratio=1e9)
    live = copy(versions[5])
    replica = Replica(store, heartbeat=0)
    replica.sync(live, 5)
    spoil(store, delta_key(store, 6))
    spoil(store, delta_key(store, 8, base=4))
    with pytest.raises(HashMismatch):
        replica.sync(live)
    assert replica.version == 5
    assert same(live, versions[5])


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
