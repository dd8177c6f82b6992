"""How many tokens of a draft a real vLLM accepts while the model trains: with the draft in the run, and without.

    VLLM_ENVIRONMENT/bin/python benchmarks/drafts.py      # on the CPU (tests/engines/vllm/environment.sh)

A small model of bytes, of MiMo's shape, is trained here together with a layer that predicts the token after the next
one (MTP): first on the documents of this repository, which gives version 0, then on its source, with a version after
every few steps. Each version is published to two runs: with the layer, and without. Two servers, one after the other,
start from version 0, follow one of the runs version by version, and propose a token with that layer in every step.
    accepted    share of the proposed tokens that the model accepts (vLLM's counters) where it decodes greedily, for
                prompts of documents and of source that training did not see. On a CPU vLLM 0.32 samples with a
                temperature from another distribution than the model's if it speculates: that is not measured
The second server is the control: its model follows, its draft stays at version 0.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm

from _report import about, print_about, write_json

ROOT = Path(__file__).resolve().parents[1]
for place in (ROOT, ROOT / "tests" / "engines" / "vllm"):
    sys.path.insert(0, str(place))

VOCABULARY, HIDDEN, LENGTH, BATCH = 256, 128, 96, 16
CONFIG = {
    "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024, "tie_word_embeddings": False,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
MTP = "model.mtp_layers."
SPECULATIVE = {"method": "mtp", "num_speculative_tokens": 1}
PROMPT = 32
"""Tokens of each prompt."""
PROMPTS = 32
"""Of each kind. Answers are short: a small model that decodes greedily soon repeats itself."""


class Predictor(Qwen2DecoderLayer):
    """MiMo's layer for the token after the next one, with the names of its checkpoint."""

    def __init__(self, config: Qwen2Config) -> None:
        super().__init__(config, 0)
        self.token_layernorm = Qwen2RMSNorm(HIDDEN, eps=config.rms_norm_eps)
        self.hidden_layernorm = Qwen2RMSNorm(HIDDEN, eps=config.rms_norm_eps)
        self.final_layernorm = Qwen2RMSNorm(HIDDEN, eps=config.rms_norm_eps)
        self.input_proj = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)

    def predict(self, hidden: Tensor, following: Tensor, rotary: Any) -> Tensor:
        """From the hidden state at a token and the embedding of the next one."""
        following = torch.cat([torch.zeros_like(following[:, :1]), following[:, 1:]], 1)
        both = torch.cat([self.hidden_layernorm(hidden), self.token_layernorm(following)], -1)
        return self.final_layernorm(self(self.input_proj(both), position_embeddings=rotary))


class Learner:
    """The model, its draft, and the text that they learn."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        # matrices are small
        torch.set_num_threads(1)
        self.config = Qwen2Config(**CONFIG)
        self.model = Qwen2ForCausalLM(self.config)
        self.draft = Predictor(self.config)
        # where the checkpoint has it: `publish` finds it under its name
        self.model.model.mtp_layers = nn.ModuleList([self.draft])
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3, weight_decay=0.01)
        self._hidden: list[Tensor] = []
        self.model.model.norm.register_forward_pre_hook(lambda _, given: self._hidden.append(given[0]))
        self._random = random.Random(0)

    def step(self, text: Tensor, rate: float) -> tuple[float, float]:
        """One step of both on a batch of text. Returns both losses."""
        starts = [self._random.randrange(len(text) - LENGTH - 2) for _ in range(BATCH)]
        tokens = torch.stack([text[start : start + LENGTH + 2] for start in starts]).long()
        first, second = self.logits(tokens[:, :-1])
        model = cross_entropy(first.reshape(-1, VOCABULARY), tokens[:, 1:-1].reshape(-1))
        draft = cross_entropy(second.reshape(-1, VOCABULARY), tokens[:, 2:].reshape(-1))
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.zero_grad()
        (model + 0.3 * draft).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        return model.item(), draft.item()

    def logits(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Of the next token and of the one after it, at all tokens but the last."""
        self._hidden.clear()
        first = self.model(tokens[:, :-1]).logits
        [hidden] = self._hidden
        positions = torch.arange(hidden.shape[1])[None]
        rotary = self.model.model.rotary_emb(hidden, positions)
        second = self.draft.predict(hidden, self.model.model.embed_tokens(tokens[:, 1:]), rotary)
        return first, self.model.lm_head(second)

    def files(self) -> dict[str, bytes]:
        """config.json as MiMo's says it."""
        said = self.config.to_dict() | {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
        return {"config.json": json.dumps({**said, "dtype": "bfloat16"}).encode()}


def texts() -> tuple[Tensor, Tensor, list[list[int]]]:
    """Documents, source, and prompts from the last tenth of both, which is not learned."""
    learned, prompts = [], []
    for paths in (sorted((ROOT / "docs").glob("*.md")), sorted((ROOT / "src" / "deltawire").rglob("*.py"))):
        whole = b"\n".join(path.read_bytes() for path in paths)
        text = torch.frombuffer(bytearray(whole), dtype=torch.uint8)
        cut = len(text) * 9 // 10
        learned.append(text[:cut])
        starts = torch.linspace(cut, len(text) - PROMPT, PROMPTS).long().tolist()
        prompts += [text[start : start + PROMPT].tolist() for start in starts]
    return learned[0], learned[1], prompts


def train(options: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], list[list[int]]]:
    """Publish version 0 after some minutes, and versions of the training that follows, to two runs."""
    from deltawire import Publisher

    learner, (documents, source, prompts) = Learner(), texts()
    clock, steps = time.perf_counter(), 0
    while time.perf_counter() - clock < options.minutes * 60:
        losses = learner.step(documents, 2e-3 * min(1.0, (steps + 1) / 50))
        steps += 1
        if steps % 100 == 0:
            print(f"  step {steps:5}  loss {losses[0]:.3f}, of the draft {losses[1]:.3f}", flush=True)
    spent, changed = time.perf_counter() - clock, []
    runs = [Publisher(folder / name, files=learner.files(), wire_dtype="bf16") for name in ("with", "without")]
    for version in range(options.versions + 1):
        for _ in range(options.steps if version else 0):
            losses = learner.step(source, options.rate)
        weights = learner.model.state_dict()
        published = runs[0].publish(weights).result(600)
        runs[1].publish({name: t for name, t in weights.items() if not name.startswith(MTP)}).result(600)
        changed.append(published.changed / published.elements if version else 0.0)
    print(f"  version {version}  loss {losses[0]:.3f}, of the draft {losses[1]:.3f}", flush=True)
    for run in runs:
        run.close()
    return {
        "parameters": sum(p.numel() for p in learner.model.parameters()),
        "of_the_draft": sum(p.numel() for p in learner.draft.parameters()),
        "first_steps": steps, "first_s": round(spent), "steps_per_version": options.steps, "rate": options.rate,
        "changed_percent": round(100 * statistics.median(changed[1:]), 1),
    }, prompts  # fmt: skip


