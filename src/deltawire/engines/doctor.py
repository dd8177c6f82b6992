"""Check from outside whether a rollout server follows its run, for `deltawire doctor --server`.

Reads what any engine answers under the names of names.py. Changes nothing on the server.
"""

from __future__ import annotations

import json
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from http.client import HTTPException
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from ..bucket.doctor import Finding, Report, Verdict
from ..bucket.run import Run
from ..bucket.versions import resolve, split
from ..core.errors import BadURL, DeltawireError
from ..store import open_store

TIMEOUT_S = 10.0
MOST = 1 << 20
"""Bytes of an answer that are read."""

_TOKEN = "put the server's token into DELTAWIRE_TOKEN here (or --token-file)"
_SIGNATURES = {
    "unchecked": "not checked: it trusts no key (DELTAWIRE_TRUST)",
    "checked": "checked; a key to which the trainer's delegated is trusted with the weights too",
    "own": "checked; links of delegated keys are refused",
}
"""What is said of `signatures` in a status."""

_PROBE = b'{"doctor": true}'
"""Sent to /deltawire/pin, which refuses it and changes nothing."""


class Reply(NamedTuple):
    status: int
    """0 if there was no answer."""
    value: Any
    """The JSON body; None where it is something else."""
    why: str = ""


def examine(
    url: str, token: str | None = None, run: str | None = None, say: Callable[[Finding], None] | None = None
) -> Report:
    """Check a server.

    With RUN[@VERSION], also check that it follows that run and how far behind the bucket it is, or that it serves that
    version.
    """
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # an invalid port
        is_address = False
    if not is_address:
        raise BadURL(f"{url!r} is not the address of a server: write http://host:port")
    findings = []
    clock = time.perf_counter()
    for finding in _checks(url.rstrip("/"), token, run):
        findings.append(replace(finding, seconds=time.perf_counter() - clock))
        if say:
            say(findings[-1])
        clock = time.perf_counter()
    return Report(url, tuple(findings))


def _checks(url: str, token: str | None, run: str | None) -> Iterator[Finding]:
    health = _ask(url, "GET", "/health", token)
    if not health.status:
        yield Finding("answers", "failed", health.why)
        return
    yield Finding("answers", "ok", f"/health is {health.status}")
    answer = _ask(url, "GET", "/deltawire/status", token)
    if answer.status in (401, 403):
        yield Finding("plugin", "failed", f"it does not show its status without the right token: {_TOKEN}")
        return
    if answer.status != 200 or not isinstance(answer.value, dict) or "state" not in answer.value:
        path = urlsplit(url).path
        yield Finding(
            "plugin", "failed",
            f"no deltawire here (/deltawire/status is {answer.status or answer.why}): start vLLM with "
            "VLLM_PLUGINS=deltawire, or start the server with `deltawire serve`"
            + (f"; if this is its API's address, leave out {path}" if path else ""),
        )  # fmt: skip
        return
    status = answer.value
    yield Finding("plugin", "ok", f"engine {status.get('engine')}, model {status.get('model')}")
    yield from _followed(status, run)
    yield _guard(status)
    yield _token(url, token)


def _followed(status: dict[str, Any], wanted: str | None) -> Iterator[Finding]:
    """The run of the base model, and those of adapters; of these alone if `wanted` is one of them."""
    adapters = [adapter for adapter in status.get("adapters") or () if isinstance(adapter, dict)]
    where = None
    if wanted is not None:
        with suppress(DeltawireError):
            where = open_store(split(wanted)[0], retry=False).url.rstrip("/")
    chosen = [a for a in adapters if wanted is None or str(a.get("run")).rstrip("/") == where]
    if (status.get("run") and (wanted is None or not chosen)) or not adapters:
        yield from _following(status, wanted)
    elif not chosen:
        runs = ", ".join(str(adapter.get("run")) for adapter in adapters)
        yield Finding("run", "failed", f"it follows {runs} (adapters), not {wanted}: start it with the other run")
    for adapter in chosen:
        for finding in _following(adapter, wanted):
            yield replace(finding, check=f"{adapter.get('name')}: {finding.check}")


