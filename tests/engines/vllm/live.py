"""Against a real vLLM: `make test-vllm`. Not collected by the everyday run, whose environment has none.

Twenty versions are published while clients stream. After each one, /weight_checker of the live server is noted; when
all are out, every version is checked out and loaded afresh by vLLM's own loader (vllm_fresh.py), and the two must be
equal for all twenty. Greedy tokens are compared with a second server, started from the checkout of the last version.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from vllm_fresh import fresh_checksums
from vllm_live import Server, Streams, Trainer, make_model, serving

import deltawire as dw
from deltawire.core.errors import DeltawireError
from deltawire.engines.vllm.launch import write_version

VERSIONS = 20
BEARER = {"Authorization": "Bearer secret"}
PROMPTS = ([5, 9, 11], [7], [200, 3, 4, 5, 6, 8, 9, 10])


@pytest.fixture(scope="session", autouse=True)
def compiled() -> None:
    """Codecs are compiled before a server takes both cores; its workers then find them in the same cache."""
    rng = np.random.default_rng(0)
    old = {"w": rng.integers(0, 1 << 16, (512, 512), np.uint16, endpoint=False), "b": np.ones(64, np.uint16)}
    new = {name: bits + (rng.random(bits.shape) < 0.02).astype(np.uint16) for name, bits in old.items()}
    for encoding in ("context", "packed"):
        decoded = dw.decode(dw.encode(old, new, encoding), old)
        assert all(np.array_equal(decoded[name], new[name]) for name in new)


def checked_out(trainer: Trainer, version: int, folder: Path) -> Path:
    write_version(str(trainer.run), version, folder)
    return folder


def greedy(server: Server) -> list[list[int]]:
    return [server.greedy(prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("tp", (1, 2))
@pytest.mark.parametrize("kind", ("qwen3", "qwen3-tied", "llama"))
def test_twenty_versions_under_load(tmp_path: Path, kind: str, tp: int) -> None:
    model = make_model(tmp_path / "model", kind)
    # packed is decoded by position, context by tiles; anchors come in between
    trainer = Trainer(model, tmp_path / "run", encoding="context" if kind != "llama" else "packed", anchor_every=8)
    trainer.publish(0)
    seen: dict[int, dict[str, str]] = {}
    with serving(model, tmp_path / "log", tp=tp, run=trainer.run) as server:
        assert server.status()["guard"] == "patch"
        with Streams(server) as streams:
            for _ in range(VERSIONS):
                version = trainer.publish()
                assert server.until(version=version, lag=0)["state"] == "healthy"
                assert server.http.get("/weight_info").json()["weight_version"] == str(version)
                seen[version] = server.checksums()
        assert streams.failures == []
        tokens = greedy(server)
        status = server.status()
    trainer.close()
    assert status["syncs"] == VERSIONS
    assert status["failures"] == 0
    assert sorted(seen) == [*range(1, VERSIONS + 1)]

    spans = [span for completion in streams.completions for span in completion["spans"]]
    assert {span["version"] for span in spans} <= {*range(VERSIONS + 1)}
    assert any(len(completion["spans"]) > 1 for completion in streams.completions)
    for completion in streams.completions:
        # spans cover the completion without a gap
        edges = [(span["start"], span["end"]) for span in completion["spans"]]
        assert edges[0][0] == 0
        assert edges[-1][1] == len(completion["tokens"])
        assert all(a[1] == b[0] for a, b in pairwise(edges))

    folders = [checked_out(trainer, version, tmp_path / f"v{version}") for version in seen]
    for version, fresh in zip(seen, fresh_checksums(folders, tp), strict=True):
        assert seen[version] == fresh, f"version {version} is not what a fresh load gives"
    if (kind, tp) in (("qwen3", 1), ("llama", 2)):
        with serving(folders[-1], tmp_path / "fresh.log", tp=tp) as fresh_server:
            assert fresh_server.checksums() == seen[VERSIONS]
            assert greedy(fresh_server) == tokens


# ── faults, against one live server ──────────────────────────────────────────────────────────────────────────────────


class Scene:
    """A server at TP=2 that follows a run in a folder, and what tests need to hurt it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.faults = folder / "faults"
        self.faults.mkdir()
        self.model = make_model(folder / "model", "qwen3")
        self.trainer = Trainer(self.model, folder / "run", anchor_every=1000)
        self.trainer.publish(0)
        self.noted: dict[int, dict[str, str]] = {}
        self.server = self.start()

    def start(self) -> Server:
        return Server(
            self.model, self.folder / "log", tp=2, run=self.trainer.run, VLLM_TEST_FAULTS=str(self.faults),
            DELTAWIRE_TOKEN="secret", DELTAWIRE_HEARTBEAT="0",
        ).wait()  # fmt: skip

    @property
    def deltas(self) -> list[Path]:
        return sorted((self.trainer.run / "deltas").iterdir())

    def settle(self) -> int:
        version = self.trainer.publish()
        self.server.until(version=version, state="healthy")
        return version

    def note(self, version: int) -> dict[str, str]:
        """What the server holds, to be compared with a fresh load of that version when all is over."""
        assert self.server.status()["version"] == version
        found = self.noted.setdefault(version, self.server.checksums())
        assert self.server.checksums() == found
        return found

    def pin(self, version: int | None) -> None:
        self.server.http.post("/deltawire/pin", json={"version": version}, headers=BEARER).raise_for_status()


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    scene = Scene(tmp_path_factory.mktemp("faults"))
    yield scene
    scene.server.stop()
    scene.trainer.close()


