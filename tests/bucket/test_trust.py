"""Signed runs against whoever can write the bucket: each attack is a typed error, and no live weight changes."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from deltawire.bucket.replay import checkout
from deltawire.bucket.run import Run
from deltawire.bucket.trust import LinkSigner, Seen, SeenVersion, Trust, delegate, delegation, link_signer
from deltawire.bucket.verify import verify
from deltawire.bucket.watch import wait_for_run, watch
from deltawire.core import full, keys
from deltawire.core.added import AddedIndex, AddedLink, AddedPage
from deltawire.core.change import whole
from deltawire.core.errors import (
    DeltawireError,
    ForeignObject,
    HashMismatch,
    ManifestError,
    Misconfigured,
    NotTheSigner,
    RolledBack,
    RunReplaced,
    SignatureError,
    VersionNotFound,
)
from deltawire.core.manifest import Blob, Delegated, Head, Link, Pruned, dump
from deltawire.core.signing import LINKS, MANIFEST, Endorsement, SigningKey
from deltawire.core.sparse import DeltaWriter, encode_block
from deltawire.keeper.keeper import Keeper, KeeperOptions
from deltawire.models import ModelView
from deltawire.replica import Replica
from deltawire.store import MirroredStore, Store, open_store
from deltawire.trainer import Publisher
from deltawire.trainer.commit import Signing
from deltawire_wordle.counting import CountingStore
from flaky_store import FlakyStore
from support import Bag, Model, blank, copy, diff, held, history, model, publish, same, trained

OWN, NEXT, OTHER = (SigningKey.generate() for _ in range(3))


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTAWIRE_STATE", str(tmp_path / "state"))
    for name, key in (("own", OWN), ("next", NEXT), ("other", OTHER)):
        key.write(tmp_path / f"{name}.key")


@pytest.fixture
def sign(tmp_path: Path) -> Path:
    return tmp_path / "own.key"


VERSIONS = history(6)


@pytest.fixture
def run(store: Store, sign: Path) -> Store:
    """Versions 0 to 4, signed."""
    publish(store, VERSIONS[:5], sign=sign, anchor_ratio=1e9)
    return store


def follower(run: Store, **options: Any) -> Replica:
    return Replica(run, trust=OWN.public, heartbeat=0, **options)


def rewrite(store: Store, version: int, key: SigningKey | None, **changes: Any) -> None:
    """Write a manifest with other contents, signed by `key`; None keeps the signature that was there."""
    data = store.get(keys.manifest(min(version, Run.open(store).newest() or 0))).data
    fields = {**json.loads(data), "version": version, **changes}
    signature = fields.pop("signature", None)
    if key is not None:
        data = key.seal(MANIFEST, msgspec.json.encode(fields))
    else:
        data = msgspec.json.encode({**fields, **({"signature": signature} if signature else {})})
    store.put(keys.manifest(version), data)


def copy_of(store: Store) -> dict[str, bytes]:
    return {item.key: store.get(item.key).data for item in store.list()}


def restore(store: Store, kept: dict[str, bytes]) -> None:
    for item in list(store.list()):
        store.delete(item.key)
    for key, data in kept.items():
        store.put(key, data)


def test_a_signed_run_is_followed_bit_for_bit_and_without_more_requests(run: Store) -> None:
    weights, counting = blank(VERSIONS[0]), CountingStore(run)
    assert follower(counting).sync(weights) == 4
    assert same(weights, VERSIONS[4])
    unchecked = CountingStore(run)
    assert Replica(unchecked, heartbeat=0).sync(blank(VERSIONS[0])) == 4, "without a key nothing is checked"
    assert counting.requests == unchecked.requests


def test_an_unsigned_run_has_no_trace_of_signatures(store: Store) -> None:
    publish(store, VERSIONS[:2])
    assert {"signer", "signature", "rotations"}.isdisjoint(json.loads(store.get(keys.manifest(1)).data))
    with pytest.raises(SignatureError, match=r"version 1 of .* is not signed"):
        follower(store).sync(blank(VERSIONS[0]))


FORGERIES: dict[str, Callable[[Store], None]] = {
    "unsigned": lambda s: rewrite(s, 5, None, signer="", parent=4),
    "by another key": lambda s: rewrite(s, 5, OTHER, signer=OTHER.public, parent=4),
    "by another key that names the trusted one": lambda s: rewrite(s, 5, OTHER, parent=4),
    "with the signature of another version": lambda s: rewrite(s, 5, None, parent=4),
    "with a rotation nobody signed": lambda s: rewrite(
        s, 5, OTHER, signer=OTHER.public, parent=4, rotations=[[OWN.public, OTHER.public, "00" * 64]]
    ),
    "by a keeper": lambda s: rewrite(
        s,
        5,
        OTHER,
        signer=OTHER.public,
        parent=4,
        rotations=[list(msgspec.to_builtins(OWN.endorse("keeper", Run.open(s).info.run, OTHER.public)))],
    ),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_version_is_refused_and_no_weight_changes(run: Store, forgery: str) -> None:
    weights = blank(VERSIONS[0])
    replica = follower(run)
    replica.sync(weights)
    FORGERIES[forgery](run)
    run.put(keys.HEAD, dump(Head(Run.open(run).info.run, 5)))
    before = copy(weights)
    for reader in (replica, follower(run)):
        with pytest.raises(SignatureError):
            reader.sync(weights)
        assert same(weights, before)
    assert replica.version == 4
    assert verify(Run.open(run, trust=OWN.public)).failure.error == "SignatureError"


def test_a_forged_link_under_a_signed_manifest_is_refused(run: Store) -> None:
    """Whoever changes where a version comes from changes what was signed."""
    fields = json.loads(run.get(keys.manifest(4)).data)
    anchor = json.loads(run.get(keys.manifest(0)).data)["links"]
    rewrite(run, 4, None, links=[*fields["links"], *anchor])
    with pytest.raises(SignatureError, match="changed after it was signed"):
        follower(run).sync(blank(VERSIONS[0]))


def test_a_live_follower_serves_on_and_goes_on_when_the_forgery_is_gone(run: Store, sign: Path) -> None:
    weights, stop = blank(VERSIONS[0]), threading.Event()
    replica = follower(run)
    following = replica.follow(weights, poll=0.02, stop=stop)
    assert next(following) == 4
    rewrite(run, 5, OTHER, signer=OTHER.public, parent=4)
    run.put(keys.HEAD, dump(Head(Run.open(run).info.run, 5)))
    refused: list[str] = []

    def repair() -> None:
        while not replica.trouble:
            stop.wait(0.01)
        refused.append(replica.trouble)
        assert same(weights, VERSIONS[4])
        run.delete(keys.manifest(5))
        publish(run, VERSIONS[5:], sign=sign)

    helper = threading.Thread(target=repair)
    helper.start()
    assert next(following) == 5
    helper.join()
    assert "not trusted here" in refused[0]
    assert same(weights, VERSIONS[5])


def test_another_run_of_the_same_key_is_not_this_one(run: Store, sign: Path, tmp_path: Path) -> None:
    weights = blank(VERSIONS[0])
    replica = follower(run)
    replica.sync(weights)
    other = open_store(str(tmp_path / "other"))
    publish(other, history(7, seed=9), sign=sign)
    # one manifest of it
    run.put(keys.manifest(5), other.get(keys.manifest(5)).data)
    with pytest.raises(ForeignObject):
        follower(run).sync(weights)
    # the whole of it: for a live replica, and for one that starts
    restore(run, copy_of(other))
    with pytest.raises(RunReplaced):
        next(replica.follow(weights, poll=0.02))
    with pytest.raises(RunReplaced, match=r"seen\.json"):
        follower(run).sync(weights)
    assert same(weights, VERSIONS[4])


def test_a_key_may_be_trusted_in_one_run_only(run: Store) -> None:
    """So that not even the first contact accepts another run of the same key."""
    with pytest.raises(RunReplaced, match="trusted keys are for another"):
        Replica(run, trust=f"{OWN.public}@0123456789abcdef").sync(blank(VERSIONS[0]))
    assert Replica(run, trust=f"{OWN.public}@{Run.open(run).info.run}", heartbeat=0).sync(blank(VERSIONS[0])) == 4


def roll_back(run: Store, to: int, head: bool = True) -> None:
    info = Run.open(run).info
    for version in range(to + 1, 5):
        run.delete(keys.manifest(version))
    run.put(keys.HEAD, dump(Head(info.run, to))) if head else run.delete(keys.HEAD)


@pytest.mark.parametrize("head", [True, False])
def test_following_never_goes_back_also_after_a_restart(run: Store, head: bool) -> None:
    weights = blank(VERSIONS[0])
    replica = follower(run)
    following = replica.follow(weights, poll=0.02)
    assert next(following) == 4
    roll_back(run, 2, head)
    waiting = threading.Thread(target=lambda: next(following, None))
    waiting.start()
    while "was seen before" not in replica.trouble:
        waiting.join(0.01)
    assert (replica.version, same(weights, VERSIONS[4])) == (4, True)
    replica.close()
    waiting.join()
    with pytest.raises(RolledBack, match="ends with version 2, and version 4 was seen"):
        follower(run).sync(blank(VERSIONS[0]))
    assert verify(Run.open(run, trust=OWN.public)).failure.error == "RolledBack"
    # all versions gone
    for item in list(run.list(keys.VERSIONS)):
        run.delete(item.key)
    with pytest.raises(RolledBack, match="ends with no version"):
        follower(run).sync(blank(VERSIONS[0]))


def test_one_of_several_buckets_that_is_behind_is_no_rollback(run: Store) -> None:
    behind = open_store("memory://behind")
    for key, data in copy_of(run).items():
        if keys.version_of(key) != 4:
            behind.put(key, data)
    behind.put(keys.HEAD, dump(Head(Run.open(run).info.run, 3)))
    for store, refused in ((behind, True), (MirroredStore([behind]), False)):
        opened = Run.open(run, trust=OWN.public)
        assert opened.newest() == 4
        elsewhere = Run(store, opened.info, None, Trust.of(OWN.public))
        if refused:
            with pytest.raises(RolledBack):
                elsewhere.check_kept(4)
        else:
            elsewhere.check_kept(4)


def test_a_pin_may_go_to_any_signed_version(run: Store) -> None:
    weights = blank(VERSIONS[0])
    replica = follower(run)
    assert replica.sync(weights) == 4
    roll_back(run, 3)
    assert replica.sync(weights, 2) == 2
    assert same(weights, VERSIONS[2])
    rewrite(run, 1, OTHER)
    with pytest.raises(SignatureError):
        follower(run).sync(weights, 1)
    assert same(weights, VERSIONS[2])


def test_versions_in_another_order(run: Store) -> None:
    first, second = (run.get(keys.manifest(v)).data for v in (3, 4))
    run.put(keys.manifest(3), second)
    run.put(keys.manifest(4), first)
    weights = blank(VERSIONS[0])
    with pytest.raises(ManifestError, match="says it is version 3"):
        follower(run).sync(weights)
    assert same(weights, blank(VERSIONS[0]))


def test_objects_in_another_order(run: Store) -> None:
    first, second = (Run.open(run).manifest(v).links[0].objects[0].key for v in (3, 4))
    run.put(first, run.get(second).data)
    weights = copy(VERSIONS[2])
    with pytest.raises(HashMismatch):
        follower(run).sync(weights)
    assert same(weights, VERSIONS[2])


def test_a_truncated_run(run: Store) -> None:
    weights = copy(VERSIONS[4])
    for version in (0, 1, 2):
        run.delete(keys.manifest(version))
    with pytest.raises(VersionNotFound):
        follower(run).sync(blank(VERSIONS[0]))
    data = run.get(keys.manifest(4)).data
    run.put(keys.manifest(4), data[: len(data) // 2])
    with pytest.raises(ManifestError, match="does not parse"):
        follower(run).sync(weights)
    assert same(weights, VERSIONS[4])


def test_forged_history_costs_requests_and_never_a_wrong_state(store: Store, sign: Path) -> None:
    versions = history(20)
    publish(store, versions, sign=sign, anchor_every=8)
    page = json.loads(store.get(keys.history(16)).data)
    for summary in page["versions"]:
        summary[2] = "0" * 32
        summary[6] = [["anchor", None, 12, 1, ""]]
    store.put(keys.history(16), msgspec.json.encode(page))
    run = Run.open(store, trust=OWN.public)
    for version in (19, 15, 3):
        assert same(held(checkout(run, version), versions[version]), versions[version])


# ── keys that follow each other ──────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def rotated(run: Store, sign: Path, tmp_path: Path) -> Store:
    """Version 5 names the next key, which signs versions 6 and 7."""
    more = history(8)
    publish(run, [more[5]], sign=sign, next_key=NEXT.public, anchor_ratio=1e9)
    publish(run, more[6:], sign=tmp_path / "next.key", trust=OWN.public, anchor_ratio=1e9)
    return run


def test_a_rotation_is_followed_by_those_who_trust_the_old_key_or_the_new_one(rotated: Store) -> None:
    newest = history(8)[7]
    run = Run.open(rotated)
    assert [run.manifest(v).signer for v in (5, 6, 7)] == [OWN.public, NEXT.public, NEXT.public]
    for key in (OWN.public, NEXT.public):
        weights = blank(newest)
        assert Replica(rotated, trust=key, heartbeat=0).sync(weights) == 7
        assert same(weights, newest)
    # the first version of the new key has full weights beside the delta
    assert {link.kind for link in run.manifest(6).links} == {"delta", "anchor"}
    with pytest.raises(SignatureError, match="not trusted here"):
        Run.open(rotated, trust=NEXT.public).manifest(5)
    result = verify(Run.open(rotated, trust=OWN.public))
    assert [(signer.key, signer.versions) for signer in result.signers] == [
        (OWN.public, ((0, 5),)),
        (NEXT.public, ((6, 7),)),
    ]
    assert (result.ok, result.signatures_checked) == (True, True)


def test_the_old_key_signs_nothing_after_the_new_one_was_seen(rotated: Store) -> None:
    weights = blank(VERSIONS[0])
    follower(rotated).sync(weights)
    before = copy(weights)
    rewrite(rotated, 8, OWN, signer=OWN.public, parent=7, rotations=[])
    with pytest.raises(SignatureError, match="has not passed the run on"):
        follower(rotated).sync(weights)
    assert same(weights, before)


def test_the_next_key_goes_on_alone_and_names_another(rotated: Store, tmp_path: Path) -> None:
    more = history(10)
    publish(rotated, [more[8]], sign=tmp_path / "next.key", next_key=OTHER.public)
    publish(rotated, [more[9]], sign=tmp_path / "other.key", trust=NEXT.public)
    weights = blank(more[0])
    assert follower(rotated).sync(weights) == 9
    assert same(weights, more[9])


def test_a_publisher_needs_the_key_of_the_run(run: Store, sign: Path, store: Store, tmp_path: Path) -> None:
    with pytest.raises(NotTheSigner, match="DELTAWIRE_SIGN"):
        Publisher(run)
    with pytest.raises(NotTheSigner, match="not trusted here"):
        Publisher(run, sign=tmp_path / "other.key")
    with pytest.raises(NotTheSigner, match="has not named"):
        Publisher(run, sign=tmp_path / "other.key", trust=OWN.public)
    with pytest.raises(Misconfigured, match="next_key needs the key"):
        Publisher(run, next_key=NEXT.public)
    unsigned = open_store(str(tmp_path / "unsigned"))
    publish(unsigned, VERSIONS[:1])
    with pytest.raises(NotTheSigner, match="is not signed"):
        Publisher(unsigned, sign=sign)


def test_keys_come_from_the_environment(store: Store, sign: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTAWIRE_SIGN", str(sign))
    publish(store, VERSIONS[:2])
    monkeypatch.setenv("DELTAWIRE_TRUST", OTHER.public)
    with pytest.raises(SignatureError):
        Replica(store, heartbeat=0).sync(blank(VERSIONS[0]))
    monkeypatch.setenv("DELTAWIRE_TRUST", f"{OTHER.public},{OWN.public}")
    assert Replica(store, heartbeat=0).sync(blank(VERSIONS[0])) == 1


# ── what was seen ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_was_seen_only_grows_whoever_writes_it(tmp_path: Path) -> None:
    folder = tmp_path / "seen"
    folder.mkdir()

    def note(start: int) -> None:
        for version in range(start, 60, 3):
            Seen.note(folder, f"url-{start}", "run", SeenVersion(version, OWN.public, "0"))

    threads = [threading.Thread(target=note, args=(start,)) for start in (2, 0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    newest = SeenVersion(59, OWN.public, "0")
    assert Seen.read(folder) == Seen({f"url-{n}": "run" for n in (0, 1, 2)}, {"run": newest})
    # neither an older one, nor another one of this number with a signer or a digest that sorts after it
    for other in (SeenVersion(3, OTHER.public, "1"), SeenVersion(59, "z", "0"), SeenVersion(59, OWN.public, "f")):
        assert Seen.note(folder, "url-0", "run", other) == newest
    assert Seen.read(folder).runs == {"run": newest}


def test_what_was_seen_is_on_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def noted(module: Any, name: str) -> None:
        found = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given: (done.append(name), found(*given))[1])

    noted(os, "fsync")
    noted(os, "replace")
    Seen.note(tmp_path, "url", "run", SeenVersion(1, OWN.public, "0"))
    # the file, its name, the folder
    assert done == ["fsync", "replace", "fsync"]


def _no_space(file: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_folder_that_cannot_keep_what_was_seen_is_an_error(
    run: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DELTAWIRE_STATE", str(tmp_path / "file"))
    with pytest.raises(Misconfigured, match="DELTAWIRE_STATE"):
        follower(run)
    # a disk that is full later: also the second attempt applies nothing that would be forgotten
    monkeypatch.setenv("DELTAWIRE_STATE", str(tmp_path / "full"))
    full, weights = follower(run), blank(VERSIONS[0])
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", _no_space)
        for _ in range(3):
            with pytest.raises(Misconfigured, match="No space"):
                full.sync(weights)
    # damaged, or with fewer facts of a version
    monkeypatch.setenv("DELTAWIRE_STATE", str(tmp_path / "state"))
    for content in ("{", f'{{"runs": {{"x": [4, "{OWN.public}"]}}}}'):
        (tmp_path / "state" / Seen.NAME).write_text(content)
        with pytest.raises(Misconfigured, match=r"seen\.json does not parse: .* restore it, or remove it"):
            follower(run)


def test_a_process_that_is_stopped_with_the_lock_holds_nobody_up_for_ever(
    run: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deltawire.bucket.trust.LOCK_S", 0.05)
    monkeypatch.setenv("DELTAWIRE_STATE", str(tmp_path / "other"))
    weights = blank(VERSIONS[0])
    replica = follower(run)
    with (tmp_path / "other" / f"{Seen.NAME}.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(Misconfigured, match="another process has held"):
            replica.sync(weights)
    assert same(weights, blank(VERSIONS[0]))
    assert replica.sync(weights) == 4


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_an_interrupt_while_a_version_is_noted_serves_nothing_that_is_not_noted(
    run: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    monkeypatch.setenv("DELTAWIRE_STATE", str(tmp_path / "other"))
    weights, calls = blank(VERSIONS[0]), count()
    replica, done = follower(run), getattr(os, step)

    def interrupted(*given: Any) -> Any:
        if next(calls) == 0:
            raise KeyboardInterrupt
        return done(*given)

    monkeypatch.setattr(os, step, interrupted)
    with pytest.raises(KeyboardInterrupt):
        replica.sync(weights)
    assert (Seen.read(tmp_path / "other").runs, same(weights, blank(VERSIONS[0]))) == ({}, True)
    assert replica.sync(weights) == 4
    assert [seen.version for seen in Seen.read(tmp_path / "other").runs.values()] == [4]


# ── two histories ────────────────────────────────────────────────────────────────────────────────────────────────────


def seen_versions(folder: Path) -> list[int]:
    return [seen.version for seen in Seen.read(folder).runs.values()]


@pytest.mark.parametrize("seen_by", ["its publisher", "a replica"])
def test_a_trainer_does_not_go_on_in_a_bucket_that_was_rolled_back(
    run: Store, sign: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen_by: str
) -> None:
    if seen_by == "a replica":
        monkeypatch.setenv("DELTAWIRE_STATE", str(tmp_path / "elsewhere"))
        follower(run).sync(blank(VERSIONS[0]))
    folder = Seen.folder()
    assert seen_versions(folder) == [4]
    roll_back(run, 2)
    before = copy_of(run)
    with pytest.raises(RolledBack, match=r"ends with version 2, and version 4 was seen.*remove .* in .*seen\.json"):
        Publisher(run, sign=sign).publish(VERSIONS[5], wait=True)
    # only its claim came and went
    assert copy_of(run) | {keys.WRITER: b""} == before | {keys.WRITER: b""}
    # the way out that the message names
    (folder / Seen.NAME).unlink()
    publish(run, [VERSIONS[5]], sign=sign)
    assert Run.open(run, trust=OWN.public).newest() == 3
    assert seen_versions(folder) == [3]


def test_a_trainer_makes_no_other_run_where_its_own_is_missing(run: Store, sign: Path) -> None:
    restore(run, {})
    with pytest.raises(RunReplaced, match=r"remove this address from .*seen\.json"):
        Publisher(run, sign=sign).publish(VERSIONS[5], wait=True)
    assert list(run.list(keys.RUN)) == []


def test_a_trainer_that_cannot_note_a_version_has_committed_it(
    store: Store, sign: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "fsync", _no_space)
    publish(store, VERSIONS[:2], sign=sign)
    assert Run.open(store).newest() == 1
    assert "version 1 is committed, but not noted as seen" in caplog.text


def another_of(run: Store, version: int, key: SigningKey, **changes: Any) -> None:
    """Write another manifest of a version, validly signed."""
    rewrite(run, version, key, signer=key.public, **changes)


def test_another_version_4_than_was_seen_is_refused(run: Store, sign: Path) -> None:
    """Restored to version 3 and continued elsewhere with the same key."""
    weights = blank(VERSIONS[0])
    follower(run).sync(weights)
    fresh = copy_of(run)
    another_of(run, 4, OWN, digest="0" * 32)
    for reader in (follower(run), follower(run)):
        with pytest.raises(RolledBack, match=r"another version 4 than was seen before.*seen\.json"):
            reader.sync(weights)
    with pytest.raises(RolledBack):
        Publisher(run, sign=sign).publish(VERSIONS[5], wait=True)
    assert verify(Run.open(run, trust=OWN.public)).failure.error == "RolledBack"
    assert same(weights, VERSIONS[4])
    # the one that was seen is accepted as before
    restore(run, fresh)
    assert follower(run).sync(weights) == 4


def test_a_retired_key_signs_no_other_version_equal_to_the_newest_seen(rotated: Store) -> None:
    weights = blank(VERSIONS[0])
    follower(rotated).sync(weights)
    kept = copy(weights)
    another_of(rotated, 7, OWN, rotations=[])
    with pytest.raises(RolledBack, match=f"signed by {NEXT.public}.*this one by {OWN.public}"):
        follower(rotated).sync(weights)
    assert same(weights, kept)


def test_of_two_processes_the_second_refuses_what_the_first_has_seen_otherwise(
    run: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both were opened before either saw a version."""
    monkeypatch.setenv("DELTAWIRE_STATE", str(tmp_path / "other"))
    first, second = (Run.open(run, trust=OWN.public) for _ in range(2))
    assert first.newest() == 4
    another_of(run, 4, OWN, digest="0" * 32)
    for _ in range(2):
        with pytest.raises(RolledBack, match="another version 4"):
            second.newest()


