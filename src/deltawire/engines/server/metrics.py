"""Figures for Prometheus, read from the parts that keep them whenever somebody asks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from ..names import STATES
from .follower import Follower, Sync
from .scheduler import Scheduler

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter("deltawire_requests", "Requests answered", ["route", "status"], registry=self.registry)
        self._pause = Histogram(
            "deltawire_pause_seconds", "No token because of a sync", registry=self.registry, buckets=_SECONDS
        )
        self._syncs = Counter("deltawire_syncs", "Versions reached", registry=self.registry)

    def synced(self, sync: Sync) -> None:
        self._syncs.inc()
        self._pause.observe(sync.pause_s)

    def watch(self, scheduler: Scheduler, follower: Follower) -> None:
        self.registry.register(_Live(scheduler, follower))


class _Live(Collector):
    def __init__(self, scheduler: Scheduler, follower: Follower) -> None:
        self._scheduler, self._follower = scheduler, follower

    def collect(self) -> Iterator[Any]:
        replica, counts = self._follower.replica, self._scheduler.counts
        gauges = {
            "version": ("The version that is served", replica.version),
            "newest_version": ("Newest version known", replica.newest),
            "lag_versions": ("Versions behind the newest one known", replica.lag),
            "paused": ("1 while paused by request", self._scheduler.paused),
            "sequences_running": ("In the batch", self._scheduler.running),
            "sequences_waiting": ("In the queue", self._scheduler.waiting),
        }
        for name, (text, value) in gauges.items():
            if value is not None:
                yield GaugeMetricFamily(f"deltawire_{name}", text, float(value))
        states = GaugeMetricFamily("deltawire_state", "1 for the state the server is in", labels=["state"])
        for state in STATES:
            states.add_metric([state], float(self._follower.state == state))
        yield states
        seconds = GaugeMetricFamily("deltawire_sync_seconds", "The last sync, by phase", labels=["phase"])
        for phase, value in self._follower.last.phases.items() if self._follower.last else ():
            seconds.add_metric([phase], value)
        yield seconds
        totals = {
            "failures": ("Syncs that failed or were taken back", self._follower.replica.failures),
            "prompt_tokens": ("Prompt tokens computed", counts.prompt_tokens),
            "generated_tokens": ("Tokens drawn", counts.generated_tokens),
            "recomputed_tokens": ("Tokens computed again under new weights", counts.recomputed_tokens),
            "steps": ("Steps of the batch", counts.steps),
            "busy_seconds": ("Time in steps", counts.busy_s),
            "sequences_finished": ("Ended by themselves", counts.finished),
            "sequences_aborted": ("Ended by a client or a pause", counts.aborted),
            "sequences_failed": ("Ended by an error", counts.failed),
        }
        for name, (text, value) in totals.items():
            yield CounterMetricFamily(f"deltawire_{name}", text, float(value))
