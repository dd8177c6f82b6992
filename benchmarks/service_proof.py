"""A run on a real service from end to end, and a report to attach to an issue.

make hub-proof BUCKET=hf://buckets/me/scratch
make hub-proof BUCKET=s3://bucket/scratch ARGS="--megabytes 500 --versions 30"
python benchmarks/service_proof.py hf://buckets/me/scratch --out proof.md

What it does below BUCKET, in a folder of its own that it deletes at the end: everything `deltawire doctor` tries; a
trainer that publishes while two followers in processes of their own keep a checkpoint folder current; the whole run
verified; a tag; old versions pruned, and the followers still there; two trainers at once in one run. Full weights
travel six times. Credentials come from the environment, as always.

The report names neither the bucket nor its owner, nor anything from the environment that could be a secret. Exit code 0
when everything held, else 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from _report import about
from deltawire import Published, Publisher
from deltawire.bucket import prune
from deltawire.bucket.browse import below
from deltawire.bucket.references import as_run
from deltawire.bucket.run import Run
from deltawire.bucket.verify import verify
from deltawire.bucket.versions import resolve, set_tag
from deltawire.core.errors import DeltawireError, PublishError
from deltawire.core.full import Checkpoint, digest_of
from deltawire.doctor import examine_store as examine
from deltawire.store import open_store

FOLLOWERS = 2
DENSITY = 0.01
"""Share of the weights that a step changes."""

Model = dict[str, np.ndarray]


class Failed(Exception):
    """Something did not hold; the message says what."""


@dataclass(slots=True)
class Step:
    name: str
    ok: bool
    seconds: float
    detail: str


@dataclass(slots=True)
class Proof:
    url: str
    """The address of this proof's own folder."""
    megabytes: float
    versions: int
    patience: float
    steps: list[Step] = field(default_factory=list)
    findings: list[Step] = field(default_factory=list)
    """What doctor found."""

    def attempt(self, name: str, work: Callable[[], str]) -> bool:
        print(f"{name} …", flush=True)
        clock = time.perf_counter()
        try:
            detail, ok = work(), True
        except (DeltawireError, Failed, subprocess.SubprocessError, OSError) as error:
            detail, ok = f"{type(error).__name__}: {error}", False
        self.steps.append(Step(name, ok, time.perf_counter() - clock, detail))
        print(f"  {'ok' if ok else 'FAILED'}: {detail}", flush=True)
        return ok

    def go(self, scratch: Path) -> None:
        try:
            self.attempt("doctor", self.doctor)
            with self.followers(scratch) as followers:
                chat = _Chat(self, followers)
                if self.attempt("publish and follow", chat.publish):
                    self.attempt("verify", lambda: _verified(self.below("chat")))
                    self.attempt("tag and prune", chat.prune)
                    self.attempt("follow after the prune", chat.publish)
            self.attempt("two writers", self.two_writers)
        finally:
            self.attempt("delete everything", self.delete)

    def below(self, name: str) -> str:
        return below(open_store(self.url), name)

    def doctor(self) -> str:
        # as the command does it: no patience on top of the client's own
        report = examine(open_store(self.below("doctor"), retry=False))
        self.findings = [Step(f.check, f.verdict != "failed", f.seconds, f.detail) for f in report.findings]
        if not report.healthy:
            bad = [step.name for step in self.findings if not step.ok]
            raise Failed(f"this store does not do what a run needs: {', '.join(bad)}")
        return f"{len(self.findings)} checks"

    @contextlib.contextmanager
    def followers(self, scratch: Path) -> Iterator[list[Follower]]:
        started = [Follower(self.below("chat"), scratch / f"model-{number}") for number in range(FOLLOWERS)]
        try:
            yield started
        finally:
            for follower in started:
                follower.end()

    def two_writers(self) -> str:
        """Both publish as fast as they can. What either was told is committed must be there, under that number."""
        url = self.below("contested")
        command = [sys.executable, __file__, url, "--as-writer", "--versions", str(self.versions)]
        writers = [
            subprocess.Popen([*command, "--megabytes", "2", "--seed", str(seed)], stdout=subprocess.PIPE, text=True)
            for seed in (1, 2)
        ]
        told = [json.loads(writer.communicate(timeout=self.patience)[0]) for writer in writers]
        run = Run.open(url)
        committed = [(version, digest) for one in told for version, digest in one["committed"]]
        for version, digest in committed:
            if run.manifest(version).digest != digest:
                raise Failed(f"version {version} is not what the writer published who was told that it is committed")
        if len({version for version, _ in committed}) != len(committed):
            raise Failed("both writers were told that they committed the same version")
        if not committed:
            raise Failed("neither writer could publish")
        counts = " and ".join(str(len(one["committed"])) for one in told)
        refused = ", ".join(one["refused"] or "not refused" for one in told)
        return f"{counts} versions ({refused}), none of them lost or twice; {_verified(url)}"

    def delete(self) -> str:
        store = open_store(self.url)
        items = [*store.list()]
        for item in items:
            store.delete(item.key)
        left = [item.key for item in store.list()]
        if left:
            raise Failed(f"{len(left)} objects are still listed; delete {self.url} by hand")
        return f"{len(items)} objects"


