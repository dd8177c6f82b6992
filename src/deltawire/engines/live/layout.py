"""The layout of a model on all ranks: whether every weight is held, which ranks hold copies, and the digest of all.

A digest is a sum, so each rank computes its part. Pieces are sorted into *groups* by who holds them: those of rank 0
alone, those of rank 1 alone, those that both hold (norms). All holders of a group must report the same sum, and each
group counts once; that proves the copies of replicated weights too, which a plain sum over one of them would not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...core.change import Region
from ...core.digest import StateDigest
from ...core.errors import SchemaMismatch
from ...core.schema import Schema
from ...replica.shard import Sums


def sums_to_send(sums: Sums) -> list[tuple[int, int, int]]:
    """Convert digests for a message: group and both lanes."""
    return [(group, digest.lane0, digest.lane1) for group, digest in sums.items()]


def sums_of(sent: Sequence[Sequence[int]]) -> Sums:
    return {group: StateDigest(lane0, lane1) for group, lane0, lane1 in sent}


@dataclass(frozen=True, slots=True)
class Layout:
    groups: tuple[tuple[int, ...], ...]
    """Per rank, the group of each of its pieces."""
    holders: Mapping[int, tuple[int, ...]]
    """Ranks that hold each group."""
    problems: tuple[str, ...]
    """Why deltas cannot be applied; empty where they can."""
    unused: tuple[str, ...] = ()
    """Tensors of the run of which no rank's loader keeps anything."""

    def total(self, sums: Sequence[Sums]) -> StateDigest:
        """The digest of the whole model. SchemaMismatch where ranks that hold the same weights disagree."""
        result = StateDigest()
        for group, ranks in self.holders.items():
            found = {sums[rank][group] for rank in ranks}
            if len(found) != 1:
                raise SchemaMismatch(f"ranks {', '.join(map(str, ranks))} hold different copies of the same weights")
            result += found.pop()
        return result


def arrange(schema: Schema, ranks: Sequence[Sequence[Region]], problems: Sequence[str] = ()) -> Layout:
    """Group the pieces of all ranks and check that together they cover every weight exactly once."""
    # region → (rank, index of the copy there)
    where: dict[Region, list[tuple[int, int]]] = defaultdict(list)
    copies: list[list[tuple[Region, int]]] = []
    for rank, pieces in enumerate(ranks):
        seen: dict[Region, int] = defaultdict(int)
        copies.append([])
        for piece in pieces:
            copies[-1].append((piece, seen[piece]))
            where[piece].append((rank, seen[piece]))
            seen[piece] += 1
    kinds: dict[tuple[tuple[int, ...], int], int] = {}
    groups = []
    for mine in copies:
        numbers = []
        for piece, copy in mine:
            holders = tuple(rank for rank, other in where[piece] if other == copy)
            numbers.append(kinds.setdefault((holders, copy), len(kinds)))
        groups.append(tuple(numbers))
    used = {piece.tensor.name for piece in where}
    unused = tuple(tensor.name for tensor in schema.tensors if tensor.units and tensor.name not in used)
    found = [*problems, *_uncovered(schema, where)]
    if any(copy for _, copy in kinds):
        found.append("a rank holds the same weights twice: tied weights that are not tied in the server")
    return Layout(tuple(groups), {group: holders for (holders, _), group in kinds.items()}, tuple(found), unused)


def _uncovered(schema: Schema, pieces: Mapping[Region, object]) -> list[str]:
    by_tensor: dict[str, list[Region]] = defaultdict(list)
    for piece in pieces:
        by_tensor[piece.tensor.name].append(piece)
    problems = []
    for tensor in schema.tensors:
        mine = by_tensor[tensor.name]
        if not mine and tensor.units:
            problems.append(f"the server's loader does not use {tensor.name!r}")
        elif any(a.meet(b) for i, a in enumerate(mine) for b in mine[:i]):
            problems.append(f"ranks hold overlapping parts of {tensor.name!r}")
        elif sum(piece.units for piece in mine) != tensor.units:
            problems.append(f"no rank holds some part of {tensor.name!r}")
    return problems
