"""Plain PyTorch: train, and publish after every step. `follow.py RUN` follows, from another terminal or machine.

python examples/pytorch.py file:///tmp/curve --steps 200
"""

from __future__ import annotations

import argparse
import time

import torch

import deltawire as dw


def make_model() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(1, 256), torch.nn.Tanh(), torch.nn.Linear(256, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1)
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", help="s3://bucket/run, hf://buckets/me/run, file:///tmp/run …")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rest", type=float, default=0.1, help="seconds between steps, as if they were larger")
    given = parser.parse_args()
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with dw.Publisher(given.run, wire_dtype=None) as publisher:  # fp32 as it is; "bf16" is what a language model wants
        publisher.publish(model, step=0)
        for step in range(1, given.steps + 1):
            x = 6 * torch.rand(256, 1) - 3
            loss = (model(x) - x.sin()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            publisher.publish(model, step=step, metrics={"loss": loss.item()})  # returns before anything is uploaded
            time.sleep(given.rest)
    print(f"step {given.steps}  loss {loss.item():.4f}  version {publisher.version}")


if __name__ == "__main__":
    main()
