"""The HTTP server of SGLang: its follower, routes and metrics, and the versions of tokens."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import HTTPException, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry, generate_latest

from ..live.endpoint import Endpoint
from ..live.samples import PATHS, Record, models, number, observe, read_ahead, route
from .adapters import SglangAdapters
from .engine import SglangEngine

WEIGHTS = (
    "/update_weights_from_", "/update_weight_version", "/begin_weight_update", "/end_weight_update",
    "/release_memory_occupation", "/resume_memory_occupation",
)  # fmt: skip
"""How routes of SGLang begin that change weights, where they are, or their label."""

ADAPTERS = ("/load_lora_adapter", "/unload_lora_adapter")
"""How routes of SGLang begin that load or drop adapters."""

GUARDED = ("/pause_generation", "/continue_generation", "/weights_checker")
"""Routes of SGLang that need the token: they stop generation, or may write random weights."""

BASE_ONLY = (
    "/v1/responses", "/v1/score", "/v1/rerank", "/v1/classify",
    os.environ.get("SGLANG_OLLAMA_CHAT_ROUTE", "/api/chat"),
    os.environ.get("SGLANG_OLLAMA_GENERATE_ROUTE", "/api/generate"),
)  # fmt: skip
"""Routes that SGLang answers with the base model, also where a request names an adapter as its model."""


class SGLangServer(Endpoint):
    """An SGLang server: `attach` before its app starts; it follows from the start of the app on."""

    engine = "sglang"
    paths = (*PATHS, "/generate")

    def __init__(self, manager: Any) -> None:
        super().__init__()
        self._manager = manager
        chosen = manager.server_args.resolved_dict()
        self._listens(chosen["host"], chosen["port"], manager.served_model_name)
        observe(manager, "generate_request", lambda record: partial(_note, record))

    def attach(self, app: Any) -> None:
        super().attach(app)
        registry = CollectorRegistry()
        registry.register(self._metrics)
        app.add_middleware(MetricsMiddleware, registry=registry)
        app.add_middleware(OwnRoutesMiddleware, refuse=self._refuse)
        inner = app.router.lifespan_context

        @asynccontextmanager
        async def followed(app: Any) -> AsyncIterator[Any]:
            await self.open(SglangEngine(self._manager, self._options))
            if self._options.adapters:
                self._follow_adapters(partial(SglangAdapters, self._manager), registry)
            async with inner(app) as state:
                yield state

        app.router.lifespan_context = followed

    def _refuse(self, request: Request, named: list[str]) -> None:
        """Raise HTTPException for routes of SGLang's own that would change weights or labels beside the follower, pause
        the server without leave, or answer with another model than a request asks for (`named`)."""
        if self._follower is None and self._adapters is None:
            return
        path = route(request.scope)
        if path.startswith(WEIGHTS):
            if self._follower is None:
                raise HTTPException(409, "this server follows adapters, which fit only the weights it was started with")
            raise HTTPException(409, f"this server follows {self._follower.replica.url}, which its weights come from")
        if self._adapters is not None and path.startswith(ADAPTERS):
            followed = ", ".join(self._adapters.followers)
            raise HTTPException(409, f"this server follows adapters ({followed}): name others in DELTAWIRE_ADAPTERS")
        if path in GUARDED:
            self._authorize(request)
        if self._adapters is not None and path in BASE_ONLY:
            # `base:policy` is SGLang's, `policy:latest` Ollama's way to name it
            parts = (part.strip() for name in named if name != self._model for part in name.split(":"))
            if asked := next(filter(self._adapters.followed, parts), None):
                message = f"{path} is answered by the base model alone: ask for {asked} at {', '.join(self.paths)}"
                said = {"message": message, "type": "invalid_request_error", "param": "model", "code": 400}
                raise HTTPException(400, {"error": said})

    def _end(self) -> None:
        # SGLang would wait for requests to end, which in turn wait for a version
        self._manager.server_status = type(self._manager.server_status).UnHealthy
        os.kill(os.getpid(), signal.SIGTERM)


class OwnRoutesMiddleware:
    """Asks `refuse` about requests to SGLang's own routes, with the models that they name where that matters."""

    def __init__(self, app: Any, refuse: Callable[[Request, list[str]], None]) -> None:
        self._app, self._refuse = app, refuse

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        answer = self._app
        if scope["type"] == "http":
            body = b""
            if route(scope) in BASE_ONLY:
                body, receive = await read_ahead(receive)
            try:
                self._refuse(Request(scope), models(body))
            except HTTPException as error:
                said: Any = error.detail
                answer = JSONResponse(said if isinstance(said, dict) else {"detail": said}, error.status_code)
        await answer(scope, receive, send)


def _note(record: Record, output: Any) -> None:
    """Note the versions that schedulers mark the tokens of each request with when it ends."""
    for position, item in enumerate(output if isinstance(output, list) else [output]):
        spans = item["meta_info"].get("weight_versions")
        if spans is None:
            continue
        if (adapter := record.adapter_version) is not None:
            # SGLang marks tokens with the version of the base weights
            spans = [{"version": str(adapter), "start": 0, "end": spans[-1]["end"]}] if spans else []
        record.spans[item.get("index", position)] = [{**s, "version": number(s["version"])} for s in spans]


class MetricsMiddleware:
    """Adds our metrics to GET /metrics: SGLang's are those of several processes, or there are none."""

    def __init__(self, app: Any, registry: CollectorRegistry) -> None:
        self._app, self._registry = app, registry

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or route(scope).rstrip("/") != "/metrics":
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
        await Response(body, status, media_type="text/plain; version=0.0.4")(scope, receive, send)
