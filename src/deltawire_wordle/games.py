"""Wordle as a task of grpo.py: groups of games with one secret, in sessions of an environment that stay open."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack

from .env_client import EnvClient
from .errors import ServerUnavailable
from .fleet import REST_S, ServerPool
from .grpo import Rollout, RolloutGroup, Settings
from .layout import BOS, GUESS_TOKENS, parse, spell

log = logging.getLogger("deltawire")


class Games:
    """A `Task`. If the environment is unavailable, its workers retry until it is back."""

    def __init__(self, environment: str, settings: Settings) -> None:
        self._environment, self._games = environment, settings.games
        dice = random.Random(settings.seed)
        self._seeds = (dice.getrandbits(62) for _ in itertools.count())
        self._unavailable = False

    async def groups(self, fleet: ServerPool) -> AsyncGenerator[RolloutGroup, None]:
        while True:
            try:
                async with AsyncExitStack() as stack:
                    sessions = [
                        await stack.enter_async_context(EnvClient(self._environment)) for _ in range(self._games)
                    ]
                    if self._unavailable:
                        self._unavailable = False
                        log.warning("the environment %s is available again", self._environment)
                    while True:
                        yield await self._group(fleet, sessions)
            except ServerUnavailable as error:
                # the games of lost sessions are lost too
                if not self._unavailable:
                    self._unavailable = True
                    log.warning("retrying until the environment is available: %s", error)
                await asyncio.sleep(REST_S)

    async def _group(self, fleet: ServerPool, sessions: Sequence[EnvClient]) -> RolloutGroup:
        seed = next(self._seeds)
        await asyncio.gather(*(session.reset(seed) for session in sessions))
        rollouts = [Rollout() for _ in sessions]
        for rollout in rollouts:
            rollout.add_context([BOS])
        going = [*zip(rollouts, sessions, strict=True)]
        while going:
            samples = await fleet.complete([rollout.tokens for rollout, _ in going], GUESS_TOKENS)
            results = await asyncio.gather(
                *(session.step(parse(sample.tokens)) for (_, session), (sample, _) in zip(going, samples, strict=True))
            )
            for (rollout, _), (sample, versions), result in zip(going, samples, results, strict=True):
                rollout.add_sample(sample, versions)
                if result.done:
                    rollout.reward, rollout.solved = result.reward or 0.0, result.observation.solved
                else:
                    rollout.add_context(spell(result.observation.feedback))
            going = [one for one, result in zip(going, results, strict=True) if not result.done]
        return RolloutGroup(rollouts)
