"""A trainer as a program: `python writing.py RUN HOST SECONDS [takeover]` publishes until its standard input ends.

HOST is the name that it has for its machine's, and SECONDS is how wrong its clock is. It prints each version once that
is committed, and ends with 6 where another trainer has the run.
"""

from __future__ import annotations

import itertools
import logging
import socket
import sys
import threading
import time

import numpy as np

from deltawire.core.errors import DeltawireError
from deltawire.trainer import Publisher

Model = dict[str, "np.ndarray[tuple[int], np.dtype[np.uint16]]"]


def weights(step: int) -> Model:
    """The model at a step, whoever asks."""
    array = np.arange(4096, dtype=np.uint16)
    array[:: 1 + step % 7] ^= np.uint16(step)
    return {"layer": array}


def main(run: str, host: str, wrong_s: str, *options: str) -> int:
    clock, offset = time.time, float(wrong_s)
    time.time = lambda: clock() + offset
    time.time_ns = lambda: int((clock() + offset) * 1e9)
    socket.gethostname = lambda: host
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    try:
        with Publisher(run, continues=True, takeover="takeover" in options) as publisher:
            for step in itertools.count((publisher.newest.step or 0) + 1 if publisher.newest else 0):
                print(publisher.publish(weights(step), step=step).result(60).version, flush=True)
                if ended.wait(0.02):
                    return 0
    except DeltawireError as error:
        print(error, file=sys.stderr, flush=True)
        return error.exit_code
    return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
