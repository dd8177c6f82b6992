"""The ranks of one node, which share files and sockets. Every node fetches and decodes for its own ranks.

On the node of the API server a thread of that server does it (`Node`). On every other node it is a process that the
first rank there starts, `python -m deltawire.engines.live.node FOLDER LISTENER`, and that the API server calls over TCP
(`RemoteNode`). Between nodes go the places of pieces, versions and digests, and the old weights of those tiles that the
edge between the pieces of two nodes cuts; everything else a node reads from the bucket. No torch here.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial, singledispatchmethod
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ...bucket.references import as_run, resolver
from ...bucket.replay import checkout
from ...bucket.run import Run
from ...bucket.walk import Delta, FetchedLink, fetch_link
from ...core import full
from ...core.change import Region
from ...core.dtypes import Bits, lookup
from ...core.errors import DAMAGE, ChainError, DeltawireError, ObjectNotFound, RunNotFound, StoreError, VersionNotFound
from ...core.held import Held, part_of
from ...replica.target import UNCHANGED, Update
from ..options import ServerOptions
from . import arrays
from .channel import Answer, Caller, ChannelClosed, call_all, serve
from .decoder import Decoder, KeptDecoder
from .messages import (
    Connect,
    Count,
    DecodeRanks,
    Digest,
    DigestFolder,
    Fetch,
    Forget,
    Give,
    Lend,
    Open,
    Read,
    Receive,
    Reload,
    StageDelta,
    StageFull,
    StageReload,
    Take,
    ToNode,
    ToRank,
)

log = logging.getLogger("deltawire")

STAGE_LIMIT_S = 3600.0
"""Seconds that work beside the model may take."""

SECRET = 32
"""Bytes that connections from other nodes begin with."""


class WorkerError(ChainError):
    """An operation failed on a rank; nothing was changed. Another path to the version may still work."""


class NodeUnavailable(StoreError):
    """A node cannot read the run now, or its bucket is behind; nothing was changed. The version is sound and is
    tried again: another path to it would be just as far away."""


class Node:
    """The ranks of this process's node. Methods return the answers of its ranks, in order."""

    def __init__(self, folder: Path) -> None:
        self.numbers: list[int] = []
        """Which ranks of the server are here."""
        self.regions: list[Region] = []
        """What they hold of the model."""
        self._folder = folder
        self._ranks: list[Caller] = []
        self._decoder: KeptDecoder | None = None
        """Decodes for ranks whose weights are on devices; None where they are in host memory."""
        self._staging: tempfile.TemporaryDirectory[str] | None = None
        """Files that ranks read from, until the swap is over."""
        self._delta: StageDelta | None = None
        """The delta that is being staged."""

    @singledispatchmethod
    def call(self, message: ToNode) -> list[Any]:
        """Do what a message asks for."""
        raise TypeError(f"a node does not know {message!r}")

    @call.register
    def _connect(self, message: Connect) -> list[Any]:
        for caller in self._ranks:
            caller.close()
        self.numbers, self._ranks = message.numbers, [Caller(path) for path in message.sockets]
        self.regions = list(dict.fromkeys(piece for pieces in message.ranks for piece in pieces))
        if self._decoder is not None:
            self._decoder.close()
        self._decoder = KeptDecoder(self._folder, Open(message.schema, message.ranks)) if message.decodes else None
        if self._decoder is not None:
            self._decoder.do(lambda _: None)
        return []

    @call.register
    def _digest_folder(self, message: DigestFolder) -> list[Answer]:
        """None for a checkpoint that is not here, or not one of this schema."""
        folder, digest = source_folder(message.name), None
        try:
            if folder is not None:
                found = as_run(full.Checkpoint(folder), message.schema, message.name)
                digest = msgspec.to_builtins(full.digest_of(found))
        except DeltawireError as error:
            log.info("cannot compare with %s: %s", message.name, error)
        return [{"source": digest} for _ in self.numbers]

    @call.register
    def _digest(self, message: Digest) -> list[Answer]:
        return self._ask_ranks(message)

    def _ask_ranks(self, message: ToRank) -> list[Answer]:
        """Call every rank through its socket, beside generation and without the engine."""
        try:
            answers = call_all(self._ranks, message, STAGE_LIMIT_S)
        except ChannelClosed as error:
            raise WorkerError(f"a rank cannot be reached for {type(message).__name__}: {error}") from error
        for number, answer in zip(self.numbers, answers, strict=True):
            if "error" in answer:
                raise WorkerError(f"rank {number}: {answer['error']}")
        return answers

    def stage(self, update: Update, reloads: bool) -> list[Answer]:
        """Stage a version. `wanted` in an answer: that takes old weights that no rank here holds. With `reloads`, full
        weights are written to a folder and no more."""
        self._clean()
        self._staging = tempfile.TemporaryDirectory(dir=self._folder)
        folder = Path(self._staging.name)
        if isinstance(update.content, Delta):
            return self._stage_delta(update.content, folder)
        if not reloads:
            full.write_checkpoint(folder, update.content, held=Held(self.regions))
            return self._ask_ranks(StageFull(str(folder)))
        full.write_checkpoint(folder, update.content)
        update.require(full.digest_of(update.content), UNCHANGED)
        return [{} for _ in self._ranks]

    @call.register
    def _fetch(self, message: Fetch) -> list[Answer]:
        chosen = ServerOptions.read()
        # this node may have a bucket of its own that is nearer
        run = Run.open(chosen.run or message.run)
        version, to, base, claim = message.version, message.digest, message.base, message.claim
        held = None if message.reloads else part_of(run.schema, self.regions)

        def fetch(kind: str, base: int | None) -> FetchedLink:
            manifest = run.manifest(version)
            return fetch_link(run, manifest, run.link(manifest, kind, base), held=held)

        with ExitStack() as opened:
            content: Delta | full.Source
            if claim is not None:
                fetched = opened.enter_context(closing(run.anywhere(lambda: fetch("delta", claim.base))))
                content = Delta(run.schema, claim, fetched.objects)
            elif message.anchor and (anchored := self._anchor(run, fetch)) is not None:
                fetched, content = anchored
                opened.enter_context(closing(fetched))
            else:
                content = checkout(run, version, reference=chosen.reference)
            return self.stage(Update(version, to, base, content), message.reloads)

    def _anchor(
        self, run: Run, fetch: Callable[[str, int | None], FetchedLink]
    ) -> tuple[FetchedLink, full.Source] | None:
        """The full weights of an anchor, as far as they are held here; None if it cannot be used."""
        try:
            fetched = run.anywhere(lambda: fetch("anchor", None))
            try:
                return fetched, fetched.weights(resolver(None))
            except BaseException:
                fetched.close()
                raise
        except DAMAGE as error:
            log.warning("cannot use an anchor: %s", error)
            return None

    def _stage_delta(self, delta: Delta, folder: Path) -> list[Answer]:
        files = []
        for number, data in enumerate(delta.files):
            files.append(str(folder / f"{number}.delta"))
            data.save(Path(files[-1]))
        staged = self._delta = StageDelta(files, delta.claim, [])
        answers = self._decoder.do(lambda decoder: self._received(decoder, staged)) if self._decoder else None
        return answers if answers is not None else self._decoded([])

    def _received(self, decoder: Decoder, delta: StageDelta) -> list[Answer] | None:
        """Stage a delta that is decoded once, in a process of its own, for ranks that hold their weights on devices.
        None where tiles are cut by the edges of pieces."""
        out = f"{delta.paths[0]}.ranks"
        read = decoder.call(Read(delta.paths, delta.claim, out), STAGE_LIMIT_S)
        if read.get("cut"):
            return None
        if any(read["tiles"]):
            self._ask_ranks(Count(out))
            decoder.call(DecodeRanks(out), STAGE_LIMIT_S)
        return self._ask_ranks(Receive(out, read["parts"], read["tiles"]))

    def _decoded(self, lent: list[str]) -> list[Answer]:
        """Stage what each rank decodes from the weights it holds, and from those that others lend it."""
        assert self._delta is not None
        delta = msgspec.structs.replace(self._delta, lent=lent)
        answers = self._ask_ranks(delta)
        if any("wanted" in answer for answer in answers):
            more = self._lent(wanted(answers), delta.paths[0])
            answers = self._ask_ranks(msgspec.structs.replace(delta, lent=[*lent, *more]))
        return answers

    def _lent(self, regions: list[Region], path: str) -> list[str]:
        return [answer["lent"] for answer in self._ask_ranks(Lend(regions, path))]

    @call.register
    def _give(self, message: Give) -> list[Any]:
        assert self._staging is not None
        parts = read_lent(self._lent(message.regions, f"{self._staging.name}/away"))
        return [(region, bits.tobytes()) for region, bits in parts.items()]

    @call.register
    def _take(self, message: Take) -> list[Answer]:
        assert self._delta is not None
        path, found = Path(f"{self._delta.paths[0]}.borrowed"), []
        for region, data in message.parts:
            bits = np.frombuffer(data, lookup(region.tensor.dtype).unit)
            found.append((region, bits.reshape(region.rows, region.columns)))
        write_lent(path, found)
        return self._decoded([str(path)])

    @call.register
    def _reload(self, message: Reload) -> list[Answer]:
        source = message.source
        folder = source_folder(source) if source else self._staging and Path(self._staging.name)
        if not folder:
            raise WorkerError(f"the checkpoint {source!r} is not on the node of rank {self.numbers[0]}")
        return self._ask_ranks(StageReload(str(folder), message.unchanged, message.prove))

    @call.register
    def _forget(self, message: Forget) -> list[Answer]:
        try:
            return self._ask_ranks(message)
        finally:
            self._clean()

    def _clean(self) -> None:
        if self._staging is not None:
            self._staging.cleanup()
            self._staging = None


