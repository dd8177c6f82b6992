"""What wordle_gpu.py runs where TRL is: the trainer of an arm, and games that are played to evaluate a server.

    python benchmarks/_wordle_arm.py train FOLDER --sync deltas …    and the options of examples/wordle_trl.py
    python benchmarks/_wordle_arm.py play --model … --server-url … --env-url … --games 256

The trainer is the example, with what it trains on noted in FOLDER, and with an end: it begins once FOLDER/gate.json
exists, which says until when to train. If there is a checkpoint in FOLDER/out, it continues from that.

    steps.jsonl         what TRL logs of each step, and when
    games.jsonl         every game that was trained on: reward, staleness by the version in its label
    completions.jsonl   of every 16th group what was asked and answered: tokens, log-probabilities, versions by token
    groups.jsonl        the label of these groups
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import PartialState
from transformers import AutoTokenizer, GenerationConfig, TrainerCallback

HERE = Path(__file__).parent
# the rollout worker's process gets this path from multiprocessing
sys.path[:0] = [str(HERE), str(HERE.parent / "examples")]
import wordle_trl  # noqa: E402

from deltawire.engines.trl_worker import VersionedLoop  # noqa: E402
from deltawire.trl import BucketTransfer  # noqa: E402
from deltawire_wordle.processes import say  # noqa: E402

SOLVED = 0.9
"""The least reward of a game that was solved; one that was lost has at most 0.2."""
NOTED = 16
"""One of so many groups is noted token by token."""

_group: ContextVar[int] = ContextVar("group", default=-1)


def note(file: Path, **line: Any) -> None:
    """Add a line, whole: several processes write, and any may be killed."""
    with open(file, "ab") as out:
        out.write(json.dumps(line).encode() + b"\n")


# ── the rollout worker ───────────────────────────────────────────────────────────────────────────────────────────────


class NotedLoop(VersionedLoop):
    """Notes what the server answered, and the label that the group got from it."""

    def __init__(self, *, folder: str, **options: Any) -> None:
        super().__init__(**options)
        self._folder = Path(folder)

    async def _generate_one(self, *args: Any, group_id: int, **options: Any) -> Any:
        _group.set(group_id)
        return await super()._generate_one(*args, group_id=group_id, **options)

    async def _post(self, path: str, payload: dict[str, Any], *args: Any, **options: Any) -> dict[str, Any]:
        answer: dict[str, Any] = await super()._post(path, payload, *args, **options)
        if _group.get() % NOTED == 0 and (choices := answer.get("choices")):
            note(
                self._folder / "completions.jsonl",
                at=time.time(),
                worker=os.getpid(),
                group=_group.get(),
                prompt=[*payload["prompt"]],
                tokens=choices[0]["token_ids"],
                logprobs=choices[0]["logprobs"]["token_logprobs"],
                versions=choices[0].get("weight_versions"),
            )
        return answer

    async def _score_group(self, group: Any) -> Any:
        samples = await super()._score_group(group)
        if group.group_id % NOTED == 0:
            note(self._folder / "groups.jsonl", worker=os.getpid(), group=group.group_id, label=group.model_version)
        return samples


# ── the trainer ──────────────────────────────────────────────────────────────────────────────────────────────────────


class NotedQueue:
    """The trainer's queue of samples; notes each that it takes."""

    def __init__(self, trainer: Any, folder: Path) -> None:
        self._queue, self._trainer, self._file = trainer.rollout_queue, trainer, folder / "games.jsonl"

    def get(self, *args: Any, **options: Any) -> Any:
        sample = self._queue.get(*args, **options)
        reward = sample.metrics["reward"]
        # one without a reward was lost by the environment
        if math.isfinite(reward):
            note(
                self._file,
                at=time.time(),
                reward=round(reward, 4),
                stale=self._trainer.model_version - sample.model_version,
                tokens=int(sample.completion_mask.sum()),
            )
        return sample

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)


class Watch(TrainerCallback):
    """Notes every step, and ends the training when the time is over, with a checkpoint."""

    def __init__(self, folder: Path, until: float, attempt: int) -> None:
        self._file, self._until, self._attempt = folder / "steps.jsonl", until, attempt

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if time.time() >= self._until:
            control.should_training_stop = control.should_save = True

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        found = (logs or {}).items()
        figures = {name: value for name, value in found if isinstance(value, (int, float)) and math.isfinite(value)}
        note(self._file, at=time.time(), step=state.global_step, attempt=self._attempt, **figures)


class FirstVersionOnly(BucketTransfer):
    """Publishes the weights to start from and no others: the servers keep them."""

    continues = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # the one version is that of sync 0, however often the trainer was started
        self._syncs.OLDER = 0  # type: ignore[misc]

    def _publish(self, named: Iterable[tuple[str, torch.Tensor]], step: int) -> Any:
        if step == 0 and not self.continues:
            return super()._publish(named, step)
        for _ in named:
            pass
        return None


def checkpoints(folder: Path) -> Iterator[Path]:
    """Those that are whole, newest first: the state is written last."""
    found = [path for path in folder.glob("checkpoint-*") if (path / "trainer_state.json").exists()]
    yield from sorted(found, key=lambda path: int(path.name.rpartition("-")[2]), reverse=True)


