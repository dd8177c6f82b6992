"""What a data object of a run contains, read from as few bytes as possible."""

from __future__ import annotations

import pytest

from deltawire.bucket.contents import opened, read, tells_steps
from deltawire.bucket.run import Run
from deltawire.core.errors import HashMismatch
from deltawire.store import Store
from deltawire_wordle.counting import CountingStore
from support import history, publish


def test_changes_per_tensor_come_from_the_header_alone(store: Store) -> None:
    versions = history(2, changes=5)
    publish(store, versions, encoding="packed")
    link = Run.open(store).manifest(1).main
    counting = CountingStore(store)
    found = {part.name: part.changed for part in read(counting, link)[0]}
    # eight bytes are two units, and units are what a delta counts
    units = {name: f"u{min(array.itemsize, 4)}" for name, array in versions[0].items()}
    expected = {
        name: int((old.reshape(-1).view(units[name]) != versions[1][name].reshape(-1).view(units[name])).sum())
        for name, old in versions[0].items()
    }
    assert found == {name: count for name, count in expected.items() if count}
    assert counting.bytes_in == sum(blob.head_size for blob in link.objects)


def test_steps_are_counted_for_every_changed_weight(store: Store) -> None:
    publish(store, history(2), encoding="packed")
    link = Run.open(store).manifest(1).main
    assert tells_steps(link)
    parts, found = read(store, link, steps=True)
    assert int(found.up.sum() + found.down.sum()) == sum(part.changed or 0 for part in parts)
    assert not tells_steps(Run.open(store).manifest(0).main)


def test_a_header_that_was_changed_is_refused(store: Store) -> None:
    publish(store, history(2), encoding="packed")
    (blob,) = Run.open(store).manifest(1).main.objects
    data = bytearray(store.get(blob.key).data)
    data[12] ^= 1
    store.put(blob.key, bytes(data))
    with pytest.raises(HashMismatch, match=blob.key), opened(store, blob, whole=False):
        pass
