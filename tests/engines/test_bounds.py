"""Requests that accept only some versions: waited for, refused, and held to the last token."""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from deltawire.engines.bounds import BadBound, Bound
from deltawire.engines.names import EXACT_VERSION_HEADER, MIN_VERSION_HEADER, VERSION_HEADER
from deltawire.store import ObjectStore
from deltawire.trainer import Publisher
from tests.engines.server.serving import checkpoint, nudge, serving, tiny_model

HELLO = {"prompt": "hello", "temperature": 0, "max_tokens": 8}


def headers(**given: str) -> list[tuple[bytes, bytes]]:
    return [(name.replace("_", "-").encode(), value.encode()) for name, value in given.items()]


def test_bounds_by_header() -> None:
    assert Bound.of(headers(host="a")) is None
    least = Bound.of([(b"Deltawire-Min-Version", b" 41 ")])
    assert least == Bound(MIN_VERSION_HEADER, 41)
    assert [version for version in (None, "initial", 40, 41, 42) if least.allows(version)] == [41, 42]
    exact = Bound.of(headers(deltawire_exact_version="0"))
    assert exact == Bound(EXACT_VERSION_HEADER, 0)
    assert [version for version in (None, "0", 0, 1) if exact.allows(version)] == [0]


@pytest.mark.parametrize("value", ["", "v41", "-1", "1.0", "latest", "4 1", "1" * 19, "٤"])
def test_values_that_are_no_version(value: str) -> None:
    with pytest.raises(BadBound, match="is a version such as 41"):
        Bound.of(headers(deltawire_min_version=value))


def test_two_bounds_are_refused() -> None:
    with pytest.raises(BadBound, match="name one version"):
        Bound.of(headers(deltawire_min_version="1", deltawire_exact_version="1"))
    with pytest.raises(BadBound, match="name one version"):
        Bound.of([*headers(deltawire_min_version="1"), *headers(deltawire_min_version="1")])


# ── a real server ────────────────────────────────────────────────────────────────────────────────────────────────────


class Trainer:
    """Publishes versions of the tiny model into a bucket in memory, which announces nothing."""

    def __init__(self, folder: Path) -> None:
        self.store = ObjectStore.from_url(f"memory://{uuid.uuid4()}")
        self._model = tiny_model()
        self._publisher = Publisher(self.store, wire_dtype="bf16", files=checkpoint(folder, self._model))
        self.publish()

    def publish(self) -> int:
        nudge(self._model, (self._publisher.version or 0) + 1)
        return self._publisher.publish(self._model).result(60).version


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path / "model")


def least(version: int) -> dict[str, str]:
    return {MIN_VERSION_HEADER: str(version)}


def exactly(version: int) -> dict[str, str]:
    return {EXACT_VERSION_HEADER: str(version)}


def until(condition: Callable[[], Any]) -> None:
    while not condition():
        time.sleep(0.01)


def refused(answer: httpx.Response, version: int) -> str:
    """The message of a 409 that names this version."""
    assert answer.status_code == 409, answer.text
    assert answer.headers[VERSION_HEADER] == str(version)
    error = answer.json()["error"]
    assert (error["version"], error["code"], error["type"]) == (version, 409, "version_error")
    return str(error["message"])


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_waits_for_its_version(trainer: Trainer, stream: bool) -> None:
    answers: list[httpx.Response] = []
    # the next poll is due in more than 22 s: it is the request that makes the server look
    with serving(trainer.store, poll=30.0, version_wait=20.0) as (server, client):
        body = {**HELLO, "stream": stream}
        ask = threading.Thread(
            target=lambda: answers.append(client.post("/v1/completions", json=body, headers=least(1)))
        )
        ask.start()
        until(lambda: server.follower.listeners)
        assert trainer.publish() == 1
        ask.join()
        (answer,) = answers
        assert (answer.status_code, answer.headers[VERSION_HEADER]) == (200, "1")
        assert '"version":1' in answer.text
        assert not server.follower.listeners
        # one that is there already is not waited for
        assert client.post("/v1/completions", json=body, headers=least(0)).headers[VERSION_HEADER] == "1"


def test_a_version_that_does_not_come_is_a_409(trainer: Trainer) -> None:
    with serving(trainer.store, version_wait=0.05) as (_, client):
        for more in ({}, {"stream": True}):
            text = refused(client.post("/v1/completions", json={**HELLO, **more}, headers=least(1)), 0)
            assert text.startswith("this request accepts version 1 or later, and this server has version 0: ")
        wrong = client.post("/v1/completions", json=HELLO, headers={MIN_VERSION_HEADER: "latest"})
        assert wrong.status_code == 400
        assert "deltawire-min-version is a version such as 41, not 'latest'" in wrong.text


def test_no_wait_is_longer_than_the_request_may_take(trainer: Trainer) -> None:
    with serving(trainer.store, version_wait=1000.0, request_timeout=0.1) as (_, client):
        refused(client.post("/v1/completions", json=HELLO, headers=least(1)), 0)


def test_a_version_that_is_past_or_pinned_away_is_refused_at_once(trainer: Trainer) -> None:
    trainer.publish()
    with serving(trainer.store, version_wait=1000.0) as (server, client):
        assert client.post("/v1/completions", json=HELLO, headers=exactly(1)).status_code == 200
        assert "version 0 only" in refused(client.post("/v1/completions", json=HELLO, headers=exactly(0)), 1)
        client.post("/deltawire/pin", json={"version": 0})
        assert client.post("/v1/completions", json=HELLO, headers=exactly(0)).headers[VERSION_HEADER] == "0"
        refused(client.post("/v1/completions", json=HELLO, headers=least(1)), 0)
        assert server.follower.version == 0, "a request does not move a pinned server"


@pytest.mark.parametrize("stream", [False, True])
def test_a_sync_during_an_answer_breaks_an_exact_bound(trainer: Trainer, stream: bool) -> None:
    answers: list[httpx.Response] = []
    body = {**HELLO, "max_tokens": 240, "ignore_eos": True, "stream": stream}
    with serving(trainer.store) as (server, client):
        for bound in (exactly(0), least(0)):
            client.post("/deltawire/pin", json={"version": 0})
            ask = threading.Thread(
                target=lambda bound=bound: answers.append(client.post("/v1/completions", json=body, headers=bound))
            )
            server.scheduler.counts.generated_tokens = 0
            ask.start()
            until(lambda: server.scheduler.counts.generated_tokens)
            client.post("/pause", params={"mode": "keep"})
            if server.follower.replica.newest == 0:
                trainer.publish()
            client.post("/deltawire/pin", json={"version": 1})
            client.post("/resume")
            ask.join()
    exact, any_later = answers
    assert any_later.status_code == 200
    if not stream:
        assert any_later.headers[VERSION_HEADER] == "0,1"
        assert "(its tokens were made by 0,1)" in refused(exact, 1)
        return
    events = [
        json.loads(line.removeprefix("data: ")) for line in exact.text.split("\n\n") if line.startswith("data: {")
    ]
    assert events[-1]["error"]["version"] == 1
    assert not any(choice.get("finish_reason") for event in events[:-1] for choice in event["choices"])
    assert exact.text.endswith("data: [DONE]\n\n")
    assert '"weight_versions":[{"version":0,' in any_later.text
