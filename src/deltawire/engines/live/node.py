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
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from ...bucket.references import as_run, resolver
from ...bucket.replay import checkout
from ...bucket.run import Run
from ...bucket.walk import FetchedLink, fetch_link
from ...core import full
from ...core.change import Region
from ...core.digest import StateDigest
from ...core.dtypes import Bits, lookup
from ...core.errors import ChainError, DeltawireError, ObjectNotFound, RunNotFound, StoreError, VersionNotFound
from ...core.schema import Schema
from ...core.sparse import DeltaClaim
from ...replica.target import Delta, Update
from . import arrays
from .channel import Answer, Caller, ChannelClosed, call_all, serve
from .decoder import Decoder

log = logging.getLogger("deltawire")

STAGE_LIMIT_S = 3600.0
"""Seconds that work beside the model may take."""

SECRET = 32
"""Bytes that connections from other nodes begin with."""

OPERATIONS = ("open", "decode", "source", "beside", "stage", "fetch", "lend", "borrow", "reload", "forget")
"""What a node is called for, by the API server's process or from another node."""

_T = TypeVar("_T")


class WorkerError(ChainError):
    """An operation failed on a rank; nothing was changed. Another path to the version may still work."""


class NodeUnavailable(StoreError):
    """A node cannot read the run now, or its bucket is behind; nothing was changed. The version is not to blame, and is
    tried again: another path to it would be just as far away."""


class Node:
    """The ranks of this process's node. Methods return the answers of its ranks, in order."""

    def __init__(self, folder: Path) -> None:
        self.numbers: list[int] = []
        """Which ranks of the server are here."""
        self._folder = folder
        self._ranks: list[Caller] = []
        self._decoder: Decoder | None = None
        """Decodes for ranks whose weights are on devices, while its process runs."""
        self._opening: dict[str, Any] = {}
        """What that process is told first; empty where weights are in host memory."""
        self._staging: tempfile.TemporaryDirectory[str] | None = None
        """Files that ranks read from, until the swap is over."""
        self._delta: tuple[list[str], Any] = [], None
        """Files and claim of the delta that is being staged."""

    def call(self, operation: str, /, **arguments: Any) -> list[Any]:
        """Call one of OPERATIONS."""
        if operation not in OPERATIONS:
            raise ValueError(f"a node has no operation {operation!r}")
        return getattr(self, operation)(**arguments)  # type: ignore[no-any-return]

    def open(self, numbers: Sequence[int], sockets: Sequence[str]) -> None:
        """Connect to the ranks."""
        for caller in self._ranks:
            caller.close()
        self.numbers, self._ranks = list(numbers), [Caller(path) for path in sockets]

    def decode(self, schema: str, ranks: list[Any]) -> None:
        """Decode deltas in a process of its own, once for these ranks, given the pieces of each."""
        path = self._folder / "schema.json"
        path.write_text(schema)
        self._opening = {"schema": str(path), "ranks": ranks}
        self._end_decoder()
        self._decoding(lambda _: None)

    def _decoding(self, work: Callable[[Decoder], _T]) -> _T:
        """Have the decoder do something. If its process is gone, perhaps for want of memory, another one is started."""
        for last in (False, True):
            try:
                if self._decoder is None:
                    self._decoder = Decoder(self._folder, **self._opening)
                return work(self._decoder)
            except ChannelClosed as error:
                self._end_decoder()
                if last:
                    raise WorkerError(f"the process that decodes deltas was lost twice: {error}") from error
        raise AssertionError

    def _end_decoder(self) -> None:
        if self._decoder is not None:
            self._decoder.close()
            self._decoder = None

    def source(self, name: str, schema: str) -> list[Answer]:
        """For each rank the digest of the checkpoint on this node that the server started from; None if it is not here,
        or not one of this schema."""
        folder, digest = source_folder(name), None
        try:
            if folder is not None:
                found = as_run(full.Checkpoint(folder), msgspec.json.decode(schema, type=Schema), name)
                digest = msgspec.to_builtins(full.digest_of(found))
        except DeltawireError as error:
            log.info("cannot compare with %s: %s", name, error)
        return [{"source": digest} for _ in self.numbers]

    def beside(self, operation: str, **arguments: Any) -> list[Answer]:
        """Call every rank through its socket, beside generation and without the engine."""
        try:
            answers = call_all(self._ranks, operation, STAGE_LIMIT_S, **arguments)
        except ChannelClosed as error:
            raise WorkerError(f"a rank cannot be reached for {operation!r}: {error}") from error
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
        full.write_checkpoint(folder, update.content)
        if not reloads:
            return self.beside("stage_full", folder=str(folder))
        update.require(full.digest_of(update.content))
        return [{} for _ in self._ranks]

    def fetch(self, run: str, version: int, digests: list[Any], claim: Any, reloads: bool) -> list[Answer]:
        """Fetch a version, where the API server is elsewhere, and stage it."""
        # this node may have a bucket of its own that is nearer
        opened = Run.open(os.environ.get("DELTAWIRE_RUN") or run)
        to, base = msgspec.convert(digests, list[StateDigest])
        if claim is None:
            weights = checkout(opened, version, resolve=resolver(os.environ.get("DELTAWIRE_REFERENCE")))
            return self.stage(Update(version, to, base, weights), reloads)
        expected = msgspec.convert(claim, DeltaClaim)

        def fetch() -> FetchedLink:
            manifest = opened.manifest(version)
            return fetch_link(opened, manifest, opened.link(manifest, "delta", expected.base))

        fetched = opened.anywhere(fetch)
        try:
            return self.stage(Update(version, to, base, Delta(opened.schema, expected, fetched.objects)), reloads)
        finally:
            fetched.close()

    def _stage_delta(self, delta: Delta, folder: Path) -> list[Answer]:
        files, claim = [], msgspec.to_builtins(delta.claim)
        for number, data in enumerate(delta.files):
            files.append(str(folder / f"{number}.delta"))
            with open(files[-1], "wb") as out:
                for chunk in data.chunks():
                    out.write(chunk)
        self._delta = files, claim
        answers = self._decoding(self._received) if self._opening else None
        return answers if answers is not None else self._decoded([])

    def _received(self, decoder: Decoder) -> list[Answer] | None:
        """Stage a delta that is decoded once, in a process of its own, for ranks that hold their weights on devices.
        None where tiles are cut by the edges of pieces."""
        files, claim = self._delta
        out = f"{files[0]}.ranks"
        read = decoder.call("read", STAGE_LIMIT_S, paths=files, claim=claim, out=out)
        if read.get("cut"):
            return None
        if any(read["tiles"]):
            self.beside("count", path=out)
            decoder.call("ranks", STAGE_LIMIT_S, out=out)
        return self.beside("receive", path=out, parts=read["parts"], tiles=read["tiles"])

    def _decoded(self, lent: list[str]) -> list[Answer]:
        """Stage what each rank decodes from the weights it holds, and from those that others lend it."""
        files, claim = self._delta
        answers = self.beside("stage_delta", paths=files, claim=claim, lent=lent)
        if any("wanted" in answer for answer in answers):
            more = self._lent(wanted(answers), files[0])
            answers = self.beside("stage_delta", paths=files, claim=claim, lent=[*lent, *more])
        return answers

    def _lent(self, regions: list[Any], path: str) -> list[str]:
        return [answer["lent"] for answer in self.beside("lend", regions=regions, path=path)]

    def lend(self, regions: list[Any]) -> list[Any]:
        """What ranks here hold of some regions, for another node."""
        assert self._staging is not None
        parts = read_lent(self._lent(regions, f"{self._staging.name}/away"))
        return [(msgspec.to_builtins(region), b64encode(bits.tobytes()).decode()) for region, bits in parts.items()]

    def borrow(self, parts: list[Any]) -> list[Answer]:
        """Stage the delta again, with old weights that other nodes have lent."""
        files, _ = self._delta
        path, found = Path(f"{files[0]}.borrowed"), []
        for sent, text in parts:
            region = msgspec.convert(sent, Region)
            bits = np.frombuffer(b64decode(text), lookup(region.tensor.dtype).unit)
            found.append((region, bits.reshape(region.rows, region.columns)))
        write_lent(path, found)
        return self._decoded([str(path)])

    def reload(self, source: str, unchanged: bool, prove: bool) -> list[Answer]:
        """Have the engine load in the next swap what is staged, or the checkpoint it started from (`source`)."""
        folder = source_folder(source) if source else self._staging and Path(self._staging.name)
        if not folder:
            raise WorkerError(f"the checkpoint {source!r} is not on the node of rank {self.numbers[0]}")
        return self.beside("stage_reload", folder=str(folder), unchanged=unchanged, prove=prove)

    def forget(self) -> list[Answer]:
        try:
            return self.beside("forget")
        finally:
            self._clean()

    def _clean(self) -> None:
        if self._staging is not None:
            self._staging.cleanup()
            self._staging = None


