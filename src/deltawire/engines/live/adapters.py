"""Adapters (LoRA) that a server follows beside its base model, each from a run of its own.

A version is decoded and verified by a process of its own, as a folder in memory that PEFT loads, and loaded by the
engine as `policy@41`. Once all ranks have it, new requests for `policy` use it. Requests that are running keep the
version they began with, so every answer is made by exactly one. What ranks learn while their engine reads the first
versions lets the same process arrange later ones, so that ranks have nothing left to do but to copy.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any
from weakref import finalize

import msgspec

from ...bucket.checkpoint_folder import ADAPTER_STEM, fill_companions, writing
from ...bucket.run import Run
from ...bucket.walk import Delta
from ...core import full
from ...core.digest import StateDigest
from ...core.errors import SchemaMismatch, VersionNotFound, VersionRefused
from ...core.manifest import Base
from ...replica.target import UNCHANGED, Staged, Update
from ..control import figures
from ..follower import Follower
from . import arrays
from .adapter_worker import FILE
from .arrangement import Arrangement
from .channel import Answer
from .decoder import KeptDecoder
from .messages import ReadAdapter
from .node import STAGE_LIMIT_S, source_folder
from .samples import current
from .swap import errors
from .turns import short_turns

log = logging.getLogger("deltawire")

LEASE_S = 60.0
"""Seconds that an older version stays loaded after the last request that named it."""

DROP_AGAIN_S = 60.0
"""Seconds until a version that the engine could not drop is dropped again."""

KEPT = 8
"""Number of versions of an adapter, at most, that stay loaded only because clients may come back for them."""

_ASK_S = 0.01
"""Seconds between two questions to the ranks whether they have read an adapter."""

_NOT_LOADED = StateDigest(1, 1)
"""Stands for the digest of an adapter of which no version is loaded yet."""

_BADNESS = ("healthy", "degraded", "starting", "paused", "failed")
"""States of a follower, the best first."""


@dataclass(slots=True)
class Loaded:
    """A version of an adapter that the engine holds on all ranks."""

    name: str
    version: int
    folder: Path
    """Where the engine loads it from, also again after it has dropped it for others."""
    id: Any = 0
    """The engine's id of it; never used for another."""
    key: str = ""
    """Says which versions are arranged alike: those with the same tensors and the same config."""
    read_by_engine: str = ""
    """Why the engine read it itself; empty where ranks only copied what was arranged for them."""
    requests: int = 0
    """Number of requests that use it now."""
    leased_until: float = 0.0
    """Until when it is promised to a client, by the monotonic clock."""
    named_until: float = 0.0
    """Until when a client that named it may come back for it, by the monotonic clock."""
    timer: asyncio.TimerHandle | None = field(default=None, compare=False, repr=False)
    """Goes off when no client can come back any more."""

    @property
    def full_name(self) -> str:
        return f"{self.name}@{self.version}"


