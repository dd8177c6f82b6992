"""Decodes deltas in a process of its own, once per node: `python -m deltawire.engines.live.decoder SOCKET`.

It has no weights and no torch. A delta's `packed`, `raw` and `planes` blocks become moves of each rank's pieces. For
`context` it needs to know how many old weights of each class a tile has: ranks count them on their device and get
ranks within classes back.

    Read           files → per rank: moves, and sheets that say which tiles to count
    DecodeRanks    counts of those tiles → ranks and steps

Versions of adapters, which are small, are made whole here:

    ReadAdapter    the weights of the version before, and a delta → those of the version, also as ranks copy them
"""

from __future__ import annotations

import mmap
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial, singledispatchmethod
from pathlib import Path
from typing import TypeVar

import numpy as np

from ...core import full
from ...core.change import RegionMoves
from ...core.codecs import context
from ...core.codecs.context.decoder import Tiles, decode_ranks, join_ranks, make_sheet
from ...core.container import open_file
from ...core.dtypes import Bits, lookup
from ...core.errors import ChainError
from ...core.held import Held
from ...core.parallel import default_threads, ordered_map
from ...core.schema import Schema
from ...core.sparse import open_delta
from ...replica.moves import CutTiles, DevicePieces, NumberedMoves
from . import adapter_worker, arrangement, arrays
from .channel import Answer, Caller, ChannelClosed, listen
from .messages import DecodeRanks, Open, Read, ReadAdapter, ToDecoder

END_S = 10.0
"""Seconds that the process may take to end by itself."""


_OPEN_S = 600.0
"""Seconds that it may take to begin."""

_T = TypeVar("_T")


class DecoderError(ChainError):
    """The decoder's process could not use a delta; nothing was changed."""


class Decoder:
    """Starts the decoder's process, which takes a second or two, and calls it. The process ends with this one."""

    def __init__(self, folder: Path, opening: Open | None = None) -> None:
        self._path, self._opening = folder / "decoder.sock", opening
        # of a process that was killed
        self._path.unlink(missing_ok=True)
        self._process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name if __spec__ else __name__, str(self._path)], stdin=subprocess.PIPE
        )
        self._caller: Caller | None = None
        """None before the first call: nobody waits for a process that there is no delta for yet."""

    def call(self, message: ToDecoder, limit_s: float) -> Answer:
        if self._caller is None:
            if self._process.poll() is not None:
                raise ChannelClosed(f"it ended with {self._process.returncode}")
            caller = Caller(str(self._path))
            if self._opening is not None:
                _sound(caller.call(self._opening, _OPEN_S))
            self._caller = caller
        return _sound(self._caller.call(message, limit_s))

    def close(self) -> None:
        if self._caller is not None:
            self._caller.close()
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            # all that it has is memory
            self._process.kill()
            self._process.wait()


def _sound(answer: Answer) -> Answer:
    if "error" in answer:
        raise DecoderError(answer["error"])
    return answer


class KeptDecoder:
    """A decoder whose process is started on first use, and anew if it is lost, perhaps for want of memory."""

    def __init__(self, folder: Path, opening: Open | None = None) -> None:
        self._folder, self._opening = folder, opening
        self._decoder: Decoder | None = None
        self._closed = False
        self._one = threading.Lock()
        """Held during a call."""

    def do(self, work: Callable[[Decoder], _T]) -> _T:
        """Have the process do something; if it is lost meanwhile, have another one do it."""
        with self._one:
            for last in (False, True):
                if self._closed:
                    raise DecoderError("this server ends")
                try:
                    if self._decoder is None:
                        self._decoder = Decoder(self._folder, self._opening)
                    return work(self._decoder)
                except ChannelClosed as error:
                    self._end()
                    if last:
                        raise DecoderError(f"the process that decodes deltas was lost twice: {error}") from error
        raise AssertionError

    def close(self) -> None:
        """End the process, also during a call."""
        self._closed = True
        self._end()

    def _end(self) -> None:
        decoder, self._decoder = self._decoder, None
        if decoder is not None:
            decoder.close()


