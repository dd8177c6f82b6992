"""`auto` picks what arrives soonest, says why, and learns from what it did."""

from __future__ import annotations

import numpy as np
import pytest

import deltawire as dw
from deltawire.bucket.run import Run
from deltawire.bucket.verify import verify
from deltawire.core import keys
from deltawire.core.added import AddedIndex, AddedLink
from deltawire.core.errors import UnknownFormat
from deltawire.core.manifest import Base, Blob, Link, Summary, SummaryLink
from deltawire.core.sparse import DataFile
from deltawire.keeper.keeper import Keeper, KeeperOptions
from deltawire.store import Store
from deltawire.trainer import Publisher
from deltawire.trainer.claim import Claim
from deltawire.trainer.commit import Committer
from deltawire.trainer.companions import Companions
from deltawire.trainer.policy import AnchorPolicy, EncodingChooser
from keeping import fresh, settings, step

WEIGHTS, CHANGED = 596_000_000, 6_900_000


def file(size: int, changed: int = CHANGED) -> DataFile:
    return DataFile(b"", lambda: iter(()), size, changed)


def after_upload(bytes_per_second: float) -> EncodingChooser:
    chooser = EncodingChooser("auto")
    choice = chooser.choose(WEIGHTS, CHANGED)
    # the encode time that was expected, so that only the link is news
    expected = chooser.estimates[choice.encoding].work(WEIGHTS, CHANGED) / 2
    chooser.learn(choice, file(8_000_000), WEIGHTS, expected, 8_000_000 / bytes_per_second)
    return chooser


def test_a_slow_link_is_worth_the_smaller_encoding() -> None:
    assert after_upload(1e6).choose(WEIGHTS, CHANGED).encoding == "context"


def test_a_fast_link_is_not() -> None:
    assert after_upload(10e9).choose(WEIGHTS, CHANGED).encoding == "packed"


def test_the_reason_names_both_and_the_link() -> None:
    why = after_upload(1e6).choose(WEIGHTS, CHANGED).why
    assert "packed" in why
    assert "Mbit/s measured" in why
    assert "assumed" in EncodingChooser("auto").choose(WEIGHTS, CHANGED).why


def test_it_learns_that_an_encoding_is_slow_here() -> None:
    chooser = after_upload(1e6)
    before = chooser.estimates["context"].seconds_per_weight
    choice = chooser.choose(WEIGHTS, CHANGED)
    chooser.learn(choice, file(6_000_000), WEIGHTS, 60.0, 6.0)
    assert chooser.estimates["context"].seconds_per_weight > 1.5 * before


def test_small_uploads_say_nothing_about_the_link() -> None:
    chooser = EncodingChooser("auto")
    chooser.learn(chooser.choose(1000, 10), file(500, 10), 1000, 0.001, 10.0)
    assert not chooser.measured


def test_a_dense_change_of_an_adapter_goes_out_as_full_weights_where_that_is_sooner() -> None:
    """310,000 weights of an adapter in bf16, half of which changed."""
    adapter = (310_000, 155_000, 620_000)
    slow, fast = EncodingChooser("auto"), EncodingChooser("auto")
    slow.learn_link(620_000, 6.2)
    fast.learn_link(620_000, 0.0001)
    assert not slow.choose(*adapter).full
    choice = fast.choose(*adapter)
    assert choice.full
    assert choice.encoding in ("packed", "context")
    assert "packed" in choice.why
    assert not fast.choose(310_000, None, 620_000).full, "what is compared while it is encoded must be encoded"
    assert not fast.choose(310_000, 155_000).full, "a model is patched, not replaced"
    assert not EncodingChooser("packed").choose(*adapter).full


def test_a_fixed_encoding_needs_no_reason() -> None:
    choice = EncodingChooser("raw").choose(WEIGHTS, CHANGED)
    assert (choice.encoding, choice.why) == ("raw", "")


def test_unknown_encodings_are_refused_at_once() -> None:
    with pytest.raises(UnknownFormat, match="zip"):
        EncodingChooser("zip")


def test_the_choice_is_in_the_manifest_and_the_replica_follows() -> None:
    random = np.random.default_rng(0)
    weights = {"w": random.integers(0, 1 << 16, (300, 400), dtype=np.uint16)}
    with dw.Publisher("memory://auto", encoding="auto") as publisher:
        for _ in range(3):
            publisher.publish(weights)
            weights["w"].reshape(-1)[random.integers(0, weights["w"].size, 2000)] ^= 1
            publisher.flush()
        publisher.publish(weights, wait=True)
    run = Run.open("memory://auto")
    links = [run.manifest(version).link("delta", version - 1) for version in (1, 2, 3)]
    assert all(link.encoding in ("packed", "context") and "Mbit/s" in link.why for link in links)
    live = {"w": np.zeros_like(weights["w"])}
    dw.Replica("memory://auto").sync(live)
    assert np.array_equal(live["w"], weights["w"])
    assert "Mbit/s" in run.timeline(3)[2].links[0].why


class Instant(EncodingChooser):
    """Finds the link so fast that every encoding takes longer."""

    def learn_link(self, size: int, seconds: float) -> None:
        super().learn_link(1 << 30, 1e-6)


