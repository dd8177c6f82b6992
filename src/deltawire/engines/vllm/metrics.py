"""What Prometheus sees, beside vLLM's own on /metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import REGISTRY

from .. import control
from ..follower import Follower


class Metrics:
    """Read from the follower when asked: nothing to keep in step."""

    def __init__(self, follower: Callable[[], Follower | None]) -> None:
        self._follower = follower
        REGISTRY.register(self)

    def collect(self) -> Iterator[Any]:
        return control.metrics(self._follower())
