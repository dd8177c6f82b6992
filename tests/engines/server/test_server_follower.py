"""A server whose weights move under its clients: no request fails, no token comes from weights without a name."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from serving import checkpoint, generate, nudge, published_run, publisher, serving, tiny_model, tokenizer
from transformers import Qwen3ForCausalLM

from deltawire.bucket import checkpoint_folder
from deltawire.bucket.replay import checkout
from deltawire.bucket.run import Run
from deltawire.core.errors import Misconfigured, SchemaMismatch, SignatureError, StoreUnavailable
from deltawire.core.signing import SigningKey
from deltawire.engines.follower import Follower
from deltawire.engines.server import RolloutServer, ServerOptions
from deltawire.store import LocalStore
from support import heartbeats

VERSIONS, STREAMS = 20, 8
HELLO = tokenizer().encode("hello")


def wait_for(condition: Callable[[], Any], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.002)


def loaded(run: Path, version: int, place: Path) -> Qwen3ForCausalLM:
    """The version as transformers loads it from what `deltawire checkout` writes."""
    opened = Run.open(LocalStore(run))
    place.mkdir()
    checkpoint_folder.fill(place, opened, opened.manifest(version), checkout(opened, version))
    return Qwen3ForCausalLM.from_pretrained(place, dtype=torch.float32).eval()


def same_bits(server: RolloutServer, trainer: torch.nn.Module) -> bool:
    """The served weights against the trainer's, cast by torch: nothing of deltawire is involved."""
    served = server.loaded.model.state_dict()
    wanted = trainer.state_dict()
    return served.keys() == wanted.keys() and all(
        torch.equal(served[name].view(torch.int32), wanted[name].bfloat16().float().view(torch.int32))
        for name in wanted
    )


class Watcher(threading.Thread):
    """Streams one completion after the other and keeps all of them."""

    def __init__(self, url: httpx.URL, number: int, enough: threading.Event) -> None:
        super().__init__()
        self._url, self._number, self._enough = url, number, enough
        self.answers: list[dict[str, Any]] = []
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            with httpx.Client(base_url=self._url, timeout=60) as client:
                while not self._enough.is_set():
                    self.answers.append(self._one(client))
        except BaseException as error:
            self.failure = error

    def _one(self, client: httpx.Client) -> dict[str, Any]:
        prompt = [3 + (self._number + i) % 20 for i in range(4 + self._number)]
        body = {"prompt": prompt, "stream": True, "temperature": 0, "max_tokens": 60, "ignore_eos": True,
                "return_token_ids": True}  # fmt: skip
        tokens: list[int] = []
        with client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    choice = json.loads(line.removeprefix("data: "))["choices"][0]
                    tokens += choice["token_ids"]
        assert choice["finish_reason"] == "length"
        return {"prompt": prompt, "tokens": tokens, "spans": choice["weight_versions"]}


def test_twenty_versions_while_eight_streams_run(tmp_path: Path) -> None:
    trainer = tiny_model()
    run, enough = tmp_path / "run", threading.Event()
    with publisher(run, checkpoint(tmp_path / "model", trainer)) as it:
        it.publish(trainer).result(60)
        with serving(run) as (server, client):
            watchers = [Watcher(client.base_url, i, enough) for i in range(STREAMS)]
            for watcher in watchers:
                watcher.start()
            for version in range(1, VERSIONS + 1):
                nudge(trainer, version)
                it.publish(trainer).result(60)
                wait_for(lambda: server.follower.version == version)  # noqa: B023
                assert same_bits(server, trainer)
            wait_for(lambda: all(watcher.answers for watcher in watchers))
            enough.set()
            for watcher in watchers:
                watcher.join(60)
            assert [watcher.failure for watcher in watchers] == [None] * STREAMS
            # a sync is counted after its version is visible
            wait_for(lambda: server.follower.syncs == VERSIONS)
            status = client.get("/deltawire/status").json()
            greedy = client.post(
                "/v1/completions",
                json={
                    "prompt": HELLO,
                    "temperature": 0,
                    "max_tokens": 20,
                    "return_token_ids": True,
                    "ignore_eos": True,
                },
            ).json()["choices"][0]
    assert (status["version"], status["lag"], status["state"]) == (VERSIONS, 0, "healthy")
    assert (status["syncs"], status["failures"], status["counts"]["failed"]) == (VERSIONS, 0, 0)
    fresh = {version: loaded(run, version, tmp_path / f"v{version}") for version in range(VERSIONS + 1)}
    assert greedy["token_ids"] == greedy_of(fresh[VERSIONS], HELLO, 20)
    answers = [answer for watcher in watchers for answer in watcher.answers]
    assert any(len(answer["spans"]) > 1 for answer in answers)
    for answer in answers:
        spans = answer["spans"]
        assert [span["version"] for span in spans] == sorted({span["version"] for span in spans})
        assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans[:-1])]
        assert spans[-1]["end"] == len(answer["tokens"]) == 60
        assert_spans_are_true(fresh, answer)


