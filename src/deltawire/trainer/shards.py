"""What one rank writes of a sharded model: rectangles of the checkpoint's tensors, and where they lie in its memory.

A DTensor says how it is cut (placements) and where this rank stands (mesh); along each dimension that gives the indices
held here, and these make rectangles of the tensor's matrix. A plain tensor is held whole by every rank. What several
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
from .detectors import Detected, Detector, Found, HostDetector, default_detector
from .device import FusedDetector

Indices = npt.NDArray[np.int64]
Sides = tuple[str, int, int, int, int]
"""tensor, row, rows, column, columns: a region as it is told to other ranks."""


@dataclass(frozen=True, slots=True)
class Part:
    """A rectangle that this rank holds."""

    region: Region
    row: int
    column: int
    # where it begins in the local tensor, seen as a matrix

    @property
    def sides(self) -> Sides:
        region = self.region
        return region.tensor.name, region.row, region.rows, region.column, region.columns

    @property
    def name(self) -> str:
        """Of the local tensor that stands for it. Sorts as the rectangles of a tensor do."""
        return f"{self.region.tensor.name}@{self.region.row:015d},{self.region.column:015d}"

    def cut(self, local: Tensor) -> Tensor:
        per = lookup(self.region.tensor.dtype).units_per_element
        rows = local.detach().reshape(-1, local.shape[-1] if local.dim() else 1)
        first, last = self.column // per, (self.column + self.region.columns) // per
        return rows[self.row : self.row + self.region.rows, first:last]


class Reader:
    """Looks at a model on this rank, the same way at every publish."""

    def __init__(self, wire_dtype: str | None, buffers: bool) -> None:
        self._wire, self._buffers = wire_dtype, buffers
        self._known: Any = None

    def tensors(self, model: Any) -> dict[str, Any]:
        return tensors_of(model, buffers=self._buffers)

    def schema(self, model: Any) -> Schema:
        """In checkpoint coordinates. Ties are seen by shared memory, which a rank with an empty shard cannot."""
        if is_module(model) and any(type(m).__name__ == "FullyShardedDataParallel" for m in model.modules()):
            raise SchemaMismatch(
                "FullyShardedDataParallel keeps flattened weights; shard with torch.distributed.fsdp.fully_shard"
            )
        tensors = self.tensors(model)
        with torch.no_grad():
            local = ModelView({n: _stand_in(t) for n, t in tensors.items()}, self._wire, of=model).schema
        specs = [TensorSpec(t.name, t.dtype, tuple(tensors[t.name].shape)) for t in local.tensors]
        return Schema.build(specs, local.ties)

    def parts(self, model: Any, schema: Schema) -> list[Part]:
        """All that this rank holds."""
        tensors, parts = self.tensors(model), []
        wholes: dict[int, list[Part]] = {}
        # of tensors that bands are cut from: a layer's experts are hundreds of bands
        for spec in schema.tensors:
            tensor = tensors[spec.name]
            if isinstance(tensor, Band):
                whole = TensorSpec(spec.name, spec.dtype, tuple(tensor.whole.shape))
                if id(tensor.whole) not in wholes:
                    wholes[id(tensor.whole)] = held(tensor.whole, whole)
                parts += _of_band(tensor, spec, wholes[id(tensor.whole)])
            else:
                parts += held(tensor, spec)
        return parts

    def view(self, model: Any, mine: Sequence[Part]) -> ModelView:
        """The parts that this rank writes, each as a tensor of its own."""
        tensors = self.tensors(model)
        with torch.no_grad():
            local = {part.name: part.cut(_local(tensors[part.region.tensor.name])) for part in mine}
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


def held(tensor: Any, spec: TensorSpec) -> list[Part]:
    """The rectangles of a tensor that this rank has."""
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
    return [Part(Region(spec, row, count, column * per, width * per), at, 0) for row, at, count in _runs(rows)]


def _of_band(band: Band, spec: TensorSpec, parts: Sequence[Part]) -> list[Part]:
    """What this rank has of a band, from the parts it has of the whole tensor."""
    if band.shape != spec.shape:
        raise SchemaMismatch(f"{spec.name!r} is {list(band.shape)} on this rank and {list(spec.shape)} on rank 0")
    found = []
    for part in parts:
        there = part.region
        first, last = max(there.row, band.row), min(there.row + there.rows, band.row + spec.rows)
        if first < last:
            here = Region(spec, first - band.row, last - first, there.column, there.columns)
            found.append(Part(here, part.row + first - there.row, part.column))
    return found


def _along(axis: Indices, dim: int, cuts: Sequence[tuple[Any, int, int]], name: str) -> Indices:
    """What is left of a dimension's indices here; mesh dimensions cut one after the other."""
    for placement, parts, at in cuts:
        if isinstance(placement, Replicate):
            continue
        if isinstance(placement, _StridedShard):
            if placement.dim == dim:
                whole = placement.split_factor
                axis = np.concatenate([_chunk(_chunk(axis, whole, i), parts, at) for i in range(whole)])
        elif isinstance(placement, Shard):
            if placement.dim == dim:
                axis = _chunk(axis, parts, at)
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


def share_out(held: Sequence[Sequence[Sides]], schema: Schema) -> list[set[Sides]]:
    """Which rank writes what, from what each of them holds. The same on every rank.

    SchemaMismatch if they do not hold every weight, or hold parts that overlap without being the same.
    """
    holders: dict[Sides, list[int]] = {}
    for rank, parts in enumerate(held):
        for sides in parts:
            holders.setdefault(sides, []).append(rank)
    known = schema.by_name()
    regions = {sides: Region(known[sides[0]], *sides[1:]) for sides in holders}
    tile(regions.values(), schema, "this trainer")
    load = [0] * len(held)
    mine: list[set[Sides]] = [set() for _ in held]

    def nbytes(sides: Sides) -> int:
        return regions[sides].units * regions[sides].tensor.unit_size

    # what nobody else has comes first, the rest evens it out, largest first
    for sides in sorted(holders, key=lambda s: (len(holders[s]) > 1, -nbytes(s), s)):
        rank = min(holders[sides], key=lambda rank: (load[rank], rank))
        load[rank] += nbytes(sides)
        mine[rank].add(sides)
    return mine


class ShardDetector:
    """Finds changes in local tensors and tells of them in checkpoint coordinates."""

    writes_parts = False

    def __init__(self, parts: Sequence[Part], view: ModelView, inner: Detector | None = None) -> None:
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
        self.rectangles = list(place.values())

    def suits(self, source: Source) -> bool:
        return self._inner.suits(source)

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