def test_full_weights_in_place_of_deltas(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltawire.trainer.publisher.EncodingChooser", Instant)
    weights = {"w": np.arange(200_000, dtype=np.uint16)}
    config = {"adapter_config.json": b'{"base_model_name_or_path": "org/model"}'}
    published = []
    with Publisher(store, encoding="auto", files=config) as publisher:
        for _ in range(3):
            published.append(publisher.publish(weights).result(120))
            weights["w"][:150_000] += 1
    run = Run.open(store)
    assert run.info.base == Base("org/model")
    assert [version.kinds for version in published] == [("anchor",)] * 3
    assert [version.changed for version in published] == [200_000, 150_000, 150_000]
    assert [bool(run.manifest(version).links[0].why) for version in range(3)] == [False, True, True]
    assert verify(run).ok
    live = {"w": np.zeros_like(weights["w"])}
    dw.Replica(store, heartbeat=0).sync(live)
    weights["w"][:150_000] -= 1
    assert np.array_equal(live["w"], weights["w"])


# ── beside a keeper ──────────────────────────────────────────────────────────────────────────────────────────────────


def keeper_index(done: int, anchor: int | None) -> AddedIndex:
    blob = None if anchor is None else Blob(keys.anchor(anchor, "0123abcd"), 1000, "0" * 32)
    newest = None if blob is None or anchor is None else AddedLink(anchor, Link("anchor", None, (blob,)))
    return AddedIndex("run", "k", 0.0, done, (), (), newest)


def deltas(count: int) -> dict[int, Summary]:
    """A run of one anchor and deltas of a tenth of it."""
    first = SummaryLink("anchor", None, 1000, 1, "")
    links = [(first,), *((SummaryLink("delta", v - 1, 100, 1, ""),) for v in range(1, count))]
    return {v: Summary(v, v - 1 if v else None, "", 0.0, None, 0, x) for v, x in enumerate(links)}


def test_an_anchor_is_left_to_a_keeper_that_is_alive_but_not_for_ever() -> None:
    policy = AnchorPolicy(every=8)

    def leaves(version: int, index: AddedIndex | None, policy: AnchorPolicy = policy) -> bool:
        versions = deltas(version)
        assert policy.wants_anchor(version, 1, 1000, versions)
        return policy.leaves_to_keeper(version, 1, 1000, versions, index)

    assert not leaves(8, None)
    assert leaves(8, keeper_index(7, None))
    assert leaves(15, keeper_index(0, None))
    # it has had twice the time
    assert not leaves(16, keeper_index(15, None))
    # it has made one; then that one counts
    assert leaves(16, keeper_index(15, 9))
    assert leaves(24, keeper_index(23, 9))
    assert not leaves(25, keeper_index(24, 9))
    # it is far behind, and all that it made is old
    assert not leaves(100, keeper_index(60, 90))
    assert leaves(100, keeper_index(60, 93))
    # an anchor that is said to be of a version to come
    assert not leaves(16, keeper_index(10**17, 10**17))
    # no keeper is ahead of the trainer
    assert not leaves(15, keeper_index(10**17, None))
    # by bytes, and where nothing but anchors is wanted
    assert leaves(12, keeper_index(11, None), AnchorPolicy())
    assert not leaves(22, keeper_index(21, None), AnchorPolicy())


def test_deciding_costs_the_same_in_a_long_run() -> None:
    """A run of a keeper has no anchor of the trainer, perhaps for ever."""

    class Counted(dict[int, Summary]):
        reads = 0

        def __getitem__(self, version: int) -> Summary:
            self.reads += 1
            return super().__getitem__(version)

    for policy in (AnchorPolicy(), AnchorPolicy(every=8, ratio=1e9)):
        versions = Counted(deltas(5000))
        assert policy.wants_anchor(5000, 1, 1000, versions)
        assert versions.reads < 20


def test_a_trainer_uploads_deltas_alone_while_a_keeper_makes_the_anchors(monkeypatch: pytest.MonkeyPatch) -> None:
    settings(monkeypatch)
    kept = fresh(2)
    weights = kept.weights[-1]
    kinds: list[tuple[str, ...]] = []
    keeper = Keeper(kept.store, KeeperOptions(anchor_every=8), id="keeper")
    keeper.keep(1)
    with Publisher(kept.store, anchor_every=8, anchor_ratio=1e9) as publisher:
        for version in range(2, 75):
            weights = step(weights, version)
            kinds.append(publisher.publish(weights).result(120).kinds)
            if version < 40:
                keeper.keep(version)
    assert all(kind == ("delta",) for kind in kinds[: 48 - 2])
    # the last anchor of the keeper is that of 32; after twice the time the trainer makes its own, and a keeper that is
    # 32 versions behind is not waited for any more
    assert [v for v, kind in enumerate(kinds, 2) if "anchor" in kind] == [48, 64, 72]
    anchors = [x.version for x in kept.run.added.between(-1, 99) if x.link.kind == "anchor"]
    assert sorted(anchors) == [8, 16, 24, 32]
    assert verify(kept.run).ok
    # an anchor that is named and not there is not relied on
    kept.store.delete(next(x for x in kept.run.added.between(-1, 99) if x.version == 32).link.objects[0].key)
    assert Committer.open(kept.run, Companions(), Claim()).keeper_index() is None
