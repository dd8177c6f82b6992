"""Teach a small model the form of a Wordle game, and no more of the game than leaves something to learn.

    pip install -e '.[trl,rl]'
    python wordle_start.py models/start --model models/smollm2         # a checkpoint folder; a minute or two on a GPU
    python wordle_start.py models/start --model tiny --device cpu      # a Qwen3 of 0.9 M weights, made here

The folder is what wordle_trl.py starts from. The model reads games that a program plays, written down as TRL writes
them, in two lessons: by a careful player, who only guesses words that agree with all answers so far, until the model
solves most games; then by a careless one, who mostly guesses any word, until it solves no more than --target of them.
It then knows how to play well and mostly does not: what is left is for reinforcement learning to find out.

start.json in the folder says what was done and what came out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import trl
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils import get_json_schema
from tree_attention import SHARED, Tree, tree_of
from trl.chat_template_utils import add_response_schema, parse_response
from wordle_trl import Wordle, prompt, read, say, spell

from deltawire_wordle.env_protocol import Action, Reset, Result, Session
from deltawire_wordle.wordle import Rules, colours
from deltawire_wordle.wordlists import load

TEMPLATE = Path(trl.__file__).parent / "chat_templates" / "lfm2_v2.jinja"
"""Of the templates with tools that TRL knows the one with the fewest tokens per call."""
MARKS = [f"<|{what}_{end}|>" for what in ("tool_list", "tool_call", "tool_response") for end in ("start", "end")]
THINKS = ["<think>", "</think>"]  # known to the template, and they make the number of tokens a multiple of eight
LONGEST = 24
"""Tokens of a turn: a call has fourteen."""
END = {"role": "assistant", "content": "Done."}
_colours = cache(colours)


@dataclass(frozen=True)
class Lesson:
    name: str
    careless: float
    """Probability that a guess is any word of the list."""
    rate: float
    """The learning rate."""
    every: int
    """Steps from one measurement to the next; up to the first the learning rate rises."""


class Form:
    """How a game is written down: the tokens that TRL's worker would have for it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, guesses: int) -> None:
        self.tokenizer = tokenizer
        add_response_schema(tokenizer)
        self.tools = [get_json_schema(Wordle("").guess)]
        self._prompt = prompt()
        self._prompt[-1]["content"] += "\n" + Session(Rules(("crane",), guesses)).reset(Reset()).observation.message
        self.prompt = self.tokens(self.begin())
        self._header = len(self.tokens(self.begin(), add_generation_prompt=True)) - len(self.prompt)
        self.turn = cache(self._turn)

    def begin(self) -> list[dict[str, Any]]:
        return list(self._prompt)

    def tokens(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        ids: list[int] = self.tokenizer.apply_chat_template(messages, tools=self.tools, return_dict=False, **options)
        return ids

    def text(self, messages: list[dict[str, Any]]) -> str:
        text: str = self.tokenizer.apply_chat_template(messages, tools=self.tools, tokenize=False)
        return text

    def _turn(self, word: str, answer: str) -> tuple[list[int], list[bool]]:
        """What a guess and its answer add to a game, and which of it the model has to say; no word: the end."""
        messages = called(word, answer) if word else [END]
        ids = self.tokens([*self._prompt, *messages])[len(self.prompt) :]
        end = ids.index(self.tokenizer.eos_token_id)
        if end <= self._header:
            raise SystemExit(f"the tokenizer ends a message with {self.tokenizer.eos_token!r}, its chat template not")
        return ids, [self._header <= at <= end for at in range(len(ids))]

    def game(self, turns: list[tuple[str, str]]) -> tuple[list[int], list[bool]]:
        """Without the prompt, which all games have."""
        written = [self.turn(word, answer) for word, answer in [*turns, ("", "")]]
        return list(itertools.chain(*(ids for ids, _ in written))), list(
            itertools.chain(*(said for _, said in written))
        )


def called(word: str, answer: str) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "guess", "arguments": {"word": spell(word)}}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "guess", "content": answer},
    ]


