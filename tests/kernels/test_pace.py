"""Launches beside a served model come in short turns."""

from __future__ import annotations

import torch

from deltawire.kernels import pace
from deltawire.kernels.plan import Launch


def test_a_launch_is_cut_into_turns_only_where_breaks_were_asked_for() -> None:
    launch = Launch(torch.arange(5000, dtype=torch.int32), 5000, 2, True, ())
    assert [*pace.in_turns(launch, 1)] == [launch]
    waited: list[int] = []
    with pace.gently(lambda: waited.append(1)):
        parts = [*pace.in_turns(launch, 1)]
        assert len([*pace.in_turns(launch, 100)]) == 1
    assert [part.count for part in parts] == [pace.TURN, pace.TURN, 5000 - 2 * pace.TURN]
    assert torch.equal(torch.cat([part.tiles for part in parts]), launch.tiles)
    assert len(waited) == 4
    assert [*pace.in_turns(launch, 1)] == [launch]
