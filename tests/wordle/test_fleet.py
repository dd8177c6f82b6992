"""Rollout servers that come and go."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import httpx
import pytest
from test_grpo import away

from deltawire_wordle import fleet
from deltawire_wordle.errors import ServerRefused
from deltawire_wordle.fleet import ServerPool, versions_of
from deltawire_wordle.layout import spell


def test_versions_as_the_servers_say_them() -> None:
    assert versions_of({"weight_versions": [{"version": 7, "start": 0, "end": 5}]}) == [7]
    for unnamed in ({}, {"weight_versions": None}, {"weight_versions": [{"version": "initial"}]}):
        with pytest.raises(ServerRefused, match="names no version"):
            versions_of(unnamed)


def completion(request: httpx.Request) -> httpx.Response:
    prompts = json.loads(request.content)["prompt"]
    choices = [
        {
            "index": number,
            "finish_reason": "length",
            "token_ids": spell("crane"),
            "logprobs": {"token_logprobs": [-1.0] * 5},
            "weight_versions": [{"version": 3, "start": 0, "end": 5}],
        }
        for number in range(len(prompts))
    ]
    return httpx.Response(200, json={"choices": choices[::-1]})


def ask(answers: dict[str, Callable[[httpx.Request], httpx.Response]], times: int = 1) -> list[str]:
    """Which hosts were asked, in order, until so many requests were answered."""
    asked: list[str] = []

    def handle(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.host)
        return answers[request.url.host](request)

    async def all_of_it() -> None:
        async with httpx.AsyncClient(transport=httpx.MockTransport(handle)) as client:
            fleet = ServerPool([f"http://{host}" for host in answers], client)
            for _ in range(times):
                samples = await fleet.complete([[1], [1]], 5)
                assert [(sample.guess, versions) for sample, versions in samples] == [("crane", [3])] * 2

    asyncio.run(all_of_it())
    return asked


def test_a_server_that_fails_is_left_alone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(fleet, "REST_S", 600.0)
    assert ask({"a": away, "b": completion}, times=3) == ["a", "b", "b", "b"]
    assert [record.getMessage().split(",")[0] for record in caplog.records] == [
        "rollout server http://a is unavailable"
    ]


def test_a_server_that_comes_back_is_used_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fleet, "REST_S", 0.01)
    answers = iter([away, lambda _: httpx.Response(503, text="not ready, starting"), completion])
    assert ask({"a": lambda request: next(answers)(request)}) == ["a", "a", "a"]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2, "once when it goes, once when it is back"
    assert said[1] == "rollout server http://a is available again"


def test_an_answer_cut_short_by_a_shutdown_is_no_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(request: httpx.Request) -> httpx.Response:
        body = json.loads(completion(request).content)
        body["choices"][0]["finish_reason"] = "abort"
        return httpx.Response(200, json=body)

    assert ask({"a": cut, "b": completion}) == ["a", "b"]


def test_only_versions_that_are_new_enough_are_asked_for() -> None:
    """A server that cannot catch up in time is left alone for a moment, like one that fails."""
    asked: list[tuple[str, str]] = []

    def handle(request: httpx.Request) -> httpx.Response:
        asked.append((request.url.host, request.headers["deltawire-min-version"]))
        return httpx.Response(409, text="has version 6") if request.url.host == "a" else completion(request)

    async def all_of_it() -> None:
        async with httpx.AsyncClient(transport=httpx.MockTransport(handle)) as client:
            await ServerPool(["http://a", "http://b"], client, oldest=lambda: 7).complete([[1]], 5)

    asyncio.run(all_of_it())
    assert asked == [("a", "7"), ("b", "7")]


def test_a_server_that_refuses_ends_it() -> None:
    with pytest.raises(ServerRefused, match="answered 400"):
        ask({"a": lambda _: httpx.Response(400, text="max_tokens")})
