"""How sparse is my training? Changed weights per step and bits per change, by optimizer, learning rate and precision.

    python benchmarks/density.py                              stories15M, all rows; an hour on two cores, mostly Muon
    python benchmarks/density.py --device cuda --steps 36     the same on a GPU; five minutes
    python benchmarks/density.py --rows "AdamW 1e-06" SGD     only rows whose names begin so
    python benchmarks/density.py --model smollm2 --rows "AdamW 1e-06" --steps 8
    python benchmarks/density.py --model path/to/your/model   a checkpoint folder of yours

Each row is a training run of its own, from the same weights with the same samples, which the model drew before: it
continued some prompts, short sentences were rewarded, advantages are normalised per group. Their policy gradient,
clipped at a norm of 1, goes to the optimizer. Where a row does not say otherwise, master weights are fp32, the forward
pass runs on their bf16 rounding, and what is compared from step to step is that rounding: what deltawire publishes.
`start` is the first step, `steady` the median of the last third. Sizes are those of the last step; `full` is every
weight as bf16.

The rows with 8-bit states and with stochastic rounding need torchao (pip install torchao), and are left out without it.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

# torchao compiles its steps, for minutes; they are as exact without
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import torch
from torch.func import functional_call

import deltawire as dw
from _deltas import CACHE, Bits, bits_of
from _report import about, print_about, write_json

HERE = Path(__file__).parent
PROMPTS = (
    "Once upon a time, there was a little girl named Lily.", "One day, a big dog went to the park.",
    "Tom had a red ball.", "The cat sat by the window.",
)  # fmt: skip
Parameters = dict[str, torch.nn.Parameter]
Step = Callable[[int], None]
"""Do the optimizer's step, given its number, from 1."""


@dataclass(frozen=True, slots=True)
class Group:
    """Samples of one prompt."""

    ids: torch.Tensor
    """Token ids, prompt and completion, one row per sample."""
    prompt: int
    """Tokens of the prompt."""
    advantages: torch.Tensor


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    make: Callable[[Parameters], Step]
    """The optimizer of these parameters."""
    pure_bf16: bool = False
    """The parameters are bf16 and there is no fp32 master."""


def adamw(lr: float, warm_up: int = 0) -> Callable[[Parameters], Step]:
    def make(parameters: Parameters) -> Step:
        optimizer = torch.optim.AdamW(parameters.values(), lr=lr, weight_decay=0.0)

        def step(number: int) -> None:
            for group in optimizer.param_groups:
                group["lr"] = lr * min(1.0, number / warm_up) if warm_up else lr
            optimizer.step()

        return step

    return make


def sgd(lr: float) -> Callable[[Parameters], Step]:
    return lambda parameters: _plain(torch.optim.SGD(parameters.values(), lr=lr, momentum=0.9))


