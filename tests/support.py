"""What the tests build models, deltas and runs from. Weights are bits here, never floats."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from blake3 import blake3
from hypothesis import strategies as st

from deltawire.bucket.fetch import fetch
from deltawire.bucket.replay import checkout
from deltawire.bucket.run import Run
from deltawire.core import full, keys
from deltawire.core.change import BLOCK_UNITS, Block, Change, Region, blocks, compare
from deltawire.core.digest import StateDigest
from deltawire.core.dtypes import DTYPES, Bits, lookup
from deltawire.core.manifest import Blob, Heartbeat
from deltawire.core.schema import Schema, TensorSpec
from deltawire.core.sparse import DeltaFile, write_delta
from deltawire.store import Store
from deltawire.trainer import Publisher

Model = dict[str, np.ndarray]
BitsOf = dict[str, Bits]


# ── bits ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def specials(dtype: str) -> Bits:
    """The bit patterns that comparing or computing with floats would get wrong."""
    kind = lookup(dtype)
    width = kind.unit_size * 8
    top, every = 1 << (width - 1), (1 << width) - 1
    patterns = {0, 1, 2, top, top | 1, top - 1, every, every - 1}
    if kind.exponent_bits:
        infinity = ((1 << kind.exponent_bits) - 1) << kind.exponent_shift
        mantissa = (1 << kind.exponent_shift) - 1
        for sign in (0, top):
            # ±infinity, a signalling NaN, a NaN with a payload, the largest denormal, the largest finite number
            patterns |= {
                sign | p & every for p in (infinity, infinity | 1, infinity | mantissa, mantissa, infinity - 1)
            }
    return np.array(sorted(patterns), kind.unit)


def random_bits(rng: np.random.Generator, tensor: TensorSpec) -> Bits:
    unit = lookup(tensor.dtype).unit
    bits = rng.integers(0, np.iinfo(unit).max, tensor.units, unit, endpoint=True)
    odd = rng.random(tensor.units) < 0.2
    bits[odd] = rng.choice(specials(tensor.dtype), int(odd.sum()))
    return bits


def moved(rng: np.random.Generator, bits: Bits, dtype: str, density: float) -> Bits:
    """The bits with about this share of them changed: by an ulp, to a special pattern, or to anything at all."""
    where = np.flatnonzero(rng.random(bits.size) < density)
    old, most = bits[where], np.iinfo(bits.dtype).max
    anything = rng.integers(0, most, where.size, bits.dtype, endpoint=True)
    kinds = [old - old.dtype.type(1), old + old.dtype.type(1), rng.choice(specials(dtype), where.size), anything]
    new = bits.copy()
    new[where] = np.choose(rng.integers(4, size=where.size), kinds)
    return new


class Bag:
    """Named bits with a schema: a source and a base at once."""

    def __init__(self, schema: Schema, tensors: BitsOf) -> None:
        self.schema, self.tensors = schema, tensors

    def bits(self, name: str) -> Bits:
        return self.tensors[name]

    def region(self, region: Region) -> Bits:
        return region.cut(self.tensors[region.tensor.name])

    def copy(self) -> Bag:
        return Bag(self.schema, {name: bits.copy() for name, bits in self.tensors.items()})

    def digest(self) -> StateDigest:
        return full.digest_of(self, threads=1)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Bag) and same(self.tensors, other.tensors)


def random_bag(schema: Schema, seed: int) -> Bag:
    rng = np.random.default_rng(seed)
    return Bag(schema, {t.name: random_bits(rng, t) for t in schema.tensors})


def moved_bag(bag: Bag, seed: int, density: float) -> Bag:
    rng = np.random.default_rng(seed)
    changed = {t.name: moved(rng, bag.tensors[t.name], t.dtype, density) for t in bag.schema.tensors}
    return Bag(bag.schema, changed)


def same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Equal names, and bit for bit equal arrays."""
    return a.keys() == b.keys() and all(np.asarray(a[n]).tobytes() == np.asarray(b[n]).tobytes() for n in a)


# ── strategies ───────────────────────────────────────────────────────────────────────────────────────────────────────

