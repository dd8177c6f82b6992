"""Rows of a batch: which models can have them, and what little memory changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from serving import generate, tiny_model
from test_scheduler import bench, prompts_of
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3ForCausalLM

from deltawire.core.errors import SchemaMismatch
from deltawire.engines.server.batch import require_batchable
from deltawire.engines.server.sequence import Sampling


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
    with bench(model, kv_memory=position * 64 / 1e9) as tight:
        assert not tight.scheduler.fits(65)
        assert [s.tokens for s in tight.run(prompts_of(12), Sampling(20, temperature=0))] == expected


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
