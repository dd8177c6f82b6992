"""Start a server, keep it up, end it: sockets, signals, threads."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from ...bucket.references import resolver
from ...bucket.run import Run
from ...bucket.versions import resolve
from ...core.errors import RunNotFound
from ...store import Store
from ..access import check_guarded
from ..http import Connections, Server, listen
from ..names import model_name
from .app import Service, build
from .follower import Follower, Sync
from .loading import Loaded, as_folder, dtype_of, load
from .metrics import Metrics
from .sampling import LogprobsMode
from .scheduler import KvPolicy, Limits, Scheduler

log = logging.getLogger("deltawire")


@dataclass(frozen=True, slots=True)
class Options:
    """Everything `deltawire serve` can be told."""

    run: str | Store
    model: str | None = None
    """A checkpoint folder or hub id; None takes config, tokenizer and weights from the run."""
    pin: int | None = None
    """Stay at this version."""
    host: str = "127.0.0.1"
    port: int = 8000
    """0: any that is free."""
    name: str | None = None
    """Of the model, for clients."""
    dtype: str = "auto"
    device: str = "cpu"
    threads: int | None = None
    """Threads of torch."""
    limits: Limits = field(default_factory=Limits)
    max_model_len: int | None = None
    kv_policy: KvPolicy = "clear"
    logprobs_mode: LogprobsMode = "raw_logprobs"
    poll: float = 1.0
    id: str | None = None
    """Of the replica, as `deltawire log` shows it."""
    reference: Path | None = None
    token: str | None = field(default=None, repr=False)
    """Bearer token of the control routes."""
    guard_all: bool = False
    """The token is needed for every route but /health."""
    max_body: int = 8 << 20
    """Bytes of one request."""
    request_timeout: float = 600.0
    """Seconds for an answer."""
    connections: Connections = field(default_factory=Connections)
    grace: float = 5.0
    """Seconds that running requests get when the server is told to end."""


class RolloutServer:
    """A server with its own socket. `run` blocks until `stop` or a signal; afterwards no thread of it is left."""

    def __init__(self, options: Options, on_sync: Callable[[Sync], None] = lambda sync: None) -> None:
        check_guarded(options.host, options.token)
        # before anything that takes long: a port that is taken says so at once
        self._socket = listen(options.host, options.port)
        try:
            self._prepare(options, on_sync)
        except BaseException:
            self._socket.close()
            raise

    def _prepare(self, options: Options, on_sync: Callable[[Sync], None]) -> None:
        if options.threads:
            torch.set_num_threads(options.threads)
        loaded = _load(options)
        limits = Limits(
            options.limits.max_batch, options.limits.max_queue, options.limits.kv_memory, loaded.max_model_len
        )
        metrics = Metrics()
        # the follower knows the version, and needs the scheduler to hold still
        self.scheduler = Scheduler(
            loaded.model,
            lambda: self.follower.version if self.follower.caught_up.is_set() else None,
            limits=limits,
            kv_policy=options.kv_policy,
            logprobs_mode=options.logprobs_mode,
        )

        def synced(sync: Sync) -> None:
            metrics.synced(sync)
            self.scheduler.wake()
            on_sync(sync)

        self.follower = Follower(
            options.run,
            loaded.model,
            hold=self.scheduler.hold,
            pin=options.pin,
            poll=options.poll,
            id=options.id,
            reference=options.reference,
            on_sync=synced,
            on_failure=self.stop,
        )
        metrics.watch(self.scheduler, self.follower)
        name = options.name or model_name(self.follower.replica.url)
        self.service = Service(options, name, loaded, self.scheduler, self.follower, metrics)
        self._server = _Server(build(self.service), options.connections, self.scheduler, options.grace)

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    def run(self, on_listening: Callable[[], None] = lambda: None) -> None:
        """Serve until told to end. Raises what made following the run impossible, or KeyboardInterrupt."""
        self._server.on_listening = on_listening
        self.scheduler.start()
        self.follower.start()
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self.service.close()
            self.scheduler.drain(0)
            self.follower.stop()
            self._socket.close()
        if self.follower.failure is not None:
            raise self.follower.failure
        if self._server.interrupted:
            raise KeyboardInterrupt

    def stop(self) -> None:
        """Ask it to end; from any thread."""
        self._server.should_exit = True


class _Server(Server):
    def __init__(self, app: Any, connections: Connections, scheduler: Scheduler, grace: float) -> None:
        super().__init__(app, connections, grace=grace + 5)
        self._scheduler, self._grace = scheduler, grace
        self.interrupted = False

    async def shutdown(self, sockets: Any = None) -> None:
        # open connections end when their sequences do
        drained = asyncio.create_task(asyncio.to_thread(self._scheduler.drain, self._grace))
        await super().shutdown(sockets)
        await drained

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.interrupted |= sig == signal.SIGINT
        if self.should_exit:
            # the second time they mean it; in a thread, for this one may hold the scheduler's lock right now
            self.force_exit = True
            threading.Thread(target=self._scheduler.drain, args=(0,), daemon=True).start()
        self.should_exit = True


def _load(options: Options) -> Loaded:
    run = cache(lambda: _wait_for(options.run, options.poll))
    # waited for only where it has to say something
    source: AbstractContextManager[str | Path | None] = nullcontext(options.model)
    if options.model is None:
        pin = None if options.pin is None else resolve(run(), options.pin)
        source = as_folder(run(), pin, resolver(options.reference))
    dtype = _dtype(options, run)
    with source as model:
        return load(str(model), dtype=dtype, device=options.device, max_model_len=options.max_model_len)


def _dtype(options: Options, run: Callable[[], Run]) -> torch.dtype:
    """On a CPU, which has no fast 16-bit product, the weights may be wider than the run's (replica/target.py)."""
    if options.dtype != "auto":
        return getattr(torch, options.dtype)  # type: ignore[no-any-return]
    if torch.device(options.device).type == "cpu":
        return torch.float32
    return dtype_of(run().schema)


def _wait_for(where: str | Store, poll: float) -> Run:
    """The run, once it has a version."""
    told = False
    while True:
        try:
            run = Run.open(where)
            if run.newest() is not None:
                return run
            reason = f"the run at {run.store.url} has no version yet"
        except RunNotFound as error:
            reason = str(error)
        if not told:
            log.warning("%s; waiting for it", reason)
        told = True
        time.sleep(poll)
