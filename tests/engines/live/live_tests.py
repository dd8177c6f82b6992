"""What every engine must do that follows a run, against a real server: a class for the engines' own files to inherit.

Versions are published while clients stream. After each one, the engine's own checksums of the live weights are noted;
when all are out, every version is checked out and loaded afresh by the engine's own loader, and the two must be equal
for all of them. Greedy tokens are compared with a second server that was started from the checkout of the last version
and is then driven to an older one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

import deltawire as dw
from deltawire.bucket.run import Run
from deltawire.doctor import examine_server as examine
from deltawire.engines.live.launch import write_version
from tests.engines.live.live_server import Server, Streams, Trainer, make_model, serving

Cells = Mapping[tuple[str, int], int]
"""Kind of model and number of tensor-parallel ranks, and how many versions are published under load."""

BEARER = {"Authorization": "Bearer secret"}
ANCHOR_EVERY = 15
"""Versions from one anchor to the next."""
PROMPTS = ([5, 9, 11], [7], [200, 3, 4, 5, 6, 8, 9, 10])


def greedy(server: Server) -> list[list[int]]:
    return [server.greedy(prompt) for prompt in PROMPTS]


class Scene:
    """A server that follows a run in a folder, and what tests need to look at it and to hurt it."""

    def __init__(self, engine: type[Server], folder: Path, kind: str, tp: int, versions: int) -> None:
        self.engine, self.folder, self.tp, self.versions = engine, folder, tp, versions
        self.flags = ["--enable-expert-parallel"] if kind.endswith("-ep") else []
        self.faults = folder / "faults"
        self.faults.mkdir(parents=True)
        self.model = make_model(folder / "model", kind)
        # packed is decoded by position, context by tiles
        encoding = "packed" if kind == "llama" else "context"
        self.trainer = Trainer(self.model, folder / "run", encoding=encoding, anchor_every=ANCHOR_EVERY)
        self.trainer.publish(0)
        self.noted: dict[int, dict[str, str]] = {}
        """By version: checksums of the live server."""
        self.tokens: dict[int, list[list[int]]] = {}
        """By version: its answers to the prompts."""
        self.streams: list[Streams] = []
        self.server = self.start()

    def start(self, **more: str) -> Server:
        return self.engine(
            self.model, self.folder / "log", tp=self.tp, flags=self.flags, run=self.trainer.run,
            LIVE_TEST_FAULTS=str(self.faults), DELTAWIRE_TOKEN="secret", DELTAWIRE_HEARTBEAT="0", **more,
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

    def settle_before_deltas(self) -> int:
        """Settle at a version whose next two are deltas and nothing else: no anchor gets a server around a fault."""
        while (version := self.settle()) % ANCHOR_EVERY >= ANCHOR_EVERY - 2:
            pass
        return version

    def note(self, version: int) -> dict[str, str]:
        """What the server holds, to be compared with a fresh load of that version when all is over."""
        assert self.server.status()["version"] == version
        assert self.server.weight_version() == str(version)
        found = self.noted.setdefault(version, self.server.checksums())
        assert self.server.checksums() == found
        return found

    def pin(self, version: int | None) -> None:
        self.server.http.post("/deltawire/pin", json={"version": version}, headers=BEARER).raise_for_status()

    def checkout(self, version: int) -> Path:
        folder = self.folder / f"v{version}"
        write_version(str(self.trainer.run), version, folder)
        return folder

    def many_versions(self) -> None:
        for last in (self.versions // 2, self.versions):
            with Streams(self.server) as streams:
                while self.server.status()["version"] < last:
                    version = self.settle()
                    self.noted[version] = self.server.checksums()
            self.streams.append(streams)
            # by itself: what else is in a batch may move the last bits of logits
            self.tokens[last] = greedy(self.server)

    def all_are_fresh_loads(self, server: Server | None = None) -> None:
        """Whatever was noted is what a fresh load of that version gives."""
        folders = [self.checkout(version) for version in self.noted]
        sums = self.engine.fresh_checksums(folders, self.tp, self.flags, server)
        for version, fresh in zip(self.noted, sums, strict=True):
            assert self.noted[version] == fresh, f"version {version} is not what a fresh load gives"


class Scenes:
    """One of each, made when it is asked for. A server takes half a minute to start, most of it on one core: the next
    one is started beside what is left to do with this one."""

    def __init__(
        self, engine: type[Server], cells: Cells, factory: pytest.TempPathFactory, wanted: Sequence[tuple[str, int]]
    ) -> None:
        self._engine, self._cells, self._factory, self._wanted = engine, cells, factory, wanted
        self._made: dict[tuple[str, int], Future[Scene]] = {}
        self._beside = ThreadPoolExecutor(1)

    def __call__(self, kind: str, tp: int) -> Scene:
        """After its versions under load."""
        self._start(kind, tp)
        scene = self._made[kind, tp].result()
        if not scene.tokens:
            scene.many_versions()
        return scene

    def start_after(self, kind: str, tp: int) -> None:
        for following in self._wanted[self._wanted.index((kind, tp)) + 1 :][:1]:
            self._start(*following)

    def _start(self, kind: str, tp: int) -> None:
        if (kind, tp) not in self._made:
            folder = self._factory.mktemp(f"{kind}-tp{tp}") / "scene"
            self._made[kind, tp] = self._beside.submit(Scene, self._engine, folder, kind, tp, self._cells[kind, tp])

    def stop(self) -> None:
        self._beside.shutdown()
        for one in self._made.values():
            if one.exception() is None:
                one.result().stop()


class LiveTests:
    """Tests of one engine."""

    server: ClassVar[type[Server]]
    cells: ClassVar[Cells]
    """The last one stays, for the faults."""
    users: ClassVar[Mapping[str, str]] = {}
    """Variables with which a server has only the routes that users have."""
    hidden: ClassVar[Sequence[str]] = ()
    """Routes that it then has not."""

    @classmethod
    def last(cls) -> tuple[str, int]:
        return [*cls.cells][-1]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "kind" in metafunc.fixturenames:
            metafunc.parametrize("kind, tp", [*self.cells])
        if "rank" in metafunc.fixturenames:
            metafunc.parametrize("rank", range(self.last()[1]))

    @pytest.fixture(scope="session", autouse=True)
    @classmethod
    def compiled(cls) -> None:
        """Codecs are compiled before a server takes both cores; its workers then find them in the same cache."""
        rng = np.random.default_rng(0)
        old = {"w": rng.integers(0, 1 << 16, (512, 512), np.uint16, endpoint=False), "b": np.ones(64, np.uint16)}
        new = {name: bits + (rng.random(bits.shape) < 0.02).astype(np.uint16) for name, bits in old.items()}
        for encoding in ("context", "packed"):
            decoded = dw.decode(dw.encode(old, new, encoding), old)
            assert all(np.array_equal(decoded[name], new[name]) for name in new)

    @pytest.fixture(scope="class")
    @classmethod
    def scenes(cls, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scenes]:
        chosen = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
        wanted = [(at["kind"], at["tp"]) for at in chosen if at.keys() >= {"kind", "tp"}]
        made = Scenes(cls.server, cls.cells, tmp_path_factory, wanted)
        yield made
        made.stop()

    @pytest.fixture
    def scene(self, scenes: Scenes) -> Scene:
        """The server that the faults below are aimed at."""
        return scenes(*self.last())

    def test_many_versions_under_load(self, scenes: Scenes, kind: str, tp: int) -> None:
        scene = scenes(kind, tp)
        last, half_way = scene.versions, scene.versions // 2
        status = scene.server.status()
        assert (status["guard"], status["syncs"], status["failures"]) == ("patch", last, 0)
        assert sorted(scene.noted) == [*range(1, last + 1)]
        assert [streams.failures for streams in scene.streams] == [[], []]
        if (kind, tp) != self.last():
            # faults come later to that one
            scene.server.stop()
        scenes.start_after(kind, tp)

        completions = [completion for streams in scene.streams for completion in streams.completions]
        assert {span["version"] for c in completions for span in c["spans"]} <= {*range(last + 1)}
        assert any(len(completion["spans"]) > 1 for completion in completions)
        for completion in completions:
            # spans cover the completion without a gap
            edges = [(span["start"], span["end"]) for span in completion["spans"]]
            assert edges[0][0] == 0
            assert edges[-1][1] == len(completion["tokens"])
            assert all(a[1] == b[0] for a, b in pairwise(edges))

        with ThreadPoolExecutor(1) as beside:
            equal = None if self.server.reloads else beside.submit(scene.all_are_fresh_loads)
            with serving(
                self.server, scene.checkout(last), scene.folder / "fresh.log", tp=tp, flags=scene.flags
            ) as fresh:
                assert fresh.status()["state"] == "idle"
                assert fresh.checksums() == scene.noted[last]
                assert greedy(fresh) == scene.tokens[last]
                if equal is None:
                    scene.all_are_fresh_loads(fresh)
                # runs that are not there, or not of this model, are refused and forgotten
                other = scene.folder / "other"
                renamed = {f"base.{name}": bits for name, bits in scene.trainer.weights.items()}
                with dw.Publisher(other) as publisher:
                    publisher.publish(renamed).result(600)
                for run, refusal in ((scene.folder / "rum", "no run at"), (other, "only the run has 'base.")):
                    assert refusal in fresh.http.post("/update_weights", json={"run": str(run)}).text
                    assert fresh.status()["state"] == "idle"
                assert fresh.checksums() == scene.noted[last]
                # a trainer takes it to another version
                body = {"update_info": {"run": str(scene.trainer.run), "version": half_way}}
                status = fresh.http.post("/update_weights", json=body).raise_for_status().json()
                assert (status["version"], status["state"], status["guard"]) == (half_way, "healthy", "patch")
                assert fresh.checksums() == scene.noted[half_way]
                assert greedy(fresh) == scene.tokens[half_way]
                assert fresh.http.post("/update_weights", json={"run": "memory://other"}).status_code == 409
                assert {finding.verdict for finding in examine(str(fresh.http.base_url)).findings} <= {"ok", "warning"}
            if equal is not None:
                equal.result()

    def test_from_nothing_but_the_run(self, scenes: Scenes) -> None:
        """`deltawire serve --engine … RUN`: a fresh load of the newest version; then back, staying there, and on."""
        scene = scenes("qwen3", 1)
        last, half_way = scene.versions, scene.versions // 2
        with serving(self.server, None, scene.folder / "serve.log", run=scene.trainer.run, **self.users) as server:
            assert all(server.http.get(route).status_code == 404 for route in self.hidden)
            status = server.status()
            assert (status["version"], status["state"], status["guard"]) == (last, "healthy", "patch")
            assert server.http.get("/v1/models").json()["data"][0]["id"] == scene.trainer.run.name == status["model"]
            assert server.http.get("/health").json() == {"state": "healthy"}
            findings = examine(str(server.http.base_url), run=str(scene.trainer.run)).findings
            assert {finding.verdict for finding in findings} == {"ok"}
            assert f"serving v{last}" not in server.log.read_text()  # it was there already
            assert greedy(server) == scene.tokens[last]
            server.http.post("/deltawire/pin", json={"version": half_way}).raise_for_status()
            newest = scene.trainer.publish()
            assert greedy(server) == scene.tokens[half_way]
            answer = server.complete([5, 9, 11])
            assert answer.headers["deltawire-version"] == str(half_way)
            assert answer.json()["choices"][0]["weight_versions"] == [{"version": half_way, "start": 0, "end": 24}]
            server.http.post("/deltawire/pin", json={"version": None}).raise_for_status()
            server.until(version=newest, state="healthy")
            assert server.complete([5, 9, 11]).headers["deltawire-version"] == str(newest)
            assert f"deltawire_version {newest}.0" in server.http.get("/metrics").text

    # ── faults, against one live server ──────────────────────────────────────────────────────────────────────────────

    def test_a_mistyped_version_is_refused_and_changes_nothing(self, scene: Scene) -> None:
        at = scene.settle()
        status = scene.server.status()
        before = {name: status[name] for name in ("version", "newest", "pin", "state", "failures")}
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

    def test_a_corrupt_delta_is_refused_and_outlived(self, scene: Scene) -> None:
        at = scene.settle_before_deltas()
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

    def test_a_missing_base_leaves_the_old_version_serving(self, scene: Scene) -> None:
        at = scene.settle_before_deltas()
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

    def test_a_rank_that_fails_in_the_middle_of_the_scatter_takes_all_ranks_back(self, scene: Scene, rank: int) -> None:
        at = scene.settle_before_deltas()
        before = scene.note(at)
        scene.pin(at)
        version = scene.trainer.publish()
        assert [link.kind for link in Run.open(str(scene.trainer.run)).manifest(version).links] == ["delta"]
        (scene.faults / f"fail-{rank}").touch()
        failures = scene.server.status()["failures"]
        with Streams(scene.server) as streams:
            answer = scene.server.http.post("/deltawire/sync", json={"version": version}, headers=BEARER)
            assert answer.status_code == 409, answer.text
            assert f"rank {rank}" in answer.text
            assert "a fault that a test asked for" in answer.text
            assert scene.server.checksums() == before
            assert scene.server.status()["failures"] == failures + 1
            assert scene.server.weight_version() == str(at)
            scene.pin(None)
            scene.server.until(version=version, state="healthy")
        assert streams.failures == []
        scene.note(version)

    def test_a_bucket_that_is_down_for_half_a_minute(self, scene: Scene) -> None:
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

    def test_control_routes_need_the_token(self, scene: Scene) -> None:
        for route in ("/deltawire/sync", "/deltawire/pin", "/update_weights"):
            assert scene.server.http.post(route, json={}).status_code == 401
            assert scene.server.http.post(route, json={}, headers={"Authorization": "Bearer no"}).status_code == 401
        assert scene.server.http.get("/deltawire/digest").status_code == 401

    @pytest.mark.parametrize("stream", [False, True])
    def test_requests_get_the_versions_they_accept(self, scene: Scene, stream: bool) -> None:
        def ask(kind: str, version: int, tokens: int = 8) -> tuple[int, str]:
            body = {
                "model": scene.server.name, "prompt": [5, 9, 11], "max_tokens": tokens, "ignore_eos": True,
                "stream": stream,
            }  # fmt: skip
            bound = {f"deltawire-{kind}-version": str(version)}
            answer = scene.server.http.post("/v1/completions", json=body, headers=bound)
            return answer.status_code, answer.text

        version = scene.settle()
        with ThreadPoolExecutor() as pool:
            later = pool.submit(ask, "min", version + 1)
            assert scene.trainer.publish() == version + 1
            status, text = later.result(120)
            assert (status, f'"version":{version + 1},' in text) == (200, True)
            assert f'"version":{version},' not in text
            unlabelled = scene.server.http.post("/v1/responses", json={}, headers={"deltawire-min-version": "0"})
            assert (unlabelled.status_code, "or use POST /v1/completions" in unlabelled.text) == (400, True)
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

    def test_the_digest_of_the_live_weights_is_the_manifests(self, scene: Scene) -> None:
        version = scene.settle()
        answer = scene.server.http.get("/deltawire/digest", headers=BEARER).raise_for_status().json()
        assert answer == {"version": version, "digest": Run.open(str(scene.trainer.run)).manifest(version).digest}

    def test_keys_and_values_are_found_again_only_under_the_version_that_computed_them(self, scene: Scene) -> None:
        reused, prompt = scene.server.reused, [7 + i % 200 for i in range(400)]
        assert reused(prompt) == 0
        assert reused(prompt) > 0
        assert reused(prompt, "mine") == 0
        assert reused(prompt, "keep:mine") == 0
        scene.settle()
        assert reused(prompt) == 0
        assert reused(prompt) > 0
        assert reused(prompt, "mine") == 0
        assert reused(prompt, "keep:mine") > 0
        # asked before a swap, computed after it
        scene.server.hold()
        with ThreadPoolExecutor(1) as beside:
            waiting = beside.submit(reused, prompt)
            time.sleep(1)
            scene.settle()
            assert not waiting.done()
            scene.server.resume()
            assert waiting.result(60) == 0

    def test_a_stray_write_stops_the_server_until_it_is_mended(self, scene: Scene) -> None:
        """A weight that was to stay changes while new ones are written: nothing is served until it is right."""
        scene.settle()
        failures = scene.server.status()["failures"]
        with Streams(scene.server) as streams:
            (scene.faults / f"stray-{scene.tp - 1}").touch()
            version = scene.trainer.publish()
            # it is paused until full weights have come, which may be too short to be seen: that it failed stays
            scene.server.until(failures=failures + 1)
            scene.server.until(version=version, state="healthy")
        assert streams.failures == []
        scene.note(version)

    def test_killed_in_the_middle_of_an_apply(self, scene: Scene) -> None:
        at = scene.settle()
        tokens = greedy(scene.server)
        scene.note(at)
        (scene.faults / f"stall-{scene.tp - 1}").touch()
        version = scene.trainer.publish()
        end = time.monotonic() + 60
        while not (scene.faults / f"stalled-{scene.tp - 1}").exists():
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

    def test_a_delta_of_another_run_is_refused(self, scene: Scene, tmp_path: Path) -> None:
        """The last of the faults: the server has then read a manifest that no run would overwrite."""
        at = scene.settle_before_deltas()
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

    def test_every_state_on_the_way_was_that_of_a_fresh_load(self, scene: Scene) -> None:
        scene.server.stop()
        scene.noted = {version: sums for version, sums in scene.noted.items() if version > scene.versions}
        assert len(scene.noted) > 5
        scene.all_are_fresh_loads()
