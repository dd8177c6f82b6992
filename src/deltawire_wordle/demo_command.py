"""`deltawire demo`: a policy learns Wordle while two servers follow it; then a larger model at a usual rate."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deltawire.cli import ui
from deltawire.cli.serve import Engine

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from .demo import Demo, DemoRecord, ReplicaStatus

BUCKETS = ("run", "s3", "larger")
"""Folders of the demo that hold runs."""
PHASES = ("detect", "encode", "upload", "fetch", "decode", "apply", "prove")
PLAIN_EVERY = 10
"""Steps between two lines of output where there is no terminal."""


def command(
    bucket: Annotated[
        str, typer.Option(metavar="file|s3|URL", help="A folder, an S3 server of its own, or any address.")
    ] = "file",
    engine: Annotated[Engine, typer.Option(help="Inference engine of the rollout servers.")] = "builtin",
    act: Annotated[int | None, typer.Option(min=1, max=2, help="Only this act.", show_default="both")] = None,
    goal: Annotated[
        float, typer.Option(min=0, max=1, help="End training once this share of recent games is solved.")
    ] = 0.8,
    minutes: Annotated[float, typer.Option(min=0.01, help="Of training, at most.")] = 10.0,
    steps: Annotated[int | None, typer.Option(min=1, help="Of training, at most.")] = None,
    lr: Annotated[float, typer.Option(min=0, help="Learning rate of AdamW.")] = 3e-5,
    staleness: Annotated[int, typer.Option(min=0, help="Steps that a sample may be old.")] = 4,
    seed: Annotated[int, typer.Option(min=0, help="Of the secrets and the evaluations.")] = 0,
    games: Annotated[int, typer.Option(min=0, help="In each evaluation; 0 for none.")] = 512,
    kill_replica: Annotated[bool, typer.Option("--kill-replica", help="Kill a server; it rejoins later.")] = False,
    no_sync: Annotated[
        bool, typer.Option("--no-sync", help="Publish nothing between the first and the last step, to compare.")
    ] = False,
    model: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="For act two: a checkpoint folder of yours."),
    ] = None,
    link: Annotated[float, typer.Option(min=0.1, metavar="MBIT/S", help="Bandwidth of act two.")] = 100.0,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", file_okay=False, help="For report and logs; a temporary folder.")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the bucket too, where it lies in that folder.")] = False,
    json: ui.JsonOption = False,
) -> None:
    """Show what deltawire does, on this machine, without a GPU or an account.

    Act one: a trainer, two rollout servers and a Wordle environment, each a
    process of its own. Servers and trainer share nothing but a bucket: after
    every step the trainer publishes what changed, the servers fetch it, write it
    into their live weights and prove the result. They play, the trainer learns
    from their games, and they solve more and more. Training ends once 80 % of
    recent games are solved (--goal), or after ten minutes (--minutes).

    Act two, half a minute: a Qwen3-shaped model of 40 M weights, or yours
    (--model), at a learning rate of 1e-6, over a link of 100 Mbit/s.

    A live page follows both runs and is written as a file at the end. All bits
    are compared and the first run is verified. Takes two minutes on two
    quiet cores, up to six on busy ones.

    \b
    Examples
      deltawire demo
      deltawire demo --kill-replica             one server dies and comes back
      deltawire demo --act 2 --model my-model   the figures of your model
      deltawire demo --bucket s3                through a real S3 server
      deltawire demo --bucket s3://runs/wordle  through yours
      deltawire demo --engine sglang            with SGLang's servers, or vllm
      deltawire demo --no-sync                  the same without updates
    """
    _need_extras()
    from . import report
    from .demo import Demo, DemoPlan

    if bucket not in ("file", "s3"):
        _need_nothing_at(bucket)
    folder = (out or Path(tempfile.mkdtemp(prefix="deltawire-demo-"))).absolute()
    if any((folder / made).exists() for made in BUCKETS):
        raise typer.BadParameter(f"{folder} has a run already; name another folder", param_hint="--out")
    folder.mkdir(parents=True, exist_ok=True)
    plan = DemoPlan(
        folder=folder,
        run=None if bucket == "file" else bucket,
        engine=engine,
        acts=(1, 2) if act is None else (act,),
        steps=steps,
        seconds=60 * minutes,
        goal=goal,
        rate=lr,
        staleness=staleness,
        seed=seed,
        games=games,
        kill_replica=kill_replica,
        sync=not no_sync,
        model=None if model is None else str(model.absolute()),
        link_mbit_s=link,
    )
    demo = Demo(plan)
    try:
        with ui.ended_by_sigterm(), _view(demo, json) as show:
            demo.run(show)
        data = report.write(demo.record)
    finally:
        if not keep:
            for made in BUCKETS:
                shutil.rmtree(folder / made, ignore_errors=True)
    figures, larger = report.summary(demo.record), report.larger(demo.record)
    files = {"html": demo.record.reports.get(1), "larger": demo.record.reports.get(2), "json": str(data)}
    value = {
        "ok": not demo.record.problems, "problems": demo.record.problems, "report": files, **figures, "larger": larger,
    }  # fmt: skip
    ui.emit(value, lambda out: _epilogue(demo.record, figures, larger), json)
    if demo.record.problems:
        raise typer.Exit(1)


def _need_extras() -> None:
    from importlib.util import find_spec

    from deltawire.errors import MissingExtra

    for name in ("torch", "transformers", "httpx", "fastapi", "uvicorn", "websockets", "prometheus_client"):
        if find_spec(name) is None:
            raise MissingExtra(f"the demo needs {name} to train and serve", "rl,serve")


def _need_nothing_at(where: str) -> None:
    from deltawire import Run
    from deltawire.errors import RunNotFound

    try:
        Run.open(where)
    except RunNotFound:
        return
    raise typer.BadParameter(f"there is a run at {where} already; the demo wants an empty place", param_hint="--bucket")


# ── what is seen ─────────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def _view(demo: Demo, quiet: bool) -> Iterator[Callable[[], None]]:
    """A live picture on a terminal, else lines. Yields what is called whenever something may be new."""
    out = ui.console()
    if quiet:
        yield lambda: None
        return
    out.print(_prologue(demo.record), soft_wrap=not out.is_terminal)
    if out.is_terminal:
        from rich.live import Live

        with Live(console=out, refresh_per_second=4, get_renderable=lambda: _picture(demo.record)):
            yield lambda: None
    else:
        yield _Lines(demo.record)


def _prologue(record: DemoRecord) -> str:
    """What will happen."""
    plan, said = record.plan, []
    if 1 in plan.acts:
        said.append(
            f"A policy of 0.5 M weights learns Wordle. A trainer, {plan.replicas} rollout servers and an environment "
            "run as processes of their own; after every training step the servers get the new weights through a "
            "bucket and prove that they hold the trainer's bits. Training ends once "
            f"{plan.goal:.0%} of recent games are solved, after one to three minutes; later where the cores are busy."
        )
    if 2 in plan.acts:
        name = plan.model or "a Qwen3-shaped model of 40 M weights"
        said.append(
            f"{'Then' if said else 'In half a minute,'} {name} is trained at a usual learning rate, and its versions "
            f"cross a link of {plan.link_mbit_s:g} Mbit/s{', in half a minute' if said else ''}."
        )
    return " ".join([*said, "Ctrl-C ends everything.\n"])


class _Lines:
    """One line for each thing that is new, for logs and pipes."""

    def __init__(self, record: DemoRecord) -> None:
        self._story = record
        self._phase, self._act = "", 0
        self._steps, self._evaluated, self._remarks, self._versions = 0, 0, 0, 0

    def __call__(self) -> None:
        record = self._story
        if record.act != self._act and record.act in record.pages:
            self._act = record.act
            print(f"live page: {record.pages[record.act]}", flush=True)
        if record.phase != self._phase:
            self._phase = record.phase
            print(f"· {record.phase}", flush=True)
        for _, text in record.remarks[self._remarks :]:
            print(f"! {text}", flush=True)
        self._remarks = len(record.remarks)
        for found in record.evaluated[self._evaluated :]:
            print(f"v{found['version']}: {found['solved']:.1%} of {found['games']} games solved", flush=True)
        self._evaluated = len(record.evaluated)
        while self._steps + PLAIN_EVERY <= len(record.steps):
            self._steps += PLAIN_EVERY
            print("  ".join(f"{name} {text}" for name, text in _figures(record, self._steps).items()), flush=True)
        for one in record.larger.versions[self._versions :]:
            changed = ui.percent(one["changed"], record.larger.model["weights"])
            print(
                f"v{one['version']}  changed {changed}  sent {ui.size(one['bytes'])}  {ui.duration(one['seconds'])}",
                flush=True,
            )
        self._versions = len(record.larger.versions)


def _figures(record: DemoRecord, upto: int) -> dict[str, str]:
    """What there is to say after so many steps."""
    recent = record.steps[max(0, upto - PLAIN_EVERY) : upto]
    last = recent[-1]
    before = record.steps[upto - len(recent) - 1]["seconds"] if upto > len(recent) else 0.0
    tokens = sum(step["figures"]["tokens"] for step in recent) / max(last["seconds"] - before, 1e-9)
    said = {
        "step": f"{last['step']}",
        "solved": f"{sum(step['figures']['solved'] for step in recent) / len(recent):.0%}",
        "tokens/s": f"{tokens:,.0f}",
        "staleness": f"{sum(step['staleness'] for step in recent) / len(recent):.1f}",
    }
    deltas = [version for version in record.published if version["version"]]
    if deltas:
        newest, sent = deltas[-1], sum(version["bytes"] for version in deltas)
        full = sum(2 * version["elements"] for version in deltas)
        said["version"] = f"{newest['version']}"
        said["changed"] = ui.percent(newest["changed"], newest["elements"])
        said["sent"] = f"{ui.size(sent)} of {ui.size(full)} ({ui.times(full, sent)}, at lr {record.plan.rate:g})"
    for name, statuses in record.replicas.items():
        said[name] = _replica(statuses[-1])
    return said


def _replica(now: ReplicaStatus) -> str:
    if now.version is None:
        return now.state
    pause = f" pause {now.pause_s * 1e3:.0f} ms" if now.pause_s is not None else ""
    return f"v{now.version} lag {now.lag}{pause}"


def _picture(record: DemoRecord) -> Group:
    from rich.console import Group
    from rich.text import Text

    from .report import smoothed

    rates = smoothed([step["figures"]["solved"] for step in record.steps])
    rows = ui.table("", " ", left=("", " "))
    if record.act in record.pages:
        rows.add_row("live page", record.pages[record.act])
    rows.add_row("phase", record.phase)
    for found in [*record.evaluated]:
        rows.add_row(f"v{found['version']} plays", f"{found['solved']:.1%} of {found['games']} games solved")
    if rates:
        width = 60
        shown = rates if len(rates) <= width else [rates[at * (len(rates) - 1) // (width - 1)] for at in range(width)]
        rows.add_row("solve rate", f"{ui.sparkline([*shown, 1.0])[:-1]} {rates[-1]:.0%}")
        done = int(record.progress * 60)
        rows.add_row("training", f"{'━' * done}{'╌' * (60 - done)} {ui.duration(record.steps[-1]['seconds'])}")
        for name, text in _figures(record, len(record.steps)).items():
            if name not in record.replicas:
                rows.add_row(name, text)
    for name, statuses in [*record.replicas.items()]:
        rows.add_row(name, f"{_replica(statuses[-1]):<28} {ui.sparkline([(g.lag or 0) for g in statuses[-30:]])}")
    title = f"Wordle, learned through {record.url or 'a bucket'}"
    if 1 not in record.plan.acts:
        title = f"A larger model, over {record.plan.link_mbit_s:g} Mbit/s"
    more = [Text(f"! {text}", style="yellow") for _, text in record.remarks[-4:]]
    larger = [_larger_table(record)] if record.larger.model else []
    return Group(Text(title, style="bold"), rows, *more, *larger)


# ── act two ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _larger_table(record: DemoRecord) -> Table:
    """Each version of act two: what it took, phase by phase."""
    found = record.larger
    model = found.model
    title = (
        f"{model['weights'] / 1e6:.0f} M weights, AdamW at {model['rate']:g} on fp32 master weights, "
        f"published as bf16 over {model['link_mbit_s']:g} Mbit/s"
    )
    rows = ui.table("", "changed", "sent", "smaller", *PHASES, "in all", title=title, left=("",))
    if found.full is not None:
        rows.add_row("full weights", "", ui.size(found.full["bytes"]), "", *_times_of(found.full))
    for one in found.versions:
        changed, smaller = ui.percent(one["changed"], model["weights"]), ui.times(model["full_bytes"], one["bytes"])
        rows.add_row(f"v{one['version']}", changed, ui.size(one["bytes"]), smaller, *_times_of(one))
    return rows


def _times_of(version: dict[str, Any]) -> list[str]:
    return [*(ui.duration(version["phases"][phase]) for phase in PHASES), ui.duration(version["seconds"])]


def _larger_lines(record: DemoRecord, larger: dict[str, Any]) -> list[str]:
    """What act two has shown, in words."""
    encodings, bits = record.larger.encodings or {}, larger["bits_per_change"]
    by_encoding = ", ".join(
        f"{name} {bits[name]:.1f} ({ui.size(one['bytes'])}, {ui.duration(one['seconds'])} to encode)"
        for name, one in encodings.items()
    )
    return [
        f"at a learning rate of {larger['rate']:g}, {larger['changed_percent']:.2f} % of "
        f"{larger['weights'] / 1e6:.0f} M weights change in a step: {ui.size(larger['bytes'])} instead of "
        f"{ui.size(larger['full_bytes'])}, {larger['smaller']:.0f}× smaller",
        f"from the trainer's call to proven weights over {larger['link_mbit_s']:g} Mbit/s: "
        f"{ui.duration(larger['seconds'])} (median), full weights {ui.duration(larger['seconds_full'])}, both "
        "measured here",
        f"bits per changed weight: {by_encoding}",
    ]


# ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────────────

ENDED = {"goal": "the goal was reached", "seconds": "the time was up", "steps": "all steps were done"}


def _epilogue(record: DemoRecord, figures: dict[str, Any], larger: dict[str, Any] | None) -> None:
    out = ui.console()

    def say(text: str, style: str = "") -> None:
        out.print(text, style=style, soft_wrap=True)

    for problem in record.problems:
        say(f"✗ {problem}", "bold red")
    if figures["solved_after"] is not None:
        say(
            f"solved {figures['solved_before']:.1%} before, {figures['solved_after']:.1%} after "
            f"{figures['steps']} steps in {ui.duration(figures['seconds_training'])} "
            f"({ENDED[figures['ended_by']]}); {ui.duration(figures['seconds_in_all'])} in all"
        )
    if figures["bytes_sent"]:
        say(
            f"{figures['versions']} versions, {figures['changed_percent']:.1f} % of weights changed in each; "
            f"{ui.size(figures['bytes_sent'])} sent instead of {ui.size(figures['bytes_full'])}, anchors included"
        )
        say(f"  so many change because a model this small needs a learning rate of {record.plan.rate:g}")
    if larger is not None:
        if not out.is_terminal:
            out.print(_larger_table(record))
        for line in _larger_lines(record, larger):
            say(line)
    if not record.problems:
        replicas, versions = len(record.equal) + (larger is not None), (record.verified or {}).get("versions", 0)
        verified = f", all {versions} versions verified" if record.verified else ""
        say(f"✓ {replicas} replicas hold the trainer's bits{verified}", "bold green")
    for page in record.reports.values():
        say(f"report: {page}")
