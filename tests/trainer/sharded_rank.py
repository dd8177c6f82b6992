"""One rank of a sharded trainer. Run by test_shards.py: torchrun sharded_rank.py SCENARIO,…/SCENARIO,… FOLDER.

With a third argument, the number of ranks, it starts them itself: torch is imported once for all of them.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecision, ShardingStrategy, StateDictType, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Partial

import deltawire as dw
from deltawire import Publisher
from deltawire.bucket.run import Run
from deltawire.core.errors import DeltawireError, RunNotFound, StoreError
from deltawire.core.full import digest_of
from deltawire.models import ModelView
from deltawire.store import open_store
from deltawire.trainer import (
    DeltaAdamW,
    FusedDetector,
    SnapshotDetector,
    adapter,
    background,
    captures,
    collective,
    detectors,
    merged_weights,
    pipeline,
    shard,
)
from deltawire.trainer import pairs as one_by_one
from deltawire.trainer import publisher as publishing
from deltawire.trainer import shards as sharding
from deltawire.trainer.writer import VersionWriter
from deltawire.views import FP8_BLOCK
from deltawire.views.blocks import Blocks
from deltawire.views.host import BlockView
from deltawire_wordle.counting import CountingStore
from interrupting import Interrupted, raising_at_each_line

STEPS = 5
PACE = 0.03


class Small(nn.Module):
    """Rows that do not divide by the ranks, a tied head, a buffer, a frozen weight, and a norm smaller than a rank."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(301, 32)
        self.up = nn.Linear(32, 75)
        self.down = nn.Linear(75, 32, bias=False)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 301, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        return self.head(self.norm(hidden + self.down(torch.relu(self.up(hidden)))))


class Wide(nn.Module):
    """Layers that tensor parallelism can cut."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(24, 64)
        self.down = nn.Linear(64, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class Blocky(nn.Module):
    """Matrices of several fp8 blocks, some of them cut off."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(24, 300)
        self.middle = nn.Linear(300, 141)
        self.down = nn.Linear(141, 24, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.middle(torch.relu(self.up(x)))))


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(7)
    return make()


