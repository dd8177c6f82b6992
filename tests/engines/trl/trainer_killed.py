"""Run by test_trl_worker.py, where TRL is installed: a trainer that is killed while its rollout worker plays.

It prints the worker's process id.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from typing import Any

from trl.experimental.async_grpo.async_rollout_worker import _AsyncRolloutLoop

from deltawire.engines.trl_worker import VersionedLoop


def play(_: Any) -> None:
    print(os.getpid(), flush=True)
    time.sleep(300)


def work() -> None:
    _AsyncRolloutLoop.run = play
    VersionedLoop.run(VersionedLoop.__new__(VersionedLoop))


if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=work, daemon=True)
    process.start()
    process.join()
