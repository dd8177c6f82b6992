"""`deltawire prune`: delete old versions."""

from __future__ import annotations

from typing import Annotated, Any

from typer import Option

import deltawire as dw

from . import ui
from .quantities import seconds


def command(
    run: ui.RunArgument,
    keep_last: Annotated[int, Option(min=0, help="Number of newest versions to keep.")] = 20,
    keep_every: Annotated[
        int | None, Option(min=1, help="Also keep every version whose number divides by this.")
    ] = None,
    keep: Annotated[list[str] | None, Option(metavar="VERSION", help="Also keep this version; repeatable.")] = None,
    grace: Annotated[
        float, Option(parser=seconds, metavar="TIME", help="Time that readers get: 90s, 30min, 1h, 2d.")
    ] = "1h",  # type: ignore[assignment]  # parsed like what is typed
    unfinished: Annotated[
        float,
        Option(parser=seconds, metavar="TIME", help="In a folder: delete unfinished files older than this."),
    ] = "1d",  # type: ignore[assignment]
    apply: Annotated[bool, Option("--apply", help="Delete. Without it, only list what would be deleted.")] = False,
    json: ui.JsonOption = False,
) -> None:
    """Delete old versions, but nothing that kept versions or current readers need.

    The newest version stays, and so does every version with a tag. A version that
    stays keeps its manifest and everything on its cheapest path: the anchor
    before it and the deltas in between. If an object on that path is missing, has
    a wrong size or was found damaged by a keeper, the way around it stays too.

    A version that is older than the grace period and not kept is first marked, so
    that no replica starts to read it. A later prune deletes it, once it has been
    marked for the grace period and no replica's heartbeat says that it reads it.
    So run prune regularly, from cron for instance; publishers, replicas and other
    prunes may run meanwhile. With --grace 0s, only replicas with heartbeats are
    safe. A replica whose version is deleted catches up from an anchor.

    Leftovers of crashed publishes, and of replicas that were silent for a day,
    are deleted too.

    \b
    Examples
      deltawire prune s3://runs/chat                        what would be deleted
      deltawire prune s3://runs/chat --apply                mark and delete
      deltawire prune s3://runs/chat --keep-last 100 --keep-every 500 --apply
      deltawire prune s3://runs/chat --keep 120 --keep 340 --grace 1d
    """
    opened = dw.Run.open(run)
    kept = frozenset(opened.resolve(version) for version in keep or ())
    rule = dw.Retention(keep_last, keep_every, kept, grace, unfinished=unfinished)
    plan = dw.prune(opened, rule, apply=apply)
    ui.emit({"run": opened.store.url, "applied": apply, **_value(plan)}, lambda out: _render(out, plan, apply), json)


def _value(plan: dw.PrunePlan) -> dict[str, Any]:
    return {
        **ui.pick(plan, "newest", "marked", "waiting", "bytes"),
        "kept": {str(version): why for version, why in plan.kept.items()},
        "marked_bytes": plan.later,
        "gone": plan.going,
        "deleted": [item.key for item in plan.objects],
    }


def _render(out: ui.Console, plan: dw.PrunePlan, applied: bool) -> None:
    stay = ui.table("versions that stay", "why", left=("versions that stay", "why"))
    for why in dict.fromkeys(plan.kept.values()):
        stay.add_row(ui.ranges(v for v, reason in plan.kept.items() if reason == why), why)
    out.print(stay)
    if plan.waiting:
        out.print(f"{ui.ranges(plan.waiting)} wait: marked less than the grace period ago, or still needed by a reader")
    if plan.marked:
        what = "marked" if applied else "to be marked"
        out.print(f"{ui.ranges(plan.marked)} {what}: {ui.size(plan.later)} go when prune runs after the grace period")
    if plan.objects:
        _render_objects(out, plan, applied)
    elif not plan.marked:
        out.print("nothing can go")
    if not applied and (plan.objects or plan.marked):
        out.print("nothing was done: add --apply to do it")


def _render_objects(out: ui.Console, plan: dw.PrunePlan, applied: bool) -> None:
    go = ui.table("what went" if applied else "what can go", "objects", "bytes", left=("what went", "what can go"))
    for name, items in (
        (f"manifests of {len(plan.going):,} versions: {ui.ranges(plan.going) or 'none'}", plan.manifests),
        ("anchors and deltas", plan.data),
        ("companion files", plan.files),
        ("heartbeats of silent replicas", plan.heartbeats),
    ):
        if items:
            go.add_row(name, f"{len(items):,}", ui.size(sum(item.size for item in items)))
    go.add_row("in all", f"{len(plan.objects):,}", ui.size(plan.bytes), style="bold")
    out.print(go)
