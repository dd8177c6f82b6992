"""What the processes of a server ask of each other."""

from __future__ import annotations

from functools import singledispatchmethod
from typing import Any, get_args

import msgspec
import pytest

pytest.importorskip("torch")

from deltawire.core.change import whole
from deltawire.core.schema import TensorSpec
from deltawire.engines.live.decoder import _Process
from deltawire.engines.live.messages import Lend, Take, ToDecoder, ToNode, ToRank, for_rank
from deltawire.engines.live.node import Node
from deltawire.engines.live.rank import Rank

REGION = whole(TensorSpec("w", "BF16", (2, 3)))


@pytest.mark.parametrize(
    ("kind", "handlers"),
    [
        (ToRank, vars(Rank)["_do"]),
        (ToDecoder, vars(_Process)["_do"]),
        (ToNode, vars(Node)["call"]),
    ],
    ids=["rank", "decoder", "node"],
)
def test_every_message_has_a_handler(kind: Any, handlers: singledispatchmethod[Any]) -> None:
    handled = {*handlers.dispatcher.registry} - {object}
    assert handled == {*get_args(kind)}


def test_messages_arrive_as_they_were_sent() -> None:
    sent = Lend([REGION], "path")
    assert for_rank(sent.text()) == sent
    taken = Take([(REGION, b"\0\xff")])
    assert msgspec.json.decode(taken.text(), type=ToNode) == taken


@pytest.mark.parametrize("text", ['{"type":"Fly"}', '{"type":"Lend"}', '{"type":"Apply","staged":["1"]}', "5"])
def test_what_is_no_message_is_refused(text: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        for_rank(text)
