"""What one rank does: stage, write, take back, report. Nothing here decides anything: which version comes next and
whether all ranks agree is decided in one place (follower.py), which calls an operation on all ranks at once.

    layout → group                      once: where the weights lie, which pieces are proven together
    stage … done → apply → audit … done → forget    a version; what has dots works in a thread while the model generates
                     └→ undo                        old bits back, whatever of the new ones was written
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import nn

from ...core.change import Change
from ...core.digest import StateDigest
from ...core.full import FullFile
from ...core.parallel import default_threads
from ...core.schema import Schema
from ...core.sparse import DeltaFile, Read
from .decode import Decoder, Lent, Rectangle, Wanted, compile_decoders, rectangle
from .guard import fingerprint, pack_again
from .placement import trace
from .shard import PieceChange, Shard, Sums, open_shard

log = logging.getLogger("deltawire")

Answer = dict[str, Any]
"""Plain values: it crosses processes. `error` in it says that the operation failed, and why."""


class Rank:
    """One rank's part of a model that follows.

    number     the rank, counted over all workers
    problems   reasons to refuse deltas that the placement map cannot show (guard.py)
    loading    entered around the model's own loader
    """

    def __init__(
        self,
        model: nn.Module,
        number: int,
        *,
        problems: Callable[[], list[str]] = list,
        loading: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._model, self._number, self._problems, self._loading = model, number, problems, loading
        self._schema: Schema | None = None
        self._shard: Shard | None = None
        self._groups: tuple[int, ...] = ()
        self._job: _Job | None = None
        # what is staged belongs to the job that staged it: a thread that was given up on changes nothing any more

    def call(self, operation: str, **arguments: Any) -> Answer:
        """Errors are answers: an exception would say nothing of the other ranks."""
        try:
            return getattr(self, f"_do_{operation}")(**arguments)  # type: ignore[no-any-return]
        except Exception as error:
            log.warning("rank %d: %s failed", self._number, operation, exc_info=True)
            return {"error": f"{type(error).__name__}: {error}"}

    def _do_layout(self, schema: str) -> Answer:
        """Trace the loader. `schema` is a file."""
        self._schema = msgspec.json.decode(Path(schema).read_bytes(), type=Schema)
        problems = self._problems()
        with self._loading():
            placement = trace(self._model, self._model.load_weights, self._schema)
        problems += placement.problems
        try:
            self._shard = open_shard(placement.pieces)
        except ValueError as error:
            problems.append(str(error))
        return {
            "pieces": [msgspec.structs.astuple(rectangle(piece.region)) for piece in placement.pieces],
            "problems": problems,
            "untouched": placement.untouched,
            "failure": placement.failure,
        }

    def _do_group(self, groups: list[list[int]]) -> Answer:
        """Every rank is sent the groups of all ranks: one call, one argument."""
        self._groups = tuple(groups[self._number])
        self._warm_up()
        return {}

    def _do_digest(self) -> Answer:
        return {"sums": _as_text(self._sums())}

    def _do_stage(self, done: str, kind: str, paths: list[str], lent: list[str]) -> Answer:
        """Begin to decode files against the live weights, in a thread: all of a delta, or full weights. What works in
        a thread says so when it is through, by a file `done`.<rank>."""
        self._do_forget()
        self._require_in_place()
        self._begin(done, lambda: self._stage(kind, paths, lent))
        return {}

    def _do_lend(self, done: str, rectangles: list[list[Any]], path: str) -> Answer:
        """Begin to write what this rank holds of some rectangles to `path`.<rank>.npz, in a thread."""
        self._begin(done, lambda: self._lend([Rectangle(*r) for r in rectangles], f"{path}.{self._number}"))
        return {}

    def _do_audit(self, done: str) -> Answer:
        """Begin to compute the digest of all live weights, in a thread."""
        self._begin(done, lambda: ({"sums": _as_text(self._sums())}, None))
        return {}

    def _do_done(self) -> Answer:
        """How the thread is doing: {} while it works."""
        assert self._job is not None
        return self._job.answer or {}

    def _do_apply(self) -> Answer:
        """In the pause: write, then prove. On an error the old bits are back."""
        clock = time.perf_counter()
        self._require_in_place()
        patch, predicted = self._staged
        try:
            self._weights.write(patch)
            self._synchronize()
            written = time.perf_counter()
            sums = predicted if self._weights.audited else self._sums()
            return {"sums": _as_text(sums), "apply": written - clock, "prove": time.perf_counter() - written}
        except BaseException:
            self._weights.undo(patch)
            self._synchronize()
            raise

    def _do_undo(self) -> Answer:
        if self._job is not None and self._job.staged is not None:
            self._weights.undo(self._job.staged.patch)
            self._synchronize()
        return {"sums": _as_text(self._sums())}

    def _do_forget(self) -> Answer:
        self._job = None
        return {}

    def _do_load(self, path: str) -> Answer:
        """In the pause: overwrite everything with full weights, of which nothing is kept to go back to."""
        self._require_in_place()
        clock = time.perf_counter()
        Decoder(self._weights).load(FullFile(*_opened(path)))
        self._synchronize()
        written = time.perf_counter()
        return {"sums": _as_text(self._sums()), "apply": written - clock, "prove": time.perf_counter() - written}

    def _do_reloading(self) -> Answer:
        """In the pause, before vLLM reloads weights by itself."""
        pack_again(self._model)
        return {}

    def _do_fingerprint(self) -> Answer:
        """A hash of everything the model computes with: parameters, and what kernels made of them."""
        return {"fingerprint": fingerprint(self._model)}

    def _begin(self, done: str, work: Callable[[], tuple[Answer, _Staged | None]]) -> None:
        self._job = _Job(work, Path(f"{done}.{self._number}"))

    # ── in the thread ────────────────────────────────────────────────────────────────────────────────────────────────

    def _stage(self, kind: str, paths: list[str], lent: list[str]) -> tuple[Answer, _Staged | None]:
        decoder = Decoder(self._weights, threads=max(1, default_threads() // 2))
        borrowed = _borrowed(lent)
        staged: list[PieceChange] = []
        wanted: list[Rectangle] = []
        for path in paths:
            read, size = _opened(path)
            try:
                if kind == "delta":
                    staged += decoder.delta(DeltaFile(read, size, self._schema), borrowed)
                else:
                    staged += decoder.full(FullFile(read, size))
            except Wanted as missing:
                wanted += missing.rectangles
        if wanted:
            return {"wanted": [msgspec.structs.astuple(r) for r in wanted]}, None
        moved = dict.fromkeys(self._groups, StateDigest())
        for item in staged:
            moved[self._groups[item.piece]] += item.change.digest()
        patch = self._weights.prepare(staged)
        self._synchronize()
        answer: Answer = {"moved": _as_text(moved), "changed": sum(item.change.count for item in staged)}
        if self._weights.audited:
            # nobody writes to weights that are served: what they are now is what the patch will meet
            present = self._sums()
            answer["present"] = _as_text(present)
            moved = {group: present[group] + value for group, value in moved.items()}
        return answer, _Staged(patch, moved)

    def _lend(self, rectangles: list[Rectangle], path: str) -> tuple[Answer, None]:
        parts = [*Decoder(self._weights).lend(rectangles)]
        arrays = {str(i): bits for i, (_, bits) in enumerate(parts)}
        index = msgspec.json.encode([part for part, _ in parts])
        with open(f"{path}.npz", "wb") as out:
            np.savez(out, index=np.frombuffer(index, np.uint8), **arrays)  # type: ignore[arg-type]
        return {"lent": f"{path}.npz"}, None

    # ── the rest ─────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _weights(self) -> Shard:
        if self._shard is None:
            raise RuntimeError("the layout of this rank is not known: ask for it first")
        return self._shard

    @property
    def _staged(self) -> _Staged:
        if self._job is None or self._job.staged is None:
            raise RuntimeError("nothing is staged")
        return self._job.staged

    def _warm_up(self) -> None:
        """Compile all there is before anything is served, which takes seconds in which a model beside it stands still:
        write a weight of each width over itself, prove, and decode something."""
        widths: dict[int, PieceChange] = {}
        for number, piece in enumerate(self._weights.pieces):
            if piece.view.dtype.itemsize not in widths:
                bit = self._weights.read(number)[0, :1].copy()
                change = Change(piece.region, np.zeros(1, np.uint32), bit, bit)
                change.digest()
                widths[piece.view.dtype.itemsize] = PieceChange(number, change)
        self._weights.write(self._weights.prepare([*widths.values()]))
        self._sums()
        compile_decoders()

    def _sums(self) -> Sums:
        return self._weights.digests(self._groups)

    def _require_in_place(self) -> None:
        """Whoever replaced the model's storage since it was traced made the map a map of nothing."""
        live = {t.untyped_storage()._cdata for t in (*self._model.parameters(), *self._model.buffers())}
        for piece in self._weights.pieces:
            if piece.view.untyped_storage()._cdata not in live:
                raise RuntimeError(f"the memory of {piece.region.tensor.name!r} is no longer the model's")

    def _synchronize(self) -> None:
        if any(piece.view.device.type != "cpu" for piece in self._weights.pieces[:1]):
            torch.accelerator.synchronize()


