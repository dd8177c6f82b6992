"""Live weights in host memory, and whatever torch can copy: read as the run's bits and written as them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
from numba import njit

from ..bucket.replay import State
from ..core import full
from ..core.change import Change, Region, moved, no_change, regions, scatter
from ..core.digest import StateDigest
from ..core.dtypes import Bits
from ..core.errors import SchemaMismatch
from ..core.full import Source
from ..core.parallel import for_each
from ..core.schema import Schema, TensorSpec, listed
from ..core.sparse import DeltaFile
from ..models import ModelView, dtype_of, is_torch, like, live_tensors, torch_bits, torch_dtype

WORTH_THREADS = 1 << 20
"""Number of changes that are worth starting threads for: some milliseconds of work."""


class HostMemory:
    """The weights of a model, by the names of the run's schema. Reads and writes go straight to the live memory.

    Floats may be wider in the model than in the run. Every bf16 is exactly a float32, so such weights can hold a
    version: writing widens, reading narrows, and a weight that is not exactly representable in the run's dtype makes
    the digest one that no version has.
    """

    def __init__(self, model: Any, schema: Schema, *, strict: bool = True) -> None:
        self.schema = schema
        self._inexact = False
        if isinstance(model, State):
            # bits already, of dtypes that numpy may have no name for
            model.schema.require_equal(schema, ours="this state", theirs="the run")
            self._cells: dict[str, list[_Cell]] = {n: [_Cell(bits)] for n, bits in model.tensors.items()}
            """One cell per piece of memory: weights that the run ties may be several here, and all must agree."""
            return
        tensors = live_tensors(model)
        names = require(tensors, schema, strict)
        self._cells = {
            tensor.name: [_cell(tensors[name], name, tensor.dtype) for name in names[tensor.name]]
            for tensor in schema.tensors
        }
        if self.in_place:
            self._compile()

    def _compile(self) -> None:
        """Compile the kernels now, not in the first pause."""
        for tensor in self.schema.tensors:
            for region in islice(regions(tensor), 1):
                nothing = no_change(region)
                self._cells[tensor.name][0].scatter(nothing, nothing.new)

    @property
    def in_place(self) -> bool:
        """Whether writes go straight to the weights, so that several may go on at once."""
        return not any(isinstance(cell, _Copied) for cells in self._cells.values() for cell in cells)

    def bits(self, name: str) -> Bits:
        """Return a tensor's present bits: a live view for weights in host memory, else a copy. Do not write to it."""
        return self._cells[name][0].read(None)[0]

    def region(self, region: Region) -> Bits:
        bits, exact = self._cells[region.tensor.name][0].read(region)
        if not exact:
            # only ever set here, by whichever thread sees it
            self._inexact = True
        return bits

    def decode(self, file: DeltaFile) -> list[Change]:
        return [change for changes in file.changes(self.bits) for change in changes]

    def prepare(self, decoded: Sequence[Change]) -> _HostPatch:
        return _HostPatch(self, decoded)

    def write(self, change: Change) -> None:
        self._scatter(change, change.new)

    def undo(self, change: Change) -> None:
        self._scatter(change, change.old)

    def _scatter(self, change: Change, values: Bits) -> None:
        for cell in self._cells[change.region.tensor.name]:
            cell.scatter(change, values)

    def load(self, source: Source) -> None:
        for tensor in self.schema.tensors:
            for cell in self._cells[tensor.name]:
                cell.fill((region, source.region(region)) for region in regions(tensor))

    def digest(self) -> StateDigest:
        """Recompute the state digest. Names that the run ties and this model does not must agree as well: where one was
        changed alone the weights have no version, and get a digest that no version has."""
        self._inexact = False
        total = full.digest_of(self)
        for cells in self._cells.values():
            for other in cells[1:]:
                bits, exact = other.read(None)
                if not exact or not np.array_equal(cells[0].read(None)[0], bits):
                    total += StateDigest(1, 1)
        # weights that no version can hold must not pass for the nearest one
        return total + StateDigest(1, 1) if self._inexact else total


class _HostPatch:
    """Changes in host memory, ready to be written."""

    def __init__(self, memory: HostMemory, changes: Sequence[Change]) -> None:
        self._memory, self._changes = memory, changes
        self.moved = moved(changes)

    def write(self) -> None:
        many = sum(change.count for change in self._changes) >= WORTH_THREADS
        threads = None if many and self._memory.in_place else 1
        for_each(self._memory.write, self._changes, threads)

    def undo(self) -> None:
        # undoing a change that was never written has no effect
        for change in self._changes:
            self._memory.undo(change)


