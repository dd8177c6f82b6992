"""A model of this process as a target: a torch module, a state dict, a mapping of arrays, a private `State`.

stage    decode, bring it to where the weights are, predict the digest    nothing touched
swap     scatter the new bits, recompute the digest of the live weights   on an error: scatter the old ones back
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from ..bucket.run import Run
from ..bucket.walk import Delta
from ..core import full
from ..core.change import Region, regions, whole
from ..core.digest import StateDigest
from ..core.dtypes import Bits
from ..core.errors import SchemaMismatch
from ..core.full import Source
from ..core.manifest import Base
from ..core.schema import Schema, TensorSpec, listed
from ..core.sparse import DeltaFile
from ..core.state import State
from ..models import ModelView, live_tensors, whereabouts
from .host import HostShard, Rows, memory_of
from .shard import MOST_UNITS, LiveShard, Piece, PieceChange, Sums
from .target import UNCHANGED, Staged, Update, write_or_undo

if TYPE_CHECKING:
    from torch import nn

Model: TypeAlias = "nn.Module | Mapping[str, Any] | State"
"""Weights by name: a torch module, a state dict, a mapping of writable numpy arrays or torch tensors, or a `State`."""

_WIDER = {"BF16": {"F32", "F64"}, "F16": {"F32", "F64"}, "F32": {"F64"}}
"""The dtypes that hold every value of another one."""


@runtime_checkable
class AdapterView(Protocol):
    """A model whose tensors are those of an adapter, and which can check the base model under it."""

    def check_base(self, base: Base, run: str) -> None:
        """Raise SchemaMismatch if the adapters of a run are trained on another base model than this one is on."""
        ...


@dataclass(slots=True, kw_only=True)
class StagedModel(Staged):
    """An update of a model of this process."""

    write: Callable[[], None]
    undo: Callable[[], None] | None = None
    decoded: Any = ()
    """What a delta changes; for weights in host memory a list of `Change`."""


class ModelTarget:
    """Patches a model in place.

    strict      whether weights that the run does not carry are an error or left alone
    prove       whether `swap` recomputes the digest of all live weights
    """

    takes_deltas = True

    def __init__(self, model: Model, *, strict: bool = True, prove: bool = True) -> None:
        self.model = model
        self._strict, self._prove = strict, prove
        self._weights = ModelWeights(Schema.build(()), (), HostShard((), (), audited=False))
        self._where: object = ()

    def bind(self, run: Run) -> bool:
        model = self.model
        try:
            # `model.to(…)` and the like move the weights of the same module
            where = whereabouts(model)
            if run.schema is self._weights.schema and where == self._where:
                return False
            weights = open_weights(model, run.schema, strict=self._strict)
        except SchemaMismatch:
            # a mapping may be meant to be either
            run.check_kind(None if isinstance(model, Mapping | State) else isinstance(model, AdapterView))
            raise
        if isinstance(model, AdapterView) and run.info.base is not None:
            model.check_base(run.info.base, run.store.url)
        self._weights, self._where = weights, where
        return True

    def digest(self) -> StateDigest:
        return self._weights.digest()

    def stage(self, update: Update) -> StagedModel:
        clock, weights, content = time.perf_counter(), self._weights, update.content
        if not isinstance(content, Delta):
            # proven before it is written: a write that fails half-way cannot be undone
            update.require(full.digest_of(content), UNCHANGED)
            require_ties(self.model, content)
            staged = StagedModel(update=update, undoable=False, write=partial(weights.shard.load, content))
            staged.timings["decode"] = time.perf_counter() - clock
            return staged
        decoded = weights.decode(content.open())
        ready = time.perf_counter()
        patch = weights.prepare(decoded)
        update.require(update.before + weights.total(weights.shard.shifts(patch, weights.groups)), UNCHANGED)
        write, undo = partial(weights.shard.write, patch), partial(weights.shard.undo, patch)
        staged = StagedModel(update=update, write=write, undo=undo, decoded=decoded)
        staged.timings |= {"decode": ready - clock, "stage": time.perf_counter() - ready}
        return staged

    def swap(self, staged: StagedModel) -> None:
        update = staged.update

        def prove() -> None:
            then = "the previous weights were restored" if staged.undoable else "call sync() again"
            update.require(self.digest(), then)

        staged.timings |= write_or_undo(staged.write, prove if self._prove else None, staged.undo)


class ModelWeights:
    """The weights of a model where they lie, a piece for each tensor of the run.

    Weights that the run ties and this model does not are several pieces: all are written, and all must agree. Floats
    may be wider in the model than in the run. Every bf16 is exactly a float32, so such weights can hold a version:
    writing widens, reading narrows, and a weight that is not exactly representable in the run's dtype makes the digest
    one that no version has.
    """

    def __init__(self, schema: Schema, pieces: Sequence[Piece], shard: LiveShard) -> None:
        self.schema, self.shard = schema, shard
        self._pieces: dict[str, list[int]] = {}
        self._copies: dict[str, list[int]] = {}
        """Groups of a tensor that is in several memories, by its name."""
        self.groups: list[int] = []
        """Group of each piece: 0 for all tensors in one memory, and one for each further copy."""
        memories, seen = Counter(piece.region for piece in pieces), Counter[Region]()
        for number, piece in enumerate(pieces):
            name, copy = piece.region.tensor.name, seen[piece.region]
            seen[piece.region] += 1
            self._pieces.setdefault(name, []).append(number)
            if memories[piece.region] == 1:
                self.groups.append(0)
                continue
            copies = self._copies.setdefault(name, [])
            if copy == len(copies):
                copies.append(number + 1)
            self.groups.append(copies[copy])

    def digest(self) -> StateDigest:
        """Recompute the state digest of the live weights."""
        return self.total(self.shard.digests(self.groups))

    def total(self, sums: Sums) -> StateDigest:
        """The digest of all tensors; one that no version has, where only one of two tied weights was changed."""
        total = sums.get(0, StateDigest())
        for copies in self._copies.values():
            first, *others = (sums[group] for group in copies)
            total += first
            for _ in (other for other in others if other != first):
                total += StateDigest(1, 1)
        return total

    def decode(self, files: Sequence[DeltaFile]) -> Any:
        """Decode and check a delta, for `prepare`."""
        return [change for file in files for changes in file.changes(self._bits) for change in changes]

    def _bits(self, name: str) -> Bits:
        return self.shard.read(self._pieces[name][0]).reshape(-1)

    def prepare(self, decoded: Any) -> Any:
        """Bring what was decoded to where the weights are. Writes nothing."""
        return self.shard.prepare(
            [PieceChange(n, change) for change in decoded for n in self._pieces[change.region.tensor.name]]
        )


def open_weights(model: Model, schema: Schema, *, strict: bool = True) -> ModelWeights:
    """Find the weights of a model. All of them on one GPU, in the run's dtypes, are patched there."""
    if isinstance(model, State):
        # bits already, of dtypes that numpy may have no name for
        model.schema.require_equal(schema, ours="this state", theirs="the run")
        pieces = [Piece(whole(tensor), model.tensors[tensor.name]) for tensor in schema.tensors]
        bits = [Rows(p.region, p.view.reshape(p.region.rows, p.region.columns)) for p in pieces]
        return ModelWeights(schema, pieces, HostShard(pieces, bits, audited=False))
    tensors = live_tensors(model)
    on_device = is_on_device(tensors, schema)
    names = require(tensors, schema, strict, may_be_wider=not on_device)
    found = [(whole(tensor), name) for tensor in schema.tensors for name in names[tensor.name]]
    pieces = [Piece(region, tensors[name]) for region, name in found]
    if on_device:
        from .device import DeviceWeights

        return DeviceWeights(schema, pieces)
    memory = [memory_of(region, tensors[name], name) for region, name in found]
    shard = HostShard(pieces, memory, audited=False)
    shard.compile()
    return ModelWeights(schema, pieces, shard)