class _Staged(NamedTuple):
    """A version that is ready to be written."""

    patch: Any
    predicted: Sums
    # the digest of each group once it is written


class _Job:
    """Work that goes on while the model generates. `answer` is None until it is done."""

    def __init__(self, work: Callable[[], tuple[Answer, _Staged | None]], done: Path) -> None:
        self.answer: Answer | None = None
        self.staged: _Staged | None = None
        self._work, self._done = work, done
        threading.Thread(target=self._run, name="deltawire-work", daemon=True).start()

    def _run(self) -> None:
        _step_aside()
        try:
            answer, self.staged = self._work()
            self.answer = answer
        except Exception as error:
            log.warning("work beside the model failed", exc_info=True)
            self.answer = {"error": f"{type(error).__name__}: {error}"}
        with suppress(OSError):
            # the folder may be gone with the server
            self._done.touch()


def _step_aside() -> None:
    """vLLM ties a worker on a CPU to the cores it computes on; the others are better for what goes on beside that. A
    lower priority is not: a thread that waits for its turn may do so with the interpreter's lock, and the model too."""
    others = {*range(os.cpu_count() or 1)} - os.sched_getaffinity(0)
    if others:
        with suppress(OSError):
            os.sched_setaffinity(threading.get_native_id(), others)


def _as_text(sums: Sums) -> dict[str, str]:
    return {str(group): str(value) for group, value in sums.items()}


def _opened(path: str) -> tuple[Read, int]:
    descriptor = _Descriptor(path)
    return descriptor.read, descriptor.size


class _Descriptor:
    def __init__(self, path: str) -> None:
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 (closed with the object)
        self.size = os.fstat(self._file.fileno()).st_size

    def read(self, start: int, length: int) -> bytes:
        return os.pread(self._file.fileno(), length, start)


def _borrowed(paths: list[str]) -> Lent:
    lent: dict[Rectangle, Any] = {}
    for path in paths:
        with np.load(path, allow_pickle=False) as file:
            for i, part in enumerate(msgspec.json.decode(file["index"].tobytes(), type=list[Rectangle])):
                lent[part] = file[str(i)]
    return lent
