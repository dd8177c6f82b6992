"""Messages between the processes that publish a model together. A process that publishes alone is a group of one.

Several ranks use gloo process groups of their own: their messages never come between the collectives of the training,
and one that waits in a background thread blocks nothing else.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from ..core.errors import (
    DivergedRun,
    Misconfigured,
    OutOfStep,
    PublishFailed,
    RankLost,
    RunNotFound,
    RunReplaced,
    SchemaMismatch,
    WriterConflict,
)
from ..models import is_module, is_partitioned, is_torch
from .pairs import is_pairs
from .shard import HeldShards

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

LAST_WAIT = 600.0
"""Seconds that `close` waits for ranks that have neither published as often as this one nor closed."""

_PATIENCE = timedelta(days=1)
"""No limit on the time of a training step. A rank that died is noticed by its closed connection."""

RESTART = "Restart the training from its checkpoint, and the run goes on from there"

_NOTICED = 0.5
"""Seconds until the end of a process is seen on all its connections."""

_LOST, _NEVER_SENT = 1, 2
"""Tags of messages: the number of a rank that has ended, and one that is never sent."""

_AT_ONCE = timedelta(milliseconds=1)

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


class Group:
    """The processes that publish a model together; this class itself is a group of one.

    Every method is called by all ranks, in the same order, and each group by one thread at a time. `work` that fails on
    one rank fails on all: each raises an error.
    """

    rank = 0
    size = 1

    def exchange(self, message: T) -> list[T]:
        """Messages of all ranks, in the order of ranks."""
        return [message]

    def together(self, work: Callable[[], T]) -> list[T]:
        """Do work on every rank. Returns the results of all ranks."""
        return [work()]

    def each(self, work: Callable[[], T]) -> T:
        """Do work on every rank. Returns the own result, which stays on this rank."""
        return work()

    def on_rank_0(self, work: Callable[[], T]) -> T:
        """Do work on rank 0. Returns its result on all ranks."""
        return work()

    def maximum(self, values: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
        """The largest of all ranks at each place. All are below 2³¹."""
        return values

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """Several exchanges that belong together: where this rank alone breaks off, others get RankLost."""
        yield

    def agreed(self, error: Exception) -> Exception:
        """An error that every rank is about to raise."""
        return error

    def part(self) -> None:
        """Take no further part: ranks that wait for this one get RankLost."""


def _gloo_group(ranks: list[int]) -> Any:
    """A group of these ranks beside the training's own ones."""
    import torch.distributed as dist

    # where some of the world publish, the others need not know. Torch then names a group by the number of groups that a
    # rank is in, and ranks that are not in equally many, as those of a pipeline, would wait for each other for ever.
    among = len(ranks) < dist.get_world_size()
    return dist.new_group(ranks, _PATIENCE, backend="gloo", use_local_synchronization=among)


class _Watch:
    """Connections on which nothing is sent. They show which rank has ended: only the end of a process closes one.

    Who sees that tells the others, before its own process may end as well.
    """

    def __init__(self, ranks: list[int]) -> None:
        import torch
        import torch.distributed as dist

        self._torch, self._dist = torch, dist
        self._group: Any = _gloo_group(ranks)
        own = dist.get_rank(self._group)
        self._others = {number: rank for number, rank in enumerate(ranks) if number != own}
        self._told = {number: torch.full((1,), -1) for number in self._others}
        # from the beginning: what is sent then arrives, even if its sender ends at once
        self._receiving = [dist.irecv(self._told[n], rank, self._group, _LOST) for n, rank in self._others.items()]
        self._turn = threading.Lock()
        self._lost: list[int] = []

    def lost(self) -> list[int]:
        """Ranks whose processes have ended. Waits half a second until that is seen."""
        ends = time.monotonic() + _NOTICED
        with self._turn:
            while not self._lost:
                closed = [number for number in self._others if self._is_closed(number)]
                # a rank that told of another one and ended is not the cause
                told = sorted({int(number) for number in self._told.values()} - {-1})
                if told or closed:
                    self._lost = told or closed
                    self._tell(self._lost[0])
                elif time.monotonic() > ends:
                    break
                else:
                    time.sleep(_NOTICED / 20)
            return self._lost

    def _is_closed(self, number: int) -> bool:
        try:
            self._dist.irecv(self._torch.empty(1), self._others[number], self._group, _NEVER_SENT)
        except RuntimeError:
            return True
        return False

    def _tell(self, lost: int) -> None:
        for rank in self._others.values():
            with suppress(RuntimeError):
                self._dist.send(self._torch.tensor([lost]), rank, self._group, _LOST)


