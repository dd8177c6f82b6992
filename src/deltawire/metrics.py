"""Figures of published and followed versions for Prometheus, from a process without a server of its own.

publisher = dw.Publisher("s3://runs/wordle", on_version=Prometheus(port=9100))
replica = dw.Replica("s3://runs/wordle", on_version=Prometheus(port=9101))

wandb and trackio need nothing of the kind: `on_version=lambda version: wandb.log(version.report())`, or
`log` of the run that `trackio.init` returned.
"""

from __future__ import annotations

from typing import Any

from .core.errors import Misconfigured, MissingExtra


class VersionFigures:
    """Figures of a version that was published (`Published`) or reached by a replica (`Synced`)."""

    __slots__ = ()
    version: int
    bytes: int
    changed: int
    elements: int
    timings: dict[str, float]

    @property
    def density(self) -> float:
        """Share of the weights that differ from the version published before, 0 to 1."""
        return self.changed / max(self.elements, 1)

    def report(self) -> dict[str, float]:
        """Figures under the names `deltawire/…`, as `wandb.log` and `log` of a trackio run take them."""
        return {
            "deltawire/version": float(self.version),
            "deltawire/changed": float(self.changed),
            "deltawire/density": self.density,
            "deltawire/bytes": float(self.bytes),
            **{f"deltawire/{name}_ms": 1e3 * seconds for name, seconds in self.timings.items()},
        }


class Prometheus:
    """An `on_version` that keeps a gauge for each figure: `deltawire_version`, `deltawire_bytes`, `deltawire_put_ms`, …

    port       serve them at this port; None leaves that to the caller (prometheus_client.start_http_server or another)
    address    to listen at; only this machine by default
    registry   of prometheus_client, its global one by default
    labels     the same for all gauges, such as {"run": "wordle"}
    """

    def __init__(
        self,
        port: int | None = None,
        *,
        address: str = "127.0.0.1",
        registry: Any = None,
        labels: dict[str, str] | None = None,
    ) -> None:
        try:
            import prometheus_client
        except ImportError as error:
            raise MissingExtra("prometheus_client is not installed", "metrics") from error
        self._client = prometheus_client
        self._registry = prometheus_client.REGISTRY if registry is None else registry
        self._labels = labels or {}
        self._gauges: dict[str, Any] = {}
        if port is not None:
            try:
                prometheus_client.start_http_server(port, address, self._registry)
            except OSError as error:
                raise Misconfigured(
                    f"Prometheus(port={port}) cannot listen at {address} ({error.strerror}): choose another port, or "
                    "end what listens there"
                ) from None

    def __call__(self, version: VersionFigures) -> None:
        for name, value in version.report().items():
            name = name.replace("/", "_")
            if name not in self._gauges:
                gauge = self._client.Gauge(name, "of the newest version", [*self._labels], registry=self._registry)
                self._gauges[name] = gauge.labels(**self._labels) if self._labels else gauge
            self._gauges[name].set(value)
