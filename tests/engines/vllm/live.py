"""Against a real vLLM: `make test-vllm`. Not collected by the everyday run, whose environment has none.

Twenty versions are published while clients stream. After each one, /weight_checker of the live server is noted; when
all are out, every version is checked out and loaded afresh by vLLM's own loader (vllm_fresh.py), and the two must be
equal for all twenty. Greedy tokens are compared with a second server that was started from the checkout of the last
version and is then driven to an older one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm_fresh import fresh_checksums
from vllm_live import Server, Streams, Trainer, make_model, ranks, serving

import deltawire as dw
from deltawire.bucket.run import Run
from deltawire.engines.doctor import examine
from deltawire.engines.vllm.launch import write_version

VERSIONS = 20
HALF_WAY = VERSIONS // 2
RANKS = ranks()
CELLS = [
    *(("qwen3_moe", tp) for tp in (1, 2) if tp <= RANKS),
    # a rank holds some experts whole, and not a part of each
    *([("qwen3_moe-ep", 2)] if RANKS > 1 else []),
    *((kind, tp) for kind in ("llama", "qwen3-tied", "qwen3") for tp in (1, 2) if tp <= RANKS),
]
LAST = CELLS[-1]
"""This one stays, for the faults."""
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


def greedy(server: Server) -> list[list[int]]:
    return [server.greedy(prompt) for prompt in PROMPTS]


class Scene:
    """A server that follows a run in a folder, and what tests need to look at it and to hurt it."""

    def __init__(self, folder: Path, kind: str, tp: int) -> None:
        self.folder, self.tp = folder, tp
        self.flags = ["--enable-expert-parallel"] if kind.endswith("-ep") else []
        self.faults = folder / "faults"
        self.faults.mkdir(parents=True)
        self.model = make_model(folder / "model", kind)
        # packed is decoded by position, context by tiles; anchors where no fault below is got around by one
        encoding = "packed" if kind == "llama" else "context"
        self.trainer = Trainer(self.model, folder / "run", encoding=encoding, anchor_every=15)
        self.trainer.publish(0)
        self.noted: dict[int, dict[str, str]] = {}
        # version → checksums of the live server
        self.tokens: dict[int, list[list[int]]] = {}
        # version → what it said to the prompts
        self.streams: list[Streams] = []
        self.server = self.start()

    def start(self, **more: str) -> Server:
        return Server(
            self.model, self.folder / "log", tp=self.tp, flags=self.flags, run=self.trainer.run,
            VLLM_TEST_FAULTS=str(self.faults), DELTAWIRE_TOKEN="secret", DELTAWIRE_HEARTBEAT="0", **more,
        ).wait()  # fmt: skip

    def stop(self) -> None:
        self.server.stop()
        self.trainer.close()

    @property
    def deltas(self) -> list[Path]:
        return sorted((self.trainer.run / "deltas").iterdir())

    def settle(self, **options: bool) -> int:
        version = self.trainer.publish(**options)
        self.server.until(version=version, state="healthy")
        return version

    def note(self, version: int) -> dict[str, str]:
        """What the server holds, to be compared with a fresh load of that version when all is over."""
        assert self.server.status()["version"] == version
        assert self.server.http.get("/weight_info").json()["weight_version"] == str(version)
        found = self.noted.setdefault(version, self.server.checksums())
        assert self.server.checksums() == found
        return found

    def pin(self, version: int | None) -> None:
        self.server.http.post("/deltawire/pin", json={"version": version}, headers=BEARER).raise_for_status()

    def checkout(self, version: int) -> Path:
        folder = self.folder / f"v{version}"
        write_version(str(self.trainer.run), version, folder)
        return folder

    def twenty_versions(self) -> None:
        for last in (HALF_WAY, VERSIONS):
            with Streams(self.server) as streams:
                while self.server.status()["version"] < last:
                    version = self.settle()
                    self.noted[version] = self.server.checksums()
            self.streams.append(streams)
            # by itself: what else is in a batch may move the last bits of logits
            self.tokens[last] = greedy(self.server)

    def all_are_fresh_loads(self) -> None:
        """Whatever was noted is what a fresh load of that version gives."""
        folders = [self.checkout(version) for version in self.noted]
        for version, fresh in zip(self.noted, fresh_checksums(folders, self.tp, self.flags), strict=True):
            assert self.noted[version] == fresh, f"version {version} is not what a fresh load gives"


class Scenes:
    """One of each, made when it is asked for. A server takes half a minute to start, most of it on one core: the next
    one is started beside what is left to do with this one."""

    def __init__(self, factory: pytest.TempPathFactory, wanted: Sequence[tuple[str, int]]) -> None:
        self._factory, self._wanted = factory, wanted
        self._made: dict[tuple[str, int], Future[Scene]] = {}
        self._beside = ThreadPoolExecutor(1)

    def __call__(self, kind: str, tp: int) -> Scene:
        """After its twenty versions."""
        self._start(kind, tp)
        scene = self._made[kind, tp].result()
        if not scene.tokens:
            scene.twenty_versions()
        return scene

    def start_after(self, kind: str, tp: int) -> None:
        for following in self._wanted[self._wanted.index((kind, tp)) + 1 :][:1]:
            self._start(*following)

    def _start(self, kind: str, tp: int) -> None:
        if (kind, tp) not in self._made:
            folder = self._factory.mktemp(f"{kind}-tp{tp}") / "scene"
            self._made[kind, tp] = self._beside.submit(Scene, folder, kind, tp)

    def stop(self) -> None:
        self._beside.shutdown()
        for one in self._made.values():
            if one.exception() is None:
                one.result().stop()


@pytest.fixture(scope="module")
def scenes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scenes]:
    chosen = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    made = Scenes(tmp_path_factory, [(at["kind"], at["tp"]) for at in chosen if at.keys() >= {"kind", "tp"}])
    yield made
    made.stop()


@pytest.fixture
def scene(scenes: Scenes) -> Scene:
    """The server that the faults below are aimed at."""
    return scenes(*LAST)


@pytest.mark.parametrize("kind, tp", CELLS)
def test_twenty_versions_under_load(scenes: Scenes, kind: str, tp: int) -> None:
    scene = scenes(kind, tp)
    status = scene.server.status()
    assert (status["guard"], status["syncs"], status["failures"]) == ("patch", VERSIONS, 0)
    assert sorted(scene.noted) == [*range(1, VERSIONS + 1)]
    assert [streams.failures for streams in scene.streams] == [[], []]
    if (kind, tp) != LAST:
        # faults come later to that one
        scene.server.stop()
    scenes.start_after(kind, tp)

    completions = [completion for streams in scene.streams for completion in streams.completions]
    assert {span["version"] for c in completions for span in c["spans"]} <= {*range(VERSIONS + 1)}
    assert any(len(completion["spans"]) > 1 for completion in completions)
    for completion in completions:
        # spans cover the completion without a gap
        edges = [(span["start"], span["end"]) for span in completion["spans"]]
        assert edges[0][0] == 0
        assert edges[-1][1] == len(completion["tokens"])
        assert all(a[1] == b[0] for a, b in pairwise(edges))

    with ThreadPoolExecutor(1) as beside:
        equal = beside.submit(scene.all_are_fresh_loads)
        with serving(scene.checkout(VERSIONS), scene.folder / "fresh.log", tp=tp, flags=scene.flags) as fresh:
            assert fresh.status()["state"] == "idle"
            assert fresh.checksums() == scene.noted[VERSIONS]
            assert greedy(fresh) == scene.tokens[VERSIONS]
            # runs that are not there, or not of this model, are refused and forgotten
            other = scene.folder / "other"
            with dw.Publisher(other) as publisher:
                publisher.publish({f"base.{name}": bits for name, bits in scene.trainer.weights.items()}).result(600)
            for run, refusal in ((scene.folder / "rum", "no run at"), (other, "only the run has 'base.")):
                assert refusal in fresh.http.post("/update_weights", json={"run": str(run)}).text
                assert fresh.status()["state"] == "idle"
            assert fresh.checksums() == scene.noted[VERSIONS]
            # a trainer takes it to another version
            body = {"update_info": {"run": str(scene.trainer.run), "version": HALF_WAY}}
            status = fresh.http.post("/update_weights", json=body).raise_for_status().json()
            assert (status["version"], status["state"], status["guard"]) == (HALF_WAY, "healthy", "patch")
            assert fresh.checksums() == scene.noted[HALF_WAY]
            assert greedy(fresh) == scene.tokens[HALF_WAY]
            assert fresh.http.post("/update_weights", json={"run": "memory://other"}).status_code == 409
            assert {finding.verdict for finding in examine(str(fresh.http.base_url)).findings} <= {"ok", "warning"}
        equal.result()


def test_from_nothing_but_the_run_without_dev_mode(scenes: Scenes) -> None:
    """`deltawire serve --engine vllm RUN`: a fresh load of the newest version; then back, staying there, and on."""
    scene = scenes("qwen3", 1)
    with serving(None, scene.folder / "serve.log", run=scene.trainer.run, VLLM_SERVER_DEV_MODE="0") as server:
        assert server.http.get("/weight_info").status_code == 404
        status = server.status()
        assert (status["version"], status["state"], status["guard"]) == (VERSIONS, "healthy", "patch")
        assert server.http.get("/v1/models").json()["data"][0]["id"] == scene.trainer.run.name == status["model"]
        assert server.http.get("/health").json() == {"state": "healthy"}
        assert {f.verdict for f in examine(str(server.http.base_url), run=str(scene.trainer.run)).findings} == {"ok"}
        assert f"serving v{VERSIONS}" not in server.log.read_text()  # it was there already
        assert greedy(server) == scene.tokens[VERSIONS]
        server.http.post("/deltawire/pin", json={"version": HALF_WAY}).raise_for_status()
        newest = scene.trainer.publish()
        assert greedy(server) == scene.tokens[HALF_WAY]
        answer = server.complete([5, 9, 11])
        assert answer.headers["deltawire-version"] == str(HALF_WAY)
        assert answer.json()["choices"][0]["weight_versions"] == [{"version": HALF_WAY, "start": 0, "end": 24}]
        server.http.post("/deltawire/pin", json={"version": None}).raise_for_status()
        server.until(version=newest, state="healthy")
        assert server.complete([5, 9, 11]).headers["deltawire-version"] == str(newest)
        assert f"deltawire_version {newest}.0" in server.http.get("/metrics").text


def test_a_server_without_the_plugin_does_not_start(tmp_path: Path) -> None:
    """Without its name in VLLM_PLUGINS, vLLM would serve the weights it started with for ever, and look healthy."""
    model = make_model(tmp_path / "model", "llama")
    server = Server(model, tmp_path / "log", run=tmp_path / "run", VLLM_PLUGINS=None)
    try:
        said = server.ended()
    finally:
        server.kill()
    assert "DELTAWIRE_RUN is set, but nothing here follows it: start the server with VLLM_PLUGINS=deltawire" in said
    assert "Misconfigured: the weight-transfer back end is deltawire" in said


# ── faults, against one live server ──────────────────────────────────────────────────────────────────────────────────


def test_a_mistyped_version_is_refused_and_changes_nothing(scene: Scene) -> None:
    at = scene.settle()
    before = {k: v for k, v in scene.server.status().items() if k in ("version", "newest", "pin", "state", "failures")}
    for route in ("pin", "sync"):
        answer = scene.server.http.post(f"/deltawire/{route}", json={"version": 7777}, headers=BEARER)
        assert answer.status_code == 404
        assert "7777" in answer.text
        assert scene.server.status().items() >= before.items()
    scene.pin(at)
    assert scene.server.http.post("/deltawire/pin", json={"version": 7777}, headers=BEARER).status_code == 404
    assert scene.server.status()["pin"] == at
    scene.pin(None)
    scene.server.until(version=scene.trainer.publish(), state="healthy")
    assert "version 7777" in scene.server.log.read_text()


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


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_rank_that_fails_in_the_middle_of_the_scatter_takes_all_ranks_back(scene: Scene, rank: int) -> None:
    at = scene.settle()
    before = scene.note(at)
    scene.pin(at)
    version = scene.trainer.publish()
    (scene.faults / f"fail-{rank}").touch()
    failures = scene.server.status()["failures"]
    with Streams(scene.server) as streams:
        answer = scene.server.http.post("/deltawire/sync", json={"version": version}, headers=BEARER)
        assert answer.status_code == 409
        assert f"rank {rank}" in answer.text
        assert "a fault that a test asked for" in answer.text
        assert scene.server.checksums() == before
        assert scene.server.status()["failures"] == failures + 1
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
    assert scene.server.http.get("/deltawire/digest").status_code == 401


@pytest.mark.parametrize("stream", [False, True])
def test_requests_get_the_versions_they_accept(scene: Scene, stream: bool) -> None:
    def ask(kind: str, version: int, tokens: int = 8) -> tuple[int, str]:
        body = {"model": scene.server.name, "prompt": [5, 9, 11], "max_tokens": tokens, "ignore_eos": True}
        bound = {f"deltawire-{kind}-version": str(version)}
        answer = scene.server.http.post("/v1/completions", json={**body, "stream": stream}, headers=bound, timeout=120)
        return answer.status_code, answer.text

    version = scene.settle()
    with ThreadPoolExecutor() as pool:
        later = pool.submit(ask, "min", version + 1)
        assert scene.trainer.publish() == version + 1
        status, text = later.result(120)
        assert (status, f'"version":{version + 1},' in text) == (200, True)
        assert f'"version":{version},' not in text
        status, text = ask("exact", version)
        assert (status, json.loads(text)["error"]["version"]) == (409, version + 1)
        # whatever a sync does meanwhile: tokens of another version never pass for an answer
        long = pool.submit(ask, "exact", version + 1, 200)
        scene.trainer.publish()
        status, text = long.result(120)
    if f'"version":{version + 2},' in text or status != 200:
        assert '"type":"version_error"' in text.replace(" ", "")
        assert '"weight_versions"' not in text
    scene.settle()


def test_the_digest_of_the_live_weights_is_the_manifests(scene: Scene) -> None:
    version = scene.settle()
    answer = scene.server.http.get("/deltawire/digest", headers=BEARER).raise_for_status().json()
    assert answer == {"version": version, "digest": Run.open(str(scene.trainer.run)).manifest(version).digest}


def test_keys_and_values_are_found_again_only_under_the_version_that_computed_them(scene: Scene) -> None:
    def found_again(prompt: list[int], **more: str) -> float:
        before = _prefix_hits(scene.server)
        scene.server.complete(prompt, 2, **more)
        return _prefix_hits(scene.server) - before

    prompt = [7 + i % 200 for i in range(400)]
    assert found_again(prompt) == 0
    assert found_again(prompt) > 0
    assert found_again(prompt, cache_salt="mine") == 0
    assert found_again(prompt, cache_salt="keep:mine") == 0
    scene.settle()
    assert found_again(prompt) == 0
    assert found_again(prompt) > 0
    assert found_again(prompt, cache_salt="mine") == 0
    assert found_again(prompt, cache_salt="keep:mine") > 0
    # asked before a swap, computed after it
    scene.server.http.post("/pause", params={"mode": "keep", "clear_cache": False}).raise_for_status()
    before = _prefix_hits(scene.server)
    with ThreadPoolExecutor(1) as beside:
        waiting = beside.submit(scene.server.complete, prompt, 2)
        time.sleep(1)
        scene.settle()
        assert not waiting.done()
        scene.server.http.post("/resume").raise_for_status()
        assert waiting.result(60).status_code == 200
    assert _prefix_hits(scene.server) == before


def _prefix_hits(server: Server) -> float:
    lines = server.http.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:prefix_cache_hits_total"))


def test_a_stray_write_stops_the_server_until_it_is_mended(scene: Scene) -> None:
    """A weight that was to stay as it is changes while new ones are written: nothing is served until it is right."""
    scene.settle()
    failures = scene.server.status()["failures"]
    with Streams(scene.server) as streams:
        (scene.faults / f"stray-{RANKS - 1}").touch()
        version = scene.trainer.publish()
        # it is paused until full weights have come, which may be too short to be seen: that it failed stays
        scene.server.until(failures=failures + 1)
        scene.server.until(version=version, state="healthy")
    assert streams.failures == []
    scene.note(version)


def test_killed_in_the_middle_of_an_apply(scene: Scene) -> None:
    at = scene.settle()
    tokens = greedy(scene.server)
    scene.note(at)
    (scene.faults / f"stall-{RANKS - 1}").touch()
    version = scene.trainer.publish()
    end = time.monotonic() + 60
    while not (scene.faults / f"stalled-{RANKS - 1}").exists():
        assert time.monotonic() < end
        time.sleep(0.05)
    # half written, and paused: the version it names is still the old one
    assert scene.server.status()["version"] == at
    scene.server.kill()
    scene.server = scene.start(DELTAWIRE_PIN=str(at))
    scene.note(at)
    assert greedy(scene.server) == tokens
    scene.pin(None)
    scene.server.until(version=version, state="healthy")
    scene.note(version)


def test_a_delta_of_another_run_is_refused(scene: Scene, tmp_path: Path) -> None:
    """The last of the faults: the server has then read a manifest that no run would overwrite."""
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
    scene.server.stop()
    scene.noted = {version: sums for version, sums in scene.noted.items() if version > VERSIONS}
    assert len(scene.noted) > 5
    scene.all_are_fresh_loads()


# ── stages ───────────────────────────────────────────────────────────────────────────────────────────────────────────

PIPELINE: dict[str, Any] = {
    # on a CPU, vLLM 0.32 makes what travels between stages only when it warms up, and so never in eager mode
    "flags": [
        "--pipeline-parallel-size", "2", "--no-enforce-eager",
        "--compilation-config", '{"mode": "DYNAMO_TRACE_ONCE", "backend": "eager"}',
    ],
    "VLLM_CPU_OMP_THREADS_BIND": "0|1",
}  # fmt: skip


@pytest.mark.skipif(RANKS < 2, reason="needs two GPUs")
def test_two_stages_with_a_tied_embedding_at_both_ends(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen3-tied")
    trainer = Trainer(model, tmp_path / "run")
    trainer.publish(0)
    with serving(model, tmp_path / "log", run=trainer.run, **PIPELINE) as server:
        assert server.status()["guard"] == "patch"
        with Streams(server) as streams:
            for _ in range(5):
                version = trainer.publish()
                server.until(version=version, state="healthy")
        assert streams.failures == []
        sums, tokens = server.checksums(), greedy(server)
    assert any(":pp1:" in name for name in sums)
    write_version(str(trainer.run), version, tmp_path / "fresh")
    trainer.close()
    with serving(tmp_path / "fresh", tmp_path / "fresh.log", **PIPELINE) as fresh:
        assert fresh.checksums() == sums
        assert greedy(fresh) == tokens


# ── several engines ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.skipif(RANKS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("kind", ("qwen3", "qwen3_moe"))
def test_data_parallel_ranks_follow_as_one(tmp_path: Path, kind: str) -> None:
    """Two engines, and as many API servers, of which one follows: all engines switch or none. Engines hold the same
    dense model, or each of them half of the experts, in which case they take every step together."""
    flags = ["--data-parallel-size", "2", *(["--enable-expert-parallel"] if kind == "qwen3_moe" else [])]
    faults = tmp_path / "faults"
    faults.mkdir()
    model = make_model(tmp_path / "model", kind)
    trainer = Trainer(model, tmp_path / "run")
    trainer.publish(0)
    more = {"VLLM_TEST_FAULTS": str(faults), "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    with serving(model, tmp_path / "log", run=trainer.run, flags=flags, **more) as server:
        assert server.status()["guard"] == "patch"
        with Streams(server, count=4) as streams:
            for _ in range(VERSIONS):
                version = trainer.publish()
                server.until(version=version, state="healthy")
            assert server.status()["failures"] == 0
            # the first rank of an engine, and of both where they do not share a group
            (faults / "fail-0").touch()
            newest = trainer.publish()
            server.until(failures=1)
            server.until(version=newest, state="healthy")
        assert streams.failures == []
        assert {span["version"] for c in streams.completions for span in c["spans"]} <= {*range(newest + 1)}
        sums, tokens = server.checksums(), greedy(server)
    said = (tmp_path / "log").read_text()
    assert "was taken back on all ranks: engine" in said
    assert all(f"rank {rank}: located" in said for rank in range(2))
    write_version(str(trainer.run), newest, tmp_path / "fresh")
    trainer.close()
    with serving(tmp_path / "fresh", tmp_path / "fresh.log", flags=flags, **more) as fresh:
        assert fresh.checksums() == sums
        assert greedy(fresh) == tokens


# ── live models with experts, and layouts that cannot be patched ──────────────────────────────────────────────────────


@pytest.mark.parametrize("kind, guard", [("mixtral", "patch"), ("deepseek_v3", "reload: ")])
def test_a_live_model_with_experts_is_followed(tmp_path: Path, kind: str, guard: str) -> None:
    """transformers keeps experts in one tensor, a checkpoint has them one by one, and vLLM's kernel may pack them.
    Latent attention computes with matrices that it made from weights: its own loader makes them anew."""
    import torch
    from transformers import AutoModelForCausalLM

    folder, run, noted = make_model(tmp_path / "model", kind), tmp_path / "run", {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert any(parameter.ndim == 3 for parameter in model.parameters())
    with dw.Publisher(run) as publisher:
        publisher.publish(model).result(600)
        with serving(folder, tmp_path / "log", run=run) as server:
            status = server.status()
            assert (status["version"], status["guard"][: len(guard)]) == (0, guard)
            assert guard == "patch" or "computes with W_U" in status["guard"]
            noted[0] = server.checksums()
            for _ in range(2):
                for parameter in model.parameters():
                    # a step up or down for one weight in fifty
                    bits = parameter.data.view(torch.int16)
                    bits.add_((torch.rand(bits.shape) < 0.02).to(torch.int16))
                version = publisher.publish(model).result(600).version
                server.until(version=version, state="healthy")
                noted[version] = server.checksums()
            assert server.status()["failures"] == 0
    for version in noted:
        write_version(str(run), version, tmp_path / f"v{version}")
    assert [*noted.values()] == fresh_checksums([tmp_path / f"v{version}" for version in noted], 1)
    assert len({json.dumps(sums) for sums in noted.values()}) == 3
