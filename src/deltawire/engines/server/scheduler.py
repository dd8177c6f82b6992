"""One thread that moves all sequences by a token at a time. Requests join and leave between two steps, weights change
between two steps, and every token is counted to the version that made it.

    waiting ──admit──▶ running ──finish──▶ told to its listener
       ▲                  │
       └── new weights, ──┘   with the KV policy `clear`: computed anew, under the new weights, from its tokens so far
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from .batch import LOGITS_AT_ONCE, Batch, kv_bytes
from .sampling import LogprobsMode, draw
from .sequence import Delta, Sequence

log = logging.getLogger("deltawire")

KvPolicy = Literal["clear", "keep"]
PauseMode = Literal["abort", "wait", "keep"]
Told = list[tuple[Sequence, Delta]]

PREFILL_TOKENS = 4096
"""Prompt tokens of one step: running sequences wait no longer than these take."""


@dataclass(frozen=True, slots=True)
class Limits:
    max_batch: int = 64
    # sequences that run at once
    max_queue: int = 1024
    # sequences that may wait
    kv_memory: int = 2 << 30
    # bytes of keys and values
    max_model_len: int = 2048
    # prompt and answer together


@dataclass(slots=True)
class Counts:
    """What the scheduler did since it started."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    recomputed_tokens: int = 0
    # because the weights under them changed
    steps: int = 0
    busy_s: float = 0.0
    finished: int = 0
    aborted: int = 0
    failed: int = 0


class QueueFull(Exception):
    pass


