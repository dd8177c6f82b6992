"""One rank of a trainer with Megatron. Run by live.py: megatron_rank.py RANK RANKS FOLDER SCENARIO…

A scenario is MODEL-HOW-PARALLEL, such as untied-shards-tp2; its model is a folder in FOLDER.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any
from unittest.mock import patch
from zlib import crc32

import stand_in  # noqa: F401
import torch
import torch.distributed as dist
from megatron.bridge import AutoBridge
from megatron.bridge.models.conversion.param_mapping import AutoMapping
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.moe.moe_layer import MoELayer
from safetensors.torch import load_file, save_file

import deltawire as dw
from deltawire.frameworks.megatron import MegatronLayout
from deltawire.models import ModelView

STEPS = 4


class TEColumnParallelGroupedLinear(torch.nn.Module):
    """The experts of this rank as Transformer Engine's grouped layers keep them, to be published and not to be run."""

    def __init__(self, config: Any, experts: int, size: tuple[int, int]) -> None:
        super().__init__()
        self.config = config
        for number in range(experts):
            weight = torch.nn.Parameter(torch.randn(size, dtype=torch.bfloat16))
            setattr(self, f"weight{number}", weight)


class TERowParallelGroupedLinear(TEColumnParallelGroupedLinear):
    pass


class Experts(torch.nn.Module):
    def __init__(self, config: Any, experts: int) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.moe_ffn_hidden_size
        inner //= parallel_state.get_expert_tensor_parallel_world_size()
        self.linear_fc1 = TEColumnParallelGroupedLinear(config, experts, (2 * inner, hidden))
        self.linear_fc2 = TERowParallelGroupedLinear(config, experts, (hidden, inner))


class Rank:
    """A model in parallel, and the bridge that made it."""

    def __init__(
        self, rank: int, folder: Path, model: str, *, tp: int = 1, pp: int = 1, ep: int = 1, dp: int = 1
    ) -> None:
        self.rank, self.steps, self.tp, self.ep = rank, 0, tp, ep
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(tp, pp, expert_model_parallel_size=ep)
        self.bridge = AutoBridge.from_hf_pretrained(str(folder / model))
        # Bridge loads no vocabulary that it pads
        padded = model == "padded"
        provider = self.bridge.to_megatron_provider(load_weights=not padded)
        provider.tensor_model_parallel_size, provider.pipeline_model_parallel_size = tp, pp
        provider.expert_model_parallel_size = ep
        provider.pipeline_dtype = provider.params_dtype = torch.bfloat16
        provider.bf16, provider.should_pad_vocab, provider.make_vocab_size_divisible_by = True, padded, 64
        without_a_gpu(provider)
        provider.finalize()
        self.models = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True)
        if dp > 1:
            # as Bridge does it, which makes a CUDA stream for it
            ddp = DistributedDataParallelConfig()
            self.models = [DistributedDataParallel(provider, ddp, model) for model in self.models]

    def train(self) -> None:
        """Change one weight of a hundred. Copies stay copies."""
        self.steps += 1
        for name, parameter in self.models[0].named_parameters():
            split = self.tp > 1 and getattr(parameter, "tensor_model_parallel", False)
            split |= (self.ep > 1 or self.tp > 1) and ".experts." in name
            torch.manual_seed(crc32(f"{name} {self.steps} {self.rank if split else 0}".encode()))
            with torch.no_grad():
                some = torch.rand(parameter.shape) < 0.01
                parameter += (0.1 * torch.randn(parameter.shape) * some).to(parameter.dtype)

    def export(self) -> Any:
        return self.bridge.export_hf_weights(self.models, show_progress=False)

    def exported(self) -> dict[str, torch.Tensor]:
        """What Bridge would write into a checkpoint, which has no padding."""
        tokens = self.bridge.hf_pretrained.config.vocab_size
        return {
            name: (tensor[:tokens] if name in ("model.embed_tokens.weight", "lm_head.weight") else tensor).clone()
            for name, tensor in self.export()
        }