def test_a_version_is_noted_before_it_is_served(run: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So one that was noted may never have been served, and the host still goes back behind it no more."""
    monkeypatch.setenv("DELTAWIRE_STATE", str(tmp_path / "other"))
    (blob,) = Run.open(run).manifest(4).links[0].objects
    weights, replica = blank(VERSIONS[0]), follower(run)
    run.delete(blob.key)
    with pytest.raises(DeltawireError):
        replica.sync(weights)
    assert seen_versions(tmp_path / "other") == [4]
    roll_back(run, 3)
    with pytest.raises(RolledBack):
        follower(run).sync(weights)
    assert same(weights, VERSIONS[3])


def test_trust_is_checked_when_it_is_given(run: Store) -> None:
    for wrong in ("ed25519:12", [], ["ed25519:"]):
        with pytest.raises(Misconfigured):
            Trust(wrong)
    assert Trust.of(None) is None


# ── keepers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Links(msgspec.Struct, frozen=True, omit_defaults=True):
    """Any record that a keeper signs."""

    run: str
    signer: str = ""
    delegation: Endorsement | None = None
    signature: str = ""


def opened_as_keeper(run: Store) -> Run:
    opened = Run.open(run, trust=Trust(OWN.public, remember=False))
    opened.newest()
    return opened


def read(run: Run, data: bytes) -> None:
    assert run.trust is not None
    run.trust.check_links(msgspec.json.decode(data, type=Links), data, "a page")


def test_a_keeper_signs_links_once_the_runs_key_has_delegated(run: Store, caplog: pytest.LogCaptureFixture) -> None:
    opened = opened_as_keeper(run)
    signer, record = LinkSigner(opened, OTHER), Links(opened.info.run)
    with pytest.raises(NotTheSigner, match="deltawire delegate"):
        signer.seal(record)
    with pytest.raises(NotTheSigner):
        delegate(opened, OTHER, NEXT.public)
    delegate(opened, OWN, NEXT.public)
    delegate(opened, OWN, OTHER.public)
    data = signer.seal(record)
    read(opened, data)
    read(opened_as_keeper(run), LinkSigner(opened, NEXT).seal(record))
    with pytest.raises(Misconfigured, match="must check what it reads"):
        LinkSigner(Run.open(run), OTHER)
    assert link_signer(Run.open(run), None) is None
    assert "this keeper has no key" in caplog.text


def test_forged_links_are_refused(run: Store, tmp_path: Path, sign: Path) -> None:
    opened = opened_as_keeper(run)
    delegate(opened, OWN, OTHER.public)
    record = Links(opened.info.run)
    good = LinkSigner(opened, OTHER).seal(record)
    statement = delegation(opened, OTHER.public)
    assert statement is not None

    def signed(key: SigningKey, **fields: Any) -> bytes:
        return key.seal(LINKS, msgspec.json.encode(msgspec.structs.replace(record, **fields)))

    elsewhere = open_store(str(tmp_path / "elsewhere"))
    publish(elsewhere, VERSIONS[:1], sign=sign)
    of_another_run = OWN.endorse("keeper", Run.open(elsewhere).info.run, NEXT.public)
    forgeries = [
        msgspec.json.encode(record),
        good.replace(b'"run":"', b'"run":"0'),
        signed(NEXT, signer=NEXT.public, delegation=statement),
        signed(NEXT, signer=OTHER.public, delegation=statement),
        signed(NEXT, signer=NEXT.public, delegation=NEXT.endorse("keeper", opened.info.run, NEXT.public)),
        signed(NEXT, signer=NEXT.public, delegation=OTHER.endorse("keeper", opened.info.run, NEXT.public)),
        signed(NEXT, signer=NEXT.public, delegation=of_another_run),
        OTHER.seal(MANIFEST, msgspec.json.encode(msgspec.json.decode(good))),
    ]
    for data in forgeries:
        with pytest.raises(SignatureError):
            read(opened, data)
    # what somebody else wrote there is no delegation
    for content in (b'{"run":"x"', dump(Delegated(opened.info.run, (OTHER.endorse("keeper", "x", NEXT.public),)))):
        run.put(keys.DELEGATED, content)
        assert delegation(opened, NEXT.public) is None


def test_a_delegation_ends_with_the_key_that_made_it(rotated: Store) -> None:
    opened = Run.open(rotated, trust=OWN.public)
    opened.newest()
    statement = OWN.endorse("keeper", opened.info.run, OTHER.public)
    record = Links(opened.info.run, OTHER.public, statement)
    with pytest.raises(SignatureError, match="has not made a keeper"):
        read(opened, OTHER.seal(LINKS, msgspec.json.encode(record)))


def test_the_private_key_leaves_no_trace(
    store: Store, sign: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nowhere in the bucket, in a log line, in an error or in anything that prints itself."""
    text = sign.read_text().splitlines()[1]
    digits = text.partition(":")[2]
    caplog.set_level("DEBUG")
    monkeypatch.setenv("DELTAWIRE_SIGN", text)
    said: list[object] = []
    for seed in range(4):
        try:
            with Publisher(FlakyStore(store, drop=0.3, seed=seed), on_version=said.append) as publisher:
                said += [publisher, publisher._make_pipeline]
                publisher.publish(VERSIONS[seed]).result(60)
        except DeltawireError as error:
            said += [error, error.__cause__, error.__context__]
    publish(store, VERSIONS[4:])
    Replica(store, trust=OWN.public).sync(blank(VERSIONS[0]))
    monkeypatch.setenv("DELTAWIRE_SIGN", text[:-2])
    with pytest.raises(Misconfigured) as wrong:
        Publisher(store)
    said.append(wrong.value)
    seen = caplog.text + repr(said) + "".join(map(str, said))
    for item in store.list():
        assert digits.encode() not in store.get(item.key).data
    assert digits[:16] not in seen


def test_watch_yields_versions_of_trusted_keys(run: Store) -> None:
    assert next(watch(run, trust=OWN.public)) == 4
    with pytest.raises(SignatureError):
        next(watch(run, trust=OTHER.public))


# ── a model with the same digest ─────────────────────────────────────────────────────────────────────────────────────

COLLISION = (33, 118, 47, 129, 84, 62, -62, -8, -103, -50, 28, -33, 16, 58, 29, -4)
"""Added to every seventh unit of `embed.weight`, these leave the state digest as it is: a short vector of a lattice,
found in seconds. The digest is linear, and proves transport, not origin."""


def swapped(weights: Model) -> Model:
    """Other weights with the same digest."""
    found = copy(weights)
    units = found["embed.weight"].reshape(-1)
    units[: 7 * len(COLLISION) : 7] += np.array(COLLISION).astype(np.uint16)
    assert not same(found, weights)
    assert full.digest_of(ModelView(found)) == full.digest_of(ModelView(weights))
    return found


def forged_anchor(store: Store, version: int, weights: Model) -> Link:
    """Put an anchor of other weights into the bucket, with everything right that a stranger can make right."""
    view, run = ModelView(weights), Run.open(store)
    metadata = {"run": run.info.run, "model_version": str(version), "total_params": str(run.schema.elements)}
    file = full.anchor(map(whole, view.schema.tensors), view.region, metadata)
    key = keys.anchor(version, "f0f0f0f0")
    store.put(key, b"".join(file.chunks()))
    return Link("anchor", None, (Blob(key, file.size, file.hash, file.head_size, file.head_hash),))


def test_weights_with_the_same_digest_fool_readers_without_a_key_only(store: Store, sign: Path) -> None:
    weights = {**VERSIONS[0], "embed.weight": np.full((64, 16), 1 << 15, np.uint16)}
    publish(store, [weights], sign=sign)
    other = swapped(weights)
    link = forged_anchor(store, 0, other)
    rewrite(store, 0, None, links=[msgspec.to_builtins(link)])
    fooled = blank(weights)
    assert Replica(store, heartbeat=0).sync(fooled) == 0
    assert same(fooled, other)
    careful = blank(weights)
    with pytest.raises(SignatureError, match="changed after it was signed"):
        follower(store).sync(careful)
    assert same(careful, blank(weights))


def swappable(count: int) -> list[Model]:
    """Versions that each have other weights with the same digest."""
    versions: list[Model] = [{**model(rows=256), "embed.weight": np.full((256, 16), 1 << 15, np.uint16)}]
    for seed in range(count - 1):
        versions.append(trained(versions[-1], seed, changes=2))
        versions[-1]["embed.weight"].reshape(-1)[:128] = 1 << 15
    return versions


@pytest.fixture
def kept(store: Store, sign: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Store, list[Model]]:
    """A signed run of 18 versions, whose keeper has added an anchor of version 16 and skip deltas."""
    monkeypatch.setattr("deltawire.keeper.lease.SETTLE_S", 0.0)
    versions = swappable(18)
    publish(store, versions, sign=sign, anchor_ratio=1e9)
    delegate(Run.open(store, trust=OWN.public), OWN, OTHER.public)
    keeper = Keeper(store, KeeperOptions(since=0, anchor_every=16), trust=OWN.public, sign=OTHER)
    try:
        assert any(added.link.kind == "anchor" for done in keeper.once() for added in done.added)
    finally:
        keeper.close()
    return store, versions


def test_links_of_the_runs_own_keeper_are_used_and_verify_names_it(kept: tuple[Store, list[Model]]) -> None:
    store, versions = kept
    result = verify(Run.open(store, trust=OWN.public))
    assert (result.ok, result.warnings) == (True, [])
    assert {(signer.signed, signer.key) for signer in result.signers} == {
        ("manifests", OWN.public),
        ("links", OTHER.public),
    }
    # without the trainer's own anchor, nothing else leads there
    store.delete(Run.open(store).manifest(0).links[0].objects[0].key)
    weights = blank(versions[0])
    assert Replica(store, trust=OWN.public, heartbeat=0).sync(weights) == 17
    assert same(weights, versions[17])


@pytest.mark.parametrize("signer", ["nobody", "a stranger", "the keeper, for something else"])
def test_a_forged_anchor_of_a_keeper_is_refused(
    kept: tuple[Store, list[Model]], signer: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Other weights with the same digest: only the signature shows it."""
    store, versions = kept
    other = swapped(versions[16])
    link = AddedLink(16, forged_anchor(store, 16, other))
    opened = Run.open(store)
    real = opened.added.index()
    assert real is not None
    page = AddedPage(opened.info.run, (link,))
    index = AddedIndex(opened.info.run, "keeper", 0.0, 17, (), (), link)
    for key, record in (("added/000016-000016.f0f0f0f0.json", page), (keys.ADDED, index)):
        if signer == "nobody":
            data = dump(record)
        elif signer == "a stranger":
            own = NEXT.endorse("keeper", opened.info.run, NEXT.public)
            data = NEXT.seal(LINKS, dump(msgspec.structs.replace(record, signer=NEXT.public, delegation=own)))
        else:
            # the seal of the real index under other content
            seal = store.get(keys.ADDED).data[-144:] if key != keys.ADDED else data[-144:]
            signed = msgspec.structs.replace(record, signer=real.signer, delegation=real.delegation)
            data = dump(signed)[:-1] + seal
        store.put(key, data)
    # whoever checks nothing is fooled
    fooled = blank(versions[0])
    Replica(store, heartbeat=0).sync(fooled, 16)
    assert same(fooled, other)
    # who checks goes another way
    weights = blank(versions[0])
    assert Replica(store, trust=OWN.public, heartbeat=0).sync(weights, 16) == 16
    assert same(weights, versions[16])
    assert "ignoring the added links" in caplog.text
    with pytest.raises(SignatureError):
        Run.open(store, trust=OWN.public).added.page("added/000016-000016.f0f0f0f0.json")
    # and where the forger has left no other way, stays where it is
    live = copy(versions[3])
    for item in list(store.list(keys.DELTAS)):
        store.delete(item.key)
    for item in list(store.list(keys.ANCHORS)):
        if "f0f0f0f0" not in item.key:
            store.delete(item.key)
    with pytest.raises(DeltawireError):
        Replica(store, trust=OWN.public, heartbeat=0).sync(live, 16)
    assert same(live, versions[3])


def forge(store: Store, version: int, link: Link) -> None:
    """Announce a link in the place of the keeper's own, with its key and the delegation of the run's."""
    opened = Run.open(store)
    real = opened.added.index()
    assert real is not None
    added = AddedLink(version, link)
    name = f"added/{version:06}-{version:06}.f0f0f0f0.json"
    page = AddedPage(opened.info.run, (added,))
    index = AddedIndex(opened.info.run, "keeper", 0.0, 17, (name,), (), added if link.kind == "anchor" else None)
    for key, record in ((name, page), (keys.ADDED, index)):
        signed = msgspec.structs.replace(record, signer=real.signer, delegation=real.delegation)
        store.put(key, OTHER.seal(LINKS, dump(signed)))


def forged_skip(store: Store, base: int, version: int, old: Model, new: Model) -> Link:
    """Put a delta into the bucket that leads to other weights with the digest of a version."""
    run = Run.open(store)
    digests = [run.manifest(v).digest for v in (base, version)]
    views = ModelView(old), ModelView(new)
    before, after = (Bag(run.schema, {t.name: view.region(whole(t)) for t in run.schema.tensors}) for view in views)
    with DeltaWriter("packed") as delta:
        for block in diff(before, after):
            delta.add(encode_block(block, "packed", before.region))
        file = delta.finish_link(run.info.run, base, version, *digests, run.schema.elements)
        key = keys.delta(base, version, "f0f0f0f0")
        store.put(key, b"".join(file.chunks()))
        return Link("delta", base, (file.blob(key),), "packed", changed=file.changed)


FORGED_LINKS = {
    "an anchor": (16, "embed.weight differs in 16 of 4,096", lambda s, v: forged_anchor(s, 16, swapped(v[16]))),
    "an anchor of the newest": (17, "embed.weight differs", lambda s, v: forged_anchor(s, 17, swapped(v[17]))),
    "a skip delta": (16, "leads to other weights", lambda s, v: forged_skip(s, 8, 16, v[8], swapped(v[16]))),
    "a skip delta to the newest": (17, "other weights", lambda s, v: forged_skip(s, 9, 17, v[9], swapped(v[17]))),
}


@pytest.mark.parametrize("forgery", FORGED_LINKS)
def test_a_delegated_key_can_replace_the_weights_and_is_found(
    kept: tuple[Store, list[Model]], forgery: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The digest is right, and so is the signature: such a key is trusted with the weights (docs/signed.md)."""
    store, versions = kept
    version, said, make = FORGED_LINKS[forgery]
    link = make(store, versions)
    forge(store, version, link)
    start = versions[link.base] if link.base is not None else blank(versions[0])
    fooled = copy(start)
    assert Replica(store, trust=OWN.public, heartbeat=0).sync(fooled, version) == version
    assert same(fooled, swapped(versions[version]))
    careful = Replica(store, trust=OWN.public, refuse_delegated=True, heartbeat=0)
    for refusing in (careful, None):
        with monkeypatch.context() as patch:
            if refusing is None:
                patch.setenv("DELTAWIRE_REFUSE_DELEGATED", "1")
            replica = refusing or follower(store)
            weights = copy(start)
            assert replica.sync(weights, version) == version
            assert same(weights, versions[version])
            assert replica.signatures == "own"
    assert "links of delegated keys are refused here" in caplog.text
    # found with and without a key, and whatever readers refuse
    for trust in (None, Trust(OWN.public, refuse_delegated=False)):
        failure = verify(Run.open(store, trust=trust)).failure
        assert failure is not None
        assert (failure.version, failure.object, failure.error) == (version, link.objects[0].key, "ForeignObject")
        assert said in failure.message
        assert "rotate the key" in failure.advice


def test_a_forged_skip_delta_on_the_walks_way_is_found_at_the_next_anchor(store: Store) -> None:
    """Where the trainer's own deltas are pruned, the walk itself goes by links that were added."""
    versions = swappable(18)
    publish(store, versions, anchor_ratio=1e9, anchor_every=16)
    run = Run.open(store)
    link = forged_skip(store, 0, 16, versions[0], swapped(versions[16]))
    store.put(keys.ADDED, dump(AddedIndex(run.info.run, "keeper", 0.0, 17, (), (AddedLink(16, link),))))
    store.put(keys.PRUNED, dump(Pruned(run.info.run, ((1, 15),))))
    failure = verify(run).failure
    assert failure is not None
    assert (failure.version, failure.object) == (16, link.objects[0].key)
    assert "an anchor of version 16 has other weights than the deltas lead to" in failure.message


def test_an_anchor_that_nothing_else_leads_to_is_told(kept: tuple[Store, list[Model]]) -> None:
    store, versions = kept
    run = Run.open(store)
    forge(store, 16, forged_anchor(store, 16, versions[16]))
    store.put(keys.PRUNED, dump(Pruned(run.info.run, ((0, 15),))))
    result = verify(Run.open(store))
    assert result.ok
    assert any(
        "added by a keeper, and no other link that is checked leads there" in warning for warning in result.warnings
    )


def test_links_that_the_runs_own_key_added_are_used_by_readers_that_refuse_others(
    store: Store, monkeypatch: pytest.MonkeyPatch, sign: Path
) -> None:
    publish(store, VERSIONS[:5], sign=sign, anchor_ratio=1e9)
    delegate(Run.open(store, trust=OWN.public), OWN, OWN.public)
    opened = opened_as_keeper(store)
    data = LinkSigner(opened, OWN).seal(Links(opened.info.run))
    refusing = Run.open(store, trust=Trust(OWN.public, refuse_delegated=True))
    refusing.newest()
    read(refusing, data)
    with pytest.raises(Misconfigured, match="links of delegated keys are refused here"):
        LinkSigner(refusing, OTHER)


def test_a_trainer_that_refuses_links_leaves_no_anchor_to_a_keeper(
    kept: tuple[Store, list[Model]], sign: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for refused in (False, True):
        monkeypatch.setenv("DELTAWIRE_REFUSE_DELEGATED", str(int(refused)))
        signing = Signing.of(sign, "", ())
        assert signing is not None
        opened = Run.open(kept[0], trust=signing.trust)
        opened.newest()
        assert (opened.added.index() is None) is refused


def test_that_links_are_refused_is_logged_once(
    kept: tuple[Store, list[Model]], caplog: pytest.LogCaptureFixture
) -> None:
    store, _ = kept
    run = Run.open(store, trust=Trust(OWN.public, refuse_delegated=True))
    run.newest()
    for _ in range(3):
        assert run.added.index() is None
        # as a keeper replaces it with every version
        store.put(keys.ADDED, store.get(keys.ADDED).data)
    assert caplog.text.count("links of delegated keys are refused here") == 1


def test_a_refusal_without_a_key_is_an_error(run: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Misconfigured, match="no key is trusted"):
        Replica(run, refuse_delegated=True)
    monkeypatch.setenv("DELTAWIRE_REFUSE_DELEGATED", "1")
    with pytest.raises(Misconfigured, match="no key is trusted"):
        Run.open(run)
    assert Replica(run, refuse_delegated=False).signatures == "unchecked"
    assert (follower(run).signatures, follower(run, refuse_delegated=False).signatures) == ("own", "checked")
    monkeypatch.setenv("DELTAWIRE_REFUSE_DELEGATED", "yes")
    with pytest.raises(Misconfigured, match="DELTAWIRE_REFUSE_DELEGATED is 'yes'"):
        follower(run)


def test_a_signer_is_a_key_and_nothing_that_a_terminal_obeys(run: Store) -> None:
    rewrite(run, 4, None, signer="\x1b[2J")
    for trust in (None, OWN.public):
        with pytest.raises(ManifestError, match="which is no public key") as error:
            Run.open(run, trust=trust).manifest(4)
        assert "\x1b" not in str(error.value)


def test_keys_that_are_given_hold_while_a_run_is_waited_for(run: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTAWIRE_TRUST", str(OTHER.public))
    with pytest.raises(SignatureError):
        wait_for_run(run)
    assert wait_for_run(run, trust=OWN.public).newest() == 4
