"""The ranks of one trainer, telling each other small things.

A team has process groups of its own, over gloo: its messages never come between the collectives of the training, and
one that waits in a background thread holds nobody up.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from ..core.errors import (
    DivergedRun,
    PublishFailed,
    RankLost,
    RunNotFound,
    RunReplaced,
    SchemaMismatch,
    WriterConflict,
)
from ..models import is_module, is_torch

_PATIENCE = timedelta(days=1)
"""A rank may take as long over a training step as it likes. One that died is noticed by its closed connection."""

_REMIND = 30.0
_MISSING = "waiting for all of %d ranks to call `publish`; where only one does, it needs Publisher(…, group=None)"

_SAME_EVERYWHERE = {
    kind.__name__: kind for kind in (DivergedRun, RunNotFound, RunReplaced, SchemaMismatch, WriterConflict)
}

T = TypeVar("T")

log = logging.getLogger("deltawire")


@dataclass(frozen=True, slots=True)
class _Failed:
    kind: str
    message: str


class Team:
    """Every method is called by all ranks, in the same order, and each team by one thread at a time."""

    def __init__(self, group: Any) -> None:
        import torch.distributed as dist

        self._dist = dist
        ranks = dist.get_process_group_ranks(group)
        reminder = threading.Timer(_REMIND, log.warning, (_MISSING, len(ranks)))
        reminder.daemon = True
        reminder.start()
        # members alone make it; others of the world need not know
        self._group = dist.new_group(ranks, _PATIENCE, backend="gloo", use_local_synchronization=True)
        reminder.cancel()
        self.rank, self.size = dist.get_rank(self._group), dist.get_world_size(self._group)

    def exchange(self, message: T) -> list[T]:
        """What every rank said, in the order of ranks."""
        heard: list[Any] = [None] * self.size
        try:
            self._dist.all_gather_object(heard, message, group=self._group)
        except RuntimeError as error:
            raise RankLost(
                "another rank of this trainer does not answer any more, so no version can be finished; "
                "restart the training from its checkpoint, and the run goes on from there"
            ) from error
        return heard

    def together(self, work: Callable[[], T]) -> list[T]:
        """Do it on every rank; everybody's results, or, if it failed anywhere, an error everywhere."""
        error: Exception | None = None
        try:
            mine: Any = work()
        except Exception as caught:
            error, mine = caught, _Failed(type(caught).__name__, str(caught))
        heard = self.exchange(mine)
        if error is not None:
            raise error
        for rank, answer in enumerate(heard):
            if isinstance(answer, _Failed):
                raise _SAME_EVERYWHERE.get(answer.kind, PublishFailed)(f"rank {rank}: {answer.message}")
        return heard

    def first(self, work: Callable[[], T]) -> T:
        """Do it on rank 0 for all."""
        return self.together(lambda: work() if self.rank == 0 else None)[0]  # type: ignore[return-value]


def may_share(group: Any) -> bool:
    """Whether a model could be published by several processes together. `group` as in `group_of`."""
    torch = sys.modules.get("torch")
    if group is None or torch is None or not torch.distributed.is_available():
        return False
    return bool(torch.distributed.is_initialized())


def group_of(model: Any, group: Any) -> Any | None:
    """The process group whose ranks hold the model between them; None where one process publishes alone.

    `group` is what the user said: a process group, None for alone, or "auto".
    """
    if not may_share(group):
        return None
    if is_module(model):
        tensors = list(model.parameters())
    else:
        tensors = [t for t in model.values() if is_torch(t)] if isinstance(model, Mapping) else []
    dist = sys.modules["torch"].distributed
    group = dist.group.WORLD if isinstance(group, str) else group
    shared = dist.get_world_size(group) > 1 or any(type(t).__name__ == "DTensor" for t in tensors)
    return group if tensors and shared else None