class RemoteNode:
    """The ranks of another node: `stage` and `call` as of `Node`."""

    def __init__(self, numbers: Sequence[int], connect: Callable[[], Caller]) -> None:
        """`connect` starts a process there; where it is lost, another one is started."""
        self.numbers = list(numbers)
        self._connect = connect
        self._caller: Caller | None = None

    def stage(self, update: Update, reloads: bool) -> list[Answer]:
        claim = update.content.claim if isinstance(update.content, Delta) else None
        anchor = isinstance(update.content, full.Anchor)
        return self.call(Fetch(update.url, update.version, update.digest, update.before, claim, anchor, reloads))

    def call(self, message: ToNode) -> list[Any]:
        for last in (False, True):
            try:
                self._caller = self._caller or self._connect()
                return ask(self._caller, message)
            except ChannelClosed as error:
                self.close()
                if last:
                    raise WorkerError(f"the node of rank {self.numbers[0]} cannot be reached: {error}") from error
            except (WorkerError, NodeUnavailable) as error:
                raise type(error)(f"the node of rank {self.numbers[0]}: {error}") from error
        raise AssertionError

    def close(self) -> None:
        if self._caller is not None:
            self._caller.close()
            self._caller = None


def ask(caller: Caller, message: ToNode) -> list[Any]:
    """Call the process of another node."""
    answer = caller.call(message, STAGE_LIMIT_S)
    if "error" in answer:
        raise (NodeUnavailable if answer.get("unavailable") else WorkerError)(answer["error"])
    return answer["answers"]  # type: ignore[no-any-return]


