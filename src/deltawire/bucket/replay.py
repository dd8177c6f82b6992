"""Run the chain: a version of a run as bits in memory, verified.

Used wherever weights are needed that nobody serves from: a checkout, a resuming publisher, `verify`.
Live weights are patched by `replica/`, which can undo.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from ..core import chain, full
from ..core.change import Change, Region, blocks
from ..core.digest import StateDigest
from ..core.dtypes import Bits, lookup
from ..core.errors import DigestMismatch, ForeignObject, ReferenceUnavailable
from ..core.manifest import Blob, Link, Manifest
from ..core.parallel import ordered_map
from ..core.schema import Schema
from ..core.sparse import DeltaFile
from .fetch import Progress, fetch
from .run import Run

Resolve = Callable[[str], Path]
"""Where the checkpoint folder is that a reference names."""


class State:
    """A private copy of the weights of one version."""

    def __init__(self, schema: Schema) -> None:
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


@contextmanager
def open_delta(run: Run, version: int, base: int, blob: Blob, progress: Progress | None = None) -> Iterator[DeltaFile]:
    """A delta object, fetched, hashed and checked to be what the manifest says it is."""
    with fetch(run.store, blob, progress) as data:
        file = DeltaFile(data.read, data.size, run.schema)
        claim = (file.metadata.get("run"), file.metadata.get("base_version"), file.metadata.get("model_version"))
        if claim != (run.info.run, str(base), str(version)):
            raise ForeignObject(f"{blob.key} says it is run {claim[0]}, {claim[1]} → {claim[2]}")
        yield file


@contextmanager
def open_anchor(run: Run, version: int, blob: Blob, progress: Progress | None = None) -> Iterator[full.FullFile]:
    with fetch(run.store, blob, progress) as data:
        file = full.FullFile(data.read, data.size)
        claim = (file.metadata.get("run"), file.metadata.get("model_version"))
        if claim != (run.info.run, str(version)):
            raise ForeignObject(f"{blob.key} says it is run {claim[0]}, version {claim[1]}")
        full.check_anchor(file, run.schema)
        yield file


class Weights:
    """Full weights from an opened anchor or checkpoint, seen by the run's schema (which knows about ties)."""

    def __init__(self, source: full.FullFile | full.Source, schema: Schema) -> None:
        self.schema, self.region = schema, source.region


def find_reference(source: str) -> Path:
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    return hub_folder(source)


def hub_folder(source: str) -> Path:
    """A hub model in the local cache, fetched if needed, by the `hub` extra."""
    name, _, revision = source.removeprefix("hf://").partition("@")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ReferenceUnavailable(
            f"the run starts from {source!r}: no such folder here, and huggingface_hub is not installed "
            "(pip install 'deltawire[hub]'), or pass the folder with --reference"
        ) from None
    try:
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=["*.safetensors", "*.json"]))
    except Exception as error:
        raise ReferenceUnavailable(f"the run starts from {source!r}, which cannot be had: {error}") from error


def reference_source(run: Run, link: Link, resolve: Resolve) -> Weights:
    """The checkpoint a run starts from. It may spell a tied tensor out; everything else must be the run's."""
    checkpoint = full.Checkpoint(resolve(link.source))
    stored = [t for t in checkpoint.schema.tensors if t.name not in run.schema.ties]
    Schema.build(stored, run.schema.ties).require_equal(
        run.schema, ours=f"the reference {link.source!r}", theirs="the run"
    )
    return Weights(checkpoint, run.schema)


def take(
    run: Run, state: State, manifest: Manifest, link: Link, *, resolve: Resolve, progress: Progress | None
) -> None:
    """Move a private state along one link and prove it. On any error the state is spoiled: drop it."""
    if link.kind == "delta":
        moved = StateDigest()
        for blob in link.objects:
            with open_delta(run, manifest.version, link.base or 0, blob, progress) as file:
                # blocks cover disjoint regions, so each may be written while others are still being decoded
                for changes in file.changes(state.bits):
                    moved += write(changes, state)
        state.digest += moved
    elif link.kind == "anchor":
        for blob in link.objects:
            with open_anchor(run, manifest.version, blob, progress) as file:
                state.load(Weights(file, run.schema))
    else:
        state.load(reference_source(run, link, resolve))
    if str(state.digest) != manifest.digest:
        raise DigestMismatch(manifest.version, manifest.digest, str(state.digest))
    state.version = manifest.version


def write(changes: list[Change], state: State) -> StateDigest:
    moved = StateDigest()
    for change in changes:
        moved += change.digest()
        change.write(state.bits(change.region.tensor.name))
    return moved


def checkout(
    run: Run,
    version: int,
    state: State | None = None,
    *,
    resolve: Resolve = find_reference,
    progress: Progress | None = None,
) -> State:
    """The bits of a version. Continues from `state` where a path leads on from there."""
    have = state.version if state is not None else None
    steps = chain.plan(have, version, run.timeline(version))
    if state is None:
        state = State(run.schema)
    for step in steps:
        manifest = run.manifest(step.version)
        take(run, state, manifest, manifest.link(step.kind, step.base), resolve=resolve, progress=progress)
    return state
