"""One rank: stage, write, take back, report. Which version is next and whether all ranks agree is decided
elsewhere (target.py).

    by the engine, between two steps     Locate → Listen → SetGroups, once; Apply, or Undo
    by a socket, beside the model        StageDelta (on a device: Count, Receive), StageFull or StageReload; Forget;
                                         Lend, Digest
"""

from __future__ import annotations

import gc
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial, singledispatchmethod
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch
from torch import nn

from ... import kernels
from ...bucket.references import as_run
from ...core.change import Region
from ...core.container import open_file
from ...core.errors import DeltawireError
from ...core.full import DRAFT, Checkpoint
from ...core.parallel import default_threads
from ...core.schema import Schema
from ...core.sparse import open_delta
from ...kernels.plan import unit_bytes
from ...replica.shard import LiveShard, Piece, PieceChange, Sums
from ...replica.target import write_or_undo
from ..fingerprint import fingerprint
from ..options import ServerOptions
from . import arrays
from .channel import Answer, listen
from .decode_pieces import ShardDecoder, Wanted, warm_up
from .guard import computed_with
from .layout import sums_to_send
from .learn import Layer, Learned
from .messages import (
    Count,
    Digest,
    Forget,
    Lend,
    Listen,
    Locate,
    Receive,
    SetGroups,
    StageDelta,
    StageFull,
    StageReload,
    ToRank,
    for_rank,
)
from .node import NodeProcess, read_lent, source_folder, write_lent
from .placement import open_shard, storage, trace, trace_draft
from .swap import Apply, Undo

if TYPE_CHECKING:
    from ...replica.device import DeviceShard

log = logging.getLogger("deltawire")


def _cannot_reload(folder: str) -> None:
    raise RuntimeError("there is no worker here to reload weights")


