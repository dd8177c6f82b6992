"""A language model learns Wordle with TRL's AsyncGRPOTrainer, on three machines that share a bucket and two addresses.

    pip install -e '.[trl,rl,hub]'          # in a clone
    python wordle_trl.py --model Qwen/Qwen3-0.6B --run hf://buckets/me/wordle \
        --env-url https://me-wordle-env.hf.space --server-url https://me-rollout.hf.space

README.md has the other two machines. Whatever AsyncGRPOConfig and TrainingArguments know is an option here too:
--num-generations, --max-staleness, --learning-rate, --max-steps, --per-device-train-batch-size, --report-to …

The model plays by calling a tool, `guess`. A game is a conversation of several turns, and everything the model wrote in
it is trained on; the reward is the environment's. A model that does not know the form of such a game learns it first
with wordle_start.py, which writes games down in the same words.
"""

from __future__ import annotations

import asyncio
import logging
import random
import tempfile
import threading
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, TypeVar

from datasets import Dataset
from transformers import AutoConfig, AutoTokenizer, HfArgumentParser
from tree_attention import let_trl_run
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from deltawire.trl import BucketTransfer
from deltawire_wordle.env_client import EnvClient
from deltawire_wordle.env_protocol import Observation, Result
from deltawire_wordle.errors import ServerUnavailable

log = logging.getLogger("deltawire")
T = TypeVar("T")

RULES = """Play Wordle: find a secret word of five letters by calling `guess`. It answers each letter: G, right place; \
Y, another place; X, not in the word. When the game is over, say: Done."""
BEGIN = "Let us play."

RETRY_S = 1.0
"""Between two attempts to reach an environment that is gone."""
UNFINISHED = -0.2
"""The reward of a game the model broke off: less than any that was played to its end."""


@dataclass
class Options:
    model: str = field(metadata={"help": "hub id or checkpoint folder; the servers must serve the same"})
    run: str = field(metadata={"help": "where versions go: hf://buckets/me/run, s3://bucket/run, a folder"})
    env_url: str = field(metadata={"help": "the Wordle environment (deltawire env wordle)"})
    server_url: str = field(metadata={"help": "the rollout server; for several, the address of their load balancer"})
    games: int = field(default=4096, metadata={"help": "secrets to play, over and over"})
    guesses: int = field(default=6, metadata={"help": "what the environment allows; a conversation ends after as many"})
    encoding: str = field(default="auto", metadata={"help": "of deltas: packed, context, auto"})
    attention: str = field(
        default="auto", metadata={"help": "flash (FlashAttention 3), torch, or auto: flash where it is installed"}
    )


DEFAULTS: dict[str, Any] = {
    "num_generations": 8,
    "max_staleness": 4,
    "learning_rate": 1e-6,
    "max_steps": 500,
    "per_device_train_batch_size": 32,
    "token_budget": 0,  # a step trains on as many games as that; by default TRL fills the server's context and no more
    "queue_maxsize": 64,  # two batches: a longer queue only makes samples older
    "max_completion_length": 512,  # per turn
    "temperature": 1.0,
    "chat_template_kwargs": {"enable_thinking": False},
    "save_strategy": "no",
}
"""What differs from AsyncGRPOConfig's own; each can be given on the command line."""


