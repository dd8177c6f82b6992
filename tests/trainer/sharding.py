"""Starts the ranks of a sharded training, and looks at the runs that they leave."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deltawire.bucket.replay import checkout
from deltawire.bucket.run import Run
from deltawire.bucket.verify import verify
from deltawire.core.full import digest_of
from deltawire.core.manifest import Manifest
from deltawire.core.state import State
from deltawire.replica import Replica
from servers import run_to_end

LIMIT = 240.0


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
    launcher: list[str],
    folder: Path,
    scenarios: str,
    size: int,
    dies: int | None = None,
    restarts: int = 0,
    python: str = sys.executable,
    program: str = "sharded_rank.py",
) -> Trained:
    command = [python, *launcher, str(Path(__file__).parent / program), scenarios, str(folder)]
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


def assert_as_gathered(trained: Trained, name: str, note: str = "") -> list[Manifest]:
    """Version by version, a replica has the bits that the trainer's own framework gathered; and deltas are small."""
    run = Run.open(str(trained.folder / name))
    gathered = trained.reports[0][f"{note or name} digests"]
    for report in trained.reports:
        assert report[f"{note or name} digests"] == gathered
    versions = run.listed()[-len(gathered) :]
    weights, replica = State(run.schema), Replica(str(trained.folder / name), heartbeat=0)
    manifests = [run.manifest(version) for version in versions]
    for manifest, digest in zip(manifests, gathered, strict=True):
        replica.sync(weights, manifest.version)
        assert str(digest_of(weights)) == manifest.digest == digest, (name, manifest.version)
    assert_in_order(run)
    return manifests


def assert_small(manifests: list[Manifest], elements: int) -> None:
    """Deltas of training steps at a small learning rate, in a model so small that headers are most of them."""
    for manifest in manifests[1:]:
        (delta,) = (link for link in manifest.links if link.kind == "delta")
        assert 0 < manifest.changed < elements / 5
        assert delta.bytes < 2 * elements / 2
