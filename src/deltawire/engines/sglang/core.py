"""Runs in SGLang's scheduler, one per rank, between two steps of the model: the swap, and salts of the prefix cache.

Calls come as control requests, which the first rank receives and sends on to the others: all of them handle a call
before the same step. SGLang has no request of its own for plugins; these are its `DumperControlReqInput`, whose body is
free, with a method of our own. All ranks gather the answers of all, so that each knows whether one has failed.

With salts (unless DELTAWIRE_KV=keep) cached keys and values are found again only by requests that began under the same
weights: see ../vllm/core.py. SGLang's name for a salt is `extra_key`; a client keeps its entries across versions with a
`cache_salt` or an `extra_key` that begins with `keep:`.
"""

from __future__ import annotations

import hmac
import logging
import os
import time
from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any

from ..live import Answer, salted, write_all
from . import NAME, SECRET, adapter_worker

log = logging.getLogger("deltawire")

_OWN = "deltawire_own_key"
"""Attribute of a request: the `extra_key` its client gave it."""

_PROCESSED: Any = SimpleNamespace(reqs=[], has_grammar=False), SimpleNamespace(grammar_advanced=True)
"""Takes the place of a batch and its result in SGLang's queue, once the result was processed ahead of its turn."""


def handle(original: Callable[[Any, Any], Any], scheduler: Any, request: Any) -> Any:
    """Answer our calls; pass on SGLang's own, and those of a client that cannot know the secret."""
    body = dict(request.body)
    known = hmac.compare_digest(str(body.pop("secret", "")).encode(), os.environ.get(SECRET, "").encode())
    if request.method != NAME or not known or SECRET not in os.environ:
        return original(scheduler, request)
    from sglang.srt.managers.io_struct import DumperControlReqOutput

    if not hasattr(scheduler, "deltawire"):
        scheduler.deltawire = Core(scheduler)
    answers = scheduler.deltawire.call(**body)
    scheduler.ipc_channels.send_to_tokenizer.send_output(
        DumperControlReqOutput(success=True, response=answers), request
    )
    return None


def hold(result: Any, scheduler: Any) -> None:
    """Hold generation from the start on, until a follower has named the weights: where nothing follows the run (a gRPC
    server, an offline engine), nothing is served either."""
    scheduler._engine_paused = True
    log.info("generation is held until the HTTP server of this engine has found out which version its weights are")


def process(original: Callable[..., Any], scheduler: Any, batch: Any, result: Any) -> Any:
    """Process the result of a batch, unless `Core.drain` has done so."""
    return None if batch is _PROCESSED[0] else original(scheduler, batch, result)


def salt(scheduler: Any, request: Any, *args: Any, **kwargs: Any) -> None:
    """Set the present salt on a request that is put into the queue; again when it was retracted, and starts anew."""
    if not hasattr(request, _OWN):
        setattr(request, _OWN, request.extra_key)
    present = getattr(scheduler, "deltawire_salt", "0")
    request.extra_key = salted(getattr(request, _OWN), present, request.cache_salt)


class Core:
    """One rank of a scheduler, and the swap of all of them."""

    def __init__(self, scheduler: Any) -> None:
        from sglang.srt.model_loader.utils import set_default_torch_dtype
        from sglang.srt.runtime_context import get_parallel

        from ..live import Rank
        from .guard import problems_of
        from .hooks import hooked_layers

        self._scheduler, self._parallel = scheduler, get_parallel()
        runner = scheduler.tp_worker.model_runner
        self._rank = Rank(
            runner.model,
            self._parallel.tp_rank,
            problems=lambda model: problems_of(model, scheduler.server_args, scheduler.model_config),
            hooks=hooked_layers,
            # as while SGLang loads weights and processes them
            loading=lambda: set_default_torch_dtype(scheduler.model_config.dtype),
            reload=self._reload,
        )
        self._swaps = count(1)

    def call(self, operation: str, arguments: dict[str, Any]) -> list[Answer]:
        """Call an operation on all ranks; every one of them runs this. Returns their answers in order, or one of all
        together."""
        operations: dict[str, Callable[..., list[Answer]]] = {
            "rank": self._everywhere,
            "adapter": lambda **what: self._gather(adapter_worker.call(self._scheduler, **what)),
            "swap": lambda **what: [self._swap(**what)],
            "name": lambda **what: [self._name(**what)],
        }
        return operations[operation](**arguments)

    # ── what all ranks do together ───────────────────────────────────────────────────────────────────────────────────

    def _swap(self, version: str, clear: bool, staged: list[int]) -> Answer:
        """Write what is staged, as `Engine.swap` says. `clear` drops all cached keys and values, those of running
        requests too."""
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        scheduler, began = self._scheduler, time.perf_counter()
        paused = scheduler._engine_paused
        self._drain()
        stopped = time.perf_counter()
        cleared = self._gather(self._clear()) if clear else []
        if failed := [f"rank {rank}: {each['error']}" for rank, each in enumerate(cleared) if "error" in each]:
            answer: Answer = {"failure": failed[0]}
        else:
            answer = write_all(self._everywhere, staged)
        if "failure" not in answer and version:
            self._name(version)
        if "lost" in answer:
            scheduler._engine_paused = True
        elif clear and not paused:
            scheduler.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))
        return answer | {"stop": stopped - began, "pause": time.perf_counter() - began}

    def _name(self, version: str) -> Answer:
        scheduler = self._scheduler
        scheduler.record_weight_version_change(new_version=version)
        scheduler.deltawire_salt = f"{version}.{next(self._swaps)}"
        for request in scheduler.waiting_queue:
            if hasattr(request, _OWN):
                salt(scheduler, request)
        return {}

    def _clear(self) -> Answer:
        """Stop, send running requests back to the queue, and drop all keys and values."""
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        try:
            if self._scheduler.grammar_manager.grammar_queue:
                return {"error": "requests wait for their grammar: keys and values cannot be dropped now"}
            self._scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
            dropped = self._scheduler.flush_cache(empty_cache=False)
        except Exception as error:
            log.exception("cached keys and values could not be dropped")
            return {"error": f"{type(error).__name__}: {error}"}
        return {} if dropped else {"error": "keys and values of the old weights could not be dropped"}

    def _drain(self) -> None:
        """Finish the batch in flight. With SGLang's overlap its result waits for the next step to begin: its tokens
        were made with the old weights, and are labelled so only if they are processed now."""
        queue = self._scheduler.result_queue
        for _ in range(len(queue)):
            batch, result = queue.popleft()
            self._scheduler.process_batch_result(batch, result)
            # the loop takes one entry for each batch that it has launched
            queue.append(_PROCESSED)

    # ── each rank by itself ──────────────────────────────────────────────────────────────────────────────────────────

    def _everywhere(self, text: str) -> list[Answer]:
        return self._gather(self._rank.call(text))

    def _gather(self, mine: Answer) -> list[Answer]:
        """The answers of all ranks, on each of them."""
        from torch import distributed

        if self._parallel.tp_size == 1:
            return [mine]
        answers: list[Any] = [None] * self._parallel.tp_size
        distributed.all_gather_object(answers, mine, group=self._parallel.tp_group.cpu_group)
        return answers

    def _reload(self, folder: str) -> None:
        """Have SGLang load a checkpoint folder. It tries to load the old one if that fails, and says no more than that:
        the weights are no known version then."""
        updater = self._scheduler.tp_worker.model_runner.weight_updater
        done, message = updater.update_weights_from_disk(folder, "auto")
        if not done:
            raise RuntimeError(message)
