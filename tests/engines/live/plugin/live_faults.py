"""Faults on demand in the ranks of a server under test, whatever its engine.

A fault is a file in the folder $LIVE_TEST_FAULTS, removed when it strikes:
    fail-<rank>     the rank fails in the middle of writing new weights
    stray-<rank>    the rank changes a weight that was to stay as it is
    stall-<rank>    the rank stops for ever in the middle of writing new weights, and `stalled-<rank>` says so
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch


def break_writes() -> None:
    """Let writes of new weights fail as the files say. May be called often."""
    from deltawire.replica.device import DeviceShard
    from deltawire.replica.host import HostShard

    for shard in (HostShard, DeviceShard):
        if shard.write.__name__ != "broken":
            shard.write = _broken(shard.write, Path(os.environ["LIVE_TEST_FAULTS"]))  # type: ignore[method-assign]


def _broken(write: Any, folder: Path) -> Any:
    def broken(self: Any, patch: Any) -> None:
        rank = torch.distributed.get_rank()
        struck = [kind for kind in ("fail", "stall", "stray") if (folder / f"{kind}-{rank}").exists()]
        for kind in struck:
            (folder / f"{kind}-{rank}").unlink()
        # on a GPU all of it is one launch: it is written, and not said to be
        write(self, patch[: len(patch) // 2] if self.audited and struck and struck != ["stray"] else patch)
        if struck == ["stray"]:
            _stray(self, patch)
        elif struck:
            if struck == ["stall"]:
                (folder / f"stalled-{rank}").touch()
                time.sleep(3600)
            raise OSError("a fault that a test asked for")

    return broken


def _stray(shard: Any, patch: Any) -> None:
    """Flip a bit of a weight: in host memory of the first that the patch leaves alone, on a device of any."""
    if not shard.audited:
        shard.pieces[0].view.view(torch.int16)[0, 0] ^= 1
        return
    change = patch[0].change
    written = set(change.positions.tolist())
    bits = shard.read(patch[0].piece, change.region.within(shard.pieces[patch[0].piece].region))
    position = next(p for p in range(bits.size) if p not in written)
    bits[divmod(position, bits.shape[1])] ^= 1
