"""Run by test_wordle_trl.py, where TRL is installed: a game as wordle_start.py has it is the one that TRL writes."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import wordle_start as start

from deltawire_wordle.wordle import Rules
from deltawire_wordle.wordlists import load

rules, dice = Rules(load("toy"), 5), random.Random(1)
model, tokenizer = start.tiny(rules, seed=0)
form = start.Form(tokenizer, rules.limit)
turns = [start.played(rules, dice, careless=0.5) for _ in range(16)]
games = [form.game(game) for game in turns]
losses = []
for played, (ids, said) in zip(turns, games, strict=True):
    messages = [*form.begin(), *(m for turn in played for m in start.called(*turn)), start.END]
    whole = form.tokens(messages)
    assert form.prompt + ids == whole
    # what is learned is what the model says: its calls, and that it is done
    text = tokenizer.decode([token for token, learned in zip(ids, said, strict=True) if learned])
    calls = (f"<|tool_call_start|>[guess(word='{start.spell(word)}')]<|tool_call_end|><|im_end|>" for word, _ in played)
    assert text == "".join(calls) + "Done.<|im_end|>"
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([whole])).logits[0, len(form.prompt) - 1 : -1]
    losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor(ids), reduction="none")[torch.tensor(said)])
# and the batch, which has the prompt once, gives the loss of the games one by one
model.set_attn_implementation(start.SHARED)
with torch.no_grad():
    together = start.loss_of(model, start.batch_of(form.prompt, games))
torch.testing.assert_close(together, torch.cat(losses).mean())
print("the same")
