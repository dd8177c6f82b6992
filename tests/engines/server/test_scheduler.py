"""The scheduler against transformers' own generate, and what sampling promises. No HTTP here."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from serving import Brake, nudge, tiny_model
from transformers import Qwen3ForCausalLM

from deltawire.engines.options import ServerOptions
from deltawire.engines.server.scheduler import QueueFull, Scheduler
from deltawire.engines.server.sequence import Sampling, Sequence

EOS = frozenset({2})


class Bench:
    """A scheduler without a server around it."""

    def __init__(self, model: Any, **options: Any) -> None:
        self.version: int | None = 0
        self.done: dict[Sequence, threading.Event] = {}
        self.scheduler = Scheduler(model, lambda: self.version, ServerOptions(**{"max_batch": 8, **options}), 256)
        self.scheduler.start()

    def add(self, prompts: list[list[int]], sampling: Sampling, **more: Any) -> list[Sequence]:
        made = [Sequence(p, sampling, i, None, EOS, False, self._ended, **more) for i, p in enumerate(prompts)]
        self.done.update((sequence, threading.Event()) for sequence in made)
        self.scheduler.add(made)
        return made

    def run(self, prompts: list[list[int]], sampling: Sampling) -> list[Sequence]:
        return self.wait(self.add(prompts, sampling))

    def wait(self, sequences: list[Sequence]) -> list[Sequence]:
        for sequence in sequences:
            assert self.done[sequence].wait(120)
        return sequences

    def _ended(self, sequence: Sequence, delta: object) -> None:
        self.done[sequence].set()


@contextmanager
def bench(model: Any = None, **options: Any) -> Iterator[Bench]:
    made = Bench(tiny_model() if model is None else model, **options)
    try:
        yield made
    finally:
        made.scheduler.drain(0)


def prompts_of(count: int, seed: int = 0, longest: int = 40) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 30) for _ in range(rng.randint(1, longest))] for _ in range(count)]


# ── weights that change ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("policy", ["clear", "keep"])
def test_every_token_is_counted_to_the_weights_that_made_it(policy: str) -> None:
    model = tiny_model().double()
    states: dict[int, dict[str, torch.Tensor]] = {}

    def remember(version: int) -> None:
        states[version] = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    remember(0)
    prompts = prompts_of(6)
    with bench(model, kv=policy) as it:
        brake = Brake(it.scheduler, 15 * len(prompts))
        sequences = it.add(prompts, Sampling(120, temperature=0, ignore_eos=True))
        for version in range(1, 6):
            brake.wait()
            with it.scheduler.hold():
                assert not it.scheduler._stepping
                nudge(model, version, share=0.5)
                it.version = version
                remember(version)
            brake.release(15 * len(prompts))
        brake.wait()
        brake.release()
        it.wait(sequences)
        recomputed = it.scheduler.counts.recomputed_tokens
    assert (recomputed > 0) == (policy == "clear")
    for sequence in sequences:
        assert [version for version, _ in sequence.spans] == sorted({version for version, _ in sequence.spans})
        assert sum(count for _, count in sequence.spans) == len(sequence.tokens) == 120
        if policy == "clear":
            assert_made_by(tiny_model().double(), states, sequence)
    assert len(sequences[0].spans) == 6


def assert_made_by(model: Qwen3ForCausalLM, states: dict[int, dict[str, torch.Tensor]], sequence: Sequence) -> None:
    """With nothing kept, each greedy token is the likeliest one under all of the weights it is counted to."""
    done = 0
    for version, count in sequence.spans:
        model.load_state_dict(states[version])
        with torch.no_grad():
            logits = model(torch.tensor([sequence.prompt + sequence.tokens])).logits[0]
        begin = len(sequence.prompt) + done - 1
        assert logits[begin : begin + count].argmax(-1).tolist() == sequence.tokens[done : done + count]
        done += count


def test_weights_without_a_name_make_no_token() -> None:
    with bench() as it:
        it.version = None
        sequence = it.add([[5, 6]], Sampling(4, ignore_eos=True))[0]
        assert not it.done[sequence].wait(0.2)
        assert not sequence.tokens
        it.version = 7
        it.scheduler.wake()
        it.wait([sequence])
    assert sequence.spans == [[7, 4]]


# ── control ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_pause_abort_ends_what_is_there_and_holds_what_comes() -> None:
    with bench() as it:
        brake = Brake(it.scheduler, 20)
        there = it.add(prompts_of(12), Sampling(200, ignore_eos=True))
        brake.wait()
        it.scheduler.pause("abort")
        brake.release()
        assert it.scheduler.paused
        it.wait(there)
        assert {s.finish_reason for s in there} == {"abort"}
        late = it.add([[5]], Sampling(3, ignore_eos=True))[0]
        assert not it.done[late].wait(0.1)
        it.scheduler.resume()
        assert it.wait([late])[0].finish_reason == "length"


def test_pause_wait_lets_what_is_there_finish() -> None:
    with bench() as it:
        there = it.add(prompts_of(12), Sampling(60, ignore_eos=True))
        it.scheduler.pause("wait")
        assert all(s.finish_reason == "length" for s in there)
        late = it.add([[5]], Sampling(3))[0]
        assert not it.done[late].wait(0.1)
        it.scheduler.resume()
        it.wait([late])


@pytest.mark.parametrize("clear_cache", [True, False])
def test_pause_keep_goes_on_where_it_was(clear_cache: bool) -> None:
    model = tiny_model().double()
    with bench(model) as it:
        brake = Brake(it.scheduler, 20)
        there = it.add(prompts_of(5), Sampling(100, temperature=0, ignore_eos=True))
        brake.wait()
        it.scheduler.pause("keep", clear_cache=clear_cache)
        brake.release()
        before = [len(s.tokens) for s in there]
        assert not it.done[there[0]].wait(0.1)
        assert [len(s.tokens) for s in there] == before
        it.scheduler.resume()
        it.wait(there)
        undisturbed = it.run(prompts_of(5), Sampling(100, temperature=0, ignore_eos=True))
    assert [s.tokens for s in there] == [s.tokens for s in undisturbed]


def test_cancelled_sequences_leave_and_others_stay() -> None:
    model = tiny_model().double()
    with bench(model) as it:
        expected = [s.tokens for s in it.run(prompts_of(14), Sampling(60, temperature=0, ignore_eos=True))]
        brake = Brake(it.scheduler, 20)
        again = it.add(prompts_of(14), Sampling(60, temperature=0, ignore_eos=True))
        brake.wait()
        it.scheduler.cancel([again[2], again[13]])
        brake.release()
        it.wait(again)
    assert again[13].finish_reason == "abort"
    for i, sequence in enumerate(again):
        assert sequence.tokens == expected[i][: len(sequence.tokens)]
        assert i in (2, 13) or len(sequence.tokens) == 60


def test_the_queue_is_bounded_and_takes_all_or_none() -> None:
    with bench(max_batch=2, max_queue=5) as it:
        it.scheduler.pause("keep")
        it.add([[5]] * 4, Sampling(2))
        with pytest.raises(QueueFull):
            it.add([[5]] * 2, Sampling(2))
        assert it.scheduler.waiting == 4


def test_a_failing_step_ends_its_sequences_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    with bench() as it:
        step, failures = it.scheduler.batch.step, iter([True])

        def fails_once(*args: Any) -> Any:
            if next(failures, False):
                raise MemoryError("no room")
            return step(*args)

        monkeypatch.setattr(it.scheduler.batch, "step", fails_once)
        assert {s.finish_reason for s in it.run([[5], [6]], Sampling(5, ignore_eos=True))} == {"error"}
        assert it.run([[5]], Sampling(5, ignore_eos=True))[0].finish_reason == "length"
