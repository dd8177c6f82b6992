"""Wait until the servers that follow a run have a version of it."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable
from functools import cache
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, build_opener

from deltawire.errors import Misconfigured, VersionRefused

log = logging.getLogger("deltawire")

SAY_EVERY_S = 10


def wait_for(servers: Iterable[str], version: float | None, timeout: float, run: str = "") -> list[dict[str, Any]]:
    """Wait until each server has a version, and return what they then answer to GET /deltawire/status.

    servers   their addresses: http://10.0.0.7:8000
    version   the version that they need, or a later one; None returns what they answer now
    timeout   seconds for all of them together. A server that does not answer yet is waited for, too
    run       address of the run that they should follow: of another one a warning is logged, once. It may be a mirror
              or a view of the run, or that of an earlier training, whose versions mean nothing here

    Raises VersionRefused for a server that does not get there, with its state and reason, and Misconfigured for one
    that follows no run.
    """
    until = time.monotonic() + timeout
    found = []
    for server in servers:
        found.append(status := _wait(server.rstrip("/"), version, timeout, until))
        if run and (theirs := status.get("run")) and not {*theirs.split(",")} & {*run.split(",")}:
            _warn_of_another_run(server, theirs, run)
    return found


@cache
def _warn_of_another_run(server: str, theirs: str, ours: str) -> None:
    log.warning(
        "server %s follows %s, and the trainer publishes to %s: if the one is no mirror or view of the other, its "
        "samples are of other weights",
        server, theirs, ours,
    )  # fmt: skip


def _wait(server: str, version: float | None, timeout: float, until: float) -> dict[str, Any]:
    began = said = time.monotonic()
    while True:
        status = _status(server)
        found = status["version"]
        if version is None or (found is not None and found >= version):
            return status
        problem = f"it is {status['state']}, at {found}. {status['reason']}"
        now = time.monotonic()
        if status["state"] == "failed" or now > until:
            raise VersionRefused(f"server {server} did not reach version {version:.0f} in {timeout} s: {problem}")
        if now - said >= SAY_EVERY_S:
            log.warning("waiting for version %.0f on %s: %s", version, server, problem)
            said = now
        # often at first; every second where many ranks wait for a server that has to start
        time.sleep(min(1.0, 0.1 + (now - began) / 10))


def _status(server: str) -> dict[str, Any]:
    try:
        with build_opener(ProxyHandler({})).open(f"{server}/deltawire/status", timeout=60) as answer:
            status: dict[str, Any] = json.load(answer)
        if status["run"] is not None:
            return status
        problem = "it follows none"
    except HTTPError as error:
        problem = str(error)
    except OSError as error:
        return {"version": None, "state": "not there", "reason": str(error)}
    except (ValueError, KeyError, TypeError) as error:
        problem = f"unexpected answer, {error!r:.200}"
    raise Misconfigured(
        f"server {server} does not say which run it follows ({problem}): start it with `deltawire serve --engine vllm "
        "RUN`, or with VLLM_PLUGINS=deltawire and DELTAWIRE_RUN in its environment"
    )
