"""The server over real sockets: a plain WebSocket client, our own client, HTTP, many at once, and how it ends."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import httpx
import psutil
import pytest
from env_support import wordle_server, wordle_thread
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect as connect_now

from deltawire_wordle.env_client import EnvClient
from deltawire_wordle.env_server import LARGEST_FRAME
from deltawire_wordle.errors import ServerUnavailable
from deltawire_wordle.wordle import Rules
from deltawire_wordle.wordlists import load
from servers import end

RULES = Rules(load("toy"), 5)
# busy machines answer late
get, post = partial(httpx.get, timeout=120), partial(httpx.post, timeout=120)


def ws(address: str) -> str:
    return address.replace("http", "ws") + "/ws"


def ask(connection: Any, message: Any) -> dict[str, Any]:
    connection.send(message if isinstance(message, str | bytes) else json.dumps(message))
    return json.loads(connection.recv(timeout=120))


# ── one client ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_game_over_a_websocket(url: str) -> None:
    secret = RULES.game(11).secret
    with connect_now(ws(url)) as connection:
        assert ask(connection, {"type": "reset", "data": {"seed": 11}})["data"]["observation"]["guesses_left"] == 5
        missed = ask(connection, {"type": "step", "data": {"guess": "zzzzz"}})["data"]
        assert (missed["observation"]["feedback"], missed["done"]) == ("XXXXX", False)
        solved = ask(connection, {"type": "step", "data": {"guess": secret}})["data"]
        assert (solved["observation"]["feedback"], solved["done"]) == ("GGGGG", True)
        assert solved["reward"] == pytest.approx(1 + 0.3 - 0.05)
        assert ask(connection, {"type": "state"})["data"]["secret"] == secret
        connection.send('{"type": "close"}')
        with pytest.raises(ConnectionClosed) as closed:
            connection.recv(timeout=120)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1000


def test_nonsense_is_answered_and_the_game_goes_on(url: str) -> None:
    with connect_now(ws(url)) as connection:
        ask(connection, {"type": "reset", "data": {"seed": 1}})
        for message, code in [
            ("{", "INVALID_JSON"),
            (b"\x00\x01", "INVALID_JSON"),
            ({"type": "dance"}, "UNKNOWN_TYPE"),
            ({"type": "step", "data": {"guess": None}}, "VALIDATION_ERROR"),
            ({"type": "step", "data": {"guess": "x" * 5000}}, "VALIDATION_ERROR"),
        ]:
            assert ask(connection, message)["data"]["code"] == code
        assert ask(connection, {"type": "state"})["data"]["step_count"] == 0


def test_a_huge_message_ends_only_its_own_session(url: str) -> None:
    with connect_now(ws(url)) as other:
        ask(other, {"type": "reset"})
        with connect_now(ws(url)) as connection:
            with pytest.raises(ConnectionClosed) as closed:
                ask(connection, "x" * (LARGEST_FRAME + 1))
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1009
        assert ask(other, {"type": "step", "data": {"guess": "crane"}})["type"] == "observation"


# ── HTTP ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_there_is_to_read(url: str) -> None:
    assert get(f"{url}/health").json() == {"status": "healthy"}
    assert get(f"{url}/metadata").json()["name"] == "wordle"
    schema = get(f"{url}/schema").json()
    assert "guess" in schema["action"]["properties"]
    assert "feedback" in schema["observation"]["properties"]
    assert "step_count" in schema["state"]["properties"]
    assert get(f"{url}/state").json()["step_count"] == 0


def test_reset_and_step_over_http(url: str) -> None:
    begun = post(f"{url}/reset", json={"seed": 5, "episode_id": "a"})
    assert begun.status_code == post(f"{url}/reset").status_code == 200
    assert begun.json()["observation"]["guesses_left"] == 5
    solved = post(f"{url}/step", json={"action": {"guess": RULES.game(5).secret}, "seed": 5})
    assert solved.json()["done"] is True


@pytest.mark.parametrize(
    "path, body, status, part",
    [
        ("/step", b'{"action": {"guess": "crane"}}', 409, "/ws"),
        ("/step", b"{}", 422, "action"),
        ("/step", b'{"action": {"word": "crane"}}', 422, "word"),
        ("/reset", b'{"seed": -1}', 422, "seed"),
        ("/reset", b"{", 400, "not JSON"),
        ("/reset", b'{"sed": 7}', 422, "sed"),
        ("/reset", b'{"episode_id": "\xff"}', 400, "not JSON"),
        ("/reset", b'{"episode_id": "\\ud800"}', 400, "not JSON"),
        ("/reset", b'{"seed": NaN}', 400, "not JSON"),
        ("/reset", b'{"seed": ' + b"9" * 4000 + b"}", 422, "seed"),
        ("/reset", b"[" * 4000, 422, "object"),
        ("/step", b'{"action": {"guess": "a", "metadata": ' + b'{"a":' * 800, 400, "not JSON"),
        ("/reset", b"7", 422, "object"),
        ("/step", b'{"action": {"guess": "crane"}, "sed": 7}', 422, "sed"),
        ("/step", b'{"action": {"guess": 7}}', 422, "guess"),
        ("/reset", b" " * 5000, 413, "4096"),
        ("/dance", b"", 404, "Not Found"),
    ],
)
def test_bad_requests(url: str, path: str, body: bytes, status: int, part: str) -> None:
    answer = post(f"{url}{path}", content=body)
    assert answer.status_code == status
    assert part in answer.json()["detail"]


# ── many at once ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def play_through(connection: ClientConnection, seed: int) -> list[str]:
    async def tell(kind: str, **data: Any) -> dict[str, Any]:
        await connection.send(json.dumps({"type": kind, "data": data}))
        return json.loads(await connection.recv())["data"]

    answers = []
    await tell("reset", seed=seed)
    for word in RULES.words[seed % 50 :][:5]:
        reply = await tell("step", guess=word)
        answers.append(reply["observation"]["feedback"])
        if reply["done"]:
            break
    return answers


def test_256_sessions_at_the_same_time(url: str) -> None:
    """All are open before the first game begins; none sees another's game."""

    async def run() -> list[list[str]]:
        connections = await asyncio.gather(*(connect(ws(url), open_timeout=60) for _ in range(256)))
        answers = await asyncio.gather(*(play_through(c, seed) for seed, c in enumerate(connections)))
        again = await asyncio.gather(*(play_through(c, seed) for seed, c in enumerate(connections)))
        await asyncio.gather(*(connection.close() for connection in connections))
        assert answers == again
        return answers

    for seed, answers in enumerate(asyncio.run(run())):
        game = RULES.game(seed)
        for word in RULES.words[seed % 50 :][: len(answers)]:
            game = RULES.play(game, word)
        assert answers == [guess.feedback for guess in game.guesses]


