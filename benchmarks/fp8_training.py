"""A training whose samples come from fp8 weights: GRPO with Publisher(view="fp8-block"), a replica, and its policy.

    python benchmarks/fp8_training.py --lr 1e-5 --steps 40

The trainer has fp32 master weights and publishes the view after every step. A replica follows the run through a bucket.
The policy that samples has the replica's weights, e4m3 times scale, and nothing else: engines that compute in fp8 need
a GPU, this runs anywhere. After every sync the replica's bits are compared with the view of the trainer's weights.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

import deltawire as dw
from _report import about, print_about, write_json
from deltawire.bucket.run import Run
from deltawire.cli.ui import sparkline
from deltawire.core import full
from deltawire.models import ModelView, torch_dtype
from deltawire.views import FP8_BLOCK
from deltawire.views.blocks import SCALES, SIDE, Blocks
from deltawire.views.host import BlockView
from deltawire_wordle.grpo import Learner, Rollout, RolloutGroup, Settings
from deltawire_wordle.sampling import Sample
from real_models import HERE, Subject, checkpoint


def dequantized(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights in float32: e4m3 times the scale of the block."""
    result = {}
    for name, tensor in tensors.items():
        scales = tensors.get(name + SCALES)
        if scales is not None:
            rows, columns = tensor.shape
            spread = scales.repeat_interleave(SIDE, 0)[:rows].repeat_interleave(SIDE, 1)[:, :columns]
            tensor = tensor.float() * spread
        if not name.endswith(SCALES):
            result[name] = tensor.float()
    return result


@torch.no_grad()
def sampled(policy: Any, subject: Subject, prompt: list[int], count: int, tokens: int, version: int) -> RolloutGroup:
    """Completions of a prompt, with the log-probabilities they were drawn with."""
    ids, drawn = torch.tensor([prompt] * count), []
    for _ in range(tokens):
        logprobs = policy(input_ids=ids, use_cache=False, logits_to_keep=1).logits[:, -1].float().log_softmax(-1)
        token = torch.multinomial(logprobs.exp(), 1)
        drawn.append(logprobs.gather(1, token))
        ids = torch.cat([ids, token], 1)
    rollouts = []
    for row, chances in zip(ids[:, len(prompt) :].tolist(), torch.cat(drawn, 1).tolist(), strict=True):
        rollout = Rollout(reward=subject.reward(row))
        rollout.add_context(prompt)
        rollout.add_sample(Sample(tuple(row), tuple(chances)), [version])
        rollouts.append(rollout)
    return RolloutGroup(rollouts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["stories15m", "smollm2"], default="stories15m")
    parser.add_argument("--folder", type=Path, help="its checkpoint folder (models/NAME, made where it is missing)")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "fp8-training.json")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(1)
    facts = about()
    print_about(facts)
    subject = checkpoint(given.model, given.folder or Path("models") / given.model)
    policy = checkpoint(given.model, given.folder or Path("models") / given.model).model.eval()
    learner = Learner(subject.model, Settings(secrets=given.prompts, games=given.generations, rate=given.lr))
    prompts, steps = itertools.cycle(subject.prompts), []
    with tempfile.TemporaryDirectory(prefix="deltawire-fp8-") as scratch:
        with dw.Publisher(scratch, view="fp8-block", encoding="context", files=subject.folder) as publisher:
            publisher.publish(learner.model, wait=True)
            run, replica = Run.open(scratch), dw.Replica(scratch, heartbeat=0)
            live = {t.name: torch.zeros(t.shape, dtype=torch_dtype(t.dtype)) for t in run.schema.tensors}
            for step in range(given.steps + 1):
                clock = time.perf_counter()
                version = replica.sync(live)
                source = ModelView(learner.model, "auto")
                view = str(full.digest_of(BlockView(source, Blocks(source.schema, FP8_BLOCK))))
                if not view == run.manifest(version).digest == str(full.digest_of(ModelView(live))):
                    raise SystemExit(f"version {version} is not the view of the trainer's weights")
                if step == given.steps:
                    break
                policy.load_state_dict(dequantized(live), strict=False)
                groups = [
                    sampled(policy, subject, next(prompts), given.generations, given.tokens, version)
                    for _ in range(given.prompts)
                ]
                figures = learner.step(groups)
                publisher.publish(learner.model, step=step + 1, metrics={"reward": figures["reward"]}, wait=True)
                steps.append({"reward": figures["reward"], "seconds": time.perf_counter() - clock})
                print(f"step {step:3}  reward {figures['reward']:.3f}  {steps[-1]['seconds']:.1f} s", flush=True)
        deltas = [run.manifest(v) for v in run.listed() if v]
    rewards, tenth = [one["reward"] for one in steps], max(given.steps // 8, 1)
    result = {
        "model": given.model,
        "lr": given.lr,
        "steps": given.steps,
        "reward_first": fmean(rewards[:tenth]),
        "reward_last": fmean(rewards[-tenth:]),
        "rewards": [round(reward, 4) for reward in rewards],
        "equal": True,
        "sent_median": median(m.links[0].bytes for m in deltas[len(deltas) // 2 :]),
        "seconds": sum(one["seconds"] for one in steps),
    }
    print(f"reward {result['reward_first']:.3f} → {result['reward_last']:.3f}   {sparkline(rewards)}")
    print(f"all {len(deltas) + 1} versions are the view of the trainer's weights, bit by bit")
    write_json(given.out, {"about": facts, **result})


if __name__ == "__main__":
    main()
