"""The built-in rollout server: start, sockets, signals, shutdown."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from types import FrameType
from typing import Any

import torch
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from ... import StateDigest
from ...store import Store
from ..http import Connections, Server
from ..live import Follower, ServerOptions, access, control, fingerprint, names
from .app import PREPARED_AT_ONCE, build
from .loading import LoadedModel, load_options
from .offload import Offload
from .requests import Reader
from .scheduler import Scheduler

OnVersion = Callable[[int, Mapping[str, float]], object]

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
"""Buckets of the histogram of pauses."""


class RolloutServer:
    """A server with its own socket. `run` blocks until `stop` or a signal; afterwards no thread of it is left."""

    def __init__(
        self,
        options: ServerOptions,
        run: str | Store,
        pin: int | None,
        on_version: OnVersion,
        connections: Connections,
        bound: socket.socket,
        loaded: LoadedModel,
    ) -> None:
        """`bound` is where it listens, `loaded` what it serves: use `open`."""
        self.options, self.loaded, self._socket = options, loaded, bound
        self.scheduler = Scheduler(
            loaded.model,
            lambda: self.follower.version if self.follower.caught_up.is_set() else None,
            options,
            loaded.max_model_len,
        )

        def served(version: int, timings: Mapping[str, float]) -> None:
            self.metrics.pause.observe(timings.get("pause", 0.0))
            on_version(version, timings)

        self.follower = ServerFollower(
            run,
            loaded.model,
            self.scheduler,
            served,
            pin=pin,
            following=options.follow,
            heartbeat=options.heartbeat,
            heartbeats=options.heartbeats or None,
            poll=options.poll,
            id=options.id,
            reference=options.reference,
            address=options.address or access.public_address(options.host, self.port),
            on_failure=self.stop,
        )
        self.metrics = Metrics(self.scheduler, self.follower)
        self.name = options.name or names.model_name(self.follower.replica.url)
        """Name of the model, as clients see it."""
        self.reader = Reader(loaded.tokenizer, loaded.template, loaded.max_model_len, options.max_queue)
        self.offload = Offload(PREPARED_AT_ONCE)
        self.token_text = lru_cache(maxsize=1 << 16)(self._token_text)
        self.max_body = round(options.max_body * 1e6)
        """Bytes of one request."""
        self.held = 0
        """Bytes of request bodies that are in memory."""
        self.started = time.time()
        self._server = _ModelServer(build(self), connections, self.scheduler, options.grace)

    @classmethod
    def open(
        cls,
        options: ServerOptions,
        on_version: OnVersion = lambda version, timings: None,
        *,
        store: Store | None = None,
        connections: Connections | None = None,
    ) -> RolloutServer:
        """Bind the port and load the model; without one, that of the run, once the run has a version.

        on_version   called with each version that is served from now on, and the seconds by phase it took to get there
        store        the run's store, instead of that at `options.run`
        connections  limits on connections; by default the usual ones, for `options.max_connections`
        """
        access.check_guarded(options.host, options.token)
        # before anything that takes long: a port that is taken is reported at once
        bound, run = access.listen(options.host, options.port), store or options.run
        try:
            if options.threads:
                torch.set_num_threads(options.threads)
            connections = connections or Connections(options.max_connections)
            pin = Follower.pinned(run, options.pin)
            return cls(options, run, pin, on_version, connections, bound, load_options(options, run))
        except BaseException:
            bound.close()
            raise

    @property
    def port(self) -> int:
        """The port it listens at."""
        return int(self._socket.getsockname()[1])

    @property
    def health(self) -> tuple[str, str]:
        """State and reason."""
        if not self.scheduler.alive:
            return "failed", "nothing is computed any more; the server's log says why"
        return control.health(self.follower)

    def status(self) -> dict[str, Any]:
        """Return the body of GET /deltawire/status."""
        state, reason = self.health
        scheduler = self.scheduler
        return control.status(
            "builtin",
            self.name,
            self.follower,
            state=state,
            reason=reason,
            is_paused=scheduler.paused,
            kv_policy=scheduler.kv_policy,
            running=scheduler.running,
            waiting=scheduler.waiting,
            counts=scheduler.counts,
            uptime_s=time.time() - self.started,
        )

    def run(self, on_listening: Any = lambda: None) -> None:
        """Serve until `stop` or a signal. Raises the error that ended following the run, or KeyboardInterrupt."""
        self._server.on_listening = on_listening
        self.scheduler.start()
        self.follower.start()
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self.offload.close()
            if self.loaded.template is not None:
                self.loaded.template.close()
            self.scheduler.drain(0)
            self.follower.stop(5.0)
            self._socket.close()
        if self.follower.failure is not None:
            raise self.follower.failure
        if self._server.interrupted:
            raise KeyboardInterrupt

    def stop(self) -> None:
        """Stop the server. May be called from any thread."""
        self._server.should_exit = True

    def _token_text(self, token: int) -> str:
        """The text of a single token."""
        tokenizer = self.loaded.tokenizer
        return f"token_id:{token}" if tokenizer is None else str(tokenizer.decode([token]))


class ServerFollower(Follower):
    """Follows a run with a model of this process: stages beside generation, and writes between two steps of it.

    on_version  called with each version that is served from now on, and the seconds by phase that it took to get there
    """

    def __init__(
        self, run: str | Store, model: Any, scheduler: Scheduler, on_version: OnVersion, **options: Any
    ) -> None:
        super().__init__(run, model, pause=self._pause, **options)
        self._model = model
        self.still = threading.Lock()
        """Held while weights are written, and by readers that need all of them at one version."""
        self._scheduler, self._on_version = scheduler, on_version
        self._served: int | None = None
        self._paused_s = 0.0
        """Seconds without tokens since the last version that was reached, those of writes that failed included."""

    def live(self) -> tuple[int | None, StateDigest]:
        # not replica.lock, which a sync holds while it fetches
        with self.still:
            return self.version, self.target.digest()

    def sha256(self, dtype: str) -> tuple[int | None, str]:
        """Return the version and a hash of the live weights by torch alone, computed while nothing writes them."""
        with self.still:
            return self.version, fingerprint(self._model.state_dict(), dtype, exact=True)

    @contextmanager
    def _pause(self) -> Iterator[None]:
        with self.still, self._scheduler.hold():
            clock, timings = time.perf_counter(), self.replica.timings
            try:
                yield
            finally:
                self._paused_s += time.perf_counter() - clock
                timings["pause"] = self._paused_s

    def arrived(self, version: int) -> None:
        self.caught_up.set()
        # sequences may wait for a version
        self._scheduler.wake()
        if version != self._served:
            self._served, self._paused_s = version, 0.0
            self._on_version(version, dict(self.replica.timings))


class Metrics(control.FollowerMetrics):
    """The figures of GET /metrics. Gauges and counters are read from the scheduler and the follower at each request."""

    def __init__(self, scheduler: Scheduler, follower: ServerFollower) -> None:
        super().__init__(lambda: {"": follower})
        self._scheduler = scheduler
        self.registry = CollectorRegistry()
        self.requests = Counter("deltawire_requests", "Requests answered", ["route", "status"], registry=self.registry)
        self.pause = Histogram(
            "deltawire_pause_seconds", "No token because of a sync", registry=self.registry, buckets=_SECONDS
        )
        self.registry.register(self)

    def collect(self) -> Iterator[Any]:
        yield from super().collect()
        scheduler, counts = self._scheduler, self._scheduler.counts
        for name, text, value in (
            ("paused", "1 while paused by request", scheduler.paused),
            ("sequences_running", "In the batch", scheduler.running),
            ("sequences_waiting", "In the queue", scheduler.waiting),
        ):
            yield GaugeMetricFamily(f"deltawire_{name}", text, float(value))
        for name, text, total in (
            ("prompt_tokens", "Prompt tokens computed", counts.prompt_tokens),
            ("generated_tokens", "Tokens drawn", counts.generated_tokens),
            ("recomputed_tokens", "Tokens computed again under new weights", counts.recomputed_tokens),
            ("steps", "Steps of the batch", counts.steps),
            ("busy_seconds", "Time in steps", counts.busy_s),
            ("sequences_finished", "Ended by themselves", counts.finished),
            ("sequences_aborted", "Ended by a client or a pause", counts.aborted),
            ("sequences_failed", "Ended by an error", counts.failed),
        ):
            yield CounterMetricFamily(f"deltawire_{name}", text, float(total))


class _ModelServer(Server):
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
            # asked a second time: end at once; in a thread, since this one may hold the scheduler's lock
            self.force_exit = True
            threading.Thread(target=self._scheduler.drain, args=(0,), daemon=True).start()
        self.should_exit = True
