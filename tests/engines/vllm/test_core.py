"""What runs in the engine core, without vLLM: salts of requests, and what a swap does to them."""

from __future__ import annotations

from collections import deque
from enum import Enum
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from deltawire.engines.live.swap import Apply, Undo
from deltawire.engines.vllm.core import attach


class Request:
    """What of vLLM's request a salt is about: the hash of its first block."""

    def __init__(self, cache_salt: str | None = None) -> None:
        self.cache_salt, self.num_computed_tokens = cache_salt, 0
        self.block_hashes: list[str] = []
        self.hashed = 0
        self.update_block_hashes()

    def update_block_hashes(self) -> None:
        self.block_hashes.append(f"prompt+{self.cache_salt}")
        self.hashed += 1


class PauseState(Enum):
    UNPAUSED, PAUSED_NEW, PAUSED_ALL = range(3)


class Scheduler:
    def __init__(self) -> None:
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.pause_state = PauseState.UNPAUSED

    def set_pause_state(self, state: PauseState) -> None:
        self.pause_state = state

    def _preempt_request(self, request: Request) -> None:
        request.num_computed_tokens = 0
        self.waiting.appendleft(request)


class EngineCore:
    def __init__(self) -> None:
        self.scheduler = Scheduler()
        self.batch_queue: deque[str] = deque()
        self.version = "0"
        self.done: list[str] = []
        self.answers: list[dict[str, Any]] = [{"apply": 0.0, "prove": 0.0}]

    def get_weight_version(self) -> str:
        return self.version

    def set_weight_version(self, version: str) -> None:
        self.version = version

    def preprocess_add_request(self, request: Any) -> tuple[Request, int]:
        return Request(request.cache_salt), 0

    def add_request(self, request: Request) -> None:
        self.scheduler.waiting.append(request)

    def _process_engine_step(self) -> None:
        self.done.append(f"{self.batch_queue.pop()} under {self.version}")

    def collective_rpc(self, method: str, args: tuple[str, ...], kwargs: Any) -> list[dict[str, Any]]:
        assert self.scheduler.pause_state is PauseState.PAUSED_ALL
        self.done.append(type(msgspec.json.decode(args[0], type=Apply | Undo)).__name__)
        return self.answers


@pytest.fixture
def core() -> Any:
    class Own(EngineCore):
        pass

    class OwnScheduler(Scheduler):
        pass

    attach(Own, OwnScheduler, salts=True)
    made = Own()
    made.scheduler = OwnScheduler()
    return made


def asked(core: Any, salt: str | None = None) -> Request:
    request, _ = core.preprocess_add_request(SimpleNamespace(cache_salt=salt))
    core.add_request(request)
    return request


def test_a_prefix_is_shared_within_a_version_and_by_clients_of_one_salt(core: Any) -> None:
    first, second, other = asked(core), asked(core), asked(core, "mine")
    assert first.block_hashes == second.block_hashes != other.block_hashes
    assert first.hashed == 1
    core.deltawire_swap("1", False, [1])
    assert asked(core).block_hashes == first.block_hashes
    assert "1" in first.block_hashes[0]


def test_a_request_that_waited_through_a_swap_is_salted_anew_and_a_running_one_is_not(core: Any) -> None:
    waiting, running = asked(core), asked(core)
    running.num_computed_tokens = 16
    before = list(running.block_hashes)
    core.deltawire_swap("1", False, [1])
    assert running.block_hashes == before != waiting.block_hashes
    assert len(waiting.block_hashes) == 1


def test_a_request_that_was_read_before_a_swap_and_added_after_it_is_salted_anew(core: Any) -> None:
    request, _ = core.preprocess_add_request(SimpleNamespace(cache_salt=None))
    core.deltawire_swap("1", False, [1])
    core.add_request(request)
    assert request.block_hashes == asked(core).block_hashes


def test_what_a_preempted_request_computes_anew_is_of_the_present_version(core: Any) -> None:
    running = asked(core)
    core.scheduler.waiting.clear()
    running.num_computed_tokens = 16
    core.deltawire_swap("1", False, [1])
    core.scheduler._preempt_request(running)
    assert running.block_hashes == asked(core).block_hashes


def test_a_trajectory_may_keep_its_salt(core: Any) -> None:
    turn = asked(core, "keep:game 7")
    core.deltawire_swap("1", False, [1])
    assert asked(core, "keep:game 7").block_hashes == turn.block_hashes == ["prompt+keep:game 7"]


def test_what_is_in_flight_comes_out_under_the_version_that_made_it(core: Any) -> None:
    core.batch_queue.extend(["a", "b"])
    answer = core.deltawire_swap("1", False, [1])
    assert core.done == ["b under 0", "a under 0", "Apply"]
    assert "failure" not in answer
    assert core.scheduler.pause_state is PauseState.UNPAUSED


def test_a_rank_that_fails_leaves_version_and_salts_as_they_were(core: Any) -> None:
    waiting = asked(core)
    before = list(waiting.block_hashes)
    core.answers = [{"apply": 0.0, "prove": 0.0}, {"error": "OSError: broken"}]
    answer = core.deltawire_swap("1", False, [1])
    # the answer to `undo` is an error too
    assert (answer["failure"], answer["lost"]) == ("rank 1: OSError: broken", "rank 1: OSError: broken")
    assert core.done == ["Apply", "Undo"]
    assert (core.version, waiting.block_hashes) == ("0", before)
    assert core.scheduler.pause_state is PauseState.PAUSED_ALL


def test_going_back_to_a_version_does_not_find_what_requests_of_then_computed_since(core: Any) -> None:
    first = asked(core)
    core.scheduler.waiting.clear()
    first.num_computed_tokens = 16
    core.deltawire_swap("1", False, [1])
    core.deltawire_swap("0", False, [1])
    assert asked(core).block_hashes != first.block_hashes


def test_weights_that_are_loaded_anew_have_a_salt_of_their_own(core: Any) -> None:
    waiting = asked(core)
    before = list(waiting.block_hashes)
    core.set_weight_version("1")
    assert waiting.block_hashes != before
    assert asked(core).block_hashes == waiting.block_hashes