def test_a_corrupt_delta_is_refused_and_outlived(scene: Scene) -> None:
    at = scene.settle()
    before, tokens = scene.note(at), greedy(scene.server)
    scene.pin(at)
    bad = scene.trainer.publish()
    path = scene.deltas[-1]
    good = path.read_bytes()
    path.write_bytes(good[:-40] + bytes(40))
    scene.pin(None)
    status = scene.server.until(state="degraded")
    assert status["version"] == at
    assert scene.server.checksums() == before
    assert greedy(scene.server) == tokens
    path.write_bytes(good)
    scene.server.until(version=bad, state="healthy")
    scene.note(bad)


def test_a_missing_base_leaves_the_old_version_serving(scene: Scene) -> None:
    at = scene.settle()
    before = scene.note(at)
    scene.pin(at)
    scene.trainer.publish()
    missing = scene.deltas[-1]
    newest = scene.trainer.publish()
    good = missing.read_bytes()
    missing.unlink()
    scene.pin(None)
    assert scene.server.until(state="degraded")["version"] == at
    assert scene.server.checksums() == before
    missing.write_bytes(good)
    scene.server.until(version=newest, state="healthy")


@pytest.mark.parametrize("rank", (0, 1))
def test_a_rank_that_fails_in_the_middle_of_the_scatter_takes_all_ranks_back(scene: Scene, rank: int) -> None:
    at = scene.settle()
    before = scene.note(at)
    scene.pin(at)
    version = scene.trainer.publish()
    (scene.faults / f"fail-{rank}").touch()
    with Streams(scene.server) as streams:
        answer = scene.server.http.post("/deltawire/sync", json={"version": version}, headers=BEARER)
        assert answer.status_code == 409
        assert f"rank {rank}" in answer.text
        assert "a fault that a test asked for" in answer.text
        assert scene.server.checksums() == before
        assert scene.server.status()["state"] == "degraded"
        assert scene.server.http.get("/weight_info").json()["weight_version"] == str(at)
        scene.pin(None)
        scene.server.until(version=version, state="healthy")
    assert streams.failures == []
    scene.note(version)


def test_a_bucket_that_is_down_for_half_a_minute(scene: Scene) -> None:
    at = scene.settle()
    away = scene.trainer.run.with_name("away")
    with Streams(scene.server, count=1) as streams:
        scene.trainer.run.rename(away)
        end = time.monotonic() + 30
        while time.monotonic() < end:
            assert scene.server.status()["version"] == at
            assert scene.server.http.get("/health").status_code == 200
            time.sleep(1)
        away.rename(scene.trainer.run)
        newest = scene.settle()
    assert streams.failures == []
    assert {span["version"] for c in streams.completions for span in c["spans"]} <= {at, newest}


