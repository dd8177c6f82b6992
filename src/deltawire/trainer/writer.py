"""How a version gets into the bucket: delta, perhaps an anchor, perhaps a skip delta, then the manifest."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from ..bucket.run import Run
from ..core import full, keys
from ..core.change import Region
from ..core.digest import StateDigest
from ..core.dtypes import Bits
from ..core.manifest import Link, Manifest
from ..core.sparse import BASE_DIGEST, DIGEST, DataFile, DeltaWriter, EncodedBlock
from .auto import Choice, EncodingChooser
from .commit import Committer, Companions, put_object
from .policy import AnchorPolicy

log = logging.getLogger("deltawire")

Progress = Callable[[str, int, int], None]
"""(phase, bytes since the last call, bytes of the phase as far as known); the phases are "fetch" (of what to diff
against), "detect" and "put"."""


@dataclass(frozen=True, slots=True)
class Published:
    """A committed version, as `PublishHandle.result` returns it and `on_version` gets it."""

    version: int
    digest: str
    """State digest of all its weights."""
    changed: int
    """Number of weights that differ from the version before."""
    bytes: int
    """Bytes uploaded for this version."""
    kinds: tuple[str, ...]
    """What was uploaded: "delta", "anchor", "reference"."""
    timings: dict[str, float]
    """Seconds: held (the training loop was blocked), encode, put."""
    elements: int = 0
    """Number of weights of the model."""
    publishes: int = 1
    """Calls of `publish` that this version carries: more than one where the bucket was slower than the trainer."""

    @classmethod
    def of(cls, manifest: Manifest, elements: int, publishes: int) -> Published:
        return cls(
            manifest.version,
            manifest.digest,
            manifest.changed,
            sum(link.bytes for link in manifest.links),
            tuple(link.kind for link in manifest.links),
            dict(manifest.timings),
            elements,
            publishes,
        )

    @property
    def metrics(self) -> dict[str, float]:
        """Flat figures for a trainer's own log."""
        return {
            **{f"{name}_ms": 1e3 * seconds for name, seconds in self.timings.items()},
            "bytes": self.bytes,
            "changed_percent": 100 * self.density,
            "publishes": self.publishes,
        }

    @property
    def density(self) -> float:
        """Share of the weights that differ from the version before, 0 to 1."""
        return self.changed / max(self.elements, 1)

    def report(self) -> dict[str, float]:
        """Figures under the names `deltawire/…`, as `wandb.log` and `log` of a trackio run take them."""
        return {
            "deltawire/version": float(self.version),
            "deltawire/changed": float(self.changed),
            "deltawire/density": self.density,
            "deltawire/bytes": float(self.bytes),
            **{f"deltawire/{name}_ms": 1e3 * seconds for name, seconds in self.timings.items()},
        }


@dataclass(frozen=True, slots=True)
class Skip:
    """A delta over several versions, to go into the bucket beside the ordinary one."""

    base: int
    blocks: Callable[[], Iterable[EncodedBlock]]


@dataclass(slots=True)
class Draft:
    """A version on its way: everything about it that is not yet in the bucket."""

    choice: Choice
    # how the blocks are coded
    blocks: Iterable[EncodedBlock]
    # the coded changes since the version before; consumed once, before `weights` and `digest` are asked for
    weights: Callable[[Region], Bits]
    # the full weights, for an anchor
    digest: Callable[[], StateDigest]
    step: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)
    skip: Skip | None = None
    progress: Progress | None = None
    publishes: int = 1