class _Process:
    """The decoder's process: the run's schema, the pieces of all ranks, and the tiles of the present delta."""

    def __init__(self) -> None:
        self._schema = Schema.build(())
        self._ranks: list[DevicePieces] = []
        self._held = Held(())
        self._tiles: list[list[Tiles]] = []

    def call(self, message: ToDecoder) -> Answer:
        try:
            return self._do(message)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}

    @singledispatchmethod
    def _do(self, message: ToDecoder) -> Answer:
        raise TypeError(f"a decoder does not know {message!r}")

    @_do.register
    def _open(self, message: Open) -> Answer:
        self._schema = message.schema
        self._ranks = [DevicePieces(pieces) for pieces in message.ranks]
        self._held = Held(piece for pieces in message.ranks for piece in pieces)
        return {}

    @_do.register
    def _read(self, message: Read) -> Answer:
        out = message.out
        files = [open_delta(*open_file(path), self._schema, message.claim) for path in message.paths]
        moves: list[list[NumberedMoves]] = [[] for _ in self._ranks]
        self._tiles = [[] for _ in self._ranks]
        try:
            for file in files:
                # of a part of a file only these blocks are there
                mine = [ref for ref in file.blocks if ref.meets(self._held)]
                for block in ordered_map(lambda ref, f=file: self._cut(f.read(ref)), mine, _threads()):  # type: ignore[misc]
                    for n, (cut_moves, cut_tiles) in enumerate(block):
                        moves[n] += cut_moves
                        self._tiles[n] += cut_tiles
        except CutTiles:
            return {"cut": True}
        parts = []
        for n, rank in enumerate(self._ranks):
            parts.append(rank.join(moves[n], partial(arrays.create, Path(f"{out}.{n}.moves")), _threads())[0])
            if self._tiles[n]:
                arrays.write(Path(f"{out}.{n}.tiles"), make_sheet(self._tiles[n]))
        return {"parts": parts, "tiles": [sum(item.span.tiles for item in tiles) for tiles in self._tiles]}

    def _cut(self, block: list[RegionMoves] | context.TiledBlock) -> list[tuple[list[NumberedMoves], list[Tiles]]]:
        return [rank.cut(block) for rank in self._ranks]

    @_do.register
    def _decode_ranks(self, message: DecodeRanks) -> Answer:
        out = message.out
        for number, tiles in enumerate(self._tiles):
            if tiles:
                sizes = arrays.open_arrays(Path(f"{out}.{number}.sizes"))["sizes"]
                arrays.write(Path(f"{out}.{number}.ranks"), join_ranks(tiles, decode_ranks(tiles, sizes, _threads())))
        self._tiles = []
        return {}

    @_do.register
    def _read_adapter(self, message: ReadAdapter) -> Answer:
        clock, folder = time.perf_counter(), Path(message.folder)
        for path in full.weight_files(Path(message.before)) if message.before else ():
            shutil.copyfile(path, folder / path.name)
        tensors = _mapped(folder)
        if message.claim is not None:
            for delta in message.paths:
                file = open_delta(*open_file(delta), message.schema, message.claim)
                for _ in file.changes(tensors.__getitem__, _threads(), write=True):
                    pass
        source = full.ReadBy(message.schema, lambda region: region.cut(tensors[region.tensor.name]))
        digest, decoded, unusual = full.digest_of(source, _threads()), time.perf_counter(), ""
        if message.arrangement is not None:
            try:
                path = folder / adapter_worker.FILE
                specs = message.schema.by_name()
                arrangement.arrange(tensors.__getitem__, specs, message.arrangement, path, _threads())
            except arrangement.Unusual as reason:
                unusual = str(reason)
        seconds = {"decode": decoded - clock, "arrange": time.perf_counter() - decoded}
        return {"digest": str(digest), "unusual": unusual, "seconds": seconds}


def _mapped(folder: Path) -> dict[str, Bits]:
    """The tensors of a checkpoint folder, by name, to be read and written."""
    found: dict[str, Bits] = {}
    for path in full.weight_files(folder):
        with open(path, "r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
        for item in full.FullFile(*open_file(path)).header.items.values():
            unit = lookup(item.dtype).unit
            found[item.name] = np.frombuffer(memory, unit, item.nbytes // np.dtype(unit).itemsize, item.start)
    return found


def _threads() -> int:
    """Number of threads: half of the cores, to leave the others to the engine."""
    return max(1, default_threads() // 2)


def main() -> None:
    """Answer calls until the process that started this one ends or closes the socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # the engine and its clients come first
    os.nice(5)
    listen(sys.argv[1], ToDecoder, _Process().call)
    sys.stdin.buffer.read()


if __name__ == "__main__":
    main()
