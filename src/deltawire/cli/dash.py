"""`deltawire dash`: a page about a run, live or as a file."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import BadParameter, Option, echo

from . import ui

if TYPE_CHECKING:
    from ..dash import Document

PORT = 8321
"""Default port of the page."""


def command(
    run: ui.RunArgument,
    port: Annotated[
        int | None, Option(min=0, max=65535, help=f"Port of the live page; 0: any that is free; by default {PORT}.")
    ] = None,
    host: ui.HostOption = "127.0.0.1",
    token_file: ui.TokenFileOption = None,
    out: Annotated[
        Path | None, Option("--out", "-o", metavar="FILE", help="Write the page as one file that needs no server.")
    ] = None,
    every: Annotated[
        float,
        Option(
            metavar="SECONDS",
            min=0,
            show_default=False,
            help="With --out: write it again so often, until interrupted; by default once.",
        ),
    ] = 0.0,
    trace: Annotated[
        Path | None, Option(metavar="FILE", help="Write the latest syncs as a trace for ui.perfetto.dev.")
    ] = None,
    requests: Annotated[
        int | None,
        Option(
            min=16,
            metavar="N",
            help="Most requests to the bucket before the page shows; by default 48, in a folder 400.",
        ),
    ] = None,
    json: ui.JsonOption = False,
) -> None:
    """Show a run on a page: versions, replicas, syncs, bytes, changes per tensor.

    Without --out, --trace or --json the page is served at http://127.0.0.1:8321
    and follows the run; a run that does not exist yet appears on it later. With
    --out it is one file that works without a server, also as a static page next
    to a public bucket: --every writes it again, and an open page takes the new
    figures. Nothing is written to the bucket.

    To listen on anything but this machine, set a token (DELTAWIRE_TOKEN or
    --token-file). The page asks for it, or takes it from #token=… in its address.

    \b
    Examples
      deltawire dash s3://runs/chat
      deltawire dash s3://runs/chat --out run.html
      deltawire dash s3://runs/chat --trace syncs.json
      deltawire dash s3://runs/chat --json | jq .headline
    """
    from ..dash import Collector, PageServer, save
    from ..dash.trace import trace as trace_of
    from ..engines.live import access
    from ..errors import DeltawireError

    if every and out is None:
        raise BadParameter("goes with --out", param_hint="--every")
    once = out is not None or trace is not None or json
    if once and port is not None:
        raise BadParameter("the page is served, or --out, --trace and --json are written", param_hint="--port")
    for option, target in (("--out", out), ("--trace", trace)):
        if target is not None and target.is_dir():
            raise BadParameter(f"{target} is a folder; name a file in it", param_hint=option)
        if target is not None and not target.parent.is_dir():
            raise BadParameter(f"there is no folder {target.parent}", param_hint=option)
    if not once:
        token = access.read_token(token_file)
        server = PageServer(run, host=host, port=PORT if port is None else port, token=token, requests=requests)
        more = "; append #token=… to the address, or the page asks for it" if token else ""
        ui.serve_until_ended(server, {"url": server.url}, f"{run} at {server.url}{more}; Ctrl-C ends it")
        return
    collector = Collector(run, requests=requests)
    collector.opened()
    document = collector.look()
    if document.problem and document.newest is None:
        raise DeltawireError(document.problem)
    if trace is not None:
        trace.write_text(json_module.dumps(trace_of(document)), "utf-8")
    if out is not None:
        save(document, out)
    if json or not every:
        ui.emit(document, lambda console: _render(console, document, out, trace), json)
    if document.problem and not every:
        # what can be read is written, and the command still fails
        raise DeltawireError(document.problem)
    if every:
        echo(f"writing {out} every {every:g} s; Ctrl-C ends it", err=True)
    with ui.ended_by_sigterm() as stop:
        while every and out is not None and not stop.wait(every):
            try:
                save(collector.look(), out)
            except OSError as error:
                ui.complain(f"--out: cannot write {out}, trying again in {every:g} s: {error.strerror or error}")


def _slowest(document: Document) -> str:
    head = document.headline
    if not head.slowest:
        return "–"
    if head.current == head.following:
        return "all current"
    known = any(replica.replica == head.slowest and replica.lag is not None for replica in document.replicas)
    return f"{head.slowest}, {f'{head.slowest_lag} behind' if known else 'no version known'}"


def _render(out: ui.Console, document: Document, page: Path | None, trace: Path | None) -> None:
    head, totals = document.headline, document.totals
    rows: list[tuple[str, Any]] = [
        ("newest version", "none yet" if document.newest is None else f"v{document.newest}"),
        ("deltas", f"{totals.deltas:,} in {ui.size(totals.delta_bytes)}"),
        ("smaller than full weights", ui.times(head.smaller, 1) if head.smaller else "–"),
        ("changed per version", "–" if totals.changed_share is None else ui.percent(totals.changed_share, 1)),
        ("replicas", f"{head.current} of {head.following} at the newest version"),
        ("slowest replica", _slowest(document)),
        ("longest pause", "–" if head.pause_s is None else f"{ui.duration(head.pause_s)}, {head.pause_replica}"),
        ("from publish to proven", "–" if head.arrival_s is None else ui.duration(head.arrival_s)),
    ]
    for name, value in rows:
        out.print(f"  {name:<27}{value}", soft_wrap=True)
    for path in (page, trace):
        if path is not None:
            out.print(f"wrote {path}, {ui.size(path.stat().st_size)}", soft_wrap=True)
