"""The HTTP server of SGLang: its follower, routes and metrics, and the versions of tokens."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import HTTPException, Request
from prometheus_client import CollectorRegistry

from ..live import Endpoint, Record, observe
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
    paths = (*Endpoint.paths, "/generate")

    def __init__(self, manager: Any) -> None:
        super().__init__()
        self._manager = manager
        chosen = manager.server_args.resolved_dict()
        self.listens(chosen["host"], chosen["port"], manager.served_model_name)
        observe(manager, "generate_request", lambda record: partial(_note, record))

    def attach(self, app: Any) -> None:
        super().attach(app)
        registry = CollectorRegistry()
        registry.register(self.metrics)
        self.show_metrics(app, registry)
        self.ask_first(app, self._refuse, naming_models=BASE_ONLY)
        inner = app.router.lifespan_context

        @asynccontextmanager
        async def followed(app: Any) -> AsyncIterator[Any]:
            await self.open(SglangEngine(self._manager, self.options))
            if self.options.adapters:
                self.follow_adapters(partial(SglangAdapters, self._manager), registry)
            async with inner(app) as state:
                yield state

        app.router.lifespan_context = followed

    def _refuse(self, request: Request, path: str, named: list[str]) -> None:
        """Raise HTTPException for routes of SGLang's own that would change weights or labels beside the follower, pause
        the server without leave, or answer with another model than a request asks for (`named`)."""
        if self.follower is None and self.adapters is None:
            return
        if path.startswith(WEIGHTS):
            if self.follower is None:
                raise HTTPException(409, "this server follows adapters, which fit only the weights it was started with")
            raise HTTPException(409, f"this server follows {self.follower.replica.url}, which its weights come from")
        if self.adapters is not None and path.startswith(ADAPTERS):
            followed = ", ".join(self.adapters.followers)
            raise HTTPException(409, f"this server follows adapters ({followed}): name others in DELTAWIRE_ADAPTERS")
        if path in GUARDED:
            self.authorize(request)
        if self.adapters is not None and path in BASE_ONLY:
            # `base:policy` is SGLang's, `policy:latest` Ollama's way to name it
            parts = (part.strip() for name in named if name != self.model for part in name.split(":"))
            if asked := next(filter(self.adapters.followed, parts), None):
                message = f"{path} is answered by the base model alone: ask for {asked} at {', '.join(self.paths)}"
                said = {"message": message, "type": "invalid_request_error", "param": "model", "code": 400}
                raise HTTPException(400, {"error": said})

    def end(self) -> None:
        # SGLang would wait for requests to end, which in turn wait for a version
        self._manager.server_status = type(self._manager.server_status).UnHealthy
        os.kill(os.getpid(), signal.SIGTERM)


def _note(record: Record, output: Any) -> None:
    """Note the versions that schedulers mark the tokens of each request with when it ends."""
    for position, item in enumerate(output if isinstance(output, list) else [output]):
        spans = item["meta_info"].get("weight_versions")
        if spans is not None:
            record.note(item.get("index", position), spans)