class Registry:
    """The versions of adapters that an engine holds. Belongs to one thread.

    keep    number of older versions per adapter that stay although nothing uses them
    """

    def __init__(self, keep: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._keep, self._clock = keep, clock
        self._loaded: dict[str, list[Loaded]] = {}
        """Versions that are loaded, by name; the current one last."""

    def put(self, loaded: Loaded) -> None:
        """Make a version the current one of its adapter."""
        versions = self._loaded.setdefault(loaded.name, [])
        versions[:] = [*(each for each in versions if each is not loaded), loaded]

    def current(self, name: str) -> Loaded | None:
        versions = self._loaded.get(name)
        return versions[-1] if versions else None

    def versions(self, name: str) -> list[int]:
        """The versions of an adapter that requests can name, ascending."""
        return sorted(loaded.version for loaded in self._loaded.get(name, ()))

    def find(self, model: str) -> Loaded | None:
        """Return what a request for `policy` or `policy@41` gets."""
        name, _, version = model.rpartition("@")
        if not name:
            return self.current(model)
        return next((each for each in self._loaded.get(name, ()) if str(each.version) == version), None)

    def lease(self, loaded: Loaded, seconds: float) -> None:
        """Keep a version for so long at least; 0 ends its lease. Raises VersionRefused if too many are leased."""
        now = self._clock()
        others = [each for each in self._loaded[loaded.name] if each is not loaded and each.leased_until > now]
        if seconds and len(others) >= KEPT:
            raise VersionRefused(
                f"{loaded.full_name} cannot be leased: {sorted(each.version for each in others)} are, and no more than "
                f"{KEPT} versions of an adapter may be; end one with 0 seconds"
            )
        loaded.leased_until = max(loaded.leased_until, now + seconds) if seconds else 0.0

    def name(self, loaded: Loaded) -> None:
        """Keep a version that a request has named for some time, if there is room."""
        loaded.named_until = self._clock() + LEASE_S

    def remaining(self, loaded: Loaded) -> float:
        """Return the seconds in which clients may come back for a version."""
        return max(0.0, max(loaded.leased_until, loaded.named_until) - self._clock())

    def take_unneeded(self) -> list[Loaded]:
        """Remove and return the versions that nothing uses and that need not be kept."""
        taken: list[Loaded] = []
        now = self._clock()
        for name, versions in self._loaded.items():
            older = versions[: max(0, len(versions) - 1 - self._keep)]
            idle = [each for each in older if not each.requests and each.leased_until <= now]
            named = sorted((each for each in idle if each.named_until > now), key=lambda each: each.named_until)
            # leases are promised, so what was only named gives way, the one named longest ago first
            excess = len(named) + sum(each.leased_until > now for each in older) - KEPT
            gone = [each for each in idle if each not in named[max(0, excess) :]]
            self._loaded[name] = [each for each in versions if each not in gone]
            taken += gone
        return taken


@dataclass(slots=True, kw_only=True)
class StagedAdapter(Staged):
    """A verified version of an adapter: a folder, and a copy of its weights that shares their memory."""

    folder: Path | None
    """None for a version on the way to another, which the engine never sees."""
    held: Path
    key: str = ""
    """As of `Loaded`."""


class AdapterTarget:
    """An adapter in an engine, as the target of a replica. The live version is never written to: every version is a
    new copy, so a failure leaves nothing to undo."""

    takes_deltas = True

    def __init__(self, name: str, loader: Adapters, room: Path) -> None:
        self._name, self._loader, self._room = name, loader, room
        self._run: Run | None = None
        """None until it is known to fit."""
        self._base: Base | None = None
        self._held: Path | None = None
        """Folder with the weights that the next delta is applied to."""
        self._folder: Path | None = None
        """The folder that the engine loaded last."""
        self.served: int | None = None
        """The version that the engine has."""

    def bind(self, run: Run) -> bool:
        if run is self._run:
            return False
        self._base = run.info.base
        run.check_kind(is_adapter=True)
        if self._base is not None and not self._base.digests:
            log.warning("%s names no digest of its base model: not checked", run.store.url)
        if misfit := self.misfit():
            raise SchemaMismatch(misfit)
        self._run = run
        self._hold(None)
        return True

    def misfit(self, *, wait: bool = True) -> str:
        """Say why the adapters of this run do not fit the base model of this server; empty if they do.

        Without `wait` also empty while the base weights are no version: the event loop must not wait for that.
        """
        if self._base is None or not self._base.digests:
            return ""
        found = self._loader.base_digest(wait=wait)
        if not found or self._base.fits(found):
            return ""
        return (
            f"these adapters are for another base model, {str(self._base)[:400]}; this server has {found}: start it "
            "from the checkpoint that they are trained on"
        )

    def digest(self) -> StateDigest:
        return _NOT_LOADED if self._held is None else full.digest_of(full.Checkpoint(self._held))

    def stage(self, update: Update) -> StagedAdapter:
        """Build the version beside the one in use, prove it, and put it where the engine can load it."""
        run = self._run
        assert run is not None, "a replica binds its target first"
        if misfit := self.misfit():
            # the base has moved since the adapter was bound
            raise VersionRefused(misfit, has_ended=lambda: not self.misfit(wait=False))
        with writing(self._room):
            folder = Path(tempfile.mkdtemp(dir=self._room))
            try:
                return self._staged(run, update, folder)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise

    def _staged(self, run: Run, update: Update, folder: Path) -> StagedAdapter:
        clock, manifest = time.perf_counter(), run.manifest(update.version)
        configs = [file.hash for file in manifest.files if file.name == full.ADAPTER_CONFIG]
        key = f"{run.info.run} {' '.join(configs)}"
        arrangement = self._loader.arrangement(key) if update.final else None
        read = ReadAdapter(run.schema, str(folder), "", [], None, arrangement)
        if isinstance(update.content, Delta):
            assert self._held is not None, "a replica plans deltas only from a version that it has"
            for number, data in enumerate(update.content.files):
                read.paths.append(str(folder / f"{number}.delta"))
                data.save(Path(read.paths[-1]))
            read.before, read.claim = str(self._held), update.content.claim
        else:
            # the event loop of the server passes on the tokens of all requests
            with short_turns():
                full.write_checkpoint(folder, update.content, stem=ADAPTER_STEM)
        answer = self._loader.decoder.do(lambda decoder: decoder.call(read, STAGE_LIMIT_S))
        update.require(StateDigest.parse(answer["digest"]), UNCHANGED)
        for delta in read.paths:
            os.unlink(delta)
        if answer["unusual"]:
            log.warning("%s@%d is read by the engine: %s", self._name, update.version, answer["unusual"])
        held = Path(tempfile.mkdtemp(dir=self._loader.room))
        for path in full.weight_files(folder):
            os.link(path, held / path.name)
        if update.final:
            fill_companions(folder, run, manifest, before=self._folder)
        else:
            shutil.rmtree(folder)
        staged = StagedAdapter(
            update=update, folder=folder if update.final else None, held=held, key=key, served=update.final
        )
        arranged = answer["seconds"]["arrange"]
        staged.timings |= {"decode": time.perf_counter() - clock - arranged, "stage": arranged}
        return staged

    def swap(self, staged: StagedAdapter) -> None:
        clock, folder = time.perf_counter(), staged.folder
        if folder is not None:
            try:
                self._loader.load(Loaded(self._name, staged.update.version, folder, key=staged.key))
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                shutil.rmtree(staged.held, ignore_errors=True)
                raise
            # ranks have read it
            (folder / FILE).unlink(missing_ok=True)
            self._folder, self.served = folder, staged.update.version
            staged.timings["load"] = time.perf_counter() - clock
        self._hold(staged.held)

    def _hold(self, held: Path | None) -> None:
        if self._held is not None:
            shutil.rmtree(self._held, ignore_errors=True)
        self._held = held


class AdapterFollower(Follower):
    """Keeps an adapter of a server at a version of its run."""

    def __init__(self, name: str, run: str, loader: Adapters, room: Path, **options: Any) -> None:
        self.name = name
        self._adapter = AdapterTarget(name, loader, room)
        super().__init__(run, self._adapter, **options)

    @property
    def version(self) -> int | None:
        return self._adapter.served

    @property
    def reason(self) -> str:
        # a base that has moved is worth knowing before the next version of the adapter
        return super().reason or (self._adapter.misfit(wait=False) if self.caught_up.is_set() else "")

    def named(self, version: int | None) -> None:
        if self.version is not None:
            self.caught_up.set()


class Adapters(ABC):
    """Follows the runs of all adapters of a server. Made in the event loop of the engine by `Endpoint.follow_adapters`.
    Each engine extends it by the abstract methods, and has requests pass through `lend`, for what `find` returns.

    runs      name → address
    pins      name → version to stay at, where it is not to follow
    source    folder or hub name of the checkpoint that the engine started from; revision: which one on the hub
    base      returns the follower of the base weights; None if they stay what the engine loaded
    options   of every follower
    """

    def __init__(
        self,
        runs: Mapping[str, str],
        *,
        source: str,
        revision: str | None = None,
        base: Callable[[], Follower | None] = lambda: None,
        pins: Mapping[str, int | None] = MappingProxyType({}),
        keep: int = 1,
        **options: Any,
    ) -> None:
        self._source, self._revision, self._base = source, revision, base
        self._loop = asyncio.get_running_loop()
        self._registry = Registry(keep)
        self._room = arrays.folder()
        room = Path(self._room.name)
        self._versions, self.room = room / "versions", room / "held"
        """Where versions are for the engine, and where their weights are for later ones."""
        for folder in (self._versions, self.room):
            folder.mkdir()
        self.decoder = KeptDecoder(room)
        self._arrangements: dict[str, Arrangement | None] = {}
        """How all ranks arrange versions, by their keys; None where they read them by themselves."""
        self._digesting = threading.Lock()
        self._base_digest = ""
        self._tasks: set[asyncio.Task[None]] = set()
        self._dropping: dict[str, asyncio.Event] = {}
        """Versions that the engine is about to drop, by full name. The event is set once it has."""
        self.followers = {
            name: AdapterFollower(name, run, self, self._versions, pin=pins.get(name), **options)
            for name, run in runs.items()
        }

    def start(self) -> None:
        for follower in self.followers.values():
            follower.start()

    def stop(self, seconds: float = 0.0) -> None:
        for patience in (0.0, seconds):
            for follower in self.followers.values():
                follower.stop(patience)
        self.decoder.close()

    def status(self) -> list[dict[str, Any]]:
        """Return what GET /deltawire/status shows of the adapters."""
        return [
            {
                "name": name,
                "state": each.state,
                "reason": each.reason,
                **figures(each),
                "loaded": self._registry.versions(name),
                "read_by_engine": loaded.read_by_engine if (loaded := self.find(name)) else "",
            }
            for name, each in self.followers.items()
        ]

    def health(self, state: str, reason: str) -> tuple[str, str]:
        """Return state and reason of the server, given those of its base weights: what is worst off counts."""
        if state == "idle":
            state, reason = "healthy", ""
        for name, follower in self.followers.items():
            if _BADNESS.index(follower.state) > _BADNESS.index(state):
                state, reason = follower.state, f"adapter {name}: {follower.reason or 'catching up with its run'}"
        return state, reason

    def followed(self, model: str) -> tuple[AdapterFollower, Callable[[], int | None]] | None:
        """Return the follower of the adapter that a request names, and the version it would get; None if it is none."""
        follower = self.followers.get(model) or self.followers.get(model.rpartition("@")[0])
        if follower is None:
            return None
        return follower, lambda: found.version if (found := self.find(model)) else None

    def find(self, model: str) -> Loaded | None:
        """Return the version that a request for `policy` or `policy@41` gets; None if that is not loaded."""
        return self._registry.find(model)

    # ── what the engine does ─────────────────────────────────────────────────────────────────────────────────────────

    @abstractmethod
    def new_id(self) -> Any:
        """Return an id that no other adapter of the engine has."""

    @abstractmethod
    async def call_ranks(self, operation: str, **arguments: Any) -> list[Answer]:
        """Have all ranks call `LoadingAdapter.call`, between two steps."""

    @abstractmethod
    def serve(self, loaded: Loaded) -> None:
        """Let requests name this version, and have new requests for its adapter use it."""

    @abstractmethod
    def withdraw(self, loaded: Loaded) -> None:
        """Let no request name this version any more."""

    async def add(self, loaded: Loaded) -> None:
        """Load a version on all ranks, while requests run. Raises VersionRefused if a rank cannot."""
        loaded.id = self.new_id()
        # the ranks take a step between two calls
        while not _all_done(answers := await self._called("stage", loaded)):
            await asyncio.sleep(_ASK_S)
        self._learn(loaded, answers)
        while not _all_done(await self._called("load", loaded)):
            pass

    def _learn(self, loaded: Loaded, answers: list[Answer]) -> None:
        """Note how ranks have read a version, and how they want later ones arranged."""
        loaded.read_by_engine = next(filter(None, (answer.get("read_by_engine") for answer in answers)), "")
        wanted = [answer.get("arrangement") for answer in answers]
        if any(other != wanted[0] for other in wanted):
            loaded.read_by_engine, wanted = "its ranks arrange it differently", [None]
        if wanted[0] is None and loaded.read_by_engine and self._arrangements.get(loaded.key, True):
            log.warning(
                "%s and later versions are read by the engine, which takes longer: %s",
                loaded.full_name, loaded.read_by_engine,
            )  # fmt: skip
        self._arrangements[loaded.key] = msgspec.convert(wanted[0], Arrangement | None)

    def arrangement(self, key: str) -> Arrangement | None:
        """Return how ranks want versions of this key arranged; None if they do not, or that is not known yet."""
        return self._arrangements.get(key)

    async def remove(self, loaded: Loaded) -> None:
        """Drop a version from all ranks, also if only some have it. Once this returns, no step can need it."""
        await self._called("unload", loaded)

    async def _called(self, operation: str, loaded: Loaded) -> list[Answer]:
        what = {"id": loaded.id, "name": loaded.full_name, "folder": str(loaded.folder), "key": loaded.key}
        answers = await self.call_ranks(operation, **what)
        if failed := errors(answers):
            raise VersionRefused(failed[0])
        return answers

    # ── called by followers, whose threads it blocks ──────────────────────────────────────────────────────────────────

    def base_digest(self, *, wait: bool = True) -> str:
        """Return the state digest of the base weights that are served. Raises DeltawireError if it is unknown.

        If they are no version yet, wait until they are, or return "".
        """
        # asked again and again: a follower that can never catch up is replaced by another one or none
        while (follower := self._base()) is not None:
            if follower.caught_up.wait(1 if wait else 0):
                return str(follower.replica.digest)
            if not wait:
                return ""
        with self._digesting:
            if not self._base_digest:
                folder = source_folder(self._source, self._revision)
                if folder is None:
                    raise SchemaMismatch(f"the base model cannot be identified: there is no folder of {self._source!r}")
                self._base_digest = str(full.digest_of(full.Checkpoint(folder)))
            return self._base_digest

    def load(self, loaded: Loaded) -> None:
        """Load a version on all ranks and make it the one that the name means. Owns its folder if it succeeds.

        Raises VersionRefused if a rank cannot load it: then no rank has it, and the name means what it meant.
        """
        asyncio.run_coroutine_threadsafe(self._load(loaded), self._loop).result()

    async def _load(self, loaded: Loaded) -> None:
        known = self._registry.find(loaded.full_name)
        if known is not None:
            shutil.rmtree(loaded.folder, ignore_errors=True)
            loaded = known
        else:
            if dropped := self._dropping.get(loaded.full_name):
                # engines know versions by name
                await dropped.wait()
            try:
                await self.add(loaded)
            except Exception as error:
                await self._drop(loaded)
                raise VersionRefused(f"{loaded.full_name} cannot be loaded, nothing has changed: {error}") from error
        self._registry.put(loaded)
        self.serve(loaded)
        # not awaited: an engine may take long to drop a version, and this one is served already
        self._sweep_soon()

    # ── called for requests ──────────────────────────────────────────────────────────────────────────────────────────

    def lend(self, loaded: Loaded, outputs: Any, *, named: bool) -> AsyncIterator[Any]:
        """Pass on the outputs of a request, and keep its version loaded until they end. `named`: the request asked for
        this version and not for the current one, so that its client may come back for more."""
        if (record := current.get()) is not None:
            record.adapter_version = loaded.version
        loaded.requests += 1
        begun = False

        def end() -> None:
            loaded.requests -= 1
            if named:
                self._registry.name(loaded)
                self._sweep_later(loaded)
            self._sweep_soon()

        async def passed() -> AsyncIterator[Any]:
            nonlocal begun
            begun = True
            try:
                # closed before the use ends: the engine then computes nothing for it any more
                async with aclosing(outputs) as stream:
                    async for output in stream:
                        yield output
            finally:
                end()

        def drop() -> None:
            # called by whichever thread collects garbage
            if not begun and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(end)

        lent = passed()
        # a generator that is never started runs none of its own code
        finalize(lent, drop)
        return lent

    def lease(self, name: str, version: int, seconds: float) -> None:
        """Keep a version loaded for so many seconds, also while no request uses it; 0 ends its lease.

        Raises VersionNotFound, or VersionRefused if too many are leased.
        """
        loaded = self._registry.find(f"{name}@{version}")
        if loaded is None:
            raise VersionNotFound(f"{name}@{version} is not loaded; {self._registry.versions(name)} are")
        self._registry.lease(loaded, seconds)
        self._sweep_later(loaded)

    def _sweep_later(self, loaded: Loaded) -> None:
        if loaded.timer is not None:
            loaded.timer.cancel()
        loaded.timer = self._loop.call_later(self._registry.remaining(loaded) + 1, self._sweep_soon)

    def _sweep_soon(self) -> None:
        self._begin(self._sweep())

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _sweep(self) -> None:
        """Drop the versions that nothing needs."""
        unneeded = self._registry.take_unneeded()
        # all of them before the first is awaited: a request that comes meanwhile must not get one of the others
        for loaded in unneeded:
            self.withdraw(loaded)
            self._dropping[loaded.full_name] = asyncio.Event()
        for loaded in unneeded:
            await self._drop(loaded)
            self._dropping.pop(loaded.full_name).set()
            # not here: it takes milliseconds to free its memory, and this thread passes on the tokens of all requests
            await asyncio.to_thread(shutil.rmtree, loaded.folder, ignore_errors=True)

    async def _drop(self, loaded: Loaded) -> None:
        try:
            await self.remove(loaded)
        except Exception as error:
            text = "%s may stay in the memory of some ranks; no request uses it; next try in %d s: %s: %s"
            log.warning(text, loaded.full_name, DROP_AGAIN_S, type(error).__name__, error)
            self._loop.call_later(DROP_AGAIN_S, lambda: self._begin(self._drop(loaded)))


def _all_done(answers: list[Answer]) -> bool:
    return all(answer["done"] for answer in answers)
