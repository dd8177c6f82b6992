"""The thread that generates.

Each step adds a token to every running sequence; requests join and leave, and weights change, between two steps. Every
token is labelled with the version that made it.

    waiting ──admit──▶ running ──finish──▶ its listener
       ▲                  │
       └── new weights, ──┘   with the KV policy `clear`: recomputed from its tokens so far, under the new weights
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..live import ServerOptions
from .batch import Batch
from .sampling import draw
from .sequence import NewTokens, Sequence

log = logging.getLogger("deltawire")

PauseMode = Literal["abort", "wait", "keep"]
Updates = list[tuple[Sequence, NewTokens]]

PREFILL_TOKENS = 4096
"""Prompt tokens of one step: running sequences wait no longer than these take."""


@dataclass(slots=True)
class Counts:
    """Counters since the start."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    recomputed_tokens: int = 0
    """Tokens computed again because the weights changed."""
    steps: int = 0
    busy_s: float = 0.0
    finished: int = 0
    aborted: int = 0
    failed: int = 0


class QueueFull(Exception):
    """Raised by `add` if more than `max_queue` sequences would wait."""


class Scheduler:
    """Generates tokens for all sequences, in a thread that `start` starts.

    `version` returns the version of the weights; while it returns None, nothing is computed. All methods may be called
    from any thread.
    """

    def __init__(
        self,
        model: Any,
        version: Callable[[], int | None],
        options: ServerOptions,
        max_model_len: int,
    ) -> None:
        self.counts, self.kv_policy = Counts(), options.kv or "clear"
        self.deliver: Callable[[Updates], None] = notify
        """Called in the scheduler's thread with what each step produced; must return quickly."""
        self.batch = Batch(model)
        self._version, self._options, self._max_model_len = version, options, max_model_len
        self._kv_bytes = round(options.kv_memory * 1e9)
        self._queue: list[Sequence] = []
        """All sequences in order of arrival. The first `running` are the rows of the batch."""
        self.running = 0
        self._pause: PauseMode | None = None
        self._recompute = False
        self._last_version: int | None = None
        self._holds = 0
        self._stepping = self._closed = False
        self._changed = threading.Condition()
        """Guards all of these; only the thread removes from the queue and moves `running`."""
        self._thread = threading.Thread(target=self._run, name="deltawire-scheduler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def waiting(self) -> int:
        return len(self._queue) - self.running

    @property
    def paused(self) -> bool:
        return self._pause is not None

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def fits(self, length: int) -> bool:
        """Whether a sequence of this length can ever run."""
        return length <= self._max_model_len and length * self.batch.position_bytes <= self._kv_bytes

    def add(self, sequences: list[Sequence]) -> None:
        """Queue all sequences. Raises QueueFull, and queues none, if there is no room for all."""
        with self._changed:
            if self._closed or self.waiting + len(sequences) > self._options.max_queue:
                raise QueueFull
            for sequence in sequences:
                sequence.late = self.paused
            self._queue += sequences
            self._changed.notify_all()

    def cancel(self, sequences: list[Sequence]) -> None:
        """End sequences before the next step, with the tokens they have."""
        with self._changed:
            for sequence in sequences:
                sequence.cancelled = True
            self._changed.notify_all()

    def wake(self) -> None:
        """Check for work again, because `version` may have changed."""
        with self._changed:
            self._changed.notify_all()

    # ── control ──────────────────────────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Context in which no step runs, for writing the weights."""
        with self._changed:
            self._holds += 1
            self._changed.wait_for(lambda: not self._stepping)
        try:
            yield
        finally:
            with self._changed:
                self._holds -= 1
                self._changed.notify_all()

    def pause(self, mode: PauseMode = "abort", *, clear_cache: bool = True) -> None:
        """Generate nothing until `resume`; new sequences wait. Present ones, by mode:

        abort   end now, with the tokens they have
        wait    are finished first
        keep    are kept, and continue at `resume`, recomputed if `clear_cache`
        """
        with self._changed:
            self._set_pause(mode)
            self._recompute |= clear_cache and mode == "keep"
            if mode == "abort":
                self.cancel(self._queue)
            # a `resume` meanwhile ends the wait too
            self._changed.wait_for(
                lambda: self._closed or not self.paused or not (self._stepping or (mode != "keep" and self._ready))
            )

    def resume(self) -> None:
        with self._changed:
            self._set_pause(None)

    def drain(self, seconds: float) -> None:
        """Refuse new sequences, wait at most `seconds` for present ones, then end those and the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._queue, seconds)
            self.cancel(self._queue)
        if self.alive:
            self._thread.join()

    def _set_pause(self, mode: PauseMode | None) -> None:
        self._pause = mode
        for sequence in self._queue:
            sequence.late = False
        self._changed.notify_all()

    # ── the thread ───────────────────────────────────────────────────────────────────────────────────────────────────

    @torch.inference_mode()
    def _run(self) -> None:
        while True:
            with self._changed:
                self._stepping = False
                self._changed.notify_all()
                self._changed.wait_for(self._has_work)
                if self._closed and not self._queue:
                    return
                self._stepping = True
                updates = self._end_cancelled()
                version = self._computable()
            if version is not None and self._ready:
                updates += self._step(version)
            if updates:
                self.deliver(updates)

    @property
    def _ready(self) -> bool:
        """Whether there are sequences that did not arrive during a pause."""
        return not all(sequence.late for sequence in self._queue)

    def _has_work(self) -> bool:
        if any(sequence.cancelled for sequence in self._queue) or (self._closed and not self._queue):
            return True
        return self._ready and self._computable() is not None

    def _computable(self) -> int | None:
        """The version to compute with; None while nothing may be computed."""
        return None if self._holds or self._pause == "keep" else self._version()

    def _end_cancelled(self) -> Updates:
        gone = [sequence for sequence in self._queue if sequence.cancelled]
        for sequence in gone:
            sequence.finish("abort")
        self.counts.aborted += len(gone)
        self._drop_finished()
        return [(sequence, sequence.delta(len(sequence.tokens))) for sequence in gone]

    def _drop_finished(self) -> None:
        rows = [row for row, sequence in enumerate(self._queue[: self.running]) if sequence.finish_reason is None]
        if len(rows) < self.running:
            # copies keys and values: clients that arrive do not wait for it
            self.batch.keep(rows)
        with self._changed:
            self.running = len(rows)
            self._queue = [sequence for sequence in self._queue if sequence.finish_reason is None]

    def _step(self, version: int) -> Updates:
        clock = time.perf_counter()
        updates: Updates = []
        try:
            if self._recompute or (version != self._last_version and self.kv_policy == "clear"):
                self._start_over()
            self._recompute, self._last_version = False, version
            joined = self._admit()
            if joined:
                updates += self._advance(joined, self.batch.join([s.prompt + s.tokens for s in joined]), version)
            if running := self._queue[: self.running]:
                updates += self._advance(running, self.batch.step([s.tokens[-1] for s in running]), version)
        except Exception:
            # whatever it was, it concerns the sequences that were being computed, and no later one
            failed = self._queue[: self.running]
            log.exception("a step of %d sequences failed", len(failed))
            for sequence in failed:
                sequence.finish_reason = "error"
            self.counts.failed += len(failed)
            self._start_over()
            self._drop_finished()
            updates += [(sequence, sequence.delta(len(sequence.tokens))) for sequence in failed]
        self.counts.steps += 1
        self.counts.busy_s += time.perf_counter() - clock
        return updates

    def _start_over(self) -> None:
        """Empty the batch. Its sequences are first in the queue, so they are admitted again."""
        self.running = 0
        self.batch.clear()

    def _admit(self) -> list[Sequence]:
        """Add waiting sequences to the batch, as many as the limits on one prefill and on memory allow."""
        joined: list[Sequence] = []
        longest = max((s.longest for s in self._queue[: self.running]), default=0)
        widest = 0
        for new in self._queue[self.running : self._options.max_batch]:
            longest, widest = max(longest, new.longest), max(widest, new.length)
            rows = self.running + len(joined) + 1
            full = rows > 1 and rows * longest * self.batch.position_bytes > self._kv_bytes
            # those behind one that is late are late too
            if new.late or full or (joined and (len(joined) + 1) * widest > PREFILL_TOKENS):
                break
            joined.append(new)
        self.running += len(joined)
        fresh = sum(len(s.prompt) for s in joined if not s.tokens)
        self.counts.prompt_tokens += fresh
        self.counts.recomputed_tokens += sum(s.length for s in joined) - fresh
        return joined

    def _advance(self, sequences: list[Sequence], logits: Tensor, version: int) -> Updates:
        """Draw a token for each sequence, and drop finished ones."""
        for sequence, drawn in zip(sequences, draw(logits, sequences, self._options.logprobs_mode), strict=True):
            sequence.take(version, *drawn)
        self.counts.generated_tokens += len(sequences)
        self.counts.finished += sum(s.finish_reason is not None for s in sequences)
        updates = [(s, s.delta(len(s.tokens) - 1)) for s in sequences if s.live or s.finish_reason]
        self._drop_finished()
        return updates


def notify(updates: Updates) -> None:
    """Call the listener of each sequence."""
    for sequence, delta in updates:
        sequence.listener(sequence, delta)
