"""The public API of the trainer: `publish` captures what changed and returns; a thread encodes, uploads and commits.

publish ──capture──▶ waiting ──▶ in flight ──encode, put, commit──▶ version
                        ▲ later publishes merge into what waits: a slow bucket makes fewer, larger versions
"""

from __future__ import annotations

import multiprocessing
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping
from functools import partial
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ..bucket.trust import KeysLike
from ..bucket.versions import address_only
from ..core.errors import DeltawireError, Misconfigured, OutOfStep, PublishFailed, SchemaMismatch
from ..core.full import Source
from ..core.manifest import Manifest, Origin
from ..core.parallel import Later
from ..core.signing import SigningKey
from ..models import AUTO, Model, require_wire_dtype
from ..store import Store, open_store
from ..views import check_view
from .claim import Claim
from .collective import LAST_WAIT, group_of, is_one_of_several, is_started_with_others, may_share
from .commit import Signing
from .companions import Companions
from .detectors import Detector
from .local import LocalModel
from .pairs import Pairs, is_pairs
from .pending import PendingVersion, Progress, Published, PublishHandle
from .pipeline import Pipeline
from .policy import AnchorPolicy, EncodingChooser
from .rebuild import Rebuild
from .shard import HeldShards, Shard, as_held

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from .adamw import DeltaAdamW

T = TypeVar("T")

_LOOK_S = 0.01

HURRY = 5.0
"""Seconds to wait for other ranks where an exception ends a `with Publisher(…)`."""


