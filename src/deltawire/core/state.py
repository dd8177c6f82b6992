"""The weights of one version, in memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from . import full
from .change import Region, blocks
from .digest import StateDigest
from .dtypes import Bits, lookup
from .errors import ModelTooLarge
from .parallel import for_each, threads_for
from .schema import Schema


class State:
    """Weights in memory: the copy that `checkout` makes, and a Source.

    state = dw.State(run.schema)
    state.load(run.weights_in("models/chat"))       # a checkpoint folder
    dw.Replica(run.store.url).sync(state)           # the newest version, from there
    """

    def __init__(self, schema: Schema) -> None:
        """Raises ModelTooLarge where this machine has less memory than the model takes."""
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
        """The units of a tensor, flat, to be read or written. Not its aliases: `schema.ties` says what they are."""
        return self.tensors[name]

    def region(self, region: Region) -> Bits:
        """The region's own flat bits (see `Region.cut`)."""
        return region.cut(self.tensors[region.tensor.name])

    def write(self, folder: Path, *, progress: Callable[[int], None] | None = None) -> None:
        """Write the weights as safetensors into a folder that exists; `progress` is called with bytes."""
        full.write_checkpoint(folder, self, progress=progress)

    def load(self, source: full.Source, threads: int | None = None) -> None:
        """Copy every bit of a source, and set `digest` to the digest of the copy."""

        def one(region: Region) -> None:
            region.matrix(self.tensors[region.tensor.name])[:] = source.region(region).reshape(
                region.rows, region.columns
            )

        threads = threads_for(self.schema.elements, threads)
        for block in blocks(self.schema, 1 << 22):
            for_each(one, block, threads)
        self.digest = full.digest_of(self, threads)
