"""TRL's stock rollout worker, with samples labelled by the version that the server reports for them.

The worker's loop runs in a child process, talks to the server and marks each sample there; the trainer takes samples
from a queue in its own process. So the loop marks them with the version of the run, the oldest that had a part in them,
and the queue translates to the trainer's count, which is what its staleness limit is about. In the other direction the
number that the trainer shares with the loop becomes the oldest version that it would accept, and the loop asks servers
for no older one: a server that is behind catches up first, instead of making samples that are thrown away.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import threading
import time
from contextvars import ContextVar
from queue import Empty
from typing import Any

import aiohttp
import requests
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker, _AsyncRolloutLoop

from .. import Publisher
from ..errors import Misconfigured
from .live import names
from .trl import Syncs, versions_in

log = logging.getLogger("deltawire")

SAY_EVERY = 10.0
"""Seconds between two log lines about a server that is not ready."""
GONE_S = 600.0
"""How long requests wait for a server that does not answer any more; then TRL's own attempts begin."""

_oldest: ContextVar[list[int] | None] = ContextVar("deltawire_oldest", default=None)


class VersionedLoop(_AsyncRolloutLoop):
    """Requests the model by the server's name for it, and records the versions in its answers for each rollout."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._groups: dict[int, int] = {}
        """Oldest version in the answers so far, by group."""
        self._served = ""
        """Name of the model at the server, once it is known."""
        self._asking = asyncio.Lock()
        self._gone_since: float | None = None

    def run(self) -> None:
        threading.Thread(target=_end_with_trainer, name="deltawire-trainer", daemon=True).start()
        super().run()

    async def _served_name(self, name: str) -> str:
        """The trainer's name for the model if the server knows it, else the server's own."""
        if not self._served:
            async with self.session.get(f"{self.vllm_server_url}/v1/models") as response:
                response.raise_for_status()
                names = [model["id"] for model in (await response.json())["data"]]
            self._served = name if name in names or not names else names[0]
        return self._served

    async def _post(self, path: str, payload: dict[str, Any], *args: Any, **options: Any) -> dict[str, Any]:
        try:
            if self.lora_name is None and "model" in payload:
                payload = {**payload, "model": await self._served_name(payload["model"])}
                # of every request from now on: it never falls
                self.session.headers[names.MIN_VERSION_HEADER] = str(self.model_version)
            answer: dict[str, Any] = await super()._post(path, payload, *args, **options)
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError):
            # TRL asks again, but by itself only every 16 seconds after a while
            await self._wait_for_answer()
            raise
        seen = _oldest.get()
        if seen is not None:
            seen.extend(versions_in(answer))
        return answer

    async def _wait_for_answer(self) -> None:
        """Return once the server answers, or has not answered for GONE_S."""
        # one request finds out for all
        async with self._asking:
            while not await self._answers():
                now = time.monotonic()
                if self._gone_since is None:
                    log.warning("the server at %s is gone; waiting for it up to %.0f s", self.vllm_server_url, GONE_S)
                    self._gone_since = now
                if now - self._gone_since > GONE_S:
                    return
                await asyncio.sleep(1.0)
            if self._gone_since is not None:
                waited, self._gone_since = time.monotonic() - self._gone_since, None
                log.warning("the server at %s is back after %.0f s", self.vllm_server_url, waited)

    async def _answers(self) -> bool:
        try:
            limit = aiohttp.ClientTimeout(total=5)
            async with self.session.get(f"{self.vllm_server_url}/v1/models", timeout=limit) as response:
                return bool(response.status < 500)
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError):
            return False

    async def _generate_one(self, *args: Any, group_id: int, **options: Any) -> Any:
        seen: list[int] = []
        # each rollout is a task of its own, so this is its own context
        _oldest.set(seen)
        result = await super()._generate_one(*args, group_id=group_id, **options)
        if seen:
            self._groups[group_id] = min(*seen, self._groups.get(group_id, seen[0]))
        return result

    async def _score_group(self, group: Any) -> Any:
        # -1 is what a server that names no version gets: older than everything
        group.model_version = self._groups.pop(group.group_id, -1)
        return await super()._score_group(group)


def _end_with_trainer() -> None:
    """End this process if the trainer was killed: it would go on asking servers for samples."""
    trainer = multiprocessing.parent_process()
    if trainer is not None:
        trainer.join()
        os._exit(1)


class AdapterLoop(VersionedLoop):
    """Requests an adapter by its name, and never the base model in its place."""

    async def _served_name(self, name: str) -> str:
        return name


class TrueVersions:
    """The worker's queue, with versions of the run translated to the trainer's count."""

    def __init__(self, worker: AsyncRolloutWorker, syncs: Syncs) -> None:
        self._worker, self._queue, self._syncs = worker, worker.rollout_buffer, syncs

    @classmethod
    def over(
        cls, worker: AsyncRolloutWorker, syncs: Syncs, max_staleness: int | None, adapter_name: str | None = None
    ) -> Any:
        """Let a worker mark samples with versions of the run and, with a limit, ask servers for versions within it.

        With a name, the samples are those of this adapter. The worker of TRL's distillation trainer cannot be told
        which loop to run: its own queue is returned.
        """
        if type(worker).__module__.startswith("trl.experimental.async_distillation."):
            log.warning(
                "TRL's distillation worker marks samples with the trainer's own count of syncs, which is ahead of the "
                "version that made them while uploads run: leave room in max_staleness"
            )
            return worker.rollout_buffer
        if not isinstance(worker, AsyncRolloutWorker):
            raise TypeError(
                f"attach() knows TRL's own AsyncRolloutWorker, not {type(worker).__name__}: "
                "let yours mark samples with the version in the server's answers"
            )
        # before start(): the child gets the loop to run
        worker._loop_cls = VersionedLoop
        if adapter_name is not None:
            worker._loop_cls = AdapterLoop
            worker._loop_kwargs["model_name"] = adapter_name

        def update(sync: int) -> None:
            # the loop needs no count of syncs, only the oldest version that the trainer would accept
            if max_staleness is not None:
                worker.model_version = syncs.since(sync - max_staleness)

        if worker._loop_kwargs.get("lora_name") is None:
            worker.update_model_version = update
        return cls(worker, syncs)

    def get(self, *args: Any, **options: Any) -> Any:
        try:
            sample = self._queue.get(*args, **options)
        except Empty:
            self._check_process()
            raise
        sample.model_version = self._syncs.sync_of(sample.model_version)
        return sample

    def _check_process(self) -> None:
        """Raise RuntimeError if the worker's process was killed, as by a system without memory."""
        process = self._worker._process
        if process is not None and (code := process.exitcode) is not None and code < 0:
            # TRL's stop() would wait without end for the process to take note of an event
            self._worker._process = None
            raise RuntimeError(f"TRL's rollout worker was killed by signal {-code}: start the trainer again")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)


