"""A tiny Qwen3 with a tokenizer of letters, a run of it, and a real server in a thread of this process."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from deltawire.engines.server import Connections, RolloutServer, ServerOptions
from deltawire.engines.server.scheduler import Scheduler
from deltawire.store import Store
from deltawire.trainer import Publisher

LETTERS = "abcdefghijklmnopqrstuvwxyz .,!?:"
SPECIAL = ("<pad>", "<s>", "</s>")
CHAT = (
    "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}{{ '!' if loud else '.' }}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def tiny_model(seed: int = 0, **changes: Any) -> Qwen3ForCausalLM:
    """Random weights large enough that the next token is seldom a close call."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        **{
            "vocab_size": len(SPECIAL) + len(LETTERS),
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 256,
            "tie_word_embeddings": True,
            "eos_token_id": 2,
            "bos_token_id": 1,
            "pad_token_id": 0,
            **changes,
        }
    )
    model = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.ndim > 1 else 1)
            parameter.copy_(parameter.bfloat16().float())
    return model


def tokenizer() -> PreTrainedTokenizerFast:
    words = {word: i for i, word in enumerate((*SPECIAL, *LETTERS))}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", chat_template=CHAT
    )


def checkpoint(folder: Path, model: Qwen3ForCausalLM) -> Path:
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def nudge(model: Qwen3ForCausalLM, seed: int, share: float = 0.02) -> None:
    """A training step: some weights move, by enough to be seen in bf16."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            where = torch.rand(parameter.shape, generator=rng) < share
            parameter.add_(where * torch.randn(parameter.shape, generator=rng) * 0.1)


def publisher(run: Path, folder: Path, **more: Any) -> Publisher:
    return Publisher(run, wire_dtype="bf16", files=folder, **more)


def published_run(home: Path) -> Path:
    """A run with one version of the tiny model."""
    model = tiny_model()
    with publisher(home / "run", checkpoint(home / "model", model)) as it:
        it.publish(model).result(60)
    return home / "run"


@contextmanager
def serving(
    run: Path | Store, wait: bool = True, connections: Connections | None = None, **options: Any
) -> Iterator[tuple[RolloutServer, httpx.Client]]:
    """A server that follows the run, and a client of it. Afterwards no thread of it is left."""
    options = {"port": 0, "poll": 0.02, "max_batch": 16, **options}
    if isinstance(run, Path):
        server = RolloutServer.open(ServerOptions(run=str(run), **options), connections=connections)
    else:
        server = RolloutServer.open(ServerOptions(**options), store=run, connections=connections)
    up = threading.Event()
    thread = threading.Thread(target=server.run, args=(up.set,))
    thread.start()
    try:
        assert up.wait(120)
        if wait:
            assert server.follower.caught_up.wait(120)
        with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=120) as client:
            yield server, client
    finally:
        server.stop()
        thread.join(120)
    assert not thread.is_alive()
    assert not server.scheduler.alive
    # which the server itself does not wait for so long
    server.follower.stop(120)
    assert not server.follower.alive


class Brake:
    """Lets a scheduler generate so many tokens, and none after them until it is told to go on: what a test does
    meanwhile happens in the middle of an answer, however slow the test is."""

    def __init__(self, scheduler: Scheduler, tokens: int) -> None:
        self._scheduler, self._version = scheduler, scheduler._version
        self._most = scheduler.counts.generated_tokens + tokens
        scheduler._version = lambda: None if self._reached() else self._version()

    def _reached(self) -> bool:
        return self._scheduler.counts.generated_tokens >= self._most

    def wait(self) -> None:
        """Until the tokens are there, and no step runs."""
        with self._scheduler._changed:
            assert self._scheduler._changed.wait_for(lambda: self._reached() and not self._scheduler._stepping, 120)

    def release(self, tokens: float = math.inf) -> None:
        """Lets it generate so many more."""
        self._most = self._scheduler.counts.generated_tokens + tokens
        self._scheduler.wake()


def generate(model: Qwen3ForCausalLM, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens, by transformers alone."""
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return out[0, len(prompt) :].tolist()