def without_a_gpu(provider: Any) -> Any:
    """Megatron-core's own layers instead of those of Transformer Engine."""
    provider.gradient_accumulation_fusion = provider.masked_softmax_fusion = False
    provider.bias_activation_fusion = provider.apply_rope_fusion = provider.persist_layer_norm = False
    provider.moe_token_dispatcher_type = "allgather"
    provider.moe_grouped_gemm = provider.moe_permute_fusion = False
    provider.transformer_layer_spec = lambda config: get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    if provider.num_moe_experts:
        provider.register_pre_wrap_hook(group_experts, prepend=True)
    return provider


def group_experts(models: list[Any]) -> list[Any]:
    for module in models[0].modules():
        if isinstance(module, MoELayer):
            module.experts = Experts(module.config, module.num_local_experts)
    return models


def digest(weights: dict[str, torch.Tensor]) -> str:
    return str(dw.digest_of(ModelView(weights)))


def published(rank: Rank, folder: Path, name: str, how: str) -> dict[str, Any]:
    """Train some steps. Returns the digest after each of them, and how much of a parameter's memory was copied."""
    layout = MegatronLayout(rank.bridge, rank.models) if how == "shards" else None
    digests, shards = [], 0
    with dw.Publisher(str(folder / name), files=str(folder / name.split("-")[0])) as publisher:
        for step in range(STEPS):
            if step:
                rank.train()
            weights = rank.export() if layout is None else layout.shards()
            if layout is not None:
                shards = len(weights)
                memory = {p.untyped_storage().data_ptr() for p in rank.models[0].parameters()}
                assert {s.tensor.untyped_storage().data_ptr() for s in weights} <= memory, "a shard is a copy"
            publisher.publish(weights, step=step).result()
            weights = None
            digests.append(digest(rank.exported()))
    return {"digests": digests, "shards": shards}


def loaded(rank: Rank, folder: Path, model: str) -> bool:
    """Whether what Bridge exports is bit for bit the checkpoint that it loaded."""
    expected = load_file(folder / model / "model.safetensors")
    found = rank.exported()
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def said(action: Callable[[], Any]) -> list[str]:
    try:
        action()
    except dw.DeltawireError as error:
        return [type(error).__name__, str(error)]
    return []


def computed(rank: Rank) -> dict[str, list[str]]:
    """Mappings that compute, on one rank or on all."""
    convert, reports = AutoMapping.megatron_to_hf, {}
    arithmetic: dict[str, Callable[[Any], Any]] = {
        "plus one": lambda tensor: tensor + 1,
        "cast": lambda tensor: tensor.float(),
        "padded": lambda tensor: torch.nn.functional.pad(tensor, (0, 3)),
    }
    for name, change in arithmetic.items():

        def altered(self: Any, weights: Any, module: Any, change: Any = change) -> Any:
            found = convert(self, weights, module)
            return {name: change(t) if "norm.weight" in name else t for name, t in found.items()}

        with patch.object(AutoMapping, "megatron_to_hf", altered):
            reports[name] = said(lambda: MegatronLayout(rank.bridge, rank.models))
    tasks = rank.bridge.get_conversion_tasks(rank.models)
    name = "decoder.layers.1.mlp.linear_fc2.to_wrap.weight"
    adapted = [replace(t, global_param_name=name) if "1.mlp.linear_fc2" in t.param_name else t for t in tasks]
    with patch.object(AutoBridge, "get_conversion_tasks", lambda self, megatron_model: adapted):
        reports["adapter"] = said(lambda: MegatronLayout(rank.bridge, rank.models))
    if rank.rank == 1:
        parameter = rank.models[0].module.decoder.final_layernorm.weight
        rank.models[0].module.decoder.final_layernorm.weight = Quantized(parameter.data)
    reports["quantized"] = said(lambda: MegatronLayout(rank.bridge, rank.models))
    return reports


class Quantized(torch.nn.Parameter):
    """As Transformer Engine's fp8 parameters, which say that they are tensors."""


def unequal(rank: Rank, folder: Path) -> dict[str, Any]:
    """Copies of a norm with other bits, then with equal ones."""
    layout = MegatronLayout(rank.bridge, rank.models)
    norm = rank.models[0].module.decoder.layers[1].input_layernorm.weight.data
    with dw.Publisher(str(folder / "unequal")) as publisher:
        norm += rank.rank
        refused = said(lambda: publisher.publish(layout.shards(), step=0))
        norm -= rank.rank
        publisher.publish(layout.shards(), step=1).result()
    return {"refused": refused, "digest": digest(rank.exported())}


