"""A reader that holds part of a model fetches what changes it, checked; damage is found, and costs what it must."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from blake3 import blake3

from deltawire.bucket import parts
from deltawire.bucket.run import Run
from deltawire.bucket.verify import verify
from deltawire.bucket.walk import FetchedLink, fetch_link
from deltawire.core import full
from deltawire.core.change import BLOCK_UNITS, blocks, whole
from deltawire.core.errors import FormatError, HashMismatch, StoreError, StoreUnavailable, TruncatedFile
from deltawire.core.held import Held
from deltawire.core.schema import Schema, TensorSpec
from deltawire.store import Store
from deltawire.trainer import detectors
from deltawire_wordle.counting import CountingStore
from support import Bag, moved_bag, publish, random_bag

SCHEMA = Schema.build([TensorSpec(f"experts.{i}", "BF16", (64, 64)) for i in range(8)])
UNITS = 64 * 64


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks, parts and objects as of a large model."""
    monkeypatch.setattr(detectors, "blocks", lambda schema: blocks(schema, UNITS))
    monkeypatch.setattr(full, "anchor", partial(full.anchor, part=1000))
    monkeypatch.setattr(parts, "SMALL", 0)
    monkeypatch.setattr(parts, "GAP", 0)


@pytest.fixture
def bags() -> list[Bag]:
    first = random_bag(SCHEMA, 1)
    return [first, moved_bag(first, 2, 0.3)]


@pytest.fixture
def run(request: pytest.FixtureRequest, store: Store, bags: list[Bag], small_parts: None) -> Run:
    models = [{t.name: bag.bits(t.name).reshape(t.shape) for t in SCHEMA.tensors} for bag in bags]
    publish(store, models, encoding=getattr(request, "param", "context"), anchor_ratio=1e9)
    return Run.open(CountingStore(store))


MINE = Held(whole(tensor) for tensor in SCHEMA.tensors[2:4])


def on(run: Run, store: Store) -> Run:
    return Run.open(store)


def fetched(run: Run, version: int = 1, held: Held | None = MINE) -> FetchedLink:
    manifest = run.manifest(version)
    return fetch_link(run, manifest, manifest.links[0], held=held)


def holds(found: FetchedLink, bags: list[Bag]) -> None:
    """What was fetched is what the reader needs."""
    if found.link.kind == "anchor":
        source = found.weights(lambda _: None)  # type: ignore[arg-type,return-value]
        assert all(np.array_equal(source.region(whole(t)), bags[0].bits(t.name)) for t in SCHEMA.tensors[2:4])
        return
    (file,) = found.delta(full.digest_of(bags[0])).open()
    reached = bags[0].copy()
    for _ in file.changes(reached.bits, 1, write=True, held=MINE):
        pass
    assert all(np.array_equal(reached.bits(t.name), bags[1].bits(t.name)) for t in SCHEMA.tensors[2:4])


@pytest.mark.parametrize(
    "version, run", [(0, "context"), (1, "context"), (1, "packed"), (1, "planes")], indirect=["run"]
)
def test_what_is_held_is_fetched_and_no_more(run: Run, bags: list[Bag], version: int, tmp_path: Path) -> None:
    manifest = run.manifest(version)
    (blob,) = manifest.links[0].objects
    store: Any = run.store
    store.reset()
    found = fetched(run, version)
    assert store.bytes_in == found.bytes
    assert found.bytes < blob.head_size + 0.3 * blob.size
    holds(found, bags)
    (data,) = found.objects
    with pytest.raises(RuntimeError, match="were not fetched"):
        data.read(0, blob.size)
    data.save(tmp_path / "saved")
    assert os.stat(tmp_path / "saved").st_size == blob.size
    found.close()


def test_what_is_needed_in_full_is_fetched_in_full(run: Run, bags: list[Bag]) -> None:
    manifest = run.manifest(1)
    (blob,) = manifest.links[0].objects
    everything = Held(map(whole, SCHEMA.tensors))
    for held in (None, everything, Held(map(whole, SCHEMA.tensors[:7]))):
        with_all = fetched(run, held=held)
        assert with_all.objects[0].parts is None
        assert with_all.bytes == blob.size
        holds(with_all, bags)


class Wrong:
    """A store that answers some requests for ranges wrongly."""

    def __init__(self, inner: Store, answer: Callable[[int, int, bytes], bytes]) -> None:
        self.inner, self.url, self.creates_exclusively = inner, inner.url, inner.creates_exclusively
        self.answer, self.asked = answer, list[tuple[int, int]]()

    def get_range(self, key: str, start: int, length: int) -> bytes:
        self.asked.append((start, length))
        return self.answer(start, length, self.inner.get_range(key, start, length))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def wrong(run: Run, answer: Callable[[int, int, bytes], bytes]) -> tuple[Run, Wrong]:
    run.manifest(1), run.schema
    store = Wrong(run.store, answer)
    run.store = store
    return run, store


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize("of_head", [True, False])
def test_a_damaged_range_is_fetched_once_more(run: Run, bags: list[Bag], of_head: bool) -> None:
    once = [True]

    def answer(start: int, length: int, data: bytes) -> bytes:
        return flipped(data) if (start == 0) == of_head and once and once.pop() else data

    run, store = wrong(run, answer)
    found = fetched(run)
    assert found.objects[0].parts is not None
    assert len(store.asked) == 3, "head and range, and one of them again"
    holds(found, bags)


def shorter(start: int, length: int, data: bytes) -> bytes:
    raise TruncatedFile("the object ends before the range that was asked for")


def not_a_range(start: int, length: int, data: bytes) -> bytes:
    raise StoreError("bytes 9 to 10 were asked for, and others came back")