class _Cell:
    """Live weights in host memory, in the run's own dtype."""

    def __init__(self, live: Bits) -> None:
        self._live = live

    def read(self, region: Region | None) -> tuple[Bits, bool]:
        """Return the run's bits, of a region or of all, and whether the live weights are exactly these."""
        return (self._live if region is None else region.cut(self._live)), True

    def widen(self, bits: Bits) -> Bits:
        return bits

    def scatter(self, change: Change, values: Bits) -> None:
        scatter(change.region, change.positions, self.widen(values), self._live)

    def fill(self, parts: Iterable[tuple[Region, Bits]]) -> None:
        for region, bits in parts:
            region.matrix(self._live)[:] = self.widen(bits).reshape(region.rows, region.columns)


class _Bfloat16(_Cell):
    """float32 that is bfloat16: its upper half is the run's bits, its lower half is zero."""

    def read(self, region: Region | None) -> tuple[Bits, bool]:
        wide, _ = super().read(region)
        narrow = np.empty(wide.size, np.uint16)
        return narrow, _upper_halves(wide, narrow) == 0

    def widen(self, bits: Bits) -> Bits:
        wide: Bits = bits.astype(np.uint32) << np.uint32(16)
        return wide


class _Float16(_Cell):
    """float32 that is float16."""

    def read(self, region: Region | None) -> tuple[Bits, bool]:
        wide, _ = super().read(region)
        with np.errstate(over="ignore"):
            narrow = wide.view(np.float32).astype(np.float16).view(np.uint16)
        return narrow, np.array_equal(self.widen(narrow), wide)

    def widen(self, bits: Bits) -> Bits:
        return bits.view(np.float16).astype(np.float32).view(np.uint32)


class _Copied(_Cell):
    """Torch weights on a device, not contiguous, or wider in another way: read as a copy, written back whole."""

    def __init__(self, tensor: Any, dtype: Any) -> None:
        self._tensor, self._dtype = tensor, dtype

    def read(self, region: Region | None) -> tuple[Bits, bool]:
        narrow = self._tensor.to(self._dtype)
        exact = narrow.dtype == self._tensor.dtype or _same_bits(narrow.to(self._tensor.dtype), self._tensor)
        bits = torch_bits(narrow)
        if region is not None:
            return region.cut(bits), exact
        return (bits.copy() if narrow is self._tensor else bits), exact

    def scatter(self, change: Change, values: Bits) -> None:
        bits, _ = self.read(None)
        scatter(change.region, change.positions, values, bits)
        self._put(bits)

    def fill(self, parts: Iterable[tuple[Region, Bits]]) -> None:
        bits, _ = self.read(None)
        for region, new in parts:
            region.matrix(bits)[:] = new.reshape(region.rows, region.columns)
        self._put(bits)

    def _put(self, bits: Bits) -> None:
        # of the run's dtype, without memory of its own
        template = self._tensor.new_empty((), dtype=self._dtype).expand(self._tensor.shape)
        self._tensor.copy_(like(template, bits))


@njit(cache=True, nogil=True)
def _upper_halves(wide: Any, narrow: Any) -> Any:
    rest = np.uint32(0)
    for i in range(wide.size):
        rest |= wide[i]
        narrow[i] = np.uint16(wide[i] >> np.uint32(16))
    return rest & np.uint32(0xFFFF)


def _same_bits(a: Any, b: Any) -> bool:
    return bool(np.array_equal(torch_bits(a), torch_bits(b)))


_WIDE = {("BF16", "F32"): _Bfloat16, ("F16", "F32"): _Float16}
_WIDER = {"BF16": {"F32", "F64"}, "F16": {"F32", "F64"}, "F32": {"F64"}}
"""The dtypes that hold every value of another one."""


def _cell(tensor: Any, name: str, wanted: str) -> _Cell:
    found = dtype_of(tensor)
    kind = _Cell if found == wanted else _WIDE.get((wanted, found))
    if is_torch(tensor):
        tensor = tensor.detach()
        if kind is None or tensor.device.type != "cpu" or not tensor.is_contiguous():
            return _Copied(tensor, torch_dtype(wanted))
        return kind(torch_bits(tensor))
    patchable = isinstance(tensor, np.ndarray) and tensor.flags.c_contiguous and tensor.flags.writeable
    if kind is None or not patchable:
        raise SchemaMismatch(
            f"{name!r} must be a writable, contiguous array of {wanted} or float32 to be patched in place"
        )
    return kind(tensor.reshape(-1).view(f"u{min(tensor.itemsize, 4)}"))


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