class Training:
    """The same data on every rank: a mean of two or four equal gradients is that gradient, bit for bit."""

    def __init__(self, model: nn.Module, make: Callable[..., Any] = torch.optim.AdamW, **options: Any) -> None:
        self.model = model
        options = {"lr": 2e-3} | (options or {"foreach": False})
        self.optimizer = make([p for p in model.parameters() if p.requires_grad], **options)
        self.steps = 0

    def step(self) -> None:
        generator = torch.Generator().manual_seed(self.steps)
        self.steps += 1
        if any(isinstance(module, nn.Embedding) for module in self.model.modules()):
            tokens = torch.randint(0, 301, (4, 9), generator=generator)
            found = self.model(tokens[:, :-1])
            logits = getattr(found, "logits", found)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        else:
            loss = self.model(torch.randn(8, 24, generator=generator)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        for buffer in self.model.buffers():
            buffer += 1


def sharded(**how: Any) -> nn.Module:
    model = seeded(Small)
    for part in (model.up, model.down):
        fully_shard(part, **how)
    return fully_shard(model, **how)


def gathered(model: nn.Module, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Full tensors one by one, as frameworks make them: every rank has to take part."""
    tensors = model.state_dict()
    for name in names:
        full = tensors[name].full_tensor() if isinstance(tensors[name], DTensor) else tensors[name]
        yield name, full.bfloat16() if full.is_floating_point() else full


def broken(model: nn.Module, breaks: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """All of them, or the first."""
    for name, tensor in [*gathered(model, model.state_dict())]:
        yield name, tensor
        if breaks:
            raise ArithmeticError("no gather")


def flattened(original: bool, **how: Any) -> nn.Module:
    """By FSDP1, with its parameters as they were or as flat ones only, which must then all be trained."""
    model = seeded(Small)
    how |= {"device_id": torch.device("cpu"), "use_orig_params": original}
    model.up, model.down = FSDP(model.up, **how), FSDP(model.down, **how)
    return FSDP(model, **how, **({} if original else {"ignored_states": [model.scale]}))


class Hook:
    """A store in which something happens before every upload."""

    def __init__(self, inner: Any, before_put: Callable[[str], None]) -> None:
        self._inner, self._before = inner, before_put

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def put(self, key: str, data: Any) -> None:
        self._before(key)
        self._inner.put(key, data)


class Rank:
    def __init__(self, rank: int, size: int, folder: Path) -> None:
        self.rank, self.size, self.folder = rank, size, folder
        self.report: dict[str, Any] = {}

    def meet(self, place: str) -> None:
        # not by torchrun's own store: after a restart it still has the addresses at which gloo was before
        meeting = f"file://{self.folder}/rendezvous-{place}"
        dist.init_process_group("gloo", init_method=meeting, rank=self.rank, world_size=self.size)
        # as the ranks of a pipeline, they are not in equally many groups
        dist.new_group([0])

    def run(self, name: str) -> str:
        return str(self.folder / name)

    @contextmanager
    def twin(self, name: str, make: Callable[[], nn.Module] = Small, **options: Any) -> Iterator[Callable[[], None]]:
        """The same training in one piece, published by rank 0 alone."""
        training = Training(seeded(make))
        publisher = Publisher(self.run(name), group=None, **options) if self.rank == 0 else None

        def publish(steps: int = 1) -> None:
            for _ in range(steps):
                training.step()
            if publisher is not None:
                publisher.publish(training.model, step=training.steps, wait=True)

        yield publish
        if publisher is not None:
            publisher.close()

    def side_by_side(self, name: str, model: nn.Module, make: Callable[[], nn.Module] = Small, **options: Any) -> None:
        """Publish after every step, and what one process alone would have published."""
        training = Training(model)
        store = CountingStore(open_store(self.run(name)))
        with self.twin(f"{name}-alone", make, **{k: v for k, v in options.items() if k != "detector"}) as alone:
            publisher = Publisher(store, **options)
            for _ in range(STEPS):
                training.step()
                handle = publisher.publish(model, step=training.steps, wait=True)
                assert handle.result().version == publisher.version
                alone()
            publisher.close()
        self.report[name] = {"put": store.bytes_out}

    # ── scenarios ────────────────────────────────────────────────────────────────────────────────────────────────────

    def fsdp(self) -> None:
        self.side_by_side("fsdp", sharded(), anchor_every=3)

    def view(self) -> None:
        """Blocks of 128 rows and columns that no rank holds alone."""
        model = seeded(Blocky)
        for part in (model.up, model.down):
            fully_shard(part)
        self.side_by_side("view", fully_shard(model), Blocky, view="fp8-block", anchor_every=3)
        model = seeded(Blocky)
        mesh = init_device_mesh("cpu", (self.size,))
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "middle": RowwiseParallel()})
        self.side_by_side("view-tp", model, Blocky, view="fp8-block", detector=SnapshotDetector())

    def view_experts(self) -> None:
        from moe_models import make as make_experts

        sizes = {"hidden_size": 136, "moe_intermediate_size": 132, "head_dim": 16}
        make = partial(make_experts, "qwen3_moe", vocab_size=301, **sizes)
        model = make()
        for layer in model.model.layers:
            fully_shard(layer)
        self.side_by_side("view-experts", fully_shard(model), make, view="fp8-block")

    def experts(self) -> None:
        """Fused experts: each rank has some of a layer's, and publishes them one by one."""
        from moe_models import make as make_experts

        make = partial(make_experts, "qwen3_moe", vocab_size=301)
        model = make()
        for layer in model.model.layers:
            fully_shard(layer)
        self.side_by_side("experts", fully_shard(model), make, anchor_every=3)

    def offload(self) -> None:
        model = sharded(offload_policy=CPUOffloadPolicy(pin_memory=False))
        self.side_by_side("offload", model, encoding="context", detector=SnapshotDetector())

    def ddp(self) -> None:
        self.side_by_side("ddp", nn.parallel.DistributedDataParallel(seeded(Small)), encoding="raw")

    def grid(self) -> None:
        model = self.on_a_grid()
        self.report["placements"] = {name: str(p.placements) for name, p in model.named_parameters()}
        self.side_by_side("grid", model, Wide)

    def on_a_grid(self) -> nn.Module:
        """FSDP over tensor parallelism: both cut the rows of `up.weight`."""
        mesh = init_device_mesh("cpu", (self.size // 2, 2), mesh_dim_names=("dp", "tp"))
        model = seeded(Wide)
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return fully_shard(model, mesh=mesh["dp"])

    def adamw(self) -> None:
        """What DeltaAdamW notes of its shards, beside what a snapshot finds."""
        models = {"fsdp": sharded(), "ddp": nn.parallel.DistributedDataParallel(seeded(Small))}
        if self.size > 2:
            models["offload"] = sharded(offload_policy=CPUOffloadPolicy(pin_memory=False))
            models["grid"] = self.on_a_grid()
        for name, model in models.items():
            training = Training(model, DeltaAdamW, weight_decay=0.1)
            optimizer = training.optimizer
            runs = [self.run(f"adamw-{name}"), self.run(f"adamw-{name}-snapshot")]
            noted, compared = Publisher(runs[0], detector=optimizer, anchor_every=3), Publisher(runs[1], anchor_every=3)
            for version in range(STEPS):
                for _ in range(1 + version % 2):
                    training.step()
                for publisher in (noted, compared):
                    publisher.publish(model, step=training.steps, wait=True)
            if name == "fsdp":
                # behind the optimizer's back, on every rank
                model.load_state_dict({n: t * 2 if t.is_floating_point() else t for n, t in model.state_dict().items()})
                for _ in range(2):
                    for publisher in (noted, compared):
                        publisher.publish(model, step=training.steps, wait=True)
                    training.step()
            for publisher in (noted, compared):
                publisher.close()
        fused = Publisher(self.run("fused"), detector=FusedDetector({}))
        self.error("fused", partial(fused.publish, model))

    def lora(self) -> None:
        """A sharded PEFT model: its adapter, and what it is when merged."""
        import peft

        model = peft.get_peft_model(seeded(Wide), peft.LoraConfig(r=4, target_modules=["up"], modules_to_save=["down"]))
        fully_shard(model)
        training = Training(model)
        views = {"adapter": adapter(model), "merged": merged_weights(model)}
        publishers = {name: Publisher(self.run(f"lora-{name}")) for name in views}
        self.report["base"] = str(digest_of(ModelView(seeded(Wide))))
        for version in range(3):
            training.step()
            for name, view in views.items():
                publishers[name].publish(view, step=training.steps, wait=True)
                whole = {n: t.full_tensor() for n, t in view.state_dict().items()}
                if self.rank == 0:
                    torch.save(whole, self.folder / f"lora-{name}-{version}.pt")
        for publisher in publishers.values():
            publisher.close()

    def unequal(self) -> None:
        """Some ranks publish more often than others: before the last ones close, or after, or while they do not."""
        first = self.rank == 0
        for name, ahead in (("early", first), ("late", not first)):
            training = Training(sharded())
            publisher = Publisher(self.run(f"unequal-{name}"))
            training.step()
            publisher.publish(training.model, wait=True)
            training.step()
            if ahead:
                publisher.publish(training.model)
                if name == "late":
                    # it waits for the others by the time they close
                    time.sleep(10 * PACE)
            self.error(f"unequal {name}", publisher.close)
        # all but the first wait for the first, so that the others' second and third become one
        training = Training(sharded())
        published = threading.Event()
        slow = Hook(open_store(self.run("unequal-merged")), lambda key: published.wait(120) and None)
        publisher = Publisher(slow)
        for number in range(3):
            training.step()
            if first or number < 2:
                publisher.publish(training.model)
        published.set()
        self.error("unequal merged", publisher.close)
        done = self.folder / "unequal-done"
        training = Training(sharded())
        try:
            with Publisher(self.run("unequal-alive")) as publisher:
                publisher.publish(training.model, wait=True)
                training.step()
                if not first:
                    while not done.exists():
                        time.sleep(PACE)
                    return
                publisher.publish(training.model)
                raise ArithmeticError("the training itself fails")
        except ArithmeticError as error:
            self.report["unequal alive"] = [type(error).__name__, str(error)]
            done.touch()

    def placed(self) -> None:
        """Tensors placed by hand, in every way a mesh allows."""
        mesh = init_device_mesh("cpu", (self.size // 2, 2))
        each = (Replicate(), Shard(0), Shard(1), Shard(2))
        ways = [[a, b] for a in each for b in each]
        torch.manual_seed(1)
        whole = {f"t{i}": torch.randint(-(2**31), 2**31, (7, 6, 5)).to(torch.int32) for i in range(len(ways))}
        whole["long"] = torch.randint(0, 2**40, (9,))
        ways.append([Shard(0), Replicate()])
        publisher = Publisher(self.run("placed"), anchor_every=2)
        for version in range(3):
            cut = {n: distribute_tensor(t, mesh, way) for (n, t), way in zip(whole.items(), ways, strict=True)}
            publisher.publish(cut, wait=True)
            if self.rank == 0:
                torch.save(whole, self.folder / f"placed-{version}.pt")
            whole = {n: t + (torch.rand(t.shape) < 0.2) for n, t in whole.items()}
            dist.broadcast_object_list(shared := [whole])
            whole = shared[0]
        publisher.close()

    def on_a_gpu(self) -> None:
        """Shards that lie on a GPU, all on the same one: what gloo cannot gather there, nobody needs to gather."""
        # a mesh takes the GPU of this number
        os.environ["LOCAL_RANK"] = "0"
        mesh = init_device_mesh("cuda", (self.size,))
        detectors = {"device": SnapshotDetector(), "host": SnapshotDetector(memory="host"), "default": None}
        for name, detector in detectors.items():
            options = {"encoding": "context", "anchor_every": 3, "wire_dtype": "bf16"}
            random = torch.Generator("cuda").manual_seed(3)
            shapes = {"a": (301, 64), "b": (40,)}
            whole = {n: torch.randn(shape, device="cuda", generator=random) for n, shape in shapes.items()}
            alone = Publisher(self.run(f"gpu-{name}-alone"), group=None, **options) if self.rank == 0 else None
            together = Publisher(self.run(f"gpu-{name}"), detector=detector, **options)
            for step in range(STEPS):
                parts = {n: t.tensor_split(self.size)[self.rank].contiguous() for n, t in whole.items()}
                shards = {
                    n: DTensor.from_local(t, mesh, [Shard(0)], shape=whole[n].shape, stride=whole[n].stride())
                    for n, t in parts.items()
                }
                together.publish(shards, step=step, wait=True)
                if alone is not None:
                    alone.publish(whole, step=step, wait=True)
                for tensor in whole.values():
                    tensor += 0.01 * (torch.rand(tensor.shape, device="cuda", generator=random) < 0.1)
            together.close()
            if alone is not None:
                alone.close()

    def refused(self) -> None:
        mesh = init_device_mesh("cpu", (self.size,))
        summand = DTensor.from_local(torch.ones(4), mesh, [Partial()])
        self.error("partial", lambda: Publisher(self.run("refused")).publish({"a": summand}))
        # every rank says something else
        self.error("differs", lambda: Publisher(self.run("refused")).publish({"a": torch.ones(4 + self.rank)}))

    def recut(self) -> None:
        """What is not where it was at the first publish is refused on each rank that sees it, and is in no version."""
        mesh = init_device_mesh("cpu", (self.size,))
        one, other = torch.arange(32.0).reshape(8, 4), -torch.arange(32.0).reshape(8, 4)

        def cut(tensor: torch.Tensor, dim: int = 0) -> DTensor:
            return distribute_tensor(tensor.clone(), mesh, [Shard(dim)])

        def held(**tensors: torch.Tensor) -> list[dw.Shard]:
            rows = slice(self.rank * 8 // self.size, (self.rank + 1) * 8 // self.size)
            return [dw.Shard(name, tensor[rows], (8, 4), (rows,)) for name, tensor in tensors.items()]

        rows, others = cut(one), cut(other)
        cases: dict[str, tuple[Any, Any]] = {
            "columns": ({"w": rows}, {"w": cut(other, 1)}),
            "whole": ({"w": rows}, {"w": other}),
            "more": ({"w": rows}, {"w": rows, "more": others}),
            "less": ({"w": one, "more": other}, {"w": one}),
            "untied": ({"w": one, "tied": one}, {"w": one, "tied": other}),
            "untied parts": ({"w": rows, "tied": rows}, {"w": rows, "tied": others}),
            "untied shards": (held(w=one, tied=one), held(w=one, tied=other)),
        }
        for name, (before, after) in cases.items():
            publisher = Publisher(self.run(f"recut-{name}"))
            publisher.publish(before, wait=True)
            self.error(name, lambda publisher=publisher, after=after: publisher.publish(after))
            publisher.publish(before, wait=True)
            publisher.close()
        uneven = {"w": one, "tied": one if self.rank == 0 else other}
        self.error("untied on one rank", lambda: Publisher(self.run("recut-refused")).publish(uneven))
        kinds = [{"w": one}, [dw.Shard("w", one, (8, 4))], iter([("w", one)])]
        for first, second in ((0, 1), (1, 2), (2, 0)):
            model = kinds[first if self.rank == 0 else second]
            self.error(
                f"kinds {first} {second}",
                lambda model=model: Publisher(self.run("recut-refused")).publish(model, step=1),
            )

    def upload_fails(self) -> None:
        """The last rank cannot put its part of version 2."""
        failed: list[str] = []

        def before_put(key: str) -> None:
            if self.rank == self.size - 1 and key.startswith("deltas/step_000002") and not failed:
                failed.append(key)
                raise StoreError("no room for this one")

        training = Training(sharded())
        publisher = Publisher(Hook(open_store(self.run("fails")), before_put))
        with self.twin("fails-alone") as alone:
            for version in range(STEPS):
                training.step()
                handle = publisher.publish(training.model, step=training.steps)
                if version == 2:
                    self.error("upload", handle.result)
                    assert publisher.version == 1
                    continue
                assert handle.result().version == publisher.version
                alone(2 if version == 3 else 1)
            publisher.close()

    def out_of_step(self) -> None:
        """Trainers and uploads of different speed on different ranks: versions merge publishes, the same everywhere."""
        training = Training(sharded())
        several = threading.Event()

        def slow(key: str) -> None:
            # the first upload takes as long as a few steps, on a slow machine too
            several.wait(120)
            time.sleep(PACE * (3 if self.rank else 1))

        publisher = Publisher(Hook(open_store(self.run("merged")), slow))
        handles = []
        with self.twin("merged-alone") as alone:
            for number in range(4 * STEPS):
                training.step()
                time.sleep(PACE * (number % (2 + self.rank)) / 2)
                handles.append(publisher.publish(training.model, step=training.steps))
                if number == 3:
                    several.set()
                alone()
            publisher.close()
        self.report["merged"] = [handle.result().version for handle in handles]

    def resume(self) -> None:
        """A run taken up by a trainer that is where the run is, then by one that is behind, then by another model."""
        training = Training(sharded())
        with Publisher(self.run("resume")) as publisher:
            for _ in range(3):
                training.step()
                publisher.publish(training.model, step=training.steps, wait=True)
        with Publisher(self.run("resume")) as publisher:
            assert publisher.resume(training.model) == 2
            publisher.publish(training.model, step=3, wait=True)
        behind = Training(sharded())
        behind.step()
        with Publisher(self.run("resume")) as publisher:
            self.error("diverged", lambda: publisher.resume(behind.model))
        # as on a GPU: what was rebuilt goes to where the model is
        with Publisher(self.run("resume"), detector=SnapshotDetector()) as publisher:
            publisher.publish(behind.model, step=1, wait=True)
            behind.step()
            publisher.publish(behind.model, step=2, wait=True)
        other = fully_shard(seeded(Wide))
        self.error("other model", lambda: Publisher(self.run("resume")).publish(other))

    def contradicted(self) -> None:
        """What the last rank puts as its part of an anchor is not what it captured."""
        training, put = Training(sharded()), VersionWriter._put

        def spoiled(writer: Any, terms: Any, pending: Any, *rest: Any) -> Any:
            if terms.version == 2 and self.rank == self.size - 1:
                state = pending.changes.owner.detector.state
                state.bits(max(state.schema.tensors, key=lambda tensor: tensor.units).name)[5] ^= 1
            VersionWriter._put = put
            return put(writer, terms, pending, *rest)

        publisher = Publisher(self.run("contradicted"), anchor_every=2)
        with self.twin("contradicted-alone") as alone:
            for version in range(5):
                training.step()
                if version == 2:
                    VersionWriter._put = spoiled
                handle = publisher.publish(training.model, step=training.steps)
                if version == 2:
                    self.error("contradicted", handle.result)
                    continue
                self.report[f"kinds {version}"] = handle.result().kinds
                alone(2 if version == 3 else 1)
            publisher.close()

    def interrupted(self) -> None:
        """The last rank is interrupted where a publish moves what it captured, and all go on."""
        self.interrupt([captures.Captures.capture, captures.Captures.fold], first=False)

    def interrupted_everywhere(self) -> None:
        """The same at every line, also of the first publish, which opens the run."""
        where = [captures, background, pipeline, publishing, collective, detectors]
        self.interrupt(where, first=True)
        self.interrupt(where, first=False)
        self.interrupt(where, first=False, view="fp8-block")

    def interrupted_shards(self) -> None:
        """The same where ranks hand in lists of shards."""
        where = [shard, sharding.Shards, sharding.tiles, captures.Captures, publishing.Publisher]
        self.interrupt(where, first=True, form="shards")
        self.interrupt(where, first=False, form="shards")

    def interrupt(self, where: list[Any], *, first: bool, form: str = "tensors", **options: Any) -> None:
        """A training for each line: of all ranks the last one is interrupted there."""
        kind = {"tensors": f"{first}-{len(options)}", "shards": f"shards-{first}"}.get(form, form)
        interrupts, last = self.rank == self.size - 1, self.size - 1
        weights = [torch.arange(16 * 8, dtype=torch.bfloat16).reshape(16, 8) / 7]
        for step in range(5):
            weights.append(weights[-1].clone())
            weights[-1].view(-1)[step::11] += 1
        if options:
            models = [ModelView({"w.weight": w}) for w in weights]
            expected = [str(digest_of(BlockView(model, Blocks(model.schema, FP8_BLOCK)))) for model in models]
        else:
            expected = [str(digest_of(ModelView({"w.weight": w}))) for w in weights]
        outcomes: Counter[str] = Counter()
        at = 0 if first else 2

        def train(interrupted: Interrupted) -> None:
            name, failed = f"interrupted-{kind}-{sum(outcomes.values())}", []
            trainer = Publisher(self.run(name), anchor_every=3, continues=True, **options)
            mesh = init_device_mesh("cpu", (self.size,))

            def attempt(work: Callable[[], object]) -> None:
                try:
                    work()
                except DeltawireError as error:
                    failed.append(type(error).__name__)

            was_raised = False
            for step, whole in enumerate(weights):
                local = whole.tensor_split(self.size)[self.rank].contiguous()
                if form == "tensors":
                    placed = DTensor.from_local(local, mesh, [Shard(0)], shape=whole.shape, stride=whole.stride())
                    publish = partial(trainer.publish, {"w.weight": placed}, step=step)
                elif form == "shards":

                    def publish(local: torch.Tensor = local, step: int = step, whole: torch.Tensor = whole) -> None:
                        first = self.rank * local.numel()
                        there = range(first, first + local.numel())
                        trainer.publish([dw.Shard("w.weight", local.view(-1), whole.shape, there)], step=step)
                else:
                    publish = partial(trainer.publish, [("w.weight", whole)], step=step)
                if step == at:
                    was_raised = interrupted(publish)
                else:
                    attempt(publish)
            attempt(trainer.close)
            dist.all_gather_object(heard := [None] * self.size, failed)
            dist.broadcast_object_list(going := [was_raised], src=last)
            self.goes_on = bool(going[0])
            with suppress(RunNotFound):
                run = Run.open(self.run(name))
                found = [run.manifest(version).digest for version in run.listed()]
                assert set(found) <= {*expected}, (name, found)
                if any(heard):
                    # nobody goes on in the belief that all is well
                    assert all({*each} & {"RankLost", "OutOfStep"} for each in heard), (name, heard)
                else:
                    assert found[-1] == expected[-1], (name, found)
            outcomes["lost" if any(heard) else "went on"] += 1
            # as after a restart: a rank may have closed a group that others have
            dist.destroy_process_group()
            self.meet(name)

        def not_interrupted(call: Callable[[], object]) -> bool:
            with suppress(DeltawireError):
                call()
            return False

        if interrupts:
            raising_at_each_line(where, train)
        else:
            self.goes_on = True
            while self.goes_on:
                train(not_interrupted)
        self.report[f"interrupted-{kind}"] = outcomes

    def killed(self) -> None:
        """The last rank dies while it puts its part of version 2; torchrun may start all of them again."""
        if int(os.environ["TORCHELASTIC_RESTART_COUNT"]):
            self.after_kill()
            return
        # torchrun asks the others to end, which are to say first what they saw
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

        def before_put(key: str) -> None:
            if self.rank == self.size - 1 and key.startswith("deltas/step_000002"):
                os.kill(os.getpid(), signal.SIGKILL)

        training = Training(sharded())
        publisher = Publisher(Hook(open_store(self.run("killed")), before_put))
        for version in range(3):
            training.step()
            handle = publisher.publish(training.model, step=training.steps)
            if version == 2:
                self.error("killed", handle.result)
                self.error("after", lambda: publisher.publish(training.model))
            else:
                handle.result()

    def after_kill(self) -> None:
        """The training starts again from a checkpoint of step 2, and the run goes on."""
        training = Training(sharded())
        for _ in range(2):
            training.step()
        with Publisher(self.run("killed")) as publisher:
            assert publisher.resume(training.model) == 1
            training.step()
            publisher.publish(training.model, step=training.steps, wait=True)

    def pairs(self) -> None:
        """All ranks gather one tensor after the other, in another order each time; rank 0 publishes. At last rank 1
        gathers and has nothing to bring."""
        training, store = Training(sharded()), CountingStore(open_store(self.run("pairs")))
        publisher, versions = Publisher(store, anchor_every=3), []
        with self.twin_of_pairs("pairs-alone", anchor_every=3) as alone:
            for step in range(STEPS + 1):
                training.step()
                names = sorted(training.model.state_dict(), reverse=bool(step % 2))
                brought = list(gathered(training.model, names))
                if step == STEPS and self.rank:
                    brought = []
                versions.append(publisher.publish(brought, step=training.steps, wait=step == 2).result().version)
                alone()
            publisher.close()
        self.report |= {"pairs versions": versions, "pairs put": store.bytes_out}

    def pairs_refused(self) -> None:
        """One rank has something else, and all of them raise."""
        training, publisher = Training(sharded()), Publisher(self.run("pairs-refused"))

        def other(what: str, rank: int) -> Iterator[tuple[str, torch.Tensor]]:
            # the gathers are those of all ranks, whatever comes of them here
            for name, tensor in gathered(training.model, training.model.state_dict()):
                if self.rank != rank or name != "up.weight":
                    yield name, tensor
                elif what == "dtype":
                    yield name, tensor.half()
                elif what == "name":
                    yield "up.other", tensor
                elif what == "twice":
                    yield name, tensor
                    yield name, tensor + 1

        with self.twin_of_pairs("pairs-refused-alone") as alone:
            training.step()
            publisher.publish(gathered(training.model, training.model.state_dict()), step=1, wait=True)
            alone()
            training.step()
            self.error("pairs a model 0", lambda: publisher.publish(training.model, step=2))
            for rank in range(self.size):
                for what in ("dtype", "name", "left out", "twice", "broke off"):
                    if (what, rank) == ("twice", 1):
                        continue
                    # what breaks off on one rank alone would leave the others in their gathers
                    brought: Any = other(what, rank)
                    if what == "broke off":
                        brought = broken(training.model, self.rank == rank)
                    self.error(f"pairs {what} {rank}", partial(publisher.publish, brought, step=2))
            publisher.publish(gathered(training.model, training.model.state_dict()), step=2, wait=True)
            alone()
            publisher.close()

    def pairs_resume(self) -> None:
        """A run taken up with the newest weights, then with others; and a view."""
        random = torch.Generator().manual_seed(5)
        weights = [torch.randn(300, 140, generator=random).bfloat16()]
        for _ in range(3):
            weights.append(weights[-1].clone())
            weights[-1][::7, ::5] += 1
        groups = [{}, {"group": None}] if self.rank == 0 else [{}]
        for alone in groups:
            name = f"pairs-resume{'-alone' * bool(alone)}"
            for numbers in ((0, 1), (2,), (3,)):
                with Publisher(self.run(name), continues=True, anchor_ratio=1e9, **alone) as publisher:
                    if numbers == (2,) and not alone:
                        self.error("pairs diverged", partial(publisher.resume, [("up.weight", weights[2])]))
                        self.report["pairs resumed"] = publisher.resume([("up.weight", weights[1])])
                    for number in numbers:
                        publisher.publish([("up.weight", weights[number])], step=number, wait=True)
            with Publisher(self.run(name.replace("resume", "view")), view="fp8-block", **alone) as publisher:
                for number in (0, 1):
                    publisher.publish([("up.weight", weights[number])], step=number, wait=True)
                if not alone:
                    # all are of one mind, and it is another model; then they are not
                    for what, rows in (("", 9), (" other", 9 + self.rank)):
                        other = [("up.weight", weights[0][:rows])]
                        self.error(f"pairs view{what}", partial(publisher.publish, other, step=2))

    def early(self) -> None:
        """Publishers that are made before the ranks know of each other, first of no run and then of one."""
        weights = torch.arange(64).bfloat16()
        for version in range(2):
            dist.destroy_process_group()
            publisher = Publisher(self.run("early"), continues=True)
            self.meet(f"early-{version}")
            self.error(f"early weights {version}", publisher.weights)
            weights[version] += 3
            publisher.publish([("w", weights)], step=version)
            publisher.close()

    def pairs_interrupted(self) -> None:
        where = [one_by_one, pipeline.Pipeline._taken, captures.Captures.capture]
        self.interrupt(where, first=False, form="pairs")

    def pairs_out_of_step(self) -> None:
        publisher = Publisher(self.run("pairs-out-of-step"))
        publisher.publish([("w", torch.ones(8))], step=0, wait=True)
        self.error("pairs steps", lambda: publisher.publish([("w", torch.ones(8))], step=1 + self.rank))
        self.error("pairs after", lambda: publisher.publish([("w", torch.ones(8))], step=2))

    def pairs_given_up(self) -> None:
        """Ranks give up in their own threads while the background thread of one waits for that of the other, which
        writes nothing any more."""
        publisher, weights = Publisher(self.run("pairs-given-up")), torch.arange(8.0)
        publisher.publish([("w", weights)], step=0, wait=True)
        background = publisher._pipeline.background
        soon = background.next

        def late() -> Any:
            found = soon()
            time.sleep(1.0)
            return found

        if self.rank:
            background.next = late  # type: ignore[method-assign]
        for step in (1, 2):
            # the thread waits in the first one already
            publisher.publish([("w", weights + step)], step=step, wait=step == 1)
        time.sleep(0.3)
        self.error("pairs given up", lambda: publisher.publish([("w", weights)], step=3 + self.rank))
        self.error("pairs given up, close", lambda: publisher.close(timeout=60))
        # nobody ends before
        dist.barrier()

    def pairs_killed(self) -> None:
        """The last rank dies between two tensors."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

        def dying() -> Iterator[tuple[str, torch.Tensor]]:
            yield "v", torch.ones(8)
            if self.rank == self.size - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            yield "w", torch.ones(8)

        publisher = Publisher(self.run("pairs-killed"))
        publisher.publish([("v", torch.ones(8)), ("w", torch.ones(8))], wait=True)
        self.error("pairs killed", lambda: publisher.publish(dying()))
        self.error("pairs after death", lambda: publisher.publish([("v", torch.ones(8)), ("w", torch.ones(8))]))

    @contextmanager
    def twin_of_pairs(self, name: str, **options: Any) -> Iterator[Callable[[], None]]:
        """The same training in one piece, whose tensors rank 0 publishes alone."""
        training = Training(seeded(Small))
        publisher = Publisher(self.run(name), group=None, **options) if self.rank == 0 else None

        def publish() -> None:
            training.step()
            if publisher is not None:
                tensors = gathered(training.model, training.model.state_dict())
                publisher.publish(tensors, step=training.steps, wait=True)

        yield publish
        if publisher is not None:
            publisher.close()

    # ── shards that are handed in, and FSDP1 ─────────────────────────────────────────────────────────────────────────

    def shards(self) -> None:
        """Parts of tensors, cut as tensor, expert and pipeline parallelism cut, as flat ranges, and otherwise."""
        random = torch.Generator().manual_seed(5)
        shapes = {"rows.weight": (301, 24), "columns.weight": (140, 264), "flat.weight": (201, 150)}
        shapes |= {"experts": (8, 6, 10), "norm": (24,), "last": (5, 3)}
        whole = {name: torch.randn(shape, generator=random).bfloat16() for name, shape in shapes.items()}
        whole |= {"step": torch.tensor(3), "wide": torch.arange(40).reshape(5, 8), "tied.weight": whole["rows.weight"]}
        for name, view in (("shards", None), ("shards-view", "fp8-block")):
            publisher = Publisher(self.run(name), anchor_every=2, view=view)
            alone = (
                Publisher(self.run(f"{name}-alone"), group=None, anchor_every=2, view=view) if self.rank == 0 else None
            )
            for version in range(4):
                publisher.publish(self.cut(whole), step=version, wait=True)
                if alone is not None:
                    alone.publish(whole, step=version, wait=True)
                for number, tensor in enumerate(whole.values()):
                    flat = tensor.view(-1)
                    flat[(version + number) % len(flat) :: 17] += 1
            publisher.close()
            if alone is not None:
                alone.close()

    def cut(self, whole: dict[str, torch.Tensor]) -> list[dw.Shard]:
        """This rank's shards. Some are copies, as a GPU's are; some are views of the whole."""

        def part(name: str, *where: slice) -> dw.Shard:
            return dw.Shard(name, whole[name][where].clone(), tuple(whole[name].shape), where)

        def along(side: int) -> slice:
            each = -(-side // self.size)
            return slice(min(side, self.rank * each), min(side, (self.rank + 1) * each))

        def flat(name: str, ends: list[int]) -> dw.Shard:
            where = range(*ends[self.rank : self.rank + 2])
            return dw.Shard(name, whole[name].reshape(-1)[where.start : where.stop], tuple(whole[name].shape), where)

        rows = part("rows.weight", along(301))
        shards = [
            rows,
            dw.Shard("tied.weight", rows.tensor, rows.full_shape, rows.where),
            part("columns.weight", slice(None), along(264)),
            # every rank has two pieces of it, as of a fused projection
            part("experts", along(8), slice(0, 3)),
            part("experts", along(8), slice(3, 6)),
            # one rank of four has nothing of it
            flat("flat.weight", [0, 10000, 12000, 12000, 30150] if self.size == 4 else [0, 12010, 30150]),
            dw.Shard("norm", whole["norm"], (24,)),
            part("wide", slice(None), along(8)),
            dw.Shard("step", whole["step"], ()),
        ]
        if self.rank == self.size - 1:
            shards.append(part("last"))
        return shards

    def bad_shards(self) -> None:
        """Each is refused on all ranks, and the publish after it works."""
        first, last = self.rank == 0, self.rank == self.size - 1
        whole = torch.arange(24.0).reshape(6, 4)
        rows = slice(0, 3) if first else slice(3, 6)
        good = [dw.Shard("w", whole[rows], (6, 4), (rows,))]
        publisher = Publisher(self.run("bad-shards"))
        other = whole + last
        bad: dict[str, list[Any]] = {
            "gap": [dw.Shard("w", whole[0:3], (6, 4), (slice(0, 3),))],
            "shape": [dw.Shard("w", whole[rows], (7 if last else 6, 4), (rows,))],
            "dtype": [dw.Shard("w", whole[rows].to(torch.float64 if last else torch.float32), (6, 4), (rows,))],
            "bits": [*good, dw.Shard("w", other[2], (6, 4), range(8, 12)) if last else good[0]],
            "twice": [*good, *([dw.Shard("w", other[4:5] + 1, (6, 4), (slice(4, 5),))] if last else [])],
            "other": [*good, *(["w"] if last else [])],
            "missing": good if first else [],
        }
        for name, shards in bad.items():
            self.error(name, lambda shards=shards: publisher.publish(shards))
        assert publisher.version is None
        overlapping = [*good, dw.Shard("w", whole[2:4], (6, 4), range(8, 16))]
        assert publisher.publish(tuple(overlapping)).result().version == 0
        # after the first: said at once, by the rank that holds something else, and the next one goes on for all
        whole += 1
        if last:
            self.error("later", lambda: publisher.publish(good))
        else:
            publisher.publish(overlapping)
        whole += 1
        assert publisher.publish(overlapping).result().version == 1
        publisher.close()
        self.report["bad-shards"] = str(digest_of(ModelView({"w": whole})))
        self.error("alone", lambda: Publisher(self.run("alone"), group=None).publish(good))

    def fsdp1(self) -> None:
        for original in (True, False):
            name = f"fsdp1-{original}"
            self.side_by_side(name, flattened(original), anchor_every=3)
            model = flattened(original)
            training = Training(model, lr=1e-5)
            publisher = Publisher(self.run(f"{name}-gathered"), detector=SnapshotDetector() if original else None)
            for _ in range(STEPS):
                training.step()
                publisher.publish(model, step=training.steps, wait=True)
                self.gathered(f"{name}-gathered", model)
            publisher.close()

    def gathered(self, name: str, model: nn.Module) -> None:
        """Note the digest of the full state dict, as FSDP1 itself gathers it."""
        whole = seeded(Small)
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            whole.load_state_dict(model.state_dict())
        digest = str(digest_of(ModelView(whole, "auto")))
        self.report.setdefault(f"{name} digests", []).append(digest)

    def fsdp1_goes_on(self) -> None:
        """The training of `fsdp1` from its last step on, by another number of ranks."""
        for original in (True, False):
            name = f"fsdp1-{original}"
            training = Training(flattened(original))
            for _ in range(STEPS):
                training.step()
            with Publisher(self.run(name)) as publisher:
                assert publisher.resume(training.model) == STEPS - 1
                for _ in range(2):
                    training.step()
                    publisher.publish(training.model, step=training.steps, wait=True)
                    self.gathered(f"{name} on", training.model)

    def fsdp1_ways(self) -> None:
        """Before the first step, between forward and backward, in mixed precision, unsharded, and refused."""
        ways: dict[str, dict[str, Any]] = {
            "plain": {},
            "mixed": {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)},
            "grad_op": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
            "unsharded": {"sharding_strategy": ShardingStrategy.NO_SHARD},
        }
        for name, how in ways.items():
            model = flattened(True, **how)
            training = Training(model, lr=1e-4)
            publisher = Publisher(self.run(f"fsdp1-{name}"))
            publisher.publish(model, step=0, wait=True)
            self.gathered(f"fsdp1-{name}", model)
            training.step()
            model(torch.zeros(1, 3, dtype=torch.int64))
            publisher.publish(model, step=1, wait=True)
            self.gathered(f"fsdp1-{name}", model)
            publisher.close()
        conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        bad = FSDP(nn.Sequential(conv), device_id=torch.device("cpu"))
        self.error("not by rows", lambda: Publisher(self.run("not-by-rows")).publish(bad))
        self.error("fsdp1 alone", lambda: Publisher(self.run("alone"), group=None).publish(model))
        for original in (True, False):
            inner = flattened(original).module
            self.error(f"inner {original}", lambda inner=inner: Publisher(self.run("inner")).publish(inner))
            self.error(f"leaf {original}", lambda inner=inner: Publisher(self.run("inner")).publish(inner.up.module))

    def fsdp1_adamw(self) -> None:
        training = Training(flattened(True), DeltaAdamW, weight_decay=0.1)
        noted = Publisher(self.run("fsdp1-adamw"), detector=training.optimizer)
        compared = Publisher(self.run("fsdp1-compared"))
        for _ in range(STEPS):
            training.step()
            for publisher in (noted, compared):
                publisher.publish(training.model, step=training.steps, wait=True)
        for publisher in (noted, compared):
            publisher.close()

    # ── what to say ──────────────────────────────────────────────────────────────────────────────────────────────────

    def error(self, what: str, work: Callable[[], Any]) -> None:
        try:
            work()
        except DeltawireError as error:
            self.report[what] = [type(error).__name__, str(error)]
        else:
            raise AssertionError(f"{what} should have failed")


def main(scenarios: str, folder: Path, kind: type[Rank] = Rank) -> None:
    """Scenarios after a slash start with a new process group. All but the last group run in a fork of this process:
    a fork costs nothing, starting ranks anew costs seconds for each."""
    torch.set_num_threads(1)
    *before, last = scenarios.split("/")
    for names in before:
        if not (child := os.fork()):
            play(names, folder, kind)
        if os.waitpid(child, 0)[1]:
            sys.exit(f"{names} failed")
    play(last, folder, kind)


def rehearse() -> None:
    """Load once what every rank would load on first use: parts of torch, and compiled kernels."""
    with tempfile.TemporaryDirectory() as folder, Publisher(f"{folder}/run") as publisher:
        training = Training(seeded(Small))
        for _ in range(3):
            training.step()
            publisher.publish(training.model, wait=True)


def launch(size: int, scenarios: str, folder: Path, kind: type[Rank] = Rank) -> int:
    """Fork the ranks, and return 0 if all of them succeeded."""
    torch.set_num_threads(1)
    rehearse()
    ranks = []
    for rank in range(size):
        if not (child := os.fork()):
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "TORCHELASTIC_RESTART_COUNT": "0"}
            main(scenarios, folder, kind)
        ranks.append(child)
    return int(any([os.waitpid(child, 0)[1] for child in ranks]))


def play(names: str, folder: Path, kind: type[Rank]) -> NoReturn:
    rank, size, attempt = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"))
    me = kind(rank, size, folder)
    me.meet(f"{names}-{attempt}")
    try:
        for scenario in names.split(","):
            began = time.perf_counter()
            getattr(me, scenario)()
            print(f"rank {rank}: {scenario} in {time.perf_counter() - began:.1f} s", flush=True)
        (folder / f"{names}-{rank}.json").write_text(json.dumps(me.report))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    # a group that lost a member waits for it when it is taken down
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[3:]:
        sys.exit(launch(int(sys.argv[3]), sys.argv[1], Path(sys.argv[2])))
    main(sys.argv[1], Path(sys.argv[2]))
