"""Asynchronous GRPO: sampling and training go on side by side, as far apart as `staleness` allows.

    environment ◀─WebSocket─ workers ─HTTP─▶ rollout servers ◀─ bucket ◀─ publisher
                                │ groups of games, with the versions that made them   ▲
                                ▼                                                     │
                              queue ─ fresh enough? ─▶ advantages, clipped loss, AdamW ┘

A `Task` defines what is played: Wordle in games.py. A group is one secret (or prompt), played several times; its games
are compared with each other. Every token keeps the log-probability that its server drew it with, so the importance
ratio is correct whatever version that was, also where the weights changed during a game. Groups older than `staleness`
steps are dropped.

Nothing here waits for a particular server: one that fails is skipped for a moment while others are asked. If the bucket
is unavailable, training continues until its samples are too old.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import statistics
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import httpx
import torch
from torch import Tensor

from deltawire import Published, Publisher, PublishHandle
from deltawire.errors import PublishFailed, StoreError

from .fleet import ANSWER_S, REST_S, ServerPool
from .sampling import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger("deltawire")

TICK_S = 0.5
"""Seconds that `Rollouts.take` waits for a group."""


@dataclass(frozen=True, slots=True)
class Settings:
    secrets: int = 8
    """Secrets of each training step."""
    games: int = 8
    """Games with each secret."""
    workers: int = 8
    """Groups that are played at the same time."""
    staleness: int | None = 4
    """Age of the oldest sample to train on, in training steps; None for any."""
    rate: float = 3e-5
    clip_low: float = 0.2
    clip_high: float = 0.28
    """How far the importance ratio may leave 1, below and above, before it is clipped."""
    gradient_norm: float = 1.0
    seed: int = 0
    """Seed of the sequence of secrets."""
    sync: bool = True
    """Publish after each step; without, the servers keep the version they have."""

    @property
    def ahead(self) -> int:
        """Groups that may be played or waiting: more would be too old by the time they are trained on."""
        return max(self.workers if self.staleness is None else self.staleness * self.secrets, self.secrets)


# ── rollouts ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class Rollout:
    """One game, token by token. While it is played, its tokens are the next prompt."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Log-probability with which each token was drawn; 0 for tokens of the environment."""
    sampled: list[bool] = field(default_factory=list)
    versions: set[int] = field(default_factory=set)
    """Versions that made its tokens, as the servers reported them."""
    reward: float = 0.0
    solved: bool = False

    def add_sample(self, sample: Sample, versions: Sequence[int]) -> None:
        """Append tokens that a server sampled with these versions."""
        self.tokens += sample.tokens
        self.logprobs += sample.logprobs
        self.sampled += [True] * len(sample.tokens)
        self.versions.update(versions)

    def add_context(self, tokens: Sequence[int]) -> None:
        """Append tokens of the environment: the prompt, then its feedback."""
        self.tokens += tokens
        self.logprobs += [0.0] * len(tokens)
        self.sampled += [False] * len(tokens)


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    rollouts: Sequence[Rollout]

    @property
    def oldest(self) -> int:
        return min(version for rollout in self.rollouts for version in rollout.versions)


class Task(Protocol):
    def groups(self, fleet: ServerPool) -> AsyncGenerator[RolloutGroup, None]:
        """Yield groups without end. Each of several workers has a generator of its own, all in one thread."""
        ...


