"""Ranks on two nodes: one server, with a process on the second node that fetches and decodes for the ranks there."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from test_follower import World, tensors
from test_follower import loop as loop

from deltawire.bucket import parts, walk
from deltawire.bucket.walk import FetchedLink, fetch_link
from deltawire.core import change, full
from deltawire.core.errors import NotRestored
from deltawire.core.full import write_checkpoint
from deltawire.core.held import Held
from deltawire.engines.live import node as node_module
from deltawire.engines.live import rank as rank_module
from deltawire.engines.live.channel import serve
from deltawire.engines.live.decoder import Decoder, DecoderError, KeptDecoder
from deltawire.engines.live.messages import DecodeRanks, DigestFolder, Take, ToNode
from deltawire.engines.live.node import Node, NodeUnavailable, RemoteNode, WorkerError
from deltawire.engines.live.target import OF_NO_VERSION
from deltawire.replica.device import DeviceShard
from deltawire.store import open_store
from support import random_bag

pytestmark = pytest.mark.usefixtures("forked_programs")


@pytest.fixture
def away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the second node calls the run."""
    path = tmp_path / "away"
    path.symlink_to(tmp_path / "run")
    monkeypatch.setenv("DELTAWIRE_RUN", str(path))
    return path


@pytest.fixture
def borrowed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many parts the second node has borrowed, each time."""
    counts: list[int] = []
    call = RemoteNode.call

    def noted(self: RemoteNode, message: ToNode) -> list[Any]:
        if isinstance(message, Take):
            counts.append(len(message.parts))
        return call(self, message)

    monkeypatch.setattr(RemoteNode, "call", noted)
    return counts


@pytest.fixture
def world(
    request: pytest.FixtureRequest, tmp_path: Path, away: Path, loop: asyncio.AbstractEventLoop
) -> Iterator[World]:
    """Four ranks, every other one on another node than the API server."""
    encoding = getattr(request, "param", "context")
    world = World(tmp_path, open_store(str(tmp_path / "run")), loop, 4, encoding=encoding)
    for rank in world.client.ranks[1::2]:
        rank.node, rank._host = "another", lambda: "127.0.0.1"
    yield world
    world.publisher.close()
    for process in (world.client.ranks[1]._process, world.target._here._decoder):
        if process is not None:
            process.close()


def test_ranks_on_two_nodes_follow_as_one(world: World, away: Path, borrowed: list[int]) -> None:
    """Deltas whose tiles the edges between nodes cut, full weights, and a way back; and what fails on the second node
    leaves all ranks at the old version."""
    assert world.sync() == 0
    assert world.target.guard == "patch"
    for _ in range(2):
        assert world.publish() == world.sync()
    world.holds(2)
    assert len(borrowed) == 2
    assert min(borrowed) > 0
    assert world.sync(0) == 0
    world.holds(0)
    # the bucket cannot be reached from there
    away.rename(away.with_name("gone"))
    for _ in range(2):
        with pytest.raises(NodeUnavailable, match=r"the node of rank 1: .*no run at"):
            world.sync()
        # the delta is not to blame: full weights are no better
        assert world.follower.replica.rejected == []
    world.holds(0)
    away.with_name("gone").rename(away)
    world.client.fail[3, "apply"] = 1
    with pytest.raises(WorkerError, match="rank 3"):
        world.sync()
    world.holds(0)
    assert world.sync() == 2
    world.holds(2)
    # the process there is lost: another one is started
    first = world.client.ranks[1]._process
    assert first is not None
    first._process.kill()
    first._process.wait()
    assert world.publish(density=0.9) == world.sync() == 3
    world.holds(3)
    assert world.client.ranks[1]._process is not first


@pytest.mark.slow
@pytest.mark.parametrize("world, borrows", (("packed", False), ("context", True)), indirect=["world"])
def test_ranks_on_devices_of_two_nodes(
    world: World, borrows: bool, borrowed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By plain torch, on a CPU: each node has a decoder of its own. Tiles that are cut are decoded by the ranks."""
    monkeypatch.setattr(rank_module, "open_shard", lambda pieces, _: DeviceShard(pieces))
    assert world.sync() == 0
    assert world.publish() == world.sync()
    world.holds(1)
    lost = world.target._here._decoder
    assert lost is not None
    process = lost.do(lambda decoder: decoder._process)
    process.kill()
    process.wait()
    assert world.sync(0) == 0
    world.holds(0)
    assert world.publish() == world.sync()
    world.holds(2)
    assert lost.do(lambda decoder: decoder._process) is not process
    assert bool(borrowed) == borrows


class NodeThread:
    """`NodeProcess` in this process."""

    def __init__(self, folder: Path, host: str, secret: bytes) -> None:
        listener = socket.create_server((host, 0))
        self.address = listener.getsockname()
        serve(listener, ToNode, partial(node_module._answer, Node(folder)), secret=secret)

    def close(self) -> None: ...