def muon(lr: float) -> Callable[[Parameters], Step]:
    """Matrices by Muon, scaled to the step size of AdamW; embedding and norms by AdamW, as its authors advise."""

    def make(parameters: Parameters) -> Step:
        matrices = [p for name, p in parameters.items() if p.ndim == 2 and "embed" not in name]
        rest = [p for name, p in parameters.items() if p.ndim != 2 or "embed" in name]
        one = torch.optim.Muon(matrices, lr=lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
        two = torch.optim.AdamW(rest, lr=lr, weight_decay=0.0)

        def step(_: int) -> None:
            one.step()
            two.step()

        return step

    return make


def torchao(name: str, lr: float, **options: Any) -> Callable[[Parameters], Step]:
    def make(parameters: Parameters) -> Step:
        import torchao.optim

        return _plain(getattr(torchao.optim, name)(parameters.values(), lr=lr, weight_decay=0.0, **options))

    return make


def redrawn(parameters: Parameters) -> Step:
    """Every weight is new and unrelated to its old value: the most that a version can cost."""

    @torch.no_grad()
    def step(_: int) -> None:
        for parameter in parameters.values():
            parameter.normal_(std=parameter.square().mean().sqrt().item())

    return step


def _plain(optimizer: torch.optim.Optimizer) -> Step:
    return lambda _: optimizer.step()


ROWS = (
    *(Row(f"AdamW {lr:.0e}", adamw(lr)) for lr in (1e-7, 1e-6, 3e-6, 1e-5, 1e-4, 1e-3)),
    Row("AdamW 1e-06, warm-up 12 steps", adamw(1e-6, warm_up=12)),
    Row("AdamW, 8-bit states, 1e-06", torchao("AdamW8bit", 1e-6)),
    Row("AdamW, 8-bit states, 1e-05", torchao("AdamW8bit", 1e-5)),
    Row("Muon 1e-06", muon(1e-6)),
    Row("Muon 1e-05", muon(1e-5)),
    Row("SGD with momentum 1e-03", sgd(1e-3)),
    Row("SGD with momentum 1e-01", sgd(1e-1)),
    Row("pure bf16, to nearest, AdamW 1e-06", adamw(1e-6), pure_bf16=True),
    Row("pure bf16, to nearest, AdamW 1e-05", adamw(1e-5), pure_bf16=True),
    Row("pure bf16, stochastic rounding, AdamW 1e-06", torchao("_AdamW", 1e-6, bf16_stochastic_round=True), True),
    Row("pure bf16, stochastic rounding, AdamW 1e-05", torchao("_AdamW", 1e-5, bf16_stochastic_round=True), True),
    Row("every weight drawn anew", redrawn),
)


def load(name: str, device: str) -> tuple[Any, Any]:
    """Model in fp32 with bf16 values, as most runs start, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = Path(name)
    if not folder.exists():
        folder = CACHE / name
        if not (folder / "config.json").exists():
            maker = HERE.parent / "examples" / "models" / f"{name}.py"
            if not maker.exists():
                raise SystemExit(f"{name} is neither a folder nor a model that examples/models makes")
            subprocess.run([sys.executable, str(maker), str(folder)], check=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, trust_remote_code=False)
    return model.float().eval().to(device), AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


class Rounded(torch.autograd.Function):
    """The forward pass sees the bf16 weights, the gradient goes straight to the fp32 master."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x.bfloat16().float()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient


def train(model: Any, row: Row, batches: Sequence[Sequence[Group]]) -> Iterator[tuple[Bits, Bits]]:
    """The bits before and after each step."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if row.pure_bf16 else torch.float32
    parameters = {n: torch.nn.Parameter(p.detach().clone().to(dtype)) for n, p in model.named_parameters()}
    step = row.make(parameters)
    old = bits_of(parameters)
    for number, groups in enumerate(batches, 1):
        for group in groups:
            rounded = {n: p.float() if row.pure_bf16 else Rounded.apply(p) for n, p in parameters.items()}
            logits = functional_call(model, rounded, (group.ids[:, :-1],)).logits[:, group.prompt - 1 :]
            chosen = torch.log_softmax(logits, -1).gather(-1, group.ids[:, group.prompt :, None])[..., 0]
            (-(chosen * group.advantages[:, None]).mean() / len(groups)).backward()
        torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        step(number)
        for parameter in parameters.values():
            parameter.grad = None
        new = bits_of(parameters)
        yield old, new
        old = new


@torch.no_grad()
def play(model: Any, tokenizer: Any, prompt: torch.Tensor, given: argparse.Namespace) -> Group:
    """Samples of the model, rewarded for short sentences."""
    prompts = prompt.repeat(given.generations, 1)
    tokens = {"min_new_tokens": given.tokens, "max_new_tokens": given.tokens}
    ids = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), do_sample=True, pad_token_id=tokenizer.eos_token_id, **tokens
    )
    texts = tokenizer.batch_decode(ids[:, prompt.shape[1] :])
    reward = torch.tensor([len(re.findall(r"[.!?]", text)) / max(len(text.split()), 1) for text in texts])
    advantages = (reward - reward.mean()) / (reward.std() + 1e-4)
    return Group(ids, prompt.shape[1], advantages.to(given.device))


def measure(model: Any, row: Row, batches: Sequence[Sequence[Group]]) -> dict[str, Any]:
    shares, began = [], time.perf_counter()
    for old, new in train(model, row, batches):
        changed = sum(int((old[name] != new[name]).sum()) for name in old)
        shares.append(changed / sum(bits.size for bits in old.values()))
    sizes = {encoding: len(dw.encode(old, new, encoding)) for encoding in ("packed", "context")}
    full = 2 * sum(bits.size for bits in old.values())
    return {
        "row": row.name,
        "start": shares[0],
        "steady": median(shares[-max(len(shares) // 3, 1) :]),
        "by_step": shares,
        "changed": changed,
        "bytes": sizes,
        "bits_per_change": {encoding: 8 * size / max(changed, 1) for encoding, size in sizes.items()},
        "of_full": {encoding: size / full for encoding, size in sizes.items()},
        "seconds": time.perf_counter() - began,
    }


def line(found: dict[str, Any]) -> str:
    """A row of the table, as docs/density.md has it."""
    bits, part = found["bits_per_change"], found["of_full"]
    return (
        f"| {found['row']} | {100 * found['start']:.2f} % | {100 * found['steady']:.2f} % "
        f"| {bits['packed']:.1f} | {bits['context']:.1f} "
        f"| {100 * part['packed']:.2f} % | {100 * part['context']:.2f} % |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="stories15m", help="stories15m, smollm2, or a checkpoint folder")
    parser.add_argument("--rows", nargs="*", default=[""], help="only rows whose names begin so")
    parser.add_argument("--steps", type=int, default=18)
    parser.add_argument("--generations", type=int, default=6, help="samples of each prompt")
    parser.add_argument("--prompts", type=int, default=4, choices=range(1, 5))
    parser.add_argument("--tokens", type=int, default=40, help="of each sample")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--out", type=Path, help="where the figures go (results/density-MODEL.json)")
    given = parser.parse_args()
    facts = about()
    if given.device == "cuda":
        facts["machine"] = f"{torch.cuda.get_device_name()}; {facts['machine']}"
    print_about(facts)
    model, tokenizer = load(given.model, given.device)
    torch.manual_seed(given.seed)
    prompts = [tokenizer(text, return_tensors="pt").input_ids.to(given.device) for text in PROMPTS[: given.prompts]]
    batches = [[play(model, tokenizer, prompt, given) for prompt in prompts] for _ in range(given.steps)]
    rows = [row for row in ROWS if any(row.name.startswith(name) for name in given.rows)]
    if find_spec("torchao") is None:
        left = [row for row in rows if row.make.__qualname__.startswith("torchao")]
        print("".join(f"without torchao there is no row {row.name!r}\n" for row in left), end="")
        rows = [row for row in rows if row not in left]
    print("| optimizer, rate | changed, start | steady | bits, packed | context | of full, packed | context |")
    print("|---|---|---|---|---|---|---|")
    results = []
    for row in rows:
        results.append(measure(model, row, batches))
        print(line(results[-1]), flush=True)
    write_json(
        given.out or HERE / "results" / f"density-{Path(given.model).name}.json", {"about": facts, "rows": results}
    )


if __name__ == "__main__":
    main()
