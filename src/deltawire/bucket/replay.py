"""Run the chain: a version of a run as bits in memory, verified.

Used wherever weights are needed that nobody serves from: a checkout, a resuming publisher, `verify`.
Live weights are patched by `replica/`, which can undo.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..core import chain, full
from ..core.change import Region, blocks
from ..core.digest import StateDigest
from ..core.dtypes import Bits, lookup
from ..core.errors import (
    DeltawireError,
    DigestMismatch,
    ForeignObject,
    ModelTooLarge,
    ReferenceUnavailable,
)
from ..core.extras import install_command
from ..core.manifest import MAX_ALL_FILES, Link, Manifest
from ..core.parallel import ordered_map
from ..core.schema import Schema
from ..core.sparse import DeltaClaim, DeltaFile, open_delta
from .ahead import Parcel, arrivals
from .fetch import Fetched, Progress
from .run import Run
from .walk import BAD_LINK, Walker

log = logging.getLogger("deltawire")

Resolve = Callable[[str, int], Path]
"""(name, most) → where the checkpoint folder is that a reference names; at most so many bytes are fetched for it."""


class State:
    """A private copy of the weights of one version."""

    def __init__(self, schema: Schema) -> None:
        """ModelTooLarge where this machine has less memory than the model takes."""
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if schema.nbytes > memory:
            raise ModelTooLarge(
                f"the model has {schema.nbytes / 1e9:,.1f} GB, this machine {memory / 1e9:,.1f} GB of memory: take one "
                "with more"
            )
        self.schema = schema
        self.version: int | None = None
        self.digest = StateDigest()
        self.tensors: dict[str, Bits] = {t.name: np.zeros(t.units, lookup(t.dtype).unit) for t in schema.tensors}

    def bits(self, name: str) -> Bits:
        return self.tensors[name]

    def region(self, region: Region) -> Bits:
        return region.cut(self.tensors[region.tensor.name])

    def load(self, source: full.Source, threads: int | None = None) -> None:
        """Take over every bit of a source. The digest is that of what was read."""

        def one(region: Region) -> None:
            region.matrix(self.tensors[region.tensor.name])[:] = source.region(region).reshape(
                region.rows, region.columns
            )

        for block in blocks(self.schema, 1 << 22):
            for _ in ordered_map(one, block, threads):
                pass
        self.digest = full.digest_of(self, threads)


def claim_of(run: Run, manifest: Manifest, link: Link, present: StateDigest | None = None) -> DeltaClaim:
    """What a delta must be to be the one of this link. `present` is the digest of what it is to be applied to."""
    return DeltaClaim(run.info.run, link.base, manifest.version, StateDigest.parse(manifest.digest), present)


def as_delta(run: Run, manifest: Manifest, link: Link, data: Fetched, present: StateDigest | None = None) -> DeltaFile:
    """A fetched object as the delta its manifest says it is."""
    return open_delta(data.read, data.size, run.schema, claim_of(run, manifest, link, present))


def as_anchor(run: Run, version: int, objects: Sequence[Fetched]) -> full.Anchor:
    """The fetched objects of an anchor as the full weights that the manifest says they are."""
    files = [full.FullFile(data.read, data.size) for data in objects]
    for file in files:
        claim = (file.metadata.get("run"), file.metadata.get("model_version"))
        if claim != (run.info.run, str(version)):
            raise ForeignObject(
                f"an anchor of version {version} says it is run {_cut(claim[0])}, version {_cut(claim[1])}"
            )
    return full.Anchor(files, run.schema)


def _cut(said: str | None) -> str:
    """Metadata of an object as an error may quote it."""
    return str(said)[:32]


class Weights:
    """Full weights from an opened checkpoint, seen by the run's schema (which knows about ties)."""

    def __init__(self, source: full.Source, schema: Schema) -> None:
        self.schema, self.region = schema, source.region


def resolver(reference: str | Path | None) -> Resolve:
    """How to find the checkpoint that a run starts from: where the user says it is, else by the run's name for it."""
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


def reference_source(run: Run, link: Link, resolve: Resolve) -> Weights:
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


def as_run(checkpoint: full.Checkpoint, schema: Schema, what: str, advice: str = "") -> Weights:
    """A checkpoint folder as weights of a run. Folders know nothing of ties and may spell a tied tensor out."""
    stored = [t for t in checkpoint.schema.tensors if t.name not in schema.ties]
    Schema.build(stored, schema.ties).require_equal(schema, ours=what, theirs="the run", advice=advice)
    return Weights(checkpoint, schema)


def take(run: Run, state: State, parcel: Parcel, resolve: Resolve) -> None:
    """Move a private state along one link and prove it. On any error the state is spoiled: drop it."""
    manifest, link = parcel.manifest, parcel.link
    if link.kind == "delta":
        moved = StateDigest()
        for data in parcel.objects:
            # blocks cover disjoint regions, so each may be written while others are still being decoded
            for changes in as_delta(run, manifest, link, data, state.digest).patches(state.bits):
                moved += sum((change.digest() for change in changes), StateDigest())
        state.digest += moved
    elif link.kind == "anchor":
        state.load(as_anchor(run, manifest.version, parcel.objects))
    else:
        state.load(reference_source(run, link, resolve))
    if str(state.digest) != manifest.digest:
        raise DigestMismatch(manifest.version, manifest.digest, str(state.digest))
    state.version = manifest.version


def checkout(
    run: Run,
    version: int,
    state: State | None = None,
    *,
    resolve: Resolve = find_reference,
    progress: Progress | None = None,
    steps: list[chain.Step] | None = None,
) -> State:
    """The bits of a version. Continues from `state` where a path leads on from there. `steps` is one planned before.

    Where an object on the way is damaged or gone, another way is taken, if there is one, from nothing.
    MissingBase after chain.MAX_PLANS of them.
    """
    walker = Walker(run)

    def go(planned: list[chain.Step]) -> DeltawireError | None:
        nonlocal state
        state = state or State(run.schema)
        for arrival in arrivals(run, planned, progress):
            try:
                take(run, state, arrival.parcel(), resolve)
            except BAD_LINK as error:
                step = arrival.step
                log.warning("cannot use the %s to version %d: %s", step.kind, step.version, error)
                state = None
                if not walker.renew(step):
                    walker.leave_out([step])
                return error
        return None

    walker.reach(version, lambda: state.version if state is not None else None, go, steps)
    assert state is not None
    return state