def train(folder: Path, sync: str, words: list[str]) -> None:
    out = folder / "out"
    newest = next(checkpoints(out), None)
    resume = ["--resume-from-checkpoint", str(newest)] if newest else []
    options, config = wordle_trl.parse([*words, "--output-dir", str(out), *resume])
    FirstVersionOnly.continues = newest is not None
    # whoever started this knows that no other trainer of this run is left, and need not wait to see it
    wordle_trl.BucketTransfer = partial(FirstVersionOnly if sync == "none" else BucketTransfer, takeover=True)
    if sync == "full":
        from _full_weights import full_weights
    with full_weights() if sync == "full" else nullcontext():
        trainer = wordle_trl.make_trainer(options, config)
        worker = trainer.rollout_worker
        worker._loop_cls = NotedLoop
        worker._loop_kwargs["folder"] = str(folder)
        trainer.rollout_queue = NotedQueue(trainer, folder)
        say("ready", step=int(newest.name.rpartition("-")[2]) if newest else 0)
        gate, attempt = folder / "gate.json", int(time.time())
        while not gate.exists():
            time.sleep(0.1)
        trainer.add_callback(Watch(folder, json.loads(gate.read_text())["until"], attempt))
        trainer.train(resume_from_checkpoint=config.resume_from_checkpoint)
    say("done", step=trainer.state.global_step)


# ── an evaluation ────────────────────────────────────────────────────────────────────────────────────────────────────


def play(given: argparse.Namespace) -> dict[str, Any]:
    """Games at temperature 1, all at once, played by TRL's own loop as in training."""
    # of TRL's log, where a request fails
    PartialState()
    tokenizer = AutoTokenizer.from_pretrained(given.model, trust_remote_code=False)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    ends = GenerationConfig.from_pretrained(given.model).eos_token_id
    ends = [ends] if isinstance(ends, int) else [*(ends or [])]
    rules = wordle_trl.secrets(1, 0)[0]["prompt"]
    loop = VersionedLoop(
        model_name=given.model,
        dataset=[],
        reward_funcs=[],
        processing_class=tokenizer,
        eos_token_ids=[*dict.fromkeys([tokenizer.eos_token_id, *ends])],
        rollout_buffer=None,
        model_version_value=SimpleNamespace(value=0),
        heartbeat_value=SimpleNamespace(value=0.0),
        failed_event=None,
        exception_info_queue=None,
        metrics_queue=SimpleNamespace(put_nowait=lambda _: None),
        environment_factory=partial(wordle_trl.Wordle, given.env_url),
        max_inflight_tasks=given.games,
        vllm_server_url=given.server_url,
        max_tokens=given.max_completion_length,
        temperature=1.0,
        chat_template_kwargs=wordle_trl.DEFAULTS["chat_template_kwargs"],
        max_tool_calling_iterations=given.guesses,
        request_timeout=600,
    )
    dice = random.Random(given.seed)
    seeds = [dice.getrandbits(31) for _ in range(given.games)]

    async def game(number: int, seed: int) -> float | None:
        env = wordle_trl.Wordle(given.env_url)
        running = asyncio.get_running_loop()
        begun = await running.run_in_executor(loop._tool_pool, partial(env.reset, seed))
        prompt = [*rules[:-1], {**rules[-1], "content": rules[-1]["content"] + begun}]
        await loop._generate_one(prompt, tool_dict={"guess": env.guess}, tools=[env.guess], group_id=number)
        return await running.run_in_executor(loop._tool_pool, env.get_reward)

    async def games() -> list[float | None]:
        import aiohttp

        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=given.games)) as loop.session:
            return await asyncio.gather(*(game(number, seed) for number, seed in enumerate(seeds)))

    # one event loop for all sessions, not one for each thread that asks first
    wordle_trl.wait_for(asyncio.sleep(0))
    say("ready")
    while given.gate and not given.gate.exists():
        time.sleep(0.1)
    began = time.monotonic()
    rewards = [reward for reward in loop._loop.run_until_complete(games()) if reward is not None]
    versions = sorted({*loop._groups.values()})
    return {
        "solved": sum(reward >= SOLVED for reward in rewards) / max(1, len(rewards)),
        "reward": sum(rewards) / max(1, len(rewards)),
        "games": len(rewards),
        "versions": versions,
        "seconds": round(time.monotonic() - began, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train")
    training.add_argument("folder", type=Path)
    training.add_argument("--sync", choices=("deltas", "full", "none"), required=True)
    playing = commands.add_parser("play")
    for name in ("--model", "--server-url", "--env-url"):
        playing.add_argument(name, required=True)
    playing.add_argument("--games", type=int, default=256)
    playing.add_argument("--guesses", type=int, default=5)
    playing.add_argument("--seed", type=int, default=0)
    playing.add_argument("--gate", type=Path, help="begin once this file exists")
    playing.add_argument("--max-completion-length", type=int, default=64)
    given, words = parser.parse_known_args()
    if given.command == "train":
        train(given.folder, given.sync, words)
    else:
        if words:
            parser.error(f"unknown: {' '.join(words)}")
        say("played", **play(given))


if __name__ == "__main__":
    main()
