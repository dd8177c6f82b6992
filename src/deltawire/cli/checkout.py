"""`deltawire checkout`: write a version as a checkpoint folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import BadParameter, Option

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
    from ..bucket import checkpoint_folder
    from ..bucket.trust import Trust

    # before anything is fetched
    with checkpoint_folder.writing(output):
        if output.is_symlink() or (output.exists() and not output.is_dir()):
            raise BadParameter(f"{output} is not a folder of its own", param_hint="-o")
        if output.is_dir() and any(output.iterdir()) and not force:
            raise BadParameter(f"{output} is not empty; --force replaces it", param_hint="-o")
    opened, version = ui.open_version(run, Trust.of(trust, refuse_delegated or None))
    with checkpoint_folder.scratch(output) as made, ui.progress() as advance:
        state, steps = ui.fetch_version(opened, version, reference, advance)
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

    def render(out: ui.Console) -> None:
        steps_taken = "one object" if len(steps) == 1 else f"{len(steps)} objects"
        out.print(f"v{version} → {output}  {ui.size(opened.schema.nbytes)} from {steps_taken}", soft_wrap=True)
        out.print(f"  state digest {manifest.digest}, proven")
        if manifest.signer:
            checked = "checked" if opened.trust else "not checked: no trusted key was given (--trust)"
            out.print(f"  signed by {manifest.signer}, {checked}", soft_wrap=True)

    ui.emit(value, render, json)
