"""What one rank writes of a sharded model: regions of the checkpoint's tensors, and where they lie in its memory.

A DTensor says how it is cut (placements) and where this rank stands (mesh); along each dimension that gives the indices
held here, and these make regions of the tensor's matrix. A plain tensor is held whole by every rank. What several
ranks hold (replicas, DDP, buffers) is written by one of them, so that all have about as much to write.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ..bucket.replay import State
from ..core import digest
from ..core.change import Block, Change, Region, compare, tile
from ..core.digest import StateDigest
from ..core.dtypes import Bits, lookup
from ..core.errors import SchemaMismatch
from ..core.full import Source
from ..core.parallel import ordered_map
from ..core.schema import Schema, TensorSpec
from ..huggingface import Band
from ..kernels.block import DeviceBlock
from ..models import ModelView, is_module, tensors_of
from .adamw import AdamWDetector, local_tensor
from .captures import Captures
from .collective import Group
from .detectors import Detected, Detector, Found, HostDetector, default_detector
from .device import FusedDetector

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LocalRegion:
    """A region of a checkpoint's tensor that this rank holds."""

    region: Region
    row: int
    """Row of the local tensor, seen as a matrix, at which it begins."""
    column: int
    """Column of the local tensor at which it begins, in units."""

    @property
    def name(self) -> str:
        """Name of the local tensor that stands for it. Sorts as the regions of a tensor do."""
        return f"{self.region.tensor.name}@{self.region.row:015d},{self.region.column:015d}"

    def cut(self, local: Tensor) -> Tensor:
        """The region as a view of the local tensor."""
        per = lookup(self.region.tensor.dtype).units_per_element
        rows = local.detach().reshape(-1, local.shape[-1] if local.dim() else 1)
        first, last = self.column // per, (self.column + self.region.columns) // per
        return rows[self.row : self.row + self.region.rows, first:last]


class Shards:
    """The parts of a model that this rank holds. `WholeModel` (pipeline.py) has the same methods for all of a model."""

    streams = False
    """However dense a change is, it is captured: a rank could not turn to another way on its own."""

    def __init__(self, wire_dtype: str | None, buffers: bool, detector: Detector | None) -> None:
        """`detector` is the user's, for the local tensors."""
        self._wire, self._buffers, self._detector = wire_dtype, buffers, detector
        self._known: Any = None
        self._parts: list[LocalRegion] = []
        self._schema: Schema | None = None
        """Of the local tensors."""

    @property
    def regions(self) -> list[Region]:
        """What this rank writes."""
        return [part.region for part in self._parts]

    def open(self, model: Any, group: Group) -> tuple[Schema, Source]:
        """Agree on what each rank writes. Returns the checkpoint's schema and the weights that this rank writes."""
        schema = group.together(lambda: self._schema_of(model))[0]
        held = group.together(lambda: self._hold(model, schema, group.rank))
        mine = share_out(held, schema)[group.rank]
        self._parts = [part for part in self._parts if part.region in mine]
        view = group.each(lambda: self._view(model))
        self._schema = view.schema
        return schema, view

    def source(self, model: Any) -> Source:
        """The present weights that this rank writes. Raises SchemaMismatch if the model is cut in another way."""
        view = self._view(model)
        if view.schema != self._schema:
            raise SchemaMismatch("this model is cut in another way than the one published before")
        return view

    def detector(self, source: ModelView) -> ShardDetector:
        """A detector that is bound to the local tensors."""
        return ShardDetector(self._parts, source, self._detector)

    def captures(self, source: Source, detector: ShardDetector, state: State | None) -> Captures:
        """What later weights are compared with. `state` is a version from the bucket that these weights follow."""
        captures = Captures(detector, detector.load(source))
        if state is not None:
            captures.precede(detector.since(state, source))
        return captures

    def _tensors(self, model: Any) -> dict[str, Any]:
        return tensors_of(model, buffers=self._buffers)

    def _schema_of(self, model: Any) -> Schema:
        """The checkpoint's schema. Ties are seen by shared memory, which a rank with an empty shard cannot."""
        if is_module(model) and any(type(m).__name__ == "FullyShardedDataParallel" for m in model.modules()):
            raise SchemaMismatch(
                "FullyShardedDataParallel keeps flattened weights; shard with torch.distributed.fsdp.fully_shard"
            )
        tensors = self._tensors(model)
        with torch.no_grad():
            local = ModelView({n: _stand_in(t) for n, t in tensors.items()}, self._wire, of=model).schema
        specs = [TensorSpec(t.name, t.dtype, tuple(tensors[t.name].shape)) for t in local.tensors]
        return Schema.build(specs, local.ties)

    def _hold(self, model: Any, schema: Schema, rank: int) -> list[Region]:
        """Note and return all regions that this rank holds."""
        ours = self._schema_of(model)
        if rank:
            # a rank with an empty shard cannot see what is tied; rank 0 always has a piece of everything
            untied = [tensor for tensor in ours.tensors if tensor.name not in schema.ties]
            Schema.build(untied, schema.ties).require_equal(schema, ours=f"rank {rank}", theirs="rank 0")
        tensors, parts = self._tensors(model), []
        # of tensors that bands are cut from, found once: a layer's experts are hundreds of bands
        wholes: dict[int, list[LocalRegion]] = {}
        for spec in schema.tensors:
            tensor = tensors[spec.name]
            if isinstance(tensor, Band):
                whole = TensorSpec(spec.name, spec.dtype, tuple(tensor.whole.shape))
                if id(tensor.whole) not in wholes:
                    wholes[id(tensor.whole)] = held(tensor.whole, whole)
                parts += _of_band(tensor, spec, wholes[id(tensor.whole)])
            else:
                parts += held(tensor, spec)
        self._parts = parts
        return [part.region for part in parts]

    def _view(self, model: Any) -> ModelView:
        """The regions that this rank writes, each as a tensor of its own."""
        tensors = self._tensors(model)
        with torch.no_grad():
            local = {part.name: part.cut(_local(tensors[part.region.tensor.name])) for part in self._parts}
        view = ModelView(local, self._wire, known=self._known, of=model)
        self._known = view.known
        return view


