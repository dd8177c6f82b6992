"""What a user starts with `accelerate launch`: a loop of Accelerate's, and transformers.Trainer with our callback.

Run by test_trl_launched.py: accelerate launch launched.py FOLDER.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import peft
import torch
from accelerate import Accelerator
from transformers import Trainer, TrainerCallback, TrainingArguments

from deltawire import Publisher
from deltawire.trainer import merged_weights
from deltawire.trl import DeltaSyncCallback

STEPS = 5


class Regression(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = torch.nn.Linear(8, 33)
        self.down = torch.nn.Linear(33, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.down(torch.relu(self.up(x)))[:, 0] - labels).square().mean()}


def data() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(8, generator=generator), "labels": torch.tensor(float(i % 3))} for i in range(64)]


def with_adapter() -> torch.nn.Module:
    return peft.get_peft_model(Regression(), peft.LoraConfig(r=2, target_modules=["up"]))


def weights(model: Any) -> dict[str, torch.Tensor]:
    state = merged_weights(model).state_dict() if hasattr(model, "peft_config") else model.state_dict()
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def own_loop(folder: Path) -> dict[int, dict[str, torch.Tensor]]:
    """A training loop with Accelerate, DDP on CPUs; each process sees other data."""
    accelerator = Accelerator(cpu=True)
    model = Regression()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(data(), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    seen = {}
    with Publisher(str(folder / "accelerate")) as publisher:
        for step, batch in zip(range(1, STEPS + 1), loader, strict=False):
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
            publisher.publish(model, step=step)
            seen[step] = weights(accelerator.unwrap_model(model))
    return seen


class Watch(TrainerCallback):
    """The weights at the moments at which ours publishes."""

    def __init__(self) -> None:
        self.seen: dict[int, dict[str, torch.Tensor]] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **around: Any) -> None:
        self.seen[state.global_step] = weights(around["model"])

    on_step_end = on_train_begin


def trainer_loop(folder: Path, name: str, model: torch.nn.Module) -> dict[int, dict[str, torch.Tensor]]:
    arguments = TrainingArguments(
        output_dir=str(folder / "out"), max_steps=STEPS, per_device_train_batch_size=4, learning_rate=0.01,
        logging_steps=1, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    watch = Watch()
    trainer = Trainer(model=model, args=arguments, train_dataset=data(), callbacks=[watch])
    DeltaSyncCallback(str(folder / name), peft="merged").attach(trainer)
    trainer.train()
    return watch.seen


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    seen = {
        "accelerate": own_loop(folder),
        "trainer": trainer_loop(folder, "trainer", Regression()),
        "peft": trainer_loop(folder, "peft", with_adapter()),
    }
    assert torch.distributed.get_world_size() == 2
    # the training's own group still works, on all ranks
    torch.distributed.barrier()
    torch.save(seen, folder / f"{torch.distributed.get_rank()}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
