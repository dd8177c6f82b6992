"""Our client of the environment."""

from __future__ import annotations

import asyncio
import socket

import pytest
from test_env_server import RULES

from deltawire_wordle.env_client import EnvClient
from deltawire_wordle.errors import ServerRefused, ServerUnavailable


def test_our_client(url: str) -> None:
    async def play() -> None:
        async with EnvClient(url) as env:
            with pytest.raises(ServerRefused, match="reset first"):
                await env.step("crane")
            await env.reset(seed=3)
            result = await env.step(RULES.game(3).secret)
            assert result.done
            assert result.observation.solved
            assert (await env.state()).secret == RULES.game(3).secret

    asyncio.run(play())


def test_our_client_says_who_does_not_answer(url: str) -> None:
    async def enter(address: str) -> None:
        async with EnvClient(address, timeout=120):
            pass

    with socket.socket() as silent:
        # bound, so that nobody else takes it, and nobody listens
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        with pytest.raises(ServerUnavailable, match=str(port)):
            asyncio.run(enter(f"http://127.0.0.1:{port}"))
    with pytest.raises(ServerRefused, match="speaks no OpenEnv"):
        asyncio.run(enter(f"{url}/elsewhere"))
    with pytest.raises(ServerRefused, match="no address"):
        asyncio.run(enter("ftp://nowhere"))


def test_our_client_knows_a_server_that_comes_back() -> None:
    """It ends during the handshake, or a proxy answers in its place: neither is a wrong address."""

    async def enter(answer: bytes) -> None:
        async def handshake(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            writer.close()

        async with await asyncio.start_server(handshake, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            async with EnvClient(f"http://127.0.0.1:{port}"):
                pass

    for answer in (b"", b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n"):
        with pytest.raises(ServerUnavailable, match="does not answer"):
            asyncio.run(enter(answer))
    with pytest.raises(ServerRefused, match="speaks no OpenEnv"):
        asyncio.run(enter(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"))
