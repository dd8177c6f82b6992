"""Compiles what a server will need while its engine starts: `python -m deltawire.engines.live.ahead RUN`.

An engine takes a minute or two to start, most of it on one core. Its processes find here, in the caches of Triton and
numba on disk, what they would otherwise compile once the engine is up. No memory of a device is taken: engines measure
what is free. Where this fails or is late, they compile it themselves.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Collection
from functools import partial

from ..options import ServerOptions
from .supervise import end_with_parent

__all__ = ["start", "start_in_plugin"]

STARTED = "DELTAWIRE_AHEAD"
"""Environment variable: set where that process was started, for the processes of the same server."""

log = logging.getLogger("deltawire")


def start_in_plugin() -> None:
    """Start that process where an engine loads a plugin: in the first process of a server that is told to follow a
    run."""
    run = ServerOptions.read().run
    if run and multiprocessing.parent_process() is None:
        start(run)


def start(run: str) -> None:
    """Start that process, unless this server has one. It ends with this one, or with what this one becomes."""
    if os.environ.get(STARTED):
        return
    os.environ[STARTED] = "1"
    subprocess.Popen(
        [sys.executable, "-m", __spec__.name if __spec__ else __name__, run],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=partial(end_with_parent, signal.SIGKILL),
    )


def units_of(run: str) -> set[int]:
    """Bytes of the weights of a run; those of bf16 where it cannot be read yet."""
    from ...bucket.run import Run
    from ...core.errors import DeltawireError

    try:
        return {tensor.unit_size for tensor in Run.open(run).schema.tensors} or {2}
    except DeltawireError as error:
        log.info("compiling for bf16, since %s cannot be read: %s", run, error)
        return {2}


def compile_for_hosts(units: Collection[int]) -> None:
    """What parses and decodes on the host, and writes and proves weights in host memory."""
    import torch

    from ...core.change import whole
    from ...core.schema import Schema, TensorSpec
    from ...replica.device import DeviceWeights
    from ...replica.shard import Piece
    from . import small_deltas
    from .decode_pieces import warm_up
    from .placement import open_shard

    dtypes = {1: ("U8", torch.uint8), 2: ("BF16", torch.bfloat16), 4: ("F32", torch.float32)}
    pieces = []
    for name, dtype in (dtypes[unit] for unit in units):
        spec = TensorSpec(name, name, (2, 64))
        pieces.append(Piece(whole(spec), torch.zeros(spec.shape, dtype=dtype)))
    warm_up(open_shard(pieces), [0] * len(pieces))
    weights = torch.from_numpy(small_deltas.weights().view("i2")).view(torch.bfloat16)
    decoder = DeviceWeights(Schema.build([small_deltas.SPEC]), [Piece(whole(small_deltas.SPEC), weights)])
    for file in small_deltas.open_all():
        decoder.prepare(decoder.decode([file]))


def compile_for_devices(units: Collection[int], part: int, parts: int) -> None:
    """What writes and proves weights in the memory of this machine's devices: every `parts`-th kernel."""
    from ...kernels import ahead

    for capability in ahead.capabilities():
        ahead.compile_for(capability, units, part, parts)


def main() -> None:
    """Compile, on a quarter of the cores, with a low priority."""
    os.nice(10)
    # what is imported by now is shared
    from ...kernels import ahead  # noqa: F401

    units, parts = units_of(sys.argv[1]), max(1, (os.cpu_count() or 1) // 4)
    work = [partial(compile_for_hosts, units)]
    work += [partial(compile_for_devices, units, part, parts) for part in range(parts)]
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=_do, args=[one], daemon=True) for one in work]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def _do(work: Callable[[], None]) -> None:
    end_with_parent(signal.SIGKILL)
    work()


if __name__ == "__main__":
    main()
