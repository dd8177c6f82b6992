"""Requests between the processes of a server: a struct for each request, a union for each kind of process."""

from __future__ import annotations

import msgspec

from ...core.change import Region
from ...core.digest import StateDigest
from ...core.schema import Schema
from ...core.sparse import DeltaClaim
from .arrangement import Arrangement
from .channel import Message
from .swap import Apply, Undo

# ── to a rank, by the engine, between two steps; also Apply and Undo ─────────────────────────────────────────────────


class Locate(Message):
    """Trace the loader, and say where the weights are."""

    schema: Schema
    first: int
    """The server's first rank."""
    source: str
    """Folder or hub name of the checkpoint that the server started from."""


class Listen(Message):
    """On one node, begin to listen."""

    node: str
    ranks: list[int]
    """Of this node."""
    folder: str
    """Within `arrays.root()`."""
    secret: str
    """Hexadecimal. With one, the API server is elsewhere: the first of these ranks starts a process that it can
    reach."""


class SetGroups(Message):
    """Add up digests by these groups of pieces."""

    groups: list[list[int]]
    """Of all ranks: every one of them is sent the same."""


# ── to a rank, by its socket, beside the model ───────────────────────────────────────────────────────────────────────


class StageDelta(Message):
    """Decode a delta against the live weights. `wanted` in the answer: it takes weights that others hold."""

    paths: list[str]
    claim: DeltaClaim
    lent: list[str]
    """Files with old weights of other ranks."""


class StageFull(Message):
    """Compare full weights with the live ones."""

    folder: str


class StageReload(Message):
    """Have the engine load a checkpoint folder in the swap."""

    folder: str
    unchanged: bool
    """Whether it is of the present weights, and must leave everything that the model computes with as it is."""
    prove: bool
    """Whether memory must be laid out like a checkpoint afterwards."""


class Count(Message):
    """Count the classes of old weights in the tiles of this rank's sheet."""

    path: str
    """How the names of the files of all ranks begin."""


class Receive(Message):
    """Stage what the decoder wrote for this rank."""

    path: str
    parts: list[list[tuple[int, int]]]
    """Of all ranks: kinds and counts of moves."""
    tiles: list[int]
    """Of all ranks: how many were counted."""


class Lend(Message):
    """Write what this rank holds of some regions to a file."""

    regions: list[Region]
    path: str


class Digest(Message):
    """Read all weights."""


class Forget(Message):
    """Drop what is staged."""


ToRank = (
    Locate | Listen | SetGroups | Apply | Undo | StageDelta | StageFull | StageReload | Count | Receive | Lend | Digest
    | Forget
)  # fmt: skip


_for_rank: msgspec.json.Decoder[ToRank] = msgspec.json.Decoder(ToRank)


def for_rank(text: str) -> ToRank:
    """Read a message that came through the engine."""
    return _for_rank.decode(text)


# ── to the decoder's process ─────────────────────────────────────────────────────────────────────────────────────────


class Open(Message):
    """Decode for these ranks."""

    schema: Schema
    ranks: list[list[Region]]
    """The pieces of each."""


class Read(Message):
    """Decode files. `cut` in the answer: some tiles cannot be decoded from the weights of one rank."""

    paths: list[str]
    claim: DeltaClaim
    out: str
    """How the names of the files begin that are written."""


class DecodeRanks(Message):
    """Entropy-decode the tiles that ranks have counted."""

    out: str


class ReadAdapter(Message):
    """Make the weights of a version of an adapter, prove and arrange them. In the answer: `digest` of what was made,
    `unusual` if it cannot be arranged and why, and seconds by phase."""

    schema: Schema
    folder: str
    """Where they are written; without `before` they are there."""
    before: str
    """Folder with the weights that the delta starts from."""
    paths: list[str]
    claim: DeltaClaim | None
    """The files of the delta, and what its manifest says of it."""
    arrangement: Arrangement | None
    """What ranks have learned; None to arrange nothing."""


ToDecoder = Open | Read | DecodeRanks | ReadAdapter


# ── to a node; also Digest and Forget, for its ranks ─────────────────────────────────────────────────────────────────


class Connect(Message):
    """Connect to the ranks, and fetch and decode for them."""

    numbers: list[int]
    sockets: list[str]
    schema: Schema
    ranks: list[list[Region]]
    """The pieces of each."""
    decodes: bool
    """Whether a process of the node decodes deltas, once for all ranks: those that hold their weights on devices."""


class DigestFolder(Message):
    """For each rank the digest of the checkpoint on its node that the server started from."""

    name: str
    schema: Schema


class Fetch(Message):
    """Fetch a version from the bucket and stage it, where the API server is elsewhere."""

    run: str
    version: int
    digest: StateDigest
    base: StateDigest
    claim: DeltaClaim | None
    """Of a delta; None for full weights."""
    anchor: bool
    """Whether it is the full weights of the version's anchor."""
    reloads: bool


class Give(Message):
    """Return what ranks of this node hold of some regions, for another node."""

    regions: list[Region]


class Take(Message):
    """Stage the delta again, with old weights that other nodes have lent."""

    parts: list[tuple[Region, bytes]]


class Reload(Message):
    """Have the engine load in the next swap what is staged, or the checkpoint it started from (`source`)."""

    source: str
    unchanged: bool
    prove: bool


ToNode = Connect | DigestFolder | Fetch | Give | Take | Reload | Digest | Forget
