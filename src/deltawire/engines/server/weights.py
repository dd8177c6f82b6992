"""Weights that compute in float32 and are, value for value, what travels in bfloat16 or float16.

Many CPUs have no fast 16-bit matrix product, or none at all. Every 16-bit float is exactly a float32, so the compute
weights can hold a version without a second copy: writing widens, reading narrows, and a weight that is not exactly
representable in the run's dtype makes the digest one that no version has.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
from numba import njit

from ...core import full
from ...core.change import Change, Region, no_change, regions, scatter
from ...core.digest import StateDigest
from ...core.dtypes import Bits
from ...core.errors import SchemaMismatch
from ...core.full import Source
from ...core.schema import Schema, TensorSpec
from ...models import ModelView, tensors_of, torch_bits
from ...replica.target import Target


class WideTarget(Target):
    """The weights of a module on the CPU, of which the floating-point ones may be wider than the run's."""

    def __init__(self, model: Any, schema: Schema, *, strict: bool = True) -> None:
        self.model = model
        self.schema = schema
        self.inexact = False
        tensors = tensors_of(model, to_write=True)
        found = ModelView(tensors).schema
        specs = found.by_name()
        specs.update((alias, specs[name]) for alias, name in found.ties.items())
        # two names of one memory, by the model's own account
        home = {**{name: name for name in tensors}, **found.ties}
        self._wide: dict[str, list[_Cell]] = {}
        carried: set[str] = set()
        for tensor in schema.tensors:
            names = [tensor.name, *(alias for alias, name in schema.ties.items() if name == tensor.name)]
            present = [name for name in names if name in tensors]
            if not present:
                raise SchemaMismatch(f"the run has {tensor.name!r}, this model does not")
            carried.update(home[name] for name in present)
            once = {home[name]: name for name in reversed(present)}
            self._wide[tensor.name] = [_cell(tensors[name], specs[name], tensor) for name in once.values()]
        extra = {name for name in tensors if home[name] not in carried}
        if strict and extra:
            raise SchemaMismatch(f"this model has {min(extra)!r}, which the run does not carry: another model?")
        self._compile()

    def _compile(self) -> None:
        """Now, not in the first pause."""
        for tensor in self.schema.tensors:
            for region in islice(regions(tensor), 1):
                self.write(no_change(region))

    @property
    def in_place(self) -> bool:
        return True

    def bits(self, name: str) -> Bits:
        return self._wide[name][0].read(None)[0]

    def region(self, region: Region) -> Bits:
        bits, exact = self._wide[region.tensor.name][0].read(region)
        if not exact:
            # only ever set here, by whichever thread sees it
            self.inexact = True
        return bits

    def write(self, change: Change) -> None:
        for cell in self._wide[change.region.tensor.name]:
            cell.scatter(change, change.new)

    def undo(self, change: Change) -> None:
        for cell in self._wide[change.region.tensor.name]:
            cell.scatter(change, change.old)

    def load(self, source: Source) -> None:
        for tensor in self.schema.tensors:
            for region in regions(tensor):
                new = source.region(region)
                for cell in self._wide[tensor.name]:
                    cell.overwrite(region, new)

    def digest(self) -> StateDigest:
        self.inexact = False
        total = full.digest_of(self)
        for cells in self._wide.values():
            if any(not np.array_equal(cells[0].live, other.live) for other in cells[1:]):
                total += StateDigest(1, 1)
        # weights that no version can hold must not pass for the nearest one
        return total + StateDigest(1, 1) if self.inexact else total


class _Cell:
    """Live weights of the run's own dtype."""

    def __init__(self, live: Bits) -> None:
        self.live = live

    def read(self, region: Region | None) -> tuple[Bits, bool]:
        """The run's bits, and whether they are all there is to the live weights."""
        return (self.live if region is None else region.cut(self.live)), True

    def widen(self, bits: Bits) -> Bits:
        return bits

    def scatter(self, change: Change, values: Bits) -> None:
        scatter(change.region, change.positions, self.widen(values), self.live)

    def overwrite(self, region: Region, bits: Bits) -> None:
        region.matrix(self.live)[:] = self.widen(bits).reshape(region.rows, region.columns)


class _Bfloat16(_Cell):
    """float32 that is bfloat16: its upper half is the run's bits, its lower half is zero."""

    def read(self, region: Region | None) -> tuple[Bits, bool]:
        wide = self.live if region is None else region.cut(self.live)
        narrow = np.empty(wide.size, np.uint16)
        return narrow, _upper_halves(wide, narrow) == 0

    def widen(self, bits: Bits) -> Bits:
        return bits.astype(np.uint32) << np.uint32(16)


class _Float16(_Cell):
    """float32 that is float16."""

    def read(self, region: Region | None) -> tuple[Bits, bool]:
        wide = self.live if region is None else region.cut(self.live)
        with np.errstate(over="ignore"):
            narrow = wide.view(np.float32).astype(np.float16).view(np.uint16)
        return narrow, np.array_equal(self.widen(narrow), wide)

    def widen(self, bits: Bits) -> Bits:
        return bits.view(np.float16).astype(np.float32).view(np.uint32)


@njit(cache=True, nogil=True)
def _upper_halves(wide: Any, narrow: Any) -> Any:
    rest = np.uint32(0)
    for i in range(wide.size):
        rest |= wide[i]
        narrow[i] = np.uint16(wide[i] >> np.uint32(16))
    return rest & np.uint32(0xFFFF)


_WIDER = {("BF16", "F32"): _Bfloat16, ("F16", "F32"): _Float16}


def _cell(tensor: Any, spec: TensorSpec, wanted: TensorSpec) -> _Cell:
    kind = _Cell if spec.dtype == wanted.dtype else _WIDER.get((wanted.dtype, spec.dtype))
    if spec.shape != wanted.shape or kind is None:
        raise SchemaMismatch(
            f"{wanted.name!r} is {wanted.dtype} {list(wanted.shape)} in the run but {spec.dtype} {list(spec.shape)} "
            "in this model; serve the model the run was made from, with --dtype float32 or the run's own"
        )
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise SchemaMismatch(f"{wanted.name!r} must be contiguous and on the CPU to be patched in place")
    return kind(torch_bits(tensor))
