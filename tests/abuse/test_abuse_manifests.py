"""Manifests, run.json, head, history: everything small that a bucket may hold and must not be believed."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from forge import ForgedRun, edited_index, join, nested, split, streams_of, with_indices, with_metadata, with_streams

from deltawire.bucket.replay import checkout
from deltawire.bucket.run import Run
from deltawire.core import keys
from deltawire.core.errors import (
    DeltawireError,
    DigestMismatch,
    ForeignObject,
    HashMismatch,
    ManifestError,
    MissingBase,
    ObjectNotFound,
    RunNotFound,
    SchemaMismatch,
    TruncatedFile,
    UnknownFormat,
    UnsafeName,
    VersionNotFound,
)
from deltawire.replica import Replica
from deltawire.store import ObjectStore, Store
from support import blank, copy, heartbeats, history, model, publish, same

Json = dict[str, Any]


def refused(run: ForgedRun, error: type[DeltawireError]) -> DeltawireError:
    """A replica at the last good version refuses the newest and stays what it is; so do a newcomer and a checkout."""
    good = run.last - 1
    live = copy(run.versions[good])
    replica = Replica(run.store, heartbeat=0)
    assert replica.sync(live, good) == good
    with pytest.raises(error) as caught:
        replica.sync(live)
    assert type(caught.value) is error
    assert len(str(caught.value)) < 2000
    assert same(live, run.versions[good])
    assert replica.version == good
    # and it can still be asked for what it has
    assert replica.sync(live, good) == good
    fresh = blank(run.versions[0])
    # a newcomer may have come as far as the last good version, which has a name; otherwise it has not been touched
    newcomer = Replica(run.store, heartbeat=0)
    with pytest.raises(error):
        newcomer.sync(fresh)
    assert same(fresh, blank(fresh) if newcomer.version is None else run.versions[newcomer.version])
    with pytest.raises(error):
        checkout(Run.open(run.store), run.last)
    return caught.value


def delta_link(manifest: Json) -> Json:
    return next(link for link in manifest["links"] if link["kind"] == "delta")


def blob(manifest: Json) -> Json:
    return delta_link(manifest)["objects"][0]


# ── manifests that do not parse ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"[]", b"null", b"{}", b"\xff\xfe", b'"manifest"', nested(1_000_000), b'{"a":' * 500_000,
        b'{"zzz":' + nested(1_000_000) + b"}",
    ],
    ids=["empty", "cut", "list", "null", "nothing", "not-utf8", "text", "nested", "open", "nested-in-unknown"],
)  # fmt: skip
def test_a_manifest_that_does_not_parse(store: Store, data: bytes) -> None:
    run = ForgedRun(store)
    run.edit_manifest(lambda manifest: data)
    refused(run, ManifestError)


def test_a_nested_bomb_in_a_field_nobody_reads(store: Store) -> None:
    run = ForgedRun(store)
    run.edit_manifest(lambda m: json.dumps(m).encode()[:-1] + b',"zzz":' + nested(1_000_000) + b"}")
    refused(run, ManifestError)


def test_a_manifest_cut_anywhere_never_counts(store: Store) -> None:
    ForgedRun(store)
    whole = store.get(keys.manifest(2)).data
    for length in range(0, len(whole), 7):
        store.put(keys.manifest(2), whole[:length])
        with pytest.raises(ManifestError):
            Run.open(store).manifest(2)


def test_a_manifest_with_a_flipped_bit_never_leads_to_other_weights(store: Store) -> None:
    """A manifest has no hash over itself. What it says of weights is checked against them."""
    run = ForgedRun(store)
    whole = bytearray(store.get(keys.manifest(2)).data)
    reached = 0
    for at in range(0, len(whole), 5):
        whole[at] ^= 1 << (at % 8)
        store.put(keys.manifest(2), bytes(whole))
        live = copy(run.versions[1])
        replica = Replica(store, heartbeat=0)
        try:
            reached += replica.sync(live) == 2
            assert same(live, run.versions[2])
        except DeltawireError:
            assert same(live, run.versions[1])
        whole[at] ^= 1 << (at % 8)
    assert reached, "a flip in `created` or `metrics` does no harm"


# ── manifests that contradict themselves or the run ──────────────────────────────────────────────────────────────────


def one(*changes: tuple[str, Any]) -> Callable[[Json], None]:
    return lambda manifest: manifest.update(dict(changes))


LIES: dict[str, tuple[Callable[[Json], Any], type[DeltawireError]]] = {
    "format_of_the_future": (one(("format", 2)), UnknownFormat),
    "format_zero": (one(("format", 0)), UnknownFormat),
    "another_run": (one(("run", "ffffffffffffffff")), ForeignObject),
    "another_schema": (one(("schema", "f" * 32)), ForeignObject),
    "another_version": (one(("version", 1)), ManifestError),
    "version_is_text": (one(("version", "2")), ManifestError),
    "no_parent": (one(("parent", None)), ManifestError),
    "its_own_parent": (one(("parent", 2)), ManifestError),
    "a_later_parent": (one(("parent", 7)), ManifestError),
    "a_negative_parent": (one(("parent", -1)), ManifestError),
    "no_digest": (one(("digest", "")), ManifestError),
    "short_digest": (one(("digest", "abc")), ManifestError),
    "digest_in_capitals": (one(("digest", "A" * 32)), ManifestError),
    "digest_with_a_newline": (one(("digest", "a" * 32 + "\n")), ManifestError),
    "wrong_digest": (one(("digest", "a" * 32)), DigestMismatch),
    "no_links": (one(("links", [])), ManifestError),
    "an_unknown_kind": (lambda m: delta_link(m).update(kind="magic"), ManifestError),
    "a_delta_from_nowhere": (lambda m: delta_link(m).pop("base"), ManifestError),
    "a_delta_from_itself": (lambda m: delta_link(m).update(base=2), ManifestError),
    "a_delta_from_the_future": (lambda m: delta_link(m).update(base=3), ManifestError),
    "a_delta_from_minus_one": (lambda m: delta_link(m).update(base=-1), ManifestError),
    "a_delta_from_another_base": (lambda m: delta_link(m).update(base=0), ForeignObject),
    "a_delta_without_objects": (lambda m: delta_link(m).update(objects=[]), ManifestError),
    "a_delta_with_a_source": (lambda m: delta_link(m).update(source="/etc"), ManifestError),
    "an_anchor_with_a_base": (lambda m: delta_link(m).update(kind="anchor"), ManifestError),
    "a_reference_with_objects": (
        lambda m: m.update(links=[{"kind": "reference", "source": "x", "objects": delta_link(m)["objects"]}]),
        ManifestError,
    ),
    "a_delta_that_is_called_an_anchor": (
        lambda m: m.update(links=[{"kind": "anchor", "objects": delta_link(m)["objects"]}]),
        SchemaMismatch,
    ),
    "no_size": (lambda m: blob(m).update(size=0), ManifestError),
    "a_negative_size": (lambda m: blob(m).update(size=-(1 << 40)), ManifestError),
    "seven_bytes": (lambda m: blob(m).update(size=7), ManifestError),
    "a_size_beyond_64_bits": (lambda m: blob(m).update(size=1 << 70), ManifestError),
    "a_size_of_100_gb": (lambda m: blob(m).update(size=100 * 10**9), ManifestError),
    "a_byte_more": (lambda m: blob(m).update(size=blob(m)["size"] + 1), TruncatedFile),
    "a_byte_less": (lambda m: blob(m).update(size=blob(m)["size"] - 1), HashMismatch),
    "another_hash": (lambda m: blob(m).update(hash="0" * 32), HashMismatch),
    "no_hash": (lambda m: blob(m).update(hash=""), ManifestError),
    "a_file_that_leads_up": (
        one(("files", [{"name": "../../x.json", "key": "files/" + "0" * 32, "size": 1, "hash": "0" * 32}])),
        UnsafeName,
    ),
    "a_file_with_a_key_outside": (
        one(("files", [{"name": "x.json", "key": "../files/" + "0" * 32, "size": 1, "hash": "0" * 32}])),
        ForeignObject,
    ),
    "metrics_that_are_text": (one(("metrics", {"reward": "high"})), ManifestError),
}


@pytest.mark.parametrize("name", LIES)
def test_a_manifest_that_lies(store: Store, name: str) -> None:
    edit, error = LIES[name]
    run = ForgedRun(store)
    run.edit_manifest(edit)
    refused(run, error)


def test_a_file_in_a_folder_of_its_own(store: Store) -> None:
    run = ForgedRun(store)
    file = {"name": "sub/x.json", "key": "files/" + "0" * 32, "size": 1, "hash": "0" * 32}
    run.edit_manifest(one(("files", [file])))
    with pytest.raises(DeltawireError):
        Run.open(store).manifest(2)


@pytest.mark.parametrize(
    "key",
    [
        "../other/deltas/step_000002.00000000.safetensors",
        "deltas/../../other/deltas/step_000002.00000000.safetensors",
        "/deltas/step_000002.00000000.safetensors",
        "other/deltas/step_000002.00000000.safetensors",
        "s3://bucket/other/deltas/step_000002.00000000.safetensors",
        "deltas/step_000002.00000000.safetensors\n",
        "deltas/step_000002.00000000.safetensors\0",
        "deltas\\step_000002.00000000.safetensors",
        "run.json",
        "versions/000001.json",
        "replicas/a.json",
        "deltas/step_٣٣٣٣٣٣.00000000.safetensors",
        "",
    ],
)
def test_a_manifest_that_names_a_key_outside_the_run(store: Store, key: str) -> None:
    run = ForgedRun(store)
    # it exists, and would even be the right bytes
    data = run.object("delta")
    run.edit_manifest(lambda m: blob(m).update(key=key))
    refused(run, ForeignObject)
    assert data


# ── objects that are not what their manifest says ────────────────────────────────────────────────────────────────────


def point_at(run: ForgedRun, data: bytes, key: str | None = None) -> None:
    """Let the newest manifest name these bytes, honestly."""
    key = key or blob(run.manifest())["key"]
    run.store.put(key, data)
    run.edit_manifest(lambda m: blob(m).update(key=key, size=len(data), hash=blake3(data).hexdigest(length=16)))


def test_the_object_of_another_version(store: Store) -> None:
    run = ForgedRun(store)
    other = blob(run.manifest(1))
    run.edit_manifest(lambda m: blob(m).update(other))
    refused(run, ForeignObject)


def test_the_object_of_another_version_under_the_right_name(store: Store) -> None:
    run = ForgedRun(store)
    point_at(run, run.object("delta", 1))
    refused(run, ForeignObject)


def test_the_object_of_another_run_under_the_right_name(store: Store) -> None:
    run = ForgedRun(store)
    theirs = ObjectStore.from_url(f"memory://{uuid.uuid4()}")
    publish(theirs, run.versions, anchor_ratio=1e9)
    point_at(run, theirs.get(Run.open(theirs).manifest(2).link("delta", 1).objects[0].key).data)
    refused(run, ForeignObject)


def test_the_object_of_another_run_with_our_id_on_it(store: Store) -> None:
    """Same schema, right name, right claims, right hash: only the digest can tell."""
    run = ForgedRun(store)
    theirs = ObjectStore.from_url(f"memory://{uuid.uuid4()}")
    publish(theirs, history(3, seed=9))
    stranger = Run.open(theirs).manifest(2).link("delta", 1).objects[0]
    ours = split(run.object("delta"))[0]
    point_at(run, with_metadata(theirs.get(stranger.key).data, run=ours["run"]))
    refused(run, DigestMismatch)


def test_an_object_that_is_gone(store: Store) -> None:
    run = ForgedRun(store)
    store.delete(blob(run.manifest())["key"])
    refused(run, ObjectNotFound)


@pytest.mark.parametrize("claim", ["run", "base_version", "model_version"])
def test_an_object_that_says_it_is_another(store: Store, claim: str) -> None:
    run = ForgedRun(store)
    run.edit_object(lambda data: with_metadata(data, **{claim: "7"}))
    refused(run, ForeignObject)


def test_a_raw_value_with_a_flipped_bit_under_the_right_hash(store: Store) -> None:
    def flip(data: bytes) -> bytes:
        metadata, tensors = split(data)
        dtype, shape, values = tensors["embed.weight.values"]
        tensors["embed.weight.values"] = (dtype, shape, bytes([values[0] ^ 1]) + values[1:])
        return join(metadata, tensors)

    run = ForgedRun(store, "raw")
    run.edit_object(flip)
    refused(run, DigestMismatch)


def test_a_raw_index_moved_by_one_under_the_right_hash(store: Store) -> None:
    def move(indices: np.ndarray) -> np.ndarray:
        free = next(i for i in range(len(indices)) if indices[i] + 1 not in indices and indices[i] + 1 < 64 * 16)
        moved = indices.copy()
        moved[free] += 1
        return moved

    run = ForgedRun(store, "raw")
    run.edit_object(lambda data: with_indices(data, "embed.weight", move))
    refused(run, DigestMismatch)


def test_a_packed_step_with_a_flipped_bit_under_the_right_hashes(store: Store) -> None:
    def flip(data: bytes) -> bytes:
        streams = streams_of(data)
        wide = streams["wide"]
        return with_streams(data, {**streams, "wide": bytes([wide[0] ^ 1]) + wide[1:]})

    run = ForgedRun(store)
    run.edit_object(flip)
    refused(run, DigestMismatch)


def test_a_delta_that_says_nothing_changed(store: Store) -> None:
    run = ForgedRun(store, "raw")
    run.edit_object(lambda data: join(split(data)[0], {}))
    refused(run, DigestMismatch)


def test_a_wrong_digest_is_wrong_for_the_anchor_too(store: Store) -> None:
    run = ForgedRun(store, last_has_anchor=True)
    run.edit_manifest(one(("digest", "a" * 32)))
    refused(run, DigestMismatch)


# ── anchors ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def anchor_with(edit: Callable[[Any], None]) -> Callable[[bytes], bytes]:
    def go(data: bytes) -> bytes:
        metadata, tensors = split(data)
        edit(tensors)
        return join(metadata, tensors)

    return go


def as_if(tensors: Any, dtype: str, shape: list[int]) -> None:
    tensors["layer.bias"] = (dtype, shape, tensors["layer.bias"][2])


def flipped(tensors: Any) -> None:
    dtype, shape, data = tensors["embed.weight"]
    tensors["embed.weight"] = (dtype, shape, data[:-1] + bytes([data[-1] ^ 0x80]))


ANCHORS: dict[str, tuple[Callable[[bytes], bytes], type[DeltawireError]]] = {
    "a_flipped_weight": (anchor_with(flipped), DigestMismatch),
    "a_missing_tensor": (anchor_with(lambda t: t.pop("scale")), SchemaMismatch),
    "an_extra_tensor": (anchor_with(lambda t: t.update(more=("U8", [0], b""))), SchemaMismatch),
    "another_shape": (anchor_with(lambda t: as_if(t, "F32", [4, 4])), SchemaMismatch),
    "another_dtype": (anchor_with(lambda t: as_if(t, "I32", [16])), SchemaMismatch),
    "another_version": (lambda data: with_metadata(data, model_version="1"), ForeignObject),
    "another_run": (lambda data: with_metadata(data, run="ffffffffffffffff"), ForeignObject),
    "says_it_is_sparse": (lambda data: with_metadata(data, sparse="true"), SchemaMismatch),
    "a_format_of_the_future": (lambda data: with_metadata(data, version="2"), UnknownFormat),
    "a_byte_missing": (lambda data: data[:-1], TruncatedFile),
    "swapped_tensors": (
        anchor_with(lambda t: t.update({"layer.bias": ("F32", [16], t["layer.bias"][2][::-1])})),
        DigestMismatch,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ANCHORS)
def test_a_bad_anchor(store: Store, name: str) -> None:
    edit, error = ANCHORS[name]
    run = ForgedRun(store, last_has_anchor=True)
    run.edit_manifest(lambda m: m.update(links=[link for link in m["links"] if link["kind"] == "anchor"]))
    run.edit_object(edit, "anchor")
    refused(run, error)


@pytest.mark.parametrize("name", ANCHORS)
def test_beside_a_bad_anchor_the_deltas_still_lead_there(store: Store, name: str) -> None:
    run = ForgedRun(store, last_has_anchor=True)
    run.edit_object(ANCHORS[name][0], "anchor")
    fresh = blank(run.versions[0])
    assert Replica(store, heartbeat=0).sync(fresh) == 2
    assert same(fresh, run.versions[2])


# ── what a later release may write (docs/format.md, "What stays readable") ───────────────────────────────────────────


def test_members_that_a_later_release_adds_are_ignored(store: Store) -> None:
    run = ForgedRun(store)
    run.edit_object(lambda data: with_metadata(data, later="1"))
    run.edit_object(lambda data: edited_index(data, lambda index: index.update(later=1)))
    run.edit_manifest(lambda m: m.update(later={"a": 1}))
    run.edit_manifest(lambda m: m["links"][0].update(later=1))
    run_json(store, lambda info: info.update(later=[1]))
    for key in (keys.HEAD, keys.RUN):
        store.put(key, json.dumps({**json.loads(store.get(key).data), "later": 1}).encode())
    live = blank(run.versions[0])
    assert Replica(store, heartbeat=0).sync(live) == 2
    assert same(live, run.versions[2])


def test_a_reader_takes_another_link_where_it_does_not_know_an_encoding(store: Store) -> None:
    run = ForgedRun(store, last_has_anchor=True)
    run.edit_object(lambda data: with_metadata(data, encoding="later"))
    live = copy(run.versions[1])
    assert Replica(store, heartbeat=0).sync(live) == 2
    assert same(live, run.versions[2])


# ── run.json ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def run_json(store: Store, edit: Callable[[Json], Any], *, rehash: bool = True) -> None:
    info = json.loads(store.get(keys.RUN).data)
    edit(info)
    if rehash:
        schema = {"tensors": info["schema"]["tensors"], "ties": info["schema"].get("ties", {})}
        text = json.dumps(schema, separators=(",", ":"), ensure_ascii=False).encode()
        info["schema_hash"] = blake3(text).hexdigest(length=16)
    store.put(keys.RUN, json.dumps(info).encode())


def tensors(info: Json) -> list[Any]:
    return info["schema"]["tensors"]


def test_the_hash_below_is_the_schemas(store: Store) -> None:
    """So that the lies in the next test are found for what they are, not by a hash that does not fit."""
    ForgedRun(store)
    run_json(store, lambda info: None)
    Run.open(store)


SCHEMAS: dict[str, tuple[Callable[[Json], Any], type[DeltawireError]]] = {
    "a_name_that_leads_up": (lambda i: tensors(i)[0].__setitem__(0, "../../a"), UnsafeName),
    "an_absolute_name": (lambda i: tensors(i)[0].__setitem__(0, "/a"), UnsafeName),
    "a_name_with_a_nul": (lambda i: tensors(i)[0].__setitem__(0, "a\0"), UnsafeName),
    "a_reserved_name": (lambda i: tensors(i)[0].__setitem__(0, "__metadata__"), UnsafeName),
    "a_name_twice": (lambda i: tensors(i).insert(0, tensors(i)[0]), SchemaMismatch),
    "unsorted": (lambda i: tensors(i).reverse(), SchemaMismatch),
    "a_negative_side": (lambda i: tensors(i)[0].__setitem__(2, [-4]), SchemaMismatch),
    "a_petabyte": (lambda i: tensors(i)[0].__setitem__(2, [1 << 50]), SchemaMismatch),
    "300_000_dimensions": (lambda i: tensors(i)[0].__setitem__(2, [1 << 62] * 300_000), SchemaMismatch),
    "an_unknown_dtype": (lambda i: tensors(i)[0].__setitem__(1, "F3"), DeltawireError),
    "a_tie_to_nothing": (lambda i: i["schema"].update(ties={"x": "nowhere"}), SchemaMismatch),
    "a_tie_that_leads_up": (lambda i: i["schema"].update(ties={"../x": "scale"}), UnsafeName),
    "a_format_of_the_future": (lambda i: i.update(format=2), UnknownFormat),
    "a_base_without_a_name": (lambda i: i.update(base={"digests": []}), ManifestError),
    "a_base_with_a_digest_that_is_none": (lambda i: i.update(base={"model": "", "digests": ["0" * 31]}), ManifestError),
    "a_base_with_nine_digests": (lambda i: i.update(base={"model": "", "digests": ["0" * 32] * 9}), ManifestError),
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_run_json_that_lies(store: Store, name: str) -> None:
    edit, error = SCHEMAS[name]
    ForgedRun(store)
    run_json(store, edit)
    live = model(5)
    kept = copy(live)
    with pytest.raises(error):
        Replica(store, heartbeat=0).sync(live)
    assert same(live, kept)


def test_a_schema_that_does_not_have_its_hash(store: Store) -> None:
    ForgedRun(store)
    run_json(store, lambda info: tensors(info)[0].__setitem__(2, [3, 3]), rehash=False)
    with pytest.raises(ManifestError, match="hash"):
        Run.open(store)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"{}", b"\xff", nested(1_000_000)])
def test_a_run_json_that_does_not_parse(store: Store, data: bytes) -> None:
    store.put(keys.RUN, data)
    with pytest.raises(ManifestError):
        Run.open(store)


def test_no_run(store: Store) -> None:
    with pytest.raises(RunNotFound):
        Replica(store).sync(model())


def test_a_run_without_versions(store: Store) -> None:
    run = ForgedRun(store)
    for version in range(3):
        store.delete(keys.manifest(version))
    with pytest.raises(RunNotFound, match="no version yet"):
        Replica(store).sync(copy(run.versions[0]))


# ── models that do not fit ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "edit, words",
    [
        (lambda m: m.update(scale=np.float16(1)), "'scale' is F32"),
        (lambda m: m.update({"layer.bias": m["layer.bias"].reshape(4, 4)}), "'layer.bias': .* in the run but"),
        (lambda m: m.update(more=np.zeros(3, np.float32)), "'more', which the run does not carry"),
        (lambda m: m.pop("scale"), "has 'scale', this model does not"),
        (lambda m: m.update({"embed.weight": m["embed.weight"][::-1]}), "contiguous"),
    ],
    ids=["dtype", "shape", "extra", "missing", "reversed"],
)
def test_a_model_that_does_not_fit(store: Store, edit: Callable[[Any], Any], words: str) -> None:
    run = ForgedRun(store)
    live = copy(run.versions[1])
    edit(live)
    kept = copy(live)
    with pytest.raises(SchemaMismatch, match=words):
        Replica(store, heartbeat=0).sync(live)
    assert same(live, kept)


# ── missing bases ────────────────────────────────────────────────────────────────────────────────────────────────────


def prune(store: Store, *versions: int) -> None:
    run = json.loads(store.get(keys.RUN).data)["run"]
    store.put(keys.PRUNED, json.dumps({"run": run, "versions": [[v, v] for v in versions]}).encode())
    for version in versions:
        store.delete(keys.manifest(version))


def test_a_newcomer_without_an_anchor(store: Store) -> None:
    run = ForgedRun(store)
    prune(store, 0)
    fresh = blank(run.versions[0])
    with pytest.raises(MissingBase):
        Replica(store, heartbeat=0).sync(fresh)
    assert same(fresh, blank(fresh))
    # whoever has version 1 is served
    live = copy(run.versions[1])
    assert Replica(store, heartbeat=0).sync(live) == 2
    assert same(live, run.versions[2])


def test_a_version_that_was_pruned_away_under_a_replica(store: Store) -> None:
    run = ForgedRun(store)
    live = copy(run.versions[0])
    replica = Replica(store, heartbeat=0)
    replica.sync(live, 0)
    prune(store, 1)
    with pytest.raises(DeltawireError) as caught:
        replica.sync(live)
    assert isinstance(caught.value, MissingBase | VersionNotFound)
    assert same(live, run.versions[0])
    assert replica.version == 0


# ── what is only a hint ──────────────────────────────────────────────────────────────────────────────────────────────


def head(store: Store, version: int, run: str | None = None) -> bytes:
    return json.dumps({"run": run or json.loads(store.get(keys.RUN).data)["run"], "version": version}).encode()


@pytest.mark.parametrize(
    "data",
    [
        lambda s: head(s, 0), lambda s: head(s, 1), lambda s: head(s, 3), lambda s: head(s, 10**15),
        lambda s: head(s, 10**17), lambda s: head(s, -1), lambda s: head(s, -(10**9)), lambda s: head(s, 2, "f" * 16),
        lambda s: head(s, 1 << 80), lambda s: b"", lambda s: b"{", lambda s: b"[]", lambda s: b"\xff",
        lambda s: nested(1_000_000), None,
    ],
    ids=["stale", "stale-by-one", "ahead-by-one", "far-ahead", "farther", "negative", "very-negative", "foreign",
         "huge", "empty", "cut", "list", "not-utf8", "nested", "missing"],
)  # fmt: skip
def test_readers_ignore_a_wrong_head(store: Store, data: Callable[[Store], bytes] | None) -> None:
    run = ForgedRun(store)
    if data is None:
        store.delete(keys.HEAD)
    else:
        store.put(keys.HEAD, data(store))
    live = blank(run.versions[0])
    assert Replica(store, heartbeat=0).sync(live) == 2
    assert same(live, run.versions[2])


@pytest.mark.parametrize("version", [10**15, -5])
def test_a_head_that_is_damaged_while_a_follower_watches(store: Store, version: int) -> None:
    """And the next version is still found, though head pointed nowhere in between."""
    run = ForgedRun(store)
    last = json.loads(store.get(keys.manifest(2)).data)
    store.delete(keys.manifest(2))
    store.put(keys.HEAD, head(store, 1))
    live = blank(run.versions[0])
    seen = []
    follower = Replica(store, heartbeat=0).follow(live, poll=0.001)
    seen.append(next(follower))
    store.put(keys.HEAD, head(store, version))
    store.put(keys.manifest(2), json.dumps(last).encode())
    seen.append(next(follower))
    assert seen == [1, 2]
    assert same(live, run.versions[2])


# ── history ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def long_run(store: Store) -> ForgedRun:
    return ForgedRun(store, count=19)


def test_a_summary_that_promises_an_anchor_that_is_not_there(store: Store, long_run: ForgedRun) -> None:
    def promise(manifest: Json) -> None:
        for summary in manifest["recent"]:
            summary[6].append(["anchor", None, 1, 1, ""])

    long_run.edit_manifest(promise)
    live = blank(long_run.versions[0])
    assert Replica(store, heartbeat=0).sync(live) == 18
    assert same(live, long_run.versions[18])


def test_summaries_that_lead_round_in_circles(store: Store, long_run: ForgedRun) -> None:
    def circle(manifest: Json) -> None:
        for summary in manifest["recent"]:
            summary[6] += [["delta", summary[0], -(10**12), 1, ""], ["delta", summary[0] + 1, -(10**12), 1, ""]]

    long_run.edit_manifest(circle)
    live = blank(long_run.versions[0])
    assert Replica(store, heartbeat=0).sync(live) == 18
    assert same(live, long_run.versions[18])


def test_a_summary_with_another_digest_identifies_no_version(store: Store, long_run: ForgedRun) -> None:
    """Weights are identified by digest; a lie about a digest must not give them a wrong name for long."""
    stranger = model(77)

    def lie(manifest: Json) -> None:
        from deltawire.core import full
        from deltawire.models import ModelView

        manifest["recent"][-1][2] = str(full.digest_of(ModelView(stranger)))

    long_run.edit_manifest(lie)
    assert Replica(store, heartbeat=0).sync(stranger) == 18
    assert same(stranger, long_run.versions[18])


@pytest.mark.parametrize(
    "data", [None, b"", b"{}", b"[", nested(1_000_000), b'{"run": "other", "end": 16, "versions": []}']
)
def test_a_history_page_that_is_of_no_use(store: Store, long_run: ForgedRun, data: bytes | None) -> None:
    """What it should say, the manifests say too."""
    whole = Run.open(store).timeline(18)
    store.delete(keys.history(16))
    if data is not None:
        store.put(keys.history(16), data)
    assert Run.open(store).timeline(18) == whole
    assert Run.open(store).timeline(18, since=9) == {v: s for v, s in whole.items() if v >= 9}
    live = model(5)
    assert Replica(store, heartbeat=0).sync(live) == 18
    assert same(live, long_run.versions[18])


@pytest.mark.parametrize("data", [b"", b"[", b"{}", nested(1_000_000)])
def test_a_list_of_pruned_versions_that_does_not_parse(store: Store, data: bytes) -> None:
    run = ForgedRun(store)
    store.put(keys.PRUNED, data)
    live = copy(run.versions[1])
    with pytest.raises(ManifestError):
        Replica(store, heartbeat=0).sync(live)
    assert same(live, run.versions[1])


def test_a_heartbeat_that_does_not_parse_is_not_shown(store: Store) -> None:
    ForgedRun(store)
    Replica(store, id="good").sync(model())
    store.put("replicas/bad.json", b"{")
    store.put("replicas/worse.json", nested(1_000_000))
    assert [beat.replica for beat in heartbeats(Run.open(store))] == ["good"]
