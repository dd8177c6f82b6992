"""Deltas of a run name the digests they start from and lead to, and a reader holds them to it."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import pytest
from blake3 import blake3

import deltawire as dw
from deltawire.bucket.replay import checkout
from deltawire.bucket.run import Run
from deltawire.bucket.verify import verify
from deltawire.core import full, keys
from deltawire.core.errors import DigestMismatch, StoreUnavailable
from deltawire.core.manifest import dump
from deltawire.models import ModelView
from deltawire.replica import Replica
from deltawire.store import ObjectStore, Store
from support import HookedStore, Model, copy, history, opened, publish, same


@pytest.fixture(scope="module")
def models() -> list[Model]:
    return history(9)


@pytest.fixture
def store(models: list[Model]) -> Store:
    store = ObjectStore.from_url(f"memory://{uuid.uuid4()}")
    publish(store, models, anchor_ratio=1e6)
    return store


def test_every_delta_of_a_run_decodes_alone(store: Store, models: list[Model]) -> None:
    run = Run.open(store)
    for version in range(1, 9):
        for link in run.manifest(version).links:
            if link.kind == "delta":
                assert link.base is not None
                blob = store.get(link.objects[0].key).data
                assert same(dw.decode(blob, models[link.base]), models[version])
                with pytest.raises(DigestMismatch):
                    dw.decode(blob, models[version])


def forge(store: Store, version: int, change: Callable[[bytes], bytes]) -> None:
    """Another delta under the same manifest, which names its hash."""
    run = Run.open(store)
    manifest = run.manifest(version)
    blob = manifest.links[0].objects[0]
    data = change(store.get(blob.key).data)
    store.put(blob.key, data)
    hashes = [blake3(part).hexdigest(length=16).encode() for part in (data, data[: blob.head_size])]
    text = dump(manifest).replace(blob.hash.encode(), hashes[0]).replace(blob.head_hash.encode(), hashes[1])
    store.put(keys.manifest(version), text)


@pytest.mark.parametrize("which", [4, 5])
def test_a_delta_that_contradicts_the_manifests(store: Store, models: list[Model], which: int) -> None:
    """The changes are right and so is the hash, but one of the digests in the file is another one's."""
    digest = str(full.digest_of(ModelView(models[which]))).encode()
    forge(store, 5, lambda data: data.replace(digest, digest[::-1]))
    assert (
        str(digest[::-1], "ascii")
        in opened(store.get(Run.open(store).manifest(5).links[0].objects[0].key).data).metadata.values()
    )
    weights = copy(models[4])
    with pytest.raises(DigestMismatch):
        Replica(store, heartbeat=0).sync(weights, 5)
    assert same(weights, models[4])
    with pytest.raises(DigestMismatch):
        checkout(Run.open(store), 5)
    failure = verify(Run.open(store)).failure
    assert failure is not None
    assert (failure.version, failure.error) == (5, "DigestMismatch")


def test_a_checkout_goes_round_an_object_that_stays_unavailable() -> None:
    """One link of several: the others lead there too. A store that gives no object at all is not asked for each."""
    store, asked = ObjectStore.from_url(f"memory://{uuid.uuid4()}"), list[str]()
    publish(store, history(33), anchor_ratio=1e6, anchor_every=8)

    def failing(part: str) -> Run:
        def hook(when: str, verb: str, key: str) -> None:
            if when == "before" and verb == "get_range" and part in key:
                asked.append(key)
                raise StoreUnavailable("500 Internal Server Error")

        return Run.open(HookedStore(store, hook))

    lost = Run.open(store).manifest(32).link("anchor", None).objects[0].key
    assert same(checkout(failing(lost), 32).tensors, checkout(Run.open(store), 32).tensors)
    assert asked == [lost]
    with pytest.raises(StoreUnavailable):
        checkout(failing("/"), 32)
    assert len({*asked}) < 20
    # nor is a version lost to which nothing else leads: its only anchor may come back
    with pytest.raises(StoreUnavailable):
        checkout(failing("anchors/"), 1)