shapes = st.one_of(
    st.just(()),
    st.tuples(st.integers(0, 40)),
    st.lists(st.integers(0, 9), min_size=2, max_size=4).map(tuple),
)
densities = st.one_of(st.sampled_from((0.0, 0.002, 0.02, 1.0)), st.floats(0, 1))
seeds = st.integers(0, 2**32 - 1)


@st.composite
def schemas(draw: Any, max_tensors: int = 4) -> Schema:
    specs = draw(st.lists(st.tuples(st.sampled_from(sorted(DTYPES)), shapes), min_size=1, max_size=max_tensors))
    names = draw(st.permutations(["a.weight", "b", "layers.0.ü", "z.indices", "x.values"]))
    return Schema.build(TensorSpec(name, dtype, shape) for name, (dtype, shape) in zip(names, specs, strict=False))


def column_cut(schema: Schema, rows: int, columns: int) -> list[Block]:
    """A cut no publisher makes today, but sharded ones will: rectangles that are not contiguous in their tensor."""
    result: list[Block] = []
    for tensor in schema.tensors:
        for row in range(0, tensor.rows, rows):
            for column in range(0, tensor.columns, columns):
                height, width = min(rows, tensor.rows - row), min(columns, tensor.columns - column)
                result.append((Region(tensor, row, height, column, width),))
    return result


# ── deltas ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def diff(old: Bag, new: Bag, plan: Sequence[Block] | None = None) -> list[list[Change]]:
    plan = blocks(old.schema, BLOCK_UNITS) if plan is None else plan
    return [[compare(region, old.region(region), new.region(region)) for region in block] for block in plan]


def encoded(old: Bag, changes: Iterable[Sequence[Change]], encoding: str, **metadata: str) -> bytes:
    writer, file = write_delta(changes, encoding, old.region, metadata, threads=1)
    try:
        blob = b"".join(file.chunks())
    finally:
        writer.close()
    assert len(blob) == file.size
    return blob


def opened(blob: bytes, schema: Schema | None = None) -> DeltaFile:
    return DeltaFile(lambda start, length: blob[start : start + length], len(blob), schema)


def applied(blob: bytes, old: Bag) -> tuple[Bag, StateDigest]:
    """The weights after the delta, and how it says the digest moves."""
    result, moves = old.copy(), StateDigest()
    for changes in opened(blob, old.schema).changes(old.bits, threads=1):
        for change in changes:
            moves += change.digest()
            change.write(result.tensors[change.region.tensor.name])
    return result, moves


# ── models and runs ──────────────────────────────────────────────────────────────────────────────────────────────────


def model(seed: int = 0, rows: int = 64) -> Model:
    """A small model of several dtypes, bf16 as its bits: just large enough for a delta to be smaller than it."""
    rng = np.random.default_rng(seed)
    return {
        "embed.weight": rng.integers(0, 1 << 16, (rows, 16), np.uint16),
        "layer.weight": rng.integers(0, 1 << 16, (16, 16), np.uint16),
        "layer.bias": rng.standard_normal(16).astype(np.float32),
        "scale": np.array(rng.standard_normal(), np.float32),
        "empty": np.zeros((0, 3), np.float16),
        "steps": rng.integers(0, 1 << 40, 3, np.int64),
    }


def trained(weights: Model, seed: int, changes: int = 5) -> Model:
    """The next version: a few weights of each tensor get other bits."""
    rng = np.random.default_rng(seed)
    result = {name: array.copy() for name, array in weights.items()}
    for array in result.values():
        flat = array.reshape(-1).view(f"u{min(array.itemsize, 4)}")
        if flat.size:
            where = rng.choice(flat.size, min(changes, flat.size), replace=False)
            flat[where] ^= rng.integers(1, 1 << 8 * flat.itemsize, where.size).astype(flat.dtype)
    return result


def history(count: int, seed: int = 0, changes: int = 5) -> list[Model]:
    versions = [model(seed)]
    while len(versions) < count:
        versions.append(trained(versions[-1], seed * 1000 + len(versions), changes))
    return versions


def blank(weights: Model) -> Model:
    return {name: np.zeros_like(array) for name, array in weights.items()}


