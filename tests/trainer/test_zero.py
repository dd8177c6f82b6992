"""A real DeepSpeed trains, and publishes without gathering: ZeRO 0 to 3. Its environment is made once."""

from __future__ import annotations

from pathlib import Path

import pytest
from sharding import LIMIT, Trained, assert_as_gathered, assert_small, run_ranks

from deltawire.bucket.run import Run
from environments import deepspeed

pytestmark = pytest.mark.timeout(4 * LIMIT)


def zero(folder: Path, scenarios: str, size: int, dies: int | None = None) -> Trained:
    return run_ranks([], folder, scenarios, size, dies, python=str(deepspeed()), program="zero_rank.py")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return zero(tmp_path_factory.mktemp("zero"), "zero3,zero_less,refused/killed", 2, dies=1)


@pytest.mark.parametrize("name", ["zero3-bf16", "zero3-fp32", "zero3-offload", "zero0", "zero1", "zero2"])
def test_every_version_is_what_deepspeed_gathers(two: Trained, name: str) -> None:
    manifests = assert_as_gathered(two, name)
    assert_small(manifests, Run.open(str(two.folder / name)).schema.elements)


def test_tied_weights_are_published_once(two: Trained) -> None:
    assert Run.open(str(two.folder / "zero3-bf16")).schema.ties == {"head.weight": "embed.weight"}


def test_slices_are_refused_where_one_process_would_publish_them(two: Trained) -> None:
    for report in two.reports:
        for name in ("alone", "state dict"):
            assert report[name][0] == "UnsupportedTensor"
            assert "publish the engine or its module on all ranks" in report[name][1]


def test_a_rank_that_dies_between_capture_and_commit_is_named(two: Trained) -> None:
    kind, message = two.reports[0]["killed"]
    assert (kind, "rank 1 of this trainer does not answer" in message) == ("RankLost", True)
    assert Run.open(str(two.folder / "killed")).newest() == 1


def test_a_run_goes_on_with_another_number_of_ranks(two: Trained) -> None:
    four = zero(two.folder, "goes_on", 4)
    assert [m.step for m in assert_as_gathered(four, "zero3-bf16", "zero3-bf16 on")] == [5, 6]


@pytest.mark.slow
def test_four_ranks_and_experts(tmp_path: Path) -> None:
    """A norm of three elements: one rank of four has none of it."""
    four = zero(tmp_path, "zero3,pretrained", 4)
    for name in ("zero3-bf16", "zero3-fp32", "zero3-offload", "zero3-experts"):
        assert_as_gathered(four, name)
    run = Run.open(str(tmp_path / "zero3-experts"))
    assert "model.layers.1.mlp.experts.3.gate_proj.weight" in run.schema.by_name()
    assert "config.json" in {file.name for file in run.manifest(0).files}
