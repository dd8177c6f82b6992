"""Several processes publish one model together: FSDP2, DDP, tensor parallelism, over gloo. Readers must not notice."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from sharding import (
    LIMIT,
    Trained,
    assert_as_gathered,
    assert_in_order,
    assert_same_run,
    assert_small,
    run_ranks,
    train,
)

import deltawire as dw
from deltawire.bucket.replay import checkout
from deltawire.bucket.run import Run
from deltawire.core.change import Region, whole
from deltawire.core.errors import SchemaError, SchemaMismatch, UnsupportedTensor
from deltawire.core.manifest import Link, Manifest
from deltawire.core.schema import Schema, TensorSpec
from deltawire.core.state import State
from deltawire.models import ModelView, torch_bits
from deltawire.replica import Replica
from deltawire.trainer.shard import HeldShards
from deltawire.trainer.shards import flat_regions, merge, share_out, tiles

pytestmark = pytest.mark.timeout(2 * LIMIT)


def data_of(manifests: list[Manifest], rank: int, size: int) -> int:
    """Bytes of the data objects that carry a rank's number."""
    blobs = [blob for m in manifests for link in m.links for blob in link.objects]
    assert all(f"-of-{size:05d}." in blob.key for blob in blobs)
    return sum(blob.size for blob in blobs if f"-{rank + 1:05d}-of-" in blob.key)


def assert_each_wrote_its_share(trained: Trained, name: str, manifests: list[Manifest], slack: int = 1000) -> None:
    anchors = [link for m in manifests for link in m.links if link.kind == "anchor"]
    assert anchors
    for anchor in anchors:
        fair = anchor.bytes / trained.size
        assert [blob.size for blob in anchor.objects] == pytest.approx([fair] * trained.size, abs=slack)
    for rank, report in enumerate(trained.reports):
        own = data_of(manifests, rank, trained.size)
        assert own > 0
        if rank:
            assert report[name]["put"] == own, "a rank other than 0 puts its own objects and nothing else"
        else:
            rest = sum(data_of(manifests, other, trained.size) for other in range(1, trained.size))
            assert own <= report[name]["put"] < own + rest, "rank 0 adds the records, not the data of others"


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """One start for all scenarios, of ranks that share their imports. In the last one rank 1 is killed."""
    scenarios = (
        "fsdp,ddp,view,recut,upload_fails,out_of_step,resume,refused,adamw,contradicted,interrupted,unequal/killed"
    )
    return run_ranks([], tmp_path_factory.mktemp("two"), scenarios, 2, dies=1)


def test_fsdp_publishes_what_one_process_would(two: Trained) -> None:
    manifests = assert_same_run(two, "fsdp")
    assert_each_wrote_its_share(two, "fsdp", manifests)
    assert [{link.kind for link in m.links} for m in manifests][3] == {"delta", "anchor"}


def test_a_replica_loads_an_anchor_of_several_objects_and_follows(two: Trained) -> None:
    run = Run.open(str(two.folder / "fsdp"))
    weights = State(run.schema)
    replica = Replica(str(two.folder / "fsdp"), heartbeat=0)
    for version in (0, 1, 4):
        replica.sync(weights, version)
        assert str(weights_digest(weights)) == run.manifest(version).digest
    late = State(run.schema)
    Replica(str(two.folder / "fsdp"), heartbeat=0).sync(late)
    assert str(weights_digest(late)) == run.manifest(4).digest