class RemoteNode:
    """The ranks of another node: `call` as of `Node`."""

    def __init__(self, numbers: Sequence[int], connect: Callable[[], Caller]) -> None:
        """`connect` starts a process there; where it is lost, another one is started."""
        self.numbers = list(numbers)
        self._connect = connect
        self._caller: Caller | None = None

    def call(self, operation: str, /, **arguments: Any) -> list[Any]:
        if operation == "stage":
            operation, update = "fetch", arguments.pop("update")
            claim = update.content.claim if isinstance(update.content, Delta) else None
            digests = update.digest, update.base
            arguments |= {"run": update.run, "version": update.version, "digests": digests, "claim": claim}
        for last in (False, True):
            try:
                self._caller = self._caller or self._connect()
                return ask(self._caller, operation, **msgspec.to_builtins(arguments))
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


def ask(caller: Caller, operation: str, /, **arguments: Any) -> list[Any]:
    """Call the process of another node."""
    answer = caller.call(operation, STAGE_LIMIT_S, **arguments)
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


def _answer(node: Node, operation: str, /, **arguments: Any) -> Answer:
    """Call an operation in that process. An error is returned as an answer."""
    try:
        return {"answers": node.call(operation, **arguments)}
    except WorkerError as error:
        return {"error": str(error)}
    except Exception as error:
        # an object that is missing under a manifest that is there is damage
        away = isinstance(error, StoreError | RunNotFound | VersionNotFound) and not isinstance(error, ObjectNotFound)
        return {"error": f"{type(error).__name__}: {error}", "unavailable": away}


def wanted(answers: Iterable[Answer]) -> list[Any]:
    """The regions that ranks need old weights of."""
    return [region for answer in answers for region in answer.get("wanted", ())]


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
        serve(socket.socket(fileno=int(listener)), partial(_answer, Node(Path(folder))), secret=secret)
        sys.stdin.buffer.read()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
