"""The HTTP server of SGLang: its follower, routes and metrics, and the versions of tokens."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from ..live.endpoint import Endpoint
from ..live.samples import PATHS, Record, current, number
from .engine import SglangEngine


class Server(Endpoint):
    """An SGLang server: `attach` before its app starts; it follows from the start of the app on."""

    engine = "sglang"
    paths = (*PATHS, "/generate")

    def __init__(self, manager: Any) -> None:
        super().__init__()
        self._manager = manager
        chosen = manager.server_args.resolved_dict()
        self._listens(chosen["host"], chosen["port"], manager.served_model_name)
        observe(manager)

    def attach(self, app: Any) -> None:
        super().attach(app)
        registry = CollectorRegistry()
        registry.register(self._metrics)
        app.add_middleware(MetricsMiddleware, registry=registry)
        inner = app.router.lifespan_context

        @asynccontextmanager
        async def followed(app: Any) -> AsyncIterator[Any]:
            await self.open(SglangEngine(self._manager, self._settings.policy))
            async with inner(app) as state:
                yield state

        app.router.lifespan_context = followed

    def _end(self) -> None:
        # SGLang would wait for requests to end, which in turn wait for a version
        self._manager.server_status = type(self._manager.server_status).UnHealthy
        os.kill(os.getpid(), signal.SIGTERM)


def observe(manager: Any) -> None:
    """Record versions from the outputs of the schedulers, which mark the tokens of each request that ends."""
    generate = manager.generate_request

    def observed(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        record, outputs = current.get(), generate(*args, **kwargs)
        return outputs if record is None else _noted(outputs, record)

    manager.generate_request = observed


async def _noted(outputs: Any, record: Record) -> AsyncIterator[Any]:
    async with aclosing(outputs) as stream:
        async for output in stream:
            for position, item in enumerate(output if isinstance(output, list) else [output]):
                spans = item["meta_info"].get("weight_versions")
                if spans is not None:
                    record.spans[item.get("index", position)] = [{**s, "version": number(s["version"])} for s in spans]
            yield output


class MetricsMiddleware:
    """Adds our metrics to GET /metrics: SGLang's are those of several processes, or there are none."""

    def __init__(self, app: Any, registry: CollectorRegistry) -> None:
        self._app, self._registry = app, registry

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"].rstrip("/") != "/metrics":
            await self._app(scope, receive, send)
            return
        status, body = 200, b""

        async def keep(message: Any) -> None:
            nonlocal status, body
            status = message.get("status", status)
            body += message.get("body", b"")

        # in the plain format, which can be added to
        headers = [(name, value) for name, value in scope["headers"] if name not in (b"accept", b"accept-encoding")]
        await self._app({**scope, "headers": headers}, receive, keep)
        if status == 404:
            status, body = 200, b""
        body += generate_latest(self._registry) if status == 200 else b""
        headers = [(b"content-type", b"text/plain; version=0.0.4; charset=utf-8")]
        headers.append((b"content-length", str(len(body)).encode()))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})
