"""Weights and changes for the `context` codec, and the codec without its way out into other encodings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np

from deltawire.core.change import Change, joined
from deltawire.core.codecs import context
from deltawire.core.codecs.base import Before, Parts
from deltawire.core.codecs.context import encoder
from deltawire.core.dtypes import Bits, lookup
from deltawire.core.schema import Schema, TensorSpec
from support import Bag


def encode_tiles(changes: Sequence[Change], before: Before) -> Parts:
    """Encode a block in tiles and classes, whether that pays or not."""
    block = encoder.BlockEncoder(changes, joined(changes))
    (ranked,) = encoder.rank_together([block], before)
    return block.code(ranked)


@contextmanager
def tiles_of(tile: int = encoder.TILE, *, levels: bool = True) -> Iterator[None]:
    """Cut tiles of about so many units, and choose no levels where that is said."""
    few = encoder.FEW_CHANGES if levels else 1 << 62
    with patch.object(encoder, "TILE", tile), patch.object(encoder, "FEW_CHANGES", few):
        yield


@contextmanager
def always_tiles(tile: int = encoder.TILE, *, levels: bool = True) -> Iterator[None]:
    """Encode every block of `context` in tiles, however small or dense it is."""
    with tiles_of(tile, levels=levels), patch.object(context, "encode", encode_tiles):
        yield


def weights(rng: np.random.Generator, dtype: str, shape: tuple[int, ...], wild: bool = False) -> Bits:
    """Bits like a model's weights, or any bits at all."""
    tensor = TensorSpec("w", dtype, shape)
    unit = lookup(dtype).unit
    if wild:
        return rng.integers(0, np.iinfo(unit).max, tensor.units, unit, endpoint=True)
    floats = (rng.standard_normal(tensor.units) * 0.02).astype(np.float32).view(np.uint32)
    return (floats >> np.uint32(32 - 8 * tensor.unit_size)).astype(unit)


def moved(rng: np.random.Generator, old: Bits, chance: Any) -> Bits:
    """A share of the weights, by an ulp or two, and some of them anywhere."""
    full = np.iinfo(old.dtype).max
    step = rng.choice(np.array([1, 1, 1, full, full, full, 2, full - 1, 100], np.uint64), old.size).astype(old.dtype)
    anywhere = rng.random(old.size) < 0.02
    new = np.where(anywhere, rng.integers(0, full, old.size, old.dtype, endpoint=True), old + step)
    new = np.where(new == old, old ^ old.dtype.type(1), new)
    return np.where(rng.random(old.size) < np.broadcast_to(chance, old.size), new, old).astype(old.dtype)


def pair(dtype: str, shape: tuple[int, ...], chance: Any, seed: int = 0, wild: bool = False) -> tuple[Bag, Bag]:
    """A model of one tensor, before and after. `chance` is a number, one per weight, or a function of the old bits."""
    rng = np.random.default_rng(seed)
    schema = Schema.build([TensorSpec("w", dtype, shape)])
    old = weights(rng, dtype, shape, wild)
    chance = chance(old) if callable(chance) else chance
    return Bag(schema, {"w": old}), Bag(schema, {"w": moved(rng, old, np.asarray(chance).reshape(-1))})


def by_exponent(old: Bits) -> np.ndarray:
    """About one bf16 weight in a hundred, half the weight twice as often: as training does it."""
    return np.minimum(0.5, 0.005 * 2.0 ** (121 - ((old >> 7) & 255).astype(np.float64)))
