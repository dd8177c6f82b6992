"""One follower of the demo, a process of its own: `python -m deltawire.cli.demo_follower RUN NAME UNTIL WEIGHTS`.

Patches a live bf16 module version by version, prints a line of JSON for each, saves the weights at the end. Ends when
its standard input does, so that no follower outlives the demo.
"""

from __future__ import annotations

import os
import sys
import threading

import msgspec
import torch

from deltawire.replica import Replica

from .demo_model import TinyLM, fingerprint, wire_weights


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


def main(run: str, name: str, until: int, weights: str) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    model = TinyLM().to(torch.bfloat16)
    replica = Replica(run, id=name)
    for version in replica.follow(model, poll=0.05, every=True):
        proof = {"version": version, "fingerprint": fingerprint(wire_weights(model)), "timings": replica.timings}
        print(msgspec.json.encode(proof).decode(), flush=True)
        if version >= until:
            break
    torch.save(wire_weights(model), weights)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
