"""Versions on completions: a header and a field per choice, in plain and streamed responses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from deltawire.engines.live.samples import VersionMiddleware, current, observe, route
from deltawire.engines.names import EXACT_VERSION_HEADER, MIN_VERSION_HEADER, VERSION_HEADER
from deltawire.engines.vllm.endpoint import note_versions


def span(version: str, start: int, end: int) -> SimpleNamespace:
    return SimpleNamespace(version=version, start=start, end=end)


def output(index: int, spans: list[SimpleNamespace] | None, finished: bool = True) -> SimpleNamespace:
    choice = SimpleNamespace(index=index, weight_versions=spans, finish_reason="length" if finished else None)
    return SimpleNamespace(outputs=[choice])


class Engine:
    """Gives what vLLM's engine client gives; `closed` says that whoever stopped reading said so."""

    def __init__(self, *prompts: list[SimpleNamespace]) -> None:
        self._prompts = list(prompts)
        self.closed = 0

    async def generate(self, number: int) -> AsyncIterator[SimpleNamespace]:
        try:
            for item in self._prompts[number]:
                yield item
        finally:
            self.closed += 1


def call(
    engine: Any, app: Any, path: str = "/v1/completions", present: Any = lambda: 7, bound: tuple[str, str] | None = None
) -> tuple[dict, bytes]:
    """Headers and body that a client sees; the status is among the headers."""
    observe(engine, "generate", partial(note_versions, present=present))
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    follower = SimpleNamespace(listeners=set(), pin=None, hurry=lambda seconds: None)
    asked = [(bound[0].encode(), bound[1].encode())] if bound else []
    scope = {"type": "http", "method": "POST", "path": path, "headers": asked}
    asyncio.run(VersionMiddleware(app, present, lambda: follower, 0.05)(scope, None, send))
    assert [m["type"] for m in sent].count("http.response.start") == 1
    body = b"".join(m.get("body", b"") for m in sent[1:])
    headers = {**dict(sent[0]["headers"]), b"status": sent[0]["status"]}
    if b"content-length" in headers:
        assert int(headers[b"content-length"]) == len(body)
    return headers, body


def plain(engine: Any, prompts: int = 1, content: Any = None) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        for number in range(prompts):
            async for _ in engine.generate(number):
                pass
        body = json.dumps(content or {"choices": [{"index": i, "text": "ä"} for i in range(prompts)]}).encode()
        start = {"type": "http.response.start", "status": 200}
        length = (b"content-length", str(len(body)).encode())
        await send({**start, "headers": [(b"content-type", b"application/json"), length]})
        await send({"type": "http.response.body", "body": body})

    return app


def test_a_completion_names_its_versions_token_by_token() -> None:
    engine = Engine([output(0, None, finished=False), output(0, [span("3", 0, 5), span("4", 5, 9)])])
    headers, body = call(engine, plain(engine))
    assert headers[VERSION_HEADER.encode()] == b"3,4"
    expected = [{"version": 3, "start": 0, "end": 5}, {"version": 4, "start": 5, "end": 9}]
    assert json.loads(body)["choices"] == [{"index": 0, "text": "ä", "weight_versions": expected}]


def test_each_prompt_of_a_batch_has_its_own() -> None:
    engine = Engine([output(0, [span("9", 0, 2)])], [output(0, [span("10", 0, 2)])])
    headers, body = call(engine, plain(engine, prompts=2))
    assert headers[VERSION_HEADER.encode()] == b"9,10"
    assert [c["weight_versions"][0]["version"] for c in json.loads(body)["choices"]] == [9, 10]


def test_an_engine_that_names_no_versions_is_named_by_what_it_began_and_ended_with() -> None:
    engine = Engine([output(0, None, finished=False), output(0, None)])
    versions = iter((5, 6, 6))
    headers, body = call(engine, plain(engine), present=lambda: next(versions))
    assert json.loads(body)["choices"][0]["weight_versions"] == [{"version": 5}, {"version": 6}]
    assert headers[VERSION_HEADER.encode()] == b"5,6"


def test_an_error_passes_with_the_present_version() -> None:
    engine = Engine([])
    headers, body = call(engine, plain(engine, prompts=0, content={"error": "no"}))
    assert (headers[VERSION_HEADER.encode()], json.loads(body)) == (b"7", {"error": "no"})


def test_other_routes_are_left_alone() -> None:
    engine = Engine([output(0, [span("3", 0, 1)])])
    headers, body = call(engine, plain(engine), path="/v1/models")
    assert VERSION_HEADER.encode() not in headers
    assert "weight_versions" not in body.decode()