def greedy_of(model: Qwen3ForCausalLM, prompt: list[int], count: int) -> list[int]:
    model.generation_config.eos_token_id = None
    return generate(model, prompt, count)


def assert_spans_are_true(fresh: dict[int, Qwen3ForCausalLM], answer: dict[str, Any]) -> None:
    """Each token is the likeliest under the whole version it is counted to (or as good as, within rounding)."""
    ids, before = answer["prompt"] + answer["tokens"], len(answer["prompt"]) - 1
    for span in answer["spans"]:
        with torch.no_grad():
            logits = fresh[span["version"]](torch.tensor([ids])).logits[0]
        here = logits[before + span["start"] : before + span["end"]]
        taken = here.gather(1, torch.tensor(answer["tokens"][span["start"] : span["end"]])[:, None])[:, 0]
        assert (here.max(-1).values - taken).max() < 1e-3


def test_a_server_given_another_checkpoint_takes_the_runs_weights(tmp_path: Path) -> None:
    trainer, other = tiny_model(0), tiny_model(1)
    with publisher(tmp_path / "run", checkpoint(tmp_path / "model", trainer)) as it:
        it.publish(trainer).result(60)
    model = checkpoint(tmp_path / "other", other)
    with serving(tmp_path / "run", model=str(model), name="x") as (server, client):
        assert same_bits(server, trainer)
        assert client.get("/v1/models").json()["data"][0]["id"] == "x"
        assert server.follower.phases["pause"] > 0


def test_it_waits_for_a_run_that_is_not_there_yet(tmp_path: Path) -> None:
    trainer = tiny_model()
    model = checkpoint(tmp_path / "model", trainer)
    with serving(tmp_path / "run", wait=False, model=str(model)) as (server, client):
        wait_for(lambda: "no run" in client.get("/deltawire/status").json()["reason"])
        answer = client.get("/health")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["state"] == "starting"
        assert "no run" in answer.json()["reason"]
        assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 503
        assert client.get("/deltawire/status").json()["state"] == "starting"
        nudge(trainer, 1)
        with publisher(tmp_path / "run", model) as it:
            it.publish(trainer).result(60)
        wait_for(lambda: client.get("/health").status_code == 200)
        assert same_bits(server, trainer)
        assert client.post("/v1/completions", json={"prompt": "a"}).headers["deltawire-version"] == "0"


def test_a_pinned_server_stays(tmp_path: Path) -> None:
    trainer = tiny_model()
    with publisher(tmp_path / "run", checkpoint(tmp_path / "model", trainer)) as it:
        it.publish(trainer).result(60)
        nudge(trainer, 1)
        it.publish(trainer).result(60)
        first = {name: tensor.clone() for name, tensor in trainer.state_dict().items()}
        with serving(tmp_path / "run", pin=1) as (server, client):
            nudge(trainer, 2)
            it.publish(trainer).result(60)
            time.sleep(0.1)
            assert client.get("/deltawire/status").json()["version"] == 1
            trainer.load_state_dict(first)
            assert same_bits(server, trainer)


