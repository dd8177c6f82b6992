"""`deltawire publish`: the next version of a run from a checkpoint folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .common import Advance, JsonOption, RunArgument, duration, emit, percent, progress, size, times

if TYPE_CHECKING:
    from rich.console import Console

    from ..bucket.run import Run
    from ..core.full import Source
    from ..trainer import Published

_LABELS = {"fetch": "fetch the version before", "detect": "compare", "put": "upload"}


def command(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT_DIR",
            help="Hugging Face folder: *.safetensors, sharded or not, with config and tokenizer files.",
            exists=True,
            file_okay=False,
            show_default=False,
        ),
    ],
    run: RunArgument,
    encoding: Annotated[
        str,
        typer.Option(
            help="How the delta is coded: packed, context (smaller, slower), auto (whichever arrives sooner), "
            "or raw for any tool to read."
        ),
    ] = "packed",
    anchor: Annotated[bool, typer.Option("--anchor", help="Also upload the full weights.")] = False,
    anchor_every: Annotated[
        int | None, typer.Option(min=1, help="Full weights at the latest every so many versions.")
    ] = None,
    step: Annotated[int | None, typer.Option(help="The trainer's own step count, shown by `log`.")] = None,
    metric: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="A figure to keep with the version; repeatable.")
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER|HUB_ID",
            help="Checkpoint that a new run starts from, so that no full upload is needed; or where that is here.",
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Publish the next version of a run from a checkpoint folder.

    Only what changed since the run's newest version is uploaded. The first
    version, and now and then a later one, is an anchor with the full weights.
    config.json, tokenizer and template files travel along.

    \b
    Examples
      deltawire publish step-100 s3://runs/chat
      deltawire publish step-200 s3://runs/chat --step 200 --metric loss=1.83

    \b
      # a fine-tune of a public model: followers get the start from the hub
      deltawire publish step-100 s3://runs/chat --reference Qwen/Qwen3-0.6B
    """
    from ..trainer import Publisher

    _check_encoding(encoding)
    metrics = _metrics(metric or [])
    with Publisher(
        run,
        encoding=encoding,
        anchor_every=1 if anchor else anchor_every,
        reference=_absolute(reference),
        files=checkpoint,
    ) as publisher:
        source = _source(checkpoint, run)
        with progress() as bar:
            handle = publisher.publish(
                source, step=step, metrics=metrics, wait=True, progress=_bars(bar, source.schema.nbytes)
            )
    _report(run, handle.result(), json)


def _check_encoding(encoding: str) -> None:
    from ..core.errors import UnknownFormat
    from ..trainer.auto import EncodingChooser

    try:
        EncodingChooser(encoding)
    except UnknownFormat as error:
        raise typer.BadParameter(str(error), param_hint="--encoding") from None


def _metrics(texts: list[str]) -> dict[str, float]:
    metrics = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            metrics[name] = float(value)
        except ValueError:
            raise typer.BadParameter(f"{text!r} is not NAME=VALUE with a number", param_hint="--metric") from None
    return metrics


def _absolute(reference: str | None) -> str | None:
    """A folder's full path: the name stays in the run, where nobody knows this working directory."""
    return str(Path(reference).resolve()) if reference and Path(reference).is_dir() else reference


def _source(checkpoint: Path, run: str) -> Source:
    from ..bucket.replay import as_run
    from ..bucket.run import Run
    from ..core.errors import RunNotFound
    from ..core.full import Checkpoint

    source = Checkpoint(checkpoint)
    try:
        return as_run(source, Run.open(run).schema, f"the checkpoint {checkpoint}")
    except RunNotFound:
        return source


def _bars(bar: Any, nbytes: int) -> Any:
    """One bar per phase, shown when the phase begins."""
    shown: dict[str, Advance] = {}

    def advance(phase: str, n: int) -> None:
        if phase not in shown:
            shown[phase] = bar(_LABELS[phase], nbytes if phase == "detect" else None)
        shown[phase](n)

    return advance


def _report(run: str, published: Published, json: bool) -> None:
    from ..bucket.run import Run

    opened = Run.open(run)
    value = _value(opened, published)

    def render(out: Console) -> None:
        parent = f" ← v{value['parent']}" if value["parent"] is not None else ""
        share = percent(published.changed, opened.schema.elements)
        kinds = " + ".join(published.kinds)
        out.print(f"v{published.version}{parent}  {kinds}  {share} changed  {size(published.bytes)} uploaded")
        if value["delta_bytes"]:
            smaller = times(opened.schema.nbytes, value["delta_bytes"])
            out.print(f"  the delta is {smaller} smaller than the full {size(opened.schema.nbytes)}")
        out.print("  " + "  ".join(f"{name} {duration(seconds)}" for name, seconds in published.timings.items()))

    emit(value, render, json)


def _value(run: Run, published: Published) -> dict[str, Any]:
    manifest = run.manifest(published.version)
    delta = sum(link.bytes for link in manifest.links if link.kind == "delta" and link.base == manifest.parent)
    return {
        "run": run.store.url,
        "version": published.version,
        "parent": manifest.parent,
        "kinds": published.kinds,
        "digest": published.digest,
        "changed": published.changed,
        "elements": run.schema.elements,
        "bytes": published.bytes,
        "delta_bytes": delta or None,
        "full_bytes": run.schema.nbytes,
        "times_smaller": round(run.schema.nbytes / delta, 2) if delta else None,
        "timings": published.timings,
    }
