"""Publishing what each rank holds, against gathering first: time, bytes between ranks, memory.

    python benchmarks/shards.py                      # FSDP2, FSDP1 and shards by hand; 1, 2 and 4 gloo ranks; 2 minutes
    python benchmarks/shards.py --kinds zero3        # in an environment with DeepSpeed
    python benchmarks/shards.py --kinds megatron     # in the one of `make test-trainers FRAMEWORK=megatron`

Each row is a set of processes of its own. They hold bf16 layers of 1024 × 1024; 1 % of the weights change before every
publish. `gathered` collects full weights on all ranks, as the framework does it, and rank 0 publishes them.

held      median of the time that a publish blocks the training, of the slowest rank; the first is left out
received  bytes that all ranks together receive from others per publish, over all their TCP connections; the first,
          which agrees on who writes what, is a column of its own
memory    what all ranks together need beyond their weights, at most: with the copies that they compare with
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import statistics
import struct
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType, fully_shard

from _report import about, print_about, write_json
from deltawire import Publisher, Shard
from deltawire.bucket.run import Run
from deltawire.bucket.verify import verify

SIDE = 1024
PUBLISHES = 8
KINDS = ("fsdp2", "fsdp1", "shards", "zero3", "megatron")


class Rank:
    """One rank: `memory` is what it holds, `model` what it publishes, `gather` returns full weights on rank 0."""

    def __init__(self, kind: str, layers: int, rank: int, size: int, folder: Path) -> None:
        self.rank, self.size, self.folder = rank, size, folder / "model"
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(layers))).to(torch.bfloat16)
        self.model: Callable[[], Any]
        self.gather: Callable[[], Any]
        getattr(self, kind)(model)

    def fsdp2(self, model: nn.Module) -> None:
        for layer in model.children():
            fully_shard(layer)
        fully_shard(model)
        self.memory = [p.to_local() for p in model.parameters()]  # type: ignore[attr-defined]
        self.model = lambda: model
        self.gather = lambda: {n: p.full_tensor() for n, p in model.named_parameters()}  # type: ignore[attr-defined]

    def fsdp1(self, model: nn.Module) -> None:
        cpu = torch.device("cpu")
        wrapped = FSDP(nn.Sequential(*(FSDP(layer, device_id=cpu) for layer in model.children())), device_id=cpu)
        self.memory = list(wrapped.parameters())
        self.model = lambda: wrapped

        def gather() -> dict[str, Tensor]:
            # not with rank0_only: on a CPU torch frees what it is about to read
            with FSDP.state_dict_type(wrapped, StateDictType.FULL_STATE_DICT):
                return wrapped.state_dict()

        self.gather = gather

    def shards(self, model: nn.Module) -> None:
        """As tensor parallelism cuts: rows of one layer, columns of the next."""
        each, whole = SIDE // self.size, slice(None)
        mine = slice(self.rank * each, (self.rank + 1) * each)
        cuts = [((mine, whole), (whole, mine))[number % 2] for number in range(len(model))]
        parts = [p.detach()[cut].clone() for p, cut in zip(model.parameters(), cuts, strict=True)]
        names = [name for name, _ in model.named_parameters()]
        self.memory = parts
        self.model = lambda: [
            Shard(*args) for args in zip(names, parts, [(SIDE, SIDE)] * len(names), cuts, strict=True)
        ]

        def gather() -> dict[str, Tensor]:
            found = {}
            for number, (name, part) in enumerate(zip(names, parts, strict=True)):
                others = [torch.empty_like(part) for _ in range(self.size)]
                dist.all_gather(others, part)
                found[name] = torch.cat(others, dim=number % 2)
            return found

        self.gather = gather

    def zero3(self, model: nn.Module) -> None:
        import deepspeed

        # else compiled at its first use; gathering does not use it
        sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
        deepspeed.init_distributed("gloo")
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-6, "torch_adam": True}},
        }
        engine = deepspeed.initialize(model=model, config=config)[0]
        parameters = list(engine.module.parameters())
        self.memory = [p.ds_tensor for p in parameters]
        self.model = lambda: engine

        def gather() -> dict[str, Tensor]:
            with deepspeed.zero.GatheredParameters(parameters):
                return {name: p.detach().clone() for name, p in engine.module.named_parameters()}

        self.gather = gather

    def megatron(self, model: nn.Module) -> None:
        """Tensor parallel; for every eight layers, one of a Qwen3 with as many weights. Bridge gathers."""
        tested = megatron()
        from megatron.bridge import AutoBridge
        from megatron.core import parallel_state
        from transformers import Qwen3Config, Qwen3ForCausalLM

        from deltawire.frameworks.megatron import MegatronLayout

        if self.rank == 0:
            config = Qwen3Config(
                hidden_size=SIDE,
                intermediate_size=SIDE,
                num_hidden_layers=len(model) // 8,
                num_attention_heads=8,
                num_key_value_heads=8,
                vocab_size=SIDE,
                tie_word_embeddings=False,
            )
            Qwen3ForCausalLM(config).bfloat16().save_pretrained(self.folder)
        dist.barrier()
        parallel_state.initialize_model_parallel(self.size)
        bridge = AutoBridge.from_hf_pretrained(str(self.folder))
        provider = tested.without_a_gpu(bridge.to_megatron_provider())
        provider.tensor_model_parallel_size = self.size
        provider.pipeline_dtype = provider.params_dtype = torch.bfloat16
        provider.bf16 = True
        provider.finalize()
        models = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True)
        self.memory = list(models[0].parameters())
        layouts: list[MegatronLayout] = []

        def held() -> list[Shard]:
            if not layouts:
                layouts.append(MegatronLayout(bridge, models))
            return layouts[0].shards()

        self.model = held

        def gather() -> dict[str, Tensor]:
            return dict(bridge.export_hf_weights(models, show_progress=False))

        self.gather = gather

    def change(self, number: int) -> None:
        with torch.no_grad():
            for tensor in self.memory:
                # of sliced tensors too: a view, not a copy
                tensor.detach().view(-1)[number::100] *= 1.01


def megatron() -> Any:
    """What the tests have of Megatron where there is no GPU."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "frameworks" / "megatron"))
    return import_module("megatron_rank")


