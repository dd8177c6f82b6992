"""`deltawire import`: follow a directory of another system's weight deltas as a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option, echo

from . import ui

if TYPE_CHECKING:
    from ..foreign import Imported


def command(
    source: Annotated[
        str, Argument(metavar="SOURCE", help="Folder or bucket address that the other system writes its versions to.")
    ],
    run: ui.RunArgument,
    base: Annotated[
        Path | None,
        Option(
            metavar="CHECKPOINT",
            exists=True,
            file_okay=False,
            help="Checkpoint that the source's first version builds on. Not needed where that has full weights.",
        ),
    ] = None,
    base_version: Annotated[
        int,
        Option(metavar="N", min=0, help="Number that the base has at the source: of a training that was resumed."),
    ] = 0,
    follow: Annotated[
        bool, Option("--follow/--once", help="Go on as new versions appear, or import what is there and end.")
    ] = True,
    encoding: Annotated[ui.Encoding, Option(help="How deltas are coded: packed, context, auto or raw.")] = "packed",
    anchor_every: ui.AnchorEveryOption = None,
    poll: Annotated[float, Option(metavar="SECONDS", min=0.01, help="Time between two looks at the source.")] = 2.0,
    sign: ui.SignOption = None,
    take_over: ui.TakeOverOption = False,
    json: ui.JsonOption = False,
) -> None:
    """Follow the weight deltas of slime, miles, stitch, vime, ModelExpress or SkyRL.

    Each version at SOURCE becomes a version of RUN, which servers follow like
    any other: the trainer is not touched. Every checksum is compared before a
    version is published. A version that is damaged or not of this model is left
    out, with a warning, and read again when its files change.

    It may be killed at any time and continues after the version that was
    imported last. A source that was wiped and begun again is read from --base
    on, and its versions follow those of RUN.

    \b
    Examples
      deltawire import /shared/deltas s3://runs/chat --base Qwen3-0.6B
      deltawire import s3://miles/updates s3://runs/chat --base Qwen3-0.6B --once
    """
    from ..foreign import Importer

    with ui.ended_by_sigterm() as stop:
        options = {"encoding": encoding, "anchor_every": anchor_every, "sign": sign, "takeover": take_over}
        with Importer(source, run, base=base, base_version=base_version, **options) as importer:
            came = 0
            versions = importer.follow(
                once=not follow, poll=poll, stop=stop, progress=lambda name, n, total: advance(name, n, total)
            )
            while True:
                # one bar at a time
                with ui.progress() as advance:
                    imported = next(versions, None)
                if imported is None:
                    break
                came += 1
                _say(imported, json)
            if not follow and not came and not json:
                echo(f"nothing to import: {source} has no version that is new", err=True)


def _say(imported: Imported, json: bool) -> None:
    published = imported.published
    value = {
        **ui.pick(imported, "name", "kind", "source_version", "source_bytes", "seconds"),
        **ui.pick(published, "version", "digest", "changed", "elements", "bytes", "kinds", "timings"),
    }
    share, took = ui.percent(published.changed, published.elements), ui.duration(imported.seconds)
    sent = f"{ui.size(imported.source_bytes)} → {ui.size(published.bytes)}" if imported.source_bytes else "the base"
    text = f"v{published.version} of {imported.name}  {' + '.join(published.kinds)}  {share} changed  {sent}  {took}"
    ui.emit_line(value, text, json)