class Scheduler:
    """`version` says what the weights are now; while it says None, nothing is computed.

    Nothing happens before `start`. `deliver` gets what each step brought, in the scheduler's thread: hand it on, do no
    work there.
    """

    def __init__(
        self,
        model: Any,
        version: Callable[[], int | None],
        *,
        limits: Limits,
        kv_policy: KvPolicy = "clear",
        logprobs_mode: LogprobsMode = "raw_logprobs",
        deliver: Callable[[Told], None] | None = None,
    ) -> None:
        self.limits = limits
        self.counts = Counts()
        self.kv_policy = kv_policy
        self.deliver = deliver or _tell
        self._version = version
        self._logprobs_mode = logprobs_mode
        self._batch = Batch(model)
        self._position_bytes = kv_bytes(model)
        self._work = threading.Condition()
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        # row by row as in the batch; only the thread touches it
        self._last_version: int | None = None
        self._stepping = False
        self._holds = 0
        self._gate: int | None = None
        # while paused: only sequences that came before this one go on
        self._frozen = False
        self._forget = False
        # compute running sequences anew before the next step
        self._arrived = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="deltawire-scheduler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def fits(self, length: int) -> bool:
        """Whether a sequence of this length can ever run."""
        return length <= self.limits.max_model_len and length * self._position_bytes <= self.limits.kv_memory

    def add(self, sequences: list[Sequence]) -> None:
        """All of them or, with QueueFull, none."""
        with self._work:
            if self._closed or len(self._waiting) + len(sequences) > self.limits.max_queue:
                raise QueueFull
            for sequence in sequences:
                sequence.number = self._arrived
                self._arrived += 1
            self._waiting.extend(sequences)
            self._work.notify_all()

    def cancel(self, sequences: list[Sequence]) -> None:
        """Nobody waits for these any more."""
        with self._work:
            for sequence in sequences:
                sequence.cancelled = True
            self._work.notify_all()

    def wake(self) -> None:
        """`version` may say something else now."""
        with self._work:
            self._work.notify_all()

    @property
    def vocabulary(self) -> int:
        return self._batch.vocabulary

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    # ── control ──────────────────────────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Entered between two steps; none begins before it is left. For whoever writes the weights."""
        with self._work:
            self._holds += 1
            self._work.wait_for(lambda: not self._stepping)
        try:
            yield
        finally:
            with self._work:
                self._holds -= 1
                self._work.notify_all()

    @property
    def paused(self) -> bool:
        return self._gate is not None

    def pause(self, mode: PauseMode = "abort", *, clear_cache: bool = True) -> None:
        """Make no more tokens until `resume`; what arrives meanwhile waits. What is there already:

        abort   ends now, with what it has
        wait    is finished first
        keep    stays where it is and goes on at `resume`, computed anew if `clear_cache`
        """
        with self._work:
            self._gate = self._arrived
            self._frozen = mode == "keep"
            self._forget |= clear_cache and self._frozen
            for sequence in (*self._running, *self._waiting) if mode == "abort" else ():
                sequence.cancelled = True
            self._work.notify_all()
            if self._frozen:
                self._work.wait_for(lambda: not self._stepping or self._closed)
            else:
                # a `resume` meanwhile ends the wait too
                self._work.wait_for(lambda: self._gate is None or not self._before_gate() or self._closed)

    def resume(self) -> None:
        with self._work:
            self._gate, self._frozen = None, False
            self._work.notify_all()

    def drain(self, seconds: float) -> None:
        """Take nothing new, let what is there finish for so long, end the rest. The thread is gone afterwards."""
        with self._work:
            self._closed = True
            self._work.notify_all()
            self._work.wait_for(lambda: not self._running and not self._waiting, seconds)
            for sequence in (*self._running, *self._waiting):
                sequence.cancelled = True
            self._work.notify_all()
        if self.alive:
            self._thread.join()

    def _before_gate(self) -> bool:
        """Whether there is anything that came before the pause."""
        gate = self._gate if self._gate is not None else self._arrived
        return self._stepping or any(s.number < gate for s in (*self._running, *self._waiting))

    # ── the thread ───────────────────────────────────────────────────────────────────────────────────────────────────

    @torch.inference_mode()
    def _run(self) -> None:
        while True:
            with self._work:
                self._stepping = False
                self._work.notify_all()
                self._work.wait_for(self._has_work)
                if self._closed and not self._running and not self._waiting:
                    return
                self._stepping = True
                told = self._drop_cancelled()
                version = self._version()
                steps = not self._holds and not self._frozen and version is not None
            if steps and version is not None:
                told += self._step(version)
            if told:
                self.deliver(told)

    def _has_work(self) -> bool:
        present = (*self._running, *self._waiting)
        if self._closed and not present:
            return True
        if any(sequence.cancelled for sequence in present):
            return True
        if self._holds or self._frozen or self._version() is None:
            return False
        return bool(self._running) or any(self._may_start(sequence) for sequence in self._waiting)

    def _may_start(self, sequence: Sequence) -> bool:
        return self._gate is None or sequence.number < self._gate

    def _drop_cancelled(self) -> Told:
        gone = [s for s in (*self._running, *self._waiting) if s.cancelled]
        if not gone:
            return []
        self._waiting = deque(s for s in self._waiting if not s.cancelled)
        for row in reversed(range(len(self._running))):
            if self._running[row].cancelled:
                self._leave(row)
        self.counts.aborted += len(gone)
        for sequence in gone:
            sequence.finish("abort")
        return [(s, s.delta(len(s.tokens))) for s in gone]

    def _step(self, version: int) -> Told:
        clock = time.perf_counter()
        told: Told = []
        try:
            if self._forget or (version != self._last_version and self.kv_policy == "clear"):
                self._start_over()
            self._forget, self._last_version = False, version
            joined = self._admit()
            if joined:
                tokens = [[*s.prompt, *s.tokens] for s in joined]
                told += self._advance(joined, self._batch.join(tokens), version)
            if self._running:
                last = [s.tokens[-1] if s.tokens else s.prompt[-1] for s in self._running]
                logits = self._batch.step(last, [s.length for s in self._running])
                told += self._advance([*self._running], logits, version)
        except Exception:
            # whatever it was, it concerns the sequences that were being computed, and no later one
            log.exception("a step of %d sequences failed", len(self._running))
            told += self._fail()
        self.counts.steps += 1
        self.counts.busy_s += time.perf_counter() - clock
        return told

    def _advance(self, sequences: list[Sequence], logits: Any, version: int) -> Told:
        """Draw a token for each of them; those that are finished leave."""
        told: Told = []
        drawn = draw(logits, [s.next_draw() for s in sequences], self._logprobs_mode)
        for sequence, token in zip(sequences, drawn, strict=True):
            sequence.take(token, version)
            if sequence.live or sequence.finish_reason:
                told.append((sequence, sequence.delta(len(sequence.tokens) - 1)))
        self.counts.generated_tokens += len(sequences)
        for row in reversed(range(len(self._running))):
            if self._running[row].finish_reason:
                self.counts.finished += 1
                self._leave(row)
        return told

    def _admit(self) -> list[Sequence]:
        """Move sequences from the queue into rows, as many as one prefill should take and memory allows."""
        joined: list[Sequence] = []
        longest = max((s.longest for s in self._running), default=0)
        lengths: set[int] = set()
        with self._work:
            while self._waiting and len(self._running) < self.limits.max_batch:
                new = self._waiting[0]
                longest, lengths = max(longest, new.longest), lengths | {new.length}
                padded = (len(joined) + 1) * max(lengths)
                logits = (len(joined) + 1) * len(lengths) * self._batch.vocabulary
                positions = (len(self._running) + 1) * max(longest, self._batch.room[1])
                full = positions * self._position_bytes > self.limits.kv_memory and self._running
                dear = joined and (padded > PREFILL_TOKENS or logits > LOGITS_AT_ONCE)
                if full or dear or not self._may_start(new):
                    break
                self._waiting.popleft()
                joined.append(new)
                self._running.append(new)
        if joined:
            self._batch.reserve(len(self._running), max(s.longest for s in self._running))
            fresh = sum(len(s.prompt) for s in joined if not s.tokens)
            self.counts.prompt_tokens += fresh
            self.counts.recomputed_tokens += sum(s.length for s in joined) - fresh
        return joined

    def _start_over(self) -> None:
        """What runs goes back to the head of the queue, in the order in which it came."""
        with self._work:
            self._waiting.extendleft(sorted(self._running, key=lambda s: s.number, reverse=True))
            self._running.clear()
        self._batch.clear()

    def _leave(self, row: int) -> None:
        """The last row takes the place of this one, here as in the batch."""
        self._batch.leave(row)
        last = self._running.pop()
        if row < len(self._running):
            self._running[row] = last

    def _fail(self) -> Told:
        failed = [*self._running]
        with self._work:
            self._running.clear()
        self._batch.clear()
        self.counts.failed += len(failed)
        for sequence in failed:
            sequence.finish_reason = "error"
        return [(s, s.delta(len(s.tokens))) for s in failed]


def _tell(told: Told) -> None:
    for sequence, delta in told:
        sequence.listener(sequence, delta)
