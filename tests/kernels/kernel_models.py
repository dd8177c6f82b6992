"""Small models of every shape that has ever been trouble, and what the core says of them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from deltawire.core import change, digest
from deltawire.core.dtypes import UNIT_TYPES
from deltawire.core.schema import TensorSpec
from deltawire.kernels import Changed, Plan
from deltawire.kernels.plan import flat
from deltawire.models import _TORCH_DTYPES

SHAPES = [
    ((40, 256), torch.bfloat16),
    ((0,), torch.bfloat16),
    ((3, 0, 2), torch.float32),
    ((777,), torch.bfloat16),
    ((33, 65), torch.float32),
    ((5, 7, 3), torch.uint8),
    ((9,), torch.int64),
    ((), torch.float16),
    ((4096,), torch.float8_e4m3fn),
]


def cut_plan(tensors: list[Tensor], tile: int, unit: int = 4) -> Plan:
    """The plan of whole tensors in tiles of this size."""
    return Plan(tensors, flat(tensors, tile, unit), unit)


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Any bits at all: NaN, infinities and both zeros among them."""
    size = int(np.prod(shape)) * dtype.itemsize
    data = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    return shaped(data, dtype, shape)


def shaped(data: np.ndarray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    # torch makes an empty array's stride zero and then cannot view it
    return torch.from_numpy(data).view(dtype).reshape(shape) if data.size else torch.empty(shape, dtype=dtype)


def moved(tensors: list[Tensor], density: float, seed: int) -> list[Tensor]:
    """The same tensors with some of their bytes changed."""
    rng, result = np.random.default_rng(seed), []
    for tensor in tensors:
        data = raw(tensor).copy()
        where = rng.random(data.size) < density
        data[where] += rng.integers(1, 256, int(where.sum()), np.uint8)
        result.append(shaped(data, tensor.dtype, tuple(tensor.shape)).to(tensor.device))
    return result


def odd_model(device: torch.device, seed: int = 0) -> list[Tensor]:
    tensors = [random_tensor(shape, dtype, seed + i) for i, (shape, dtype) in enumerate(SHAPES)]
    tensors = [t.to(device) for t in tensors]
    # a view that starts where no wide read may
    base = random_tensor((3001,), torch.bfloat16, seed + 99).to(device)
    return [*tensors, base[1:]]


def raw(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def bits(tensor: Tensor) -> np.ndarray:
    return raw(tensor).view(UNIT_TYPES[min(tensor.dtype.itemsize, 4)])


def clones(tensors: list[Tensor]) -> list[Tensor]:
    return [t.clone() for t in tensors]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(np.array_equal(raw(x), raw(y)) for x, y in zip(a, b, strict=True))


def core_changes(old: list[Tensor], new: list[Tensor]) -> list[change.Change]:
    result = []
    for number, (a, b) in enumerate(zip(old, new, strict=True)):
        spec = TensorSpec(str(number), _TORCH_DTYPES[str(a.dtype)], tuple(a.shape))
        region = change.Region(spec, 0, spec.rows, 0, spec.columns)
        result.append(change.compare(region, bits(a), bits(b)) if region.units else change.no_change(region))
    return result


def core_digest(names: list[str], tensors: list[Tensor]) -> digest.StateDigest:
    return sum((digest.of_bits(n, bits(t)) for n, t in zip(names, tensors, strict=True)), digest.StateDigest())


def equal(a: object, b: object) -> bool:
    """Two results of kernels, bit by bit."""
    fields = [(getattr(a, f), getattr(b, f)) for f in a.__dataclass_fields__]  # type: ignore[attr-defined]
    return all(x.dtype == y.dtype and x.shape == y.shape and np.array_equal(raw(x), raw(y)) for x, y in fields)


def by_tensor(plan: Plan, changed: Changed) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Positions in the tensor, old and new bits; of a flat plan, so in ascending order."""
    starts = changed.starts.cpu().numpy()
    positions, old, new = (t.cpu().numpy() for t in (changed.positions, changed.old, changed.new))
    flat = positions.astype(np.int64) + np.repeat(plan.offset, np.diff(starts))
    owner = np.repeat(plan.tensor, np.diff(starts))
    return [(flat[owner == i], old[owner == i], new[owner == i]) for i in range(len(plan.totals))]