def played(rules: Rules, dice: random.Random, careless: float) -> list[tuple[str, str]]:
    """Guesses and answers of a game. A guess that is not careless could still be the secret."""
    session, candidates, turns = Session(rules), list(rules.words), []
    result = session.reset(Reset(dice.getrandbits(31)))
    while not result.done:
        guess = dice.choice(rules.words if dice.random() < careless else candidates)
        result = session.step(Action(guess))
        turns.append((guess, say(result.observation)))
        answer = result.observation.feedback
        candidates = [word for word in candidates if _colours(guess, word) == answer]
    return turns


class Batch(NamedTuple):
    """Games with one prompt: the prompt's tokens, then those of each game."""

    ids: Tensor
    positions: Tensor
    tree: Tree
    said: Tensor
    """Packed positions of what the model has to say."""
    before: Tensor
    """Of the token before each."""


def batch_of(prompt: list[int], games: list[tuple[list[int], list[bool]]]) -> Batch:
    given, longest = len(prompt), len(prompt) + max(len(ids) for ids, _ in games)
    ids, positions = list(prompt), list(range(given))
    rows = torch.zeros(len(games), longest, dtype=torch.long)
    inside = torch.zeros_like(rows, dtype=torch.bool)
    said: list[int] = []
    for row, (tokens, mask) in enumerate(games):
        begin, end = len(ids), given + len(tokens)
        said += [begin + at for at, learned in enumerate(mask) if learned]
        ids += tokens
        positions += range(given, end)
        rows[row, :given] = torch.arange(given)
        rows[row, given:end] = torch.arange(begin, begin + len(tokens))
        inside[row, :end] = True
    chosen = torch.tensor(said)  # never the first of a game: a header comes before it
    tree = tree_of(rows, inside, len(ids))
    return Batch(torch.tensor([ids]), torch.tensor([positions]), tree, chosen, chosen - 1)


class Games(IterableDataset):
    """Batches without end, each worker's its own."""

    def __init__(self, form: Form, rules: Rules, seed: int, careless: float, size: int) -> None:
        self.form, self.rules, self.seed, self.careless, self.size = form, rules, seed, careless, size

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        dice = random.Random(f"{self.seed} {worker.id if worker else 0}")
        while True:
            games = [self.form.game(played(self.rules, dice, self.careless)) for _ in range(self.size)]
            yield batch_of(self.form.prompt, games)


def moved(batch: Batch, device: torch.device) -> Batch:
    ids, positions, tree, said, before = batch
    tree = Tree(*(tensor.to(device, non_blocking=True) for tensor in tree))
    ids, positions, said, before = (t.to(device, non_blocking=True) for t in (ids, positions, said, before))
    return Batch(ids, positions, tree, said, before)


def loss_of(model: PreTrainedModel, batch: Batch) -> Tensor:
    hidden = model.model(input_ids=batch.ids, position_ids=batch.positions, tree=batch.tree, use_cache=False)
    logits = model.lm_head(hidden.last_hidden_state[0, batch.before]).float()
    return torch.nn.functional.cross_entropy(logits, batch.ids[0, batch.said])


@torch.no_grad()
def solved_share(model: PreTrainedModel, form: Form, rules: Rules, count: int, seed: int) -> dict[str, float]:
    """The model plays `count` games at temperature 1, as TRL's worker would have it play."""
    model.eval()
    model.set_attn_implementation("sdpa")
    torch.manual_seed(seed)
    dice = random.Random(seed)
    sessions = [Session(rules) for _ in range(count)]
    results: list[Result] = [session.reset(Reset(dice.getrandbits(31))) for session in sessions]
    talks = [form.begin() for _ in range(count)]
    open_, guesses, known = list(range(count)), 0, 0
    while open_:
        asked = [form.tokens(talks[game], add_generation_prompt=True) for game in open_]
        still = []
        for game, given, reply in zip(open_, asked, replies(model, form, asked), strict=True):
            message = parse_response(form.tokenizer, reply, prefix=given, tools=form.tools)
            try:
                (call,) = message["tool_calls"]
                word = read(call["function"]["arguments"]["word"])
            except (KeyError, TypeError, ValueError):
                continue  # no call of the tool with a word: it breaks the game off
            results[game] = sessions[game].step(Action(word))
            guesses, known = guesses + 1, known + results[game].observation.known
            talks[game] += [message, called("", say(results[game].observation))[1]]
            if not results[game].done:
                still.append(game)
        open_ = still
    model.train()
    return {
        "solved": sum(result.observation.solved for result in results) / count,
        "finished": sum(result.done for result in results) / count,
        "known": known / max(guesses, 1),
        "reward": sum(result.reward or 0.0 for result in results) / count,
    }


