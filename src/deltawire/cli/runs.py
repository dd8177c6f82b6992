"""`deltawire runs`: list the runs in a bucket."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from typer import Argument, Option

import deltawire as dw

from . import ui


def command(
    bucket: Annotated[str, Argument(metavar="BUCKET", help="A bucket, or a folder in it.")],
    depth: Annotated[int, Option(min=0, max=20, help="How many folders deep to look.")] = 3,
    stored: Annotated[
        bool, Option("--stored", help="Also show how much each run stores; this lists all its objects.")
    ] = False,
    json: ui.JsonOption = False,
) -> None:
    """List the runs below an address: newest version, size of the weights, age.

    Lists one folder after the other and reads a few small objects of each run. A
    run of a million objects costs no more requests than one of ten, except with
    --stored. A run that cannot be read is listed with the reason.

    \b
    Examples
      deltawire runs s3://runs
      deltawire runs hf://buckets/me/experiments
      deltawire runs /mnt/shared/runs --depth 1
      deltawire runs s3://runs --json | jq -r '.runs[].url'
    """
    from ..store import open_store

    found = dw.runs(bucket, depth, stored=stored)
    url = open_store(bucket).url
    value = {"bucket": url, "runs": [asdict(run) for run in found]}
    ui.emit(value, lambda out: _render(out, url, found), json)


def _render(out: ui.Console, url: str, found: list[dw.ListedRun]) -> None:
    if not found:
        out.print(f"no runs below {url}; --depth looks further down", soft_wrap=True)
        return
    stored = any(run.stored is not None for run in found)
    columns = ["run", "newest", "age", "weights", *(["stored"] if stored else []), "model"]
    rows = []
    for run in found:
        cells = [
            ui.clean(run.url),
            "–" if run.newest is None else f"v{run.newest}",
            "–" if run.created is None else ui.age(run.created),
            ui.size(run.bytes) if not run.error else "–",
        ]
        if stored:
            cells.append("–" if run.stored is None else ui.size(run.stored))
        rows.append([*cells, "cannot be read" if run.error else ui.clean(run.model, 100)])
    ui.print_table(out, columns, rows, left=("run", "model"), drop=("model",), shorten="run")
    for run in found:
        if run.error:
            out.print(ui.clean(f"{run.url}: {run.error}"), soft_wrap=True)
