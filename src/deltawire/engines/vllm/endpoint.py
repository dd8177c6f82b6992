"""The endpoint plugin of vLLM: routes and metrics of the API server, and its follower."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

from fastapi import FastAPI, Response

from ...errors import Misconfigured
from ..live import Endpoint, Record, lacks_tokenizer, observe
from . import BACKEND_FLAG, NAME
from .adapters import VllmAdapters
from .engine import VllmEngine
from .launch import WITHOUT_TOKENIZER
from .relay import Relay, RelayMiddleware, serve

log = logging.getLogger("deltawire")


class Plugin(Endpoint):
    """What vLLM calls: `attach_router`, then `init_state`."""

    engine = "vllm"
    name = NAME
    required_tasks = ("generate",)

    def __init__(self) -> None:
        super().__init__()
        self._several = False
        """Whether there are several API servers, which another process started."""

    def attach_router(self, app: Any) -> None:
        self.attach(app)
        app.add_middleware(RelayMiddleware, relay=lambda: self.elsewhere)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        if engine_client is None:
            return
        parallel = getattr(engine_client.vllm_config, "parallel_config", None)
        if getattr(parallel, "local_engines_only", False) and engine_client.vllm_config.model_config.is_moe:
            raise Misconfigured(
                "all data-parallel ranks of experts must switch together, and this server knows only some of them: "
                "start vllm serve without --data-parallel-rank and without external or hybrid load balancing"
            )
        backend = getattr(engine_client.vllm_config.weight_transfer_config, "backend", None)
        if backend != NAME and self.options.run:
            raise Misconfigured(f"this server cannot follow {self.options.run}: start it with {BACKEND_FLAG}")
        if backend != NAME and not self.options.adapters:
            log.warning("this server can follow no run: start it with %s", BACKEND_FLAG)
        model = (args.served_model_name or [args.model])[0]
        if getattr(args, "uds", None):
            # a Unix socket: for clients of this machine, and no address for others
            self.listens("127.0.0.1", None, model)
        else:
            self.listens(getattr(args, "host", None), getattr(args, "port", None) or 8000, model)
        observe(engine_client, "generate", partial(note_versions, present=self.version))
        self._several = several = (getattr(args, "api_server_count", None) or 1) > 1
        if several and self.options.adapters:
            raise Misconfigured("adapters are followed by one API server: start vllm serve with --api-server-count 1")
        if self.options.adapters and getattr(parallel, "nnodes", 1) > 1:
            raise Misconfigured("adapters are written to a folder that all ranks read: serve them on one node")
        if several and engine_client.engine_core.client_index:
            self.elsewhere = relay = Relay()
            await relay.connect()
            return
        if not getattr(args, "skip_tokenizer_init", False) and lacks_tokenizer(args.tokenizer or args.model):
            log.warning(
                '%s has no tokenizer, so vLLM made up an empty one: every answer has the text "". Start it with '
                "--tokenizer NAME, or with %s to serve token ids",
                args.tokenizer or args.model,
                " ".join(WITHOUT_TOKENIZER),
            )
        await self.open(VllmEngine(engine_client, self.options))
        if self.options.adapters:
            self.follow_adapters(partial(VllmAdapters, engine_client, state.openai_serving_models))
        if several:
            others = FastAPI()
            others.add_api_route("/health", lambda: Response(status_code=200), methods=["GET"])
            self.attach_routes(others)
            serve(others)

    def end(self) -> None:
        parent = multiprocessing.parent_process()
        if self._several and parent is not None:
            # it ends all of them, and the engines; if this one ended alone, the others would go on
            os.kill(parent.pid or os.getpid(), signal.SIGTERM)
        else:
            super().end()


def note_versions(record: Record, present: Callable[[], Any]) -> Callable[[Any], None]:
    """What notes the versions of one prompt's tokens, which the engine marks since vLLM 0.32. `present` returns the
    version to use where it marks none."""
    first = present()
    prompt, record.prompts = record.prompts, record.prompts + 1

    def note(output: Any) -> None:
        for choice in output.outputs:
            spans = getattr(choice, "weight_versions", None)
            if spans is not None:
                found = [{"version": s.version, "start": s.start, "end": s.end} for s in spans]
            elif choice.finish_reason is not None:
                # no more is known than what it began and ended with
                found = [{"version": version} for version in dict.fromkeys((first, present()))]
            else:
                continue
            record.note(prompt * len(output.outputs) + choice.index, found)

    return note


def make() -> Plugin:
    """Entry point `vllm.endpoint_plugins`."""
    return Plugin()
