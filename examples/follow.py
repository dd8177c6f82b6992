"""The other side of pytorch.py: live weights that follow the run, patched in place and proven bit for bit each time.

python examples/follow.py file:///tmp/curve          Ctrl-C ends it
"""

from __future__ import annotations

import argparse
from contextlib import suppress

import torch
from pytorch import make_model

import deltawire as dw


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run")
    parser.add_argument("--until", type=int, help="a version to end at")
    given = parser.parse_args()
    model = make_model()
    x = torch.linspace(-3, 3, 64)[:, None]
    replica = dw.Replica(given.run)
    for version in replica.follow(model):  # waits for the run, takes full weights once, and deltas from then on
        with torch.no_grad():
            error = (model(x) - x.sin()).square().mean().item()
        print(f"version {version}  error {error:.4f}", flush=True)
        if given.until is not None and version >= given.until:
            break


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
