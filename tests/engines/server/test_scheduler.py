"""The scheduler against transformers' own generate, and what sampling promises. No HTTP here."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from serving import generate, nudge, tiny_model, tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3ForCausalLM

from deltawire.core.errors import SchemaMismatch
from deltawire.engines.server.batch import require_batchable
from deltawire.engines.server.sampling import draw
from deltawire.engines.server.scheduler import Limits, QueueFull, Scheduler
from deltawire.engines.server.sequence import Sampling, Sequence, TextStream

EOS = frozenset({2})


class Bench:
    """A scheduler without a server around it."""

    def __init__(self, model: Any, **options: Any) -> None:
        self.version: int | None = 0
        self.done: dict[Sequence, threading.Event] = {}
        options = {"limits": Limits(max_batch=8, max_model_len=256), **options}
        self.scheduler = Scheduler(model, lambda: self.version, **options)
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
            assert self.done[sequence].wait(60)
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


def llama() -> LlamaForCausalLM:
    torch.manual_seed(1)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=35, max_position_embeddings=256, eos_token_id=2, **shape)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.ndim > 1 else 1)
    return model


@pytest.mark.parametrize("make", [tiny_model, llama])
def test_batched_greedy_tokens_are_those_of_generate(make: Any) -> None:
    # float64, so that rounding decides nothing and every token must agree
    model = make().double()
    require_batchable(model, "test")
    prompts = prompts_of(14)
    with bench(model) as it:
        first = it.add(prompts[:5], Sampling(16, temperature=0))
        it.wait(first[:1])
        # these join a batch that runs
        rest = it.add(prompts[5:], Sampling(16, temperature=0))
        found = it.wait(first + rest)
    for sequence, prompt in zip(found, prompts, strict=True):
        assert sequence.tokens == generate(model, prompt, 16)
        assert sequence.finish_reason == ("stop" if sequence.tokens[-1] == 2 else "length")
        assert sequence.spans == [[0, len(sequence.tokens)]]


def test_little_memory_only_makes_it_slower() -> None:
    model = tiny_model().double()
    with bench(model) as roomy:
        expected = [s.tokens for s in roomy.run(prompts_of(12), Sampling(20, temperature=0))]
        position = roomy.scheduler.batch.position_bytes
    with bench(model, limits=Limits(max_batch=8, max_model_len=256, kv_memory=position * 64)) as tight:
        assert not tight.scheduler.fits(65)
        assert [s.tokens for s in tight.run(prompts_of(12), Sampling(20, temperature=0))] == expected


def test_a_seed_gives_the_same_tokens_whoever_else_is_there() -> None:
    prompt = prompts_of(1)[0]
    wish = Sampling(30, temperature=0.8, top_p=0.9, seed=11, ignore_eos=True)
    with bench() as it:
        alone = it.run([prompt], wish)[0].tokens
        crowd = it.add(prompts_of(20, seed=5), Sampling(25, seed=3))
        amid = it.run([prompt], wish)[0].tokens
        other = it.run([prompt], replace(wish, seed=12))[0].tokens
        it.wait(crowd)
    assert alone == amid
    assert other != alone


@pytest.mark.parametrize(
    "wish",
    [Sampling(1), Sampling(1, temperature=0.5), Sampling(1, top_k=4), Sampling(1, temperature=1.5, top_p=0.7),
     Sampling(1, min_p=0.2)],
)  # fmt: skip
def test_tokens_are_drawn_from_the_distribution(wish: Sampling) -> None:
    logits = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -1.0, -3.0, 1.2])
    shares = (logits.double() / wish.temperature).softmax(0)
    order = shares.argsort(descending=True).tolist()
    kept, before = [], 0.0
    for rank, token in enumerate(order):
        if (wish.top_k and rank >= wish.top_k) or before >= wish.top_p or shares[token] < wish.min_p * shares[order[0]]:
            break
        kept.append(token)
        before += float(shares[token])
    expected = {token: float(shares[token]) / before for token in kept}
    count = 4000
    rows = [Sequence([1], replace(wish, seed=i), 0, None, EOS, False, print) for i in range(count)]
    found = Counter(token for token, _, _ in draw(logits.expand(count, -1), rows, "raw_logprobs"))
    assert set(found) <= set(expected)
    chi2 = sum((found[token] - count * share) ** 2 / (count * share) for token, share in expected.items())
    # the numbers are seeded, so this is no lottery; 30 is beyond the 99.9 % point of 8 degrees of freedom
    assert chi2 < 30


def test_logprobs_are_those_of_the_model_raw_or_as_drawn_from() -> None:
    model = tiny_model()
    prompt = prompts_of(1)[0]
    wish = Sampling(12, temperature=0.7, top_k=5, seed=1, logprobs=3)
    found = {}
    for mode in ("raw_logprobs", "processed_logprobs"):
        with bench(model, logprobs_mode=mode) as it:
            found[mode] = it.run([prompt], wish)[0]
    raw, processed = found.values()
    assert raw.tokens == processed.tokens
    with torch.no_grad():
        logits = model(torch.tensor([prompt + raw.tokens])).logits[0, len(prompt) - 1 : -1]
    plain = logits.log_softmax(-1)
    cut = (logits / 0.7).masked_fill(logits < logits.topk(5).values[:, -1:], -torch.inf).log_softmax(-1)
    for i, token in enumerate(raw.tokens):
        assert raw.logprobs[i] == pytest.approx(float(plain[i, token]), abs=1e-4)
        assert processed.logprobs[i] == pytest.approx(float(cut[i, token]), abs=1e-4)
        assert [t for t, _ in raw.tops[i]] == plain[i].topk(3).indices.tolist()


def test_min_tokens_stop_tokens_and_ignored_ends() -> None:
    model = tiny_model()
    prompt = prompts_of(1)[0]
    with torch.no_grad():
        model.lm_head.weight[2] *= 50  # the end is always near
    with bench(model) as it:
        few = it.run([prompt] * 8, Sampling(20, seed=None))
        assert any(s.finish_reason == "stop" and s.tokens[-1] == 2 for s in few)
        for s in it.run([prompt] * 8, Sampling(20, min_tokens=9)):
            assert 2 not in s.tokens[:9]
            assert len(s.tokens) >= 9
        assert all(len(s.tokens) == 20 for s in it.run([prompt] * 4, Sampling(20, ignore_eos=True)))
        stopped = it.run([prompt], Sampling(20, temperature=0, ignore_eos=True, stop_token_ids=tuple(range(35))))[0]
        assert (len(stopped.tokens), stopped.finish_reason, stopped.stop_reason) == (1, "stop", stopped.tokens[0])


# ── weights that change ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("policy", ["clear", "keep"])
def test_every_token_is_counted_to_the_weights_that_made_it(policy: str) -> None:
    model = tiny_model().double()
    states: dict[int, dict[str, torch.Tensor]] = {}

    def remember(version: int) -> None:
        states[version] = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    remember(0)
    prompts = prompts_of(6)
    with bench(model, kv_policy=policy) as it:
        sequences = it.add(prompts, Sampling(120, temperature=0, ignore_eos=True))
        for version in range(1, 6):
            wait_for(lambda: sequences[0].length > len(prompts[0]) + 15 * version)  # noqa: B023
            with it.scheduler.hold():
                assert not it.scheduler._stepping
                nudge(model, version, share=0.5)
                it.version = version
                remember(version)
        it.wait(sequences)
        recomputed = it.scheduler.counts.recomputed_tokens
    assert (recomputed > 0) == (policy == "clear")
    for sequence in sequences:
        assert [version for version, _ in sequence.spans] == sorted({version for version, _ in sequence.spans})
        assert sum(count for _, count in sequence.spans) == len(sequence.tokens) == 120
        if policy == "clear":
            assert_made_by(tiny_model().double(), states, sequence)
    assert len(sequences[0].spans) > 3


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


def wait_for(condition: Any, seconds: float = 60) -> None:
    tick = threading.Event()
    for _ in range(int(seconds / 0.001)):
        if condition():
            return
        tick.wait(0.001)
    raise AssertionError("it never came to that")


# ── control ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_pause_abort_ends_what_is_there_and_holds_what_comes() -> None:
    with bench() as it:
        there = it.add(prompts_of(12), Sampling(200, ignore_eos=True))
        wait_for(lambda: there[0].tokens)
        it.scheduler.pause("abort")
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
        there = it.add(prompts_of(5), Sampling(100, temperature=0, ignore_eos=True))
        wait_for(lambda: there[0].tokens)
        it.scheduler.pause("keep", clear_cache=clear_cache)
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
        again = it.add(prompts_of(14), Sampling(60, temperature=0, ignore_eos=True))
        wait_for(lambda: again[2].tokens)
        it.scheduler.cancel([again[2], again[13]])
        it.wait(again)
    assert again[13].finish_reason == "abort"
    for i, sequence in enumerate(again):
        assert sequence.tokens == expected[i][: len(sequence.tokens)]
        assert i in (2, 13) or len(sequence.tokens) == 60


def test_the_queue_is_bounded_and_takes_all_or_none() -> None:
    with bench(limits=Limits(max_batch=2, max_queue=5, max_model_len=64)) as it:
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


class SeesAll(Qwen3ForCausalLM):
    """Attention that is not causal: what it gives for a prompt depends on what is padded after it."""

    def forward(self, input_ids: Any = None, **rest: Any) -> Any:
        out = super().forward(input_ids, **rest)
        out.logits = out.logits + input_ids.float().mean()
        out.logits[..., 0] += input_ids.shape[1]
        return out


def test_a_model_that_cannot_be_batched_is_refused() -> None:
    with pytest.raises(SchemaMismatch, match="--engine vllm"):
        require_batchable(SeesAll(tiny_model().config).eval(), "odd")


# ── text ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def bytewise() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def test_half_a_character_is_held_back() -> None:
    codec = bytewise()
    text = "naïve → 🙂 fin"
    stream, parts = TextStream(codec, Sampling(1)), []
    for token in codec.encode(text):
        stream.push(token)
        parts.append(stream.take())
    stream.finish()
    assert "".join([*parts, stream.take()]) == text
    assert all("\N{REPLACEMENT CHARACTER}" not in part for part in parts)


@pytest.mark.parametrize("keep", [False, True])
def test_a_stop_string_over_several_tokens_never_leaks(keep: bool) -> None:
    codec = tokenizer()
    stream = TextStream(codec, Sampling(1, stop=("stop", "halt"), include_stop_str_in_output=keep))
    out = ""
    for token in codec.encode("ab st hal sto stop it"):
        ended = stream.push(token)
        out += stream.take()
        if ended:
            break
    assert out == "ab st hal sto " + ("stop" if keep else "")
    assert stream.stopped_by == "stop"
