"""What one rank writes of a sharded model: regions of the checkpoint's tensors, and where they lie in its memory.

A DTensor says how it is cut (placements) and where this rank stands (mesh); along each dimension that gives the indices
held here, and these make regions of the tensor's matrix. So does a rectangle of a Shard; a flat range, as ZeRO 3 and
FSDP1 cut, is at most three regions. A plain tensor is held whole by every rank. What several ranks hold (replicas, DDP,
buffers) is written by one of them, so that all have about as much to write.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from blake3 import blake3
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ..core import digest
from ..core.change import Block, Region, blocks, whole
from ..core.digest import StateDigest
from ..core.dtypes import lookup
from ..core.errors import SchemaMismatch
from ..core.full import Source
from ..core.schema import Schema, TensorSpec, listed
from ..huggingface import Band
from ..models import ModelView, identity, torch_bits
from ..views.blocks import Blocks, Grid
from ..views.host import Place
from .adamw import AdamWDetector, local_tensor
from .collective import Group
from .detectors import Detector, HostDetector, default_detector
from .device import FusedDetector
from .local import LocalModel
from .partitioned import held_by_name
from .shard import HeldShards, Pieces

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LocalRegion:
    """A region of a checkpoint's tensor that this rank holds."""

    region: Region
    at: int
    """Element of the local tensor at which it begins."""
    width: int
    """Elements of the local tensor from one row of it to the next."""
    piece: int = 0
    """Which piece of several that this rank holds of the tensor."""

    @property
    def name(self) -> str:
        """Name of the local tensor. Sorts as the regions of a tensor do."""
        return f"{self.region.tensor.name}@{self.region.row:015d},{self.region.column:015d}"

    def of(self, blocks: Blocks) -> LocalRegion:
        """The same rectangle in a view."""
        grid, r = blocks.grids.get(self.region.tensor.name), self.region
        return self if grid is None else replace(self, region=replace(r, tensor=grid.weights))

    def within(self, inner: Region, of: Region | None = None) -> LocalRegion:
        """A part of it. `of`: the region as other coordinates have it, which those of `inner` are."""
        here = of or self.region
        per = lookup(here.tensor.dtype).units_per_element
        at = self.at + (inner.row - here.row) * self.width + (inner.column - here.column) // per
        return replace(self, region=inner, at=at)

    def cut(self, local: Tensor) -> Tensor:
        """The region as a view of the local tensor."""
        rows, columns = self.region.rows, self.region.columns // lookup(self.region.tensor.dtype).units_per_element
        if local.dim() > 1:
            row, column = divmod(self.at, self.width)
            return local.detach().reshape(-1, self.width)[row : row + rows, column : column + columns]
        flat = local.detach().reshape(-1)
        step = flat.stride(0)
        return flat.as_strided((rows, columns), (self.width * step, step), flat.storage_offset() + self.at * step)


