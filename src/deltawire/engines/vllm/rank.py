"""What one rank does: stage, write, take back, report. Which version is next and whether all ranks agree is decided
elsewhere (follower.py).

    by the engine, between two steps     layout → group, once; apply, or undo; load
    by a socket, beside the model        stage (count and receive on a device) → forget; lend, digest
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
from torch import nn

from ... import kernels
from ...core.change import Change
from ...core.full import FullFile
from ...core.parallel import default_threads
from ...core.schema import Schema
from ...core.sparse import DeltaFile, Read
from . import arrays
from .channel import Answer, listen
from .decode import Decoder, Lent, Wanted, compile_decoders
from .guard import fingerprint, pack_again
from .placement import trace
from .rectangle import Rectangle, rectangle
from .shard import PieceChange, Shard, Sums, open_shard

if TYPE_CHECKING:
    from .device import DeviceShard

log = logging.getLogger("deltawire")


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
        self._staged: _Staged | None = None

    def call(self, operation: str, **arguments: Any) -> Answer:
        """Errors are answers: an exception would say nothing of the other ranks."""
        try:
            return getattr(self, f"_do_{operation}")(**arguments)  # type: ignore[no-any-return]
        except Exception as error:
            log.warning("rank %d: %s failed", self._number, operation, exc_info=True)
            return {"error": f"{type(error).__name__}: {error}"}

    # ── by the engine ────────────────────────────────────────────────────────────────────────────────────────────────

    def _do_layout(self, schema: str, sockets: str) -> Answer:
        """Trace the loader and begin to listen. `schema` is a file, `sockets` a folder."""
        self._schema = msgspec.json.decode(Path(schema).read_bytes(), type=Schema)
        problems = self._problems()
        with self._loading():
            placement = trace(self._model, self._model.load_weights, self._schema)
        problems += placement.problems
        try:
            self._shard = open_shard(placement.pieces)
        except ValueError as error:
            problems.append(str(error))
        path = f"{sockets}/rank-{self._number}.sock"
        with suppress(FileNotFoundError):
            os.unlink(path)
        listen(path, self.call, prepare=_use_other_cores)
        return {
            "pieces": [msgspec.structs.astuple(rectangle(piece.region)) for piece in placement.pieces],
            "problems": problems,
            "untouched": placement.untouched,
            "failure": placement.failure,
            "device": bool(self._shard is not None and not self._shard.audited),
            "socket": path,
        }

    def _do_group(self, groups: list[list[int]]) -> Answer:
        """Every rank is sent the groups of all ranks: one call, one argument."""
        self._groups = tuple(groups[self._number])
        self._warm_up()
        return {}

    def _do_apply(self) -> Answer:
        """Write what is staged, then prove it. On an error the old bits are back."""
        clock = time.perf_counter()
        if self._staged is None:
            raise RuntimeError("nothing is staged")
        shard, patch, predicted = self._weights, self._staged.patch, self._staged.predicted
        try:
            shard.write(patch)
            written = time.perf_counter()
            # in host memory reading all weights takes too long here: `write` has looked at what it wrote
            found = predicted if shard.audited else shard.digests(self._groups)
            if found != predicted:
                raise RuntimeError("the weights do not have the digest that was predicted for them")
            return {"apply": written - clock, "prove": time.perf_counter() - written}
        except BaseException:
            shard.undo(patch)
            raise

    def _do_undo(self) -> Answer:
        """Put the old bits back; an error if that does not lead to the weights from before."""
        if self._staged is not None:
            self._weights.undo(self._staged.patch)
            found = self._sums()
            if found != self._staged.present:
                raise RuntimeError("these are not the weights from before; perhaps somebody else changed them")
        return {}

    def _do_load(self, path: str) -> Answer:
        """Overwrite everything with full weights, of which nothing is kept to go back to."""
        self._require_in_place()
        clock = time.perf_counter()
        Decoder(self._weights).load(FullFile(*_opened(path)))
        written = time.perf_counter()
        return {"sums": _as_text(self._sums()), "apply": written - clock, "prove": time.perf_counter() - written}

    def _do_reloading(self) -> Answer:
        """In the pause, before vLLM reloads weights by itself."""
        pack_again(self._model)
        return {}

    def _do_fingerprint(self) -> Answer:
        """A hash of everything the model computes with: parameters, and what kernels made of them."""
        return {"fingerprint": fingerprint(self._model)}

    # ── by the socket ────────────────────────────────────────────────────────────────────────────────────────────────

    def _do_stage(self, kind: str, paths: list[str], lent: list[str]) -> Answer:
        """Decode files against the live weights, here: all of a delta, or full weights. `dense` in the answer: these
        full weights are too different to be staged."""
        self._staged = None
        if kind == "full" and not self._weights.audited:
            try:
                patch = self._on_device.compare(FullFile(*_opened(paths[0])))
            except kernels.TooMany:
                return {"dense": True}
            return self._stage(patch, patch.count)
        decoder = Decoder(self._weights, threads=max(1, default_threads() // 2))
        borrowed = _borrowed(lent)
        changes: list[PieceChange] = []
        wanted: list[Rectangle] = []
        for path in paths:
            read, size = _opened(path)
            try:
                if kind == "delta":
                    changes += decoder.delta(DeltaFile(read, size, self._schema), borrowed)
                else:
                    changes += decoder.full(FullFile(read, size))
            except Wanted as missing:
                wanted += missing.rectangles
        if wanted:
            return {"wanted": [msgspec.structs.astuple(r) for r in wanted]}
        return self._stage(self._weights.prepare(changes), sum(item.change.count for item in changes))

    def _do_count(self, path: str) -> Answer:
        """Count the classes of old weights in the tiles of this rank's sheet."""
        shard, mine = self._on_device, f"{path}.{self._number}"
        shard.count(Path(f"{mine}.tiles"), Path(f"{mine}.sizes"))
        return {}

    def _do_receive(self, path: str, parts: list[list[list[int]]], tiles: list[int]) -> Answer:
        """Stage what the decoder wrote for this rank."""
        self._staged = None
        mine, counted = f"{path}.{self._number}", bool(tiles[self._number])
        patch = self._on_device.receive(
            Path(f"{mine}.moves"),
            [(kind, count) for kind, count in parts[self._number]],
            Path(f"{mine}.ranks") if counted else None,
            Path(f"{mine}.tiles") if counted else None,
        )
        return self._stage(patch, patch.count)

    def _stage(self, patch: Any, changed: int) -> Answer:
        self._require_in_place()
        shard = self._weights
        # nobody writes to weights that are served: what they are now is what the patch will meet
        present, moved = shard.digests_beside(self._groups), shard.moved(patch, self._groups)
        predicted = {group: total + moved[group] for group, total in present.items()}
        self._staged = _Staged(patch, present, predicted)
        return {"changed": changed, "present": _as_text(present), "predicted": _as_text(predicted)}

    def _do_forget(self) -> Answer:
        self._staged = None
        return {}

    def _do_digest(self) -> Answer:
        return {"sums": _as_text(self._weights.digests_beside(self._groups))}

    def _do_lend(self, rectangles: list[list[Any]], path: str) -> Answer:
        """Write what this rank holds of some rectangles to a file."""
        parts = [*Decoder(self._weights).lend([Rectangle(*r) for r in rectangles])]
        index = np.frombuffer(msgspec.json.encode([part for part, _ in parts]), np.uint8)
        out = Path(f"{path}.{self._number}.lent")
        arrays.write(out, {"index": index, **{str(i): bits for i, (_, bits) in enumerate(parts)}})
        return {"lent": str(out)}

    # ── the rest ─────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _weights(self) -> Shard:
        if self._shard is None:
            raise RuntimeError("the layout of this rank is not known: ask for it first")
        return self._shard

    @property
    def _on_device(self) -> DeviceShard:
        from .device import DeviceShard

        if not isinstance(self._weights, DeviceShard):
            raise RuntimeError("this rank's weights are in host memory")
        return self._weights

    def _warm_up(self) -> None:
        """Compile all there is before anything is served, which takes seconds in which a model beside it stands still:
        write a weight of each width over itself, prove, and decode something."""
        widths: dict[int, PieceChange] = {}
        for number, piece in enumerate(self._weights.pieces):
            if piece.view.dtype.itemsize not in widths and piece.region.units:
                bit = self._weights.read(number)[0, :1].copy()
                change = Change(piece.region, np.zeros(1, np.uint32), bit, bit)
                change.digest()
                widths[piece.view.dtype.itemsize] = PieceChange(number, change)
        patch = self._weights.prepare([*widths.values()])
        self._weights.moved(patch, self._groups)
        self._weights.write(patch)
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


class _Staged(NamedTuple):
    """A version that is ready to be written."""

    patch: Any
    present: Sums
    """Digest of each group now."""
    predicted: Sums
    """Digest of each group once the patch is written."""


def _use_other_cores() -> None:
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
        file = arrays.open_arrays(Path(path))
        for i, part in enumerate(msgspec.json.decode(file["index"].tobytes(), type=list[Rectangle])):
            lent[part] = file[str(i)]
    return lent