class Wordle:
    """One game at a time for one rollout. TRL keeps as many as there are rollouts at once, in its worker's process.

    Its public methods are what TRL looks for: `reset`, `get_reward`, and `guess`, the tool that the model sees.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._session: EnvClient | None = None
        self._last: Result | None = None
        # None: there is no game, or its session was lost

    def reset(self, seed: int, **_: Any) -> str:
        """Begin a game. While the environment is gone, wait for it.

        TRL resets one game after the other, and after a restart all sessions have ended: they are replaced at once.
        """
        gone = False
        while True:
            try:
                new = self._session is None
                self._session = self._session or wait_for(EnvClient(self._url).__aenter__())
                self._last = wait_for(self._session.reset(seed))
            except ServerUnavailable as error:
                self._leave()
                if new:
                    if not gone:
                        log.warning("no new games until the environment is back: %s", error)
                    gone = True
                    time.sleep(RETRY_S)
            else:
                if gone:
                    log.warning("the environment at %s is back", self._url)
                return f"\n{self._last.observation.message}"

    def guess(self, word: str) -> str:
        """Guess the word.

        Args:
            word: Five letters, with spaces between them.
        """
        if self._session is None or self._last is None or self._last.done:
            raise ValueError("the game is over")
        try:
            self._last = wait_for(self._session.step(read(word)))
        except ServerUnavailable:
            self._leave()
            raise ValueError("the game was lost") from None
        return say(self._last.observation)

    def get_reward(self) -> float | None:
        if self._last is None:
            return None  # lost through no fault of the model's: TRL leaves it out
        return float(self._last.reward or 0.0) if self._last.done else UNFINISHED

    def _leave(self) -> None:
        session, self._session, self._last = self._session, None, None
        if session is not None:
            # not waited for: where nobody answers, closing takes seconds
            asyncio.run_coroutine_threadsafe(session.__aexit__(None, None, None), _sessions())


def spell(word: str) -> str:
    """With spaces a tokenizer makes a token of each letter; within a word a model would have to know its letters."""
    return " ".join(word)


def read(word: object) -> str:
    """What the model means: its letters, whatever it puts between them."""
    return "".join(letter for letter in str(word)[:64].lower() if "a" <= letter <= "z")


def say(seen: Observation) -> str:
    """An answer as the model reads it: each letter with its colour, then what the environment remarks."""
    colours = (f"{letter} {colour}" for letter, colour in zip(seen.guess, seen.feedback, strict=False))
    return f"{' '.join(colours)}; {seen.message}"


def prompt() -> list[dict[str, str]]:
    """How a conversation begins; TRL adds what the environment says to its last message."""
    return [{"role": "system", "content": RULES}, {"role": "user", "content": BEGIN}]


def wait_for(work: Coroutine[Any, Any, T]) -> T:
    """TRL calls an environment from threads; sessions live in one event loop of their own."""
    return asyncio.run_coroutine_threadsafe(work, _sessions()).result()


@cache
def _sessions() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="sessions", daemon=True).start()
    return loop


def secrets(count: int, seed: int) -> Dataset:
    """A row per secret; all games of a group get its seed, so they have the same secret."""
    dice = random.Random(seed)
    return Dataset.from_dict({"prompt": [prompt()] * count, "seed": [dice.getrandbits(31) for _ in range(count)]})


def companions(model: str) -> str:
    """Config and tokenizer as a folder; they go to the bucket with the weights, so that a server needs nothing else."""
    folder = tempfile.mkdtemp(prefix="deltawire-files-")
    AutoConfig.from_pretrained(model, trust_remote_code=False).save_pretrained(folder)
    AutoTokenizer.from_pretrained(model, trust_remote_code=False).save_pretrained(folder)
    return folder


def parse(words: list[str] | None = None) -> tuple[Options, AsyncGRPOConfig]:
    parser = HfArgumentParser((Options, AsyncGRPOConfig))
    parser.set_defaults(**DEFAULTS)
    options, config = parser.parse_args_into_dataclasses(words)
    config.vllm_server_base_url = options.server_url
    if config.max_tool_calling_iterations is None:
        config.max_tool_calling_iterations = options.guesses
    return options, config


def make_trainer(options: Options, config: AsyncGRPOConfig) -> AsyncGRPOTrainer:
    let_trl_run(options.attention)
    transfer = BucketTransfer(options.run, encoding=options.encoding, files=companions(options.model))
    trainer = AsyncGRPOTrainer(
        model=config.resume_from_checkpoint or options.model,  # so that the servers never go back to the start
        args=config,
        train_dataset=secrets(options.games, config.seed),
        environment_factory=partial(Wordle, options.env_url),
        weight_transfer=transfer,
    )
    transfer.attach(trainer)
    return trainer


if __name__ == "__main__":
    options, config = parse()
    make_trainer(options, config).train(resume_from_checkpoint=config.resume_from_checkpoint)