def is_on_device(tensors: Mapping[str, Any], schema: Schema) -> bool:
    """Whether all tensors are on one GPU, in the run's dtypes and with rows that kernels can count."""
    view, wanted = ModelView(tensors), {tensor.name: tensor.dtype for tensor in schema.tensors}
    same = all(wanted.get(tensor.name, tensor.dtype) == tensor.dtype for tensor in view.schema.tensors)
    return view.device() is not None and same and all(tensor.columns <= MOST_UNITS for tensor in schema.tensors)


def require(
    tensors: Mapping[str, Any], schema: Schema, strict: bool, *, may_be_wider: bool = True
) -> dict[str, list[str]]:
    """Check that a model has every tensor of the run, in its shape and dtype or a wider one; with `strict`, no others.

    Returns the names that each tensor of the run has in the model, one for each piece of memory: weights that the run
    ties may be separate here.
    """
    found = ModelView(tensors).schema
    specs = found.by_name()
    specs.update((alias, specs[name]) for alias, name in found.ties.items())
    # two names of one memory, by the model's own account
    home = {**{name: name for name in tensors}, **found.ties}
    names: dict[str, list[str]] = {}
    missing, reshaped = [], []
    for tensor in schema.tensors:
        run_names = [tensor.name, *(alias for alias, name in schema.ties.items() if name == tensor.name)]
        once: dict[str, str] = {}
        for name in (name for name in run_names if name in tensors):
            once.setdefault(home[name], name)
        names[tensor.name] = list(once.values())
        if not once:
            missing.append(tensor.name)
        reshaped += [(tensor, specs[name]) for name in once.values() if specs[name].shape != tensor.shape]
    carried = {home[name] for of in names.values() for name in of}
    extra = sorted(name for name in tensors if home[name] not in carried) if strict else []
    if missing or extra or reshaped:
        raise SchemaMismatch(_differences(tensors, missing, extra, reshaped))
    for tensor in schema.tensors:
        for spec in (specs[name] for name in names[tensor.name]):
            wider = may_be_wider and spec.dtype in _WIDER.get(tensor.dtype, ())
            if spec.dtype != tensor.dtype and not wider:
                raise SchemaMismatch(
                    f"{tensor.name!r} is {tensor.dtype} in the run but {spec.dtype} in this model; load the model in "
                    f"the run's dtype{' or a wider one' if may_be_wider else ''}"
                )
    return names


