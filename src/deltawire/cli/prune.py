"""`deltawire prune`: let old versions go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from .common import JsonOption, RunArgument, emit, size, table
from .quantities import seconds

if TYPE_CHECKING:
    from rich.console import Console

    from ..bucket.prune import PrunePlan


def command(
    run: RunArgument,
    keep_last: Annotated[int, typer.Option(min=0, help="Keep so many of the newest versions.")] = 20,
    keep_every: Annotated[
        int | None, typer.Option(min=1, help="And every version whose number divides by this.", show_default=False)
    ] = None,
    keep: Annotated[
        list[int] | None,
        typer.Option(metavar="VERSION", min=0, help="And this version; repeatable.", show_default=False),
    ] = None,
    grace: Annotated[
        float,
        typer.Option(parser=seconds, metavar="TIME", help="Nothing younger goes: 90s, 30min, 1h, 2d."),
    ] = "1h",  # type: ignore[assignment]  # parsed like what is typed
    apply: Annotated[bool, typer.Option("--apply", help="Do it. Without this, only say what would go.")] = False,
    json: JsonOption = False,
) -> None:
    """Delete old versions without stranding any that stays.

    A version that stays keeps its manifest and everything on its cheapest path:
    the anchor before it and the deltas in between. The newest version always
    stays, and nothing younger than the grace period goes, so that readers reach
    the end of what they have begun. Publishers and replicas may go on meanwhile;
    a replica that sits on a version that goes catches up from an anchor.
    Leftovers of crashed publishes and of replicas silent for a day go too.

    \b
    Examples
      deltawire prune s3://runs/chat                        what would go
      deltawire prune s3://runs/chat --apply                let it go
      deltawire prune s3://runs/chat --keep-last 100 --keep-every 500 --apply
      deltawire prune s3://runs/chat --keep 120 --keep 340 --grace 1d
    """
    from ..bucket.prune import Retention, apply_prune, survey
    from ..bucket.run import Run

    opened = Run.open(run)
    plan = survey(opened, Retention(keep_last, keep_every, frozenset(keep or ()), grace))
    if apply:
        apply_prune(opened, plan)
    emit({"run": opened.store.url, "applied": apply, **_value(plan)}, lambda out: _render(out, plan, apply), json)


def _value(plan: PrunePlan) -> dict[str, Any]:
    return {
        "newest": plan.newest,
        "kept": {str(version): why for version, why in plan.kept.items()},
        "dropped": plan.dropped,
        "delete": [item.key for item in plan.objects],
        "bytes": plan.bytes,
    }


def _render(out: Console, plan: PrunePlan, applied: bool) -> None:
    from ..bucket.records import ranges

    stay = table("versions that stay", "why", left=("versions that stay", "why"))
    for why in dict.fromkeys(plan.kept.values()):
        stay.add_row(ranges(v for v, reason in plan.kept.items() if reason == why), why)
    out.print(stay)
    if not plan.objects:
        out.print("nothing can go")
        return
    go = table("what went" if applied else "what can go", "objects", "bytes", left=("what went", "what can go"))
    for name, items in (
        (f"manifests of {len(plan.dropped):,} versions: {ranges(plan.dropped) or 'none'}", plan.manifests),
        ("anchors and deltas", plan.data),
        ("companion files", plan.files),
        ("heartbeats of silent replicas", plan.heartbeats),
    ):
        if items:
            go.add_row(name, f"{len(items):,}", size(sum(item.size for item in items)))
    go.add_row("in all", f"{len(plan.objects):,}", size(plan.bytes), style="bold")
    out.print(go)
    if not applied:
        out.print("nothing was deleted: add --apply to do it")
