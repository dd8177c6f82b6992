"""`deltawire checkout`: write a version as a checkpoint folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .common import (
    JsonOption,
    ReferenceOption,
    RunVersionArgument,
    TrustOption,
    emit,
    fetch_version,
    open_version,
    progress,
    size,
)

if TYPE_CHECKING:
    from rich.console import Console


def command(
    run: RunVersionArgument,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="Folder to make.")],
    force: Annotated[bool, typer.Option("--force", help="Replace DIR if it is there and not empty.")] = False,
    reference: ReferenceOption = None,
    trust: TrustOption = None,
    json: JsonOption = False,
) -> None:
    """Write a version as a checkpoint folder, bit for bit what was published.

    The folder appears whole or not at all: it is made beside DIR and renamed
    when the state digest has matched and every byte is on disk. Config, tokenizer
    and template files are included.

    \b
    Examples
      deltawire checkout s3://runs/chat -o models/chat
      deltawire checkout s3://runs/chat@41 -o models/chat-41
      deltawire checkout s3://runs/chat -o models/chat --force
    """
    from ..bucket import checkpoint_folder

    with checkpoint_folder.writing(output):
        _check_place(output, force)
    opened, version = open_version(run, trust)
    with checkpoint_folder.scratch(output) as made, progress() as advance:
        state, steps = fetch_version(opened, version, reference, advance)
        manifest = opened.manifest(version)
        size_of_all = opened.schema.nbytes
        checkpoint_folder.fill(made, opened, manifest, state, progress=lambda n: advance("write", n, size_of_all))
        checkpoint_folder.move_into(made, output, replace=force)
    value = {
        "run": opened.store.url,
        "version": version,
        "digest": manifest.digest,
        "dir": str(output),
        "tensors": len(opened.schema.tensors),
        "bytes": opened.schema.nbytes,
        "fetched_bytes": sum(step.bytes for step in steps if step.kind != "reference"),
        "files": [file.name for file in manifest.files],
    }

    def render(out: Console) -> None:
        steps_taken = "one object" if len(steps) == 1 else f"{len(steps)} objects"
        out.print(f"v{version} → {output}  {size(opened.schema.nbytes)} from {steps_taken}", soft_wrap=True)
        out.print(f"  state digest {manifest.digest}, proven")

    emit(value, render, json)


def _check_place(place: Path, force: bool) -> None:
    """Before anything is fetched: a folder may be made here."""
    if place.is_symlink() or (place.exists() and not place.is_dir()):
        raise typer.BadParameter(f"{place} is not a folder of its own", param_hint="-o")
    if place.is_dir() and any(place.iterdir()) and not force:
        raise typer.BadParameter(f"{place} is not empty; --force replaces it", param_hint="-o")