class Shards(LocalModel):
    """The regions of a model that this rank holds, out of several ranks."""

    _parts: Sequence[LocalRegion] = ()
    """What this rank reads."""
    _written: Sequence[LocalRegion] = ()
    """What this rank writes: the same, or what a view makes of it."""
    _scales: Mapping[LocalRegion, Grid]
    """Of a view: the scales that this rank writes."""
    _group: Group
    _cut: Mapping[str, object] | None = None
    """How what this rank holds is cut."""
    _ties: Mapping[str, str]

    @property
    def regions(self) -> Sequence[Region]:
        return [part.region for part in self._written]

    def open(self, model: Any, group: Group) -> tuple[Schema, Source]:
        self._cut = None
        schemas = group.together(lambda: self._schema_of(model))
        schema = group.each(lambda: merge(schemas)) if isinstance(model, HeldShards) else schemas[0]
        self._ties = schema.ties
        held = group.together(lambda: self._hold(model, schema, group.rank))
        holders = group.each(lambda: tiles(held, schema))
        if isinstance(model, HeldShards):
            self._require_equal_copies(model, holders, group)
        mine = share_out(holders, group.size)[group.rank]
        by_tile = {part.region: part for part in self._cut_to(holders)}
        self._parts = self._written = [by_tile[tile] for tile in holders if tile in mine]
        view = group.each(lambda: self._view(model))
        self._cut, self._schema = cut_of(self._tensors(model)), view.schema
        if self.view is None:
            return schema, view
        self._blocks, self._group = Blocks(schema, self.view), group
        grids = self._blocks.grids
        # any rank could write them: all know the largest weights of all blocks
        self._scales = {
            LocalRegion(whole(grid.scales), 0, grid.scales.columns): grid
            for grid in [*grids.values()][group.rank :: group.size]
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
            total += digest.of_rows(there.tensor.name, bits, there.start, there.tensor.columns)
        return total

    def _tensors(self, model: Any) -> dict[str, Any]:
        return model.tensors if isinstance(model, HeldShards) else held_by_name(model)

    def _schema_of(self, model: Any) -> Schema:
        """The checkpoint's schema. Ties are seen by shared memory, which a rank with an empty shard cannot."""
        tensors = self._tensors(model)
        with torch.no_grad():
            local = ModelView({n: _stand_in(t) for n, t in tensors.items()}, self._wire_dtype, of=model).schema
        specs = [TensorSpec(t.name, t.dtype, tuple(tensors[t.name].shape)) for t in local.tensors]
        return Schema.build(specs, local.ties)

    def _cut_to(self, holders: Iterable[Region]) -> Iterator[LocalRegion]:
        """The parts that this rank holds, cut to the tiles of all ranks."""
        by_tensor: dict[str, list[Region]] = {}
        for tile in holders:
            by_tensor.setdefault(tile.tensor.name, []).append(tile)
        for part in self._parts:
            for tile in by_tensor.get(part.region.tensor.name, ()):
                if part.region.meet(tile) == tile:
                    yield part.within(tile)

    def _require_equal_copies(self, model: HeldShards, holders: Mapping[Region, Sequence[int]], group: Group) -> None:
        """Raise SchemaMismatch on all ranks where they hold the same part of a tensor with other bits."""

        def copies() -> dict[Region, set[str]]:
            found: dict[Region, set[str]] = {}
            for part in self._cut_to(tile for tile, ranks in holders.items() if len(ranks) > 1):
                bits = torch_bits(part.cut(model.tensors[part.region.tensor.name].pieces[part.piece][0]))
                found.setdefault(part.region, set()).add(blake3(bits.tobytes()).hexdigest())
            return found

        first: dict[Region, tuple[int, set[str]]] = {}
        for rank, found in enumerate(group.together(copies)):
            for tile, bits in found.items():
                other, expected = first.setdefault(tile, (rank, bits))
                if bits != expected or len(bits) > 1:
                    raise group.agreed(
                        SchemaMismatch(
                            f"ranks {other} and {rank} hold the same part of {tile.tensor.name!r} with other bits"
                            if rank != other
                            else f"rank {rank} holds a part of {tile.tensor.name!r} twice, with other bits"
                        )
                    )

    def _require_same_cut(self, tensors: Mapping[str, Any]) -> None:
        """Raise SchemaMismatch where this rank holds other parts than before, or tensors are tied no longer: what would
        be read instead are other weights."""
        cut = cut_of(tensors)
        before = cut if self._cut is None else self._cut
        if cut != before:
            names = [name for name in {**before, **cut} if before.get(name) != cut.get(name)]
            raise SchemaMismatch(f"this rank holds other parts of {listed(names)} than when it published before")
        for alias, stored in self._ties.items():
            if alias in tensors and stored in tensors:
                one, other = identity(_stand_in(tensors[alias])), identity(_stand_in(tensors[stored]))
                if one != other and None not in (one, other):
                    raise SchemaMismatch(
                        f"{alias!r} is tied to {stored!r} in the run, and has memory of its own here; publish weights "
                        "that are not tied to an address of their own"
                    )

    def _hold(self, model: Any, schema: Schema, rank: int) -> list[Region]:
        """Note and return all regions that this rank holds."""
        if not isinstance(model, HeldShards):
            # by all ranks: a view such as merged_weights(model) may gather
            ours = self._schema_of(model)
            if rank:
                # a rank with an empty shard cannot see what is tied; rank 0 always has a piece of everything
                untied = [tensor for tensor in ours.tensors if tensor.name not in schema.ties]
                Schema.build(untied, schema.ties).require_equal(schema, ours=f"rank {rank}", theirs="rank 0")
        tensors, parts = self._tensors(model), []
        # of tensors that bands are cut from, found once: a layer's experts are hundreds of bands
        wholes: dict[int, list[LocalRegion]] = {}
        for spec in schema.tensors:
            if (tensor := tensors.get(spec.name)) is None:
                # of shards that were handed in: all of it is on other ranks
                continue
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
        self._require_same_cut(tensors)
        with torch.no_grad():
            local = {part.name: part.cut(_local(tensors[part.region.tensor.name], part)) for part in self._parts}
        view = ModelView(local, self._wire_dtype, known=self._known, of=model)
        self._known = view.known
        return view


def _local(tensor: Any, part: LocalRegion) -> Tensor:
    """The local part of a tensor, or of the tensor that a band is part of."""
    whole = tensor.whole if isinstance(tensor, Band) else tensor
    return whole.pieces[part.piece][0] if isinstance(whole, Pieces) else local_tensor(whole)


def _stand_in(tensor: Any) -> Tensor:
    """A local tensor of the same dtype that shares memory with those of tied names. A band is tied to nothing."""
    whole = tensor.whole if isinstance(tensor, Band) else tensor
    local = whole.mark if isinstance(whole, Pieces) else local_tensor(whole)
    return local.new_empty(0) if isinstance(tensor, Band) else local


def cut_of(tensors: Mapping[str, Any]) -> dict[str, object]:
    """How the tensors of a rank are cut: equal for two models of which it holds the same parts."""
    found: dict[str, object] = {}
    for name, tensor in tensors.items():
        whole, how = (tensor.whole if isinstance(tensor, Band) else tensor), cast(object, None)
        if isinstance(whole, Pieces):
            how = whole.dtype, [where for _, where in whole.pieces]
        elif isinstance(whole, DTensor):
            how = whole.device_mesh, whole.placements
        found[name] = tensor.shape, tensor.row if isinstance(tensor, Band) else 0, how
    return found


def merge(schemas: Sequence[Schema]) -> Schema:
    """The schema of a checkpoint of which each rank knows the tensors that it holds a part of.

    Names are tied if they are on every rank that has one of them.
    """
    found: dict[str, tuple[int, TensorSpec]] = {}
    homes: list[dict[str, str]] = []
    for rank, schema in enumerate(schemas):
        specs = schema.by_name()
        homes.append({**{name: name for name in specs}, **schema.ties})
        for name, stored in homes[-1].items():
            spec = specs[stored]
            ours = TensorSpec(name, spec.dtype, spec.shape)
            first, theirs = found.setdefault(name, (rank, ours))
            if ours != theirs:
                raise SchemaMismatch(
                    f"{name!r} is {ours.dtype} {list(ours.shape)} on rank {rank} and {theirs.dtype} "
                    f"{list(theirs.shape)} on rank {first}"
                )
    ties: dict[str, str] = {}
    for alias, stored in chain.from_iterable(schema.ties.items() for schema in schemas):
        # ranks may have named them in another order
        if alias in ties or alias in ties.values() or stored in ties:
            continue
        if all((alias in home) == (stored in home) and home.get(alias) == home.get(stored) for home in homes):
            ties[alias] = stored
    return Schema.build([spec for name, (_, spec) in found.items() if name not in ties], ties)


def held(tensor: Any, spec: TensorSpec) -> list[LocalRegion]:
    """The regions of a tensor that this rank holds."""
    if tuple(tensor.shape) != spec.shape:
        raise SchemaMismatch(f"{spec.name!r} is {list(tensor.shape)} on this rank and {list(spec.shape)} on rank 0")
    if isinstance(tensor, Pieces):
        found = []
        for number, (_, where) in enumerate(tensor.pieces):
            if isinstance(where, range):
                regions = [*flat_regions(spec, where)]
            else:
                regions = _rectangle(spec, [np.arange(w.start, w.stop) for w in where], str(where))
            found += [replace(region, piece=number) for region in regions]
        return found
    axes = [np.arange(side) for side in spec.shape]
    if isinstance(tensor, DTensor):
        coordinate = tensor.device_mesh.get_coordinate()
        if coordinate is None:
            return []
        cuts = list(zip(tensor.placements, tensor.device_mesh.shape, coordinate, strict=True))
        axes = [_along(axis, dim, cuts, spec.name) for dim, axis in enumerate(axes)]
        here, expected = tuple(tensor.to_local().shape), tuple(len(axis) for axis in axes)
        if here != expected:
            raise SchemaMismatch(
                f"{spec.name!r} is placed as {tensor.placements}, which should leave {list(expected)} here but has "
                f"{list(here)}: this placement is not understood"
            )
        return _rectangle(spec, axes, str(tensor.placements))
    return _rectangle(spec, axes, "a plain tensor")


def _rectangle(spec: TensorSpec, axes: Sequence[Indices], how: str) -> list[LocalRegion]:
    """Regions of a tensor's matrix where each dimension has these indices."""
    if not all(len(axis) for axis in axes):
        return []
    *outer, last = axes or [np.arange(1)]
    rows = np.zeros(1, np.int64)
    for axis, side in zip(outer, spec.shape[:-1], strict=True):
        rows = (rows[:, None] * side + axis).reshape(-1)
    columns = _runs(last)
    if len(columns) > 1:
        raise SchemaMismatch(f"{spec.name!r} has a shard of scattered columns, {how}: not understood")
    per = lookup(spec.dtype).units_per_element
    (column, _, width) = columns[0]
    return [
        LocalRegion(Region(spec, row, count, column * per, width * per), at * width, width)
        for row, at, count in _runs(rows)
    ]


def flat_regions(spec: TensorSpec, where: range) -> Iterator[LocalRegion]:
    """A flat range of a tensor: part of a row, rows, part of a row."""
    side, per = (spec.shape[-1] if spec.shape else 1), lookup(spec.dtype).units_per_element
    at = where.start
    while at < where.stop:
        row, column = divmod(at, side)
        rows = 1 if column else max(1, (where.stop - at) // side)
        columns = min(side - column, where.stop - at)
        yield LocalRegion(Region(spec, row, rows, column * per, columns * per), at - where.start, side)
        at += rows * columns


def _of_band(band: Band, spec: TensorSpec, parts: Sequence[LocalRegion]) -> list[LocalRegion]:
    """The part of a band that this rank holds, from its part of the whole tensor."""
    if band.shape != spec.shape:
        raise SchemaMismatch(f"{spec.name!r} is {list(band.shape)} on this rank and {list(spec.shape)} on rank 0")
    found = []
    for part in parts:
        there = part.region
        common = there.meet(Region(there.tensor, band.row, spec.rows, 0, there.tensor.columns))
        if common is not None:
            here = replace(common, tensor=spec, row=common.row - band.row)
            found.append(replace(part.within(common), region=here))
    return found


def _along(axis: Indices, dim: int, cuts: Sequence[tuple[Any, int, int]], name: str) -> Indices:
    """The indices of a dimension that are here, after the mesh dimensions have cut it one after the other."""
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


def tiles(held: Sequence[Sequence[Region]], schema: Schema) -> dict[Region, list[int]]:
    """Which ranks hold what, in tiles: regions that overlap are cut along each other's edges.

    Tiles that share a row have the same rows. Raises SchemaMismatch if ranks do not hold every weight.
    """
    by_tensor: dict[str, dict[Region, list[int]]] = {tensor.name: {} for tensor in schema.tensors}
    for rank, regions in enumerate(held):
        for region in regions:
            by_tensor[region.tensor.name].setdefault(region, []).append(rank)
    found: dict[Region, list[int]] = {}
    for tensor in schema.tensors:
        before, regions_here = len(found), by_tensor[tensor.name]
        for region, tile in _along_edges(regions_here):
            found.setdefault(tile, []).extend(regions_here[region])
        here = sum(tile.units for tile in [*found][before:])
        if here < tensor.units:
            per = lookup(tensor.dtype).units_per_element
            raise SchemaMismatch(
                f"no rank of this trainer holds {(tensor.units - here) // per:,} of the {tensor.elements:,} elements "
                f"of {tensor.name!r}: ranks must hold all of it together"
            )
    return found


def _along_edges(regions: Collection[Region]) -> Iterator[tuple[Region, Region]]:
    """(region, tile of it), where regions of one tensor are cut along each other's edges: first rows, then columns."""
    edges = sorted({edge for region in regions for edge in (region.row, region.row + region.rows)})
    bands: dict[int, list[Region]] = {}
    for region in regions:
        for band in range(bisect_left(edges, region.row), bisect_left(edges, region.row + region.rows)):
            bands.setdefault(band, []).append(region)
    for band, across in bands.items():
        row, end = edges[band : band + 2]
        sides = sorted({side for region in across for side in (region.column, region.column + region.columns)})
        for region in across:
            first, last = bisect_left(sides, region.column), bisect_left(sides, region.column + region.columns)
            for column, stop in pairwise(sides[first : last + 1]):
                yield region, Region(region.tensor, row, end - row, column, stop - column)


def share_out(holders: Mapping[Region, Sequence[int]], size: int) -> list[set[Region]]:
    """Which rank writes what, of the ranks that hold it. The same on every rank."""
    load = [0] * size
    mine: list[set[Region]] = [set() for _ in load]

    def order(region: Region) -> tuple[Any, ...]:
        # what only one rank has comes first, the rest evens it out, largest first
        place = region.tensor.name, region.row, region.rows, region.column, region.columns
        return len(holders[region]) > 1, -region.nbytes, place

    for region in sorted(holders, key=order):
        rank = min(holders[region], key=lambda rank: (load[rank], rank))
        load[rank] += region.nbytes
        mine[rank].add(region)
    return mine