def test_a_full_server_says_so_and_takes_the_next_when_one_leaves() -> None:
    with wordle_thread(max_sessions=2) as url:
        with connect_now(ws(url)) as first, connect_now(ws(url)) as second:
            assert {ask(one, {"type": "reset"})["type"] for one in (first, second)} == {"observation"}
            with connect_now(ws(url)) as third:
                refused = json.loads(third.recv(timeout=120))["data"]
                assert (refused["code"], refused["max_sessions"]) == ("CAPACITY_REACHED", 2)

            async def enter() -> None:
                async with EnvClient(url) as env:
                    await env.reset()

            with pytest.raises(ServerUnavailable, match="sessions are taken"):
                asyncio.run(enter())
        asyncio.run(_until_free(url))


async def _until_free(url: str) -> None:
    while True:
        try:
            async with EnvClient(url) as env:
                await env.reset()
                return
        except ServerUnavailable:
            await asyncio.sleep(0.05)


def test_300_half_open_connections_against_128_files_keep_nobody_out() -> None:
    with wordle_server("--max-sessions", "512", files=128) as (url, process), ExitStack() as opened:
        port = int(url.rpartition(":")[2])
        for number in range(300):
            slow = opened.enter_context(socket.create_connection(("127.0.0.1", port), 20))
            with suppress(OSError):  # it may be closed already, for one that came later
                slow.sendall(b"GET /health HTTP" if number % 2 else b"")
        assert get(f"{url}/health").json() == {"status": "healthy"}
        with connect_now(ws(url)) as connection:
            assert ask(connection, {"type": "reset"})["type"] == "observation"
        assert end(process) == 0


def test_bytes_that_are_no_text_end_only_their_own_session(url: str) -> None:
    with connect_now(ws(url)) as connection:
        connection.send(b"\xff\xfe", text=True)
        with pytest.raises(ConnectionClosed) as closed:
            connection.recv(timeout=120)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1007
    with connect_now(ws(url)) as connection:
        assert ask(connection, {"type": "reset"})["type"] == "observation"


def test_sessions_that_were_refused_and_stay_keep_nobody_out() -> None:
    with wordle_thread(max_sessions=1) as url, connect_now(ws(url)) as first, ExitStack() as opened:
        ask(first, {"type": "reset"})
        port = int(url.rpartition(":")[2])
        key = "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
        upgrade = f"GET /ws HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n{key}\r\n".encode()
        for _ in range(80):
            rude = opened.enter_context(socket.create_connection(("127.0.0.1", port), 20))
            rude.sendall(upgrade)
            assert rude.recv(12) == b"HTTP/1.1 101"
        assert get(f"{url}/health").json() == {"status": "healthy"}


def test_a_silent_session_ends_and_leaves_nothing() -> None:
    with wordle_thread(max_sessions=1, idle=0.3) as url, connect_now(ws(url)) as connection:
        # on a busy machine it may have ended before its first word
        with suppress(ConnectionClosed):
            connection.send(json.dumps({"type": "reset"}))
        expired = [json.loads(message)["data"] for message in connection][-1]
        assert (expired["code"], "0.3 s" in expired["message"]) == ("SESSION_ERROR", True)
        asyncio.run(_until_free(url))


@pytest.mark.slow
def test_memory_does_not_grow_with_games_played() -> None:
    with wordle_server() as (url, process):

        def games(n: int) -> int:
            for _ in range(n):
                with connect_now(ws(url)) as connection:
                    for _ in range(20):
                        ask(connection, {"type": "reset", "data": {"episode_id": "e" * 255}})
                        ask(connection, {"type": "step", "data": {"guess": "g" * 256}})
            return psutil.Process(process.pid).memory_info().rss

        warm = games(20)
        assert games(100) - warm < 8 * 2**20
