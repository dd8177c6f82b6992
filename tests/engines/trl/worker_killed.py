"""Run by test_trl_worker.py, where TRL is installed: the process of TRL's rollout worker is killed.

It prints what the trainer gets from the queue, once the worker could be stopped after it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from contextlib import suppress
from queue import Empty

from accelerate import PartialState
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker

from deltawire.engines.trl import Syncs
from deltawire.engines.trl_worker import TrueVersions

if __name__ == "__main__":
    # of TRL's log
    PartialState()
    ctx = multiprocessing.get_context("fork")
    worker = AsyncRolloutWorker.__new__(AsyncRolloutWorker)
    worker.rollout_buffer, worker._stop_event_mp, worker._loop_kwargs = ctx.Queue(), ctx.Event(), {}
    # as the worker's does
    worker._process = ctx.Process(target=worker._stop_event_mp.wait)
    queue = TrueVersions.over(worker, Syncs(), None)
    worker._process.start()
    time.sleep(1)
    with suppress(Empty):
        queue.get(timeout=0.1)
    os.kill(worker._process.pid, signal.SIGKILL)
    worker._process.join()
    try:
        queue.get(timeout=0.1)
    except RuntimeError as error:
        worker.stop()
        print(error)