@pytest.mark.parametrize("damage", [lambda start, length, data: flipped(data), shorter, not_a_range])
@pytest.mark.parametrize("of_head", [True, False])
def test_where_ranges_are_wrong_the_whole_object_is_fetched(
    run: Run, bags: list[Bag], damage: Callable[[int, int, bytes], bytes], of_head: bool, caplog: Any
) -> None:
    (blob,) = run.manifest(1).links[0].objects

    def answer(start: int, length: int, data: bytes) -> bytes:
        return damage(start, length, data) if length < blob.size and (start == 0) == of_head else data

    run, _ = wrong(run, answer)
    found = fetched(run)
    assert found.objects[0].parts is None
    assert f"cannot use parts of {blob.key}, fetching all of it" in caplog.text
    holds(found, bags)


def test_a_damaged_object_is_named(run: Run, bags: list[Bag], store: Store) -> None:
    (blob,) = run.manifest(1).links[0].objects
    data = bytearray(store.get(blob.key).data)
    with fetched(run).objects[0] as some:
        assert some.parts is not None
        mine = some.parts[-1][1] - 1
    data[mine] ^= 1
    store.put(blob.key, bytes(data))
    with pytest.raises(HashMismatch, match=f"{blob.key} has the hash"):
        fetched(run)
    # what others hold is nothing to this reader: `verify` and those who hold it find it
    data[mine] ^= 1
    elsewhere = next(n for n in range(len(data) - 1, 0, -1) if not any(a <= n < b for a, b in some.parts))
    data[elsewhere] ^= 1
    store.put(blob.key, bytes(data))
    holds(fetched(run), bags)
    assert not verify(Run.open(store)).ok


class WithoutRanges(SimpleHTTPRequestHandler):
    """Answers 200 with all of an object, whatever range was asked for."""

    def log_message(self, format: str, *args: Any) -> None: ...


def test_a_server_without_ranges_gives_whole_objects(
    bags: list[Bag], tmp_path: Path, small_parts: None, caplog: Any
) -> None:
    models = [{t.name: bag.bits(t.name).reshape(t.shape) for t in SCHEMA.tensors} for bag in bags]
    publish(tmp_path, models, anchor_ratio=1e9)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(WithoutRanges, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        run = Run.open(f"http://127.0.0.1:{server.server_port}")
        for version in (0, 1):
            found = fetched(run, version)
            assert found.objects[0].parts is None
            assert "more than" in caplog.text
            holds(found, bags)
    finally:
        server.shutdown()
        server.server_close()


def test_objects_of_other_writers_are_in_one_chain(store: Store, bags: list[Bag], small_parts: None) -> None:
    """Without hashes of parts, in one block, without the hash of a head."""
    models = [{t.name: bag.bits(t.name).reshape(t.shape) for t in SCHEMA.tensors} for bag in bags]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(full, "anchor", full.anchor.func)  # type: ignore[attr-defined]
        patch.setattr(detectors, "blocks", lambda schema: blocks(schema, BLOCK_UNITS))
        publish(store, models, anchor_ratio=1e9)
    run = Run.open(store)
    for version in (0, 1):
        found = fetched(run, version)
        assert found.objects[0].parts is None
        holds(found, bags)
    manifest = run.manifest(1)
    (blob,) = manifest.main.objects
    bare = msgspec.structs.replace(blob, head_size=0, head_hash="")
    link = msgspec.structs.replace(manifest.main, objects=(bare,))
    with fetch_link(run, manifest, link, held=MINE).objects[0] as data:
        assert data.parts is None


def test_a_store_that_does_not_answer_is_waited_for(run: Run) -> None:
    def away(start: int, length: int, data: bytes) -> bytes:
        raise StoreUnavailable("later")

    run, _ = wrong(run, away)
    with pytest.raises(StoreUnavailable):
        fetched(run)


def test_a_shared_cache_has_whole_objects(
    run: Run, bags: list[Bag], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DELTAWIRE_CACHE", str(tmp_path))
    for version in (0, 1):
        found = fetched(run, version)
        assert found.objects[0].parts is None
        holds(found, bags)
        (blob,) = found.link.objects
        assert blake3((tmp_path / blob.hash).read_bytes()).hexdigest(length=16) == blob.hash


@pytest.mark.parametrize("lie", [{"head_size": 9}, {"head_size": 200}, {"head_size": 10**6}, {"head_hash": "0" * 32}])
@pytest.mark.parametrize("version", [0, 1])
def test_a_manifest_that_lies_about_a_head_costs_the_whole_object(
    run: Run, bags: list[Bag], version: int, lie: dict[str, Any]
) -> None:
    manifest = run.manifest(version)
    link = manifest.links[0]
    blob = msgspec.structs.replace(link.objects[0], **lie)
    with fetch_link(run, manifest, msgspec.structs.replace(link, objects=(blob,)), held=MINE).objects[0] as data:
        assert data.parts is None


@pytest.mark.parametrize("version", [0, 1])
def test_a_head_that_is_none_is_refused(run: Run, bags: list[Bag], store: Store, version: int) -> None:
    """Its hash is in the manifest: who wrote that wrote this."""
    manifest = run.manifest(version)
    link = manifest.links[0]
    (blob,) = link.objects
    data = bytearray(store.get(blob.key).data)
    data[8 : blob.head_size] = bytes(blob.head_size - 8)
    store.put(blob.key, bytes(data))
    head_hash = blake3(bytes(data[: blob.head_size])).hexdigest(length=16)
    lying = msgspec.structs.replace(link, objects=(msgspec.structs.replace(blob, head_hash=head_hash),))
    with pytest.raises(FormatError):
        fetch_link(run, manifest, lying, held=MINE)