class Follower:
    """`deltawire follow` in a process of its own, and when it reached which version."""

    def __init__(self, url: str, folder: Path) -> None:
        self.folder = folder
        self.reached: dict[int, float] = {}
        command = [
            sys.executable,
            "-m",
            "deltawire",
            "follow",
            url,
            "--dir",
            str(folder),
            "--json",
            "--id",
            folder.name,
        ]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self._errors: list[str] = []
        for stream, take in ((self._process.stdout, self._take), (self._process.stderr, self._errors.append)):
            threading.Thread(target=lambda s=stream, t=take: [t(line) for line in s], daemon=True).start()

    def _take(self, line: str) -> None:
        self.reached[json.loads(line)["version"]] = time.time()

    def wait_for(self, version: int, patience: float) -> None:
        deadline = time.monotonic() + patience
        while max(self.reached, default=-1) < version:
            if time.monotonic() > deadline or self._process.poll() is not None:
                said = " ".join(self._errors)[-500:]
                raise Failed(f"a follower did not reach version {version} within {patience:.0f} s: {said or 'silent'}")
            time.sleep(0.05)

    def end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()


class _Chat:
    """One training, its followers, and what they should have."""

    def __init__(self, proof: Proof, followers: list[Follower]) -> None:
        self.proof, self.followers = proof, followers
        self.url = proof.below("chat")
        self.model = _model(proof.megabytes, seed=0)
        self.rng = np.random.default_rng(1)

    def publish(self) -> str:
        """Versions one after the other; each follower ends with exactly the last."""
        committed: dict[int, float] = {}
        sizes, puts = [], []
        with Publisher(self.url, continues=True) as publisher:
            for _ in range(self.proof.versions):
                newest = self._step(publisher)
                if newest.version == 0:
                    # followers that have only just started say nothing about the way from the bucket to them
                    self._await(0)
                    continue
                committed[newest.version] = time.time()
                sizes.append(newest.bytes)
                puts.append(newest.timings["put"])
        self._await(newest.version)
        lags = [f.reached[v] - at for f in self.followers for v, at in committed.items() if v in f.reached]
        return (
            f"{len(committed)} deltas to {self.proof.megabytes:g} MB; each {np.median(sizes) / 1e6:.2f} MB, "
            f"put and committed in {np.median(puts):.2f} s; on a follower {np.median(lags):.2f} s later, at most "
            f"{max(lags):.2f} s; {len(self.followers)} followers have the trainer's bits"
        )

    def _step(self, publisher: Publisher) -> Published:
        result = publisher.publish(self.model, wait=True).result(self.proof.patience)
        _train(self.model, self.rng)
        return result

    def _await(self, newest: int) -> None:
        """All followers have this version, bit for bit."""
        for follower in self.followers:
            follower.wait_for(newest, self.proof.patience)
        run = Run.open(self.url)
        for follower in self.followers:
            found = str(digest_of(as_run(Checkpoint(follower.folder), run.schema, "a follower's folder")))
            if found != run.manifest(newest).digest:
                raise Failed(f"a follower's folder is not version {newest}")

    def prune(self) -> str:
        """After one more anchor, all but the tagged and the last go, at once; the grace period is for readers that say
        nothing."""
        with Publisher(self.url, anchor_every=1, continues=True) as publisher:
            self._await(self._step(publisher).version)
        run = Run.open(self.url)
        set_tag(run, 0, "proof")
        plan = prune.prune(run, prune.Retention(last=1, grace=0.0))
        if resolve(Run.open(self.url), "proof") != 0:
            raise Failed("a tagged version was pruned")
        if not plan.going:
            raise Failed("nothing was pruned")
        return f"{len(plan.going)} versions gone, {plan.bytes / 1e6:.1f} MB; {_verified(self.url)}"


def _verified(url: str) -> str:
    result = verify(Run.open(url))
    if result.failure is not None:
        raise Failed(f"{result.failure.object}: {result.failure.message}")
    return f"{result.versions} versions verified, {result.proven} anchors and deltas proven"


def _model(megabytes: float, seed: int) -> Model:
    """bf16 weights as their bits, in a few matrices."""
    rng = np.random.default_rng(seed)
    rows = max(int(megabytes * 1e6 / 2 / 1024 / 4), 1)
    made = {}
    for layer in range(4):
        weights = rng.standard_normal((rows, 1024), np.float32) * 0.02
        made[f"layers.{layer}.weight"] = (weights.view(np.uint32) >> 16).astype(np.uint16)
    return made


