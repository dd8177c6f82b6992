"""Requests that accept only some versions: waited for, refused, and held to the last token."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from deltawire.engines.bounds import BadBound, Bound
from deltawire.engines.names import EXACT_VERSION_HEADER, MIN_VERSION_HEADER, VERSION_HEADER
from deltawire.engines.server import RolloutServer
from deltawire.engines.server.app import _stream
from deltawire.store import ObjectStore
from deltawire.trainer import Publisher
from tests.engines.server.serving import Brake, checkpoint, nudge, serving, tiny_model

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


@pytest.mark.parametrize("spans", [[(40, 1)], [(41, 1), (40, 1)], [(41, 1), (40, 1), (42, 1)]])
def test_a_stream_passes_on_no_event_after_a_version_that_is_not_accepted(spans: list[tuple[int, int]]) -> None:
    sequence = SimpleNamespace(spans=spans)
    server = SimpleNamespace(
        follower=SimpleNamespace(version=42, pin=None), scheduler=SimpleNamespace(cancel=lambda _: None)
    )
    answer = SimpleNamespace(opening=lambda _: [], chunk=lambda *_: {"text": "x"})

    async def events() -> list[bytes]:
        queue: Any = asyncio.Queue()
        queue.put_nowait((sequence, SimpleNamespace(finished=True)))
        deadline, bound = SimpleNamespace(cancel=lambda: None), Bound(MIN_VERSION_HEADER, 41)
        found: Any = _stream(server, [sequence], answer, queue, deadline, bound)  # type: ignore[arg-type,list-item]
        return [event async for event in found]

    said = asyncio.run(events())
    assert b'"code":409' in said[0]
    assert said[1:] == [b"data: [DONE]\n\n"]


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


class World:
    """A server that follows a bucket in memory, which announces nothing, and the trainer that publishes there."""

    def __init__(self, publisher: Publisher, server: RolloutServer, client: httpx.Client) -> None:
        self.publisher, self.server, self._client = publisher, server, client
        self._model = tiny_model()

    def publish(self) -> int:
        nudge(self._model, (self.publisher.version or 0) + 1)
        return self.publisher.publish(self._model).result(60).version

    def ask(self, kind: str = "", version: int | str = 0, **more: Any) -> httpx.Response:
        bound = {f"deltawire-{kind}-version": str(version)} if kind else {}
        return self._client.post("/v1/completions", json={**HELLO, **more}, headers=bound)

    def post(self, route: str, body: Any = None, **more: Any) -> None:
        self._client.post(route, json=body, **more).raise_for_status()

    def set(self, **options: float) -> None:
        self.server.options = replace(self.server.options, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    store = ObjectStore.from_url(f"memory://{uuid.uuid4()}")
    folder = checkpoint(tmp_path_factory.mktemp("bounds") / "model", tiny_model())
    with Publisher(store, wire_dtype="bf16", files=folder) as publisher:
        publisher.publish(tiny_model()).result(60)
        # a poll is due every 22 to 30 s: it is the requests that make the server look
        with serving(store, poll=30.0) as (server, client):
            yield World(publisher, server, client)


@pytest.fixture
def world(served: World) -> World:
    """At its newest version, with an older one in the bucket."""
    served.set(version_wait=600.0, request_timeout=600.0)
    if served.publisher.version == 0:
        served.publish()
    served.post("/deltawire/pin", {"version": None})
    served.post("/deltawire/sync", {})
    return served


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
def test_a_request_waits_for_its_version(world: World, stream: bool) -> None:
    version = (world.publisher.version or 0) + 1
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(world.ask, "min", version, stream=stream)
        until(lambda: world.server.follower.listeners)
        assert world.publish() == version
        answer = waiting.result()
    assert (answer.status_code, answer.headers[VERSION_HEADER]) == (200, str(version))
    assert f'"version":{version}' in answer.text
    assert not world.server.follower.listeners
    # one that is there already is not waited for
    assert world.ask("min", 0, stream=stream).headers[VERSION_HEADER] == str(version)


def test_a_version_that_does_not_come_is_a_409(world: World) -> None:
    version = world.publisher.version or 0
    world.set(version_wait=0.05)
    for stream in (False, True):
        text = refused(world.ask("min", version + 1, stream=stream), version)
        assert text.startswith(f"this request accepts version {version + 1} or later, and this server has version")
    wrong = world.ask("min", "latest")
    assert wrong.status_code == 400
    assert "deltawire-min-version is a version such as 41, not 'latest'" in wrong.text
    # no wait is longer than the request may take
    world.set(version_wait=1000.0, request_timeout=0.1)
    refused(world.ask("min", version + 1), version)


def test_a_version_that_is_past_or_pinned_away_is_refused_at_once(world: World) -> None:
    version = world.publisher.version or 0
    world.set(version_wait=1000.0)
    assert world.ask("exact", version).status_code == 200
    text = refused(world.ask("exact", version - 1), version)
    assert f"version {version - 1} only" in text
    assert "try again" not in text, "it never comes"
    assert text.endswith(
        f"it does not go back; ask a server that is pinned to version {version - 1}, or for a later version"
    )
    world.post("/deltawire/pin", {"version": version - 1})
    assert world.ask("exact", version - 1).headers[VERSION_HEADER] == str(version - 1)
    text = refused(world.ask("min", version), version - 1)
    assert text.endswith(f"it is pinned to version {version - 1}; ask another server")
    assert world.server.follower.version == version - 1, "a request does not move a pinned server"


@pytest.mark.parametrize("stream", [False, True])
def test_a_sync_during_an_answer_breaks_an_exact_bound(world: World, stream: bool) -> None:
    new = world.publisher.version or 0
    old, answers = new - 1, []
    for kind in ("exact", "min"):
        world.post("/deltawire/pin", {"version": old})
        brake = Brake(world.server.scheduler, 20)
        with ThreadPoolExecutor() as pool:
            asked = pool.submit(world.ask, kind, old, max_tokens=100, ignore_eos=True, stream=stream)
            brake.wait()
            world.post("/deltawire/pin", {"version": new})
            brake.release()
            answers.append(asked.result())
    exact, any_later = answers
    assert any_later.status_code == 200
    if not stream:
        assert any_later.headers[VERSION_HEADER] == f"{old},{new}"
        assert f"(its tokens were made by {old},{new})" in refused(exact, new)
        return
    events = [
        json.loads(line.removeprefix("data: ")) for line in exact.text.split("\n\n") if line.startswith("data: {")
    ]
    assert events[-1]["error"]["version"] == new
    assert not any(choice.get("finish_reason") for event in events[:-1] for choice in event["choices"])
    assert exact.text.endswith("data: [DONE]\n\n")
    assert f'"weight_versions":[{{"version":{old},' in any_later.text
