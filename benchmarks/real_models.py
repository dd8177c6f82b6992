"""What reinforcement learning changes in real weights, and what it costs to move: async GRPO over HTTP and a bucket.

    python benchmarks/real_models.py --model stories15m --lr 1e-5 --steps 40
    python benchmarks/real_models.py --model smollm2 --lr 1e-6 3e-6 --steps 12
    python benchmarks/real_models.py --model qwen3-0.6b-shape --lr 1e-6 --steps 20 --device cuda     random weights
    python benchmarks/real_models.py --model smollm2 --lr 1e-6 3e-6 --steps 100 --engine vllm --device cuda

One training run per learning rate. The trainer is this process: fp32 master weights and AdamW (deltawire_wordle.grpo),
bf16 on the wire. Two rollout servers (`deltawire serve`) sample and follow through the bucket. The reward is for short
sentences. Afterwards the run is read once more from the bucket, version by version, to count what changed and to encode
each step in every encoding. The checkpoint folders are made by examples/models; see there for what SmolLM2's is.

With `--engine vllm` one real vLLM samples and follows, on the device of the trainer, while other clients stream from
it: what they wait for between two tokens, and tokens per second of the server, are measured during the training.
`--reloads` is the same with full weights: each version is an anchor, and vLLM's own loader reloads all of it.
`--view fp8-block` publishes fp8, in which vLLM computes (docs/fp8.md); stories15M is widened to whole blocks for that.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import httpx
import numpy as np
import torch
from transformers.utils.logging import disable_progress_bar

import deltawire as dw
from _full_weights import full_weights
from _report import about, print_about, write_json
from _shapes import QWEN3_06B
from deltawire.bucket.run import Run
from deltawire.cli.ui import ended_by_sigterm, sparkline
from deltawire.engines.fingerprint import fingerprint
from deltawire.engines.live.launch import write_version
from deltawire.views import VIEWS
from deltawire_wordle.demo import QUIET
from deltawire_wordle.errors import ServerUnavailable
from deltawire_wordle.fleet import ServerPool
from deltawire_wordle.grpo import Learner, Ledger, Rollout, RolloutGroup, Rollouts, Settings, TrainingStep, train
from deltawire_wordle.processes import ChildProcess, free_port
from deltawire_wordle.train import PATIENCE_S, wait_for

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "tests" / "engines" / "vllm")]
RESULTS = HERE / "results"
ENCODINGS = ("raw", "packed", "context")

STORIES = (
    "Once upon a time, there was a little girl named Lily.", "One day, a big dog went to the park.",
    "Tom had a red ball.", "The cat sat by the window.", "It was a sunny day and the birds",
    "A boy named Tim found a box.", "Mom said to Anna,", "In the forest, a small bear",
)  # fmt: skip
TALK = (
    "The best way to spend a weekend is", "My favourite food is", "When I was young, I", "The weather today is",
    "A good friend should", "In the morning, people often", "The most important invention was", "Cats and dogs",
)  # fmt: skip


def short_sentences(text: str) -> float:
    """1 for sentences of three words, less for longer ones."""
    words, ends = len(text.split()), len(re.findall(r"[.!?]+", text))
    return min(1.0, 3 * ends / words) if words else 0.0


# ── the models ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Subject:
    model: Any
    folder: Path
    """With config and tokenizer."""
    prompts: Sequence[Sequence[int]]
    reward: Callable[[Sequence[int]], float]
    """Of a completion."""


def checkpoint(name: str, folder: Path) -> Subject:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not (folder / "config.json").exists():
        print(f"making {folder} (once)", flush=True)
        subprocess.run([sys.executable, str(HERE.parent / "examples" / "models" / f"{name}.py"), folder], check=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)

    def reward(tokens: Sequence[int]) -> float:
        return short_sentences(tokenizer.decode(tokens, skip_special_tokens=True))

    texts = STORIES if name == "stories15m" else TALK
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
    return Subject(model, folder, [tokenizer(text).input_ids for text in texts], reward)


def in_whole_blocks(subject: Subject, folder: Path) -> Subject:
    """The same Llama with zeros around its weights, so that every matrix has whole blocks of fp8."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    old = subject.model.config
    head = old.hidden_size // old.num_attention_heads
    heads = next(n for n in itertools.count(old.num_attention_heads) if n * head % 128 == 0)
    hidden = -(-old.hidden_size // 128) * 128
    # the mean of the squares is taken over more numbers
    share = old.hidden_size / hidden
    config = LlamaConfig(**{
        **old.to_dict(), "hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": heads,
        "head_dim": head, "rms_norm_eps": old.rms_norm_eps * share,
    })  # fmt: skip
    model = LlamaForCausalLM(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            found = subject.model.get_parameter(name)
            parameter.zero_()
            parameter[tuple(slice(n) for n in found.shape)] = found * (share**0.5 if found.ndim == 1 else 1.0)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(subject.folder, trust_remote_code=False).save_pretrained(folder)
    return replace(subject, model=model, folder=folder)


def random_qwen3(folder: Path, device: str) -> Subject:
    """Qwen3-0.6B by its dimensions. Its rewards mean nothing; how much AdamW changes in weights of that size does."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from deltawire_wordle import small_policy

    shape = QWEN3_06B
    config = Qwen3Config(
        vocab_size=shape.vocabulary, hidden_size=shape.hidden, intermediate_size=shape.inner,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        head_dim=shape.head, tie_word_embeddings=True, max_position_embeddings=1024,
    )  # fmt: skip
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(folder)
    small_policy.tokenizer().save_pretrained(folder)
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3ForCausalLM(config)
    prompts = np.random.default_rng(0).integers(0, shape.vocabulary, (8, 12)).tolist()
    return Subject(model, folder, prompts, lambda tokens: fmean(token < shape.vocabulary // 2 for token in tokens))


# ── one training run ─────────────────────────────────────────────────────────────────────────────────────────────────


class Prompts:
    """A `Task` of grpo.py: complete a prompt several times, and be judged for it."""

    def __init__(self, subject: Subject, settings: Settings, tokens: int) -> None:
        self._subject, self._games, self._tokens = subject, settings.games, tokens
        self._order = itertools.cycle(subject.prompts)

    async def groups(self, fleet: ServerPool) -> AsyncGenerator[RolloutGroup, None]:
        while True:
            prompt = next(self._order)
            rollouts = []
            for sample, versions in await fleet.complete([prompt] * self._games, self._tokens):
                rollout = Rollout(reward=self._subject.reward(sample.tokens))
                rollout.add_context(prompt)
                rollout.add_sample(sample, versions)
                rollouts.append(rollout)
            yield RolloutGroup(rollouts)


class Builtin:
    """`deltawire serve`, several times."""

    def __init__(self, run: str, given: argparse.Namespace, subject: Subject, folder: Path) -> None:
        self._boxes = {}
        for number in range(given.replicas):
            port, name = str(free_port()), f"replica-{number + 1}"
            command = [sys.executable, "-m", "deltawire.cli", "serve", run, "--port", port, "--id", name]
            options = ["--device", given.serve_device, "--threads", str(given.threads), "--poll", "0.1", "--json"]
            self._boxes[f"http://127.0.0.1:{port}"] = ChildProcess(name, [*command, *options], folder)
        for box in self._boxes.values():
            box.start()
        self.urls, self.model = [*self._boxes], None
        self._pauses: list[float] = []

    def wait(self, version: int) -> None:
        """Until all serve it; not for one that has ended."""
        deadline = time.monotonic() + PATIENCE_S
        for url, box in self._boxes.items():
            while True:
                try:
                    wait_for([url], version, seconds=1.0)
                    break
                except ServerUnavailable as error:
                    if not box.running:
                        raise ServerUnavailable(
                            f"{box.name} has ended ({box.exit_code}): {box.last_log_line}"
                        ) from error
                    if time.monotonic() > deadline:
                        raise

    def begin(self) -> None:
        """Training begins."""

    def end(self) -> dict[str, Any]:
        """Training is over: what was measured."""
        pauses = [event["pause_s"] for box in self._boxes.values() for event in heard(box) if event.get("version")]
        return {"pause_ms_median": 1e3 * median(pauses), "pause_ms_max": 1e3 * max(pauses)}

    def equal(self, learner: Learner, run: str) -> bool:
        """Whether all hold the trainer's weights."""
        mine = fingerprint(learner.model.state_dict(), "bf16")
        found = [httpx.get(f"{url}/deltawire/fingerprint", timeout=300.0).json().get("sha256") for url in self.urls]
        return found == [mine] * len(found)

    def stop(self) -> None:
        ChildProcess.stop_all([*self._boxes.values()])


class Vllm:
    """A real vLLM, and clients that stream from it."""

    def __init__(self, run: str, given: argparse.Namespace, subject: Subject, folder: Path) -> None:
        from vllm_live import Server

        refuse = {"VLLM_TEST_REFUSE": "measured with reloads"} if given.reloads else {}
        length = min(2048, subject.model.config.max_position_embeddings)
        # on a CPU compiling takes minutes, and the clients of pause_server.py call the model m
        mode = "--no-enforce-eager" if given.device == "cuda" else "--enforce-eager"
        served = subject.folder
        if given.view:
            write_version(run, 0, served := folder / "served")
        self._server = Server(
            served, folder / "vllm.log", run=Path(run.removeprefix("file://")),
            flags=[mode, "--max-model-len", str(length), "--max-num-seqs", "256", *shlex.split(given.flags)], **refuse,
        )  # fmt: skip
        self.urls, self.model = [f"http://127.0.0.1:{self._server.port}"], "m"
        self._folder, self._streams = folder, given.streams
        # a completion of the clients is up to half as long again, and a prompt comes before it
        self._tokens_each = min(400, length // 2)
        self._timings: dict[int, dict[str, float]] = {}
        self._over = threading.Event()

    def wait(self, version: int) -> None:
        self._server.wait().until(version=version, limit=PATIENCE_S)

    def begin(self) -> None:
        from pause_server import Clients

        cores = sorted(os.sched_getaffinity(0))
        self._clients = Clients(self._server.port, self._streams, cores[-4:], self._folder, self._tokens_each)
        time.sleep(3)
        self._watching = threading.Thread(target=self._watch, daemon=True)
        self._watching.start()
        self._began, self._tokens = time.monotonic(), self._generated()

    def end(self) -> dict[str, Any]:
        from pause_server import PERCENTILES, Gaps

        now, tokens = time.monotonic(), self._generated() - self._tokens
        self._over.set()
        self._watching.join()
        gaps = 1e3 * Gaps(self._clients.stop()).within((self._began, now))
        phases = {name for timings in self._timings.values() for name in timings}
        middle = {name: [t[name] for t in self._timings.values() if name in t] for name in sorted(phases)}
        return {
            "guard": self._server.status()["guard"],
            "tokens_per_s": tokens / (now - self._began),
            "streams": self._streams,
            "gap_ms": {
                **{name: float(np.percentile(gaps, q)) for name, q in PERCENTILES.items()},
                "p99.9": float(np.percentile(gaps, 99.9)),
            },
            "gaps_over_50_ms": int((gaps > 50).sum()),
            "sync_ms_median": {name: 1e3 * median(values) for name, values in middle.items()},
            "pause_ms_median": 1e3 * median(middle["pause"]),
            "pause_ms_max": 1e3 * max(middle["pause"]),
        }

    def equal(self, learner: Learner, run: str) -> bool:
        """Whether its live weights have the digest that the publisher took of the trainer's; of reloaded weights, which
        have another layout, whether the server could prove them."""
        if self._server.status()["guard"] != "patch":
            return bool(self._server.status()["state"] == "healthy")
        found = self._server.http.get("/deltawire/digest").raise_for_status().json()
        return bool(found["digest"] == Run.open(run).manifest(found["version"]).digest)

    def stop(self) -> None:
        self._over.set()
        self._server.stop()

    def _watch(self) -> None:
        with httpx.Client(base_url=self.urls[0], timeout=60) as http:
            while not self._over.wait(0.05):
                status = http.get("/deltawire/status").json()
                self._timings[status["version"]] = status["timings"]

    def _generated(self) -> float:
        lines = self._server.http.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:generation_tokens_total"))


def run_once(subject: Subject, rate: float, given: argparse.Namespace, run: str, folder: Path) -> dict[str, Any]:
    settings = Settings(
        secrets=given.prompts, games=given.generations, workers=given.prompts, staleness=given.staleness, rate=rate
    )
    learner = Learner(subject.model.to(given.device), settings)
    steps: list[TrainingStep] = []
    with ExitStack() as cleanup:
        if given.reloads:
            cleanup.enter_context(full_weights())
        options: dict[str, Any] = {"encoding": given.encoding, "view": given.view}
        publisher = cleanup.enter_context(dw.Publisher(run, wire_dtype="bf16", files=subject.folder, **options))
        publisher.publish(learner.model, step=0, wait=True)
        servers = (Vllm if given.engine == "vllm" else Builtin)(run, given, subject, folder)
        cleanup.callback(servers.stop)
        servers.wait(0)
        wait_for_turn(given.turn)
        ledger = Ledger(publisher)
        servers.begin()
        with Rollouts(servers.urls, Prompts(subject, settings, given.tokens), settings, servers.model) as rollouts:
            for step in train(learner, ledger, rollouts, settings, steps=given.steps):
                steps.append(step)
                print(
                    f"step {step.step:3}  {step.seconds:6.1f} s  reward {step.figures['reward']:.3f}  "
                    f"sample age {step.staleness:.1f}  waited {step.waited_s:.1f} s",
                    flush=True,
                )
        measured = servers.end()
        ledger.settle(learner.model, len(steps), PATIENCE_S)
        assert publisher.version is not None
        servers.wait(publisher.version)
        equal = servers.equal(learner, run)
    rewards = [step.figures["reward"] for step in steps]
    tenth = max(len(rewards) // 8, 1)
    return {
        "lr": rate,
        "steps": len(steps),
        "seconds": steps[-1].seconds,
        "reward_first": fmean(rewards[:tenth]),
        "reward_last": fmean(rewards[-tenth:]),
        "rewards": [round(reward, 4) for reward in rewards],
        "staleness": fmean(step.staleness for step in steps),
        "tokens_per_step": fmean(step.figures["tokens"] for step in steps),
        **measured,
        "equal": equal,
        "versions": [*(committed(run) if given.engine == "vllm" else account(run))],
    }


def wait_for_turn(turn: Path | None) -> None:
    """For several runs whose servers are started at once: say that it is ready, and wait for the file."""
    if turn is not None:
        turn.with_suffix(".ready").touch()
        while not turn.exists():
            time.sleep(0.2)


def heard(box: ChildProcess) -> list[dict[str, Any]]:
    """The versions that a server said it took."""
    found = []
    while not box.events.empty():
        event = box.events.get()
        if event.get("event") == "version":
            found.append(event)
    return found


# ── what is in the bucket ────────────────────────────────────────────────────────────────────────────────────────────


def account(where: str) -> Iterator[dict[str, Any]]:
    """For each version but the first: what changed in it, what it cost, and what it would cost in each encoding.

    Only the later half is encoded anew, which is what `summary` looks at: a large model takes seconds for each.
    """
    run, replica = Run.open(where), dw.Replica(where, heartbeat=0)
    model = {tensor.name: np.zeros(tensor.shape, np.uint16) for tensor in run.schema.tensors}
    replica.sync(model, 0)
    # near zero a weight changes at every step, however small; real weights that began as exact zeros are an artefact
    zeros = {name: bits & 0x7FFF == 0 for name, bits in model.items()}
    versions = [version for version in run.listed() if version]
    for number, version in enumerate(versions):
        print(f"reading version {version} of {versions[-1]} again", end="\r", flush=True)
        late = number >= len(versions) // 2
        before = {name: bits.copy() for name, bits in model.items()}
        replica.sync(model, version)
        moved = {name: bits != before[name] for name, bits in model.items()}
        changed = sum(int(where.sum()) for where in moved.values())
        links = {link.kind: link for link in run.manifest(version).links}
        yield {
            "version": version,
            "step": run.manifest(version).step,
            "changed": changed,
            "elements": run.schema.elements,
            "from_zero": sum(int((where & zeros[name]).sum()) for name, where in moved.items()),
            "sent": links["delta"].bytes if "delta" in links else links["anchor"].bytes,
            "sent_as": links["delta"].encoding if "delta" in links else "anchor",
            "anchor": links["anchor"].bytes if "anchor" in links else 0,
            "encoded": {name: len(dw.encode(before, model, name)) for name in ENCODINGS if late},
        }


def committed(where: str) -> Iterator[dict[str, Any]]:
    """For each version but the first what its manifest says, without reading it again."""
    run = Run.open(where)
    for version in run.listed():
        manifest = run.manifest(version)
        if version:
            yield {
                "version": version,
                "step": manifest.step,
                "changed": manifest.changed,
                "elements": run.schema.elements,
                "full": sum(tensor.units * tensor.unit_size for tensor in run.schema.tensors),
                "sent": sum(link.bytes for link in manifest.links),
                "sent_as": manifest.links[0].encoding or manifest.links[0].kind,
            }


def summary(result: dict[str, Any]) -> dict[str, Any]:
    """The middle of the later half: Adam's first steps change more than all others."""
    versions = result["versions"]
    late = versions[len(versions) // 2 :]

    def middle(of: Callable[[dict[str, Any]], float]) -> float:
        return median(of(one) for one in late)

    tried = ENCODINGS if "encoded" in late[0] else ()
    bits = {name: middle(lambda one, name=name: 8 * one["encoded"][name] / one["changed"]) for name in tried}
    return {
        "full": versions[0].get("full", 2 * versions[0]["elements"]),
        "sent": middle(lambda one: one["sent"]),
        "bytes": {name: middle(lambda one, name=name: one["encoded"][name]) for name in tried},
        "changed_first": versions[0]["changed"] / versions[0]["elements"],
        "changed": middle(lambda one: one["changed"] / one["elements"]),
        "from_zero": middle(lambda one: one["from_zero"] / one["elements"]) if tried else None,
        "bits": {**bits, "sent": middle(lambda one: 8 * one["sent"] / one["changed"])},
    }


def show(model: str, results: Sequence[dict[str, Any]]) -> None:
    for one in results:
        found = one["summary"]
        print(f"\n{model}, lr {one['lr']:g}: {one['steps']} steps in {one['seconds']:.0f} s, "
              f"{one['tokens_per_step']:.0f} sampled tokens each")  # fmt: skip
        print(f"  reward      {one['reward_first']:.3f} → {one['reward_last']:.3f}   {sparkline(one['rewards'])}")
        print(f"  changed     {found['changed_first']:.2%} in the first step, then {found['changed']:.2%} per step")
        if found["from_zero"] is not None:
            print(f"              of which {found['from_zero']:.2%} began as exact zeros")
        print(f"  per step    {found['sent'] / 1e6:.3f} MB sent, {found['full'] / 1e6:.1f} MB full "
              f"({found['full'] / found['sent']:.0f}×)")  # fmt: skip
        for name, bits in found["bits"].items():
            size = found["bytes"].get(name, found["sent"])
            print(f"    {name:10}{size / 1e6:8.3f} MB {bits:7.2f} bits per changed weight")
        print(f"  pause       {one['pause_ms_median']:.1f} ms in the middle, {one['pause_ms_max']:.1f} ms at most")
        if "gap_ms" in one:
            shown = "  ".join(f"{name} {value:.1f}" for name, value in one["gap_ms"].items())
            print(f"  gaps        {shown} ms; {one['tokens_per_s']:.0f} tokens/s by the server; guard {one['guard']}")
        print(f"  all replicas equal to the trainer, bit for bit: {'yes' if one['equal'] else 'NO'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, choices=["stories15m", "smollm2", "qwen3-0.6b-shape"])
    parser.add_argument("--folder", type=Path, help="its checkpoint folder (models/NAME, made where it is missing)")
    parser.add_argument("--lr", nargs="+", type=float, default=[1e-5])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--prompts", type=int, default=4, help="per step (%(default)s)")
    parser.add_argument("--generations", type=int, default=8, help="completions per prompt (%(default)s)")
    parser.add_argument("--tokens", type=int, default=24, help="per completion, at most (%(default)s)")
    parser.add_argument("--staleness", type=int, default=2, help="steps that a sample may be old (%(default)s)")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of the trainer and of each server (%(default)s)")
    parser.add_argument("--engine", choices=["builtin", "vllm"], default="builtin")
    parser.add_argument("--reloads", action="store_true", help="vllm: full weights, loaded by vLLM's own reload")
    parser.add_argument("--view", choices=VIEWS, help="vllm: publish and serve this view of the weights")
    parser.add_argument("--streams", type=int, default=16, help="vllm: other clients that stream (%(default)s)")
    parser.add_argument("--flags", default="", help="vllm: more flags of vllm serve, in quotes")
    parser.add_argument("--turn", type=Path, help="wait for this file before training begins")
    parser.add_argument("--device", default="cpu", help="of the trainer; of vLLM too")
    parser.add_argument("--serve-device", default="cpu", help="of the rollout servers")
    parser.add_argument("--encoding", default="auto")
    parser.add_argument("--bucket", choices=["file", "s3"], default="file", help="s3: a SeaweedFS of its own")
    parser.add_argument("--keep", type=Path, help="leave the runs in this folder: run-0, run-1 … (benchmarks/fp8.py)")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    os.environ.update(QUIET)
    disable_progress_bar()
    torch.set_num_threads(given.threads)
    facts = about()
    print_about(facts)
    results = []
    kept = nullcontext(given.keep) if given.keep else tempfile.TemporaryDirectory(prefix="deltawire-real-")
    with ended_by_sigterm(), kept as scratch:
        place = Path(scratch).resolve()
        place.mkdir(parents=True, exist_ok=True)
        with seaweed(place) if given.bucket == "s3" else nullcontext(place.as_uri()) as bucket:
            for number, rate in enumerate(given.lr):
                torch.manual_seed(1)
                folder = place / f"logs-{number}"
                folder.mkdir()
                if given.model == "qwen3-0.6b-shape":
                    subject = random_qwen3(place / "shape", given.device)
                else:
                    subject = checkpoint(given.model, given.folder or Path("models") / given.model)
                    if given.view:
                        subject = in_whole_blocks(subject, place / "blocks")
                clock = time.monotonic()
                result = run_once(subject, rate, given, f"{bucket}/run-{number}", folder)
                results.append({**result, "summary": summary(result), "seconds_in_all": time.monotonic() - clock})
    show(given.model, results)
    engine = "" if given.engine == "builtin" else f"-{given.engine}"
    out = given.out or RESULTS / f"real-models-{given.model}{engine}.json"
    about_run = {"model": given.model, "device": given.device, "engine": given.engine, "encoding": given.encoding}
    about_run |= {"reloads": given.reloads, "view": given.view}
    write_json(out, {"about": facts, **about_run, "results": results})
    if not all(one["equal"] for one in results):
        raise SystemExit("a replica does not hold the trainer's weights")


@contextmanager
def seaweed(folder: Path) -> Iterator[str]:
    from deltawire_wordle.seaweed import BUCKET, SeaweedFS

    with SeaweedFS(folder / "s3") as server:
        os.environ.update(server.environment)
        yield f"s3://{BUCKET}"


if __name__ == "__main__":
    main()
