"""Compiles the host kernels of a fresh clone, half of them in each process of a parallel run.

Otherwise each worker would compile all of them, within the time limit of whichever test comes first.
"""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent


def of_runs() -> None:
    """Kernels of `raw` and `packed`, of digests, publishers and replicas."""
    import deltawire as dw
    from deltawire.bucket.replay import checkout
    from deltawire.bucket.run import Run
    from deltawire.store import ObjectStore
    from support import blank, history, publish

    versions = history(3)
    dw.decode(dw.encode(*versions[:2], "raw"), versions[0])
    store = ObjectStore.from_url(f"memory://{uuid.uuid4()}")
    publish(store, versions)
    derived = ObjectStore.from_url(f"memory://{uuid.uuid4()}")
    publish(derived, versions, view="fp8-block")
    checkout(Run.open(derived), 2)
    assert dw.Replica(store, heartbeat=0).sync(blank(versions[0])) == 2


def of_context() -> None:
    """Kernels of `context`."""
    from support import applied, diff, encoded
    from tiled import always_tiles, pair

    for dtype in ("BF16", "F8_E4M3"):
        old, new = pair(dtype, (64, 128), 0.05)
        with always_tiles():
            assert applied(encoded(old, diff(old, new), "context"), old)[0] == new


PARTS: dict[str, Callable[[], None]] = {"runs": of_runs, "context": of_context}


def precompile() -> list[subprocess.Popen[bytes]]:
    """Start to fill the cache of compiled kernels, unless there is one."""
    import deltawire

    if any(Path(deltawire.__file__).parent.rglob("*.nbi")):
        return []
    path = os.pathsep.join([str(Path(deltawire.__file__).parents[1]), str(HERE)])
    return [
        subprocess.Popen([sys.executable, __file__, part], env={**os.environ, "PYTHONPATH": path}) for part in PARTS
    ]


if __name__ == "__main__":
    PARTS[sys.argv[1]]()