def copy(weights: Model) -> Model:
    return {name: array.copy() for name, array in weights.items()}


def publish(store: Any, versions: Iterable[Model], **options: Any) -> list[Any]:
    """Every model as a version of its own; returns what `PublishHandle.result` gave."""
    with Publisher(store, **options) as publisher:
        return [publisher.publish(weights, step=step).result(60) for step, weights in enumerate(versions)]


def held(state: Any, like: Model) -> Model:
    """A checked-out state in the shapes of a model."""
    return {name: state.bits(name).view(array.dtype).reshape(array.shape) for name, array in like.items()}


def replayed(store: Store) -> Iterator[tuple[int, Any]]:
    """Every version of the run, one after the other, each proven by its digest."""
    run = Run.open(store)
    newest = run.newest()
    state = None
    for version in range(0 if newest is None else newest + 1):
        state = checkout(run, version, state)
        assert str(full.digest_of(state)) == run.manifest(version).digest
        yield version, state


def verified(store: Store, expected: Sequence[Model] | Callable[[int], Model]) -> int:
    """The run holds exactly these versions, bit for bit. Returns how many."""
    count = 0
    for version, state in replayed(store):
        weights = expected(version) if callable(expected) else expected[version]
        assert same(held(state, weights), weights), f"version {version} has other weights than were published"
        count += 1
    if not callable(expected):
        assert count == len(expected)
    return count


# ── stores that do something on the way ──────────────────────────────────────────────────────────────────────────────

Hook = Callable[[str, str, str], None]
"""(moment, verb, key); the moments are "before", "during" (each chunk of a put) and "after"."""


class HookedStore:
    """Passes everything on and tells a hook, which may wait, raise or kill."""

    def __init__(self, inner: Store, hook: Hook) -> None:
        self.inner, self.hook, self.url = inner, hook, inner.url
        self.creates_exclusively = inner.creates_exclusively

    def get(self, key: str, *, limit: int | None = None) -> Any:
        return self._call("get", key, limit=limit)

    def get_if_changed(self, key: str, etag: str | None, *, limit: int | None = None) -> Any:
        return self._call("get_if_changed", key, etag, limit=limit)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self._call("get_range", key, start, length)

    def head(self, key: str) -> Any:
        return self._call("head", key)

    def put(self, key: str, data: Any) -> None:
        if not callable(data):
            self._call("put", key, data)
            return

        def chunks() -> Iterator[bytes]:
            for chunk in data():
                yield chunk
                self.hook("during", "put", key)

        self._call("put", key, chunks)

    def put_if_absent(self, key: str, data: bytes) -> None:
        self._call("put_if_absent", key, data)

    def list(self, prefix: str = "", after: str | None = None) -> Any:
        return self._call("list", prefix, after)

    def delete(self, key: str) -> None:
        self._call("delete", key)

    def _call(self, verb: str, key: str, *rest: Any, **options: Any) -> Any:
        self.hook("before", verb, key)
        result = getattr(self.inner, verb)(key, *rest, **options)
        self.hook("after", verb, key)
        return result


# ── data objects ─────────────────────────────────────────────────────────────────────────────────────────────────────


def stored(store: Store, data: bytes, version: int = 1) -> Blob:
    """Store bytes as an anchor of a version."""
    blob = Blob(keys.anchor(version, "0" * 8), len(data), blake3(data).hexdigest(length=16))
    store.put(blob.key, data)
    return blob


def content(store: Store, blob: Blob) -> bytes:
    with fetch(store, blob) as data:
        return data.read(0, blob.size)


def heartbeats(run: Run) -> list[Heartbeat]:
    """The heartbeats of a run, as they are."""
    found = (run.hint(item.key, Heartbeat) for item in run.store.list(keys.REPLICAS))
    return [beat for beat in found if beat is not None]


def delta_key(store: Store, version: int, base: int | None = None) -> str:
    link = Run.open(store).manifest(version).link("delta", version - 1 if base is None else base)
    return link.objects[0].key


def spoil(store: Store, key: str) -> None:
    data = bytearray(store.get(key).data)
    data[len(data) // 2] ^= 1
    store.put(key, bytes(data))