@pytest.mark.parametrize(
    "path", ["/v1/responses", "/v1/messages", "/v1/chat/completions/batch", "/inference/v1/generate", "/tokenize"]
)
def test_a_bound_that_would_not_hold_is_refused(path: str) -> None:
    engine = Engine([output(0, [span("3", 0, 1)])])
    headers, body = call(engine, plain(engine), path=path, bound=(EXACT_VERSION_HEADER, "7"))
    assert headers[b"status"] == 400
    said = json.loads(body)["error"]["message"]
    assert said.startswith(
        f"deltawire-exact-version does not hold for {path}: leave it out, or use POST /v1/completions,"
    )
    assert not engine.closed, "nothing was generated"
    # without one they are answered, and so is a command whatever else its client sends
    assert call(engine, plain(engine), path=path)[0][b"status"] == 200
    assert call(engine, plain(engine), path="/deltawire/pin", bound=(MIN_VERSION_HEADER, "7"))[0][b"status"] == 200


def test_the_prefix_of_a_proxy_is_no_part_of_a_route() -> None:
    assert route({"path": "/v1/completions"}) == "/v1/completions"
    assert route({"path": "/chat/v1/completions", "root_path": "/chat"}) == "/v1/completions"
    assert route({"path": "/chatty/health", "root_path": "/chat"}) == "/chatty/health"


def test_what_is_no_request_is_passed_on() -> None:
    passed: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        passed.append(scope)

    scope = {"type": "lifespan"}
    asyncio.run(VersionMiddleware(app, lambda: None)(scope, None, None))
    assert passed == [scope]


def test_a_bound_on_a_websocket_is_refused() -> None:
    sent: list[dict[str, Any]] = []
    opened: list[Any] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        opened.append(scope["path"])

    for asked in ([(b"deltawire-min-version", b"7")], []):
        scope = {"type": "websocket", "path": "/v1/realtime", "headers": asked}
        asyncio.run(VersionMiddleware(app, lambda: 7)(scope, None, send))
    assert [message["type"] for message in sent] == ["websocket.close"]
    assert opened == ["/v1/realtime"]


