"""What Prometheus sees, beside vLLM's own on /metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from ..names import STATES
from .follower import Follower


class Metrics:
    """Read from the follower when asked: nothing to keep in step."""

    def __init__(self, follower: Callable[[], Follower | None]) -> None:
        self._follower = follower
        REGISTRY.register(self)  # type: ignore[arg-type]

    def collect(self) -> Iterator[Any]:
        follower = self._follower()
        if follower is None:
            return
        if follower.version is not None:
            yield GaugeMetricFamily("deltawire_version", "The version that is served", follower.version)
        if follower.lag is not None:
            yield GaugeMetricFamily("deltawire_lag_versions", "Versions behind the newest one known", follower.lag)
        state = GaugeMetricFamily("deltawire_state", "1 for the state the server is in", labels=["state"])
        for name in STATES:
            state.add_metric([name], float(follower.state == name))
        yield state
        yield CounterMetricFamily("deltawire_syncs", "Versions reached since the start", follower.syncs)
        yield CounterMetricFamily("deltawire_failures", "Syncs that failed or were taken back", follower.failures)
        seconds = GaugeMetricFamily("deltawire_sync_seconds", "The last sync, by phase", labels=["phase"])
        for phase, value in follower.last.items():
            seconds.add_metric([phase], value)
        yield seconds
