"""Check what a run needs: `examine_store` tries its store, `examine_server` looks at a rollout server from outside.

What is checked is in tables: STORE, PLUGIN, FOLLOWED and CONTROL. A check returns what it found, or raises what is
wrong and the next step. One that needs what a failed one would have made is skipped.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import socket
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from http.client import HTTPException
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import deltawire as dw

from .errors import AlreadyExists, BadURL, DeltawireError, ObjectNotFound, RunNotFound, TruncatedFile, Unsupported
from .store import Announcing, HttpStore, LocalStore, Store, open_store

HEAD = "head.json"
"""Key of the object that followers poll."""

BIG = 32 << 20
"""Bytes of the object that goes up in parts and comes down in ranges."""

CONNECTIONS, PART = 8, 8 << 20
"""How it comes down: in as many ranges at a time, of so many bytes, as a replica fetches."""

SKEW_S = 60.0
"""Clocks further apart than this are worth a warning; S3 refuses requests at fifteen minutes."""

TIMEOUT_S = 10.0
"""Seconds that a server may take to answer."""

MOST = 1 << 20
"""Bytes of an answer that are read."""

_LOOKS = 10
_PATIENCE_S = 10.0
_EXTRAS = {"torch": "torch", "huggingface_hub": "hub", "vllm": "vllm", "trl": "trl", "triton": "gpu"}

Verdict = Literal["ok", "warning", "failed", "skipped"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    check: str
    verdict: Verdict
    detail: str = ""
    """The finding, or the problem and what to do."""
    seconds: float = 0.0
    """How long the check took."""


@dataclass(frozen=True, slots=True)
class Report:
    """The results of all checks."""

    address: str
    """Of the run or the server."""
    findings: tuple[Finding, ...]
    figures: dict[str, float] = field(default_factory=dict)
    """Seconds and bytes per second, by name."""

    @property
    def healthy(self) -> bool:
        return all(finding.verdict != "failed" for finding in self.findings)


Tell = Callable[[Finding], None]


class _Said(Exception):
    """The problem, and what to do."""

    def __init__(self, text: str, verdict: Verdict = "failed") -> None:
        super().__init__(text)
        self.verdict = verdict


def _must(holds: object, otherwise: str, verdict: Verdict = "failed") -> None:
    if not holds:
        raise _Said(otherwise, verdict)


Check = Callable[[Any], str | None]
"""Returns what was found, None where there is nothing to say; raises _Said or an error of the store."""

Table = tuple[tuple[str, dict[str, Check]], ...]
"""Checks by name, in groups: each is skipped where the check that the group needs has failed."""


def _findings(subject: object, table: Table) -> Iterator[Finding]:
    failed = set()
    for needs, checks in table:
        for name, check in checks.items():
            clock = time.perf_counter()
            verdict: Verdict = "ok"
            try:
                detail = check(subject) if needs not in failed else ""
            except _Said as said:
                verdict, detail = said.verdict, str(said)
            except DeltawireError as error:
                verdict, detail = "failed", str(error)
            if needs in failed or verdict == "failed":
                failed.add(name)
            if detail is not None:
                seconds = time.perf_counter() - clock if needs not in failed else 0.0
                yield Finding(name, "skipped" if needs in failed else verdict, detail, seconds)


def _collect(findings: list[Finding], more: Iterable[Finding], tell: Tell | None) -> None:
    for finding in more:
        findings.append(finding)
        if tell:
            tell(finding)


# ── the store of a run ───────────────────────────────────────────────────────────────────────────────────────────────


def examine_store(store: Store, tell: Tell | None = None) -> Report:
    """Try everything that a run needs; `tell` is called with each finding.

    What was put there is removed, also on an interrupt. Over https, where nothing can be put, it tries what a reader
    needs, with the run that is there.
    """
    trial, findings = _Trial(store), list[Finding]()
    table = WEB if isinstance(store, HttpStore) else STORE
    try:
        _collect(findings, _findings(trial, table), tell)
    finally:
        left = trial.clean()
    if left:
        by_hand = f"delete {left[0]} and {len(left) - 1} more by hand"
        _collect(findings, [Finding("clean up", "failed", by_hand)], tell)
    return Report(store.url, tuple(findings), trial.figures)


class _Trial:
    def __init__(self, store: Store) -> None:
        self.store = store
        self.figures: dict[str, float] = {}
        self.mark = secrets.token_bytes(1024)
        self.piece = secrets.token_bytes(1 << 20)
        # no folder of its own: in a file store an empty one would stay
        self.prefix = f"doctor-{secrets.token_hex(6)}."
        self._made: dict[str, None] = {}
        self._stored = False
        # folders that the first put into a folder store will make, innermost first
        folders = (store.root, *store.root.parents) if isinstance(store, LocalStore) else ()
        self._absent = [folder for folder in folders if not folder.exists()]

    def clean(self) -> list[str]:
        """Delete whatever was made; returns what could not be."""
        left = []
        for key in self._made:
            try:
                self.store.delete(key)
            except DeltawireError:
                left.append(key)
        for folder in self._absent:
            with contextlib.suppress(OSError):  # it is not empty any more: then it stays
                folder.rmdir()
        return left if self._stored else []

    def key(self, name: str) -> str:
        self._made[self.prefix + name] = None
        return self.prefix + name

    def read(self, name: str) -> bytes:
        return self.store.get(self.key(name)).data

    def extras(self) -> str:
        return "  ".join(f"{extra} {'✓' if find_spec(module) else '–'}" for module, extra in _EXTRAS.items())

    def cache(self) -> str:
        folder = os.environ.get("DELTAWIRE_CACHE")
        if not folder:
            return "off; DELTAWIRE_CACHE=/path lets replicas of one host fetch each object once"
        _must("://" not in folder, "DELTAWIRE_CACHE is an address; it is a folder of this host")
        path = Path(folder).expanduser()
        try:
            path.mkdir(parents=True, exist_ok=True)
            files = [entry for entry in path.iterdir() if entry.is_file()]
            used = sum(entry.stat().st_size for entry in files)
            probe = path / f".doctor-{secrets.token_hex(4)}"
            probe.write_bytes(b"x")
            probe.unlink()
        except OSError as error:
            said = f"DELTAWIRE_CACHE={path}: {error.strerror}; replicas will fetch for themselves"
            raise _Said(said, "warning") from None
        return f"{path}: {len(files)} objects, {used / 1e6:.0f} MB"

    def create(self) -> str:
        self.store.put_if_absent(self.key("small"), self.mark)
        self._stored = True
        return "an object that was not there"

    def read_back(self) -> str:
        _must(self.read("small") == self.mark, "other bytes came back than were put; do not use this store")
        return "the same bytes"

    def create_again(self) -> str:
        with contextlib.suppress(AlreadyExists):
            self.store.put_if_absent(self.key("small"), b"second")
            self.store.put(self.key("small"), self.mark)
            raise _Said(
                "a second writer could create what exists: two trainers could both win a version. "
                "Use a store with conditional writes (If-None-Match), or make sure that one trainer writes at a time"
            )
        _must(self.read("small") == self.mark, "a refused create changed the object; do not use this store")
        if self.store.creates_exclusively:
            return "refused, as it must be"
        return "refused, though not between machines: writers claim the run first"

    def overwrite(self) -> str:
        for content in (b"1", b"22"):
            self.store.put(self.key("head"), content)
            found = self.read("head")
            late = f"a read after a write gave {found!r} for {content!r}: readers may be late by that much"
            _must(found == content, late)
        return "read after write is current"

    def conditional_get(self) -> str:
        key = self.key("head")
        etag = self.store.get(key).etag
        if etag is None:
            return "this store has no etags: each look reads head.json whole, which is small"
        again = self.store.get_if_changed(key, etag)
        _must(again is None, "an unchanged object came again: etags do not hold still here")
        self.store.put(key, b"333")
        changed = self.store.get_if_changed(key, etag)
        unseen = "a change went unseen by a conditional get: followers would not notice new versions"
        _must(changed is not None and changed.data == b"333", unseen)
        return "not modified, then modified"

    def ranged_read(self) -> str:
        part = self.store.get_range(self.key("small"), 100, 50)
        _must(part == self.mark[100:150], "a range of an object has other bytes than the object")
        try:
            self.store.get_range(self.key("small"), 1000, 100)
        except TruncatedFile:
            return "exact, and refused past the end"
        raise _Said("a range past the end was answered")

    def listing(self) -> str:
        found = {info.key: info.size for info in self.store.list(self.prefix)}
        late = "a listing does not show what was just written; versions would be found late"
        _must(found.get(self.key("small")) == len(self.mark), late)
        return f"{len(found)} objects"

    def latency(self) -> str:
        return self._latency(self.key("small"))

    def looks(self) -> str:
        return self._latency(HEAD)

    def _latency(self, key: str) -> str:
        times = []
        for _ in range(_LOOKS):
            clock = time.perf_counter()
            self.store.get_if_changed(key, None)
            times.append(time.perf_counter() - clock)
        self.figures["latency_s"] = sorted(times)[_LOOKS // 2]
        return f"{self.figures['latency_s'] * 1e3:.1f} ms for a small read (median of {_LOOKS})"

    def clock(self) -> str:
        before = time.time()
        self.store.put(self.key("clock"), b"tick")
        after = time.time()
        stamped = self.store.head(self.key("clock")).modified
        # many stores give whole seconds; what lies within that and the request itself is no skew
        ahead = self.figures["clock_skew_s"] = max(stamped - after, min(stamped + 1.0 - before, 0.0))
        way = "ahead of" if ahead > 0 else "behind"
        off = f"the store's clock is {abs(ahead):.0f} s {way} this machine's; set this machine's clock (NTP)"
        _must(abs(ahead) <= SKEW_S, off, "warning")
        return "the store's and this machine's agree" if abs(ahead) < 1 else f"{ahead:+.1f} s at the store"

    def upload(self) -> str:
        clock = time.perf_counter()
        self.store.put(self.key("big"), lambda: (self.piece for _ in range(BIG >> 20)))
        return self._speed("upload", time.perf_counter() - clock)

    def download(self) -> str:
        clock = time.perf_counter()
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            parts = [*pool.map(lambda at: self.store.get_range(self.key("big"), at, PART), range(0, BIG, PART))]
        speed, whole = self._speed("download", time.perf_counter() - clock), self.piece * (PART >> 20)
        same = all(part == whole for part in parts)
        _must(same, "a large object came back with other bytes; do not use this store")
        return speed

    def _speed(self, way: str, seconds: float) -> str:
        self.figures[f"{way}_bytes_per_s"] = BIG / seconds
        return f"{BIG >> 20} MiB at {BIG / seconds / 1e6:.0f} MB/s"

    def announcements(self) -> str:
        polled = "this store does not announce changes: followers ask for head.json, one small request per look"
        store = self.store
        if not isinstance(store, Announcing):
            return polled
        heard: queue.Queue[str | DeltawireError] = queue.Queue()
        stop = threading.Event()

        def listen() -> None:
            try:
                for key in store.announcements(stop):
                    heard.put(key)
            except DeltawireError as error:
                heard.put(error)

        def next_key() -> str:
            try:
                said = heard.get(timeout=_PATIENCE_S)
            except queue.Empty:
                late = f"nothing announced within {_PATIENCE_S:.0f} s; followers ask instead"
                raise _Said(late, "warning") from None
            if isinstance(said, DeltawireError):
                raise said
            return said

        threading.Thread(target=listen, name="deltawire-doctor", daemon=True).start()
        try:
            next_key()
            clock = time.perf_counter()
            store.put(self.key("announced"), b"news")
            while next_key() not in ("", self.key("announced")):
                pass
        except Unsupported:
            return polled
        finally:
            stop.set()
        self.figures["announced_s"] = time.perf_counter() - clock
        return f"a change was announced after {self.figures['announced_s'] * 1e3:.0f} ms"

    def delete(self) -> str:
        key = self.key("small")
        self.store.delete(key)
        try:
            self.store.head(key)
        except ObjectNotFound:
            self.store.delete(key)
            return "gone, and a second delete is no error"
        raise _Said("a deleted object is still there")

    def run(self) -> str:
        try:
            run = dw.Run.open(self.store)
        except RunNotFound:
            return "none here yet: the first publish makes it"
        newest = run.newest()
        if newest is None:
            return f"run {run.info.run}, no version yet"
        said = f"run {run.info.run}, newest version {newest}"
        if not (signer := run.manifest(newest).signer):
            return said
        if run.trust is None:
            return f"{said}, signed by {signer}, not checked: set DELTAWIRE_TRUST where the run is read"
        links = "refused" if run.trust.refuse_delegated else "accepted"
        return f"{said}, signed by {signer}, checked; links of delegated keys are {links}"

    # ── over https ───────────────────────────────────────────────────────────────────────────────────────────────────

    def revalidated(self) -> str:
        found = self.store.get(HEAD)
        if found.etag is None:
            return "no etags: each look reads head.json whole, which is small"
        again = self.store.get_if_changed(HEAD, found.etag)
        changing = again is not None and again.etag != found.etag
        _must(
            again is None or changing, "an unchanged head.json came again: conditional requests are ignored", "warning"
        )
        return "not modified"

    def current(self) -> str:
        run = dw.Run.open(self.store)
        told, newest = run.head_hint(), run.newest()
        late = f"head.json tells of version {told}, and there is {newest}: a cache keeps it for too long"
        _must(told is not None and newest is not None and told >= newest, late, "warning")
        return f"head.json tells of the newest version, {newest}"

    def ranged_objects(self) -> str:
        run = dw.Run.open(self.store)
        newest = run.newest()
        found = [] if newest is None else [blob for link in run.manifest(newest).links for blob in link.objects]
        if not found:
            return "no object to try it with"
        blob = min(found, key=lambda blob: blob.size)
        first, size = self.store.get_range(blob.key, 0, blob.size), self.store.head(blob.key).size
        middle = blob.size // 2
        _must(size == blob.size, f"{blob.key} has {size:,} bytes, its manifest says {blob.size:,}")
        part = self.store.get_range(blob.key, middle, blob.size - middle)
        _must(part == first[middle:], "a range of an object has other bytes than the object")
        try:
            self.store.get_range(blob.key, middle, blob.size)
        except TruncatedFile:
            return "exact, and refused past the end"
        raise _Said("a range past the end was answered")

    def absent(self) -> str:
        try:
            self.store.get(f"versions/{10**17 + secrets.randbelow(10**17)}.json")
        except ObjectNotFound:
            return "a 404"
        raise _Said("an object that does not exist was answered: followers would take it for a version")


WEB: Table = (
    ("", {"extras": _Trial.extras, "cache": _Trial.cache, "run": _Trial.run}),
    ("run", {
        "conditional get": _Trial.revalidated, "current": _Trial.current, "ranged read": _Trial.ranged_objects,
        "absent object": _Trial.absent, "latency": _Trial.looks,
    }),
)  # fmt: skip

STORE: Table = (
    ("", {"extras": _Trial.extras, "cache": _Trial.cache, "create": _Trial.create}),
    ("create", {
        "read back": _Trial.read_back, "create again": _Trial.create_again, "overwrite": _Trial.overwrite,
        "conditional get": _Trial.conditional_get, "ranged read": _Trial.ranged_read, "list": _Trial.listing,
        "latency": _Trial.latency, "clock": _Trial.clock, "upload in parts": _Trial.upload,
        "download in ranges": _Trial.download, "announcements": _Trial.announcements, "delete": _Trial.delete,
    }),
    ("", {"run": _Trial.run}),
)  # fmt: skip


# ── a rollout server, from outside ───────────────────────────────────────────────────────────────────────────────────

_TOKEN = "put the server's token into DELTAWIRE_TOKEN here (or --token-file)"
_SIGNATURES = {
    "unchecked": "not checked: it trusts no key (DELTAWIRE_TRUST)",
    "checked": "checked; a key to which the trainer's delegated is trusted with the weights too",
    "own": "checked; links of delegated keys are refused",
}
"""Texts for `signatures` in a status."""

_STATES: dict[str, tuple[Verdict, str]] = {
    "healthy": ("ok", ""),
    "degraded": ("warning", "; it serves on, and tries again by itself; the server's log has more"),
    "starting": ("warning", "; nothing is served yet; ask again"),
    "paused": ("failed", "; nothing is served until a version was loaded and proven; if that stays so, restart it"),
    "failed": ("failed", "; it can never follow this run; the server's log has more"),
}

_NO_HTTP = "what listens at {url} does not speak HTTP: check the port, and whether it is https://"
_UNREACHED: dict[type[Exception], str] = {
    ConnectionRefusedError: "nothing listens at {url}: start the server, or check host and port",
    socket.gaierror: "the host of {url} is unknown here: check the address",
    TimeoutError: "{url} did not answer within {seconds:.0f} s: it hangs, or a firewall is in between",
    ssl.SSLCertVerificationError: (
        "the certificate of {url} is not trusted here ({error.verify_message}): SSL_CERT_FILE names who is"
    ),
    ssl.SSLError: "{url} does not speak TLS: write http://",
    HTTPException: _NO_HTTP,
    ConnectionError: _NO_HTTP,
    Exception: "{url} cannot be reached ({error}): check host and port",
}
"""Why there is no answer, and the next step: the first that fits."""

_PROBE = b'{"doctor": true}'
"""Sent to /deltawire/pin, which refuses it and changes nothing."""


def examine_server(url: str, token: str | None = None, run: str | None = None, tell: Tell | None = None) -> Report:
    """Check a server. Changes nothing there.

    With RUN[@VERSION], also check that it follows that run and how far behind the bucket it is, or that it serves that
    version.
    """
    try:
        parts = urlsplit(url)
        is_server = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # an invalid port
        is_server = False
    if not is_server:
        raise BadURL(f"{url!r} is not the address of a server: write http://host:port")
    findings: list[Finding] = []
    done = _server_findings(_CheckedServer(url.rstrip("/"), token), run)
    _collect(findings, (found for found in done if found.verdict != "skipped" or found.detail), tell)
    return Report(url, tuple(findings))


def _server_findings(server: _CheckedServer, wanted: str | None) -> Iterator[Finding]:
    yield from _findings(server, PLUGIN)
    if not (status := server.status):
        return
    # the run of the base model, and those of adapters; of these alone if `wanted` is one of them
    adapters = [adapter for adapter in status.get("adapters") or () if isinstance(adapter, dict)]
    where = None
    if wanted is not None:
        with contextlib.suppress(DeltawireError):
            where = open_store(dw.split_version(wanted)[0], retry=False).url.rstrip("/")
    chosen = [a for a in adapters if wanted is None or str(a.get("run")).rstrip("/") == where]
    if (status.get("run") and (wanted is None or not chosen)) or not adapters:
        yield from _findings(_Followed(status, wanted), FOLLOWED)
    elif not chosen:
        runs = ", ".join(str(adapter.get("run")) for adapter in adapters)
        yield Finding("run", "failed", f"it follows {runs} (adapters), not {wanted}: start it with the other run")
    for adapter in chosen:
        for finding in _findings(_Followed(adapter, wanted), FOLLOWED):
            yield replace(finding, check=f"{adapter.get('name')}: {finding.check}")
    yield from _findings(server, CONTROL)


class _CheckedServer:
    def __init__(self, url: str, token: str | None) -> None:
        self.url, self.token = url, token
        self.status: dict[str, Any] = {}

    def ask(self, method: str, path: str, token: str | None, body: bytes | None = None) -> tuple[int, Any]:
        """Return the status and the JSON body, None where it is something else; or 0 and why there is no answer."""
        headers = {"content-type": "application/json"} if body else {}
        if token:
            headers["authorization"] = f"Bearer {token}"
        request = urllib.request.Request(self.url + path, body, headers, method=method)
        try:
            with _OPENER.open(request, timeout=TIMEOUT_S) as response:
                return response.status, _value(response.read(MOST))
        except urllib.error.HTTPError as error:
            with error:
                return error.code, _value(error.read(MOST))
        except (OSError, ValueError, HTTPException) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            kind = next(kind for kind in _UNREACHED if isinstance(reason, kind) or kind is Exception)
            return 0, _UNREACHED[kind].format(url=self.url, seconds=TIMEOUT_S, error=reason)

    def answers(self) -> str:
        status, why = self.ask("GET", "/health", self.token)
        _must(status, why)
        return f"/health is {status}"

    def plugin(self) -> str:
        status, value = self.ask("GET", "/deltawire/status", self.token)
        _must(status not in (401, 403), f"it does not show its status without the right token: {_TOKEN}")
        path = urlsplit(self.url).path
        _must(
            status == 200 and isinstance(value, dict) and "state" in value,
            f"no deltawire here (/deltawire/status is {status or value}): start vLLM with "
            "VLLM_PLUGINS=deltawire, or start the server with `deltawire serve`"
            + (f"; if this is its API's address, leave out {path}" if path else ""),
        )
        self.status = value
        return f"engine {value.get('engine')}, model {value.get('model')}"

    def guard(self) -> str:
        guard = "patch" if self.status.get("engine") == "builtin" else self.status.get("guard")
        _must(guard, "the layout of the weights is not known yet", "skipped")
        dear = f"{guard}; every version costs a full load in the pause (docs/vllm-patching.md says when)"
        _must(guard == "patch", dear, "warning")
        return "weights are patched in place"

    def draft(self) -> str:
        draft = self.status.get("draft")
        _must(draft, "", "skipped")
        stale = f"the draft model is {draft}; fewer of its tokens are accepted (docs/vllm-patching.md)"
        _must(draft == "follows", stale, "warning")
        return "the draft model follows with the model"

    def control(self) -> str:
        """Check who may control the server: a request without a token, then one with ours."""
        open_to_all, _ = self.ask("POST", "/deltawire/pin", None, _PROBE)
        closed = "its control routes refuse everything: start it with DELTAWIRE_TOKEN, or --host 127.0.0.1"
        _must(open_to_all != 403, closed, "warning")
        if open_to_all != 401:
            return "none: every process on its machine can control it"
        if self.token is None:
            return f"control routes ask for one; to use them, {_TOKEN}"
        ours, _ = self.ask("POST", "/deltawire/pin", self.token, _PROBE)
        _must(ours != 401, f"the server has another token than this one: {_TOKEN}")
        return "control routes ask for one, and take this one"


class _Followed:
    """A run that a server follows, by its status."""

    def __init__(self, status: dict[str, Any], wanted: str | None) -> None:
        self.status, self._wanted = status, wanted
        self._url, self._version, self._newest, self._pin = map(status.get, ("run", "version", "newest", "pin"))
        self._asked: int | None = None

    def run(self) -> str:
        url = self._url
        _must(url, "it follows none: start it with DELTAWIRE_RUN, or name one to POST /update_weights")
        if self._wanted is not None:
            try:
                where, which = dw.split_version(self._wanted)
                store = open_store(where, retry=False)
                run = dw.Run.open(store)
                self._newest = run.newest()
                self._asked = None if which is None else run.resolve(which)
            except DeltawireError as error:
                raise _Said(f"follows {url}; the one named here cannot be read: {error}") from None
            same = store.url.rstrip("/") == str(url).rstrip("/")
            _must(same, f"it follows {url}, not {store.url}: start it with the other run")
        return f"{url}, newest version {self._newest}"

    def state(self) -> str:
        state, reason = str(self.status.get("state")), str(self.status.get("reason") or "")
        verdict, step = _STATES.get(state, ("failed", ""))
        said = (f"{state}: {reason}" if reason else state) + step
        _must(verdict == "ok", said, verdict)
        return said

    def signatures(self) -> str | None:
        return _SIGNATURES.get(str(self.status.get("signatures")))

    def version(self) -> str:
        _must(self._version is not None, "its weights are no version of the run; `state` says why")
        shown = f"{self._version}" + (f", pinned at {self._pin}" if self._pin is not None else "")
        _must(self._asked in (None, self._version), f"{shown}, not {self._asked} as asked for here")
        return shown

    def lag(self) -> str:
        _must(self._newest is not None, "no newest version is known", "skipped")
        lag = max(int(self._newest or 0) - int(self._version or 0), 0)
        behind = f"{lag} behind version {self._newest}; if it stays so, the server's log says why"
        _must(not lag or self._pin is not None, behind, "warning")
        return f"{lag} behind" + (", as it is pinned" if lag else "")


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

PLUGIN: Table = (("", {"answers": _CheckedServer.answers}), ("answers", {"plugin": _CheckedServer.plugin}))
FOLLOWED: Table = (
    ("", {"run": _Followed.run}),
    ("run", {"state": _Followed.state, "signatures": _Followed.signatures, "version": _Followed.version}),
    ("version", {"lag": _Followed.lag}),
)
CONTROL: Table = (
    ("", {"guard": _CheckedServer.guard, "draft": _CheckedServer.draft, "token": _CheckedServer.control}),
)
