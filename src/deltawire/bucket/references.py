"""The checkpoint that a run starts from: a folder, or a model of the Hugging Face Hub, instead of an anchor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core import full
from ..core.errors import DeltawireError, ReferenceUnavailable
from ..core.extras import install_command
from ..core.manifest import MAX_ALL_FILES, Link
from ..core.schema import Schema

if TYPE_CHECKING:
    from .run import Run

OTHER_MODEL = "; another model, or the same in another dtype, needs an address of its own"
"""What to do when weights do not fit the run they are published to."""

Resolve = Callable[[str, int], Path]
"""(name, most) → where the checkpoint folder is that a reference names; at most so many bytes are fetched for it."""


Reference = str | Path | Resolve | None
"""Where the checkpoint is that a run starts from, or what finds it; None goes by the run's name for it."""


def resolver(reference: Reference) -> Resolve:
    """Return a function that finds the checkpoint of a reference: where the user says it is, else by the run's name."""
    if callable(reference):
        return reference
    return find_reference if reference is None else lambda *_: Path(reference)


def find_reference(source: str, most: int) -> Path:
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_absolute():
        raise ReferenceUnavailable(
            f"the run starts from {source!r}, a folder that is not here; pass the folder it is in here with --reference"
        )
    return hub_folder(source, most)


def hub_folder(source: str, most: int) -> Path:
    """A hub model in the local cache, by the `hub` extra. What is missing is fetched, if it is at most so many bytes:
    the name comes from a bucket."""
    name, _, revision = source.removeprefix("hf://").partition("@")
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import DryRunError
    except ImportError:
        raise ReferenceUnavailable(
            f"the run starts from {source!r}: no such folder here, and huggingface_hub is not installed "
            f"({install_command('hub')}), or pass the folder with --reference"
        ) from None
    wanted: dict[str, Any] = {"revision": revision or None, "allow_patterns": ["*.safetensors", "*.json"]}
    try:
        try:
            missing = [file for file in snapshot_download(name, dry_run=True, **wanted) if file.will_download]
        except DryRunError:
            # there is no way to the Hub: what is here costs nothing
            return Path(snapshot_download(name, local_files_only=True, **wanted))
        # a size that the Hub does not state is no reason to fetch without one
        size = sum(most + 1 if file.file_size is None else file.file_size for file in missing)
        if size > most:
            raise ReferenceUnavailable(
                f"the run starts from {source!r}, of which {size:,} bytes would be fetched; the run's model explains "
                f"{most:,}. If that is meant, fetch it yourself and pass the folder with --reference"
            )
        return Path(snapshot_download(name, **wanted))
    except DeltawireError:
        raise
    except Exception as error:
        raise ReferenceUnavailable(
            f"the run starts from {source!r}, which cannot be had: {error}; pass a folder that has it with --reference"
        ) from error


def reference_source(run: Run, link: Link, resolve: Resolve) -> full.Source:
    """The checkpoint a run starts from."""
    folder = resolve(link.source, 2 * run.schema.nbytes + MAX_ALL_FILES)
    try:
        checkpoint = full.Checkpoint(folder)
    except OSError as error:
        raise ReferenceUnavailable(
            f"the run starts from {link.source!r}, which cannot be read here: {error}; pass a folder that has it with "
            "--reference"
        ) from error
    return as_run(checkpoint, run.schema, f"the reference {link.source!r}")


def as_run(checkpoint: full.Checkpoint, schema: Schema, what: str, advice: str = "") -> full.Source:
    """A checkpoint folder as weights of a run. Folders know nothing of ties and may spell a tied tensor out."""
    stored = [t for t in checkpoint.schema.tensors if t.name not in schema.ties]
    Schema.build(stored, schema.ties).require_equal(schema, ours=what, theirs="the run", advice=advice)
    return full.ReadBy(schema, checkpoint.region)