def test_what_plugins_read_from_the_environment_holds_for_it_too(tmp_path: Path) -> None:
    trainer, run = tiny_model(), tmp_path / "run"
    with publisher(run, checkpoint(tmp_path / "model", trainer)) as it:
        for version in range(2):
            nudge(trainer, version)
            it.publish(trainer).result(60)
        with serving(run, pin="-2", follow=False, heartbeat=0.0, version_wait=0.3) as (server, client):
            assert client.get("/deltawire/status").json()["pin"] == 0
            assert client.post("/deltawire/pin", json={"version": None}).json()["version"] == 0
            nudge(trainer, 2)
            it.publish(trainer).result(60)
            newer = {"deltawire-min-version": "2"}
            assert client.post("/v1/completions", json={"prompt": "a"}, headers=newer).status_code == 409
            assert client.post("/deltawire/sync").json()["version"] == 2
            assert same_bits(server, trainer)
    assert not heartbeats(Run.open(str(run)))
    with pytest.raises(Misconfigured, match=r"DELTAWIRE_PIN is 'best': .*no tag"), serving(run, pin="best"):
        pass


def test_control_routes_are_those_of_all_engines(tmp_path: Path) -> None:
    trainer = tiny_model()
    with publisher(tmp_path / "run", checkpoint(tmp_path / "model", trainer)) as it:
        digests = []
        for version in range(3):
            nudge(trainer, version)
            it.publish(trainer).result(60)
            digests.append(Run.open(str(tmp_path / "run")).manifest(version).digest)
        with serving(tmp_path / "run") as (server, client):
            control = lambda verb, **said: client.post(f"/deltawire/{verb}", json=said)  # noqa: E731
            assert client.get("/deltawire/digest").json() == {"version": 2, "digest": str(digests[2])}
            pinned = control("pin", version="v1").json()
            assert (pinned["version"], pinned["pin"], pinned["syncs"]) == (1, 1, 1)
            assert client.get("/deltawire/digest").json() == {"version": 1, "digest": str(digests[1])}
            assert client.post("/v1/completions", json={"prompt": "a"}).headers["deltawire-version"] == "1"
            assert control("sync", version=0).json()["version"] == 0
            wait_for(lambda: server.follower.version == 1)
            for said, status in (({"version": 77}, 404), ({"version": 1.5}, 400), ({"run": "other"}, 400)):
                refused = client.post("/deltawire/pin", json=said)
                assert (refused.status_code, refused.json()["error"]["code"]) == (status, status)
            assert client.post("/deltawire/pin", content=b"[" * 100_000).status_code == 413
            assert client.post("/deltawire/pin", content=b"[" * 50_000).status_code == 400
            assert control("pin", version=None).json()["pin"] is None
            wait_for(lambda: server.follower.version == 2)
            assert same_bits(server, trainer)
            # a sync is counted after its version is visible
            wait_for(lambda: "deltawire_syncs_total 4.0" in client.get("/metrics").text)
            assert "deltawire_newest_version 2.0" in client.get("/metrics").text


def test_another_model_ends_the_server_with_the_reason(tmp_path: Path) -> None:
    trainer = tiny_model()
    with publisher(tmp_path / "run", checkpoint(tmp_path / "model", trainer)) as it:
        it.publish(trainer).result(60)
    other = checkpoint(tmp_path / "other", tiny_model(hidden_size=32))
    server = RolloutServer.open(ServerOptions(run=str(tmp_path / "run"), model=str(other), port=0))
    with pytest.raises(SchemaMismatch, match="in the run but"):
        server.run()


# ── faults ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Switch(LocalStore):
    """A bucket that can be away."""

    away = False

    def get(self, *args: Any, **more: Any) -> Any:
        return self._if_there(super().get, *args, **more)

    def get_if_changed(self, *args: Any, **more: Any) -> Any:
        return self._if_there(super().get_if_changed, *args, **more)

    def put(self, *args: Any, **more: Any) -> Any:
        return self._if_there(super().put, *args, **more)

    def _if_there(self, call: Callable[..., Any], *args: Any, **more: Any) -> Any:
        if self.away:
            raise StoreUnavailable("the bucket is away")
        return call(*args, **more)


