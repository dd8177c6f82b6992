"""Label every completion with the versions that made it.

The versions of tokens are picked up where outputs pass from the engine to the server (`observe`). They are written into
the response: a header, and `weight_versions` in every choice.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any

from ..bounds import BadBound, Bound, Following
from ..names import VERSION_HEADER, VERSIONS_FIELD

PATHS = ("/v1/completions", "/v1/chat/completions")

ASKING = ("POST", "PUT")
"""Methods of requests for completions; SGLang takes either."""

CONTROL = ("/deltawire/", "/update_weights")
"""Routes that concern the follower, whatever headers a client sends with all its requests."""

Spans = dict[int, list[dict[str, Any]]]
"""Token ranges and the version of each, by the number of the choice."""


class Record:
    """The versions of the choices of one HTTP request, by `note`."""

    def __init__(self, bound: Bound | None = None) -> None:
        self.bound = bound
        self.spans: Spans = {}
        self.prompts = 0
        self.adapter_version: int | None = None
        """The version of the adapter that makes the answer; None if no followed adapter does."""

    def note(self, choice: int, spans: Sequence[Mapping[str, Any]]) -> None:
        """Note the tokens of a choice: by version, under the name that the engine has for it, from `start` to `end`
        where they are known. Engines mark the tokens of an adapter with the version of the base weights; here they are
        the adapter's."""
        if self.adapter_version is not None:
            ends = {"start": 0, "end": spans[-1]["end"]} if spans and "end" in spans[-1] else {}
            spans = [{"version": self.adapter_version, **ends}] if spans else []
        self.spans[choice] = [{**span, "version": _number(span["version"])} for span in spans]

    def breaks_bound(self, spans: list[dict[str, Any]]) -> bool:
        """Whether a choice has tokens that the request does not accept."""
        return self.bound is not None and not all(self.bound.allows(span["version"]) for span in spans)

    @property
    def header(self) -> str:
        """All versions, in order: `41`, or `41,42` for a completion that a sync went through."""
        versions = {span["version"] for spans in self.spans.values() for span in spans}
        numbers = all(isinstance(version, int) for version in versions)
        return ",".join(str(version) for version in sorted(versions, key=int if numbers else str))


current: ContextVar[Record | None] = ContextVar("deltawire_record", default=None)
"""The record of the HTTP request that is being answered; None for those that are not labelled."""


def _number(version: Any) -> Any:
    """A version as clients see it, from the name that an engine has for it."""
    return int(version) if isinstance(version, str) and version.isdecimal() else version


