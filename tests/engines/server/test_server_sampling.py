"""What sampling promises: seeds, distributions, log-probabilities, ends."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from serving import tiny_model
from test_scheduler import EOS, bench, prompts_of

from deltawire.engines.server.sampling import draw
from deltawire.engines.server.sequence import Sampling, Sequence


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