def _local(tensor: Any) -> Tensor:
    """What this process has of a tensor, or of the one that a band is part of."""
    return local_tensor(tensor.whole if isinstance(tensor, Band) else tensor)


def _stand_in(tensor: Any) -> Tensor:
    """A local tensor of the same dtype that shares memory with those of tied names. A band is tied to nothing."""
    local = _local(tensor)
    return local.new_empty(0) if isinstance(tensor, Band) else local


def held(tensor: Any, spec: TensorSpec) -> list[LocalRegion]:
    """The regions of a tensor that this rank holds."""
    if tuple(tensor.shape) != spec.shape:
        raise SchemaMismatch(f"{spec.name!r} is {list(tensor.shape)} on this rank and {list(spec.shape)} on rank 0")
    axes = [np.arange(side) for side in spec.shape]
    if isinstance(tensor, DTensor):
        coordinate = tensor.device_mesh.get_coordinate()
        if coordinate is None:
            return []
        cuts = list(zip(tensor.placements, tensor.device_mesh.shape, coordinate, strict=True))
        axes = [_along(axis, dim, cuts, spec.name) for dim, axis in enumerate(axes)]
        found, expected = tuple(tensor.to_local().shape), tuple(len(axis) for axis in axes)
        if found != expected:
            raise SchemaMismatch(
                f"{spec.name!r} is placed as {tensor.placements}, which should leave {list(expected)} here but has "
                f"{list(found)}: this placement is not understood"
            )
    if not all(len(axis) for axis in axes):
        return []
    *outer, last = axes or [np.arange(1)]
    rows = np.zeros(1, np.int64)
    for axis, side in zip(outer, spec.shape[:-1], strict=True):
        rows = (rows[:, None] * side + axis).reshape(-1)
    columns = _runs(last)
    if len(columns) > 1:
        raise SchemaMismatch(f"{spec.name!r} has a shard of scattered columns, {tensor.placements}: not understood")
    per = lookup(spec.dtype).units_per_element
    (column, _, width) = columns[0]
    return [LocalRegion(Region(spec, row, count, column * per, width * per), at, 0) for row, at, count in _runs(rows)]


def _of_band(band: Band, spec: TensorSpec, parts: Sequence[LocalRegion]) -> list[LocalRegion]:
    """What this rank holds of a band, from what it holds of the whole tensor."""
    if band.shape != spec.shape:
        raise SchemaMismatch(f"{spec.name!r} is {list(band.shape)} on this rank and {list(spec.shape)} on rank 0")
    found = []
    for part in parts:
        there = part.region
        common = there.meet(Region(there.tensor, band.row, spec.rows, 0, there.tensor.columns))
        if common is not None:
            here = Region(spec, common.row - band.row, common.rows, common.column, common.columns)
            found.append(LocalRegion(here, part.row + common.row - there.row, part.column))
    return found


def _along(axis: Indices, dim: int, cuts: Sequence[tuple[Any, int, int]], name: str) -> Indices:
    """What is left of a dimension's indices here; mesh dimensions cut one after the other."""
    for placement, size, at in cuts:
        if isinstance(placement, Replicate):
            continue
        if isinstance(placement, _StridedShard):
            if placement.dim == dim:
                whole = placement.split_factor
                axis = np.concatenate([_chunk(_chunk(axis, whole, i), size, at) for i in range(whole)])
        elif isinstance(placement, Shard):
            if placement.dim == dim:
                axis = _chunk(axis, size, at)
        else:
            raise SchemaMismatch(f"{name!r} is placed as {placement}: such weights cannot be published")
    return axis