def observe(owner: Any, method: str, begin: Callable[[Record], Callable[[Any], None]]) -> None:
    """Record versions from the outputs of an engine: `owner.method` returns those of one prompt. For each that is to be
    labelled, `begin` returns what notes an output in the record.

        observe(client, "generate", lambda record: lambda output: record.note(0, output.weight_versions))
    """
    generate = getattr(owner, method)

    def observed(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        record, outputs = current.get(), generate(*args, **kwargs)
        return outputs if record is None else passed_on(outputs, begin(record))

    setattr(owner, method, observed)


async def passed_on(outputs: Any, note: Callable[[Any], None]) -> AsyncIterator[Any]:
    """Pass outputs on, each after `note` was called with it, and close them with this."""
    async with aclosing(outputs) as stream:
        async for output in stream:
            note(output)
            yield output


Adapter = tuple[Following, Callable[[], int | None]]
"""What leads an adapter from version to version, and what returns the version that a request for it gets."""


def route(scope: Any) -> str:
    """Return the path by which a request's route is found: without the prefix of a server behind a proxy."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith(f"{root}/") else path


class VersionMiddleware:
    """Middleware that adds versions to responses, and answers 409 where they are not those that a request accepts.

    Plain ASGI: streams are not delayed. `follower` returns None while there is no run to follow. `adapters` returns
    None if none are followed, else what finds the one that a request names: its bound is about the adapter's versions.
    """

    def __init__(
        self,
        app: Any,
        present: Callable[[], Any],
        follower: Callable[[], Following | None] = lambda: None,
        wait_s: float = 0.0,
        paths: Sequence[str] = PATHS,
        adapters: Callable[[], Callable[[str], Adapter | None] | None] = lambda: None,
    ) -> None:
        self._app, self._present, self._follower, self._wait_s = app, present, follower, wait_s
        self._paths, self._adapters = paths, adapters

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        asks = scope["type"] == "websocket" or (scope["type"] == "http" and scope["method"] in ASKING)
        path = route(scope) if asks else ""
        if not asks or path.startswith(CONTROL):
            await self._app(scope, receive, send)
            return
        labelled = scope["type"] == "http" and path in self._paths
        try:
            bound = Bound.of(scope.get("headers", ()))
            if bound is not None and not labelled:
                # whatever the route does: a bound that does not hold must not seem to
                routes = ", ".join(f"POST {path}" for path in self._paths)
                raise BadBound(f"{bound.header} does not hold for {path[:80]}: leave it out, or use {routes}")
        except BadBound as error:
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008, "reason": str(error)[:120]})
                return
            said = {"message": str(error), "type": "invalid_request_error", "param": None, "code": 400}
            await _send_json(send, 400, {"error": said}, self._present())
            return
        if not labelled:
            await self._app(scope, receive, send)
            return
        follower, present = self._follower(), self._present
        if bound is not None:
            if (adapter := self._adapters()) is not None:
                body, receive = await read_ahead(receive)
                named = (found for name in models(body) if (found := adapter(name)) is not None)
                follower, present = next(named, (follower, present))
            if follower is None or not await bound.reached(follower, present, self._wait_s):
                pin = None if follower is None else follower.pin
                await _send_json(send, 409, bound.refusal(present(), pin=pin), present())
                return
        record = Record(bound)
        token = current.set(record)
        try:
            # other routes begin to answer before it is known which adapter does
            late = path not in PATHS and self._adapters() is not None
            await self._app(scope, receive, _Marked(send, record, present, late))
        finally:
            current.reset(token)


async def read_ahead(receive: Any) -> tuple[bytes, Any]:
    """Read the body of a request. Also returns what gives all messages again."""
    messages, body = [await receive()], b""
    while messages[-1]["type"] == "http.request":
        body += messages[-1].get("body", b"")
        if not messages[-1].get("more_body"):
            break
        messages.append(await receive())

    async def again() -> Any:
        return messages.pop(0) if messages else await receive()

    return body, again


def models(body: bytes) -> list[str]:
    """The model that a request names, and its adapter by SGLang's own field."""
    try:
        asked = json.loads(body)
        return [name for field in ("model", "lora_path") if isinstance(name := asked.get(field), str)]
    except (ValueError, AttributeError, RecursionError):
        return []


async def _send_json(send: Any, status: int, content: Any, version: Any) -> None:
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if version is not None:
        headers.append((VERSION_HEADER.encode(), str(version).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _choices(content: Any) -> list[Any]:
    """The choices of a completion; SGLang's own outputs are choices too."""
    if isinstance(content, list):
        return [item for item in content if isinstance(item, dict) and "meta_info" in item]
    if not isinstance(content, dict):
        return []
    found = [content] if "meta_info" in content else content.get("choices")
    return found if isinstance(found, list) else []


class _Marked:
    """Writes versions into a response on its way out."""

    def __init__(self, send: Any, record: Record, present: Callable[[], Any], late: bool = False) -> None:
        self._send, self._record, self._present, self._late = send, record, present, late
        self._start: Any = None
        self._streams = False
        self._body = b""

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            headers = {name.lower(): value for name, value in message["headers"]}
            self._streams = headers.get(b"content-type", b"").startswith(b"text/event-stream")
            self._start = message
            if self._streams and not self._late:
                await self._begin(self._version(), None)
        elif message["type"] != "http.response.body":
            await self._send(message)
        elif self._streams:
            if self._late:
                # with its first token
                self._late = False
                await self._begin(self._version(), None)
            await self._events(message)
        else:
            self._body += message.get("body", b"")
            if not message.get("more_body"):
                bound, made = self._record.bound, self._record.spans.values()
                if bound and self._start["status"] == 200 and any(map(self._record.breaks_bound, made)):
                    present = self._version()
                    await _send_json(self._send, 409, bound.refusal(present, self._record.header), present)
                    return
                body = self._with_versions(self._body)
                await self._begin(self._record.header or self._version(), len(body))
                await self._send({"type": "http.response.body", "body": body})

    def _version(self) -> Any:
        adapter = self._record.adapter_version
        return self._present() if adapter is None else adapter

    async def _begin(self, version: Any, length: int | None) -> None:
        headers = [(n, v) for n, v in self._start["headers"] if length is None or n.lower() != b"content-length"]
        if version is not None:
            headers.append((VERSION_HEADER.encode(), str(version).encode()))
        if length is not None:
            headers.append((b"content-length", str(length).encode()))
        await self._send({**self._start, "headers": headers})

    async def _events(self, message: Any) -> None:
        """The last event of a choice gets the choice's versions. Events are passed on as soon as they are whole."""
        self._body += message.get("body", b"")
        more = message.get("more_body", False)
        whole, gap, rest = self._body.rpartition(b"\n\n")
        self._body = rest if more else b""
        ready = whole + gap + (b"" if more else rest)
        if b'"finish_reason":"' in ready or b'"finish_reason":{' in ready:
            ready = b"\n\n".join(
                b"data: " + self._with_versions(event.removeprefix(b"data: "), finished=True)
                if event.startswith(b"data: {")
                else event
                for event in ready.split(b"\n\n")
            )
        if ready or not more:
            await self._send({"type": "http.response.body", "body": ready, "more_body": more})

    def _with_versions(self, body: bytes, finished: bool = False) -> bytes:
        try:
            content = json.loads(body)
        except ValueError:
            return body
        choices = _choices(content)
        if not choices or not self._record.spans:
            return body
        for position, choice in enumerate(choices):
            spans = self._record.spans.get(choice.get("index", position))
            if spans is None or (finished and not choice.get("meta_info", choice).get("finish_reason")):
                continue
            if finished and self._record.bound and self._record.breaks_bound(spans):
                content = self._record.bound.refusal(self._version(), self._record.header)
                break
            choice[VERSIONS_FIELD] = spans
        return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
