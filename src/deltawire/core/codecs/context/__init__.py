"""`context`: positions as ranks within classes of the old weights, which both sides hold.

A weight changes when its update is not small against its ulp: half the weight, twice the chance. So a block's weights
are sorted into classes by their old exponent (and by rows and columns, where that pays), and a change is sent as its
rank inside its class, in a tile of about 64 K weights that decodes from its own old weights alone. docs/format.md has
every byte of it.

    tiles        how a region is cut
    cuts         how a block is cut, by `packed` and `planes` too
    classes      what each weight's class is, ranks and places: all the work per weight
    old_weights  the weights of a block in host memory, counted and ranked by class
    levels       rows and columns that are likelier than their exponents say
    entropy      the range coder and its tables
    runs         a tile's changes as bytes
    head         the small streams
    encoder      from changes to streams
    decoder      from streams to changes
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import msgspec

from ...change import Change, Units, joined
from .. import packed, planes
from ..base import Before, Coded, Parts, squeeze
from .cuts import by_rows, counted
from .decoder import TiledBlock, TileSpan
from .encoder import BlockEncoder, Each, rank_together

name = "context"

DENSE = 0.3
"""Above this share of changes tiles are not tried: positions say little there, and ranks cost their time per change."""

SMALL = 128
"""A head alone takes about half as many bytes: a block that is this small when packed stays so."""


Finish = Callable[[Sequence[Change], Parts], Any]


def encode(changes: Sequence[Change], before: Before) -> Parts:
    """The block in tiles where that is smallest, else `packed`, or `planes` where most of it changed.

    `packed` is always made: it takes a twentieth of the time, and nothing else says for sure how large it would be.
    """
    parts: Parts = encode_together([changes], before)[0]
    return parts


def encode_together(
    blocks: Sequence[Sequence[Change]],
    before: Before,
    each: Each = map,
    finish: Finish = lambda _, parts: parts,
    counting: AbstractContextManager[Any] | None = None,
) -> list[Any]:
    """`encode` for several blocks of one dtype, whose old weights are counted at once. `each` may use threads; `finish`
    is called there with the changes of each block and its parts, and what it returns is the result. `counting` is
    entered while old weights are held."""

    def start(changes: Sequence[Change]) -> tuple[Coded, int, BlockEncoder | None]:
        units = joined(changes)
        plain, size = _without_tiles(changes, units, before)
        return plain, size, BlockEncoder(changes, units) if size else None

    started: list[tuple[Coded, int, BlockEncoder | None]] = list(each(start, blocks))
    tried = [encoder for _, _, encoder in started if encoder is not None]
    with counting or nullcontext():
        # all at once: what ranks them holds the old weights until its end
        ranked = iter([*rank_together(tried, before, each)] if tried else [])
    found = [next(ranked) if encoder is not None else None for _, _, encoder in started]

    def end(number: int) -> Any:
        (plain, size, encoder), ranks, changes = started[number], found[number], blocks[number]
        if encoder is not None and ranks is not None:
            own = encoder.code(ranks)
            # not compressed yet, and hardly compressible
            if sum(len(stream) for _, coded in own for stream in coded.streams.values()) < size:
                return finish(changes, own)
        parts = by_rows(changes)
        if len(parts) == 1:
            return finish(changes, [(counted(changes), plain)])
        module = planes if plain.encoding == planes.name else packed
        coded = [msgspec.structs.replace(module.encode(part, before), encoding=module.name) for part in parts]
        return finish(changes, [*zip(map(counted, parts), coded, strict=True)])

    return list(each(end, range(len(blocks))))


def _without_tiles(changes: Sequence[Change], units: Units, before: Before) -> tuple[Coded, int]:
    """The block as `packed` or `planes`, and the size that tiles must be below; 0: not worth a try."""
    plain = msgspec.structs.replace(packed.encode(changes, before, units), encoding=packed.name)
    size = _stored(plain)
    if size <= SMALL:
        return plain, 0
    if sum(c.count for c in changes) > DENSE * sum(c.region.units for c in changes):
        dense = msgspec.structs.replace(planes.encode(changes, before), encoding=planes.name)
        return dense if _stored(dense) < size else plain, 0
    return plain, size


def _stored(coded: Coded) -> int:
    return sum(stream.stored for stream, _ in squeeze([*coded.streams.values()]))


__all__ = ["TileSpan", "TiledBlock", "encode", "encode_together", "name"]