class Rollouts:
    """Context manager that plays groups in a thread of its own; `take` returns them to the trainer."""

    def __init__(
        self,
        servers: Sequence[str],
        task: Task,
        settings: Settings,
        model: str | None = None,
        *,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._urls, self._task, self._settings, self._model = servers, task, settings, model
        self._headers = headers
        self.oldest = 0
        """The oldest version whose samples would still be trained on; servers behind it catch up first."""
        self._done: queue.Queue[RolloutGroup | BaseException] = queue.Queue()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rollouts", daemon=True)
        self._loop: asyncio.AbstractEventLoop
        self._room: asyncio.Semaphore
        self._end: asyncio.Event

    def __enter__(self) -> Rollouts:
        self._thread.start()
        self._started.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    @property
    def waiting(self) -> int:
        return self._done.qsize()

    def take(self) -> RolloutGroup | None:
        """Return the next group, or None if there is none within TICK_S. Raises the error that ended the workers."""
        try:
            group = self._done.get(timeout=TICK_S)
        except queue.Empty:
            return None
        if isinstance(group, BaseException):
            raise group
        self._loop.call_soon_threadsafe(self._room.release)
        return group

    def _run(self) -> None:
        try:
            asyncio.run(self._play_on())
        except BaseException as error:
            # raised by `take`
            self._done.put(error)

    async def _play_on(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        self._room = asyncio.Semaphore(self._settings.ahead)
        self._started.set()
        # shorter than that of vLLM's servers (5 s), or one may close a connection just as it is used again
        limits = httpx.Limits(max_connections=None, keepalive_expiry=2.0)
        async with httpx.AsyncClient(timeout=ANSWER_S, limits=limits, headers=self._headers) as client:
            fleet = ServerPool(self._urls, client, self._model, lambda: self.oldest)
            tasks: list[asyncio.Task[Any]] = [
                asyncio.create_task(self._work(fleet)) for _ in range(self._settings.workers)
            ]
            tasks.append(asyncio.create_task(self._end.wait()))
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for task in done:
                task.result()

    async def _work(self, fleet: ServerPool) -> None:
        async with aclosing(self._task.groups(fleet)) as groups:
            while True:
                await self._room.acquire()
                self._done.put(await anext(groups))


# ── learning ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def advantages(rewards: Sequence[float]) -> list[float]:
    """How much better each game was than the mean of its group, in standard deviations; 0 where all were equal."""
    mean, deviation = statistics.fmean(rewards), statistics.stdev(rewards) if len(rewards) > 1 else 0.0
    return [(reward - mean) / (deviation + 1e-4) for reward in rewards]


def clipped_loss(
    logprobs: Tensor, sampled_with: Tensor, advantage: Tensor, sampled: Tensor, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """The clipped objective, averaged over sampled tokens, and the share of these whose gradient is clipped to zero.

    All are (games, tokens), `advantage` has one value per game.
    """
    ratio = torch.exp(logprobs - sampled_with)
    wanted = advantage[:, None]
    objective = torch.minimum(ratio * wanted, ratio.clamp(1 - low, 1 + high) * wanted)
    still = ((ratio > 1 + high) & (wanted > 0)) | ((ratio < 1 - low) & (wanted < 0))
    count = sampled.sum()
    return -(objective * sampled).sum() / count, (still & sampled).sum() / count


class Learner:
    """fp32 master weights and AdamW."""

    def __init__(self, model: PreTrainedModel, settings: Settings) -> None:
        self.model, self._settings = model.float().train(), settings
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=settings.rate, weight_decay=0.0)

    def step(self, groups: Sequence[RolloutGroup]) -> dict[str, float]:
        """Do one optimizer step on these groups; returns figures about it."""
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        scores = [score for group in groups for score in advantages([rollout.reward for rollout in group.rollouts])]
        longest = max(len(rollout.tokens) for rollout in rollouts)

        def padded(rows: list[list[Any]], filler: Any) -> Tensor:
            # on the right, where no earlier token attends to it
            return torch.tensor([row + [filler] * (longest - len(row)) for row in rows], device=self.model.device)

        tokens = padded([rollout.tokens for rollout in rollouts], 0)
        sampled = padded([rollout.sampled for rollout in rollouts], False)[:, 1:]
        sampled_with = padded([rollout.logprobs for rollout in rollouts], 0.0)[:, 1:]
        logits = self.model(input_ids=tokens[:, :-1], use_cache=False).logits.float()
        logprobs = torch.log_softmax(logits, -1).gather(2, tokens[:, 1:, None])[:, :, 0]
        low, high = self._settings.clip_low, self._settings.clip_high
        judged = torch.tensor(scores, device=self.model.device)
        loss, clipped = clipped_loss(logprobs, sampled_with, judged, sampled, low, high)
        self._optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._settings.gradient_norm)
        self._optimizer.step()
        return {
            "loss": loss.item(),
            "clipped": clipped.item(),
            "gradient": float(norm),
            "reward": statistics.fmean(rollout.reward for rollout in rollouts),
            "solved": statistics.fmean(rollout.solved for rollout in rollouts),
            "tokens": int(sampled.sum()),
        }


class Ledger:
    """Tracks which training step each version carries: with a slow bucket, several steps are merged into one version.

    Starts with the publisher's newest version, which must be the weights that training starts from.
    """

    def __init__(self, publisher: Publisher) -> None:
        if publisher.version is None:
            raise ValueError("publish the weights that training starts from first: the servers sample with them")
        self._publisher = publisher
        self._steps = {publisher.version: 0}
        """The last training step in each version."""
        self._under_way: deque[tuple[int, PublishHandle]] = deque()
        self.owed = False
        """Whether the last publish failed; the next one carries its changes too."""

    def publish(self, model: PreTrainedModel, step: int, metrics: Mapping[str, float]) -> None:
        try:
            self._under_way.append((step, self._publisher.publish(model, step=step, metrics=metrics)))
            self.owed = False
        except (PublishFailed, StoreError) as error:
            log.warning("step %d is not in the bucket yet: %s", step, error)
            self.owed = True

    def arrived(self) -> list[Published]:
        """Return the versions that were committed since the last call."""
        new: dict[int, Published] = {}
        while self._under_way and self._under_way[0][1].done():
            step, handle = self._under_way.popleft()
            try:
                published = handle.result()
            except StoreError as error:
                log.warning("step %d is not in the bucket yet: %s", step, error)
                self.owed = True
                continue
            self._steps[published.version] = step
            new[published.version] = published
        return [*new.values()]

    def age(self, version: int, step: int) -> int:
        """Training steps between the weights of a version and those after `step`."""
        if version > max(self._steps):
            return 0  # servers may see a version before its publish has returned here
        before = [known for known in self._steps if known <= version]
        first = min(self._steps)
        return step - self._steps[max(before)] if before else step + first - version

    def since(self, step: int) -> int:
        """The first version in the bucket with the weights of a training step or a later one; else the newest."""
        return min((version for version, carried in self._steps.items() if carried >= step), default=max(self._steps))

    def settle(self, model: PreTrainedModel, step: int, seconds: float) -> list[Published]:
        """Publish these weights, retrying for so many seconds; raises the last error after that."""
        began, new = time.monotonic(), []
        self.owed |= self._steps[max(self._steps)] < step and not self._under_way
        while True:
            if self.owed:
                self.publish(model, step, {})
            try:
                self._publisher.flush()
            except (PublishFailed, StoreError) as error:
                if time.monotonic() - began > seconds:
                    raise
                log.warning("the last version is not in the bucket yet: %s", error)
                self.owed = True
            new += self.arrived()
            if not self.owed:
                return new
            time.sleep(REST_S)


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """Figures of one training step."""

    step: int
    seconds: float
    """Seconds since training began."""
    figures: dict[str, float]
    """Figures of the update: loss, clipped, gradient, reward, solved, tokens."""
    staleness: float
    """Mean age of the groups in training steps, by the oldest token of each."""
    stalest: int
    dropped: int
    """Number of groups that were too old."""
    waiting: int
    """Number of groups that are ready for the next step."""
    waited_s: float
    """Seconds that the trainer waited for samples."""
    published: list[Published]
    """Versions committed since the step before."""


def train(
    learner: Learner,
    ledger: Ledger,
    rollouts: Rollouts,
    settings: Settings,
    *,
    steps: int | None = None,
    seconds: float | None = None,
) -> Iterator[TrainingStep]:
    """Train for so many steps or seconds, yielding after each step."""
    began = time.monotonic()
    for step in itertools.count(1):
        asked = time.monotonic()
        batch: list[RolloutGroup] = []
        ages: list[int] = []
        dropped, published = 0, []
        while len(batch) < settings.secrets:
            if seconds is not None and time.monotonic() - began >= seconds:
                return
            group = rollouts.take()
            published += ledger.arrived()
            if settings.staleness is not None:
                rollouts.oldest = ledger.since(step - 1 - settings.staleness)
            if group is None:
                if ledger.owed:
                    # otherwise no server would ever sample with weights that are new enough
                    ledger.publish(learner.model, step - 1, {})
                continue
            age = ledger.age(group.oldest, step - 1)
            if settings.staleness is not None and age > settings.staleness:
                dropped += 1
                continue
            batch.append(group)
            ages.append(age)
        waited = time.monotonic() - asked
        figures = learner.step(batch)
        if settings.sync:
            metrics = {name: figures[name] for name in ("solved", "reward", "loss", "clipped")}
            ledger.publish(learner.model, step, {**metrics, "staleness": statistics.fmean(ages)})
        yield TrainingStep(
            step=step,
            seconds=time.monotonic() - began,
            figures=figures,
            staleness=statistics.fmean(ages),
            stalest=max(ages),
            dropped=dropped,
            waiting=rollouts.waiting,
            waited_s=waited,
            published=published,
        )
        if step == steps:
            return