def test_ddp_publishes_together_what_every_rank_holds(two: Trained) -> None:
    largest = max(tensor.nbytes for tensor in Run.open(str(two.folder / "ddp")).schema.tensors)
    # tensors are handed out whole
    assert_each_wrote_its_share(two, "ddp", assert_same_run(two, "ddp"), slack=largest // 2)


def test_a_view_has_the_same_blocks_however_the_ranks_cut_them(two: Trained) -> None:
    for name in ("view", "view-tp"):
        assert_same_run(two, name)
        assert Run.open(str(two.folder / name)).schema.by_name()["middle.weight"].dtype == "F8_E4M3"


@pytest.mark.slow
def test_a_view_of_experts_that_several_ranks_hold(tmp_path: Path) -> None:
    two = train(tmp_path, "view_experts", 2)
    assert_same_run(two, "view-experts")
    scales = Run.open(str(two.folder / "view-experts")).schema.by_name()
    assert scales["model.layers.1.mlp.experts.3.gate_proj.weight_scale_inv"].shape == (2, 2)


@pytest.mark.slow
def test_experts_of_several_ranks_have_the_names_of_the_checkpoint(tmp_path: Path) -> None:
    """test_huggingface.py has those of one rank."""
    two = train(tmp_path, "experts", 2)
    assert_same_run(two, "experts")
    names = {tensor.name for tensor in Run.open(str(two.folder / "experts")).schema.tensors}
    assert "model.layers.1.mlp.experts.3.gate_proj.weight" in names


def test_a_version_that_one_rank_cannot_put_fails_on_all_and_goes_out_with_the_next(two: Trained) -> None:
    assert "no room for this one" in two.reports[1]["upload"][1]
    assert "rank 1: no room for this one" in two.reports[0]["upload"][1]
    manifests = assert_same_run(two, "fails")
    assert [m.step for m in manifests] == [1, 2, 4, 5]


def test_ranks_that_are_out_of_step_merge_the_same_publishes(two: Trained) -> None:
    versions = [report["merged"] for report in two.reports]
    assert versions[0] == versions[1]
    assert versions[0] == sorted(versions[0])
    alone = {m.step: m.digest for m in two.manifests("merged-alone")}
    manifests = two.manifests("merged")
    assert len(manifests) < len(alone), "nothing was merged"
    assert {m.step: m.digest for m in manifests}.items() <= alone.items()
    assert manifests[-1].step == max(alone)
    assert_in_order(Run.open(str(two.folder / "merged")))


def test_a_restarted_trainer_takes_the_run_up_where_it_stands(two: Trained) -> None:
    manifests = two.manifests("resume")
    assert [m.step for m in manifests] == [1, 2, 3, 3, 1, 2]
    same, back, again = manifests[3:]
    assert (same.digest, same.changed) == (manifests[2].digest, 0)
    assert (back.digest, back.changed > 0) == (manifests[0].digest, True), "forward to what the trainer has"
    assert again.digest == manifests[1].digest, "from there on as the first time"
    for manifest, base in ((same, 2), (back, 3), (again, 4)):
        assert delta_of(manifest).base == base
    for report in two.reports:
        assert report["diverged"][0] == "DivergedRun"
        assert report["other model"][0] == "SchemaMismatch"
    assert_in_order(Run.open(str(two.folder / "resume")))


def test_what_cannot_be_published_together_is_refused_on_every_rank(two: Trained) -> None:
    for report in two.reports:
        assert report["partial"][0] == report["differs"][0] == "SchemaMismatch"
    assert not (two.folder / "refused" / "run.json").exists()


def test_what_lies_elsewhere_than_before_is_refused_and_never_read_as_something_else(two: Trained) -> None:
    words = {
        "columns": "holds other parts of 'w' than",
        "whole": "holds other parts of 'w' than",
        "more": "holds other parts of 'more' than",
        "less": "holds other parts of 'more' than",
        "untied": "'tied' is tied to 'w'",
        "untied parts": "'tied' is tied to 'w'",
        "untied shards": "'tied' is tied to 'w'",
        "untied on one rank": "'tied' is tied to 'w'",
    }
    for report in two.reports:
        for name, expected in words.items():
            kind, message = report[name]
            assert (kind, expected in message) == ("SchemaMismatch", True), message
        for first, second in ((0, 1), (1, 2), (2, 0)):
            kind, message = report[f"kinds {first} {second}"]
            kinds = "a model", "shards", "weights one by one"
            assert kind == "OutOfStep"
            assert f"rank 0: publish 1 of {kinds[first]}, step=1, rank 1: publish 1 of {kinds[second]}" in message
    for name in [*words][:-1]:
        assert [m.changed for m in two.manifests(f"recut-{name}")[1:]] == [0]
    assert not (two.folder / "recut-refused" / "run.json").exists()


def test_one_memory_in_two_shapes_or_dtypes_is_not_tied() -> None:
    square = torch.arange(16, dtype=torch.bfloat16).reshape(4, 4)
    shards = [
        dw.Shard("w", square, (4, 4)),
        dw.Shard("tied", square.detach(), (4, 4)),
        dw.Shard("transposed", square.T, (4, 4)),
        dw.Shard("bits", square.view(torch.int16), (4, 4)),
    ]
    held = HeldShards(shards)
    view = ModelView({name: pieces.mark for name, pieces in held.tensors.items()})
    assert view.schema.ties == {"tied": "w"}
    assert {tensor.name: tensor.dtype for tensor in view.schema.tensors} == {
        "w": "BF16",
        "transposed": "BF16",
        "bits": "I16",
    }


def test_what_the_optimizer_notes_of_its_shards_is_what_a_snapshot_finds(two: Trained) -> None:
    assert_noted(two, "fsdp", "ddp")


def assert_noted(trained: Trained, *names: str) -> None:
    for name in names:
        noted, compared = (trained.manifests(f"adamw-{name}{end}") for end in ("", "-snapshot"))
        assert [m.digest for m in noted] == [m.digest for m in compared], name
        known = [number for number, m in enumerate(noted) if m.links[0].kind == "delta"]
        assert [noted[number].changed for number in known] == [compared[number].changed for number in known], name
        # after something else wrote to the weights, it is not known what
        other = [a.links[0].kind != b.links[0].kind for a, b in zip(noted, compared, strict=True)]
        assert known, name
        assert sum(other) <= (name == "fsdp"), name
        assert all(m.changed > 0 for m in noted[: len(noted) - (name == "fsdp")]), name
        assert_in_order(Run.open(str(trained.folder / f"adamw-{name}")))
    assert len(trained.manifests("adamw-fsdp")) > len(trained.manifests("adamw-ddp"))
    for report in trained.reports:
        assert report["fused"][0] == "SchemaMismatch"


def test_two_answers_are_compared_on_all_ranks(two: Trained) -> None:
    manifests = two.manifests("contradicted")
    assert [m.digest for m in manifests] == [m.digest for m in two.manifests("contradicted-alone")]
    assert_in_order(Run.open(str(two.folder / "contradicted")))
    for report in two.reports:
        assert report["contradicted"][0] == "DigestMismatch"
        assert "the next version will be an anchor" in report["contradicted"][1]
        assert (report["kinds 3"], report["kinds 4"]) == (["anchor"], ["delta"])


def test_a_rank_that_is_interrupted_makes_no_wrong_version(two: Trained) -> None:
    """The everyday part: where what was captured moves. No message is sent there, so training goes on."""
    for report in two.reports:
        assert set(report["interrupted-False-0"]) == {"went on"}


@pytest.mark.slow
def test_a_rank_that_is_interrupted_anywhere_makes_no_wrong_version(tmp_path: Path) -> None:
    trained = run_ranks([], tmp_path, "interrupted_everywhere", 2)
    for report in trained.reports:
        assert report["interrupted-False-0"]["went on"] > 100
        # while the run is opened, or the scales of a view are agreed on, ranks wait for each other
        assert report["interrupted-True-0"]["lost"] > 50
        assert report["interrupted-False-1"]["lost"] > 20


@pytest.mark.slow
def test_a_rank_that_is_interrupted_while_it_hands_in_shards_makes_no_wrong_version(tmp_path: Path) -> None:
    trained = run_ranks([], tmp_path, "interrupted_shards", 2)
    for report in trained.reports:
        assert report["interrupted-shards-False"]["went on"] > 50
        assert report["interrupted-shards-True"]["lost"] > 50


def test_ranks_that_publish_unequally_often_are_told_so(two: Trained) -> None:
    for report in two.reports:
        for name, counts in (
            ("early", "rank 0 2, rank 1 1 and closed"),
            ("late", "rank 0 1 and closed, rank 1 2"),
            ("merged", "rank 0 3, rank 1 2 and closed"),
        ):
            kind, message = report[f"unequal {name}"]
            assert kind == "OutOfStep"
            assert counts in message
    for name in ("early", "late", "merged", "alive"):
        assert Run.open(str(two.folder / f"unequal-{name}")).newest() == 0
    assert two.reports[0]["unequal alive"][0] == "ArithmeticError", "and not what closing ran into"


def test_a_rank_killed_in_the_middle_of_a_publish_leaves_the_run_at_the_version_before(two: Trained) -> None:
    survivor, killed = two.reports
    assert survivor["killed"][0] == survivor["after"][0] == "RankLost"
    assert "killed" not in killed
    run = Run.open(str(two.folder / "killed"))
    assert run.newest() == 1
    assert_in_order(run)


@pytest.mark.slow
def test_a_run_goes_on_after_a_rank_was_killed(tmp_path: Path) -> None:
    """torchrun starts all ranks again, and they take the run up where it stands."""
    train(tmp_path, "killed", 4, dies=3, restarts=1)
    run = Run.open(str(tmp_path / "killed"))
    assert run.newest() == 2
    assert_in_order(run)


@pytest.mark.slow
def test_four_ranks(tmp_path: Path) -> None:
    four = train(tmp_path, "fsdp,offload,ddp,upload_fails,out_of_step,resume,adamw", 4)
    assert_noted(four, "fsdp", "ddp", "offload", "grid")
    for name in ("fsdp", "offload"):
        assert_each_wrote_its_share(four, name, assert_same_run(four, name))
    for name in ("ddp", "fails"):
        assert_same_run(four, name)
    test_ranks_that_are_out_of_step_merge_the_same_publishes(four)
    test_a_restarted_trainer_takes_the_run_up_where_it_stands(four)


@pytest.mark.slow
def test_two_dimensional_meshes_and_adapters(tmp_path: Path) -> None:
    four = train(tmp_path, "grid,placed,lora", 4)
    assert "_StridedShard" in four.reports[0]["placements"]["up.weight"]
    assert_same_run(four, "grid")
    for name, wire in (("placed", None), ("lora-adapter", torch.bfloat16), ("lora-merged", torch.bfloat16)):
        run = Run.open(str(tmp_path / name))
        assert_in_order(run)
        for version in range(3):
            state = checkout(run, version)
            expected = torch.load(tmp_path / f"{name}-{version}.pt")
            assert expected.keys() == {tensor.name for tensor in run.schema.tensors}
            for tensor, value in expected.items():
                assert np.array_equal(state.bits(tensor), torch_bits(value.to(wire))), (name, version, tensor)
    assert {"up.weight", "down.weight"} <= expected.keys(), "names of the base checkpoint"
    base = Run.open(str(tmp_path / "lora-adapter")).info.base
    assert base is not None
    assert base.digests[0] == four.reports[0]["base"], "as that of the model in one piece"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_shards_on_a_gpu(tmp_path: Path) -> None:
    two = train(tmp_path, "on_a_gpu", 2)
    for detector in ("device", "host", "default"):
        assert len(assert_same_run(two, f"gpu-{detector}")) == 5


def test_what_several_hold_is_shared_out_evenly_and_gaps_are_refused() -> None:
    tensors = [TensorSpec(f"t{i}", "BF16", (8, 4)) for i in range(6)]
    schema = Schema.build(tensors)
    everything = [whole(tensor) for tensor in tensors]
    assert [len(mine) for mine in share_out(tiles([everything] * 3, schema), 3)] == [2, 2, 2]
    halves = [Region(tensors[0], row, 4, 0, 4) for row in (0, 4)]
    cut = [[halves[0], *everything[1:]], [halves[1], *everything[1:]]]
    assert set().union(*share_out(tiles(cut, schema), 2)) == {*halves, *everything[1:]}
    for bad, missing in (([[halves[0]], [halves[0]]], 16), ([[]], 32)):
        with pytest.raises(SchemaMismatch, match=f"{missing} of the 32 elements of 't0'"):
            tiles(bad, Schema.build(tensors[:1]))


def test_parts_that_overlap_are_cut_along_each_others_edges() -> None:
    tensor = TensorSpec("t", "BF16", (8, 4))
    schema = Schema.build([tensor])
    top, left, right = Region(tensor, 0, 6, 0, 4), Region(tensor, 4, 4, 0, 2), Region(tensor, 4, 4, 2, 2)
    assert tiles([[top], [left, right]], schema) == {
        Region(tensor, 0, 4, 0, 4): [0],
        Region(tensor, 4, 2, 0, 2): [0, 1],
        Region(tensor, 4, 2, 2, 2): [0, 1],
        Region(tensor, 6, 2, 0, 2): [1],
        Region(tensor, 6, 2, 2, 2): [1],
    }


@pytest.fixture(scope="module")
def flat(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Trained]:
    """FSDP1 and shards that were handed in, of two ranks and of four. Four go on where two have ended, and of them the
    last one is killed."""
    two, four = (tmp_path_factory.mktemp(name) for name in ("flat-two", "flat-four"))
    results = {2: run_ranks([], two, "shards,bad_shards,fsdp1,fsdp1_ways,fsdp1_adamw", 2)}
    results[4] = run_ranks([], four, "shards,bad_shards,fsdp1/killed", 4, dies=3)
    on = run_ranks([], two, "fsdp1_goes_on", 4)
    return results | {24: on}


@pytest.mark.parametrize("size", [2, 4])
def test_shards_that_are_handed_in_are_published_as_they_lie(flat: dict[int, Trained], size: int) -> None:
    for name in ("shards", "shards-view"):
        assert_same_run(flat[size], name)
    schema = Run.open(str(flat[size].folder / "shards")).schema
    assert schema.ties == {"tied.weight": "rows.weight"}
    assert schema.by_name()["experts"].shape == (8, 6, 10)


@pytest.mark.parametrize("size", [2, 4])
def test_shards_that_do_not_fit_are_refused_on_all_ranks(flat: dict[int, Trained], size: int) -> None:
    last = size - 1
    words = {
        "gap": "12 of the 24 elements of 'w'",
        "shape": f"'w' is F32 [7, 4] on rank {last} and F32 [6, 4] on rank 0",
        "dtype": f"'w' is F64 [6, 4] on rank {last} and F32 [6, 4] on rank 0",
        "bits": f"and {last} hold the same part of 'w' with other bits",
        "twice": "hold",
        "other": "a list of shards has a str in it",
        "missing": "12 of the 24 elements of 'w'",
        "alone": "call init_process_group() before",
    }
    for report in flat[size].reports:
        for name, expected in words.items():
            kind, message = report[name]
            assert expected in message, name
            assert kind in ("SchemaMismatch", "UnsupportedTensor", "PublishFailed", "Misconfigured"), name
            assert "'w'" in message or name in ("other", "alone")
    kind, message = flat[size].reports[last]["later"]
    assert (kind, "'w'" in message) == ("SchemaMismatch", True)
    run = Run.open(str(flat[size].folder / "bad-shards"))
    assert run.manifest(1).digest == flat[size].reports[0]["bad-shards"]
    assert_in_order(run)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("original", [True, False])
def test_fsdp1_publishes_what_it_gathers(flat: dict[int, Trained], size: int, original: bool) -> None:
    """What one process alone would have published, what FSDP1's own full state dict is, and little of it."""
    name = f"fsdp1-{original}"
    if size == 4:
        assert_same_run(flat[4], name)
    manifests = assert_as_gathered(flat[size], f"{name}-gathered")
    assert_small(manifests, Run.open(str(flat[size].folder / name)).schema.elements)


@pytest.mark.parametrize("original", [True, False])
def test_a_run_of_fsdp1_goes_on_with_another_number_of_ranks(flat: dict[int, Trained], original: bool) -> None:
    name = f"fsdp1-{original}"
    assert [m.step for m in assert_as_gathered(flat[24], name, f"{name} on")] == [6, 7]


def test_fsdp1_in_every_way(flat: dict[int, Trained]) -> None:
    """Before the first step and between forward and backward, in mixed precision, with ranks that hold everything."""
    for name in ("plain", "mixed", "grad_op", "unsharded"):
        assert_as_gathered(flat[2], f"fsdp1-{name}")
    for report in flat[2].reports:
        assert "'0.weight' was not flattened row by row" in report["not by rows"][1]
        for name in ("fsdp1 alone", "inner True", "inner False", "leaf True", "leaf False"):
            kind, message = report[name]
            assert kind == "UnsupportedTensor"
            assert "FullyShardedDataParallel module" in message


def test_what_the_optimizer_notes_of_fsdp1_is_what_is_compared(flat: dict[int, Trained]) -> None:
    noted, compared = flat[2].manifests("fsdp1-adamw"), flat[2].manifests("fsdp1-compared")
    assert [m.digest for m in noted] == [m.digest for m in compared]
    assert_in_order(Run.open(str(flat[2].folder / "fsdp1-adamw")))


def test_all_ranks_are_told_which_one_died(flat: dict[int, Trained]) -> None:
    """Those too that wait for a rank that lives."""
    *survivors, killed = flat[4].reports
    for report in survivors:
        assert report["killed"][0] == report["after"][0] == "RankLost"
        assert "rank 3 of this trainer does not answer" in report["killed"][1]
    assert "killed" not in killed
    assert Run.open(str(flat[4].folder / "killed")).newest() == 1


def test_a_torch_that_keeps_fsdp1_in_another_way_is_named(tmp_path: Path) -> None:
    """Its names are private. This test fails first where torch has moved them."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    from deltawire.trainer import partitioned

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        model = FullyShardedDataParallel(torch.nn.Linear(3, 2), device_id=torch.device("cpu"), use_orig_params=True)
        assert {name: tuple(t.shape) for name, t in partitioned.held_by_name(model).items()} == {
            "weight": (2, 3),
            "bias": (2,),
        }
        with dw.Publisher(tmp_path / "run") as publisher:
            assert publisher.publish(model).result(60).version == 0
        peft = pytest.importorskip("peft")
        tuned = peft.get_peft_model(
            torch.nn.Sequential(torch.nn.Linear(3, 2)), peft.LoraConfig(r=1, target_modules=["0"])
        )
        tuned = FullyShardedDataParallel(tuned, device_id=torch.device("cpu"), use_orig_params=True)
        with (
            dw.Publisher(tmp_path / "other") as publisher,
            pytest.raises(UnsupportedTensor, match=r"Adapter is of a model sharded by FSDP1.*fully_shard"),
        ):
            publisher.publish(dw.adapter(tuned))
        for name in partitioned.NOTED:
            noted = getattr(model._handle.flat_param, name)
            delattr(model._handle.flat_param, name)
            with (
                dw.Publisher(tmp_path / "other") as publisher,
                pytest.raises(UnsupportedTensor, match=f"torch {re.escape(torch.__version__)} .* has no '{name}'"),
            ):
                publisher.publish(model)
            setattr(model._handle.flat_param, name, noted)
        assert not (tmp_path / "other" / "run.json").exists()
    finally:
        torch.distributed.destroy_process_group()


SHAPES = ((), (7,), (1, 5), (6, 1), (5, 7), (3, 4, 5), (2, 2, 3, 2))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["BF16", "I64"])
def test_a_flat_range_is_three_rectangles_at_most(shape: tuple[int, ...], dtype: str) -> None:
    spec = TensorSpec("t", dtype, shape)
    per = 2 if dtype == "I64" else 1
    elements = torch.arange(spec.elements)
    for start in range(spec.elements + 1):
        for stop in range(start, spec.elements + 1):
            parts = [*flat_regions(spec, range(start, stop))]
            assert len(parts) <= 3
            found = []
            for part in parts:
                cut = part.cut(elements[start:stop])
                positions = np.arange(part.region.units).reshape(part.region.rows, -1)[:, ::per] // per
                assert positions.shape == tuple(cut.shape)
                rows = elements.reshape(spec.rows, -1)[part.region.row :][: part.region.rows]
                here = rows[:, part.region.column // per :][:, : part.region.columns // per]
                assert torch.equal(cut, here)
                found.append(cut.reshape(-1))
            assert torch.equal(torch.cat([torch.empty(0, dtype=torch.int64), *found]), elements[start:stop])


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: dw.Shard("w", torch.zeros(3, 4), (6, 5), (slice(0, 3),)), r"'w' has \[3, 4\] .* there are \[3, 5\]"),
        (lambda: dw.Shard("w", torch.zeros(8), (6, 4), range(20, 28)), "'w' is range.20, 28. of 24 elements"),
        (lambda: dw.Shard("w", torch.zeros(8), (6, 4), range(0, 7)), "padding is not part of it"),
        (lambda: dw.Shard("w", torch.zeros(3, 4), (6, 4), (slice(0, 6, 2),)), "a slice.first, end. for each dimension"),
        (lambda: dw.Shard("w", torch.zeros(4), (6, 4), (2,)), "a slice.first, end. for each dimension"),
        (lambda: dw.Shard("w", np.zeros(4), (4,)), "'w' is a ndarray: pass a torch tensor"),
        (lambda: dw.Shard(3, torch.zeros(4), (4,)), "named by strings"),
    ],
)
def test_a_shard_that_is_none(make: Callable[[], object], words: str) -> None:
    with pytest.raises(SchemaError, match=words):
        make()


def test_names_are_tied_if_they_are_on_every_rank() -> None:
    def schema(*names: str, **ties: str) -> Schema:
        return Schema.build([TensorSpec(name, "BF16", (2,)) for name in names], ties)

    assert merge([schema("a", b="a"), schema("b", a="b"), schema("c")]) == schema("a", "c", b="a")
    assert merge([schema("a", b="a"), schema("a", "b")]) == schema("a", "b")
    assert merge([schema("a", b="a"), schema("b")]) == schema("a", "b")


def delta_of(manifest: Manifest) -> Link:
    return next(link for link in manifest.links if link.kind == "delta")


def weights_digest(state: State) -> Any:
    from deltawire.core import full

    return full.digest_of(state)
