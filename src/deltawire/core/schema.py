"""The schema of a run's weights: names, shapes, dtypes and ties. Both sides check everything else against it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

import msgspec
from blake3 import blake3

from . import dtypes
from .errors import SchemaMismatch, UnsafeName

MAX_NAME = 1024
MAX_FILE_NAME = 255
"""Bytes; what file systems allow."""

MAX_TENSORS = 1 << 18
"""Twice what the largest mixtures of experts have with every expert's matrices stored apart."""

MAX_DIMENSIONS = 64
"""As many as numpy has; a hostile shape of millions would take too long to multiply out."""


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """A tensor of a run: its name, its dtype as safetensors calls it ("BF16"), its shape.

        tensor = dw.TensorSpec("lm_head.weight", "BF16", (32000, 288))
        units = array.reshape(-1).view(f"u{tensor.unit_size}")      # its bits, as regions and changes count them

    A unit is the bits of an element as an unsigned integer, or half of them if it has eight bytes. Every tensor is also
    a matrix of units, its last dimension the columns; regions are rectangles of it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of weights."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its weights."""
        return self.elements * dtypes.lookup(self.dtype).size

    @property
    def units(self) -> int:
        """Number of units: one per element, or two if that has eight bytes."""
        return self.elements * dtypes.lookup(self.dtype).units_per_element

    @property
    def unit_size(self) -> int:
        """Bytes of a unit: 1, 2 or 4."""
        return dtypes.lookup(self.dtype).unit_size

    @property
    def rows(self) -> int:
        """Rows of its matrix of units."""
        return math.prod(self.shape[:-1])

    @property
    def columns(self) -> int:
        """Columns of its matrix of units."""
        width = self.shape[-1] if self.shape else 1
        return width * dtypes.lookup(self.dtype).units_per_element


class Schema(msgspec.Struct, frozen=True, dict=True):
    """The tensors of a model: name, dtype as safetensors calls it, and shape of each.

    for tensor in run.schema.tensors:
        print(tensor.name, tensor.dtype, tensor.shape)
    """

    tensors: tuple[TensorSpec, ...]
    """Sorted by name. Tied tensors are stored once."""
    ties: dict[str, str] = {}
    """Alias → the tensor above that it shares storage with."""

    @classmethod
    def build(cls, tensors: Iterable[TensorSpec], ties: Mapping[str, str] | None = None) -> Schema:
        """Return a schema of tensors in any order, checked. `ties` are aliases of some of them, by name."""
        schema = cls(tuple(sorted(tensors, key=lambda t: t.name)), dict(sorted((ties or {}).items())))
        schema.check()
        return schema

    def check(self) -> None:
        """Raise SchemaError for a schema that no publisher makes. A schema read from a bucket is untrusted input."""
        if len(self.tensors) > MAX_TENSORS or len(self.ties) > MAX_TENSORS:
            raise SchemaMismatch(f"the schema has more than {MAX_TENSORS:,} tensors")
        names = [t.name for t in self.tensors]
        if names != sorted(set(names)):
            raise SchemaMismatch("the schema's tensors are not sorted by name, or a name stands twice")
        for tensor in self.tensors:
            check_name(tensor.name)
            dtypes.lookup(tensor.dtype)
            if not is_shape(tensor.shape) or tensor.elements >= 1 << 48:
                raise SchemaMismatch(f"tensor {tensor.name!r} cannot have the shape {str(tensor.shape)[:80]}")
        known = set(names)
        for alias, name in self.ties.items():
            check_name(alias)
            if name not in known or alias in known:
                raise SchemaMismatch(f"the tie {alias!r} → {name!r} does not lead from an alias to a stored tensor")

    @property
    def elements(self) -> int:
        """Number of weights of the model."""
        return sum(t.elements for t in self.tensors)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the model's weights."""
        # asked for with every link of every manifest
        return sum(t.nbytes for t in self.tensors)

    @cached_property
    def hash(self) -> str:
        """Identifies the schema: 32 hex digits."""
        return blake3(msgspec.json.encode(self)).hexdigest(length=16)

    def by_name(self) -> dict[str, TensorSpec]:
        """Return the tensors by name, without aliases."""
        return {t.name: t for t in self.tensors}

    def differences(self, other: Schema, *, ours: str, theirs: str) -> list[str]:
        """How names and shapes differ, as phrases for a message. Ignores dtypes and the names of ties."""
        mine, yours = self.by_name(), other.by_name()
        tied = {*self.ties, *self.ties.values(), *other.ties, *other.ties.values()}
        found = []
        for names, others, where in ((mine, yours, ours), (yours, mine, theirs)):
            if only := [name for name in names if name not in others and name not in tied]:
                found.append(f"only {where} has {listed(only)}")
        odd = [name for name in mine if name in yours and mine[name].shape != yours[name].shape]
        if odd:
            here, there = mine[odd[0]], yours[odd[0]]
            found.append(f"{listed(odd)}: {list(here.shape)} in {ours}, {list(there.shape)} in {theirs}")
        return found

    def require_equal(self, other: Schema, *, ours: str, theirs: str, advice: str = "") -> None:
        """Raise SchemaMismatch if they differ, naming the first difference, with `advice` at the end."""
        if self == other:
            return
        mine, yours = self.by_name(), other.by_name()
        for name in sorted(mine.keys() | yours.keys()):
            a, b = mine.get(name), yours.get(name)
            if a is None or b is None:
                raise SchemaMismatch(f"tensor {name!r} is in {theirs if a is None else ours} only{advice}")
            if a != b:
                raise SchemaMismatch(
                    f"tensor {name!r} is {a.dtype} {list(a.shape)} in {ours} but {b.dtype} {list(b.shape)} in {theirs}"
                    f"{advice}"
                )
        if self.ties != other.ties:
            raise SchemaMismatch(f"tied tensors differ: {self.ties} in {ours}, {other.ties} in {theirs}{advice}")


def listed(names: Sequence[str]) -> str:
    """Names for a message: the first three, and how many more."""
    shown = ", ".join(repr(name) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def is_shape(shape: tuple[int, ...]) -> bool:
    return len(shape) <= MAX_DIMENSIONS and all(side >= 0 for side in shape)


def check_name(name: str) -> None:
    """Tensor and file names come from untrusted files and may end up in paths and terminals."""
    parts = name.replace("\\", "/").split("/")
    if (
        not name
        or len(name) > MAX_NAME
        or name == "__metadata__"
        or name.startswith(("/", "\\"))
        or ".." in parts
        or not name.isprintable()
    ):
        raise UnsafeName(f"refused the name {name[:80]!r}: empty, reserved, unprintable or leading out of its folder")


def check_file_name(name: str) -> None:
    """A plain name that a file in any folder can have."""
    check_name(name)
    if "/" in name or "\\" in name:
        raise UnsafeName(f"refused the file name {name[:80]!r}: it is not a plain name")
    if len(name.encode()) > MAX_FILE_NAME:
        raise UnsafeName(f"refused the file name {name[:80]!r} …: it is longer than {MAX_FILE_NAME} bytes")
