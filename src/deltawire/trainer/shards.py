"""What one rank writes of a sharded model: regions of the checkpoint's tensors, and where they lie in its memory.

A DTensor says how it is cut (placements) and where this rank stands (mesh); along each dimension that gives the indices
held here, and these make regions of the tensor's matrix. A plain tensor is held whole by every rank. What several
ranks hold (replicas, DDP, buffers) is written by one of them, so that all have about as much to write.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ..core import digest
from ..core.change import Block, Region, blocks, tile, whole
from ..core.digest import StateDigest
from ..core.dtypes import lookup
from ..core.errors import SchemaMismatch
from ..core.full import Source
from ..core.schema import Schema, TensorSpec
from ..huggingface import Band
from ..models import ModelView, is_module, tensors_of
from ..views.blocks import Blocks, Grid
from ..views.host import Place
from .adamw import AdamWDetector, local_tensor
from .collective import Group
from .detectors import Detector, HostDetector, default_detector
from .device import FusedDetector
from .local import LocalModel

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LocalRegion:
    """A region of a checkpoint's tensor that this rank holds."""

    region: Region
    row: int
    """Row of the local tensor, seen as a matrix, at which it begins. It has all columns of the local tensor."""

    @property
    def name(self) -> str:
        """Name of the local tensor. Sorts as the regions of a tensor do."""
        return f"{self.region.tensor.name}@{self.region.row:015d},{self.region.column:015d}"

    def of(self, blocks: Blocks) -> LocalRegion:
        """The same rectangle in a view."""
        grid, r = blocks.grids.get(self.region.tensor.name), self.region
        return self if grid is None else LocalRegion(Region(grid.weights, r.row, r.rows, r.column, r.columns), self.row)

    def cut(self, local: Tensor) -> Tensor:
        """The region as a view of the local tensor."""
        rows = local.detach().reshape(-1, local.shape[-1] if local.dim() else 1)
        return rows[self.row : self.row + self.region.rows]


class Shards(LocalModel):
    """The regions of a model that this rank holds, out of several ranks."""

    _parts: Sequence[LocalRegion] = ()
    """What this rank reads."""
    _written: Sequence[LocalRegion] = ()
    """What this rank writes: the same, or what a view makes of it."""
    _scales: Mapping[LocalRegion, Grid]
    """Of a view: the scales that this rank writes."""
    _group: Group

    @property
    def regions(self) -> Sequence[Region]:
        return [part.region for part in self._written]

    def open(self, model: Any, group: Group) -> tuple[Schema, Source]:
        schema = group.together(lambda: self._schema_of(model))[0]
        held = group.together(lambda: self._hold(model, schema, group.rank))
        mine = share_out(held, schema)[group.rank]
        self._parts = self._written = [part for part in self._parts if part.region in mine]
        view = group.each(lambda: self._view(model))
        self._schema = view.schema
        if self.view is None:
            return schema, view
        self._blocks, self._group = Blocks(schema), group
        grids = self._blocks.grids
        # any rank could write them: all know the largest weights of all blocks
        self._scales = {
            LocalRegion(whole(grid.scales), 0): grid for grid in [*grids.values()][group.rank :: group.size]
        }
        self._written = [part.of(self._blocks) for part in self._parts] + [*self._scales]
        return self._blocks.schema, self._viewed_parts(view)

    def source(self, model: Any) -> Source:
        view = self._view(model)
        if view.schema != self._schema:
            raise SchemaMismatch("this model is cut in another way than the one published before")
        return view if self.view is None else self._viewed_parts(view)

    def _viewed_parts(self, view: ModelView) -> Source:
        """The view of this rank's weights. All ranks call it: a block may lie on several."""
        assert self._blocks is not None
        grids = self._blocks.grids
        regions = {part.name: part.region for part in self._parts if part.region.tensor.name in grids}
        places = {name: Place(grids[r.tensor.name], r.row, r.column) for name, r in regions.items()}
        scales = {part.name: grid for part, grid in self._scales.items()}
        return self._viewed(view, self._blocks, places, scales, self._group.maximum)

    def detector(self, source: Source) -> Detector:
        given = self._detector
        if isinstance(given, FusedDetector):
            # FSDP2 makes the bf16 weights anew for every forward pass and frees them: there is no copy to compare with
            raise SchemaMismatch(
                "sharded training keeps no bf16 copies to compare with; use DeltaAdamW or SnapshotDetector"
            )
        if isinstance(given, AdamWDetector):
            given.covers_model = False
        detector = (given or default_detector(source)) if self._parts else HostDetector()
        detector.bind(source)
        return detector

    def plan(self, detector: Detector) -> list[Block]:
        return self._placed(detector.plan)

    def _placed(self, plan: list[Block]) -> list[Block]:
        """Where regions of what this rank holds are in the checkpoint."""
        place = {part.name: part.region for part in self._written}

        def shifted(here: Region) -> Region:
            there = place[here.tensor.name]
            return Region(there.tensor, there.row + here.row, here.rows, there.column + here.column, here.columns)

        return [tuple(map(shifted, block)) for block in plan]

    def digest(self, source: Source, detector: Detector) -> StateDigest:
        total, plan = StateDigest(), blocks(source.schema)
        for here, there in zip(chain(*plan), chain(*self._placed(plan)), strict=True):
            bits = source.region(here).reshape(there.rows, there.columns)
            total += digest.of_rows(there.tensor.name, bits, there.base, there.tensor.columns)
        return total

    def _tensors(self, model: Any) -> dict[str, Any]:
        return tensors_of(model)

    def _schema_of(self, model: Any) -> Schema:
        """The checkpoint's schema. Ties are seen by shared memory, which a rank with an empty shard cannot."""
        if is_module(model) and any(type(m).__name__ == "FullyShardedDataParallel" for m in model.modules()):
            raise SchemaMismatch(
                "FullyShardedDataParallel keeps flattened weights; shard with torch.distributed.fsdp.fully_shard"
            )
        tensors = self._tensors(model)
        with torch.no_grad():
            local = ModelView({n: _stand_in(t) for n, t in tensors.items()}, self._wire_dtype, of=model).schema
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
                if id(tensor.whole) not in wholes:
                    fused = TensorSpec(spec.name, spec.dtype, tuple(tensor.whole.shape))
                    wholes[id(tensor.whole)] = held(tensor.whole, fused)
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
        view = ModelView(local, self._wire_dtype, known=self._known, of=model)
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
    return [LocalRegion(Region(spec, row, count, column * per, width * per), at) for row, at, count in _runs(rows)]


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
            found.append(LocalRegion(here, part.row + common.row - there.row))
    return found


def _along(axis: Indices, dim: int, cuts: Sequence[tuple[Any, int, int]], name: str) -> Indices:
    """What is left of a dimension's indices here; mesh dimensions cut one after the other."""
    for placement, size, at in cuts:
        if isinstance(placement, Replicate):
            continue
        if isinstance(placement, _StridedShard):
            if placement.dim == dim:
                parts = int(placement.split_factor)
                axis = np.concatenate([_chunk(_chunk(axis, parts, i), size, at) for i in range(parts)])
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
