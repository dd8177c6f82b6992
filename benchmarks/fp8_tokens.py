"""What fp8 weights change in a model's tokens: the views of deltawire, compared with the bf16 weights they are made of.

    python examples/models/stories15m.py models/stories15m
    python benchmarks/fp8_tokens.py models/stories15m models/smollm2

The bf16 model writes texts, by sampling. Each model then reads them, and its probabilities of every next token are
compared with those of bf16: `kl` is the mean divergence in nats, `same` the share of places where both have the same
most probable token, `loss` the mean negative log-likelihood of the texts. All models compute in float32, so only
weights differ. An engine that computes in fp8 rounds activations too, with both views in the same way.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from _report import about, print_about, write_json
from deltawire.models import ModelView
from deltawire.views import FP8_BLOCK, VIEWS
from deltawire.views.blocks import SCALES, SIDE, Blocks
from deltawire.views.device import BlockModel

HERE = Path(__file__).parent
REQUANTIZED = "fp8-block, requantized"
"""fp8-block as vLLM's default on Hopper computes with it."""


def dequantized(model: ModelView, view: str) -> dict[str, torch.Tensor]:
    """The numbers that the weights of a view stand for, by the names of the model."""
    blocks = Blocks(model.schema, view)
    tensors = BlockModel(model, blocks).tensors
    result = {name: tensor.float() for name, tensor in tensors.items() if name in model.tensors}
    for name in blocks.grids:
        scales = tensors[name + SCALES].repeat_interleave(SIDE, -2).repeat_interleave(SIDE, -1)
        result[name] *= scales[..., : result[name].shape[-2], : result[name].shape[-1]]
    return result


def requantized(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What vLLM makes of fp8 weights when it loads them for DeepGEMM (`requant_weight_ue8m0_inplace`), as numbers."""
    result = {}
    for name, weight in weights.items():
        rows, columns = weight.shape
        cut = F.pad(weight, (0, -columns % SIDE, 0, -rows % SIDE))
        cut = cut.view(cut.shape[0] // SIDE, SIDE, cut.shape[1] // SIDE, SIDE)
        largest = cut.abs().amax((1, 3), keepdim=True).clamp(1e-4)
        scales = torch.exp2(torch.ceil(torch.log2(largest / 448)))
        numbers = (cut / scales).to(torch.float8_e4m3fn).float() * scales
        result[name] = numbers.view(cut.shape[0] * SIDE, -1)[:rows, :columns]
    return result


@torch.inference_mode()
def written(model: Any, texts: int, tokens: int) -> torch.Tensor:
    start = torch.full((texts, 1), model.config.bos_token_id)
    options = {"do_sample": True, "top_k": 0, "min_new_tokens": tokens, "max_new_tokens": tokens, "pad_token_id": 0}
    result: torch.Tensor = model.generate(start, attention_mask=torch.ones_like(start), **options)
    return result


@torch.inference_mode()
def log_probabilities(model: Any, texts: torch.Tensor) -> torch.Tensor:
    parts = [F.log_softmax(model(part).logits[:, :-1], -1) for part in texts.split(4)]
    return torch.cat(parts).flatten(0, 1)


def measure(folder: Path, texts: int, tokens: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, trust_remote_code=False).float().eval()
    weights = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
    source = ModelView(weights)
    given = written(model, texts, tokens)
    expected = log_probabilities(model, given)
    targets = given[:, 1:].flatten()

    def found(log_p: torch.Tensor) -> dict[str, float]:
        kl = (expected.exp() * (expected - log_p)).sum(-1)
        return {
            "kl": kl.mean().item(),
            "kl_standard_error": (kl.std() / kl.numel() ** 0.5).item(),
            "same": (log_p.argmax(-1) == expected.argmax(-1)).float().mean().item(),
            "loss": F.nll_loss(log_p, targets).item(),
        }

    rows = {"bf16": found(expected)}
    for view in VIEWS:
        made = dequantized(source, view)
        model.load_state_dict(made, strict=False)
        rows[view] = found(log_probabilities(model, given))
        if view == FP8_BLOCK:
            model.load_state_dict(made | requantized({n: made[n] for n in Blocks(source.schema, view).grids}))
            rows[REQUANTIZED] = found(log_probabilities(model, given))
    return {"model": folder.name, "tokens": targets.numel(), "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="checkpoint folders")
    parser.add_argument("--texts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "fp8-tokens.json")
    given = parser.parse_args()
    facts = about()
    print_about(facts)
    results = []
    for folder in given.folders:
        results.append(measure(folder, given.texts, given.tokens))
        print(f"\n{folder.name}, {results[-1]['tokens']:,} tokens")
        for name, row in results[-1]["rows"].items():
            error = row["kl_standard_error"]
            print(f"  {name:22}  KL {row['kl']:.5f} ± {error:.5f}  same {row['same']:.2%}  loss {row['loss']:.4f}")
    write_json(given.out, {"about": facts, "results": results})


if __name__ == "__main__":
    main()
