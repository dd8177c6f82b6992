"""An SGLang plugin for tests, loaded in every process of a server under test: faults on demand (live_faults.py).

While there is a file adapter-<rank> in $LIVE_TEST_FAULTS, the rank finds no adapter where it should be. With
$SGLANG_TEST_UNPINNED memory is not pinned, which SGLang's layers for adapters do everywhere, and torch only beside an
accelerator. $SGLANG_TEST_REFUSE is a reason to refuse deltas: every version is then reloaded in full.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch


def register() -> None:
    if "LIVE_TEST_FAULTS" in os.environ:
        from live_faults import break_writes

        break_writes()
        _break_adapters(Path(os.environ["LIVE_TEST_FAULTS"]))
    if reason := os.environ.get("SGLANG_TEST_REFUSE"):
        from deltawire.engines.sglang import guard

        guard.problems_of = lambda *args: [reason]
    if "SGLANG_TEST_UNPINNED" in os.environ:
        _pin_nothing()


def _break_adapters(folder: Path) -> None:
    from deltawire.engines.sglang import adapter_worker

    call = adapter_worker.call

    def faulty(scheduler: Any, operation: str, **arguments: Any) -> Any:
        if operation == "stage" and (folder / f"adapter-{torch.distributed.get_rank()}").exists():
            arguments["folder"] = "/a/fault/that/a/test/asked/for"
        return call(scheduler, operation, **arguments)

    adapter_worker.call = faulty


def _pin_nothing() -> None:
    for name in ("tensor", "zeros"):
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *args: self  # type: ignore[method-assign]


def _unpinned(make: Any) -> Any:
    return lambda *args, pin_memory=False, **options: make(*args, **options)
