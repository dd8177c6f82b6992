"""Rollout servers as one: asked side by side over HTTP, and no one of them is needed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from deltawire.engines import names

from .errors import ServerRefused, ServerUnavailable
from .sampling import Sample

log = logging.getLogger("deltawire")

REST_S = 1.0
# for a server that failed, before it is asked again
ANSWER_S = 60.0
# a server that says nothing for so long has failed


def versions_of(choice: Mapping[str, Any]) -> list[int]:
    """The versions that made a choice; raises ServerRefused where the server names none."""
    found = names.versions_of(choice)
    if not found:
        raise ServerRefused("a rollout server names no version with its samples; is it one that follows a run?")
    return found


class Fleet:
    """Rollout servers: the one with the least to do is asked, one that failed rests."""

    def __init__(self, urls: Sequence[str], client: httpx.AsyncClient, model: str | None = None) -> None:
        self._servers = [_Server(url.rstrip("/")) for url in urls]
        self._client = client
        self._extra = {"model": model} if model else {}

    async def complete(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[tuple[Sample, list[int]]]:
        """At most so many tokens for each prompt, and the versions that made them; waits while no server is there."""
        # no seed: prompts that are alike must not get samples that are
        body = {
            "prompt": [[*prompt] for prompt in prompts],
            "max_tokens": tokens,
            "temperature": 1.0,  # so that log-probs before and after temperature are the same
            "logprobs": 0,
            "return_token_ids": True,
            **self._extra,
        }
        while True:
            server = min(self._servers, key=lambda server: (server.rests_until > time.monotonic(), server.busy))
            await asyncio.sleep(server.rests_until - time.monotonic())
            server.busy += len(prompts)
            try:
                answer = await self._client.post(f"{server.url}/v1/completions", json=body)
                if answer.status_code < 500:
                    samples = _samples(server.url, answer)
                    server.works()
                    return samples
                server.failed(f"it answered {answer.status_code}: {answer.text[:200]}")
            except (httpx.TransportError, ServerUnavailable) as error:
                server.failed(repr(error))
            finally:
                server.busy -= len(prompts)


@dataclass(slots=True)
class _Server:
    url: str
    busy: int = 0
    rests_until: float = 0.0
    failing: bool = False

    def failed(self, reason: str) -> None:
        if not self.failing:
            log.warning("rollout server %s is away, going on without it: %s", self.url, reason)
        self.failing, self.rests_until = True, time.monotonic() + REST_S

    def works(self) -> None:
        if self.failing:
            log.warning("rollout server %s is back", self.url)
        self.failing = False


def _samples(url: str, answer: httpx.Response) -> list[tuple[Sample, list[int]]]:
    if answer.is_error:
        raise ServerRefused(f"the rollout server {url} answered {answer.status_code}: {answer.text[:300]}")
    choices = sorted(answer.json()["choices"], key=lambda choice: choice["index"])
    if any(choice["finish_reason"] == "abort" for choice in choices):
        raise ServerUnavailable("it is shutting down")
    return [
        (Sample(tuple(choice["token_ids"]), tuple(choice["logprobs"]["token_logprobs"])), versions_of(choice))
        for choice in choices
    ]