def require_ties(model: Any, source: Source) -> None:
    """Raise SchemaMismatch where weights that the model ties differ in the full weights: no memory can hold both."""
    if isinstance(model, State):
        return
    ties = ModelView(live_tensors(model)).schema.ties
    seen: dict[str, TensorSpec] = {}
    for tensor in source.schema.tensors:
        first = seen.setdefault(ties.get(tensor.name, tensor.name), tensor)
        pairs = () if first is tensor else zip(regions(first), regions(tensor), strict=False)
        if any(not np.array_equal(source.region(a), source.region(b)) for a, b in pairs):
            raise SchemaMismatch(
                f"this model ties {first.name!r} and {tensor.name!r}, which differ in the run: another model, or "
                "another configuration of it (tie_word_embeddings)"
            )


def _differences(
    tensors: Mapping[str, Any], missing: list[str], extra: list[str], reshaped: list[tuple[TensorSpec, TensorSpec]]
) -> str:
    """Describe how names and shapes of a run and a model differ, and what to do."""
    found = []
    if missing:
        found.append(f"the run has {listed(missing)}, this model does not")
    if extra:
        found.append(f"this model has {listed(extra)}, which the run does not carry")
    if reshaped:
        run, model = reshaped[0]
        odd = listed([tensor.name for tensor, _ in reshaped])
        found.append(f"{odd}: {list(run.shape)} in the run but {list(model.shape)} in this model")
    if not missing and not reshaped:
        advice = "pass strict=False to leave it alone"
    elif any(name.endswith(("experts.gate_up_proj", "experts.down_proj")) for name in tensors):
        advice = "a state dict has its experts fused, so pass the module it is from"
    else:
        advice = "another model, or another configuration of it"
    return f"{'; '.join(found)}: {advice}"