class Publisher:
    """Publishes versions of a model to a run.

        with dw.Publisher("s3://runs/wordle", tokenizer=tokenizer) as publisher:
            for batch in batches:
                train_step(model, batch)
                publisher.publish(model)      # returns once it is known what changed; a thread uploads it

    `run` is a bucket address (s3://, hf://buckets/, gs://, az://), a folder or an open store. The first publish creates
    the run; a later publisher continues it. `close`, or the end of the `with`, waits until everything is in the bucket.
    One publisher at a time (docs/trainer.md): if another process publishes to the run, this one raises
    WriterConflict; after a crash it waits half a minute to be sure. A later publisher of the same process, as in a
    notebook, replaces the earlier one.

    Thread safety: threads may share a publisher. `publish`, `resume` and `close` take turns, and each publish becomes a
    version of its own or part of a later one, in the order of the calls. Keep other threads from changing a model while
    it is being published. If several ranks publish together, all ranks must call in the same order, so a `publish`
    that overlaps another one of its rank raises OutOfStep. A forked process needs a publisher of its own.

    What is published:
    wire_dtype     "auto" (default): fp32 and fp64 weights of a torch module, or of its `state_dict()`, are cast to
                   bf16; everything else (other dtypes, mappings, iterators, checkpoint folders) is published as it is.
                   "bf16" or "fp16": all floating-point torch weights are cast to it, and others that it would have to
                   cast are refused. None: nothing is cast. A NaN gets the bits that the cast on the model's own device
                   gives it.
    view           "fp8-block-ue8m0" or "fp8-block": publish e4m3 weights in blocks of 128 × 128 with their scales
                   (powers of two, or any), computed from the weights in the wire dtype on the model's own device
                   (docs/fp8.md). Not with FusedDetector or DeltaAdamW.
    files          config and tokenizer files to publish with the weights: contents by name, or a checkpoint folder.
                   Code is never published; what is left out of a folder is logged. A symlink out of the folder raises
                   UnsafeName, except into the cache of the Hugging Face Hub that the folder is part of. A model of
                   transformers brings config.json and generation_config.json; files given here take precedence.
    tokenizer      a tokenizer or processor of transformers, whose files are published with the weights. Without it, and
                   with none in `files` or the run, a model of transformers brings that of the folder or cached model
                   of the Hub that it was loaded from. A warning is logged if a run of such a model has none.

    How it is compared and sent:
    detector       how changes are found (trainer/detectors.py): by default with a copy on the model's own GPU, or in
                   host memory for everything else. A SnapshotDetector, a FusedDetector, or the model's DeltaAdamW.
    encoding       "packed" (default), "context" (smaller, slower), "auto" (whichever arrives sooner) or "raw"
    anchor_every   an anchor (full weights) at the latest every so many versions, or sooner by `anchor_ratio`
    anchor_ratio   an anchor once the deltas since the last one cost more than this many times its bytes
    group          "auto" (default): if torch.distributed runs several processes, they publish their model together
                   (trainer/shards.py), so every rank must call `publish`. A process group, or None: this one alone.

    How a run begins and continues:
    reference      a checkpoint folder or hub id that version 0 points to, instead of an upload of the full weights
    base           a checkpoint folder that may hold a version of the run, found by its digest: then only what came
                   after that version is fetched when a run is continued
    continues      True if other weights than the run's newest version are meant to follow it. By default a warning is
                   logged then, unless this process wrote that version: they may be another training's
    takeover       True to replace the publisher that writes to the run, wherever it runs, instead of waiting for it to
                   end: it stops with WriterConflict

    Signatures (docs/signed.md):
    sign           private key that signs each version: a file of `deltawire keygen`, by default DELTAWIRE_SIGN. A run
                   is signed from its first version on, by one key at a time.
    next_key       public key that may sign the versions after these: the next publisher then has `sign` of that key
    trust          public keys that signed earlier versions: of the key before, after a rotation

    Callback:
    on_version     called with a `Published` after each version is committed, on the background thread (on the caller's
                   for a streamed one); what it raises is logged. For wandb: `lambda v: wandb.log(v.report())`.
    """

    def __init__(
        self,
        run: str | Path | Store,
        *,
        wire_dtype: str | None = AUTO,
        view: str | None = None,
        files: Mapping[str, bytes] | str | Path | None = None,
        tokenizer: Any = None,
        detector: Detector | DeltaAdamW | None = None,
        encoding: str = "packed",
        anchor_every: int | None = None,
        anchor_ratio: float = 1.0,
        group: ProcessGroup | Literal["auto"] | None = "auto",
        reference: str | Path | None = None,
        base: str | Path | None = None,
        continues: bool = False,
        takeover: bool = False,
        sign: SigningKey | str | Path | None = None,
        next_key: str = "",
        trust: KeysLike = (),
        on_version: Callable[[Published], object] | None = None,
    ) -> None:
        # first: what follows takes the run, from the parent where takeover=True
        _refuse_second_script()
        # an optimizer has a detector of its own
        compares = detector.detector() if detector is not None and hasattr(detector, "detector") else detector
        require_wire_dtype(wire_dtype)
        if view is not None:
            check_view(view)
            if compares is not None and not compares.compares_views:
                raise Misconfigured(
                    f"a view is compared as it is published, which {type(detector).__name__} cannot do: leave out "
                    "detector=, or pass a SnapshotDetector"
                )
        given = _folder("files", files) if isinstance(files, (str, Path)) else files
        self._files, self._view = Companions(given, tokenizer, wire_dtype, view), view
        rebuild = Rebuild(reference, None if base is None else _folder("base", base))
        claim = Claim(takeover)
        chooser, policy = EncodingChooser(encoding), AnchorPolicy(anchor_every, anchor_ratio)
        signing = Signing.of(sign, next_key, trust)
        self._store = open_store(address_only(run))
        self._make_pipeline = partial(
            Pipeline,
            self._store,
            LocalModel(self._store.url, wire_dtype, view, compares),
            rebuild,
            self._files,
            claim,
            signing,
            chooser,
            policy,
            on_version,
            warn=not continues,
        )
        self._turn = threading.RLock()
        """Held by the thread that captures or closes. Reentrant, so that a signal handler does not wait for itself."""
        self._busy: int | None = None
        """The thread that captures or closes right now."""
        self._group = group
        # where it is dropped without `close`: the thread that renews the claim must not keep this object
        weakref.finalize(self, claim.drop).atexit = False
        self._shared = Later[Pipeline]()
        """That of all ranks. Made in a thread, which goes on where this one is interrupted: others wait for it."""
        self._pipeline = self._make_pipeline()
        """Of this process alone, until a model is published that several ranks hold."""
        if not may_share(group) and not is_started_with_others(group):
            self._pipeline.open_run()

    # ── what a trainer calls ─────────────────────────────────────────────────────────────────────────────────────────

    def publish(
        self,
        model: Model | Pairs | Collection[Shard],
        *,
        step: int | None = None,
        metrics: Mapping[str, float] | None = None,
        wait: bool = False,
        progress: Progress | None = None,
        origin: Origin | None = None,
    ) -> PublishHandle:
        """Publish the model's present weights as the next version.

        `model` is a torch module, a state dict, a mapping of arrays, a list of `Shard` (what this rank holds of a model
        that several ranks hold), or anything with `schema` and `region` (a checkpoint folder). Returns once it is known
        what changed; training may continue. With `wait` it returns after the commit and, in host memory, needs no more
        than one copy of the model plus a few blocks.

        Or an iterator of (name, tensor), as training frameworks have it: full tensors under their checkpoint names, one
        at a time, in any order.

            publisher.publish((name, p.full_tensor()) for name, p in model.named_parameters())

        Each is compared as it passes, so the model is never gathered: this takes the publisher's copy in host memory,
        one tensor, and what changed. Weights are published as they come, unless `wire_dtype` casts them. Where
        torch.distributed runs several processes, all of them pass the iterator, because they gather together, and rank
        0 publishes; where only one calls `publish`, it needs Publisher(…, group=None). A name may come twice with the
        same bits. If the iterator raises (PublishFailed), or leaves a tensor out, brings it in another shape or dtype
        or with two values (SchemaMismatch), all ranks raise, and nothing is published; the next publish carries it.

        `step` and `metrics` are stored with the version. So is `origin`: what the weights were derived from, if they
        are a view of another run's. A version that carries several publishes, because the bucket was slow, has those of
        the newest. `progress(phase, n, total)` is called with bytes done since the last call, in
        the phases "fetch", "detect" and "put". Tied weights are published once; frozen ones are compared like all
        others, and cost no bytes while they do not change.

        An earlier publish that failed in the background is raised here as PublishFailed, once: its changes are part of
        the next version. WriterConflict, RunNotFound and RunReplaced are raised every time.
        """
        # now: the caller may go on writing to both
        at, figures = None if step is None else index(step), {name: float(n) for name, n in (metrics or {}).items()}
        pending: PendingVersion[Any] = PendingVersion(at, figures, progress, origin)
        handle = pending.handles[0]

        def capture() -> Pipeline:
            weights = self._handed_in(model)
            pipeline = self._pipeline_for(weights)
            pipeline.publish(weights, pending, wait)
            if wait and pipeline.together:
                # in its turn: other ranks must see this rank's publishes in one order
                pipeline.background.wait_for(handle)
            return pipeline

        pipeline = self._in_turn(capture)
        if wait:
            # other threads may publish meanwhile
            pipeline.background.wait_for(handle)
        return handle

    def resume(self, model: Model | Pairs | Collection[Shard]) -> int:
        """Check that these weights are the run's newest version, and return its number. DivergedRun if they are not."""

        def compare() -> int:
            weights = self._handed_in(model)
            return self._pipeline_for(weights).resume(weights)

        return self._in_turn(compare)

    def weights(self) -> Source:
        """The weights published last, read by region: what the next publish is compared with.

        The publisher's own copy, not another one; it is valid until the next publish returns. Before the first publish
        that is the run's newest version, which is read from the bucket. Raises VersionNotFound if there is none.
        """
        return self._in_turn(lambda: self._pipeline.weights(shared=is_one_of_several(self._group)))

    def flush(self, timeout: float | None = None) -> None:
        """Wait until everything published before this call is committed.

        Raises PublishFailed for a background failure, or TimeoutError after `timeout` seconds.
        """
        self._refuse_within()
        self._pipeline.background.flush(timeout)

    def close(self, timeout: float | None = None) -> None:
        """Publish what is still waiting, stop the thread, and raise a background failure that was not raised before.

        A publish that another thread has begun ends first; a later one raises PublisherClosed. After a TimeoutError
        uploads continue, and another `close` waits for them again.
        """
        self._close(timeout, LAST_WAIT)

    def _close(self, timeout: float | None, patience: float) -> None:
        background = self._pipeline.background
        background.refuse_own_thread()
        self._refuse_within()
        if timeout is not None:
            # not `acquire` with a timeout: as in `_in_turn`
            until = time.monotonic() + timeout
            background.takes_more = False
            while self._busy is not None:
                if time.monotonic() > until:
                    background.takes_more = True
                    raise TimeoutError(
                        f"another thread has not ended its publish to {self._store.url} within {timeout} s"
                    )
                time.sleep(_LOOK_S)
        with self._turn:
            self._uninterrupted(lambda: self._pipeline.close(timeout, patience))

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            # after an error other ranks may wait for this one in the training's own collectives: they do not publish
            self._close(None, LAST_WAIT if kind is None else HURRY)
        except DeltawireError:
            # the error that ended the block is the one to raise
            if kind is None:
                raise

    def __repr__(self) -> str:
        version = "no version yet" if self.version is None else f"at version {self.version}"
        return f"<Publisher of {self._store.url}, {version}>"

    @property
    def url(self) -> str:
        """Address of the run, without credentials."""
        return self._store.url

    @property
    def version(self) -> int | None:
        """The newest committed version; None before the first."""
        return self._pipeline.version

    @property
    def newest(self) -> Manifest | None:
        """Manifest of the newest committed version, on the rank that commits; None before the first."""
        return self._pipeline.newest

    @property
    def queue(self) -> int:
        """Number of uncommitted versions: 0, 1 in flight, or 2 with one that waits (later publishes merge into it)."""
        return self._pipeline.background.depth

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _in_turn(self, work: Callable[[], T]) -> T:
        """Do work, one thread at a time. OutOfStep for a second one where ranks publish together."""
        self._pipeline.background.refuse_own_thread()
        overlaps = self._busy
        # not `acquire`: an interrupt between that and the `try` would leave the lock taken
        with self._turn:
            if overlaps and not self._busy and self._pipeline.together:
                raise OutOfStep(
                    "two threads of a rank used its publisher at once, so it is unknown which publish of the other "
                    "ranks belongs to which; call it from one thread per rank"
                )
            return self._uninterrupted(work)

    def _uninterrupted(self, work: Callable[[], T]) -> T:
        """Do work in this thread's turn. PublishFailed in a signal handler that has interrupted such work."""
        self._refuse_within()
        try:
            try:
                self._busy = threading.get_ident()
                return work()
            finally:
                self._busy = None
        finally:
            # once more: an interrupt may have come before the line above
            self._busy = None

    def _refuse_within(self) -> None:
        """Raise PublishFailed where this thread was interrupted while it captures or closes."""
        if self._busy == threading.get_ident():
            raise PublishFailed(
                "`publish`, `resume`, `weights`, `flush` or `close` was called within one of them, by a signal "
                "handler, a generator of weights or `on_version`: nothing was done. Set a flag there, and call it in "
                "the training loop when it is set"
            )

    def _handed_in(self, model: Model | Pairs | Collection[Shard]) -> Any:
        """Return shards as one object, anything else as it is. Where ranks publish shards, which the first
        publish decides, an empty list is no shards."""
        return as_held(model, nothing=may_share(self._group) and not self._pipeline.one_by_one)

    def _pipeline_for(self, model: Any) -> Pipeline:
        """The pipeline of this process alone or, from the first publish of a model that several ranks hold, of all.

        Also finds the files that go with the model.
        """
        self._files.find(model)
        if self._view is not None:
            check_view(self._view, of_adapters=self._files.base_name is not None)
        if not self._pipeline.is_open and not self._pipeline.together:
            group = group_of(model, self._group)
            if group is not None:
                self._pipeline.background.check()
                make = partial(self._make_pipeline, group=group, one_by_one=is_pairs(model))
                self._shared.begin(make, "deltawire-ranks")
                self._pipeline = self._shared.result()
        if isinstance(model, HeldShards) and not self._pipeline.together:
            raise SchemaMismatch(
                f"this publisher of {self.url} has published a model that this process has whole: publish shards from "
                "the first version on, or to an address of their own"
            )
        return self._pipeline


def _refuse_second_script() -> None:
    """Misconfigured in a child process of multiprocessing that still imports the parent's script, as all of it then
    runs a second time. Python itself refuses to start a process there, by the same mark."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise Misconfigured(
            "this process is a child of the one that trains, and runs its script once more while it imports it; "
            "nothing was published. Guard your script: put what it does under if __name__ == '__main__':"
        )


def _folder(option: str, path: str | Path) -> Path:
    folder = Path(path)
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise Misconfigured(f"{option}={str(path)!r} {what}: name a checkpoint folder, as save_pretrained writes it")
    return folder
