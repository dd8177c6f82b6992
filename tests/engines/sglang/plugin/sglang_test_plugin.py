"""An SGLang plugin for tests, loaded in every process of a server under test: faults on demand (live_faults.py)."""

from __future__ import annotations

import os


def register() -> None:
    if "LIVE_TEST_FAULTS" in os.environ:
        from live_faults import break_writes

        break_writes()
