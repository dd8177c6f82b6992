"""Completions from several rollout servers over HTTP; no single one of them is needed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from .errors import ServerRefused, ServerUnavailable
from .sampling import Sample

log = logging.getLogger("deltawire")

REST_S = 1.0
"""Seconds until a server that failed is asked again."""
ANSWER_S = 60.0
"""Seconds after which a server that does not answer has failed."""


def versions_of(choice: Mapping[str, Any]) -> list[int]:
    """Return the versions that made a choice; raises ServerRefused if the server names none."""
    found = [span.get("version") for span in choice.get("weight_versions") or ()]
    if not found or not all(isinstance(version, int) for version in found):
        raise ServerRefused("a rollout server names no version with its samples; is it one that follows a run?")
    return found


class ServerPool:
    """Several rollout servers. Each request goes to the least busy one; one that failed is skipped for REST_S."""

    def __init__(
        self,
        urls: Sequence[str],
        client: httpx.AsyncClient,
        model: str | None = None,
        oldest: Callable[[], int] = lambda: 0,
    ) -> None:
        """`oldest` returns the oldest version to sample with now: a server behind it catches up first."""
        self._servers = [_Server(url.rstrip("/")) for url in urls]
        self._client, self._oldest = client, oldest
        self._extra = {"model": model} if model else {}

    async def complete(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[tuple[Sample, list[int]]]:
        """Return a sample of up to so many tokens for each prompt, and the versions that made it.

        Waits while no server is available.
        """
        # no seed: equal prompts must not get equal samples
        body = {
            "prompt": [[*prompt] for prompt in prompts],
            "max_tokens": tokens,
            "temperature": 1.0,  # so that log-probs before and after temperature are the same
            "logprobs": 0,
            "return_token_ids": True,
            **self._extra,
        }
        while True:
            server = min(self._servers, key=lambda server: (server.skipped_until > time.monotonic(), server.busy))
            await asyncio.sleep(server.skipped_until - time.monotonic())
            server.busy += len(prompts)
            try:
                bound = {"deltawire-min-version": str(self._oldest())}
                answer = await self._client.post(f"{server.url}/v1/completions", json=body, headers=bound)
                # 409: it cannot catch up in time
                if answer.status_code < 500 and answer.status_code != 409:
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
    skipped_until: float = 0.0
    failing: bool = False

    def failed(self, reason: str) -> None:
        if not self.failing:
            log.warning("rollout server %s is unavailable, continuing without it: %s", self.url, reason)
        self.failing, self.skipped_until = True, time.monotonic() + REST_S

    def works(self) -> None:
        if self.failing:
            log.warning("rollout server %s is available again", self.url)
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