def _train(model: Model, rng: np.random.Generator) -> None:
    """One ulp up or down for a hundredth of the weights, as a small learning rate does it."""
    for weights in model.values():
        flat = weights.reshape(-1)
        where = rng.integers(0, flat.size, int(flat.size * DENSITY))
        flat[where] += rng.choice(np.array([1, 0xFFFF], np.uint16), where.size)


def as_writer(url: str, versions: int, megabytes: float, seed: int) -> None:
    """One of two trainers that do not know of each other; says what it was told."""
    model, rng = _model(megabytes, seed), np.random.default_rng(seed)
    committed: list[tuple[int, str]] = []
    refused = ""
    try:
        with Publisher(url, continues=True) as publisher:
            for _ in range(versions):
                result = publisher.publish(model, wait=True).result(120)
                committed.append((result.version, result.digest))
                _train(model, rng)
    except (PublishError, DeltawireError) as error:
        cause = error.__cause__ or error
        refused = type(cause).__name__
    print(json.dumps({"committed": committed, "refused": refused}))


# ── the report ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Scrubber:
    """Takes out of a text what a stranger need not know: the bucket, its owner, this user, and secrets."""

    def __init__(self, url: str, environ: dict[str, str]) -> None:
        place = url.partition("?")[0].partition("://")[2]
        hidden = {part for part in place.split("/") if part not in ("", "buckets")}
        hidden |= {value for name, value in environ.items() if re.search("TOKEN|SECRET|KEY|PASSW|PROFILE|CRED", name)}
        hidden |= {str(Path.home()), socket.gethostname(), environ.get("USER", ""), _hub_token()}
        # the longest first, so that none is left in part
        self._hidden = sorted((text for text in hidden if len(text) > 2), key=len, reverse=True)

    def __call__(self, text: str) -> str:
        for hidden in self._hidden:
            text = text.replace(hidden, "…")
        return re.sub(r"hf_[A-Za-z0-9]{10,}|A[KS]IA[A-Z0-9]{12,}|(?<=[?&])[A-Za-z-]+=[^&\s]+", "…", text)


def _hub_token() -> str:
    try:
        from huggingface_hub import get_token
    except ImportError:
        return ""
    return get_token() or ""


def report(proof: Proof, scrub: Callable[[str], str]) -> str:
    facts: dict[str, Any] = about()
    good = all(step.ok for step in proof.steps)
    scheme = proof.url.partition("://")[0]
    lines = [
        f"# deltawire on {scheme}://: {'everything held' if good else 'something did not hold'}",
        "",
        f"{facts['date']}, {facts['machine']}, Python {facts['python']}, "
        + ", ".join(f"{name} {version}" for name, version in {**facts["versions"], **_clients()}.items()),
        f"Options: {proof.megabytes:g} MB, {proof.versions} versions, {FOLLOWERS} followers.",
        "",
        *_table(proof.steps, scrub),
        "",
        "## doctor",
        "",
        *_table(proof.findings, scrub),
    ]
    return "\n".join(lines) + "\n"


def _clients() -> dict[str, str]:
    from importlib import metadata

    found = {}
    for name in ("obstore", "huggingface_hub", "hf-xet"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _table(steps: list[Step], scrub: Callable[[str], str]) -> Iterator[str]:
    yield "| | step | seconds | |"
    yield "|---|---|---|---|"
    for step in steps:
        detail = " ".join(scrub(step.detail).split()).replace("|", "\\|")
        yield f"| {'✓' if step.ok else '✗'} | {step.name} | {step.seconds:.2f} | {detail} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bucket", help="hf://buckets/me/name, s3://bucket, gs://…, az://…, or a folder in one")
    parser.add_argument("--megabytes", type=float, default=64.0, help="size of the model (64)")
    parser.add_argument("--versions", type=int, default=10, help="how many are published, twice over (10)")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds to wait for anything (300)")
    parser.add_argument("--out", type=Path, default=Path("proof.md"), help="the report (proof.md)")
    parser.add_argument("--as-writer", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.as_writer:
        as_writer(chosen.bucket, chosen.versions, chosen.megabytes, chosen.seed)
        return
    if chosen.versions < 4:
        parser.error("--versions: with fewer than 4 there is nothing to prune")
    url = below(open_store(chosen.bucket), f"deltawire-proof-{secrets.token_hex(6)}")
    proof = Proof(url, chosen.megabytes, chosen.versions, chosen.patience)
    try:
        with tempfile.TemporaryDirectory(prefix="deltawire-proof-") as scratch:
            proof.go(Path(scratch))
    finally:
        chosen.out.write_text(report(proof, Scrubber(url, dict(os.environ))))
        print(f"wrote {chosen.out}: read it before you attach it to an issue")
    sys.exit(not all(step.ok for step in proof.steps))


if __name__ == "__main__":
    main()