class NodeProcess:
    """Starts the process that works for the ranks of a node which the API server is not on. It ends with this one."""

    def __init__(self, folder: Path, host: str, secret: bytes) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, 0), family=family) as listener:
            self.address = listener.getsockname()[:2]
            """Host and port."""
            self._folder = folder
            number = listener.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(folder), str(number)], stdin=subprocess.PIPE, pass_fds=[number]
            )
        assert self._process.stdin is not None
        self._stdin = self._process.stdin
        self._stdin.write(secret)
        self._stdin.flush()

    def close(self) -> None:
        self._stdin.close()
        # by itself, unless it was killed
        shutil.rmtree(self._folder, ignore_errors=True)


def _answer(node: Node, message: ToNode) -> Answer:
    """Do what a message asks for in that process. An error is returned as an answer."""
    try:
        return {"answers": node.call(message)}
    except WorkerError as error:
        return {"error": str(error)}
    except Exception as error:
        # an object that is missing under a manifest that is there is damage
        away = isinstance(error, StoreError | RunNotFound | VersionNotFound) and not isinstance(error, ObjectNotFound)
        return {"error": f"{type(error).__name__}: {error}", "unavailable": away}


def wanted(answers: Iterable[Answer]) -> list[Region]:
    """The regions that ranks need old weights of."""
    return [region for answer in answers for region in msgspec.convert(answer.get("wanted", ()), list[Region])]


def write_lent(path: Path, parts: Iterable[tuple[Region, Bits]]) -> None:
    """Write old weights to a file, for ranks that want them."""
    found = list(parts)
    index = np.frombuffer(msgspec.json.encode([part for part, _ in found]), np.uint8)
    arrays.write(path, {"index": index, **{str(i): bits for i, (_, bits) in enumerate(found)}})


def read_lent(paths: Iterable[str]) -> dict[Region, Bits]:
    """The old weights in such files, by where they belong."""
    lent: dict[Region, Bits] = {}
    for path in paths:
        file = arrays.open_arrays(Path(path))
        for i, part in enumerate(msgspec.json.decode(file["index"].tobytes(), type=list[Region])):
            lent[part] = file[str(i)]
    return lent


def source_folder(name: str, revision: str | None = None) -> Path | None:
    """The checkpoint folder that an engine was started from, by its path or by a Hub model's name and revision; None if
    it is not here."""
    if Path(name).is_dir():
        return Path(name)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except Exception:
        return None


def main() -> None:
    """Answer calls until the rank that started this process ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    # the engine comes first; it may have tied the rank to the core that it computes on
    os.nice(5)
    with suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    folder, listener = sys.argv[1:]
    try:
        secret = sys.stdin.buffer.read(SECRET)
        serve(socket.socket(fileno=int(listener)), ToNode, partial(_answer, Node(Path(folder))), secret=secret)
        sys.stdin.buffer.read()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