class Rank:
    """The operations on one rank's part of a model. Made in the engine's worker once the model is loaded; its `call` is
    reached by `Engine.call` and by what `write_all` is given, between two steps of the model and nowhere else.

        rank = Rank(model, number, problems=…, hooks=…, reload=…)
        answer = rank.call(text)

    number     the rank, counted over all workers
    problems   reasons to refuse deltas that the placement map cannot show; begin with `common_problems`
    hooks      layers of a model that may rearrange their weights after loading
    loading    entered around the model's own loader
    reload     has the engine load a checkpoint folder into the model
    host       the address at which other nodes of the server reach this one; None if all ranks must be on one node
    """

    def __init__(
        self,
        model: nn.Module,
        number: int,
        *,
        problems: Callable[[nn.Module], list[str]] = lambda model: [],
        hooks: Callable[[nn.Module], Sequence[Layer]] = lambda model: (),
        loading: Callable[[], AbstractContextManager[Any]] = nullcontext,
        reload: Callable[[str], object] = _cannot_reload,
        host: Callable[[], str] | None = None,
    ) -> None:
        self.reload = reload
        self.node = arrays.node()
        """The node that this rank is on."""
        self.has_moved: Callable[[], bool] = lambda: False
        """Whether weights are not where a reload puts them, because the engine has moved them since the start."""
        self.draft: nn.Module | None = None
        """A draft model that proposes tokens."""
        self.draft_has_own = False
        """Whether the draft has a checkpoint of its own; else it is loaded from that of the model."""
        self.reload_draft: Callable[[str], object] = _cannot_reload
        """Has the engine load a checkpoint folder into the draft model."""
        self.drafts = False
        """Whether the run has all weights of the draft model."""
        self.on_layout: Callable[[], None] = lambda: None
        """Called before the weights are located, when a run begins to be followed."""
        self._model, self._number, self._loading = model, number, loading
        self._counted = number
        """Number among the ranks of all data-parallel servers; `_number` counts from the first one of this server."""
        self._place = 0
        """Number among the ranks of this node."""
        self._socket: Path | None = None
        self._listener: socket.socket | None = None
        self._one = threading.Lock()
        """Held during a call by a socket."""
        self._process: NodeProcess | None = None
        """Where the API server is on another node: what works for the ranks of this one, if this is the first."""
        self._problems, self._hooks, self._host = problems, hooks, host
        self._schema = Schema.build(())
        self._shard: LiveShard | None = None
        """None where memory could not be mapped."""
        self._storages: dict[int, str] = {}
        """Of each storage that has pieces of the shard, the name of a tensor in it. Thousands of experts share a few
        storages."""
        self._spare: tuple[Piece, ...] = ()
        """Weights of the run that no model computes with, beside the models."""
        self._groups: tuple[int, ...] = ()
        self._numbers = count(1)
        self._staged: _Staged | None = None
        self._written: _Staged | None = None
        """The update that `apply` has begun to write."""
        self._rehearse()

    def _rehearse(self) -> None:
        """Have a device compile all that it can need for these weights, now: later it would hold up the model. It takes
        a second where ahead.py has done it."""
        state = self._model.state_dict(keep_vars=True).values()
        # engines have scales and indices of their own among the buffers
        weights = [it for it in state if isinstance(it, nn.Parameter) or (it.is_floating_point() and it.numel() > 1)]
        clock, device = time.perf_counter(), next((weight.device for weight in weights), torch.device("cpu"))
        try:
            kernels.rehearse({unit_bytes(weight) for weight in weights}, device)
        except Exception:
            log.warning("rank %d: kernels could not be compiled before they are needed", self._number, exc_info=True)
        spent = time.perf_counter() - clock
        log.info("rank %d: kernels for %s are ready after %.1f s", self._number, device, spent)

    def call(self, text: str) -> Answer:
        """Do what the text of a message asks for. An error is returned as an answer, so that all ranks answer."""
        return self._called(for_rank(text))

    def _called(self, message: ToRank) -> Answer:
        try:
            return self._do(message)
        except Exception as error:
            log.warning("rank %d: %s failed", self._number, type(message).__name__, exc_info=True)
            return {"error": f"{type(error).__name__}: {error}"}

    @singledispatchmethod
    def _do(self, message: ToRank) -> Answer:
        raise TypeError(f"a rank does not know {message!r}")

    # ── by the engine ────────────────────────────────────────────────────────────────────────────────────────────────

    @_do.register
    def _layout(self, message: Locate) -> Answer:
        self.on_layout()
        self._number = self._counted - message.first
        self._schema = message.schema
        problems = self._problems(self._model)
        clock = time.perf_counter()
        with self._loading():
            # a model that cannot be patched anyway is not looked into
            models = [] if problems else [self._model, *([self.draft] if self.draft is not None else [])]
            learned = Learned([layer for model in models for layer in self._hooks(model)])
            load: Any = self._model.load_weights  # models of engines have it, `nn.Module` does not
            standing = learned.standing()
            placement = trace(self._model, load, self._schema, standing)
            self.drafts = False
            if self.draft is not None:
                both = trace_draft(self.draft, self._model, self._schema, placement, standing, self.draft_has_own)
                if both is not None:
                    self.drafts, placement = True, both
                    problems += self._problems(self.draft)
            pieces, unknown = learned.compose(placement.pieces)
        self._fill(placement.spare, source_folder(message.source))
        self._free_copies()
        problems += [*placement.problems, *unknown]
        placed = sum(piece.places is not None for piece in pieces)
        log.info("rank %d: located %d tensors, %d in a kernel's layout, in %.1f s", self._number, len(pieces), placed,
                 time.perf_counter() - clock)  # fmt: skip
        try:
            self._shard = open_shard(pieces, ServerOptions.read().staging_memory)
            self._storages = {storage(piece.view): piece.region.tensor.name for piece in pieces}
        except ValueError as error:
            problems.append(str(error))
        return {
            "pieces": msgspec.to_builtins([piece.region for piece in pieces]),
            "problems": problems,
            "untouched": placement.untouched,
            "failure": placement.failure,
            "device": bool(self._shard is not None and not self._shard.audited),
            "draft": self.drafts,
            "node": self.node,
        }

    @_do.register
    def _listen(self, message: Listen) -> Answer:
        secret = message.secret
        if message.node != self.node:
            return {}
        if secret and self._host is None:
            raise RuntimeError("this rank is on another node than the API server: all ranks of a server must be on one")
        place, self._place = arrays.root() / message.folder, message.ranks.index(self._number)
        place.mkdir(mode=0o700, exist_ok=True)
        path = place / f"rank-{self._number}.sock"
        if path != self._socket:
            if self._listener is not None:
                self._listener.shutdown(socket.SHUT_RDWR)
            self._socket = path
            self._listener = listen(str(path), ToRank, partial(self._answer, path), prepare=_use_other_cores)
        if not secret or self._host is None or self._place:
            return {"socket": str(path)}
        if self._process is not None:
            self._process.close()
        self._process = NodeProcess(place, self._host(), bytes.fromhex(secret))
        return {"socket": str(path), "address": self._process.address}

    @property
    def _models(self) -> list[nn.Module]:
        """The models whose weights are the run's."""
        return [self._model, *([self.draft] if self.drafts and self.draft is not None else [])]

    def _fill(self, spare: tuple[Piece, ...], folder: Path | None) -> None:
        """Read what lies beside the models from the checkpoint that they were loaded from. One that is not here, or not
        the run's, is seen by the layout guard."""
        self._spare = spare
        with suppress(DeltawireError):
            if spare and folder is not None:
                open_shard(spare).load(as_run(Checkpoint(folder), self._schema, str(folder)))

    def _free_copies(self) -> None:
        """Give back the memory of the layers' copies: on a device, torch would keep it from the engine."""
        device = next((parameter.device for parameter in self._model.parameters()), torch.device("cpu"))
        if device.type != "cpu":
            gc.collect()
            torch.get_device_module(device).empty_cache()

    @_do.register
    def _group(self, message: SetGroups) -> Answer:
        self._groups = tuple(message.groups[self._number])
        warm_up(self._weights, self._groups)
        return {}

    @_do.register
    def _apply(self, message: Apply) -> Answer:
        found = self._staged
        if found is None or found.number != message.staged[self._number]:
            raise RuntimeError("what is staged is not what was checked" if found else "nothing is staged")
        self._written = found

        def prove() -> None:
            if found.proven is not None and self._sums() != found.proven:
                raise RuntimeError("the weights do not have the digest that was predicted for them")

        return write_or_undo(found.write, prove, found.undo)

    @_do.register
    def _undo(self, message: Undo) -> Answer:
        if (written := self._written) is not None and written.number == message.staged[self._number]:
            if written.undo is None:
                raise RuntimeError("full weights were written over the previous ones")
            written.undo()
            if self._sums() != written.present:
                raise RuntimeError("these are not the weights from before; perhaps something else changed them")
        return {}

    # ── by the socket ────────────────────────────────────────────────────────────────────────────────────────────────

    def _answer(self, path: Path, message: ToRank) -> Answer:
        """One call at a time, and none by a socket that another one has replaced: its caller was given up."""
        with self._one:
            if path != self._socket:
                return {"error": f"this rank listens elsewhere by now, and does not do {type(message).__name__}"}
            return self._called(message)

    @_do.register
    def _stage_delta(self, message: StageDelta) -> Answer:
        self._staged = None
        decoder = ShardDecoder(self._weights, threads=max(1, default_threads() // 2))
        borrowed = read_lent(message.lent)
        changes: list[PieceChange] = []
        wanted: list[Region] = []
        for path in message.paths:
            try:
                changes += decoder.delta(open_delta(*open_file(path), self._schema, message.claim), borrowed)
            except Wanted as missing:
                wanted += missing.regions
        if wanted:
            return {"wanted": msgspec.to_builtins(wanted)}
        return self._stage(self._weights.prepare(changes))

    @_do.register
    def _stage_full(self, message: StageFull) -> Answer:
        """Where most weights differ, the new ones are written over the old ones, of which nothing is kept then."""
        self._staged = None
        weights, source = self._weights, Checkpoint(message.folder)
        decoder = ShardDecoder(weights, threads=max(1, default_threads() // 2))
        try:
            if not weights.audited:
                return self._stage(self._on_device.compare(source))
            return self._stage(weights.prepare(decoder.full(source)))
        except kernels.TooMany:
            self._require_in_place()
        present, predicted = weights.digests_beside(self._groups), decoder.digests(source, self._groups)
        return self._keep(lambda: weights.load(source), None, present, predicted)

    @_do.register
    def _stage_reload(self, message: StageReload) -> Answer:
        folder, unchanged, prove = message.folder, message.unchanged, message.prove

        def write() -> None:
            if unchanged and self.has_moved():
                # only a reload puts them back
                self.reload(folder)
            before = self._fingerprints() if unchanged else []
            self.reload(folder)
            if self.drafts:
                self.reload_draft(str(Path(folder, DRAFT)) if self.draft_has_own else folder)
            self._fill(self._spare, Path(folder))
            if unchanged and self._fingerprints() != before:
                raise RuntimeError("the same weights, loaded again, gave other ones")

        predicted = ShardDecoder(self._weights).digests(Checkpoint(folder), self._groups) if prove else {}
        return self._keep(write, None, {}, predicted, prove)

    @_do.register
    def _count(self, message: Count) -> Answer:
        mine = f"{message.path}.{self._place}"
        sizes = self._on_device.count(arrays.open_arrays(Path(f"{mine}.tiles")))
        arrays.write(Path(f"{mine}.sizes"), {"sizes": sizes})
        return {}

    @_do.register
    def _receive(self, message: Receive) -> Answer:
        self._staged = None
        mine, counted = f"{message.path}.{self._place}", bool(message.tiles[self._place])
        patch = self._on_device.receive(
            arrays.open_stored(Path(f"{mine}.moves")),
            message.parts[self._place],
            arrays.open_arrays(Path(f"{mine}.tiles")) if counted else {},
            arrays.open_stored(Path(f"{mine}.ranks")) if counted else {},
        )
        return self._stage(patch)

    def _stage(self, patch: Any) -> Answer:
        self._require_in_place()
        shard = self._weights
        # nothing else writes to weights that are served: the patch will meet what they are now
        present, shifts = shard.digests_beside(self._groups), shard.shifts(patch, self._groups)
        predicted = {group: total + shifts[group] for group, total in present.items()}
        # in host memory reading all weights takes too long for a pause: `write` looks at what it wrote
        write, undo = lambda: shard.write(patch), lambda: shard.undo(patch)
        return self._keep(write, undo, present, predicted, prove=not shard.audited)

    def _keep(
        self,
        write: Callable[[], None],
        undo: Callable[[], None] | None,
        present: Sums,
        predicted: Sums,
        prove: bool = True,
    ) -> Answer:
        """Keep what is staged. With `prove`, the weights are read in the swap, and must be what is predicted."""
        number = next(self._numbers)
        self._staged = _Staged(number, write, undo, present, predicted if prove else None)
        sums = {"present": sums_to_send(present), "predicted": sums_to_send(predicted)}
        return {"staged": number, **sums, "overwrites": undo is None}

    @_do.register
    def _forget(self, message: Forget) -> Answer:
        self._staged = self._written = None
        return {}

    @_do.register
    def _digest(self, message: Digest) -> Answer:
        return {"sums": sums_to_send(self._weights.digests_beside(self._groups))}

    @_do.register
    def _lend(self, message: Lend) -> Answer:
        out = f"{message.path}.{self._place}.lent"
        write_lent(Path(out), ShardDecoder(self._weights).lend(message.regions))
        return {"lent": out}

    # ── the rest ─────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _weights(self) -> LiveShard:
        if self._shard is None:
            raise RuntimeError("the layout of this rank is not known: ask for it first")
        return self._shard

    @property
    def _on_device(self) -> DeviceShard:
        from ...replica.device import DeviceShard

        if not isinstance(self._weights, DeviceShard):
            raise RuntimeError("this rank's weights are in host memory")
        return self._weights

    def _fingerprints(self) -> list[str]:
        return [fingerprint(computed_with(model)) for model in self._models]

    def _sums(self) -> Sums:
        return self._weights.digests(self._groups)

    def _require_in_place(self) -> None:
        """Raise RuntimeError if the model's storage was replaced since it was traced: the map is invalid then."""
        live = {storage(t) for model in self._models for t in (*model.parameters(), *model.buffers())}
        live |= {storage(piece.view) for piece in self._spare}
        for memory, name in self._storages.items():
            if memory not in live:
                raise RuntimeError(f"the memory of {name!r} is no longer the model's")


class _Staged(NamedTuple):
    """A version that is ready to be written."""

    number: int
    """No two of a rank have the same."""
    write: Callable[[], None]
    undo: Callable[[], None] | None
    """None where nothing is kept of the old weights."""
    present: Sums
    """Digest of each group now."""
    proven: Sums | None
    """Digest of each group once it is written; None where that is not read in the swap."""


def _use_other_cores() -> None:
    """vLLM ties a worker on a CPU to the cores it computes on; the others are better for what goes on beside that. A
    lower priority is not: a thread that waits for its turn may do so with the interpreter's lock, and the model too."""
    others = {*range(os.cpu_count() or 1)} - os.sched_getaffinity(0)
    if others:
        with suppress(OSError):
            os.sched_setaffinity(threading.get_native_id(), others)