def _following(status: dict[str, Any], wanted: str | None) -> Iterator[Finding]:
    """The run, the state, the version and how far behind it is."""
    run, version, newest, pin = (status.get(name) for name in ("run", "version", "newest", "pin"))
    if not run:
        yield Finding(
            "run", "failed", "it follows none: start it with DELTAWIRE_RUN, or name one to POST /update_weights"
        )
        return
    asked: int | None = None
    if wanted is not None:
        try:
            where, which = split(wanted)
            store = open_store(where, retry=False)
            opened = Run.open(store)
            newest = opened.newest()
            asked = None if which is None else resolve(opened, which)
        except DeltawireError as error:
            yield Finding("run", "failed", f"follows {run}; the one named here cannot be read: {error}")
            return
        if store.url.rstrip("/") != str(run).rstrip("/"):
            yield Finding("run", "failed", f"it follows {run}, not {store.url}: start it with the other run")
            return
    yield Finding("run", "ok", f"{run}, newest version {newest}")
    state, reason = str(status.get("state")), str(status.get("reason") or "")
    verdict: Verdict = "ok" if state == "healthy" else "warning" if state in ("degraded", "starting") else "failed"
    step = {
        "degraded": "it serves on, and tries again by itself; the server's log has more",
        "starting": "nothing is served yet; ask again",
        "paused": "nothing is served until a version was loaded and proven; if that stays so, restart it",
        "failed": "it can never follow this run; the server's log has more",
    }
    said = f"{state}: {reason}" if reason else state
    yield Finding("state", verdict, f"{said}; {step[state]}" if state in step else said)
    if (signatures := _SIGNATURES.get(str(status.get("signatures")))) is not None:
        yield Finding("signatures", "ok", signatures)
    if version is None:
        yield Finding("version", "failed", "its weights are no version of the run; `state` says why")
        return
    shown = f"{version}" + (f", pinned at {pin}" if pin is not None else "")
    if asked not in (None, version):
        yield Finding("version", "failed", f"{shown}, not {asked} as asked for here")
        return
    yield Finding("version", "ok", shown)
    lag = None if newest is None else max(int(newest) - int(version), 0)
    if lag is None:
        yield Finding("lag", "skipped", "no newest version is known")
    elif lag and pin is None:
        yield Finding("lag", "warning", f"{lag} behind version {newest}; if it stays so, the server's log says why")
    else:
        yield Finding("lag", "ok", f"{lag} behind" + (", as it is pinned" if lag else ""))


def _guard(status: dict[str, Any]) -> Finding:
    guard = "patch" if status.get("engine") == "builtin" else status.get("guard")
    if not guard:
        return Finding("guard", "skipped", "the layout of the weights is not known yet")
    if guard == "patch":
        return Finding("guard", "ok", "weights are patched in place")
    return Finding(
        "guard", "warning", f"{guard}; every version costs a full load in the pause (docs/vllm.md says when)"
    )


def _token(url: str, token: str | None) -> Finding:
    """Check who may control the server: a request without a token, then one with ours."""
    open_to_all = _ask(url, "POST", "/deltawire/pin", None, _PROBE)
    if open_to_all.status == 403:
        return Finding(
            "token",
            "warning",
            "its control routes refuse everything: start it with DELTAWIRE_TOKEN, or --host 127.0.0.1",
        )
    if open_to_all.status != 401:
        return Finding("token", "ok", "none: every process on its machine can control it")
    if token is None:
        return Finding("token", "ok", f"control routes ask for one; to use them, {_TOKEN}")
    if _ask(url, "POST", "/deltawire/pin", token, _PROBE).status == 401:
        return Finding("token", "failed", f"the server has another token than this one: {_TOKEN}")
    return Finding("token", "ok", "control routes ask for one, and take this one")


def _ask(url: str, method: str, path: str, token: str | None, body: bytes | None = None) -> Reply:
    headers = {"content-type": "application/json"} if body else {}
    if token:
        headers["authorization"] = f"Bearer {token}"
    request = urllib.request.Request(url + path, body, headers, method=method)
    try:
        with _OPENER.open(request, timeout=TIMEOUT_S) as response:
            return Reply(response.status, _value(response.read(MOST)))
    except urllib.error.HTTPError as error:
        with error:
            return Reply(error.code, _value(error.read(MOST)))
    except (OSError, ValueError, HTTPException) as error:
        return Reply(0, None, _why(url, getattr(error, "reason", error)))


def _why(url: str, error: object) -> str:
    """Why there is no answer, and the next step."""
    if isinstance(error, ConnectionRefusedError):
        return f"nothing listens at {url}: start the server, or check host and port"
    if isinstance(error, socket.gaierror):
        return f"the host of {url} is unknown here: check the address"
    if isinstance(error, TimeoutError):
        return f"{url} did not answer within {TIMEOUT_S:.0f} s: it hangs, or a firewall is in between"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate of {url} is not trusted here ({error.verify_message}): SSL_CERT_FILE names who is"
    if isinstance(error, ssl.SSLError):
        return f"{url} does not speak TLS: write http://"
    if isinstance(error, (HTTPException, ConnectionError)):
        return f"what listens at {url} does not speak HTTP: check the port, and whether it is https://"
    return f"{url} cannot be reached ({error}): check host and port"


def _value(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return None


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follow no redirects: a token is sent only to the address it was given for."""

    def redirect_request(self, *_: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirect)
