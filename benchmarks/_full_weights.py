"""Publish full weights in place of deltas, to compare: by itself a publisher does so for adapters alone.

python benchmarks/_full_weights.py …    # as python -m deltawire_wordle.train …, with full weights
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from deltawire.trainer.policy import Choice, EncodingChooser


def full_weights() -> AbstractContextManager[Any]:
    """Let every version that is captured meanwhile have full weights and no delta. What is streamed (`wait=True` in
    host memory) is not captured."""
    return patch.object(EncodingChooser, "choose", lambda *_: Choice("packed", full=True))


if __name__ == "__main__":
    from deltawire_wordle.train import main

    with full_weights():
        main()
