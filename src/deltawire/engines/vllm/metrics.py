"""What Prometheus sees, beside vLLM's own on /metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from ..names import STATES
from .follower import EngineFollower


class Metrics:
    """Read from the follower when asked: nothing to keep in step."""

    def __init__(self, follower: Callable[[], EngineFollower | None]) -> None:
        self._follower = follower
        REGISTRY.register(self)  # type: ignore[arg-type]

    def collect(self) -> Iterator[Any]:
        follower = self._follower()
        if follower is None:
            return
        replica = follower.replica
        if replica.version is not None:
            yield GaugeMetricFamily("deltawire_version", "The version that is served", replica.version)
        if replica.lag is not None:
            yield GaugeMetricFamily("deltawire_lag_versions", "Versions behind the newest one known", replica.lag)
        state = GaugeMetricFamily("deltawire_state", "1 for the state the server is in", labels=["state"])
        for name in STATES:
            state.add_metric([name], float(follower.state == name))
        yield state
        yield CounterMetricFamily("deltawire_syncs", "Versions reached since the start", follower.syncs)
        yield CounterMetricFamily("deltawire_failures", "Syncs that failed or were taken back", replica.failures)
        seconds = GaugeMetricFamily("deltawire_sync_seconds", "The last sync, by phase", labels=["phase"])
        for phase, value in follower.last.items():
            seconds.add_metric([phase], value)
        yield seconds
