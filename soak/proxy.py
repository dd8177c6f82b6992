"""A TCP proxy with a port for each client, whose traffic it can cut, stall or slow down. In a process of its own.

Lines of JSON in: {"client": n, "mode": "pass" | "cut" | "stall" | "slow"}, each answered with the bytes that went to
and came from every client.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from pathlib import Path

from .child import Child

SLOW_BYTES = 100_000
"""Bytes a second of a slowed client, each way."""

_CHUNK = 1 << 16


class Client:
    def __init__(self) -> None:
        self.mode = "pass"
        self.changed = asyncio.Event()
        self.writers: set[asyncio.StreamWriter] = set()
        self.up = self.down = 0

    def set(self, mode: str) -> None:
        self.mode = mode
        self.changed.set()
        self.changed = asyncio.Event()
        if mode == "cut":
            for writer in list(self.writers):
                # a reset, in the middle of whatever it was
                writer.transport.abort()

    async def pass_gate(self, count: int) -> None:
        while self.mode == "stall":
            await self.changed.wait()
        if self.mode == "slow":
            await asyncio.sleep(count / SLOW_BYTES)


async def _pump(client: Client, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, up: bool) -> None:
    try:
        while data := await reader.read(_CHUNK if client.mode != "slow" else 4096):
            await client.pass_gate(len(data))
            writer.write(data)
            await writer.drain()
            if up:
                client.up += len(data)
            else:
                client.down += len(data)
    except (ConnectionError, OSError):
        pass
    finally:
        writer.transport.abort() if client.mode == "cut" else writer.close()


async def _serve(client: Client, target: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    client.writers.add(writer)
    try:
        if client.mode == "cut":
            writer.transport.abort()
            return
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", target)
        client.writers.add(there_writer)
        try:
            await asyncio.gather(_pump(client, reader, there_writer, True), _pump(client, there_reader, writer, False))
        finally:
            client.writers.discard(there_writer)
    except OSError:
        writer.transport.abort()  # the server is down: so is the connection
    finally:
        client.writers.discard(writer)


async def main(targets: list[int]) -> None:
    clients = [Client() for _ in targets]
    servers = []
    for client, target in zip(clients, targets, strict=True):
        servers.append(
            await asyncio.start_server(lambda r, w, c=client, t=target: _serve(c, t, r, w), "127.0.0.1", 0)  # type: ignore[misc]
        )
    print(json.dumps({"ports": [server.sockets[0].getsockname()[1] for server in servers]}), flush=True)
    loop = asyncio.get_running_loop()
    orders = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    while line := await orders.readline():
        order = json.loads(line)
        for number in order["clients"]:
            clients[number].set(order["mode"])
        print(json.dumps({"up": [c.up for c in clients], "down": [c.down for c in clients]}), flush=True)


class Proxy:
    """The other end. `targets` are the ports that the clients are led to."""

    def __init__(self, targets: list[int], log: Path) -> None:
        self._child = Child("soak.proxy", *map(str, targets), log=log)
        self.ports: list[int] = self._child.first["ports"]

    def set(self, clients: list[int], mode: str) -> dict[str, list[int]]:
        """Returns the bytes so far, per client."""
        return self._child.ask({"clients": clients, "mode": mode})

    def close(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.close(10)
        self._child.kill()


if __name__ == "__main__":
    asyncio.run(main([*map(int, sys.argv[1:])]))
