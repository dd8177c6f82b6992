"""One rank of a training by a real DeepSpeed. Run by test_zero.py, as sharded_rank.py is by test_shards.py."""

from __future__ import annotations

import copy
import os
import signal
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from sharded_rank import STEPS, Hook, Rank, Small, launch, seeded
from torch import nn

from deltawire import Publisher
from deltawire.core.full import digest_of
from deltawire.models import ModelView
from deltawire.store import open_store

# else compiled at its first use, and it spins while it waits, which takes seconds for four ranks on two cores
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]


class Zero(Rank):
    def meet(self, place: str) -> None:
        os.environ["LOCAL_RANK"] = str(self.rank)
        super().meet(place)
        deepspeed.init_distributed("gloo")

    # ── scenarios ────────────────────────────────────────────────────────────────────────────────────────────────────

    def zero3(self) -> None:
        """Masters in fp32, trained as bf16 and as fp32; parameters and moments in the host's memory; small parameters
        that every rank keeps whole, and others with fewer elements than ranks."""
        persistent = {"stage3_param_persistence_threshold": 40}
        offload = {name: {"device": "cpu"} for name in ("offload_param", "offload_optimizer")}
        self.train("zero3-bf16", {"stage": 3, **persistent}, bf16=True)
        self.train("zero3-fp32", {"stage": 3, "stage3_param_persistence_threshold": 0})
        self.train("zero3-offload", {"stage": 3, **persistent, **offload}, bf16=True, module=True)

    def zero_less(self) -> None:
        """ZeRO 0 to 2, whose ranks hold all parameters."""
        for stage in range(3):
            self.train(f"zero{stage}", {"stage": stage}, bf16=stage > 0)

    def pretrained(self) -> None:
        """A model of transformers, whose experts are published one by one and whose files go with it."""
        from moe_models import make

        self.train("zero3-experts", {"stage": 3}, make("qwen3_moe", vocab_size=301))

    def goes_on(self) -> None:
        """The training of `zero3` from its last step on, by another number of ranks."""
        engine = self.engine({"stage": 3}, bf16=True, state=torch.load(self.folder / "zero3-bf16.pt"))
        with Publisher(self.run("zero3-bf16")) as publisher:
            assert publisher.resume(engine) == STEPS - 1
            for step in range(STEPS, STEPS + 2):
                self.step(engine, step)
                publisher.publish(engine, step=step, wait=True)
                self.gathered("zero3-bf16 on", engine)

    def refused(self) -> None:
        engine = self.engine({"stage": 3}, bf16=True)
        self.error("alone", lambda: Publisher(self.run("alone"), group=None).publish(engine))
        self.error("state dict", lambda: Publisher(self.run("alone")).publish(engine.module.state_dict()))

    def killed(self) -> None:
        """The last rank dies after version 2 is captured and before it is committed."""
        engine = self.engine({"stage": 3}, bf16=True)

        def before_put(key: str) -> None:
            if self.rank == self.size - 1 and key.startswith("deltas/step_000002"):
                os.kill(os.getpid(), signal.SIGKILL)

        publisher = Publisher(Hook(open_store(self.run("killed")), before_put))
        for version in range(3):
            self.step(engine, version)
            handle = publisher.publish(engine, step=version)
            if version == 2:
                self.error("killed", handle.result)
            else:
                handle.result()

    # ── how they train ───────────────────────────────────────────────────────────────────────────────────────────────

    def engine(
        self, zero: dict[str, Any], model: nn.Module | None = None, *, bf16: bool = False, state: Any = None
    ) -> Any:
        model = model or seeded(Small)
        if state is not None:
            model.load_state_dict(state)
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "bf16": {"enabled": bf16},
            "zero_optimization": zero,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
            "zero_force_ds_cpu_optimizer": False,
        }
        return deepspeed.initialize(model=model.to(torch.bfloat16) if bf16 else model, config=config)[0]

    def step(self, engine: Any, number: int) -> None:
        generator = torch.Generator().manual_seed(100 * number + self.rank)
        tokens = torch.randint(0, 301, (4, 9), generator=generator)
        found = engine(tokens[:, :-1])
        logits = getattr(found, "logits", found)
        engine.backward(nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()))
        engine.step()

    def train(self, name: str, zero: dict[str, Any], model: nn.Module | None = None, **how: Any) -> None:
        module = how.pop("module", False)
        engine = self.engine(zero, model, **how)
        publisher = Publisher(self.run(name), anchor_every=3)
        for step in range(STEPS):
            self.step(engine, step)
            publisher.publish(engine.module if module else engine, step=step, wait=True)
            whole = self.gathered(name, engine)
        publisher.close()
        if self.rank == 0:
            torch.save(whole, self.folder / f"{name}.pt")

    def gathered(self, name: str, engine: Any) -> dict[str, torch.Tensor]:
        """Note the digest of the full weights, as DeepSpeed gathers them."""
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
            whole = copy.deepcopy(engine.module.state_dict())
            digest = str(digest_of(ModelView(engine.module, "auto")))
        self.report.setdefault(f"{name} digests", []).append(digest)
        return whole


if __name__ == "__main__":
    sys.exit(launch(int(sys.argv[3]), sys.argv[1], Path(sys.argv[2]), Zero))
