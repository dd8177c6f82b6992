"""Try everything that a run needs of its store, each step timed; nothing is left behind.

A step that fails says what to do next. Steps that need what a failed one would have made are skipped.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from ..core.errors import (
    AlreadyExists,
    DeltawireError,
    ObjectNotFound,
    RunNotFound,
    TruncatedFile,
    Unsupported,
)
from ..store import LocalStore, Store
from ..store.base import Announcing
from .fetch import CONNECTIONS, PART
from .neighbour import Neighbour, is_address
from .run import Run

BIG = 32 << 20
"""Bytes of the object that goes up in parts and comes down in ranges."""

SKEW_S = 60.0
"""Clocks further apart than this are worth a warning; S3 refuses requests at fifteen minutes."""

_LOOKS = 10
_PATIENCE_S = 10.0
_EXTRAS = {"torch": "torch", "huggingface_hub": "hub", "vllm": "vllm", "trl": "trl", "triton": "gpu"}

Verdict = Literal["ok", "warning", "failed", "skipped"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one step."""

    check: str
    verdict: Verdict
    detail: str = ""
    """What was found, or what is wrong and what to do."""
    seconds: float = 0.0
    """How long the step took."""


@dataclass(frozen=True, slots=True)
class Report:
    """The results of all steps."""

    run: str
    findings: tuple[Finding, ...]
    figures: dict[str, float] = field(default_factory=dict)
    """Seconds and bytes per second, by name."""

    @property
    def healthy(self) -> bool:
        return all(finding.verdict != "failed" for finding in self.findings)


class _Problem(Exception):
    """The store answered, but not as it should."""

    verdict: Verdict = "failed"


class _Warn(_Problem):
    """A problem that does not keep a run from working."""

    verdict = "warning"


Step = Callable[[], str]
"""Returns what was found, or raises _Warn, _Problem or an error of the store."""


def examine(store: Store, tell: Callable[[Finding], None] | None = None) -> Report:
    """Try everything; `tell` is called with each finding. What was put there is removed, also on an interrupt."""
    visit = _Trial(store)
    findings: list[Finding] = []

    def add(finding: Finding) -> None:
        findings.append(finding)
        if tell:
            tell(finding)

    try:
        for finding in visit.findings():
            add(finding)
    finally:
        left = visit.clean()
    if left:
        add(Finding("clean up", "failed", f"delete {left[0]} and {len(left) - 1} more by hand"))
    return Report(store.url, tuple(findings), visit.figures)