def _chunk(axis: Indices, parts: int, at: int) -> Indices:
    """As torch.chunk does it: equal parts, the last ones smaller or empty."""
    each = -(-len(axis) // parts)
    return axis[at * each : (at + 1) * each]


def _runs(indices: Indices) -> list[tuple[int, int, int]]:
    """Ascending numbers as runs: (first number, where it stands, how many)."""
    starts = [0, *(np.flatnonzero(np.diff(indices) != 1) + 1).tolist(), len(indices)]
    return [(int(indices[a]), a, b - a) for a, b in pairwise(starts)]


def share_out(held: Sequence[Sequence[Region]], schema: Schema) -> list[set[Region]]:
    """Which rank writes what, from what each of them holds. The same on every rank.

    Raises SchemaMismatch if they do not hold every weight, or hold regions that overlap without being the same.
    """
    holders: dict[Region, list[int]] = {}
    for rank, regions in enumerate(held):
        for region in regions:
            holders.setdefault(region, []).append(rank)
    tile(holders, schema, "this trainer")
    load = [0] * len(held)
    mine: list[set[Region]] = [set() for _ in held]

    def order(region: Region) -> tuple[Any, ...]:
        # what only one rank has comes first, the rest evens it out, largest first
        place = region.tensor.name, region.row, region.rows, region.column, region.columns
        return len(holders[region]) > 1, -region.nbytes, place

    for region in sorted(holders, key=order):
        rank = min(holders[region], key=lambda rank: (load[rank], rank))
        load[rank] += region.nbytes
        mine[rank].add(region)
    return mine


class ShardDetector:
    """Finds changes in local tensors and returns them in checkpoint coordinates."""

    writes_parts = False

    def __init__(self, parts: Sequence[LocalRegion], view: ModelView, inner: Detector | None = None) -> None:
        if isinstance(inner, FusedDetector):
            # FSDP2 makes the bf16 weights anew for every forward pass and lets go of them: there is no copy to keep
            raise SchemaMismatch(
                "sharded training keeps no bf16 copies to compare with; use DeltaAdamW or SnapshotDetector"
            )
        if isinstance(inner, AdamWDetector):
            inner.covers_model = False
        self._inner: Detector = (inner or default_detector(view)) if parts else HostDetector()
        self._inner.bind(view)
        place = {part.name: part.region for part in parts}
        self._there = {here: _shifted(here, place) for block in self._inner.plan for here in block}
        self._here = {there: here for here, there in self._there.items()}
        self.plan = [tuple(self._there[here] for here in block) for block in self._inner.plan]

    def bind(self, source: Source) -> None:
        """Nothing to do: bound when it was made."""

    def suits(self, source: Source) -> bool:
        """True, or SchemaMismatch: a rank cannot turn to another detector on its own."""
        if not self._inner.suits(source):
            raise SchemaMismatch("this model lies elsewhere than the one published before")
        return True

    def digest_of(self, source: Source) -> StateDigest:
        """This rank's share of the digest, from local weights."""
        total = StateDigest()
        for here, there in self._there.items():
            bits = source.region(here).reshape(there.rows, there.columns)
            total += digest.of_rows(there.tensor.name, bits, there.base, there.tensor.columns)
        return total

    def load(self, source: Source) -> StateDigest:
        self._inner.load(source)
        return self.digest_of(source)

    def since(self, checkpoint: Source, source: Source) -> Found:
        """What leads from full weights in checkpoint coordinates to this rank's local ones."""

        def compared(block: Block) -> list[Change]:
            return [compare(there, checkpoint.region(there), source.region(self._here[there])) for there in block]

        return Found.of(list(ordered_map(compared, self.plan)))

    def detect(self, source: Source, budget: int) -> Detected:
        return _Translated(self, self._inner.detect(source, budget))

    def region(self, region: Region) -> Bits:
        return self._inner.region(self._here[region])

    def block(self, regions: Sequence[Region]) -> DeviceBlock | None:
        return self._inner.block([self._here[region] for region in regions])

    def write(self, changes: Sequence[Change]) -> None:
        raise NotImplementedError("a rank's weights are taken over as a whole")

    def later(self, work: Callable[[], Found]) -> Future[Found]:
        return self._inner.later(work)

    def translate(self, found: Found) -> Found:
        # positions count within a region, so they stay what they are
        return Found.of(
            [[Change(self._there[c.region], c.positions, c.old, c.new) for c in block] for block in found.blocks]
        )

    def close(self) -> None:
        self._inner.close()


class _Translated:
    found: Future[Found]

    def __init__(self, detector: ShardDetector, inner: Detected) -> None:
        self._detector, self._inner = detector, inner

    def take(self) -> None:
        self._inner.take()
        found = self._inner.found
        self.found = self._detector.later(lambda: self._detector.translate(found.result()))

    def give_back(self) -> None:
        self._inner.give_back()


def _shifted(here: Region, place: Mapping[str, Region]) -> Region:
    whole = place[here.tensor.name]
    return Region(whole.tensor, whole.row + here.row, here.rows, whole.column + here.column, here.columns)