def test_without_its_bucket_it_serves_on_and_says_so(tmp_path: Path) -> None:
    trainer = tiny_model()
    store = Switch(tmp_path / "run")
    with publisher(tmp_path / "run", checkpoint(tmp_path / "model", trainer)) as it:
        it.publish(trainer).result(60)
        with serving(store) as (server, client):
            store.away = True
            wait_for(lambda: client.get("/deltawire/status").json()["state"] == "degraded")
            assert "away" in client.get("/deltawire/status").json()["reason"]
            nudge(trainer, 1)
            it.publish(trainer).result(60)
            assert client.get("/health").status_code == 200
            answer = client.post("/v1/completions", json={"prompt": "a"})
            assert (answer.status_code, answer.headers["deltawire-version"]) == (200, "0")
            assert 'deltawire_state{state="degraded"} 1.0' in client.get("/metrics").text
            store.away = False
            wait_for(lambda: server.follower.version == 1)
            wait_for(lambda: client.get("/deltawire/status").json()["state"] == "healthy")
            assert same_bits(server, trainer)


def test_a_corrupt_delta_changes_nothing_until_it_is_repaired(tmp_path: Path) -> None:
    trainer = tiny_model()
    origin, bucket = tmp_path / "origin", tmp_path / "bucket"
    model = checkpoint(tmp_path / "model", trainer)
    with publisher(origin, model) as it:
        it.publish(trainer).result(60)
        shutil.copytree(origin, bucket)
        nudge(trainer, 1)
        it.publish(trainer).result(60)
    (delta,) = (origin / "deltas").iterdir()
    damaged = bytearray(delta.read_bytes())
    damaged[-9] ^= 1
    with serving(bucket) as (server, client):
        (bucket / "deltas").mkdir(exist_ok=True)
        (bucket / "deltas" / delta.name).write_bytes(damaged)
        shutil.copytree(origin / "versions", bucket / "versions", dirs_exist_ok=True)
        shutil.copy(origin / "head.json", bucket / "head.json")
        # not only degraded: files of a copy may be seen half written
        wait_for(lambda: client.get("/deltawire/status").json()["newest"] == 1)
        wait_for(lambda: client.get("/deltawire/status").json()["state"] == "degraded")
        assert same_bits(server, tiny_model())
        assert client.post("/v1/completions", json={"prompt": "a"}).headers["deltawire-version"] == "0"
        status = client.get("/deltawire/status").json()
        assert (status["version"], status["newest"], status["lag"]) == (0, 1, 1)
        shutil.copy(delta, bucket / "deltas" / delta.name)
        wait_for(lambda: server.follower.version == 1)
        assert same_bits(server, trainer)