def require_servable(model: Any) -> None:
    """Raise Misconfigured if vLLM cannot serve the adapter of a PEFT model beside its base model."""
    from trl.experimental.async_grpo.async_grpo_trainer import validate_lora_for_vllm_sync

    try:
        validate_lora_for_vllm_sync(model)
    except ValueError as error:
        raise Misconfigured(f'servers cannot take this adapter alone, pass peft="merged": {error}') from None


def wait_for_server(
    url: str, timeout: float, publisher: Publisher, poll_interval_s: float = 2.0, adapter_name: str | None = None
) -> None:
    """Wait until a server is ready, as TRL's client does, and log what it is waiting for."""
    began, said = time.monotonic(), -SAY_EVERY
    while True:
        missing = _missing(url, adapter_name)
        waited = time.monotonic() - began
        if missing is None:
            if said >= 0:
                log.warning("the server at %s is ready after %.0f s", url, waited)
            return
        version = "has no version yet" if publisher.version is None else f"is at version {publisher.version}"
        state = f"it {missing}; {publisher.url} {version}"
        if waited >= timeout:
            start = f"`deltawire serve {publisher.url}`"
            if adapter_name is not None:
                start = f"`deltawire serve --engine vllm MODEL --adapter {adapter_name}={publisher.url}`"
            raise TimeoutError(
                f"no server at {url} within {timeout:.0f} s: {state}. Start one with {start}, or give it longer by "
                "vllm_server_timeout"
            )
        if waited - said >= SAY_EVERY:
            log.warning("waiting for the server at %s, %.0f s of %.0f: %s", url, waited, timeout, state)
            said = waited
        time.sleep(poll_interval_s)


def _missing(url: str, adapter_name: str | None = None) -> str | None:
    """Return why a server is not ready; None if it is."""
    try:
        for route in ("/health",) if adapter_name is None else ("/health", "/v1/models"):
            answer = requests.get(f"{url}{route}", timeout=5)
            if not answer.ok:
                return f"answers {answer.status_code} to {route}: {answer.text[:300]}"
        if adapter_name is None:
            return None
        names = [model["id"] for model in answer.json()["data"]]
    except requests.RequestException as error:
        return f"does not answer ({type(error).__name__})"
    return None if adapter_name in names else f"serves no {adapter_name!r}, only {', '.join(names)[:300]}"