class Ranks(Group):
    """The ranks of a torch process group."""

    def __init__(self, group: ProcessGroup, beside: Ranks | None = None) -> None:
        """`beside`: a group of the same ranks for another thread, whose connections can be shared."""
        import torch
        import torch.distributed as dist

        self._torch, self._dist = torch, dist
        self._ranks = ranks = dist.get_process_group_ranks(group)
        reminder = threading.Timer(_REMIND, log.warning, (_MISSING, len(ranks)))
        reminder.daemon = True
        reminder.start()
        self._group: Any = _gloo_group(ranks)
        self._watch: _Watch = beside._watch if beside else _Watch(ranks)
        reminder.cancel()
        self.rank, self.size = dist.get_rank(self._group), dist.get_world_size(self._group)
        self._agreed: Exception | None = None
        """The last error that all ranks raised."""
        self._exchanged = False
        """Whether this rank has sent anything since `all_or_none` began."""

    def exchange(self, message: T) -> list[T]:
        heard: list[Any] = [None] * self.size
        with self._all_answer():
            self._dist.all_gather_object(heard, message, group=self._group)
        return heard

    def maximum(self, values: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
        merged = self._torch.from_numpy(values.view(np.int32).copy())
        with self._all_answer():
            self._dist.all_reduce(merged, self._dist.ReduceOp.MAX, group=self._group)
        return merged.numpy().view(np.uint32)

    @contextmanager
    def _all_answer(self) -> Iterator[None]:
        if self._group is None:
            raise RankLost(
                "this rank was interrupted while ranks opened the run or took weights together, so no version is "
                f"possible. {RESTART}"
            )
        self._exchanged = True
        try:
            yield
        except RuntimeError as error:
            lost = self._watch.lost()
            # ranks that wait for others than the lost one would wait for ever
            self._close()
            who = f"rank{'s' * (len(lost) > 1)} {', '.join(map(str, lost))}" if lost else "another rank"
            raise RankLost(
                f"{who} of this trainer does not answer any more, so no version can be finished. {RESTART}"
            ) from error

    def _close(self) -> None:
        """Close all connections of this group. gloo does so where a message does not come in time, and in no other
        case while something refers to the group."""
        for rank in range(self.size):
            with suppress(RuntimeError):
                if rank != self.rank:
                    nothing = self._torch.empty(1)
                    receiving: Any = self._dist.irecv(nothing, self._ranks[rank], self._group, _NEVER_SENT)
                    receiving.wait(_AT_ONCE)

    def part(self) -> None:
        if self._group is not None:
            self._close()

    def together(self, work: Callable[[], T]) -> list[T]:
        error: Exception | None = None
        try:
            mine: Any = work()
        except Exception as caught:
            error, mine = caught, _Failed(type(caught).__name__, str(caught))
        heard = self.exchange(mine)
        for rank, answer in enumerate(heard):
            if isinstance(answer, _Failed) and error is None:
                error = _SAME_EVERYWHERE.get(answer.kind, PublishFailed)(f"rank {rank}: {answer.message}")
        if error is not None:
            raise self.agreed(error)
        return heard

    def agreed(self, error: Exception) -> Exception:
        self._agreed = error
        return error

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        self._exchanged = False
        try:
            yield
        except BaseException as error:
            if self._exchanged and error is not self._agreed and self._group is not None:
                # interrupted between two messages: closing the connections is what others notice
                left, self._group = self._group, None
                self._dist.destroy_process_group(left)
            raise

    def each(self, work: Callable[[], T]) -> T:
        own: list[T] = []
        self.together(lambda: own.append(work()))
        return own[0]

    def on_rank_0(self, work: Callable[[], T]) -> T:
        return self.together(lambda: work() if self.rank == 0 else None)[0]  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class RankReport:
    """Report of a rank before a version is written."""

    publishes: int
    """Number of its newest publish."""
    changed: int
    """Weights that the next version would change here."""
    closed: bool
    """Whether no further publish will come from it."""
    alone: bool
    """Whether what changed here since the version before is unknown."""
    step: int | None
    """Training step of its newest publish, where the trainer says it."""


class Lockstep:
    """Keeps ranks at the same number of publishes: each reports its own before a version is written, and on closing.

    Used by the background thread of each rank, except for `overdue`.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._waits_since: float | None = None

    def report(
        self, publishes: int, changed: int = 0, *, closed: bool = False, alone: bool = False, step: int | None = None
    ) -> list[RankReport]:
        """Exchange reports with all ranks. Raises OutOfStep on all of them if some are closed and others are not, or if
        the same publish is of different steps."""
        self._waits_since = time.monotonic()
        reports = self._group.exchange(RankReport(publishes, changed, closed, alone, step))
        self._waits_since = None
        steps = {(rank.publishes, rank.step) for rank in reports if not rank.closed}
        if len(steps) > len({number for number, _ in steps}):
            found = ", ".join(f"rank {n}: publish {rank.publishes}, step={rank.step}" for n, rank in enumerate(reports))
            raise OutOfStep(f"ranks publish different steps together ({found}): was one interrupted? {RESTART}")
        if len({rank.closed for rank in reports}) > 1:
            counts = (f"rank {n} {rank.publishes}{' and closed' * rank.closed}" for n, rank in enumerate(reports))
            raise OutOfStep(
                f"ranks did not publish equally often: {', '.join(counts)}. What some have not published is in no "
                "version; let all ranks call publish after the same steps"
            )
        return reports

    def leave(self, publishes: int) -> None:
        """Report that no further publish will come from this rank."""
        try:
            self.report(publishes, closed=True)
        except RankLost:
            # that rank ended without closing, and all that was published here is in the bucket
            log.debug("another rank ended without closing its publisher")

    def overdue(self, patience: float) -> Callable[[], None]:
        """A check for the training thread while it waits for the background thread.

        It raises OutOfStep once other ranks have not reported for `patience` seconds.
        """
        began = time.monotonic()

        def check() -> None:
            since = self._waits_since
            if since is not None and time.monotonic() - max(since, began) > patience:
                raise OutOfStep(
                    f"rank {self._group.rank} closes; for {patience:g} s other ranks have neither published as often "
                    "nor closed, so its last publishes are in no version"
                )

        return check


def may_share(group: ProcessGroup | str | None) -> bool:
    """Whether a model could be published by several processes together. `group` as in `group_of`."""
    torch = sys.modules.get("torch")
    if group is None or torch is None or not torch.distributed.is_available():
        return False
    return bool(torch.distributed.is_initialized())


def is_one_of_several(group: ProcessGroup | str | None) -> bool:
    """Whether several processes publish what is published. `group` as in `group_of`."""
    return may_share(group) and sys.modules["torch"].distributed.get_world_size(_group_named(group)) > 1


def is_started_with_others(group: ProcessGroup | str | None) -> bool:
    """Whether torchrun or the like has started several processes, which may publish together once torch.distributed
    connects them."""
    return group is not None and not may_share(group) and os.environ.get("WORLD_SIZE", "1") not in ("", "1")


def group_of(model: Any, group: ProcessGroup | str | None) -> ProcessGroup | None:
    """The process group whose ranks hold the model between them; None where one process publishes alone.

    `group` is what the user said: a process group, None for alone, or "auto".
    """
    if isinstance(model, HeldShards) and (group is None or not may_share(group)):
        raise Misconfigured(
            "shards are published by the ranks of torch.distributed: call init_process_group() before, also for one "
            "process, and leave out group=None"
        )
    if group is None or not may_share(group):
        return None
    if is_module(model):
        tensors = list(model.parameters())
    else:
        tensors = [t for t in model.values() if is_torch(t)] if isinstance(model, Mapping) else []
    found = _group_named(group)
    if isinstance(model, HeldShards) or is_partitioned(model):
        return found
    shared = is_one_of_several(group) or any(type(t).__name__ == "DTensor" for t in tensors)
    return found if (tensors or is_pairs(model)) and shared else None


def _group_named(group: Any) -> ProcessGroup:
    found: ProcessGroup = sys.modules["torch"].distributed.group.WORLD if isinstance(group, str) else group
    return found
