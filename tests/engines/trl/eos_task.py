"""The stock AsyncGRPOTrainer through a bucket, on a CPU: the policy is paid for ending its answer at once.

Run by test_trl_worker.py in an environment that has TRL:

    python eos_task.py make FOLDER [EOS]       a tiny model and a tokenizer with a chat template TRL knows
    python eos_task.py train FOLDER SNIPPET    trains it as this Python file does; prints one JSON object
    python eos_task.py distill FOLDER SNIPPET  the same with the distillation trainer, and a teacher instead of a reward

Snippets are those of docs/trl.md: they find `options` for TRL's config, `reward` and `dataset`, and leave `trainer`.

What TRL takes for granted on a GPU comes from examples/tree_attention.py; nothing of deltawire is replaced.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from peft import get_peft_model_state_dict
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
from tree_attention import let_trl_run

LONGEST = 24
OPTIONS = {
    "max_completion_length": LONGEST,
    "lr_scheduler_type": "constant",
    "max_staleness": 4,
    "weight_sync_steps": 1,
    "report_to": [],
    "save_strategy": "no",
    "use_cpu": True,
    "vllm_server_timeout": 1200.0,  # a vLLM on busy cores takes minutes to start
    "bf16": False,
    "logging_steps": 1,
    "gradient_checkpointing": False,
}


def prefers_short(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [-len(ids) / LONGEST for ids in completion_ids]


def make(folder: Path, eos: float) -> None:
    """`eos` scales the embedding of the token that ends an answer. At 1 it is as small as all others, and no adapter
    can make it likely while the embeddings are frozen: |hidden| · |embedding| limits every logit to about 1."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocabulary = {t: i for i, t in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in special])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=special[0], eos_token=special[2], padding_side="left"
    )
    fast.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        pad_token_id=0,
        eos_token_id=2,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight[config.eos_token_id] *= eos
    model.save_pretrained(folder)


def train(folder: Path, snippet: Path) -> None:
    let_trl_run()
    names = {
        "__name__": "__main__",
        "options": {
            **OPTIONS,
            "per_device_train_batch_size": 16,
            "num_generations": 8,
            "max_inflight_tasks": 16,
            "learning_rate": 1e-2,
        },
        "reward": prefers_short,
        "dataset": Dataset.from_dict({"prompt": [[{"role": "user", "content": "go"}]] * 64}),
    }
    exec(compile(snippet.read_text(), str(snippet), "exec"), names)
    save_trained(names["trainer"], folder)


def distill(folder: Path, snippet: Path) -> None:
    """Run the snippet of docs/trl.md for the distillation trainer."""
    let_trl_run()
    options = {
        **OPTIONS,
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-3,
        "max_inflight_tasks": 8,
        "token_budget": 0,
        "model_init_kwargs": {"attn_implementation": "sdpa"},
    }
    dataset = Dataset.from_dict({"prompt": [[{"role": "user", "content": "go"}]] * 64})
    names = {"__name__": "__main__", "options": options, "dataset": dataset}
    exec(compile(snippet.read_text(), str(snippet), "exec"), names)
    save_trained(names["trainer"], folder)


def save_trained(trainer: Any, folder: Path) -> None:
    model = trainer.accelerator.unwrap_model(trainer.model)
    if hasattr(model, "peft_config"):
        named = get_peft_model_state_dict(model, save_embedding_layers=False)
    else:
        named = dict(model.named_parameters())
    save_file({n: t.detach().to(torch.bfloat16) for n, t in named.items()}, folder / "final.safetensors")
    print(json.dumps({"trl": trl.__version__, "log": trainer.state.log_history}))


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(Path(sys.argv[2]), float(sys.argv[3]) if len(sys.argv) > 3 else 1.0)
    else:
        {"train": train, "distill": distill}[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
