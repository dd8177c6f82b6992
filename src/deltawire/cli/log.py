"""`deltawire log`: list versions and replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

import deltawire as dw

from . import ui
from .fleet import print_members

if TYPE_CHECKING:
    from ..fleet import Member

_METRICS = 4
"""Columns of metrics, where the terminal is wide enough."""


def command(
    run: ui.RunVersionArgument,
    number: Annotated[int, Option("-n", min=1, help="How many versions, the newest first.")] = 20,
    all: Annotated[bool, Option("--all", help="All versions.")] = False,
    trust: ui.TrustOption = None,
    json: ui.JsonOption = False,
) -> None:
    """List the versions of a run, newest first, and the replicas that follow it.

    "bytes" is what a follower fetches to get from the base to the version, and
    "smaller" how many times less that is than the full weights. "+anchor" means
    that the version can also be reached by full weights, "+skip" by a delta from
    an earlier base. Metrics that were published with it fill the rest of the
    line. `show` has all metrics, and the links that a keeper has added.

    Commands accept what "version" shows: RUN@v41, and a tag as RUN@best.

    \b
    Examples
      deltawire log s3://runs/chat
      deltawire log s3://runs/chat -n 5
      deltawire log s3://runs/chat@best         that version and those before it
      deltawire log s3://runs/chat --all --json | jq '.versions[].bytes'
    """
    from ..fleet import Fleet

    opened, newest = dw.Run.at(run, trust=trust)
    since = 0 if all else max(newest - number + 1, 0)
    summaries, fleet = opened.timeline(newest, since), Fleet(opened, keepers=True)
    versions = list(reversed(summaries.values()))
    tags: dict[int, list[str]] = {}
    for name, tag in opened.tags().items():
        tags.setdefault(tag.version, []).append(name)
    fleet.read()
    replicas = _without_ended_keepers(fleet.members(opened.newest(), summaries))
    value = {
        "run": opened.store.url,
        "model": opened.info.model,
        "base_model": opened.info.base,
        "newest": newest,
        "tensors": len(opened.schema.tensors),
        "elements": opened.schema.elements,
        "full_bytes": opened.schema.nbytes,
        "versions": [_version(summary, opened, sorted(tags.get(summary.version, ()))) for summary in versions],
        "replicas": replicas,
    }

    def render(out: ui.Console) -> None:
        _render(out, value)
        print_members(out, replicas)

    ui.emit(value, render, json)


def _version(summary: dw.Summary, run: dw.Run, tags: list[str]) -> dict[str, Any]:
    main = summary.main
    return {
        "version": summary.version,
        "kind": main.kind,
        "also": [x.kind if x.kind != "delta" else f"skip from {x.base}" for x in summary.links if x is not main],
        "base": main.base,
        "changed": summary.changed,
        "changed_share": round(summary.changed / max(run.schema.elements, 1), 8),
        "bytes": main.bytes,
        "times_smaller": round(run.schema.nbytes / main.bytes, 2) if main.bytes else None,
        **ui.pick(main, "encoding", "why"),
        **ui.pick(summary, "step", "metrics"),
        "tags": tags,
        **ui.pick(summary, "created", "digest", "links"),
    }


def _without_ended_keepers(found: list[Member]) -> list[Member]:
    """Leave out keepers that ended, each of which had a name of its own; where none is at work, all but the latest."""
    keepers = [member for member in found if member.is_keeper]
    alive = [keeper for keeper in keepers if keeper.health != "silent"]
    shown = alive or sorted(keepers, key=lambda keeper: keeper.seen_s)[:1]
    return [member for member in found if not member.is_keeper or member in shown]


def _render(out: ui.Console, value: dict[str, Any]) -> None:
    full, elements = value["full_bytes"], value["elements"]
    model = f"{ui.clean(value['model'])}  " if value["model"] else ""
    out.print(f"{value['run']}  {model}{elements:,} weights, {ui.size(full)} in full", soft_wrap=True)
    if value["base_model"]:
        out.print(f"adapters of {ui.clean(str(value['base_model']), 2000)}", soft_wrap=True)
    names = list(dict.fromkeys(name for version in value["versions"] for name in version["metrics"]))[:_METRICS]
    columns = ["version", "kind", "changed", "bytes", "smaller", "encoding", "step", "age", *map(ui.clean, names)]
    ui.print_table(
        out,
        columns,
        [_row(version, names, full, elements) for version in value["versions"]],
        left=("version", "kind", "encoding"),
        # what can be done without first; `--json` and `show` have all of it
        drop=("encoding", "smaller", *reversed(columns[9:]), "step", *columns[8:9]),
        shorten="kind",
    )
    for version in value["versions"][:1]:
        if version["why"]:
            text = f"auto chose {version['encoding'] or 'full weights'} for v{version['version']}: {version['why']}"
            out.print(ui.clean(text), soft_wrap=True)
    _render_sizes(out, value["versions"], full)


def _row(version: dict[str, Any], names: list[str], full: int, elements: int) -> list[str]:
    also = "".join(f"+{what.split()[0]}" for what in version["also"])
    spans = version["base"] is not None and version["base"] != version["version"] - 1
    tags = "".join(f" {tag}" for tag in version["tags"])
    return [
        f"v{version['version']}{tags}",
        version["kind"] + also + (f" from v{version['base']}" if spans else ""),
        ui.percent(version["changed"], elements),
        ui.size(version["bytes"]),
        ui.times(full, version["bytes"]) if version["kind"] == "delta" else "–",
        ui.clean(version["encoding"]) or "–",
        "–" if version["step"] is None else str(version["step"]),
        ui.age(version["created"]),
        *(f"{version['metrics'][name]:.4g}" if name in version["metrics"] else "–" for name in names),
    ]


def _render_sizes(out: ui.Console, versions: list[dict[str, Any]], full: int) -> None:
    """Draw the sizes of the deltas only: beside an anchor all of them would be flat."""
    deltas = [version["bytes"] for version in reversed(versions) if version["kind"] == "delta"]
    if not deltas:
        return
    smaller = ui.times(full * len(deltas), sum(deltas))
    out.print(f"delta sizes {ui.sparkline(deltas[-100:])} up to {ui.size(max(deltas))}", soft_wrap=True)
    noun = "delta" if len(deltas) == 1 else "deltas"
    out.print(f"{len(deltas)} {noun} in {ui.size(sum(deltas))}, {smaller} smaller than as full weights\n")
