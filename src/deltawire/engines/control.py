"""Control routes, status and metrics of every server that follows a run.

GET  /deltawire/status                     state, version, lag, …: see `status`
GET  /deltawire/digest                     the state digest of the live weights, computed now
POST /deltawire/sync   {"version": 41}     go to a version now, the newest by default
POST /deltawire/pin    {"version": 41}     go to a version and stay there; null follows again

With {"adapter": "policy", …} the last two are about an adapter that the server follows.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fastapi import APIRouter, HTTPException, Request
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from ..core import errors
from .follower import Follower
from .names import STATES

__all__ = ["MAX_BODY", "FollowerMetrics", "health", "routes", "status"]

log = logging.getLogger("deltawire")

MAX_BODY = 1 << 16
"""Bytes of a request to a control route."""


def health(follower: Follower | None) -> tuple[str, str]:
    """Return state and reason, as GET /health shows them."""
    if follower is None:
        return "idle", "no run: set DELTAWIRE_RUN, or name one to POST /update_weights"
    state = follower.state
    return state, follower.reason or ("catching up with the run" if state == "starting" else "")


def status(engine: str, model: str, follower: Follower | None, **more: Any) -> dict[str, Any]:
    """Return the body of GET /deltawire/status. `more` adds fields of this engine, or replaces common ones."""
    state, reason = health(follower)
    said = {"engine": engine, "model": model, "state": state, "reason": reason}
    if follower is None:
        return {**said, "run": None, "version": None, **more}
    return {**said, **figures(follower), **more}


def figures(follower: Follower) -> dict[str, Any]:
    """Return what a follower has reached, as GET /deltawire/status shows it."""
    replica = follower.replica
    return {
        "run": replica.url,
        "id": replica.id,
        "version": follower.version,
        "newest": replica.newest,
        "lag": replica.lag,
        "pin": follower.pin,
        "signatures": replica.signatures,
        "syncs": follower.syncs,
        "failures": replica.failures,
        "timings": {phase: round(seconds, 6) for phase, seconds in follower.phases.items()},
    }


class FollowerMetrics(Collector):
    """Collects the metrics of followers for GET /metrics.

    followers   returns them, each by the value of `label`, which is None for the one of a server's own weights
    """

    def __init__(self, followers: Callable[[], Mapping[str, Follower]], label: str | None = None) -> None:
        self._followers, self._label = followers, label

    def collect(self) -> Iterator[Any]:
        prefix = f"deltawire_{self._label}" if self._label else "deltawire"
        labels = [self._label] if self._label else []
        made: dict[str, Any] = {
            "version": GaugeMetricFamily(f"{prefix}_version", "The version that is served", labels=labels),
            "newest": GaugeMetricFamily(f"{prefix}_newest_version", "Newest version known", labels=labels),
            "lag": GaugeMetricFamily(f"{prefix}_lag_versions", "Versions behind the newest one known", labels=labels),
            "syncs": CounterMetricFamily(f"{prefix}_syncs", "Versions reached since the start", labels=labels),
            "failures": CounterMetricFamily(
                f"{prefix}_failures", "Syncs that failed or were taken back", labels=labels
            ),
        }
        state = GaugeMetricFamily(f"{prefix}_state", "1 for the state it is in", labels=[*labels, "state"])
        spent = GaugeMetricFamily(f"{prefix}_sync_seconds", "The last sync, by phase", labels=[*labels, "phase"])
        for name, follower in self._followers().items():
            values = [name] if self._label else []
            shown = figures(follower)
            for key, family in made.items():
                if shown[key] is not None:
                    family.add_metric(values, float(shown[key]))
            for each in STATES:
                state.add_metric([*values, each], float(follower.state == each))
            for phase, seconds in follower.phases.items():
                spent.add_metric([*values, phase], seconds)
        yield from (family for family in (*made.values(), state, spent) if family.samples)


# ── routes ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def routes(
    follower: Callable[[], Follower],
    status: Callable[[], dict[str, Any]],
    authorize: Callable[[Request], None],
    adapters: Callable[[], Mapping[str, Follower]] = dict,
) -> APIRouter:
    """Return the control routes. `follower` and `authorize` raise HTTPException to refuse a request."""
    router = APIRouter()

    def chosen(info: dict[str, Any]) -> Follower:
        name = info.get("adapter")
        if name is None:
            return follower()
        if not isinstance(name, str):
            raise HTTPException(400, f"an adapter is named by a string, not {name!r:.40}")
        if name not in (found := adapters()):
            raise HTTPException(404, f"this server follows no adapter {name!r:.100}; it follows {[*found]}")
        return found[name]

    @router.get("/deltawire/status")
    async def show_status() -> dict[str, Any]:
        return status()

    @router.get("/deltawire/digest")
    async def digest(request: Request) -> dict[str, Any]:
        authorize(request)
        try:
            version, found = await asyncio.to_thread(follower().live)
        except errors.DeltawireError as error:
            raise refusal(error) from error
        return {"version": version, "digest": str(found)}

    def add_move(path: str, pin: bool) -> None:
        @router.post(path)
        async def move(request: Request) -> dict[str, Any]:
            authorize(request)
            info = await read(request, {"version", "adapter"})
            return await command(chosen(info), info.get("version"), status, pin=pin)

    add_move("/deltawire/sync", pin=False)
    add_move("/deltawire/pin", pin=True)
    return router


async def read(request: Request, fields: set[str]) -> dict[str, Any]:
    """Read the JSON object in the body of a control request, plain or as vLLM's `update_info`.

    Raises HTTPException if it is too large, not a JSON object, or has other fields.
    """
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY:
            raise HTTPException(413, f"the body is larger than {MAX_BODY} bytes")
    try:
        said = json.loads(body or b"{}")
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"the body is not JSON: {error}") from None
    said = said.get("update_info", said) if isinstance(said, dict) else said
    if not isinstance(said, dict) or not set(said) <= fields:
        raise HTTPException(400, f"expected a JSON object with {' and '.join(sorted(fields))}, all optional")
    return said


async def command(
    follower: Follower, version: Any, status: Callable[[], dict[str, Any]], *, pin: bool = False
) -> dict[str, Any]:
    """Move a follower to a version and return the status it has there; raises HTTPException if it cannot."""
    if not isinstance(version, int | str | None) or isinstance(version, bool):
        raise HTTPException(400, f"a version is a number or a tag, not {version!r:.40}")

    def move() -> dict[str, Any]:
        if version is None and pin:
            follower.command(None, pin=True)
            return status()
        # held until the status is made: a server that follows the run, or has a pin, soon goes on from there
        with follower.replica.lock:
            follower.command(version, pin=pin)
            return status()

    try:
        return await asyncio.to_thread(move)
    except errors.DeltawireError as error:
        log.warning("could not go to the requested version: %s", error)
        raise refusal(error) from error


_STATUS: tuple[tuple[tuple[type[errors.DeltawireError], ...], int], ...] = (
    ((errors.RunNotFound, errors.VersionNotFound, errors.ReferenceUnavailable, errors.ObjectNotFound), 404),
    ((errors.BadURL, errors.Misconfigured, errors.MissingExtra), 400),
    ((errors.StoreError,), 503),
)
"""HTTP status of an error, by the first line that its class is in; 409 for all others."""


def refusal(error: errors.DeltawireError) -> HTTPException:
    """Return the HTTP error for a control request that raised this error."""
    status = next((status for kinds, status in _STATUS if isinstance(error, kinds)), 409)
    return HTTPException(status, f"{type(error).__name__}: {error}")
