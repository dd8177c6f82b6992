"""The trainer of a Wordle run, a process that shares nothing with its servers but a bucket:

    python -m deltawire_wordle.train --run s3://runs/wordle --env http://host:8000 --server http://a:8000 --server http://b:8000

Publishes the policy as version 0, waits for the servers to have it, measures how well they play, trains, and measures
again once they have the last version. Writes one JSON object per line, `event` says which: phase, published, evaluated,
step, remark, done. A DELTAWIRE_TOKEN in its environment goes to the servers.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

import httpx
import torch

from deltawire import ModelView, Published, Publisher, digest_of
from deltawire.engines.live import fingerprint

from . import small_policy
from .errors import ServerRefused, ServerUnavailable
from .evaluate import GAMES, WINDOW, evaluate
from .games import Games
from .grpo import Learner, Ledger, Rollouts, Settings, train
from .processes import plain_errors, say
from .sampling import ServerSampler, Spread
from .wordle import Rules
from .wordlists import load

log = logging.getLogger("deltawire")
PATIENCE_S = 300.0
"""For servers to start or to catch up, and for a bucket to come back at the end."""
ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    run: str
    environment: str
    servers: Sequence[str]
    policy: str | None = None
    """A checkpoint folder; by default the policy that ships."""
    model: str | None = None
    """Name of the model, for servers that require one."""
    words: str = small_policy.WORDS
    guesses: int = small_policy.GUESSES
    """Word list and number of guesses of the environment, for the evaluations."""
    steps: int | None = None
    seconds: float | None = None
    goal: float | None = None
    """Share of the games of the last WINDOW steps whose solution ends the training."""
    games: int = GAMES
    """Games of each evaluation; 0 for none."""
    encoding: str = "packed"
    token: str | None = None
    """Bearer token of the servers."""

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}


def run(options: TrainingOptions, settings: Settings) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(settings.seed)
    folder = options.policy or small_policy.FOLDER
    learner = Learner(small_policy.load(folder), settings)
    with Publisher(options.run, wire_dtype="bf16", encoding=options.encoding, files=folder) as publisher:
        _say_published(publisher.publish(learner.model, step=0, wait=True).result())
        assert publisher.version is not None
        say("phase", text="waiting for the replicas")
        wait_for(options.servers, publisher.version, headers=options.headers)
        _evaluate(options, settings, publisher.version)
        say("phase", text="training")
        ledger, step, solved = Ledger(publisher), 0, deque[float](maxlen=WINDOW)
        ended_by = "seconds"
        began = time.monotonic()
        with Rollouts(
            options.servers, Games(options.environment, settings), settings, options.model, headers=options.headers
        ) as rollouts:
            for done in train(learner, ledger, rollouts, settings, steps=options.steps, seconds=options.seconds):
                step = done.step
                for published in done.published:
                    _say_published(published)
                say("step", version=publisher.version, **{k: v for k, v in asdict(done).items() if k != "published"})
                solved.append(done.figures["solved"])
                if reached(options.goal, solved):
                    ended_by = "goal"
                    break
                if step == options.steps:
                    ended_by = "steps"
        trained_s = time.monotonic() - began
        say("phase", text="bringing the last version everywhere")
        for published in ledger.settle(learner.model, step, PATIENCE_S):
            _say_published(published)
        wait_for(options.servers, publisher.version, headers=options.headers)
        _evaluate(options, settings, publisher.version)
        sha256 = fingerprint(learner.model.state_dict(), "bf16")
        # both from the weights that are trained, not from what was sent of them
        digest = str(digest_of(ModelView(learner.model, "bf16")))
        say(
            "done",
            version=publisher.version,
            step=step,
            seconds=trained_s,
            ended_by=ended_by,
            sha256=sha256,
            digest=digest,
        )


def reached(goal: float | None, solved: deque[float]) -> bool:
    """Whether this share of recent games was solved; `solved` has the share of each of the last WINDOW steps."""
    return goal is not None and len(solved) == solved.maxlen and fmean(solved) >= goal


def wait_for(
    servers: Sequence[str], version: int, seconds: float = PATIENCE_S, headers: Mapping[str, str] | None = None
) -> None:
    """Until every server has this version or a later one."""
    deadline = time.monotonic() + seconds
    with httpx.Client(timeout=10.0, headers=headers) as client:
        for url in servers:
            while (reason := _behind(client, url, version)) is not None:
                if time.monotonic() > deadline:
                    raise ServerUnavailable(f"{url} is not at version {version} after {seconds:.0f} s: {reason}")
                time.sleep(0.1)


def _behind(client: httpx.Client, url: str, version: int) -> str | None:
    try:
        health = client.get(f"{url}/health")
        if health.status_code != 200:
            return f"it is not ready ({health.status_code}): {health.text[:300]}"
        status = client.get(f"{url}/deltawire/status")
        if status.is_client_error:
            raise ServerRefused(f"{url}/deltawire/status answered {status.status_code}: {status.text[:300]}")
        has = status.json().get("version")
    except (httpx.TransportError, ValueError) as error:
        return repr(error)
    return None if has is not None and has >= version else f"it has version {has}"


def _evaluate(options: TrainingOptions, settings: Settings, version: int) -> None:
    """Through all servers; again where one of them goes away meanwhile."""
    if not options.games:
        return
    say("phase", text=f"playing {options.games} games with version {version}")
    rules = Rules(load(options.words), options.guesses)
    sampler = Spread([ServerSampler(url, options.model, token=options.token) for url in options.servers])
    for attempt in range(1, ATTEMPTS + 1):
        clock = time.monotonic()
        try:
            found = evaluate(sampler, rules, games=options.games, seed=settings.seed)
            say("evaluated", version=version, took_s=time.monotonic() - clock, **asdict(found))
            return
        except ServerUnavailable as error:
            if attempt == ATTEMPTS:
                raise
            log.warning("evaluating again: %s", error)
            wait_for(options.servers, version, headers=options.headers)


def _say_published(published: Published) -> None:
    say("published", **asdict(published))


class _Remarks(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say("remark", text=record.getMessage())


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the small Wordle policy; the servers follow through a bucket.")
    usual = Settings()
    parser.add_argument("--run", required=True, help="where to publish: s3://…, hf://…, a folder")
    parser.add_argument("--env", required=True, help="address of the environment (deltawire env wordle)")
    parser.add_argument("--server", action="append", required=True, help="a rollout server; may be given again")
    parser.add_argument("--policy", help="checkpoint folder to start from (the policy that ships)")
    parser.add_argument("--model", help="the name of the model, for servers that insist")
    parser.add_argument("--words", default=small_policy.WORDS, help="what the environment plays (%(default)s)")
    parser.add_argument("--guesses", type=int, default=small_policy.GUESSES)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--goal", type=float, help=f"end once this share of the games of {WINDOW} steps is solved")
    parser.add_argument("--lr", type=float, default=usual.rate)
    parser.add_argument("--secrets", type=int, default=usual.secrets, help="per step (%(default)s)")
    parser.add_argument("--generations", type=int, default=usual.games, help="games per secret (%(default)s)")
    parser.add_argument("--workers", type=int, default=usual.workers, help="secrets at the same time (%(default)s)")
    parser.add_argument("--staleness", type=int, default=usual.staleness, help="in steps (%(default)s); -1: any")
    parser.add_argument("--encoding", default="packed")
    parser.add_argument("--games", type=int, default=GAMES, help="per evaluation (%(default)s); 0: none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-sync", action="store_true", help="publish nothing between version 0 and the last one")
    given = parser.parse_args()
    if given.steps is None and given.seconds is None:
        parser.error("say when to end: --steps, --seconds or both")
    log.addHandler(_Remarks(logging.WARNING))
    limit = None if given.staleness < 0 or given.no_sync else given.staleness
    settings = Settings(
        secrets=given.secrets, games=given.generations, workers=given.workers, staleness=limit, rate=given.lr,
        seed=given.seed, sync=not given.no_sync,
    )  # fmt: skip
    options = TrainingOptions(
        given.run, given.env, [url.rstrip("/") for url in given.server], given.policy, given.model, given.words,
        given.guesses, given.steps, given.seconds, given.goal, given.games, given.encoding,
        os.environ.get("DELTAWIRE_TOKEN", "").strip() or None,
    )  # fmt: skip
    with plain_errors():
        run(options, settings)


if __name__ == "__main__":
    main()