class _Trial:
    def __init__(self, store: Store) -> None:
        self.store = store
        self.figures: dict[str, float] = {}
        # no folder of its own: in a file store an empty one would stay
        self._prefix = f"doctor-{secrets.token_hex(6)}."
        self._made: list[str] = []
        self._stored = False
        self._mark = secrets.token_bytes(1024)
        # folders that the first put into a folder store will make, innermost first
        folders = (store.root, *store.root.parents) if isinstance(store, LocalStore) else ()
        self._absent = [folder for folder in folders if not folder.exists()]

    def findings(self) -> Iterator[Finding]:
        extras = [f"{extra} {'✓' if find_spec(module) else '–'}" for module, extra in _EXTRAS.items()]
        yield Finding("extras", "ok", "  ".join(extras))
        yield _try("cache", _look_at_cache)
        yield (created := _try("create", self._create))
        rest: list[tuple[str, Step]] = [
            ("read back", self._read_back),
            ("create again", self._create_again),
            ("overwrite", self._overwrite),
            ("conditional get", self._conditional_get),
            ("ranged read", self._ranged_read),
            ("list", self._list),
            ("latency", self._latency),
            ("clock", self._clock),
            ("upload in parts", self._upload),
            ("download in ranges", self._download),
            ("announcements", self._announcements),
            ("delete", self._delete),
        ]
        for name, step in rest:
            yield Finding(name, "skipped") if created.verdict == "failed" else _try(name, step)
        yield _try("run", self._run)

    # ── the store ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _create(self) -> str:
        self.store.put_if_absent(self._key("small"), self._mark)
        self._stored = True
        return "an object that was not there"

    def _read_back(self) -> str:
        if self.store.get(self._key("small")).data != self._mark:
            raise _Problem("other bytes came back than were put; do not use this store")
        return "the same bytes"

    def _create_again(self) -> str:
        with contextlib.suppress(AlreadyExists):
            self.store.put_if_absent(self._key("small"), b"second")
            self.store.put(self._key("small"), self._mark)
            raise _Problem(
                "a second writer could create what exists: two trainers could both win a version. "
                "Use a store with conditional writes (If-None-Match), or make sure that one trainer writes at a time"
            )
        if self.store.get(self._key("small")).data != self._mark:
            raise _Problem("a refused create changed the object; do not use this store")
        if not self.store.creates_exclusively:
            return "refused, though not between machines: writers claim the run first"
        return "refused, as it must be"

    def _overwrite(self) -> str:
        key = self._key("head")
        for content in (b"1", b"22"):
            self.store.put(key, content)
            if (found := self.store.get(key).data) != content:
                raise _Problem(f"a read after a write gave {found!r} for {content!r}: readers may be late by that much")
        return "read after write is current"

    def _conditional_get(self) -> str:
        etag = self.store.get(self._key("head")).etag
        if etag is None:
            return "this store has no etags: each look reads head.json whole, which is small"
        if self.store.get_if_changed(self._key("head"), etag) is not None:
            raise _Problem("an unchanged object came again: etags do not hold still here")
        self.store.put(self._key("head"), b"333")
        changed = self.store.get_if_changed(self._key("head"), etag)
        if changed is None or changed.data != b"333":
            raise _Problem("a change went unseen by a conditional get: followers would not notice new versions")
        return "not modified, then modified"

    def _ranged_read(self) -> str:
        if self.store.get_range(self._key("small"), 100, 50) != self._mark[100:150]:
            raise _Problem("a range of an object has other bytes than the object")
        try:
            self.store.get_range(self._key("small"), 1000, 100)
        except TruncatedFile:
            return "exact, and refused past the end"
        raise _Problem("a range past the end was answered")

    def _list(self) -> str:
        found = {info.key: info.size for info in self.store.list(self._prefix)}
        if found.get(self._key("small")) != len(self._mark):
            raise _Problem("a listing does not show what was just written; versions would be found late")
        return f"{len(found)} objects"

    def _latency(self) -> str:
        times = []
        for _ in range(_LOOKS):
            clock = time.perf_counter()
            self.store.get_if_changed(self._key("small"), None)
            times.append(time.perf_counter() - clock)
        self.figures["latency_s"] = sorted(times)[_LOOKS // 2]
        return f"{self.figures['latency_s'] * 1e3:.1f} ms for a small read (median of {_LOOKS})"

    def _clock(self) -> str:
        before = time.time()
        self.store.put(self._key("clock"), b"tick")
        after = time.time()
        stamped = self.store.head(self._key("clock")).modified
        # many stores give whole seconds; what lies within that and the request itself is no skew
        ahead = max(stamped - after, min(stamped + 1.0 - before, 0.0))
        self.figures["clock_skew_s"] = ahead
        if abs(ahead) > SKEW_S:
            way = "ahead of" if ahead > 0 else "behind"
            raise _Warn(f"the store's clock is {abs(ahead):.0f} s {way} this machine's; set this machine's clock (NTP)")
        return "the store's and this machine's agree" if abs(ahead) < 1 else f"{ahead:+.1f} s at the store"

    def _upload(self) -> str:
        piece = secrets.token_bytes(1 << 20)
        self._big = piece
        clock = time.perf_counter()
        self.store.put(self._key("big"), lambda: (piece for _ in range(BIG >> 20)))
        return self._speed("upload", time.perf_counter() - clock)

    def _download(self) -> str:
        clock = time.perf_counter()
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            parts = [*pool.map(lambda at: self.store.get_range(self._key("big"), at, PART), range(0, BIG, PART))]
        speed = self._speed("download", time.perf_counter() - clock)
        if any(part != self._big * (PART >> 20) for part in parts):
            raise _Problem("a large object came back with other bytes; do not use this store")
        return speed

    def _speed(self, way: str, seconds: float) -> str:
        self.figures[f"{way}_bytes_per_s"] = BIG / seconds
        return f"{BIG >> 20} MiB at {BIG / seconds / 1e6:.0f} MB/s"

    def _announcements(self) -> str:
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
                raise _Warn(f"nothing announced within {_PATIENCE_S:.0f} s; followers ask instead") from None
            if isinstance(said, DeltawireError):
                raise said
            return said

        threading.Thread(target=listen, name="deltawire-doctor", daemon=True).start()
        try:
            next_key()
            clock = time.perf_counter()
            store.put(self._key("announced"), b"news")
            while next_key() not in ("", self._key("announced")):
                pass
        except Unsupported:
            return polled
        finally:
            stop.set()
        self.figures["announced_s"] = time.perf_counter() - clock
        return f"a change was announced after {self.figures['announced_s'] * 1e3:.0f} ms"

    def _delete(self) -> str:
        key = self._key("small")
        self.store.delete(key)
        try:
            self.store.head(key)
        except ObjectNotFound:
            self.store.delete(key)
            return "gone, and a second delete is no error"
        raise _Problem("a deleted object is still there")

    # ── around it ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> str:
        try:
            run = Run.open(self.store)
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

    def _key(self, name: str) -> str:
        key = self._prefix + name
        if key not in self._made:
            self._made.append(key)
        return key

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


def _try(check: str, step: Step) -> Finding:
    clock = time.perf_counter()
    verdict: Verdict = "ok"
    try:
        detail = step()
    except _Problem as problem:
        verdict, detail = problem.verdict, str(problem)
    except DeltawireError as error:
        verdict, detail = "failed", str(error)
    return Finding(check, verdict, detail, time.perf_counter() - clock)


def _look_at_cache() -> str:
    folder = os.environ.get("DELTAWIRE_CACHE")
    if not folder:
        return "off; DELTAWIRE_CACHE=/path lets replicas of one host fetch each object once"
    if is_address(folder):
        return f"that of the site at {Neighbour(folder, None).name}; it was not asked"
    path = Path(folder).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
        files = [entry for entry in path.iterdir() if entry.is_file()]
        used = sum(entry.stat().st_size for entry in files)
        probe = path / f".doctor-{secrets.token_hex(4)}"
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as error:
        raise _Warn(f"DELTAWIRE_CACHE={folder}: {error.strerror}; replicas will fetch for themselves") from None
    return f"{path}: {len(files)} objects, {used / 1e6:.0f} MB"
