"""Follow a directory of another system's versions, and publish each of them.

    look      the folders that are there, in order                                  (folders.py)
    read      index or manifest, headers; everything they claim is checked          (indexed.py, skyrl.py)
    publish   a source that patches the publisher's own copy, a tensor at a time    (version.py)

Nothing is remembered but what is in the run: each version has the number and the identity of what it was imported from
among its metrics. A source that was wiped and begun again has another version under that number, or none: its versions
are read from the base checkpoint on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from deltawire import Checkpoint, Published, Publisher, Run, Source
from deltawire.errors import (
    DeltawireError,
    DivergedRun,
    FormatError,
    ManifestError,
    MissingBase,
    ObjectNotFound,
    PublishFailed,
    RunNotFound,
    SchemaError,
    StoreUnavailable,
)
from deltawire.store import Store, open_store

from .folders import Folder, Stamp, chain, number_of, open_folder
from .indexed import INDEX
from .version import ForeignVersion, Patched

log = logging.getLogger("deltawire")

VERSION, IDENTITY = "source_version", "source_id"
"""Metrics of an imported version: its number, and 48 bits that tell it from another version of that number."""

MAX_TENSORS = 1 << 18
"""As many as a run may have."""

REFUSED = (FormatError, SchemaError, ManifestError, MissingBase, ObjectNotFound)
"""What contents that are bad raise: the version is left out."""

Progress = Callable[[str, int, int], None]
"""(version, bytes read since the last call, bytes of the tensors that it changes)"""


@dataclass(frozen=True, slots=True)
class Imported:
    """A version that was imported."""

    published: Published
    name: str
    """Of its folder, or of the base checkpoint."""
    kind: Literal["base", "delta", "full"]
    source_version: str
    source_bytes: int
    """Of its files at the source; 0 for the base."""
    seconds: float
    """From the first look at its files to the commit."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A version at the source that weights are of."""

    number: int
    identity: int
    """0 for the base checkpoint."""
    version: str = field(compare=False)
    """What it calls itself."""