@pytest.mark.parametrize("undo", ["works", "fails"])
def test_a_write_that_fails_half_way(tmp_path: Path, undo: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is undone and the old version served on; where it cannot be undone, nothing is served until it has a name."""
    trainer = tiny_model()
    with publisher(tmp_path / "run", checkpoint(tmp_path / "model", trainer)) as it:
        it.publish(trainer).result(60)
        with serving(tmp_path / "run") as (server, client):
            target: Any = server.follower.replica._weights.target
            shard = target._weights.shard
            write = shard.write

            def breaks(patch: Any) -> None:
                write(patch[:3])
                raise OSError("half-way")

            def cannot(change: Any) -> None:
                raise OSError("nor back")

            monkeypatch.setattr(shard, "write", breaks)
            if undo == "fails":
                monkeypatch.setattr(shard, "undo", cannot)
                monkeypatch.setattr(shard, "load", cannot)
            nudge(trainer, 1)
            it.publish(trainer).result(60)
            status = lambda: client.get("/deltawire/status").json()  # noqa: E731
            if undo == "works":
                wait_for(lambda: "half-way" in status()["reason"])
                assert (status()["version"], status()["state"]) == (0, "degraded")
                answer = client.post("/v1/completions", json={"prompt": "a"})
                assert (answer.status_code, answer.headers["deltawire-version"]) == (200, "0")
            else:
                wait_for(lambda: "nor back" in status()["reason"])
                assert (status()["version"], status()["state"]) == (None, "paused")
                assert client.get("/health").status_code == 503
                assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 503
            monkeypatch.undo()
            wait_for(lambda: server.follower.version == 1)
            assert same_bits(server, trainer)
            assert client.post("/v1/completions", json={"prompt": "a"}).headers["deltawire-version"] == "1"


def test_a_server_with_a_trusted_key_serves_on_through_every_forgery(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forged, rolled back and replaced: no live weight changes, and the state says why."""
    key = SigningKey.generate()
    key.write(tmp_path / "key")
    monkeypatch.setenv("DELTAWIRE_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("DELTAWIRE_TRUST", key.public)
    trainer, run = tiny_model(), tmp_path / "run"
    folder = checkpoint(tmp_path / "model", trainer)
    with publisher(run, folder, sign=tmp_path / "key") as it:
        it.publish(trainer).result(60)
        nudge(trainer, 1)
        it.publish(trainer).result(60)
    good = tmp_path / "good"
    shutil.copytree(run, good)
    # somebody else's model as version 2, unsigned
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("DELTAWIRE_TRUST")
        stranger = tiny_model(seed=5)
        with publisher(tmp_path / "strange", folder) as it:
            for _ in range(3):
                nudge(stranger, 2)
                it.publish(stranger).result(60)
    versions = run / "versions"
    info = json.loads((run / "run.json").read_text())
    with serving(run) as (server, client):
        wait_for(lambda: server.follower.version == 1)
        digest = server.follower.live()[1]
        assert client.get("/deltawire/status").json()["signatures"] == "checked"

        def unharmed(reason: str) -> None:
            wait_for(lambda: reason in server.follower.reason)
            assert (server.follower.state, server.follower.live()) == ("degraded", (1, digest))
            assert same_bits(server, trainer)
            answer = client.post("/v1/completions", json={"prompt": HELLO, "max_tokens": 2})
            assert answer.status_code == 200

        forged = json.loads((tmp_path / "strange" / "versions" / "000002.json").read_text())
        forged |= {"run": info["run"], "schema": info["schema_hash"], "recent": []}
        (versions / "000002.json").write_text(json.dumps(forged))
        (run / "head.json").write_text(json.dumps({"run": info["run"], "version": 2}))
        unharmed("is not signed")
        (versions / "000002.json").unlink()
        (versions / "000001.json").unlink()
        (run / "head.json").write_text(json.dumps({"run": info["run"], "version": 0}))
        unharmed("was seen before")
        # as it was: it recovers by itself
        shutil.copytree(good, run, dirs_exist_ok=True)
        wait_for(lambda: server.follower.state == "healthy")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DELTAWIRE_REFUSE_DELEGATED", "1")
        with serving(run) as (_, client):
            assert client.get("/deltawire/status").json()["signatures"] == "own"
    with pytest.raises(SignatureError), serving(tmp_path / "strange"):
        pass


def test_a_follower_signs_off_even_if_what_ends_its_server_fails(tmp_path: Path) -> None:
    run = published_run(tmp_path)

    def ends() -> None:
        raise ProcessLookupError("the server is gone")

    other = torch.nn.Linear(4, 4)
    follower = Follower(str(run), other, id="gone", address="10.0.0.1:8000", on_failure=ends)
    with pytest.raises(ProcessLookupError):
        follower.loop()
    assert isinstance(follower.failure, SchemaMismatch)
    (beat,) = heartbeats(Run.open(LocalStore(run)))
    assert (beat.replica, beat.address) == ("gone", "")
