"""`deltawire checkout`: write a version as a checkpoint folder."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

from typer import BadParameter, Option

import deltawire as dw

from ..errors import FolderError
from . import ui


def command(
    run: ui.RunVersionArgument,
    output: Annotated[Path, Option("-o", "--output", metavar="DIR", help="Folder to make.")],
    force: Annotated[bool, Option("--force", help="Replace DIR if it is there and not empty.")] = False,
    reference: ui.ReferenceOption = None,
    trust: ui.TrustOption = None,
    refuse_delegated: ui.RefuseDelegatedOption = False,
    json: ui.JsonOption = False,
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
    # before anything is fetched
    try:
        if output.is_symlink() or (output.exists() and not output.is_dir()):
            raise BadParameter(f"{output} is not a folder of its own", param_hint="-o")
        if output.is_dir() and any(output.iterdir()) and not force:
            raise BadParameter(f"{output} is not empty; --force replaces it", param_hint="-o")
    except OSError as error:
        raise FolderError(f"cannot write {str(output)[:1000]}: {error.strerror}; choose another folder") from None
    opened, version = dw.Run.at(run, trust=dw.Trust.of(trust, refuse_delegated or None))
    steps: list[Any] = []

    def planned(way: list[Any]) -> None:
        steps[:] = way

    with ui.progress() as advance:
        write = partial(dw.checkout_folder, output, opened, version, replace=force, reference=reference)
        write(progress=advance, planned=planned)
    manifest = opened.manifest(version)
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

    def render(out: ui.Console) -> None:
        steps_taken = "one object" if len(steps) == 1 else f"{len(steps)} objects"
        out.print(f"v{version} → {output}  {ui.size(opened.schema.nbytes)} from {steps_taken}", soft_wrap=True)
        out.print(f"  state digest {manifest.digest}, proven")
        if manifest.signer:
            checked = "checked" if opened.trust else "not checked: no trusted key was given (--trust)"
            out.print(f"  signed by {manifest.signer}, {checked}", soft_wrap=True)

    ui.emit(value, render, json)
