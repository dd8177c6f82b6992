"""Lines of limited speed to a server on this machine, where no root is to make network namespaces.

    python benchmarks/_throttle.py 8333 100 9001 9002    two lines to port 8333, each 100 Mbit/s up and 100 Mbit/s down

Each line is a port of its own; all connections over it share its speed.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

CHUNK = 1 << 15


class Way:
    """One direction of a line: what goes over it goes one after the other."""

    def __init__(self, mbit: float) -> None:
        self._bytes_per_s, self._free_at = mbit * 1e6 / 8, 0.0

    async def carry(self, size: int) -> None:
        self._free_at = max(self._free_at, time.monotonic()) + size / self._bytes_per_s
        await asyncio.sleep(self._free_at - time.monotonic())


async def _pump(way: Way, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(CHUNK):
            await way.carry(len(data))
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


async def _connect(port: int, up: Way, down: Way, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        writer.transport.abort()
        return
    await asyncio.gather(_pump(up, reader, there_writer), _pump(down, there_reader, writer))


async def serve(port: int, mbit: float, lines: Sequence[int]) -> None:
    servers = [
        await asyncio.start_server(partial(_connect, port, Way(mbit), Way(mbit)), "127.0.0.1", line) for line in lines
    ]
    print(json.dumps({"event": "ready"}), flush=True)
    await asyncio.gather(*(server.serve_forever() for server in servers))


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        asyncio.run(serve(int(sys.argv[1]), float(sys.argv[2]), [*map(int, sys.argv[3:])]))
