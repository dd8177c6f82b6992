"""Weights that come one by one: an iterator of (name, tensor), as most frameworks hand their weights over.

A tensor is there only until the next one comes. So it is compared with the weights captured last as it passes, and what
differs is kept. Those weights stay what they are until the iterator has ended: then what it brought is a source like
any other, and one that breaks off has changed nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeGuard

import numpy as np

from ..core.change import Change, Region, blocks, compare, undo_within
from ..core.dtypes import Bits
from ..core.errors import PublishFailed, SchemaMismatch, UnsafeName, UnsupportedTensor
from ..core.parallel import ordered_map, threads_for
from ..core.schema import Schema, TensorSpec, listed
from ..core.state import State
from ..models import ModelView, is_module, is_torch

Pairs = Iterable[tuple[str, Any]]
"""Full tensors under their checkpoint names, in any order: arrays, or torch tensors on any device."""

NOTHING = Schema(())

_END = object()
"""What an iterator has after its last pair: None would be a pair that is none."""


def is_pairs(model: Any) -> TypeGuard[Pairs]:
    """Whether weights come one by one: an iterable that is no module, no mapping, no source and no array."""
    if is_module(model) or isinstance(model, (Mapping, str, bytes)) or hasattr(model, "region"):
        return False
    return isinstance(model, Iterable) and not hasattr(model, "shape")


class OneByOne:
    """Weights from an iterator, as a source: all bits, or the differences from other weights."""

    def __init__(
        self, wire_dtype: str | None, schema: Schema | None = None, base: State | None = None, *, keeps: bool = True
    ) -> None:
        """`schema` is what has to come, where that is known. `base` has weights of that schema to compare with, which
        stay what they are until all has come. Without `keeps`, on a rank that does not write, only names, dtypes and
        shapes are noted."""
        self._wire_dtype, self._base, self._keeps = wire_dtype, base, keeps
        self._expected = None if schema is None else schema.by_name()
        self._ties = {} if schema is None else schema.ties
        self.schema = NOTHING if schema is None or not keeps else schema
        self._came: dict[str, TensorSpec] = {}
        """Everything that came, under its own name."""
        self.came = NOTHING
        """The same as a schema, once all has come."""
        self.tensors: dict[str, Bits] = {}
        """Flat bits of whole tensors, where there is no base."""
        self._regions: dict[str, list[Region]] = {}
        for block in blocks(base.schema) if base is not None else ():
            for region in block:
                self._regions.setdefault(region.tensor.name, []).append(region)
        self._found: dict[Region, Change | Bits] = {}
        """What differs from the base in a region: all its bits where that takes less memory."""

    # ── while they come ──────────────────────────────────────────────────────────────────────────────────────────────

    def read(self, pairs: Pairs, *, to_the_end: bool) -> None:
        """Take all that comes. `to_the_end`: after a tensor that is refused too, because several ranks run the iterator
        together, and the others would wait for this one.

        Raises PublishFailed if the iterator raises, and SchemaError for a tensor that cannot be published, is another
        one than before, comes twice with different bits, or is left out. A generator that was not read to its end is
        closed: read on by another publish, it would make a run of half a model.
        """
        iterator = iter(pairs)
        try:
            self._read(iterator, to_the_end)
        except BaseException:
            getattr(iterator, "close", int)()
            raise
        self._end()

    def _read(self, iterator: Iterator[tuple[str, Any]], to_the_end: bool) -> None:
        last = ""
        refused: Exception | None = None
        while True:
            try:
                pair: Any = next(iterator, _END)
            except Exception as error:
                where = f"after {last!r}" if last else "before its first tensor"
                raise refused or PublishFailed(
                    f"the iterator of weights broke off {where}: {type(error).__name__}: {error}. Nothing was "
                    "published, and the next publish carries what this one should have"
                ) from error
            if pair is _END:
                break
            if refused is None:
                try:
                    last = self._take(pair)
                except Exception as error:
                    if not to_the_end:
                        raise
                    refused = error
            # before the next one is made: memory for one tensor, not for two
            del pair
        if refused is not None:
            raise refused

    def _take(self, pair: Any) -> str:
        """Compare or copy a tensor. Returns its name."""
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise UnsupportedTensor(
                f"an iterator of weights brings pairs (name, tensor), not {type(pair).__name__}; shards are a list"
            )
        name, tensor = pair
        if not isinstance(name, str):
            raise UnsafeName(f"tensors are named by strings, not by {name!r:.80}, a {type(name).__name__}")
        if hasattr(tensor, "full_tensor"):
            raise UnsupportedTensor(
                f"{name[:80]!r} is spread over several processes: bring its full_tensor(), or publish the model itself"
            )
        view = ModelView({name: tensor}, self._wire_dtype)
        (spec,) = view.schema.tensors
        if self._came.setdefault(name, spec) != spec:
            raise SchemaMismatch(f"{name!r} came twice, as {_shown(self._came[name])} and as {_shown(spec)}")
        stored = self._ties.get(name, name)
        if self._expected is not None:
            before = self._expected.get(stored)
            if before is None or (spec.dtype, spec.shape) != (before.dtype, before.shape):
                run = "the run does not have it" if before is None else f"in the run it is {_shown(before)}"
                raise SchemaMismatch(
                    f"tensor {name!r} came as {_shown(spec)}, and {run}; another model needs an address of its own, "
                    "another dtype the same wire_dtype= as before"
                )
        if self._keeps and not self._keep(stored, spec, view):
            what = f"{name!r} came twice" if stored == name else f"{name!r} is tied to {stored!r}, and they came"
            raise SchemaMismatch(f"{what} with different bits")
        return name

    def _keep(self, stored: str, spec: TensorSpec, view: ModelView) -> bool:
        """Keep the bits of a tensor. False if it came before with other bits."""
        if self._base is None:
            bits = view.bits(spec.name)
            if stored in self.tensors:
                return np.array_equal(bits, self.tensors[stored])
            # the iterator may use its memory for the next one
            self.tensors[stored] = bits.copy()
            return True
        base, regions, tensor = self._base, self._regions.get(stored, []), view.tensors[spec.name]
        there = _is_on_device(tensor)

        def difference(region: Region) -> Change | Bits:
            here = Region(spec, region.row, region.rows, region.column, region.columns)
            if there:
                from .device import compare_there

                change = compare_there(region, base.region(region), tensor, view.wire_dtype(spec.name))
            else:
                change = compare(region, base.region(region), view.region(here))
            return change if change.nbytes <= region.nbytes else view.region(here).copy()

        # on a device its own threads compare
        found = ordered_map(difference, regions, threads_for(spec.units, 1 if there else None))
        pairs = list(zip(regions, found, strict=True))
        return all([_same(new, self._found.setdefault(region, new)) for region, new in pairs])

    def _end(self) -> None:
        """All has come."""
        self.came = Schema.build(self._came.values())
        if not self._keeps:
            return
        if not self._came:
            raise SchemaMismatch("the iterator of weights brought nothing: was it used before?")
        if self._expected is None:
            self.schema = self.came
        here = {self._ties.get(name, name) for name in self._came}
        if missing := [tensor.name for tensor in self.schema.tensors if tensor.name not in here]:
            raise SchemaMismatch(f"the iterator of weights ended without {listed(missing)}")

    # ── afterwards ───────────────────────────────────────────────────────────────────────────────────────────────────

    def region(self, region: Region) -> Bits:
        name = region.tensor.name
        if self._base is None:
            return region.cut(self.tensors[name])
        # full rows, which are in one piece
        rows = Region(region.tensor, region.row, region.rows, 0, region.tensor.columns)
        bits: Bits = self._base.region(rows).copy()
        for place in self._regions.get(name, ()):
            found = self._found[place]
            if isinstance(found, Change):
                undo_within(rows, bits, found.swapped())
                continue
            first, last = max(rows.start, place.start), min(rows.start + rows.units, place.start + place.units)
            if first < last:
                bits[first - rows.start : last - rows.start] = found[first - place.start : last - place.start]
        if region.columns == rows.columns:
            return bits
        part: Bits = bits.reshape(rows.rows, rows.columns)[:, region.column : region.column + region.columns]
        return np.ascontiguousarray(part).reshape(-1)

    def difference(self, region: Region, held: State) -> Change:
        """What turns other weights into these, in a region of their plan. Those of the base were compared before."""
        found = self._found[region] if held is self._base else self.region(region)
        return found if isinstance(found, Change) else compare(region, held.region(region), found)


def _is_on_device(tensor: Any) -> bool:
    """Whether a tensor lies on an accelerator, where it is compared without leaving it."""
    return is_torch(tensor) and tensor.device.type == "cuda" and tensor.is_contiguous()


def _shown(spec: TensorSpec) -> str:
    return f"{spec.dtype} {list(spec.shape)}"


def _same(one: Change | Bits, other: Change | Bits) -> bool:
    if isinstance(one, Change) and isinstance(other, Change):
        return np.array_equal(one.positions, other.positions) and np.array_equal(one.new, other.new)
    return not isinstance(one, Change) and not isinstance(other, Change) and np.array_equal(one, other)
