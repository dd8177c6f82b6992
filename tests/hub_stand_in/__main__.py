"""The stand-in by itself: `python -m tests.hub_stand_in --root DIR --host 0.0.0.0 --port 8080 --token hf_…`"""

from __future__ import annotations

import argparse
import signal
import tempfile
import threading
from pathlib import Path

from . import HubStandIn


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.hub_stand_in", description="A stand-in for the HF Hub.")
    parser.add_argument("--root", type=Path, help="where the data goes; a temporary folder otherwise")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--token", help="what clients must send; made up otherwise")
    parser.add_argument("--namespace", action="append", help="where buckets may be created (me)")
    chosen = parser.parse_args()
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with (
        tempfile.TemporaryDirectory(prefix="deltawire-hub-") as temporary,
        HubStandIn(
            chosen.root or Path(temporary),
            host=chosen.host,
            port=chosen.port,
            token=chosen.token,
            namespaces=tuple(chosen.namespace or ("me",)),
        ) as hub,
    ):
        print(f"HF_ENDPOINT={hub.endpoint} HF_TOKEN={hub.token}", flush=True)
        stop.wait()


if __name__ == "__main__":
    main()
