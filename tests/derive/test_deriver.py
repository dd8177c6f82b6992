"""A derived run: one version for each of the source's, each named and proven, whatever happens in between."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from deltawire.bucket.replay import checkout
from deltawire.bucket.run import Run
from deltawire.bucket.verify import verify
from deltawire.core import full, keys
from deltawire.core.errors import DivergedRun, RunNotFound, StoreUnavailable
from deltawire.core.manifest import Origin, Pruned, dump
from deltawire.core.signing import SigningKey
from deltawire.derive.deriver import Deriver, verify_derived
from deltawire.store import LocalStore
from deltawire.trainer import Publisher
from deltawire.views import FP8_BLOCK, FP8_BLOCK_UE8M0, blocks
from deltawire.views.blocks import Blocks
from deltawire.views.host import BlockView
from support import Bag, HookedStore, moved_bag
from view_models import ATTENTION, SCHEMA, weights

CONFIG = {"architectures": ["Qwen3ForCausalLM"]}
FILES = {"config.json": json.dumps(CONFIG).encode(), "tokenizer.json": b"{}"}


def versions(count: int, seed: int = 0) -> list[Bag]:
    found = [weights(seed)]
    while len(found) < count:
        found.append(moved_bag(found[-1], seed + len(found), 0.005))
    return found


def publish(store: Any, bags: list[Bag], files: dict[str, bytes] | None = None, **options: Any) -> None:
    with Publisher(store, files=files, **options) as publisher:
        for step, bag in enumerate(bags):
            publisher.publish(bag, step=step, metrics={"reward": step / 10}).result(60)


def derive(source: Path, derived: Any, first: int = -1, view: str = FP8_BLOCK, **options: Any) -> list[int]:
    """Derive what is there. Returns the versions of the derived run."""
    with Deriver(Run.open(str(source)), derived, view, **options) as deriver:
        return [published.version for published in deriver.follow(first, once=True)]


def assert_derived(source: Path, derived: Path, expected: list[int], name: str = FP8_BLOCK) -> None:
    """The derived run is in order, and its versions are the views of these."""
    run, origin = Run.open(str(derived)), Run.open(str(source))
    result = verify(run)
    assert result.ok, result.failure
    assert [run.manifest(v).origin.version for v in run.listed()] == expected  # type: ignore[union-attr]
    for version in run.listed():
        manifest = run.manifest(version)
        named = manifest.origin
        assert named is not None
        there = origin.manifest(named.version)
        assert named == Origin(name, origin.info.run, there.version, there.digest)
        view = BlockView(checkout(origin, named.version), Blocks(origin.schema, name))
        assert manifest.digest == str(full.digest_of(view))
        assert (manifest.step, manifest.metrics) == (there.step, there.metrics)
    again = verify_derived(run, origin)
    assert (again.failure, again.proven, again.not_proven) == (None, len(expected), {})


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("source") / "run"
    publish(str(place), versions(5), FILES)
    return place


def test_each_version_becomes_one_that_names_it(source: Path, tmp_path: Path) -> None:
    assert derive(source, str(tmp_path / "fp8")) == [0, 1, 2, 3, 4]
    assert_derived(source, tmp_path / "fp8", [0, 1, 2, 3, 4])
    run = Run.open(str(tmp_path / "fp8"))
    assert [m.links[0].kind for m in map(run.manifest, run.listed())] == ["anchor"] + ["delta"] * 4
    assert run.info.model == "Qwen3ForCausalLM"


def test_config_json_tells_of_the_blocks_and_other_files_come_along(source: Path, tmp_path: Path) -> None:
    derive(source, str(tmp_path / "fp8"))
    run = Run.open(str(tmp_path / "fp8"))
    files = {file.name: run.store.get(file.key).data for file in run.manifest(4).files}
    assert files["tokenizer.json"] == b"{}"
    config = json.loads(files["config.json"])
    assert config["architectures"] == CONFIG["architectures"]
    assert config["quantization_config"]["quant_method"] == "fp8"


def test_it_continues_where_it_ended_and_reads_no_more_than_the_deltas(source: Path, tmp_path: Path) -> None:
    place, derived = tmp_path / "run", str(tmp_path / "fp8")
    bags = versions(6)
    publish(str(place), bags[:3])
    assert derive(place, derived) == [0, 1, 2]
    assert derive(place, derived) == []
    publish(str(place), bags[3:], continues=True)
    assert derive(place, derived) == [3, 4, 5]
    assert_derived(place, tmp_path / "fp8", [0, 1, 2, 3, 4, 5])


def test_scales_that_are_powers_of_two(source: Path, tmp_path: Path) -> None:
    assert derive(source, str(tmp_path / "fp8"), view=FP8_BLOCK_UE8M0) == [0, 1, 2, 3, 4]
    assert_derived(source, tmp_path / "fp8", [0, 1, 2, 3, 4], FP8_BLOCK_UE8M0)
    run = Run.open(str(tmp_path / "fp8"))
    scales = checkout(run, 4).bits(ATTENTION + "_scale_inv")
    assert not (scales[scales < 0x7F800000] & 0x7FFFFF).any()
    [config] = [run.store.get(file.key).data for file in run.manifest(4).files if file.name == "config.json"]
    assert json.loads(config)["quantization_config"]["scale_fmt"] == "ue8m0"
    with pytest.raises(DivergedRun, match=r"is the fp8-block-ue8m0 of the run .* name the view that it has"):
        derive(source, str(tmp_path / "fp8"), view=FP8_BLOCK)


def test_a_run_of_an_earlier_view_is_continued_and_its_versions_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scales of this view were once another float32 in the last bit."""
    place, derived = tmp_path / "run", str(tmp_path / "fp8")
    bags = versions(3)
    publish(str(place), bags[:2])
    with monkeypatch.context() as earlier:
        earlier.setattr(blocks, "SHARE", np.nextafter(blocks.SHARE, np.float32(1)))
        derive(place, derived)
    publish(str(place), bags[2:], continues=True)
    assert derive(place, derived) == [2]
    source, run = Run.open(str(place)), Run.open(derived)
    made = BlockView(checkout(source, 2), Blocks(source.schema, FP8_BLOCK))
    assert run.manifest(2).digest == str(full.digest_of(made))
    failure = verify_derived(run, source).failure
    assert failure is not None
    assert "other weights than fp8-block gives for version 0 of its source" in failure.message


