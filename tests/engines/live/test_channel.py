"""Calls between the processes of a server."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from deltawire.engines.live.channel import Caller, ChannelClosed, call_all, listen, serve


def test_calls_are_answered_in_order_and_by_all(tmp_path: Path) -> None:
    for rank in (0, 1):
        listen(str(tmp_path / f"{rank}"), lambda operation, rank=rank, **rest: {"rank": rank, operation: rest})
    callers = [Caller(str(tmp_path / f"{rank}")) for rank in (0, 1)]
    assert callers[0].call("add", 60, what="x" * 3_000_000) == {"rank": 0, "add": {"what": "x" * 3_000_000}}
    assert [answer["rank"] for answer in call_all(callers, "go", 60)] == [0, 1]
    callers[0].close()
    again = Caller(str(tmp_path / "0"))
    assert again.call("go", 60) == {"rank": 0, "go": {}}


def test_a_process_that_is_not_there_or_does_not_answer(tmp_path: Path) -> None:
    with pytest.raises(ChannelClosed, match="no process answers"):
        Caller(str(tmp_path / "nobody"), patience_s=0.0)
    never = threading.Event()

    def handle(operation: str, **_: Any) -> dict[str, Any]:
        never.wait(60)
        return {}

    listen(str(tmp_path / "slow"), handle)
    with pytest.raises(ChannelClosed, match="no answer within"):
        Caller(str(tmp_path / "slow")).call("go", 0.01)
    never.set()


def test_a_connection_from_another_node_begins_with_the_secret() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    serve(listener, lambda name, /, **rest: {name: rest}, secret=b"right")
    address = listener.getsockname()
    with pytest.raises(ChannelClosed, match="is gone"):
        Caller(address, secret=b"wrong").call("go", 60)
    assert Caller(address, secret=b"right").call("go", 60, operation="x") == {"go": {"operation": "x"}}