class Fetched:
    """What each of two nodes fetched: bytes, and those of all objects."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.here: list[tuple[int, int]] = []
        self.away: list[tuple[int, int]] = []
        for module, where in ((walk, self.here), (node_module, self.away)):
            monkeypatch.setattr(module, "fetch_link", partial(self._fetch, fetch_link, where))

    @staticmethod
    def _fetch(fetch: Any, where: list[tuple[int, int]], *args: Any, **options: Any) -> FetchedLink:
        found: FetchedLink = fetch(*args, **options)
        where.append((found.bytes, found.link.bytes))
        return found


@pytest.fixture
def halves(
    request: pytest.FixtureRequest, tmp_path: Path, loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[World, Fetched]]:
    """Two ranks on each of two nodes, and objects as those of a large model."""
    for function in (change.blocks, change.pieces):
        monkeypatch.setattr(function, "__defaults__", (4096,))
    monkeypatch.setattr(full, "anchor", partial(full.anchor, part=4096))
    monkeypatch.setattr(parts, "SMALL", 0)
    monkeypatch.setattr(parts, "GAP", 0)
    # a third of the weights are cut by columns, of which blocks and anchors have whole rows
    monkeypatch.setattr(parts, "MOST", 0.9)
    monkeypatch.setattr(rank_module, "NodeProcess", NodeThread)
    fetched = Fetched(monkeypatch)
    store = open_store(str(tmp_path / "run"))
    world = World(tmp_path, store, loop, 4, encoding=getattr(request, "param", "context"))
    for rank in world.client.ranks[2:]:
        rank.node, rank._host = "another", lambda: "127.0.0.1"
    yield world, fetched
    world.publisher.close()


@pytest.mark.parametrize("halves", ["context", pytest.param("packed", marks=pytest.mark.slow)], indirect=True)
def test_each_node_fetches_what_it_holds(halves: tuple[World, Fetched]) -> None:
    """Of deltas and of anchors. What is damaged where one node needs it is found there."""
    world, fetched = halves
    assert world.sync() == 0
    world.publish(density=0.2)
    assert world.sync() == 1
    world.holds(1)
    # another way: the anchor of version 0
    assert world.sync(0) == 0
    world.holds(0)
    assert len(fetched.here) == len(fetched.away) == 2
    for mine, everything in (*fetched.here, *fetched.away):
        assert 0.5 < mine / everything < 0.85

    # damaged where the second node alone needs it: it is named, and nothing was changed
    assert world.publish(density=0.2) == 2
    assert world.sync(1) == 1
    run = world.follower.replica.opened()
    manifest = run.manifest(2)
    (blob,) = manifest.main.objects
    with fetch_link(run, manifest, manifest.main, held=Held(world.target.holds() or ())).objects[0] as some:
        assert some.parts is not None
        elsewhere = next(n for n in range(blob.size - 1, 0, -1) if not any(a <= n < b for a, b in some.parts))
    sound = world.store.get(blob.key).data
    world.store.put(blob.key, sound[:elsewhere] + bytes([sound[elsewhere] ^ 1]) + sound[elsewhere + 1 :])
    with pytest.raises(WorkerError, match=f"the node of rank 2: HashMismatch: {blob.key} has the hash"):
        world.sync()
    world.holds(1)
    world.store.put(blob.key, sound)
    assert world.sync() == 2
    world.holds(2)


def test_a_decoder_that_is_lost_is_started_again(tmp_path: Path) -> None:
    """As often as it is lost. What it cannot do twice in a row is an error of the version."""
    kept = KeptDecoder(tmp_path)

    def kill(decoder: Decoder) -> None:
        decoder._process.kill()
        decoder._process.wait()

    def fatal(decoder: Decoder) -> None:
        kill(decoder)
        decoder.call(DecodeRanks(""), 60)

    try:
        kept.do(kill)
        assert kept.do(lambda decoder: decoder.call(DecodeRanks(""), 60)) == {}
        with pytest.raises(DecoderError, match="decodes deltas was lost twice"):
            kept.do(fatal)
        assert kept.do(lambda decoder: decoder.call(DecodeRanks(""), 60)) == {}
    finally:
        kept.close()


@pytest.mark.slow
def test_weights_of_two_nodes_that_cannot_be_patched_are_reloaded(world: World) -> None:
    world.client.ranks[3]._problems = lambda model: ["a kernel computes with copies"]
    assert world.sync() == 0
    assert world.target.guard == "reload: a kernel computes with copies"
    assert world.publish() == world.sync()
    world.holds(1)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the second node has where the API server's node has its checkpoint."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    call = RemoteNode.call

    def moved(self: RemoteNode, message: ToNode) -> list[Any]:
        if isinstance(message, DigestFolder):
            message = DigestFolder(str(folder), message.schema)
        return call(self, message)

    monkeypatch.setattr(RemoteNode, "call", moved)
    return folder


@pytest.mark.parametrize("patched", (True, False), ids=("patched", "reloaded"))
def test_nodes_that_started_from_other_weights_are_no_version(world: World, elsewhere: Path, patched: bool) -> None:
    """The folder of the API server's node names the weights of no other node. What leads out is a version loaded on
    all of them."""
    other = random_bag(world.bags[0].schema, 99)
    write_checkpoint(elsewhere, other)
    for number in (1, 3):
        world.client.models[number].load_weights(tensors(other))
    if not patched:
        world.client.ranks[3]._problems = lambda model: ["a kernel computes with copies"]
    world.target.bind(world.follower.replica.opened())
    assert world.target.digest() == OF_NO_VERSION
    reason = "the node of rank 1 has another checkpoint" if patched else "a kernel computes with copies"
    assert world.target.guard.startswith(f"reload: {reason}")
    assert world.sync() == 0
    world.holds(0)
    assert world.target.takes_deltas == patched


def test_a_node_whose_memory_is_not_its_checkpoint_is_not_served(world: World) -> None:
    world.client.models[1].norm.data.view(torch.int16)[0] ^= 1
    with pytest.raises(NotRestored, match=r"rank 1: .*gave other ones"):
        world.sync()
    assert (world.follower.state, world.follower.version, world.client.paused) == ("paused", None, True)