def test_control_routes_need_the_token(scene: Scene) -> None:
    for route in ("/deltawire/sync", "/deltawire/pin", "/update_weights"):
        assert scene.server.http.post(route, json={}).status_code == 401
        assert scene.server.http.post(route, json={}, headers={"Authorization": "Bearer no"}).status_code == 401


def test_a_trainer_can_drive_and_roll_back(scene: Scene) -> None:
    at = scene.settle()
    body = {"update_info": {"run": str(scene.trainer.run), "version": at - 1}}
    scene.pin(at - 1)
    status = scene.server.http.post("/update_weights", json=body, headers=BEARER).raise_for_status().json()
    assert (status["version"], status["state"]) == (at - 1, "healthy")
    scene.note(at - 1)
    refused = scene.server.http.post("/update_weights", json={"run": "memory://other"}, headers=BEARER)
    assert refused.status_code == 409
    scene.pin(None)
    scene.server.until(version=at, state="healthy")


def test_killed_in_the_middle_of_an_apply(scene: Scene) -> None:
    at = scene.settle()
    (scene.faults / "stall-1").touch()
    version = scene.trainer.publish()
    end = time.monotonic() + 60
    while not (scene.faults / "stalled-1").exists():
        assert time.monotonic() < end
        time.sleep(0.05)
    # half written, and paused: the version it names is still the old one
    assert scene.server.status()["version"] == at
    scene.server.kill()
    scene.server = scene.start()
    scene.server.until(version=version, state="healthy")
    scene.note(version)


def test_a_delta_of_another_run_is_refused(scene: Scene, tmp_path: Path) -> None:
    at = scene.settle()
    before = scene.note(at)
    other = Trainer(scene.model, tmp_path / "other", anchor_every=1000)
    other.publish(0)
    other.publish()
    foreign = sorted((tmp_path / "other" / "deltas").iterdir())[-1].read_bytes()
    other.close()
    scene.pin(at)
    bad = scene.trainer.publish()
    path, manifest = scene.deltas[-1], scene.trainer.run / "versions" / f"{bad:06d}.json"
    good, said = path.read_bytes(), manifest.read_bytes()
    path.write_bytes(foreign)
    # the manifest's own hash is made to fit: the object itself has to give it away
    from blake3 import blake3

    content = json.loads(said)
    blob = content["links"][0]["objects"][0]
    blob |= {"size": len(foreign), "hash": blake3(foreign).hexdigest(length=16)}
    manifest.write_bytes(json.dumps(content).encode())
    answer = scene.server.http.post("/deltawire/sync", json={"version": bad}, headers=BEARER)
    assert answer.status_code == 409
    assert "ForeignObject" in answer.text
    assert scene.server.checksums() == before
    assert scene.server.status()["version"] == at
    path.write_bytes(good)
    manifest.write_bytes(said)


def test_every_state_on_the_way_was_that_of_a_fresh_load(scene: Scene) -> None:
    folders = [checked_out(scene.trainer, version, scene.folder / f"v{version}") for version in scene.noted]
    assert len(folders) > 5
    for version, fresh in zip(scene.noted, fresh_checksums(folders, 2), strict=True):
        assert scene.noted[version] == fresh, f"version {version} is not what a fresh load gives"


# ── layouts that cannot be patched ───────────────────────────────────────────────────────────────────────────────────


def test_experts_on_a_cpu_are_reloaded_or_refused_never_patched(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen3_moe")
    trainer = Trainer(model, tmp_path / "run")
    trainer.publish(0)
    with serving(model, tmp_path / "log", run=trainer.run) as server:
        assert server.status()["guard"].startswith("reload: ")
        assert server.status()["version"] == 0
        before = server.checksums()
        version = trainer.publish()
        end = time.monotonic() + 120
        while (status := server.status())["version"] == 0 and status["state"] != "paused":
            assert time.monotonic() < end
            time.sleep(0.1)
        if status["version"] == version:
            folder = checked_out(trainer, version, tmp_path / "fresh")
            assert server.checksums() == fresh_checksums([folder], 1)[0]
            assert server.checksums() != before
        else:
            assert "can follow no run" in status["reason"]
            assert server.http.get("/health").status_code == 503
    trainer.close()


def test_write_version_names_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(DeltawireError, match="no run at"):
        write_version(str(tmp_path / "nothing"), None, tmp_path / "place")