def changed(rank: Rank, folder: Path) -> dict[str, Any]:
    """Parameters that are other tensors than before, and a model that is another one."""
    layout = MegatronLayout(rank.bridge, rank.models)
    decoder = rank.models[0].module.decoder
    with dw.Publisher(str(folder / "changed")) as publisher:
        publisher.publish(layout.shards(), step=0).result()
        old = decoder.layers[0].mlp.linear_fc1.weight
        decoder.layers[0].mlp.linear_fc1.weight = torch.nn.Parameter(old.detach() * 2, requires_grad=False)
        publisher.publish(layout.shards(), step=1).result()
        expected = digest(rank.exported())
    norm = decoder.final_layernorm.weight
    decoder.final_layernorm.weight = torch.nn.Parameter(norm.detach()[:-1])
    another = said(layout.shards)
    return {"digest": expected, "another": another}


def restarted(rank: Rank, folder: Path) -> dict[str, Any]:
    """A run that goes on in another parallel from its checkpoint."""
    run = str(folder / "restarted")
    layout = MegatronLayout(rank.bridge, rank.models)
    with dw.Publisher(run) as publisher:
        for step in range(2):
            publisher.publish(layout.shards(), step=step).result()
            rank.train()
        publisher.publish(layout.shards(), step=2).result()
    weights = rank.exported()
    if rank.rank == 0:
        copytree(folder / "untied", folder / "checkpoint")
        save_file(weights, folder / "checkpoint" / "model.safetensors", {"format": "pt"})
    dist.barrier()
    rank = Rank(rank.rank, folder, "checkpoint", pp=2)
    layout = MegatronLayout(rank.bridge, rank.models)
    with dw.Publisher(run) as publisher:
        publisher.resume(layout.shards())
        rank.train()
        publisher.publish(layout.shards(), step=3).result()
    return {"digest": digest(rank.exported())}


def page(rank: Rank, folder: Path) -> dict[str, Any]:
    """The script of docs/megatron.md, with places of this machine."""
    text = (Path(__file__).parents[3] / "docs" / "megatron.md").read_text()
    script = text.partition("```python\n")[2].partition("```")[0]
    for there, here in {
        "/models/policy": str(folder / "untied"),
        "s3://runs/policy": str(folder / "page"),
        "range(100)": "range(3)",
        "wrap_with_ddp=False": "wrap_with_ddp=False, use_cpu_initialization=True",
    }.items():
        assert there in script
        script = script.replace(there, here)
    digests, make = [], AutoBridge.to_megatron_provider

    def train_step(models: list[Any], step: int) -> None:
        rank.models = models
        rank.train()
        digests.append(digest(rank.exported()))

    with patch.object(AutoBridge, "to_megatron_provider", lambda bridge: without_a_gpu(make(bridge))):
        exec(script, {"train_step": train_step})
    return {"digests": digests}


def killed(rank: Rank, folder: Path) -> list[str]:
    """Rank 1 dies after it has published, before all is uploaded."""
    layout = MegatronLayout(rank.bridge, rank.models)
    publisher = dw.Publisher(str(folder / "killed"))
    publisher.publish(layout.shards(), step=0).result()
    rank.train()
    if rank.rank == 1:
        os._exit(9)
    return said(lambda: publisher.publish(layout.shards(), step=1).result())


def scenario(name: str, number: int, folder: Path) -> Any:
    model, how, parallel = name.split("-")
    rank = Rank(number, folder, model, **{parallel[:2]: int(parallel[2:])})
    match how:
        case "computed":
            return computed(rank)
        case "unequal" | "changed" | "restarted" | "page" | "killed":
            return globals()[how](rank, folder)
    as_loaded = model == "padded" or loaded(rank, folder, model)
    return {**published(rank, folder, name, how), "as loaded": as_loaded}


def main(rank: int, ranks: int, folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=ranks)
    for name in names:
        began = time.monotonic()
        report = scenario(name, rank, folder)
        print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)
        (folder / f"{name}-{rank}.json").write_text(json.dumps(report))
    # the connections of a group that lost a rank are not closed in order
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