def replies(model: PreTrainedModel, form: Form, asked: list[list[int]]) -> list[list[int]]:
    pad, end = form.tokenizer.pad_token_id, form.tokenizer.eos_token_id
    longest = max(map(len, asked))
    ids = torch.tensor([[pad] * (longest - len(given)) + given for given in asked], device=model.device)
    mask = torch.tensor([[0] * (longest - len(given)) + [1] * len(given) for given in asked], device=model.device)
    out = model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=LONGEST, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
        eos_token_id=end, pad_token_id=pad,
    )[:, longest:].tolist()  # fmt: skip
    return [reply[: reply.index(end) + 1] if end in reply else reply for reply in out]


class Teacher:
    def __init__(self, model: PreTrainedModel, form: Form, rules: Rules, given: argparse.Namespace) -> None:
        self.model, self.form, self.rules, self.given = model, form, rules, given
        self.device = torch.device(given.device)
        self.begun = time.monotonic()
        self.steps = 0
        self.seen: dict[str, float] = {}

    def precision(self) -> Any:
        return torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else nullcontext()

    def seconds(self) -> float:
        return time.monotonic() - self.begun

    def measure(self) -> float:
        with self.precision():
            self.seen = solved_share(self.model, self.form, self.rules, self.given.games, self.given.seed + self.steps)
        return self.seen["solved"]

    def teach(self, lesson: Lesson, enough: Callable[[float], bool], until: float) -> dict[str, Any]:
        """Until `enough` says so of the share of solved games, or `until` seconds have passed."""
        optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.98), weight_decay=0.01, fused=True)
        first = self.steps
        games = Games(self.form, self.rules, self.given.seed + first, lesson.careless, self.given.batch)
        cuda = self.device.type == "cuda"
        writers = {"num_workers": self.given.workers, "multiprocessing_context": "fork"} if self.given.workers else {}
        for batch in DataLoader(games, batch_size=None, pin_memory=cuda, **writers):
            self.model.set_attn_implementation(SHARED)
            for group in optimizer.param_groups:
                group["lr"] = lesson.rate * min(1.0, (self.steps - first + 1) / lesson.every)
            with self.precision():
                loss = loss_of(self.model, moved(batch, self.device))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            optimizer.step()
            self.steps += 1
            if (self.steps - first) % lesson.every == 0:
                solved = self.measure()
                print(
                    f"{lesson.name:8s} step {self.steps:5d}  {self.seconds():5.0f} s  loss {loss.item():.3f}  "
                    f"solved {solved:.0%} of {self.given.games} games, finished {self.seen['finished']:.0%}, "
                    f"guesses of the list {self.seen['known']:.0%}",
                    flush=True,
                )
                if enough(solved) or self.seconds() > until:
                    break
        return {**asdict(lesson), "steps": self.steps - first, "seconds": round(self.seconds(), 1), **self.seen}