class VersionWriter:
    def __init__(self, committer: Committer, chooser: EncodingChooser, policy: AnchorPolicy, files: Companions) -> None:
        self.committer, self.chooser, self.policy, self.files = committer, chooser, policy, files
        self.start_over = False
        # nobody can read the version before: the next one stands alone, as an anchor

    def write(self, draft: Draft) -> Published:
        committer, schema = self.committer, self.committer.run.schema
        version = committer.next_version
        before = committer.newest.digest if committer.newest else ""
        size = 0

        def put(n: int) -> None:
            if draft.progress:
                draft.progress("put", n, size)

        clock = time.perf_counter()
        choice = draft.choice
        delta = DeltaWriter(choice.encoding)
        links: list[Link] = []
        try:
            file = delta_file(committer.run, delta, draft.blocks, version - 1, version, before, draft.digest)
            draft.timings["encode"] = time.perf_counter() - clock
            clock = time.perf_counter()
            delta_bytes = file.size if version else 0
            anchor = self.policy.wants_anchor(version, delta_bytes, schema.nbytes, committer.versions)
            if version and self.policy.wants_delta(delta_bytes, schema.nbytes, anchor) and not self.start_over:
                size += file.size
                blob = put_object(committer.run.store, keys.delta(version - 1, version, committer.writer), file, put)
                links.append(Link("delta", version - 1, (blob,), choice.encoding, choice.why, file.changed))
                self.chooser.learn(choice, file, schema.elements, draft.timings["encode"], time.perf_counter() - clock)
            if anchor or not links:
                whole = full.anchor(schema, draft.weights, anchor_metadata(committer.run, version))
                size += whole.size
                blob = put_object(committer.run.store, keys.anchor(version, committer.writer), whole, put)
                links.append(Link("anchor", None, (blob,)))
        finally:
            delta.close()
        if draft.skip is not None:
            links.append(self._skip(draft.skip, choice, version, draft.digest))
        files = committer.put_files(self.files)
        draft.timings["put"] = time.perf_counter() - clock
        manifest = committer.commit(
            tuple(links),
            digest=str(draft.digest()),
            changed=file.changed if version else schema.elements,
            step=draft.step,
            metrics=draft.metrics,
            timings=draft.timings,
            files=files,
        )
        self.start_over = False
        say(manifest, schema.elements, draft.publishes)
        return Published.of(manifest, schema.elements, draft.publishes)

    def _skip(self, skip: Skip, choice: Choice, version: int, digest: Callable[[], StateDigest]) -> Link:
        writer = DeltaWriter(choice.encoding)
        try:
            before = self.committer.versions[skip.base].digest
            file = delta_file(self.committer.run, writer, skip.blocks(), skip.base, version, before, digest)
            blob = put_object(self.committer.run.store, keys.delta(skip.base, version, self.committer.writer), file)
            return Link("delta", skip.base, (blob,), choice.encoding, choice.why, file.changed)
        finally:
            writer.close()


def delta_file(
    run: Run,
    writer: DeltaWriter,
    blocks: Iterable[EncodedBlock],
    base: int,
    version: int,
    base_digest: str,
    digest: Callable[[], StateDigest],
) -> DataFile:
    """`digest` is asked for after the last block: that of the whole version, also where this is a part of it."""
    for block in blocks:
        writer.add(block)
    total = max(run.schema.elements, 1)
    return writer.finish(
        {
            "run": run.info.run,
            "model_version": str(version),
            "base_version": str(base),
            BASE_DIGEST: base_digest,
            DIGEST: str(digest()),
            "total_params": str(total),
            "sparsity": f"{1 - writer.changed / total:.6f}",
        }
    )


def anchor_metadata(run: Run, version: int) -> dict[str, str]:
    return {"run": run.info.run, "model_version": str(version), "total_params": str(run.schema.elements)}


def tell(listener: Callable[[Published], object] | None, published: Published) -> None:
    """Call a user's `on_version`. What it does wrong must not harm publishing.

    On a thread of ours `sys.exit()` ends nothing, so that is logged like everything else.
    """
    if listener is None:
        return
    try:
        listener(published)
    except BaseException as error:
        if not isinstance(error, Exception) and threading.current_thread() is threading.main_thread():
            raise
        log.exception("on_version failed for version %d, which is published all the same", published.version)


def say(manifest: Manifest, elements: int, publishes: int = 1) -> None:
    """One line per version."""
    kinds = "+".join(link.kind for link in manifest.links)
    size = sum(blob.size for link in manifest.links for blob in link.objects)
    times = "  ".join(f"{name} {seconds * 1e3:.0f} ms" for name, seconds in manifest.timings.items())
    parent = f" ← v{manifest.parent}" if manifest.parent is not None else ""
    share = 100 * manifest.changed / max(elements, 1)
    merged = f"  {publishes} publishes" if publishes > 1 else ""
    mb = size / 1e6
    log.info("v%d%s  %s  %.2f %% changed  %.1f MB  %s%s", manifest.version, parent, kinds, share, mb, times, merged)
