"""Prometheus metrics of the built-in server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from ..control import FollowerMetrics
from ..follower import Follower
from .scheduler import Scheduler

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class Metrics(FollowerMetrics):
    """What GET /metrics shows. Gauges and counters are read from the scheduler and the follower at each request."""

    def __init__(self, scheduler: Scheduler, follower: Follower) -> None:
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
