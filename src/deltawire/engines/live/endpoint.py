"""A server that follows a run: the follower's thread, its routes and metrics, and versions on samples."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import signal
import threading
from collections.abc import Callable, Collection
from typing import Any, ClassVar

from fastapi import HTTPException, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest

from ...bucket.versions import split_version
from ...core.errors import DeltawireError
from .. import control, names
from ..access import is_bearer, is_loopback, public_address
from ..bounds import Following
from ..follower import Follower
from ..options import ServerOptions
from .adapters import Adapters
from .engine import Engine
from .follower import EngineFollower
from .samples import PATHS, VersionMiddleware, models, read_ahead, route
from .target import EngineTarget
from .tested import untested

log = logging.getLogger("deltawire")

MAX_LEASE_S = 86400
"""Seconds that a version of an adapter may be kept by one request for it."""


Refuse = Callable[[Request, str, list[str]], None]
"""Raises HTTPException to refuse a request, given its path and the models that it names."""


class Endpoint:
    """The answers of a server with a follower. Each engine extends it, in the process that answers its clients:

        listens            where the server listens, and the name of its model; first of all
        attach             before the app starts: routes, versions on completions; also show_metrics and ask_first
        open               in the event loop of the app, with the engine's own `Engine`: generation is held, then the
                           follower starts
        follow_adapters    then, where `options.adapters` names some

    `observe` notes the versions of tokens.
    """

    engine: ClassVar[str]
    """The engine's name in /deltawire/status."""
    paths: ClassVar[tuple[str, ...]] = PATHS
    """Routes whose answers are labelled with versions."""

    def __init__(self) -> None:
        self.options = ServerOptions.read()
        self.follower: EngineFollower | None = None
        self._target: EngineTarget | None = None
        self.elsewhere: Following | None = None
        """Leads this server where its follower is in another process."""
        self._run = ""
        """Address of the run that is followed, as it was written."""
        self.adapters: Adapters | None = None
        self._host: str | None = None
        self._address = ""
        """Where clients reach this server."""
        self.model = ""
        """The clients' name for the model."""
        self._beginning = threading.Lock()
        """Held while the first run is chosen: requests come in several threads, each with an event loop."""
        self.metrics = control.FollowerMetrics(lambda: {"": self.follower} if self.follower else {})
        # beside the engine's own on /metrics
        REGISTRY.register(self.metrics)

    def attach(self, app: Any) -> None:
        """Add routes, and versions on completions."""
        self.attach_routes(app)
        app.add_middleware(
            VersionMiddleware,
            present=self.version,
            follower=self._leader,
            wait_s=self.options.version_wait,
            paths=self.paths,
            adapters=lambda: self.adapters and self.adapters.followed,
        )

    def show_metrics(self, app: Any, registry: CollectorRegistry) -> None:
        """Add these metrics to the engine's GET /metrics, where that is not this process's own registry."""
        app.add_middleware(MetricsMiddleware, registry=registry)

    def ask_first(self, app: Any, refuse: Refuse, naming_models: Collection[str] = ()) -> None:
        """Have `refuse` called for every request. The models that it names are read on some routes alone."""
        app.add_middleware(OwnRoutesMiddleware, refuse=refuse, naming_models=naming_models)

    def attach_routes(self, app: Any) -> None:
        router = control.routes(
            self._followed, self._status, self.authorize, lambda: self.adapters.followers if self.adapters else {}
        )
        router.add_api_route("/update_weights", self.update_weights, methods=["POST"])
        router.add_api_route("/deltawire/lease", self.lease, methods=["POST"])
        app.include_router(router)
        app.add_middleware(HealthMiddleware, health=self._health)

    def listens(self, host: str | None, port: int | None, model: str) -> None:
        """Note where the server listens, without a port where that is no address, and what clients call the model."""
        self._host, self.model = host, model
        self._address = self.options.address or (public_address(host, port) if port else "")
        if not self.options.run and not self.options.adapters:
            log.info("no run to follow yet: set DELTAWIRE_RUN, or name one to POST /update_weights")
        if not self.options.token and not is_loopback(host):
            log.warning("this server refuses pin and sync: set DELTAWIRE_TOKEN, or start it with --host 127.0.0.1")

    async def open(self, engine: Engine) -> None:
        """Begin to follow, in the event loop of the engine's server. Generation is held until the weights are known."""
        if warning := untested(self.engine):
            log.warning("%s", warning)
        self._target = EngineTarget(engine, asyncio.get_running_loop())
        if self.options.run:
            await self._target.hold()
            self._begin(self.options.run, self._target)

    def _begin(self, run: str, target: EngineTarget) -> EngineFollower:
        config, self._run = self.options, run
        self.follower = EngineFollower(
            run,
            target,
            pin=Follower.pinned(run, config.pin),
            # a run named by a trainer is a trainer's to drive
            following=config.follow and bool(config.run),
            reference=config.reference,
            heartbeat=config.heartbeat,
            heartbeats=(config.run and config.heartbeats) or None,
            address=self._address,
            poll=config.poll,
            on_failure=self.end,
        )
        if config.run:
            self.follower.start()
            # a server that ends in order takes its address out of the heartbeat
            atexit.register(self.follower.stop, 5.0)
        return self.follower

    def follow_adapters(self, make: Callable[..., Adapters], registry: CollectorRegistry = REGISTRY) -> None:
        """Follow the runs of adapters, with the engine's own kind of `Adapters`."""
        config = self.options
        named = {name: split_version(text) for name, text in config.adapters.items()}
        self.adapters = make(
            {name: run for name, (run, _) in named.items()},
            pins={name: Follower.pinned(run, version, "DELTAWIRE_ADAPTERS") for name, (run, version) in named.items()},
            base=lambda: self.follower,
            keep=config.adapters_keep,
            heartbeat=config.heartbeat,
            address=self._address,
            poll=config.poll,
        )
        followers = self.adapters.followers
        registry.register(control.FollowerMetrics(lambda: followers, "adapter"))
        self.adapters.start()
        atexit.register(self.adapters.stop, 5.0)

    # ── routes ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def update_weights(self, request: Request) -> dict[str, Any]:
        """Go to a version on request of a trainer: {"run": …, "version": …}, plain or as vLLM's `update_info`."""
        self.authorize(request)
        info = await control.read(request, {"run", "version"})
        run, version = info.get("run"), info.get("version")
        if self.follower is None:
            if not isinstance(run, str) or not run:
                raise HTTPException(400, "this server follows no run yet: name one")
            if self._target is None:
                raise HTTPException(503, "the engine is not ready")
            with self._beginning:
                try:
                    first = self._begin(run, self._target) if self.follower is None else None
                except DeltawireError as error:
                    raise control.refusal(error) from error
            if first is not None:
                try:
                    return await control.command(first, version, self._status)
                except HTTPException:
                    if first.state == "starting":
                        # it cannot be followed: the server stays free for another
                        self.follower = None
                    raise
        follower = self._followed()
        if run is not None and run.rstrip("/") not in (self._run.rstrip("/"), follower.replica.url.rstrip("/")):
            raise HTTPException(409, f"this server follows {follower.replica.url}; another run needs another server")
        return await control.command(follower, version, self._status)

    async def lease(self, request: Request) -> dict[str, Any]:
        """Keep a version of an adapter loaded for some time: {"adapter": "policy", "version": 41, "seconds": 600}."""
        self.authorize(request)
        info = await control.read(request, {"adapter", "version", "seconds"})
        name, version, seconds = info.get("adapter"), info.get("version"), info.get("seconds")
        if not isinstance(name, str):
            raise HTTPException(400, "name an adapter")
        if self.adapters is None or name not in self.adapters.followers:
            raise HTTPException(404, f"this server follows no adapter {name!r:.100}")
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= MAX_LEASE_S:
            raise HTTPException(400, f"name up to {MAX_LEASE_S} seconds; 0 ends a lease")
        if type(version) is not int:
            raise HTTPException(400, "name a version by its number")
        try:
            self.adapters.lease(name, version, seconds)
        except DeltawireError as error:
            raise control.refusal(error) from error
        return {"model": f"{name}@{version}", "seconds": seconds}

    # ── the rest ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _followed(self) -> EngineFollower:
        if self.follower is None:
            raise HTTPException(409, "this server follows no run: set DELTAWIRE_RUN, or name one to /update_weights")
        return self.follower

    def _status(self) -> dict[str, Any]:
        more: dict[str, Any] = {}
        if self.follower is not None:
            more |= {"guard": self.follower.target.guard, "draft": self.follower.draft}
        if self.adapters is not None:
            more["state"], more["reason"] = self._health()
            more["adapters"] = self.adapters.status()
        return control.status(self.engine, self.model, self.follower, **more)

    def _health(self) -> tuple[str, str]:
        found = control.health(self.follower)
        return found if self.adapters is None else self.adapters.health(*found)

    def authorize(self, request: Request) -> None:
        """Control routes change what is served. Without a token only processes of this machine may use them."""
        if not self.options.token:
            if not is_loopback(self._host):
                raise HTTPException(403, "set DELTAWIRE_TOKEN to control a server that listens beyond this machine")
            return
        if not is_bearer(request.headers.get("authorization", ""), self.options.token):
            raise HTTPException(401, "this route needs the header 'Authorization: Bearer <DELTAWIRE_TOKEN>'")

    def end(self) -> None:
        """End the server: it cannot load the run that it should follow, and its clients would wait forever."""
        os.kill(os.getpid(), signal.SIGTERM)

    def _leader(self) -> Following | None:
        """The follower of this server."""
        return self.follower or self.elsewhere

    def version(self) -> int | None:
        """The version that tokens are labelled with. In host memory it is proven only after the pause."""
        if self.elsewhere is not None:
            return self.elsewhere.version
        return self.follower.target.named if self.follower is not None else None


