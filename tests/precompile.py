"""Compiles the host kernels of a fresh clone into the cache on disk, in two processes: the last step of `make setup`.

Otherwise each worker of a parallel run would compile all of them, within the time limit of whichever test comes first.
"""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent


def of_runs() -> None:
    """Kernels of `raw` and `packed`, of digests, publishers and replicas."""
    import deltawire as dw
    from deltawire.bucket.replay import checkout
    from deltawire.bucket.run import Run
    from deltawire.core.change import compose
    from deltawire.core.dtypes import lookup
    from deltawire.core.scatter import scatter_and_look
    from deltawire.core.schema import Schema, TensorSpec
    from deltawire.core.ulps import in_ulps
    from deltawire.store import ObjectStore
    from support import blank, diff, history, moved_bag, publish, random_bag

    versions = history(3)
    dw.decode(dw.encode(*versions[:2], "raw"), versions[0])
    store = ObjectStore.from_url(f"memory://{uuid.uuid4()}")
    publish(store, versions)
    derived = ObjectStore.from_url(f"memory://{uuid.uuid4()}")
    publish(derived, versions, view="fp8-block")
    checkout(Run.open(derived), 2)
    assert dw.Replica(store, heartbeat=0).sync(blank(versions[0])) == 2
    # views of 16 and of 32 bits, with all of a matrix changed and with a little of it
    for dtype in ("float16", "float32"):
        now = {"layer.weight": np.random.default_rng(0).standard_normal((256, 256)).astype(dtype)}
        some = {"layer.weight": now["layer.weight"].copy()}
        some["layer.weight"][3, :5] += 1
        derived = ObjectStore.from_url(f"memory://{uuid.uuid4()}")
        publish(derived, [now, some, {"layer.weight": -now["layer.weight"]}], view="fp8-block")
        checkout(Run.open(derived), 2)

    # what is done with changes, by the size of a weight
    schema = Schema.build(TensorSpec(dtype, dtype, (40, 40)) for dtype in ("U8", "BF16", "F32"))
    states = [random_bag(schema, 1)]
    for seed in (2, 3):
        states.append(moved_bag(states[-1], seed, 0.2))
    first, second = diff(*states[:2]), diff(*states[1:])
    for changes in zip(first, second, strict=True):
        for pair in zip(*changes, strict=True):
            compose(*pair)
    for block in first:
        for change in block:
            in_ulps(change.old, change.new, lookup(change.region.tensor.dtype))
            bits = states[0].tensors[change.region.tensor.name]
            assert scatter_and_look(bits, change.positions, change.new, 0, 40, 40)


def of_context() -> None:
    """Kernels of `context`."""
    from support import applied, diff, encoded
    from tiled import always_tiles, pair

    # rows and columns that change more than others
    rng = np.random.default_rng(3)
    chance = 0.02 * rng.choice([0, 1, 4], (1024, 1)) * rng.choice([0.3, 2], (1, 512))
    old, new = pair("BF16", (1024, 512), chance)
    with always_tiles():
        assert applied(encoded(old, diff(old, new), "context"), old)[0] == new
    # tiles with few changes and with many are counted in different ways, columns in another one
    for dtype, rows, columns, share in (
        ("BF16", 64, 128, 0.05), ("BF16", 300, 256, 0.6), ("F8_E4M3", 64, 128, 0.05), ("F32", 64, 128, 0.05)
    ):  # fmt: skip
        old, new = pair(dtype, (rows, columns), share)
        with always_tiles(1 << 13):
            assert applied(encoded(old, diff(old, new), "context"), old)[0] == new


PARTS: dict[str, Callable[[], None]] = {"runs": of_runs, "context": of_context}


def precompile() -> list[subprocess.Popen[bytes]]:
    """Start to fill the cache of compiled kernels, unless there is one. One of other sources is removed: numba looks
    only at the file of a kernel itself, not at those of the functions that it calls."""
    import deltawire

    package = Path(deltawire.__file__).parent
    cached = [*package.rglob("*.nbi"), *package.rglob("*.nbc")]
    oldest = min((path.stat().st_mtime for path in cached), default=0.0)
    sources = [path for path in package.rglob("*.py") if "numba" in path.read_text()]
    if cached and all(path.stat().st_mtime <= oldest for path in sources):
        return []
    for path in cached:
        path.unlink()
    path = os.pathsep.join([str(Path(deltawire.__file__).parents[1]), str(HERE)])
    return [
        subprocess.Popen([sys.executable, __file__, part], env={**os.environ, "PYTHONPATH": path}) for part in PARTS
    ]


def load() -> None:
    """Load all compiled kernels of modules that are imported, so that processes which are forked have them."""
    from numba.core.registry import CPUDispatcher

    modules = [module for name, module in sys.modules.items() if name.startswith("deltawire.")]
    kernels = {id(it): it for module in modules for it in vars(module).values() if isinstance(it, CPUDispatcher)}
    for kernel in kernels.values():
        # else it is compiled into those that call it
        if file := getattr(kernel._cache, "_cache_file", None):
            for signature, *_ in file._load_index():
                kernel.compile(signature)


if __name__ == "__main__":
    if sys.argv[1:]:
        PARTS[sys.argv[1]]()
    else:
        sys.exit(any([process.wait() for process in precompile()]))