class Importer:
    """Publishes the versions of another system's directory to a run. Use as a context manager."""

    def __init__(
        self,
        source: str | Path | Store,
        run: str | Path | Store,
        *,
        base: str | Path | None = None,
        base_version: int = 0,
        **options: Any,
    ) -> None:
        """`base` is the checkpoint that the source's first version builds on; none is needed where that has full
        weights. `base_version` is its number at the source, where a training was resumed. `options` are those of
        `Publisher`.

        Raises DivergedRun if the newest version of the run was not imported.
        """
        self._store, self._run, self._options = open_store(source), run, options
        self._base = None if base is None else Checkpoint(base)
        self._files: dict[str, bytes] = {}
        """Companion files of a run that begins with a full version. The publisher reads them when it commits."""
        self._start = _Place(base_version, 0, str(base_version))
        """The base checkpoint."""
        self._open()
        self._refused: dict[str, Stamp] = {}
        """Folders that could not be imported, as they were then."""
        self._bases: dict[str, tuple[float, str | None]] = {}
        """When versions without numbers were written, and what they build on."""
        self._empty = False
        """Whether it was said that nothing is there."""
        self._unsure = False
        """Whether the run may be ahead of `_held`: a publish failed."""

    def _open(self) -> None:
        """Go on from the newest version of the run."""
        files = self._base.folder if self._base is not None else None if _is_there(self._run) else self._files
        self._publisher = Publisher(self._run, files=files, group=None, continues=True, **self._options)
        self._held = self._imported()
        """What the publisher's own copy has: the newest version of the run. None for a new run."""
        self._at = self._held or self._start
        """Where the source goes on: like `_held`, or the base, where it has begun again."""
        self._same: tuple[str, Stamp] | None = None
        """The folder that `_at` was found in, as it was then."""
        self._captured: _Place | None = None
        """What was captured and is not committed, where that failed."""
        self._torn = False
        """Whether the publisher's copy may be of another version than `_held` or `_captured`: what moves both was
        interrupted."""

    def follow(
        self,
        *,
        once: bool = False,
        poll: float = 2.0,
        stop: threading.Event | None = None,
        progress: Progress | None = None,
    ) -> Iterator[Imported]:
        """Import every version that is there and, without `once`, every one that comes, and yield each.

        What cannot be imported is left out, with a warning, and looked at again when its files change; with `once` the
        first such error is raised at the end. A store that cannot be reached is tried again.
        """
        stop = stop or threading.Event()
        if self._torn:
            with suppress(DeltawireError):
                self._publisher.close()
            self._open()
        self._refused.clear()
        errors: list[DeltawireError] = []
        while not stop.is_set():
            try:
                came = False
                for imported in self._round(progress, errors):
                    came = True
                    yield imported
                    if stop.is_set():
                        return
            except (*REFUSED, StoreUnavailable, PublishFailed) as error:
                if once:
                    raise
                log.warning("importing from %s failed, trying again: %s", self._store.url, error)
                self._unsure = True
            else:
                if came:
                    continue
                if once:
                    if errors:
                        raise errors[0]
                    return
            stop.wait(poll)

    def close(self) -> None:
        self._publisher.close()

    def __enter__(self) -> Importer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._publisher.__exit__(kind, *rest)

    # ── where we are ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _imported(self) -> _Place | None:
        """What the newest version of the run was imported from."""
        newest = self._publisher.newest
        if newest is None:
            return None
        number, identity = newest.metrics.get(VERSION), newest.metrics.get(IDENTITY)
        if number is None or identity is None:
            raise DivergedRun(
                f"version {newest.version} of {self._publisher.url} was not imported: give the import an address of "
                "its own"
            )
        return _Place(int(number), int(identity), str(int(number)))

    def _round(self, progress: Progress | None, errors: list[DeltawireError]) -> Iterator[Imported]:
        """Import what is there now. Notes why the first one is left out."""
        if self._unsure and self._captured is None and self._held is not None:
            self._publisher.weights()
            if (held := self._imported()) is not None and held != self._held:
                self._held = self._at = held
        self._unsure = False
        # first: the base is not published where the source cannot be read
        folders = self._after()
        if self._held is None and self._base is not None:
            yield self._publish_base(self._base, progress)
        for folder in folders:
            if self._refused.get(folder.prefix) == folder.stamp:
                continue
            began = time.perf_counter()
            try:
                version = folder.read(len(self._schema().tensors) if self._held else MAX_TENSORS)
                if version is None:
                    continue
                if self._held is None:
                    self._files.update(folder.companions())
                yield self._publish(folder, version, began, progress)
            except REFUSED as error:
                log.warning("version %s is not imported: %s", folder.name, error)
                if not errors:
                    errors.append(error)
                self._refused[folder.prefix] = folder.stamp
            else:
                # what builds on it may follow now
                self._refused.clear()
                self._same = folder.prefix, folder.stamp

    # ── which versions ───────────────────────────────────────────────────────────────────────────────────────────────

    def _after(self) -> Iterator[Folder]:
        """Folders of the versions that come next, in order."""
        prefixes = chain(self._store)
        folders: dict[str, Folder] = {}

        def look(prefix: str) -> Folder:
            if prefix not in folders:
                folders[prefix] = open_folder(self._store, prefix)
            return folders[prefix]

        numbered = any(number_of(prefix) is not None for prefix in prefixes)
        if not numbered:
            prefixes = self._in_order(prefixes, look)
        if not prefixes and not self._empty:
            log.warning(
                "%s has no version yet: no folder like weight_v000001 or delta-00000001 with an index or manifest",
                self._store.url,
            )
        self._empty = not prefixes
        return map(look, prefixes[self._next(prefixes, look, numbered) :])

    def _next(self, prefixes: list[str], look: Callable[[str], Folder], numbered: bool) -> int:
        """Index of the first folder after the version that the weights are of. Notes where the source began again."""
        if numbered:
            numbers = [number for prefix in prefixes if (number := number_of(prefix)) is not None]
            later = sum(number <= self._at.number for number in numbers)
            if self._at.identity == 0:
                return later if self._at.number else 0
            if self._at.number in numbers:
                if self._is(look(prefixes[later - 1])):
                    return later
            elif later == 0 or later < len(numbers):
                # pruned, or wiped and nothing there yet
                return later
        elif self._at.identity == 0:
            return 0
        elif self._same is not None and self._same[0] in prefixes and self._is(look(self._same[0])):
            return prefixes.index(self._same[0]) + 1
        else:
            for index in range(len(prefixes), 0, -1):
                if self._is(look(prefixes[index - 1]), only_if_read=True):
                    return index
            if not prefixes:
                return 0
        log.warning("%s has begun again: its versions are read from the base checkpoint on", self._store.url)
        self._at, self._same = self._start, None
        return 0

    def _is(self, folder: Folder, only_if_read: bool = False) -> bool:
        """Whether a folder holds the version that the weights are of, as far as it can be read."""
        if self._same is not None and self._same[0] == folder.prefix and self._same[1] == folder.stamp:
            return True
        try:
            version = folder.read(MAX_TENSORS)
        except REFUSED:
            return not only_if_read
        if version is None:
            return not only_if_read
        if version.identity != self._at.identity:
            return False
        self._at = replace(self._at, version=version.version)
        self._same = folder.prefix, folder.stamp
        return True

    def _in_order(self, prefixes: list[str], look: Callable[[str], Folder]) -> list[str]:
        """Versions that have no numbers: by the time they were written, but never before what they build on."""
        self._bases = {prefix: found for prefix, found in self._bases.items() if prefix in prefixes}
        unread = {}
        for prefix in prefixes:
            if prefix not in self._bases and (folder := look(prefix)).has(INDEX):
                try:
                    self._bases[prefix] = folder.modified, folder.base()
                except REFUSED:
                    unread[prefix] = folder.modified, None
        bases = self._bases | unread
        by_name = {Path(prefix).name: prefix for prefix in bases}
        order: dict[str, None] = {}
        for prefix in sorted(bases, key=lambda prefix: (bases[prefix][0], prefix)):
            path = [prefix]
            while (base := by_name.get(bases[path[-1]][1] or "", "")) not in ("", *order, *path):
                path.append(base)
            order.update(dict.fromkeys(reversed(path)))
        return list(order)

    # ── publishing ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _publish_base(self, base: Checkpoint, progress: Progress | None) -> Imported:
        began = time.perf_counter()

        def advance(phase: str, n: int, total: int) -> None:
            if progress and phase == "detect":
                progress(base.folder.name, n, total)

        published = self._commit(base, self._start, advance)
        return Imported(published, base.folder.name, "base", self._start.version, 0, time.perf_counter() - began)

    def _publish(self, folder: Folder, version: ForeignVersion, began: float, progress: Progress | None) -> Imported:
        before = self._at
        number = before.number + 1 if folder.number is None else folder.number
        at = _Place(number, version.identity, version.version)
        if self._captured == at:
            # the publisher's copy has it already
            source: Source = self._publisher.weights()
        else:
            advance = partial(progress, version.name) if progress else None
            source = Patched(version, self._weights(version, before), advance, partial(_check_same, folder))
        published = self._commit(source, at)
        kind: Literal["delta", "full"] = "full" if version.base is None else "delta"
        return Imported(published, version.name, kind, version.version, version.nbytes, time.perf_counter() - began)

    def _commit(self, source: Source, at: _Place, progress: Progress | None = None) -> Published:
        metrics = {VERSION: float(at.number), IDENTITY: float(at.identity)}
        self._torn = True
        try:
            handle = self._publisher.publish(source, step=at.number, metrics=metrics, progress=progress)
            self._captured = at
            published = handle.result()
        except DeltawireError:
            # of the publisher: anything else may come from a signal handler
            self._torn = False
            raise
        self._captured, self._held, self._at = None, at, at
        self._torn = False
        return published

    def _weights(self, version: ForeignVersion, at: _Place) -> Source | None:
        """The weights that a version builds on."""
        if version.base is None:
            return None if self._held is None else self._publisher.weights()
        if not self._follows(version.base, at):
            came = f"version {at.version} was imported last" if at.identity else "none was imported"
            if at == self._start and version.base.isdigit():
                came += ": of a training that was resumed, give the checkpoint of that version with --base and its "
                came += "number with --base-version"
            raise MissingBase(f"{self._store.url}: {version.name} builds on version {version.base[:80]}, and {came}")
        if self._held == at:
            return self._publisher.weights()
        if self._base is None:
            raise MissingBase(
                f"{self._store.url}: {version.name} builds on a checkpoint that is not here: name it with --base"
            )
        return self._base

    def _follows(self, base: str, at: _Place) -> bool:
        """Whether a version with this base goes on from there."""
        if base == at.version:
            return True
        # a name that no folder has is that of the base checkpoint
        return at == self._start and not base.isdigit() and all(base != Path(prefix).name for prefix in self._bases)

    def _schema(self) -> Any:
        return self._publisher.weights().schema


def _check_same(folder: Folder) -> None:
    """ManifestError if a folder is no longer as it was: no checksum says whether what was read belongs together."""
    if open_folder(folder.store, folder.prefix).stamp != folder.stamp:
        raise ManifestError(f"{folder.where} was written to while it was read")


def _is_there(run: str | Path | Store) -> bool:
    try:
        Run.open(str(run) if isinstance(run, Path) else run)
    except RunNotFound:
        return False
    return True
