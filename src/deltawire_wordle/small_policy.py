"""The small Wordle policy that ships: where it is, what it is made of, how it is saved.

Qwen3's architecture with 0.54 M weights and the 32 character tokens of `layout`. The checkpoint in policy/ is fp32, so
that training starts from the exact master weights; load it as bf16 to serve it. `make_policy` makes it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .layout import BOS, EOS, PAD, VOCABULARY

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config

FOLDER = Path(__file__).parent / "policy"
WORDS = "toy"
GUESSES = 5
"""The word list and the number of guesses that the policy was trained on."""


def config() -> Qwen3Config:
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=128,
        intermediate_size=336,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # the smallest that serving engines have kernels for
        max_position_embeddings=128,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, <bos> in front. A character it does not know becomes <pad>."""
    from tokenizers import Tokenizer, decoders, models, processors
    from transformers import PreTrainedTokenizerFast

    pad, bos, eos = VOCABULARY[PAD], VOCABULARY[BOS], VOCABULARY[EOS]
    # BPE without merges is a character-level model
    made = Tokenizer(models.BPE({token: n for n, token in enumerate(VOCABULARY)}, [], unk_token=pad))
    made.decoder = decoders.Fuse()
    made.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, BOS)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token=pad, bos_token=bos, eos_token=eos, unk_token=pad, model_max_length=128
    )


def load(folder: str | Path | None = None, **options: Any) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder or FOLDER, trust_remote_code=False, **options)


def save(model: PreTrainedModel, folder: Path) -> None:
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    settings = folder / "tokenizer_config.json"
    # transformers 5 writes a class name of its own; this one every version knows, and so does vLLM
    kept = json.loads(settings.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings.write_text(json.dumps(kept, indent=2) + "\n")
    for file in folder.iterdir():
        file.chmod(0o644)  # safetensors writes for its owner only; this goes into a package
