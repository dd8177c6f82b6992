"""Act two of the demo: a larger model, trained at a usual learning rate, published over a link of limited bandwidth.

    python -m deltawire_wordle.larger_model --run FOLDER [--model CHECKPOINT] [--link 100]

AdamW on fp32 master weights, with real gradients: the model predicts the source of this package, token by token. Its
bf16 rounding is published after every step. Trainer and replica are in this one process and take turns, so that each
phase is timed alone; each has a link of its own to the bucket. Writes one JSON object per line, `event` says which:
phase, model, full, version, encodings, done.
"""

from __future__ import annotations

import argparse
import re
import threading
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

import deltawire
from deltawire.engines.live import fingerprint
from deltawire.store import open_store
from deltawire_wordle.throttled import ThrottledStore

from .processes import plain_errors, say

RATE = 1e-6
WARM_UP = 8
"""Steps before the first version: AdamW's first steps move every weight by the whole rate, later ones by less."""
STEPS = 4
BATCH, LENGTH = 2, 64
"""Sequences of a step, and tokens of each."""
LINK_MBIT_S = 100.0
ENCODINGS = ("packed", "context", "raw")


@dataclass(frozen=True, slots=True)
class Options:
    run: str
    model: str | None = None
    """A checkpoint folder; by default a Qwen3-shaped model of 40 M weights is made."""
    link_mbit_s: float = LINK_MBIT_S
    rate: float = RATE
    steps: int = STEPS
    seed: int = 0


def run(options: Options) -> None:
    torch.manual_seed(options.seed)
    disable_progress_bar()
    compiled = threading.Thread(target=_compile, daemon=True)
    compiled.start()
    say("phase", text="making the model" if options.model is None else f"loading {options.model}")
    model = _load(options.model)
    weights = sum(parameter.numel() for parameter in model.parameters())
    say("model", weights=weights, full_bytes=2 * weights, rate=options.rate, link_mbit_s=options.link_mbit_s)
    trainer = _Trainer(model, _tokens(model, options.model), options.rate)
    say("phase", text=f"{WARM_UP} steps of AdamW before the first version")
    for _ in range(WARM_UP):
        trainer.step()
    if compiled.is_alive():
        say("phase", text="compiling the encodings, once")
        compiled.join()
    reached: list[deltawire.Synced] = []
    with (
        deltawire.Publisher(_link(options), wire_dtype="bf16") as publisher,
        deltawire.Replica(_link(options), id="replica", on_version=reached.append) as replica,
    ):
        held = {name: torch.empty_like(tensor) for name, tensor in _bf16(model).items()}
        seconds = 2 * weights * 8 / (options.link_mbit_s * 1e6)
        say("phase", text=f"full weights, once: {seconds:.0f} s up and {seconds:.0f} s down, at least")
        clock = time.perf_counter()
        first = publisher.publish(model, step=0).result()
        replica.sync(held)
        say("full", bytes=first.bytes, phases=_phases(first, reached[-1]), seconds=time.perf_counter() - clock)
        before: Mapping[str, Tensor] = {}
        for step in range(1, options.steps + 1):
            say("phase", text=f"step {step} of {options.steps}")
            before = _bf16(model)
            loss = trainer.step()
            clock = time.perf_counter()
            published = publisher.publish(model, step=step, metrics={"loss": loss}).result()
            replica.sync(held)
            say(
                "version", version=published.version, changed=published.changed, bytes=published.bytes, loss=loss,
                phases=_phases(published, reached[-1]), seconds=time.perf_counter() - clock,
            )  # fmt: skip
        say("phase", text="the same change in each encoding")
        say("encodings", encodings=_encodings(before, _bf16(model)))
        equal = fingerprint(held, "bf16") == fingerprint(_bf16(model), "bf16")
        say("done", version=publisher.version, equal=equal)


