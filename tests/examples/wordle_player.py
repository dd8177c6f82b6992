"""examples/wordle_trl.py on a CPU, and a tiny model that can play. Run by test_wordle_trl.py, where TRL is installed.

python wordle_player.py make FOLDER       a Qwen3 of 0.14 M weights that has learned to call the tool with words
python wordle_player.py train OPTIONS…    the example, with two shims for what TRL takes for granted on a GPU
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
import trl
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

ROOT = Path(__file__).parents[2]
# the worker's process, which imports the example too, gets this path from multiprocessing
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "tests" / "engines" / "trl")]
import wordle_trl  # noqa: E402

from deltawire_wordle.wordle import Rules  # noqa: E402
from deltawire_wordle.wordlists import load  # noqa: E402

GUESSES = 5
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKUP = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
TEMPLATES = Path(trl.__file__).parent / "chat_templates"


def conversation(rules: Rules, dice: random.Random) -> list[dict[str, Any]]:
    """A game of random words, as TRL writes it down."""
    game = rules.game(dice.getrandbits(31))
    rule, begin = wordle_trl.secrets(1, 0)[0]["prompt"]
    begun = f"{begin['content']}\nguess a word of five letters; {GUESSES} guesses left"
    messages = [rule, {"role": "user", "content": begun}]
    while not game.over:
        game = rules.play(game, dice.choice(rules.words))
        call = {"type": "function", "function": {"name": "guess", "arguments": {"word": game.guesses[-1].word}}}
        said = f"{game.guesses[-1].feedback} {game.left} guess{'' if game.left == 1 else 'es'} left"
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "name": "guess", "content": said})
    return messages


def make(folder: Path) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dice, rules = random.Random(0), Rules(load("toy"), GUESSES)
    tools = [wordle_trl.Wordle("").guess]
    fast = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    fast.chat_template = (TEMPLATES / "qwen3.jinja").read_text()
    template = (TEMPLATES / "qwen3_training.jinja").read_text()

    def written(messages: list[dict[str, Any]], **options: Any) -> str:
        return fast.apply_chat_template(
            messages, tools=tools, tokenize=False, chat_template=template, enable_thinking=False, **options
        )

    games = [conversation(rules, dice) for _ in range(512)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=640,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([written(game) for game in games[:64]], trainer)
    tokenizer.add_tokens([AddedToken(mark, special=False) for mark in MARKUP])
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=SPECIAL[0], eos_token=SPECIAL[2], padding_side="left"
    )
    made.chat_template = fast.chat_template
    made.save_pretrained(folder)

    config = Qwen3Config(
        vocab_size=len(made), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=2048, tie_word_embeddings=True, bos_token_id=None,
        pad_token_id=0, eos_token_id=2,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    given = len(made(written(games[0][:2], add_generation_prompt=True))["input_ids"])
    rows = [made(written(game))["input_ids"] for game in games]
    print(f"{given} tokens given, {sum(map(len, rows)) / len(rows):.0f} in a game", flush=True)
    for step in range(240):
        batch = dice.sample(rows, 8)
        longest = max(map(len, batch))
        tokens = torch.tensor([row + [0] * (longest - len(row)) for row in batch])
        labels = tokens.masked_fill(tokens == 0, -100)
        labels[:, :given] = -100
        loss = model(input_ids=tokens, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(step, round(loss.item(), 3), flush=True)
    model.save_pretrained(folder)


def train(words: list[str]) -> None:
    from eos_task import tree_attention
    from transformers import AttentionInterface
    from trl.experimental.async_grpo import async_grpo_trainer, async_rollout_worker, packing

    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
    async_rollout_worker.is_vllm_available = lambda *_: True
    options, config = wordle_trl.parse(words)
    trainer = wordle_trl.make_trainer(options, config)
    AttentionInterface.register(packing.TREE_ATTENTION, tree_attention)
    trainer.train()
    weights = {name: tensor.detach().to(torch.bfloat16) for name, tensor in trainer.model.named_parameters()}
    save_file(weights, Path(config.output_dir) / "final.safetensors")
    print(json.dumps({"log": trainer.state.log_history}))


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(Path(sys.argv[2]))
    else:
        train(sys.argv[2:])