def received() -> int:
    """Bytes that this process has received over its open TCP connections."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
        except OSError:
            continue
        # tcpi_bytes_received of struct tcp_info
        total += struct.unpack_from("Q", info, 128)[0] if len(info) == 136 else 0
    return total


def memory(which: str) -> int:
    return int(re.search(rf"{which}:\s+(\d+) kB", Path("/proc/self/status").read_text()).group(1)) << 10


def play(kind: str, gathers: bool, layers: int, rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size)
    me = Rank(kind, layers, rank, size, folder)
    run = str(folder / "run")
    publisher = None
    if not gathers:
        publisher = Publisher(run, anchor_ratio=1e9)
    elif rank == 0:
        publisher = Publisher(run, anchor_ratio=1e9, group=None)
    dist.barrier()
    resident = memory("VmRSS")
    # from here on the peak counts
    Path("/proc/self/clear_refs").write_text("5")
    seconds, bytes_in = [], []
    for number in range(PUBLISHES + 1):
        me.change(number)
        dist.barrier()
        before, began = received(), time.perf_counter()
        weights = me.gather() if gathers else me.model()
        handle = publisher.publish(weights, step=number) if publisher else None
        seconds.append(time.perf_counter() - began)
        weights = None
        if handle is not None:
            handle.result()
        bytes_in.append(received() - before)
        # those that wait for rank 0 must not send yet
        dist.barrier()
    peak = memory("VmHWM") - resident
    if publisher:
        publisher.close()
    (folder / f"{rank}.json").write_text(json.dumps({"seconds": seconds, "received": bytes_in, "peak": peak}))
    dist.barrier()
    if rank == 0:
        assert verify(Run.open(run)).ok


def measure(kind: str, gathers: bool, layers: int, size: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ranks = []
        for rank in range(size):
            if not (child := os.fork()):
                try:
                    play(kind, gathers, layers, rank, size, folder)
                except BaseException:
                    sys.excepthook(*sys.exc_info())
                    os._exit(1)
                os._exit(0)
            ranks.append(child)
        if any([os.waitpid(child, 0)[1] for child in ranks]):
            raise SystemExit(f"{kind} with {size} ranks failed")
        found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]
    return {
        "kind": kind,
        "ranks": size,
        "how": "gathered" if gathers else "as it lies",
        "held_ms": 1e3 * statistics.median(map(max, zip(*(rank["seconds"][1:] for rank in found), strict=True))),
        "received": statistics.median(map(sum, zip(*(rank["received"][1:] for rank in found), strict=True))),
        "first_received": sum(rank["received"][0] for rank in found),
        "peak_mb": sum(rank["peak"] for rank in found) / 1e6,
    }


def warm() -> None:
    """Compile or load every kernel once, before ranks are forked."""
    with tempfile.TemporaryDirectory() as folder, Publisher(f"{folder}/run", group=None) as publisher:
        weights = {"w": torch.zeros(1 << 16, dtype=torch.bfloat16)}
        for _ in range(2):
            publisher.publish(weights).result()
            weights["w"][::100] += 1
        assert verify(Run.open(f"{folder}/run")).ok


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kinds", default=",".join(KINDS[:3]), help=f"of {', '.join(KINDS)}; by comma")
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--layers", type=int, default=16, help="of a million weights each")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the JSON")
    options = parser.parse_args()
    # as in the tests: the name of this host need not have an address
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # FSDP1 is deprecated, and says so on every rank
    warnings.simplefilter("ignore")
    facts = about()
    facts["load"] = os.getloadavg()[0]
    print_about(facts)
    warm()
    if "megatron" in options.kinds:
        # once, before ranks are forked
        megatron()
    weights = options.layers * SIDE * SIDE
    print(f"{weights / 1e6:.1f} M weights, {2 * weights / 1e6:.1f} MB as bf16; load {facts['load']:.1f}\n")
    print("| weights | ranks | how | held, ms | received, MB | first, MB | memory, MB |")
    print("|---|---|---|---|---|---|---|")
    rows = []
    for kind in options.kinds.split(","):
        for size in map(int, options.ranks.split(",")):
            for gathers in (False, True):
                row = measure(kind, gathers, options.layers, size)
                rows.append(row)
                print(
                    f"| {kind} | {size} | {row['how']} | {row['held_ms']:.0f} | {row['received'] / 1e6:.3f} | "
                    f"{row['first_received'] / 1e6:.3f} | {row['peak_mb']:.0f} |",
                    flush=True,
                )
    name = "shards.json" if options.kinds.startswith("fsdp2") else f"shards-{options.kinds}.json"
    write_json(options.out / name, {"about": facts, "weights": weights, "rows": rows})


if __name__ == "__main__":
    main()