class _Trainer:
    """Predicts the next token, with AdamW on fp32 weights."""

    def __init__(self, model: PreTrainedModel, tokens: Tensor, rate: float) -> None:
        self._model, self._tokens = model, tokens
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)

    def step(self) -> float:
        """Do one optimizer step on sequences drawn at random; returns the loss."""
        starts = torch.randint(0, len(self._tokens) - LENGTH, (BATCH,)).tolist()
        ids = torch.stack([self._tokens[start : start + LENGTH] for start in starts])
        loss = self._model(input_ids=ids, labels=ids, use_cache=False).loss
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        return float(loss.detach())


def _load(folder: str | None) -> PreTrainedModel:
    model: PreTrainedModel
    if folder is not None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
    else:
        # weights are drawn with a standard deviation of 0.02, which trained ones of such a model have too
        model = Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=16384, hidden_size=512, intermediate_size=1536, num_hidden_layers=10,
                num_attention_heads=8, num_key_value_heads=4, head_dim=64, tie_word_embeddings=True,
            )
        )  # fmt: skip
    return model.float().train()


def _tokens(model: PreTrainedModel, folder: str | None) -> Tensor:
    """The source of this package as token ids: of the model's tokenizer, else one for each word."""
    text = "\n".join(path.read_text("utf-8") for path in sorted(Path(deltawire.__file__).parent.rglob("*.py")))
    if folder is not None and any(Path(folder).glob("tokenizer*")):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        # no more than a few steps need
        ids = tokenizer(text[:200_000], add_special_tokens=False)["input_ids"]
    else:
        count = model.config.get_text_config().vocab_size
        ids = [zlib.crc32(word.encode()) % count for word in re.findall(r"\w+|[^\w\s]|\s+", text)]
    return torch.tensor(ids)


def _bf16(model: PreTrainedModel) -> dict[str, Tensor]:
    """The weights as they are published; a tied one once."""
    return {name: parameter.detach().bfloat16() for name, parameter in model.named_parameters()}


def _link(options: Options) -> ThrottledStore:
    return ThrottledStore(open_store(options.run), options.link_mbit_s)


def _phases(published: deltawire.Published, synced: deltawire.Synced) -> dict[str, float]:
    """Seconds of each phase, from the trainer's call to verified weights."""
    theirs, ours = published.timings, synced.timings
    return {
        "detect": theirs["held"],
        "encode": theirs["encode"],
        "upload": theirs["put"],
        "fetch": ours.get("fetch", 0.0) + ours.get("verify", 0.0),
        "decode": ours.get("decode", 0.0) + ours.get("stage", 0.0),
        "apply": ours.get("apply", 0.0),
        "prove": ours.get("prove", 0.0),
    }


def _encodings(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, Any]:
    """Bytes of the same change in each encoding, and seconds to encode it."""
    found: dict[str, Any] = {}
    for encoding in ENCODINGS:
        # twice: in the first one numba may still have something to compile
        for _ in range(2):
            clock = time.perf_counter()
            blob = deltawire.encode(before, after, encoding)
            found[encoding] = {"bytes": len(blob), "seconds": time.perf_counter() - clock}
    return found


def _compile() -> None:
    """Let numba compile the encodings, on a change like those that follow; it keeps the result for later runs too."""
    weight = 0.02 * torch.randn(1024, 512, generator=torch.Generator().manual_seed(0))
    old, new = {"weight": weight.bfloat16()}, {"weight": (weight + 1e-6).bfloat16()}
    for encoding in ENCODINGS:
        deltawire.decode(deltawire.encode(old, new, encoding), old)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a larger model at a usual rate, and time each phase of a sync.")
    parser.add_argument("--run", required=True, help="where to publish: s3://…, hf://…, a folder")
    parser.add_argument("--model", help="checkpoint folder to start from (a Qwen3-shaped model of 40 M weights)")
    parser.add_argument("--link", type=float, default=LINK_MBIT_S, help="Mbit/s in each direction (%(default)s)")
    parser.add_argument("--lr", type=float, default=RATE)
    parser.add_argument("--steps", type=int, default=STEPS, help="that are published (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with plain_errors():
        run(Options(given.run, given.model, given.link, given.lr, given.steps, given.seed))


if __name__ == "__main__":
    main()