def accepted(server: Any, prompts: list[list[int]], tokens: int) -> float:
    """Share of the proposed tokens that the model accepts."""

    def counters() -> Iterator[float]:
        lines = server.http.get("/metrics").text.splitlines()
        for name in ("accepted", "draft"):
            start = f"vllm:spec_decode_num_{name}_tokens_total"
            yield sum(float(line.split()[-1]) for line in lines if line.startswith(start))

    def ask(prompt: list[int]) -> None:
        server.complete(prompt, tokens)

    before = [*counters()]
    with ThreadPoolExecutor(8) as clients:
        list(clients.map(ask, prompts))
    after = [*counters()]
    return (after[0] - before[0]) / (after[1] - before[1])


def follow(options: argparse.Namespace, folder: Path, run: str, prompts: list[list[int]]) -> tuple[str, list[float]]:
    """Start at version 0 with the draft that belongs to it; then version by version along a run."""
    from vllm_live import serving

    flags = ["--speculative-config", json.dumps(SPECULATIVE), "--skip-tokenizer-init"]
    model, log = folder / "model", folder / f"{run}.log"
    with serving(model, log, run=folder / run, flags=flags, DELTAWIRE_PIN="0") as server:
        found = []
        for version in range(options.versions + 1):
            server.http.post("/deltawire/pin", json={"version": version}).raise_for_status()
            while server.status()["version"] != version:
                time.sleep(0.05)
            found.append(accepted(server, prompts, options.tokens))
        status = server.status()
        assert status["guard"] == "patch", status["guard"]
        return status["draft"], found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0, help="of training before version 0")
    parser.add_argument("--versions", type=int, default=50)
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps per version")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate after version 0")
    parser.add_argument("--tokens", type=int, default=16, help="of each answer")
    parser.add_argument("--out", type=Path, help="the figures as JSON")
    options = parser.parse_args()
    facts = about()
    print_about(facts)

    from deltawire.engines.live.launch import write_version

    with tempfile.TemporaryDirectory(prefix="deltawire-drafts-") as name:
        folder = Path(name)
        training, prompts = train(options, folder)
        write_version(str(folder / "with"), 0, folder / "model")
        measured = {}
        for run, label in (("with", "draft in the run"), ("without", "control")):
            said, shares = follow(options, folder, run, prompts)
            measured[label] = {"draft": said, "accepted": [round(share, 4) for share in shares]}
            shown = "  ".join(f"v{v} {shares[v]:.0%}" for v in range(0, len(shares), 10))
            print(f"{label:18}{shown}   ({said})", flush=True)
    if options.out:
        write_json(options.out, {"about": facts, "training": training, **measured})


if __name__ == "__main__":
    main()
