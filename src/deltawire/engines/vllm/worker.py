"""The weight-transfer back end `deltawire`: what runs in each worker, beside the model.

The endpoint plugin calls `call(operation, …)` on all ranks at once. Nothing here decides anything: a rank stages,
writes, takes back and reports; which version comes next and whether all ranks agree is decided in one place
(follower.py).

    layout → group                      once: where the weights lie, which pieces are proven together
    stage … staged → apply → forget     a version; `stage` works in a thread while the model generates
                        └→ undo         old bits back, whatever of the new ones was written
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from ...core.change import Change
from ...core.digest import StateDigest
from ...core.full import FullFile
from ...core.parallel import default_threads
from ...core.schema import Schema
from ...core.sparse import DeltaFile, Read
from .decode import Decoder, Lent, Rectangle, Wanted, rectangle
from .guard import problems_of
from .placement import Placement, trace
from .shard import PieceChange, Shard, open_shard

log = logging.getLogger("deltawire")

Answer = dict[str, Any]


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing: the endpoint plugin has the configuration."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    run: str = ""
    version: int | None = None


class DeltawireEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._schema: Schema | None = None
        self._shard: Shard | None = None
        self._groups: tuple[int, ...] = ()
        self._job: _Job | None = None
        self._staged: list[PieceChange] = []
        self._patch: Any = None

    # ── what vLLM asks of a back end ─────────────────────────────────────────────────────────────────────────────────

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        pass

    def finish_weight_update(self) -> None:
        pass

    def receive_weights(self, update_info: UpdateInfo) -> None:
        raise RuntimeError(
            "deltawire updates all ranks as one: POST /update_weights to a server that was started with "
            "VLLM_PLUGINS=deltawire; a single worker cannot do it"
        )

    def shutdown(self) -> None:
        pass

    # ── what the endpoint plugin asks of a rank ──────────────────────────────────────────────────────────────────────

    def call(self, operation: str, **arguments: Any) -> Answer:
        """Errors are answers: an exception would say nothing of the other ranks."""
        try:
            return getattr(self, f"_do_{operation}")(**arguments)  # type: ignore[no-any-return]
        except Exception as error:
            log.warning("rank %d: %s failed", self.parallel_config.rank, operation, exc_info=True)
            return {"error": f"{type(error).__name__}: {error}"}

    def _do_layout(self, schema: str) -> Answer:
        """Trace the loader. `schema` is a file."""
        self._schema = msgspec.json.decode(Path(schema).read_bytes(), type=Schema)
        problems = problems_of(self.model, self.vllm_config)
        try:
            with set_current_vllm_config(self.vllm_config):
                placement = trace(self.model, self.model.load_weights, self._schema)
        except Exception as error:
            # a loader that computes with what it loads cannot be run without data
            placement = Placement((), (f"the model's loader cannot be traced: {type(error).__name__}: {error}",))
        problems += placement.problems
        try:
            self._shard = open_shard(placement.pieces)
        except ValueError as error:
            problems.append(str(error))
        return {
            "pieces": [msgspec.structs.astuple(rectangle(piece.region)) for piece in placement.pieces],
            "problems": problems,
        }

    def _do_group(self, groups: list[list[int]]) -> Answer:
        """Every rank is sent the groups of all ranks: one call, one argument."""
        self._groups = tuple(groups[self.parallel_config.rank])
        self._warm_up()
        return {}

    def _do_digest(self) -> Answer:
        return {"sums": self._sums()}

    def _do_stage(self, kind: str, path: str, lent: list[str]) -> Answer:
        """Begin to decode a file against the live weights, in a thread."""
        self._do_forget()
        self._require_in_place()
        self._job = _Job(lambda: self._stage(kind, path, lent))
        return {}

    def _do_lend(self, rectangles: list[list[Any]], path: str) -> Answer:
        """Begin to write what this rank holds of some rectangles to `path`.<rank>.npz, in a thread."""
        self._job = _Job(lambda: self._lend([Rectangle(*r) for r in rectangles], f"{path}.{self.parallel_config.rank}"))
        return {}

    def _do_staged(self) -> Answer:
        """How the thread is doing: {} while it works."""
        assert self._job is not None
        return self._job.answer or {}

    def _do_apply(self) -> Answer:
        """In the pause: write, then recompute the digest. On an error the old bits are back."""
        self._require_in_place()
        clock = time.perf_counter()
        try:
            self._weights.write(self._patch)
            self._synchronize()
            written = time.perf_counter()
            return {"sums": self._sums(), "apply": written - clock, "prove": time.perf_counter() - written}
        except BaseException:
            self._weights.undo(self._patch)
            self._synchronize()
            raise

    def _do_undo(self) -> Answer:
        if self._patch is not None:
            self._weights.undo(self._patch)
            self._synchronize()
        return {"sums": self._sums()}

    def _do_forget(self) -> Answer:
        self._staged, self._patch, self._job = [], None, None
        return {}

    def _do_load(self, path: str) -> Answer:
        """In the pause: overwrite everything with full weights, of which nothing is kept to go back to."""
        self._require_in_place()
        clock = time.perf_counter()
        Decoder(self._weights).load(FullFile(*_opened(path)))
        self._synchronize()
        written = time.perf_counter()
        return {"sums": self._sums(), "apply": written - clock, "prove": time.perf_counter() - written}

    def _do_fingerprint(self) -> Answer:
        """A hash of everything the model computes with: parameters, and what kernels made of them."""
        from .guard import fingerprint

        return {"fingerprint": fingerprint(self.model)}

    # ── in the thread ────────────────────────────────────────────────────────────────────────────────────────────────

    def _stage(self, kind: str, path: str, lent: list[str]) -> Answer:
        clock = time.perf_counter()
        decoder = Decoder(self._weights, threads=max(1, default_threads() // 2))
        read, size = _opened(path)
        try:
            if kind == "delta":
                staged = decoder.delta(DeltaFile(read, size, self._schema), _borrowed(lent))
            else:
                staged = decoder.full(FullFile(read, size))
        except Wanted as wanted:
            return {"wanted": [msgspec.structs.astuple(r) for r in wanted.rectangles]}
        moved = dict.fromkeys(self._groups, StateDigest())
        for item in staged:
            moved[self._groups[item.piece]] += item.change.digest()
        self._staged, self._patch = staged, self._weights.prepare(staged)
        self._synchronize()
        return {
            "moved": {str(group): str(value) for group, value in moved.items()},
            "changed": sum(item.change.count for item in staged),
            "seconds": time.perf_counter() - clock,
        }

    def _lend(self, rectangles: list[Rectangle], path: str) -> Answer:
        parts = [*Decoder(self._weights).lend(rectangles)]
        arrays = {str(i): bits for i, (_, bits) in enumerate(parts)}
        index = msgspec.json.encode([part for part, _ in parts])
        with open(f"{path}.npz", "wb") as out:
            np.savez(out, index=np.frombuffer(index, np.uint8), **arrays)  # type: ignore[arg-type]
        return {"lent": f"{path}.npz"}

    # ── the rest ─────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _weights(self) -> Shard:
        if self._shard is None:
            raise RuntimeError("the layout of this rank is not known: ask for it first")
        return self._shard

    def _warm_up(self) -> None:
        """Compile what runs in a pause before the first one: write a weight of each width over itself, and prove."""
        widths: dict[int, PieceChange] = {}
        for number, piece in enumerate(self._weights.pieces):
            if piece.view.dtype.itemsize not in widths:
                bit = self._weights.read(number)[0, :1].copy()
                change = Change(piece.region, np.zeros(1, np.uint32), bit, bit)
                change.digest()
                widths[piece.view.dtype.itemsize] = PieceChange(number, change)
        self._weights.write(self._weights.prepare([*widths.values()]))
        self._sums()

    def _sums(self) -> dict[str, str]:
        return {str(group): str(value) for group, value in self._weights.digests(self._groups).items()}

    def _require_in_place(self) -> None:
        """Whoever replaced the model's storage since it was traced made the map a map of nothing."""
        live = {t.untyped_storage()._cdata for t in (*self.model.parameters(), *self.model.buffers())}
        for piece in self._weights.pieces:
            if piece.view.untyped_storage()._cdata not in live:
                raise RuntimeError(f"the memory of {piece.region.tensor.name!r} is no longer the model's")

    def _synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()


class _Job:
    """Work that goes on while the model generates. `answer` is None until it is done."""

    def __init__(self, work: Callable[[], Answer]) -> None:
        self.answer: Answer | None = None
        self._work = work
        threading.Thread(target=self._run, name="deltawire-stage", daemon=True).start()

    def _run(self) -> None:
        # tokens first: on Linux a thread has a priority of its own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        try:
            self.answer = self._work()
        except Exception as error:
            log.warning("staging failed", exc_info=True)
            self.answer = {"error": f"{type(error).__name__}: {error}"}


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
