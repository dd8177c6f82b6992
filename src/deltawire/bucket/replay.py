"""Check out a version: its bits in memory, verified.

For weights that are not in use: a checkout, a resuming publisher, `verify`, a replica whose way first leads back.
Live weights are patched by `replica/`, which can undo.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ..core import chain
from ..core.change import Change, digest_shift
from ..core.digest import StateDigest
from ..core.errors import DAMAGE, DigestMismatch, StoreUnavailable
from ..core.manifest import Manifest
from ..core.state import State
from .references import Reference, Resolve, resolver
from .run import Run
from .walk import TRIES, FetchedLink, Walker

Changed = Callable[[Sequence[Change] | None], None]
"""Called with changes of a version; with None where any weight may have changed."""


def advance(
    state: State, fetched: FetchedLink, resolve: Resolve, *, write: bool = True, changed: Changed | None = None
) -> None:
    """Move weights along one link and prove them. On any error they are spoiled: drop them.

    Without `write` a delta is proven against these weights, which stay as they are. `changed` is called with the
    changes of a delta, after they were written; with None where all weights were.
    """
    manifest = fetched.manifest
    if fetched.link.kind == "delta":
        digest = state.digest
        for file in fetched.delta(digest).open():
            # blocks cover disjoint regions, so each may be written while others are still being decoded
            for changes in file.changes(state.bits, write=write):
                digest += digest_shift(changes)
                if changed is not None:
                    changed(changes)
    else:
        state.load(fetched.weights(resolve))
        digest = state.digest
        if changed is not None:
            changed(None)
    require_digest(manifest, digest)
    if write:
        state.digest, state.version = digest, manifest.version


def load_folder(run: Run, folder: Path) -> State:
    """Return the weights of a checkpoint folder, which must have the run's schema. Their version is unknown."""
    state = State(run.schema)
    state.load(run.weights_in(folder))
    return state


def require_digest(manifest: Manifest, found: StateDigest) -> None:
    """Raise DigestMismatch where weights are not the version of a manifest."""
    if str(found) != manifest.digest:
        raise DigestMismatch(manifest.version, manifest.digest, str(found), "a link or the manifest is wrong")


def checkout(
    run: Run,
    version: int,
    state: State | None = None,
    *,
    reference: Reference = None,
    progress: Callable[[int, int], None] | None = None,
    planned: Callable[[list[chain.Step]], object] = lambda steps: None,
    changed: Changed | None = None,
) -> State:
    """Return the bits of a version, proven. Continues from `state` where a path leads on from there.

        run, version = dw.Run.at("s3://runs/wordle@best")
        state = dw.checkout(run, version)
        state.bits("lm_head.weight")                    # the raw bits of a tensor, flat

    `reference` is where the checkpoint is that the run starts from, if not where the run says.

    Where an object on the way is damaged, gone or cannot be fetched, another way is taken. Raises MissingBase if there
    is none, and StoreUnavailable if objects could not be fetched, since they may only be late.

    planned   called with each way before anything is fetched
    progress  called with the bytes that arrived, and the bytes of the way in all
    changed   called with the changes of each delta, after they were written; with None where all weights were
    """
    current, total, resolve = state or State(run.schema), 0, resolver(reference)

    def have() -> int | None:
        return current.version

    def begin(steps: list[chain.Step]) -> bool:
        nonlocal total
        total = sum(step.bytes for step in steps if step.kind != "reference")
        planned(steps)
        return True

    told = (lambda n: progress(n, total)) if progress else None

    def walk() -> State:
        nonlocal current
        walker, unavailable = Walker(run), 0
        for step, pending in walker.walk(have, version, begin=begin, progress=told):
            try:
                fetched = pending.result()
            except (*DAMAGE, StoreUnavailable) as error:
                unavailable += isinstance(error, StoreUnavailable)
                if unavailable > TRIES:
                    raise
                walker.reject(step, error)
                continue
            try:
                advance(current, fetched, resolve, changed=changed)
            except DAMAGE as error:
                current = State(run.schema)
                walker.reject(step, error)
        return current

    return run.anywhere(walk)