class HealthMiddleware:
    """Answers GET /health with 503 while the weights are no known version; otherwise the engine answers. The same for
    SGLang's /health_generate, which would wait for a token and then take the server for broken."""

    def __init__(self, app: Any, health: Callable[[], tuple[str, str]]) -> None:
        self._app, self._health = app, health

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or route(scope) not in ("/health", "/health_generate"):
            await self._app(scope, receive, send)
            return
        answer: list[Any] = []
        state, reason = self._health()
        if state in (*names.SERVING, "idle"):

            async def keep(message: Any) -> None:
                answer.append(message)

            await self._app(scope, receive, keep)
        if answer and answer[0]["status"] != 200:
            for message in answer:
                await send(message)
            return
        await JSONResponse(names.health(state, reason), 200 if answer else 503)(scope, receive, send)


class OwnRoutesMiddleware:
    """Asks `refuse` about requests to an engine's own routes, with the models that they name where that matters."""

    def __init__(self, app: Any, refuse: Refuse, naming_models: Collection[str]) -> None:
        self._app, self._refuse, self._naming_models = app, refuse, naming_models

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        answer = self._app
        if scope["type"] == "http":
            path, body = route(scope), b""
            if path in self._naming_models:
                body, receive = await read_ahead(receive)
            try:
                self._refuse(Request(scope), path, models(body))
            except HTTPException as error:
                said: Any = error.detail
                answer = JSONResponse(said if isinstance(said, dict) else {"detail": said}, error.status_code)
        await answer(scope, receive, send)


class MetricsMiddleware:
    """Adds metrics to an engine's GET /metrics, which may show those of several processes, or none."""

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
