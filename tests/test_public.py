"""What a tool does with a run, from public names alone: find it, read its records, its weights and what changed."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

import deltawire as dw
from deltawire.errors import BadURL, FolderError, SchemaMismatch, VersionNotFound
from support import history, same

VERSIONS = history(4, changes=5)


@pytest.fixture(params=["packed", "raw"])
def run(tmp_path: Path, request: pytest.FixtureRequest) -> dw.Run:
    address = str(tmp_path / "runs" / "chat")
    with dw.Publisher(address, encoding=request.param) as publisher:
        for weights in VERSIONS:
            publisher.publish(weights, wait=True)
    return dw.Run.open(address)


def weights_of(state: dw.State) -> dict[str, np.ndarray]:
    return {name: state.bits(name).view(array.dtype).reshape(array.shape) for name, array in VERSIONS[0].items()}


def test_versions_are_found_by_number_by_name_and_from_the_end(run: dw.Run) -> None:
    address = run.store.url
    assert run.tag(1, "best") is None
    assert dw.split_version(f"{address}@best") == (address, "best")
    for text, version in (("", 3), ("@2", 2), ("@v2", 2), ("@-2", 2), ("@latest", 3), ("@best", 1)):
        opened, found = dw.Run.at(address + text)
        assert (opened.info.run, found) == (run.info.run, version)
    assert run.resolve("9", early=True) == 9
    with pytest.raises(VersionNotFound, match="versions 0 to 3"):
        run.resolve("9")
    with pytest.raises(BadURL, match="leave out @best"):
        dw.Run.open(f"{address}@best")
    before = run.tag(2, "best")
    assert before is not None
    assert before.version == 1
    assert {name: tag.version for name, tag in run.tags().items()} == {"best": 2}
    run.untag("best")
    assert run.tags() == {}
    with pytest.raises(ValueError, match="a tag is"):
        run.tag(2, "41")


def test_what_changed_is_told_per_tensor_and_in_ulps(run: dw.Run) -> None:
    found = dict(dw.tensor_changes(run, [0, 1, 9]))
    assert found[0] == []
    assert isinstance(found[9], VersionNotFound)
    parts = found[1]
    assert isinstance(parts, list)
    changed = sum(part.changed or 0 for part in parts)
    old, new = dw.checkout(run, 0), dw.checkout(run, 1)
    differences = [dw.difference(tensor, old, new) for tensor in run.schema.tensors]
    # dtypes of eight bytes are two units, and units are what a delta counts
    assert run.manifest(1).changed == sum(each.changed for each in differences) <= changed
    cost, steps = dw.step_sizes(run, 1)
    assert steps is not None
    assert sum(up + down for _, up, down in steps.rows()) == changed
    assert dw.step_sizes(run, 1, most=cost - 1) == (cost, None)
    assert dw.step_sizes(run, 0) == (0, None)
    stored = run.manifest(1).main.encoding == "packed"
    assert (dw.step_sizes(run, 1, stored=True)[1] is not None) == stored
    ((_, everything),) = dw.tensor_changes(run, [0], anchors=True)
    assert isinstance(everything, list)
    assert {part.name for part in everything} == {tensor.name for tensor in run.schema.tensors}


def test_weights_go_to_folders_and_come_from_them(run: dw.Run, tmp_path: Path) -> None:
    phases = set[str]()
    dw.checkout_folder(tmp_path / "one", run, 1, progress=lambda phase, n, total: phases.add(phase))
    assert phases == {"fetch", "write"}
    with pytest.raises(FolderError):
        dw.checkout_folder(tmp_path / "one", run, 2)
    assert str(dw.digest_of(dw.Checkpoint(tmp_path / "one"))) == run.manifest(1).digest
    dw.checkout_folder(tmp_path / "one", run, 2, replace=True)
    state = dw.State(run.schema)
    state.load(run.weights_in(tmp_path / "one"))
    assert same(weights_of(state), VERSIONS[2])
    with dw.CurrentFolder(tmp_path / "current") as current:
        current.write(run, 3, dw.checkout(run, 3, state))
        assert current.holds(3)
    (tmp_path / "other").mkdir()
    other = dw.Run.create(str(tmp_path / "other run"), dw.ModelView({"x": np.zeros(3, np.float32)}).schema)
    dw.State(other.schema).write(tmp_path / "other")
    with pytest.raises(SchemaMismatch, match="needs an address of its own"):
        run.weights_in(tmp_path / "other")


def test_a_run_is_listed_verified_pruned_and_watched(run: dw.Run, tmp_path: Path) -> None:
    (listed,) = dw.runs(tmp_path, stored=True)
    assert (listed.newest, listed.bytes, listed.error) == (3, run.schema.nbytes, "")
    assert dw.verify(run).ok
    plan = dw.prune(run, dw.Retention(last=1, grace=0.0), apply=False)
    assert plan.kept[3] == "the newest"
    assert run.pruned().versions == ()
    with dw.Watcher(run.store.url) as watcher:
        assert watcher.look(run, None) == 3
    assert dw.wait_for_run(run.store.url).newest() == 3
    said = dw.Heartbeat(run.info.run, "gpu-1", 3, 3, True, time.time())
    run.store.put("replicas/gpu-1.json", msgspec.json.encode(said))
    run.store.put("replicas/gpu-2.json", msgspec.json.encode(said))
    run.store.put("replicas/gpu-3.json", b"{")
    mine, copied, broken = (beat for _, beat in run.heartbeats())
    assert (mine, copied) == (said, None), "a heartbeat under the name of another replica is none"
    assert isinstance(broken, dw.DeltawireError)