def smollm(folder: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model with its tokenizer, and in that the template's marks as tokens."""
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
    tokenizer.add_tokens([AddedToken(mark, special=False) for mark in (*MARKS, *THINKS)])
    tokenizer.chat_template = TEMPLATE.read_text()
    tokenizer.bos_token = None  # the template would write it, and a chat begins without one
    tokenizer.padding_side = "left"
    if len(tokenizer) > model.config.vocab_size:
        model.resize_token_embeddings(len(tokenizer))
    return model, tokenizer


def tiny(rules: Rules, seed: int) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A Qwen3 that knows nothing, and a tokenizer learned from games, which cuts a turn as SmolLM2's does."""
    ends = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

    def fast(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
        made = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token=ends[0], eos_token=ends[2], padding_side="left"
        )
        made.chat_template = TEMPLATE.read_text()
        return made

    bytes_ = {token: at for at, token in enumerate([*ends, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    plain = Tokenizer(models.BPE(vocab=bytes_, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.add_special_tokens([AddedToken(end, special=True) for end in ends])
    form, dice = Form(fast(plain), rules.limit), random.Random(seed)
    games = [[form.begin(), *(called(*turn) for turn in played(rules, dice, 1.0))] for _ in range(64)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=640,
        special_tokens=ends,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([form.text([*itertools.chain(*game)]) for game in games], trainer)
    tokenizer.add_tokens([AddedToken(mark, special=False) for mark in (*MARKS, *THINKS)])
    made = fast(tokenizer)
    config = Qwen3Config(
        vocab_size=len(made), hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=2048, tie_word_embeddings=True, bos_token_id=None,
        pad_token_id=0, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(config), made


def main() -> None:
    parser = argparse.ArgumentParser(description="Teach a small model the form of a Wordle game.")
    parser.add_argument("folder", type=Path, help="where the checkpoint goes")
    parser.add_argument("--model", required=True, help="a checkpoint folder, such as models/smollm2, or tiny")
    parser.add_argument("--words", default="toy", help="toy, scowl-10, scowl-20 or a file")
    parser.add_argument("--guesses", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--target", type=float, default=0.35, help="share of games that the model solves in the end")
    parser.add_argument("--knows", type=float, default=0.8, help="share that it solves after the careful lesson")
    parser.add_argument("--seconds", type=float, default=120, help="the careful lesson takes at most so long")
    parser.add_argument("--batch", type=int, default=128, help="games per step")
    parser.add_argument("--games", type=int, default=256, help="games of a measurement")
    parser.add_argument("--workers", type=int, default=min(4, (os.cpu_count() or 2) // 2), help="that write games down")
    parser.add_argument("--rate", type=float, help="learning rate of the careful lesson")
    given = parser.parse_args()

    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are forks
    torch.manual_seed(given.seed)
    rules = Rules(load(given.words), given.guesses)
    model, tokenizer = tiny(rules, given.seed) if given.model == "tiny" else smollm(given.model)
    form = Form(tokenizer, given.guesses)
    model.to(given.device).train()
    rate = given.rate or (2e-3 if given.model == "tiny" else 5e-4)
    weights = sum(weight.numel() for weight in model.parameters())
    print(f"{weights / 1e6:.1f} M weights, {len(form.prompt)} tokens of a prompt, {given.device}", flush=True)

    teacher = Teacher(model, form, rules, given)
    lessons = [teacher.teach(Lesson("careful", 0.0, rate, 150), lambda solved: solved >= given.knows, given.seconds)]
    if teacher.seen["solved"] > given.target:
        careless = Lesson("careless", 0.9, rate / 25, 4)
        lessons.append(teacher.teach(careless, lambda solved: solved <= given.target, teacher.seconds() + 120))

    model.to(torch.bfloat16).save_pretrained(given.folder)
    tokenizer.save_pretrained(given.folder)
    saved = AutoModelForCausalLM.from_pretrained(given.folder, dtype=torch.bfloat16, trust_remote_code=False)
    final = solved_share(saved.to(given.device), form, rules, 2 * given.games, given.seed + 2**20)
    options = {name: str(value) if isinstance(value, Path) else value for name, value in vars(given).items()}
    record = {
        "options": options, "weights": weights, "lessons": lessons, "final": final,
        "seconds": round(teacher.seconds(), 1), "torch": torch.__version__, "trl": trl.__version__,
        "device": torch.cuda.get_device_name() if given.device.startswith("cuda") else "cpu",
    }  # fmt: skip
    (given.folder / "start.json").write_text(json.dumps(record, indent=1) + "\n")
    print(f"{given.folder}: solves {final['solved']:.0%} of {2 * given.games} games, {record['seconds']:.0f} s")


if __name__ == "__main__":
    main()