@pytest.mark.parametrize("cut", (1, 7, 1000))
def test_the_last_event_of_a_stream_has_the_versions(cut: int) -> None:
    """Wherever the server cuts its chunks."""
    engine = Engine([output(0, None, finished=False), output(0, [span("3", 0, 2)])])
    events = [
        {"choices": [{"index": 0, "text": "a", "finish_reason": None}]},
        {"choices": [{"index": 0, "text": "b", "finish_reason": "length"}]},
        {"choices": [], "usage": {"total_tokens": 2}},
    ]
    lines = [json.dumps(event, separators=(",", ":")) for event in events]
    stream = b"".join(f"data: {line}\n\n".encode() for line in [*lines, "[DONE]"])

    async def app(scope: Any, receive: Any, send: Any) -> None:
        async for _ in engine.generate(0):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        for start in range(0, len(stream), cut):
            await send({"type": "http.response.body", "body": stream[start : start + cut], "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    headers, body = call(engine, app)
    assert headers[VERSION_HEADER.encode()] == b"7"
    first, last, usage, done, end = body.decode().split("\n\n")
    assert json.loads(first.removeprefix("data: ")) == events[0]
    expected = [{"version": 3, "start": 0, "end": 2}]
    assert json.loads(last.removeprefix("data: "))["choices"][0]["weight_versions"] == expected
    assert json.loads(usage.removeprefix("data: ")) == events[2]
    assert (done, end) == ("data: [DONE]", "")


def test_a_client_that_leaves_closes_the_engines_stream() -> None:
    engine = Engine([output(0, None, finished=False)] * 5)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        stream = engine.generate(0)
        async for _ in stream:
            break
        await stream.aclose()

    observe(engine, "generate", partial(note_versions, present=lambda: 7))
    scope = {"type": "http", "method": "POST", "path": "/v1/completions"}
    asyncio.run(VersionMiddleware(app, lambda: 7)(scope, None, None))
    assert engine.closed == 1


# ── requests that accept only some versions ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "header, version, status",
    [
        (MIN_VERSION_HEADER, "7", 200),
        (MIN_VERSION_HEADER, "8", 409),
        (EXACT_VERSION_HEADER, "7", 200),
        (EXACT_VERSION_HEADER, "6", 409),
        (EXACT_VERSION_HEADER, "latest", 400),
    ],
)
def test_a_bound_is_checked_before_the_engine_is_asked(header: str, version: str, status: int) -> None:
    engine = Engine([output(0, [span("7", 0, 2)])])
    headers, body = call(engine, plain(engine), bound=(header, version))
    assert headers[b"status"] == status
    assert headers[VERSION_HEADER.encode()] == b"7"
    assert engine.closed == (status == 200)
    if status != 200:
        assert json.loads(body)["error"]["code"] == status
        assert json.loads(body)["error"].get("version", 7) == 7


def test_a_bound_holds_to_the_last_token() -> None:
    """The version changes between the check and the first token, or later."""
    for spans in ([span("6", 0, 2)], [span("7", 0, 2), span("8", 2, 4)]):
        engine = Engine([output(0, spans)])
        headers, body = call(engine, plain(engine), bound=(EXACT_VERSION_HEADER, "7"))
        assert headers[b"status"] == 409
        assert json.loads(body)["error"]["version"] == 7
        assert "tokens were made by" in json.loads(body)["error"]["message"]
    engine = Engine([output(0, [span("7", 0, 2), span("8", 2, 4)])])
    headers, _ = call(engine, plain(engine), bound=(MIN_VERSION_HEADER, "7"))
    assert (headers[b"status"], headers[VERSION_HEADER.encode()]) == (200, b"7,8")


def test_a_stream_that_breaks_its_bound_ends_with_the_error() -> None:
    engine = Engine([output(0, None, finished=False), output(0, [span("7", 0, 1), span("8", 1, 2)])])
    chosen = [{"index": 0, "text": "a", "finish_reason": None}], [{"index": 0, "text": "b", "finish_reason": "stop"}]
    lines = [json.dumps({"choices": choices}, separators=(",", ":")) for choices in chosen]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        async for _ in engine.generate(0):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        for line in [*lines, "[DONE]"]:
            await send({"type": "http.response.body", "body": f"data: {line}\n\n".encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    _, body = call(engine, app, bound=(EXACT_VERSION_HEADER, "7"))
    first, last, done, _ = body.decode().split("\n\n")
    assert json.loads(first.removeprefix("data: "))["choices"] == chosen[0]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == 409
    assert done == "data: [DONE]"


# ── requests for adapters ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("field", ["model", "lora_path"])
@pytest.mark.parametrize(
    "model, bound, status, version",
    [
        ("policy", "41", 200, b"41"),
        ("policy", "40", 409, b"41"),
        ("policy@40", "40", 200, b"40"),
        ("base", "7", 200, b"7"),
        ("base", "41", 409, b"7"),
    ],
)
def test_a_bound_is_about_the_adapter_that_a_request_names(
    model: str, bound: str, status: int, version: bytes, field: str
) -> None:
    """The engine marks tokens with the version of the base weights, 7; the body comes in two parts and is passed on."""
    engine, answer = Engine([output(0, [span("7", 0, 2)])]), plain(None, prompts=0, content={"choices": [{"index": 0}]})
    observe(engine, "generate", partial(note_versions, present=lambda: 7))
    followed = SimpleNamespace(listeners=set(), pin=None, hurry=lambda seconds: None)
    versions = {"policy": 41, "policy@40": 40}
    body = json.dumps({"model": "base", field: model, "prompt": "t5"}).encode()
    parts = [
        {"type": "http.request", "body": body[:9], "more_body": True},
        {"type": "http.request", "body": body[9:]},
    ]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return parts.pop(0)

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["body"] + (await receive())["body"] == body
        if model in versions and (record := current.get()):
            record.adapter_version = versions[model]
        async for _ in engine.generate(0):
            pass
        await answer(scope, receive, send)

    def find(name: str) -> Any:
        return (followed, lambda: versions[name]) if name in versions else None

    headers = [(EXACT_VERSION_HEADER.encode(), bound.encode())]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
    middleware = VersionMiddleware(app, lambda: 7, lambda: followed, 0.05, adapters=lambda: find)
    asyncio.run(middleware(scope, receive, send))
    assert (sent[0]["status"], dict(sent[0]["headers"])[VERSION_HEADER.encode()]) == (status, version)
    if status == 200:
        [choice] = json.loads(sent[1]["body"])["choices"]
        assert choice["weight_versions"] == [{"version": int(version), "start": 0, "end": 2}]


@pytest.mark.parametrize("adapters, version", [(lambda name: None, b"41"), (None, b"7")])
def test_a_stream_of_another_route_begins_when_it_is_known_who_answers(adapters: Any, version: bytes) -> None:
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        kind = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": kind})
        record = current.get()
        assert record is not None
        record.adapter_version = 41
        for more in (True, False):
            await send({"type": "http.response.body", "body": b"data: {}\n\n", "more_body": more})

    scope = {"type": "http", "method": "POST", "path": "/generate", "headers": []}
    middleware = VersionMiddleware(app, lambda: 7, paths=("/generate",), adapters=lambda: adapters)
    asyncio.run(middleware(scope, None, send))
    assert [message["type"] for message in sent] == ["http.response.start", *["http.response.body"] * 2]
    assert dict(sent[0]["headers"])[VERSION_HEADER.encode()] == version


def test_a_server_without_a_version_sends_no_header() -> None:
    engine = Engine([output(0, None, finished=False)])
    headers, _ = call(engine, plain(engine), present=lambda: None)
    assert VERSION_HEADER.encode() not in headers
