"""Runs in vLLM's engine core, between two steps of the model: the swap on all ranks, and salts of the prefix cache.

`swap` is one call: it lets the step that is running finish, writes the staged version on all ranks, and goes on. Ranks
prove what they wrote; if one of them cannot, all are put back before another token is made. `attach` adds it to vLLM's
`EngineCore`, which every server's core process is.

With salts (DELTAWIRE_KV=version) cached keys and values are found again only by requests that began under the same
weights. A request gets the salt of the moment when its prefill is first scheduled: one that waits during a swap is
salted anew. Every swap makes a new salt, a swap back to an older version too: a running request goes on to fill blocks
under its old salt, with keys and values of newer weights, which no other request may find. A client's own salt is kept
beside that; one that begins with `keep:` is left alone, so that the turns of a trajectory share older entries.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count
from typing import Any

from ..live import Answer, salted, undo_all, write_all

_OWN = "deltawire_own_salt"
"""Attribute of a request: the salt its client gave it."""


def attach(core_class: Any, scheduler_class: Any, *, salts: bool) -> None:
    """Add the swap and, if configured, cache salts to vLLM's EngineCore. May be called more than once."""
    if hasattr(core_class, "deltawire_swap"):
        return
    core_class.deltawire_swap = swap
    core_class.deltawire_undo = undo
    if salts:
        _salt_requests(core_class, scheduler_class)


def _salt_requests(core_class: Any, scheduler_class: Any) -> None:
    preprocess, add = core_class.preprocess_add_request, core_class.add_request
    name, preempt = core_class.set_weight_version, scheduler_class._preempt_request
    swaps = count(1)
    scheduler_class.deltawire_salt = "0"

    def preprocessed(core: Any, request: Any) -> Any:
        # in the thread that reads requests, which hashes their prompts too
        own = request.cache_salt
        request.cache_salt = salted(own, core.scheduler.deltawire_salt)
        made, wave = preprocess(core, request)
        setattr(made, _OWN, own)
        return made, wave

    def added(core: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        _salt(request, core.scheduler.deltawire_salt)
        return add(core, request, *args, **kwargs)

    def preempted(scheduler: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        # what it computes now is computed anew, with the weights of now
        answer = preempt(scheduler, request, *args, **kwargs)
        _salt(request, scheduler.deltawire_salt)
        return answer

    def named(core: Any, version: str) -> None:
        name(core, version)
        core.scheduler.deltawire_salt = f"{version}.{next(swaps)}"
        for request in _waiting(core.scheduler):
            _salt(request, core.scheduler.deltawire_salt)

    core_class.preprocess_add_request = preprocessed
    core_class.add_request = added
    core_class.set_weight_version = named
    scheduler_class._preempt_request = preempted


def swap(core: Any, version: str, clear: bool, staged: list[int]) -> dict[str, Any]:
    """Write what ranks have staged, as `Engine.swap` says. In the answer: `failure` if it was taken back, `lost` if
    that failed too.

    `version` is the name that the weights get; empty, they keep theirs.
    `clear` drops all cached keys and values, those of running requests too.
    """
    scheduler, began = core.scheduler, time.perf_counter()
    before = scheduler.pause_state
    scheduler.set_pause_state(type(before).PAUSED_ALL)
    # what is in flight was computed with the old weights, and is told apart by the version it comes out under
    while core.batch_queue:
        core._process_engine_step()
    stopped = time.perf_counter()
    answer: dict[str, Any] = {}
    try:
        if clear and not core.reset_prefix_cache(reset_running_requests=True, reset_connector=True):
            answer["failure"] = "keys and values of the old weights could not be dropped"
        else:
            if clear:
                core.reset_mm_cache()
                core.reset_encoder_cache()
            answer = write_all(_everywhere(core), staged)
        if "failure" not in answer and version:
            core.set_weight_version(version)
    except Exception as error:
        answer["failure"] = answer["lost"] = f"{type(error).__name__}: {error}"
    if "lost" not in answer:
        scheduler.set_pause_state(before)
    answer |= {"stop": stopped - began, "pause": time.perf_counter() - began}
    return answer


def undo(core: Any, staged: list[int]) -> dict[str, Any]:
    """Put the previous weights back on all ranks, because another engine of the server failed; `lost` if that fails."""
    return undo_all(_everywhere(core), staged)


def _everywhere(core: Any) -> Callable[[str], list[Answer]]:
    return lambda text: core.collective_rpc("deltawire", args=(text,), kwargs={})


def _waiting(scheduler: Any) -> list[Any]:
    """Requests of which nothing has been computed yet."""
    queues = (getattr(scheduler, name, ()) for name in ("waiting", "skipped_waiting", "kv_holding_waiting"))
    return [request for queue in queues for request in queue if request.num_computed_tokens == 0]


def _salt(request: Any, salt: str) -> None:
    """Set the present salt on a request of which nothing is computed yet."""
    wanted = salted(getattr(request, _OWN, None), salt)
    if request.cache_salt != wanted:
        request.cache_salt = wanted
        request.block_hashes.clear()
        request.update_block_hashes()
