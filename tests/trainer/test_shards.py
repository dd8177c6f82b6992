"""Several processes publish one model together: FSDP2, DDP, tensor parallelism, over gloo. Readers must not notice."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from deltawire.bucket.replay import checkout
from deltawire.bucket.run import Run
from deltawire.bucket.verify import verify
from deltawire.core.change import Region, whole
from deltawire.core.errors import SchemaMismatch
from deltawire.core.manifest import Link, Manifest
from deltawire.core.schema import Schema, TensorSpec
from deltawire.core.state import State
from deltawire.models import torch_bits
from deltawire.replica import Replica
from deltawire.trainer.shards import share_out
from servers import run_to_end

LIMIT = 240.0

pytestmark = pytest.mark.timeout(2 * LIMIT)


@dataclass(frozen=True)
class Trained:
    """What is left of a sharded training."""

    folder: Path
    size: int
    reports: list[dict[str, Any]]
    """What each rank wrote down. A rank that was killed wrote nothing of that process group."""

    def manifests(self, name: str) -> list[Manifest]:
        run = Run.open(str(self.folder / name))
        return [run.manifest(version) for version in run.listed()]


def train(folder: Path, scenarios: str, size: int, dies: int | None = None, restarts: int = 0) -> Trained:
    """By torchrun, as people do it."""
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}", f"--max-restarts={restarts}"]
    return run_ranks(command, folder, scenarios, size, dies, restarts)


def run_ranks(
    launcher: list[str], folder: Path, scenarios: str, size: int, dies: int | None = None, restarts: int = 0
) -> Trained:
    command = [sys.executable, *launcher, str(Path(__file__).parent / "sharded_rank.py"), scenarios, str(folder)]
    if not launcher:
        command.append(str(size))
    # gloo else asks for the address of this host by its name, which not every machine knows
    settings = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "GLOO_SOCKET_IFNAME": "lo"}
    settings["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.getenv("PYTHONPATH")])])
    if scenarios != "on_a_gpu":
        # FSDP else takes a GPU that it finds, which gloo and forked processes cannot use
        settings["CUDA_VISIBLE_DEVICES"] = ""
    code = run_to_end(command, folder / "log", LIMIT, **settings)
    gone = dies is not None and not restarts
    assert (code != 0) == gone, (folder / "log").read_text()[-8000:]
    reports: list[dict[str, Any]] = [{} for _ in range(size)]
    for rank, report in enumerate(reports):
        for names in scenarios.split("/"):
            path = folder / f"{names}-{rank}.json"
            if path.exists() or not (gone and rank == dies):
                report |= json.loads(path.read_text())
    return Trained(folder, size, reports)


def assert_same_run(trained: Trained, name: str) -> list[Manifest]:
    """Version by version, the bits that a process alone published; and the run is in order."""
    ours, alone = trained.manifests(name), trained.manifests(f"{name}-alone")
    assert [(m.version, m.digest, m.changed, m.step) for m in ours] == [
        (m.version, m.digest, m.changed, m.step) for m in alone
    ]
    run, other = Run.open(str(trained.folder / name)), Run.open(str(trained.folder / f"{name}-alone"))
    assert run.schema == other.schema
    state, expected = checkout(run, ours[-1].version), checkout(other, ours[-1].version)
    for tensor in run.schema.tensors:
        assert np.array_equal(state.bits(tensor.name), expected.bits(tensor.name)), tensor.name
    assert_in_order(run)
    return ours


def assert_in_order(run: Run) -> None:
    result = verify(run)
    assert result.ok, result.failure
    assert not result.not_proven


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
    scenarios = "fsdp,ddp,view,upload_fails,out_of_step,resume,refused,adamw,contradicted,interrupted,unequal/killed"
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


def test_what_the_optimizer_notes_of_its_shards_is_what_a_snapshot_finds(two: Trained) -> None:
    assert_noted(two, "fsdp", "ddp")


def assert_noted(trained: Trained, *names: str) -> None:
    for name in names:
        noted, compared = (trained.manifests(f"adamw-{name}{end}") for end in ("", "-snapshot"))
        assert [m.digest for m in noted] == [m.digest for m in compared], name
        # after something else wrote to the weights, it is not known what
        known = [number for number, m in enumerate(noted) if m.links[0].kind == "delta"]
        assert [noted[number].changed for number in known] == [compared[number].changed for number in known], name
        assert len(known) >= len(noted) - (1 + (name == "fsdp")), name
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
    assert [len(mine) for mine in share_out([everything] * 3, schema)] == [2, 2, 2]
    halves = [Region(tensors[0], row, 4, 0, 4) for row in (0, 4)]
    cut = [[halves[0], *everything[1:]], [halves[1], *everything[1:]]]
    assert set().union(*share_out(cut, schema)) == {*halves, *everything[1:]}
    for bad in ([[halves[0]], [halves[0]]], [[halves[0]], [everything[0]]], [[]]):
        with pytest.raises(SchemaMismatch):
            share_out(bad, Schema.build(tensors[:1]))


def delta_of(manifest: Manifest) -> Link:
    return next(link for link in manifest.links if link.kind == "delta")


def weights_digest(state: State) -> Any:
    from deltawire.core import full

    return full.digest_of(state)
