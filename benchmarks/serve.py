"""Tokens per second of the built-in rollout server, a process of its own, asked over HTTP.

    python benchmarks/serve.py                                         # the Wordle policy that ships
    python benchmarks/serve.py --model ~/models/stories15m --tokens 128

Loads:
    groups     as the demo asks: four clients, eight prompts in each request, six tokens for each prompt
    requests   32 clients with one prompt each, prompts of 4 to 32 tokens, `--tokens` for each
For each load the fastest and the median of `--rounds` rounds. `cpu` divides by the CPU time of the server's process
instead, which other work on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from _report import about, print_about, write_json
from deltawire_wordle import small_policy


@dataclass(frozen=True, slots=True)
class Load:
    clients: int
    prompts: int
    """Prompts of each request."""
    requests: int
    """Requests of each client in a round, one after the other."""
    tokens: int | None
    """Tokens for each prompt; None: what the command line says."""


LOADS = {"groups": Load(4, 8, 12, 6), "requests": Load(32, 1, 1, None)}


@contextmanager
def server(model: Path, threads: int) -> Iterator[tuple[str, int]]:
    """A server of these weights: its address and process id."""
    with tempfile.TemporaryDirectory(prefix="deltawire-serve-") as folder:
        command = [sys.executable, "-m", "deltawire.cli"]
        run = str(Path(folder) / "run")
        subprocess.run([*command, "publish", str(model), run], check=True, stdout=subprocess.DEVNULL)
        words = [*command, "serve", run, "--port", "0", "--json", "--threads", str(threads)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as process:
            try:
                assert process.stdout is not None
                url = json.loads(process.stdout.readline())["url"]
                while httpx.get(f"{url}/health").status_code != 200:
                    time.sleep(0.1)
                yield url, process.pid
            finally:
                process.terminate()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def play(url: str, load: Load, tokens: int, vocabulary: int, seed: int) -> int:
    """One round; returns how many tokens it gave."""

    def client(number: int) -> int:
        rng, made = random.Random(seed * 1000 + number), 0
        with httpx.Client(base_url=url, timeout=300) as http:
            for _ in range(load.requests):
                prompts = [
                    [rng.randrange(3, vocabulary) for _ in range(rng.randint(4, 32))] for _ in range(load.prompts)
                ]
                body = {"prompt": prompts, "max_tokens": tokens, "logprobs": 0, "return_token_ids": True}
                answer = http.post("/v1/completions", json={**body, "seed": rng.randrange(1 << 30), "ignore_eos": True})
                made += answer.raise_for_status().json()["usage"]["completion_tokens"]
        return made

    with ThreadPoolExecutor(load.clients) as pool:
        return sum(pool.map(client, range(load.clients)))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    vocabulary = json.loads((options.model / "config.json").read_text())["vocab_size"]
    found: dict[str, Any] = {}
    with server(options.model, options.threads) as (url, pid):
        for name, load in LOADS.items():
            tokens = load.tokens or options.tokens
            play(url, load, tokens, vocabulary, 0)
            rates, by_cpu = [], []
            for number in range(1, options.rounds + 1):
                wall, cpu = time.perf_counter(), cpu_seconds(pid)
                made = play(url, load, tokens, vocabulary, number)
                rates.append(made / (time.perf_counter() - wall))
                by_cpu.append(made / (cpu_seconds(pid) - cpu))
            found[name] = {
                "tokens_per_s": {"best": max(rates), "median": statistics.median(rates)},
                "tokens_per_cpu_s": {"best": max(by_cpu), "median": statistics.median(by_cpu)},
            }
            wall_best, cpu_best = max(rates), max(by_cpu)
            print(
                f"{name:9} {wall_best:7.0f} tokens/s  (median {statistics.median(rates):.0f})   "
                f"{cpu_best:7.0f} tokens/s of CPU  (median {statistics.median(by_cpu):.0f})",
                flush=True,
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=small_policy.FOLDER, help="checkpoint folder")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each prompt of `requests`")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1, help="of torch, in the server")
    parser.add_argument("--out", type=Path, help="folder for the figures as JSON")
    options = parser.parse_args()
    facts = about()
    print_about(facts)
    found = measure(options)
    if options.out:
        write_json(options.out / f"serve-{options.model.name}.json", {**facts, **found})


if __name__ == "__main__":
    main()