def test_a_new_run_begins_where_it_is_told_to(source: Path, tmp_path: Path) -> None:
    assert derive(source, str(tmp_path / "fp8"), first=3) == [0, 1]
    assert_derived(source, tmp_path / "fp8", [3, 4])


def test_a_version_that_was_pruned_meanwhile_is_not_needed(tmp_path: Path) -> None:
    place, derived = tmp_path / "run", str(tmp_path / "fp8")
    bags = versions(5)
    publish(str(place), bags[:2])
    derive(place, derived)
    publish(str(place), bags[2:], continues=True, anchor_every=1)
    run = Run.open(str(place))
    run.store.put(keys.PRUNED, dump(Pruned.of(run.info.run, range(3))))
    assert derive(place, derived) == [2, 3]
    found = Run.open(derived)
    assert [found.manifest(v).origin.version for v in found.listed()] == [0, 1, 3, 4]  # type: ignore[union-attr]
    again = verify_derived(found, run)
    assert (again.failure, again.proven) == (None, 2)
    assert again.not_proven == {"the version it is derived from is gone": 2}


def test_the_run_of_another_source_is_refused(source: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    publish(str(other), versions(1, seed=7))
    derive(other, str(tmp_path / "fp8"))
    with pytest.raises(DivergedRun, match="is the fp8-block of the run"):
        derive(source, str(tmp_path / "fp8"))
    publish(str(tmp_path / "plain"), versions(1))
    with pytest.raises(DivergedRun, match="derived from no run"):
        derive(source, str(tmp_path / "plain"))


def test_a_run_that_is_not_what_it_claims_is_found(source: Path, tmp_path: Path) -> None:
    """A version whose weights are a proper run's, but not the view of its origin."""
    derive(source, str(tmp_path / "fp8"))
    run = Run.open(str(tmp_path / "fp8"))
    honest = run.manifest(4)
    assert honest.origin is not None
    store = LocalStore(tmp_path / "fp8")
    for wrong, why in (
        (msgspec.structs.replace(honest.origin, version=3), "names the digest"),
        (
            msgspec.structs.replace(honest.origin, version=3, digest=Run.open(str(source)).manifest(3).digest),
            "other weights",
        ),
    ):
        store.put(keys.manifest(4), dump(msgspec.structs.replace(honest, origin=wrong)))
        result = verify_derived(Run.open(store), Run.open(str(source)))
        assert result.failure is not None
        assert (result.failure.version, why in result.failure.message) == (4, True)
    store.put(keys.manifest(4), dump(honest))


def test_ended_at_any_request_it_loses_nothing(source: Path, tmp_path: Path) -> None:
    """Whatever the last request was, the next start continues, and the run is the same in the end."""
    counts: list[str] = []

    class Killed(BaseException):
        pass

    def run_until(place: Path, last: int) -> bool:
        count = 0

        def hook(moment: str, verb: str, key: str) -> None:
            nonlocal count
            count += 1
            if last and count >= last and threading.current_thread().name != "deltawire-writer":
                raise Killed

        try:
            derive(source, HookedStore(LocalStore(place), hook))
        except (Killed, Exception):
            if not last:
                raise
            return False
        counts.append(str(count))
        return True

    assert run_until(tmp_path / "whole", 0)
    total = int(counts[0])
    place = tmp_path / "fp8"
    for last in range(5, total, 11):
        run_until(place, last)
    assert run_until(place, 0)
    assert_derived(source, place, [0, 1, 2, 3, 4])
    whole, broken = Run.open(str(tmp_path / "whole")), Run.open(str(place))
    assert [whole.manifest(v).digest for v in range(5)] == [broken.manifest(v).digest for v in range(5)]


def test_following_waits_for_versions_and_a_store_that_comes_back(tmp_path: Path) -> None:
    place, bags, stop = tmp_path / "run", versions(4), threading.Event()
    publish(str(place), bags[:1])
    fails = iter([False, True, False])

    def hook(moment: str, verb: str, key: str) -> None:
        if (moment, verb) == ("before", "put") and key.startswith("deltas/") and next(fails, False):
            raise StoreUnavailable("not now")

    reached = []
    store = HookedStore(LocalStore(tmp_path / "fp8"), hook)
    with Deriver(Run.open(str(place)), store, "fp8-block") as deriver:
        for published in deriver.follow(poll=0.02, stop=stop):
            reached.append(published.version)
            if len(reached) < 4:
                publish(str(place), bags[len(reached) : len(reached) + 1], continues=True)
            else:
                stop.set()
    assert reached == [0, 1, 2, 3]
    assert_derived(place, tmp_path / "fp8", [0, 1, 2, 3])


def test_following_skips_no_version_whose_delta_is_late(tmp_path: Path) -> None:
    place, stop = tmp_path / "run", threading.Event()
    publish(str(place), versions(4))
    fails = iter([True])

    def hook(moment: str, verb: str, key: str) -> None:
        if (moment, verb) == ("before", "get_range") and key.startswith("deltas/step_000002") and next(fails, False):
            raise StoreUnavailable("not now")

    source = Run.open(HookedStore(LocalStore(place), hook))
    with Deriver(source, str(tmp_path / "fp8"), "fp8-block") as deriver:
        for _ in deriver.follow(poll=0.02, stop=stop):
            if deriver.reached == 3:
                stop.set()
    assert_derived(place, tmp_path / "fp8", [0, 1, 2, 3])


def test_following_skips_a_version_that_cannot_be_read_and_ends_with_a_run_that_is_gone(tmp_path: Path) -> None:
    place, bags, derived = tmp_path / "run", versions(5), tmp_path / "fp8"
    publish(str(place), bags[:3])
    [lost] = (place / "deltas").glob("step_000001.*")
    lost.rename(tmp_path / "lost")
    reached = []
    with pytest.raises(RunNotFound), Deriver(Run.open(str(place)), str(derived), "fp8-block") as deriver:
        for published in deriver.follow(poll=0.02):
            reached.append(published.version)
            # version 0, then an anchor: what lies between hangs on the lost delta
            if len(reached) == 1:
                publish(str(place), bags[3:4], continues=True, anchor_every=1)
            else:
                shutil.rmtree(derived)
                publish(str(place), bags[4:], continues=True)
    assert reached == [0, 1]


def test_other_manifests_have_no_trace_of_it(source: Path) -> None:
    assert b"origin" not in LocalStore(source).get(keys.manifest(1)).data


def test_the_weights_of_a_replica_times_their_scales_are_near_the_trainers(source: Path, tmp_path: Path) -> None:
    """An example of what the numbers mean: weight = e4m3 · scale, and half an ulp of e4m3 is 1/16 at most."""
    from deltawire.core.dtypes import DTYPES, numbers

    derive(source, str(tmp_path / "fp8"))
    state, origin = checkout(Run.open(str(tmp_path / "fp8")), 0), checkout(Run.open(str(source)), 0)
    shape = SCHEMA.by_name()[ATTENTION].shape
    codes = numbers(state.bits(ATTENTION), DTYPES["F8_E4M3"]).reshape(shape)
    scales = state.bits(ATTENTION + "_scale_inv").view(np.float32).reshape(3, 3)
    spread = np.repeat(np.repeat(scales, 128, 0), 128, 1)[: shape[0], : shape[1]]
    exact = numbers(origin.bits(ATTENTION), DTYPES["BF16"]).reshape(shape)
    assert np.abs(codes * spread - exact).max() <= np.abs(exact).max() / 16
    assert (np.abs(codes * spread - exact) <= np.abs(exact) / 16 + spread * 2.0**-10 + 1e-12).all()


def test_a_view_with_a_key_of_its_own_goes_on_where_only_the_trainers_key_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DELTAWIRE_STATE", str(tmp_path / "state"))
    trainer, keeper = SigningKey.generate(), SigningKey.generate()
    bags = versions(2)
    publish(str(tmp_path / "run"), bags[:1], sign=trainer)
    monkeypatch.setenv("DELTAWIRE_TRUST", trainer.public)
    assert derive(tmp_path / "run", str(tmp_path / "fp8"), sign=keeper) == [0]
    publish(str(tmp_path / "run"), bags[1:], sign=trainer)
    assert derive(tmp_path / "run", str(tmp_path / "fp8"), sign=keeper) == [1]
