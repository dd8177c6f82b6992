"""The trainer's side: `publish` notes what changed and returns; a background thread encodes, uploads and commits.

publish ──capture──▶ waiting ──▶ in flight ──encode, put, commit──▶ version
                        ▲ a second publish merges into what waits: a slow bucket makes fewer, larger versions
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..bucket.versions import address_only
from ..core import full
from ..core.errors import DeltawireError, Misconfigured, OutOfStep
from ..huggingface import tokenizer_files
from ..models import AUTO, class_name, files_of
from ..store import Store, open_store
from .adapters import Adapter
from .background import PublishHandle
from .collective import LAST_WAIT, group_of, may_share
from .commit import Companions
from .detectors import as_detector
from .pipeline import Pipeline, Settings
from .policy import AnchorPolicy, EncodingChooser
from .writer import Progress, Published

log = logging.getLogger("deltawire")

HURRY = 5.0
"""Seconds to wait for other ranks where an exception ends a `with Publisher(…)`."""


class Publisher:
    """Publishes versions of a model to a run. One live publisher per run; a second one loses cleanly.

        with dw.Publisher("s3://runs/wordle", tokenizer=tokenizer) as publisher:
            for batch in batches:
                train_step(model, batch)
                publisher.publish(model)      # returns once it is known what changed; upload goes on behind

    `run` is a bucket address (s3://, hf://buckets/, gs://, az://, a folder). The run is made by the first publish and
    continued by a later publisher. `close`, or the end of the `with`, waits until everything is in the bucket.

    Threads may share a publisher: `publish`, `resume` and `close` take turns, and each publish becomes a version of its
    own or part of a later one, in the order in which the calls got their turn. Keep other threads from changing a model
    while it is being published. Where several ranks publish together, the calls of a rank must have an order that all
    ranks share, so a `publish` that overlaps another one of its rank raises OutOfStep. A process that was forked cannot
    use the publisher of the one before it.

    encoding       "packed" (default), "context" (smaller, slower), "auto" (whichever gets there sooner) or "raw"
    wire_dtype     "auto" (default): the fp32 and fp64 weights of a torch module, or of its `state_dict()`, travel as
                   bf16, everything else (other dtypes, mappings, checkpoint folders) as it is. "bf16" or "fp16": what
                   all floating-point torch weights are cast to before they are compared. None sends them as they are. A
                   NaN gets the bits that the cast on the model's own device gives it.
    buffers        whether the buffers of a torch module travel (default), as they do in its checkpoint
    detector       how changes are found (trainer/detectors.py): by default with a copy on the model's own GPU, or in
                   host memory for everything else. SnapshotDetector, FusedDetector, or the model's DeltaAdamW.
    anchor_every   an anchor at the latest every so many versions; `anchor_ratio` rules in any case. 0: full weights
                   every time and no deltas, to compare with
    anchor_ratio   an anchor once the deltas since the last one cost more than this many times its bytes
    skip_every     also publish a delta over this many versions at a time, so that late joiners fetch fewer objects
    reference      a checkpoint folder or hub id that version 0 points to, instead of an upload of the full weights
    files          names and contents, or a checkpoint folder, of config and tokenizer files that go with the weights.
                   Code never does; what of a folder is left out stands in the log. A symlink out of the folder raises
                   UnsafeName, but for those into the cache of the Hugging Face Hub that the folder is part of.
                   A model of transformers brings config.json and generation_config.json by itself; what is given here
                   goes before.
    tokenizer      a tokenizer or processor of transformers, whose files go with the weights
    model_name     what `deltawire runs` and `log` call the model of a new run; by default its class
    on_version     called with a `Published` after each version is committed, on the publisher's own thread; what it
                   raises is logged. `lambda version: wandb.log(version.report())` is enough for wandb.
    group          "auto" (default): where torch.distributed runs several processes, they publish their model together
                   (trainer/shards.py), so every rank must call `publish`. A process group, or None: this one alone.
    max_pending    bytes that one capture may hold while it waits (default: half the model); a denser change is
                   published block by block before `publish` returns
    base           a checkpoint folder that may hold a version of the run: if its digest is that of one, the version to
                   compare with is taken from there, and only what came after it is fetched
    continues      whether other weights than the run's newest version are meant to follow it. By default a warning is
                   logged when a publisher meets a run with such a version: it may be another training's
    """

    def __init__(
        self,
        run: str | Path | Store,
        *,
        encoding: str = "packed",
        wire_dtype: str | None = AUTO,
        buffers: bool = True,
        detector: Any = None,
        anchor_every: int | None = None,
        anchor_ratio: float = 1.0,
        skip_every: int | None = None,
        reference: str | Path | None = None,
        files: Mapping[str, bytes] | str | Path | None = None,
        tokenizer: Any = None,
        model_name: str = "",
        group: Any = AUTO,
        max_pending: int | None = None,
        base: str | Path | None = None,
        continues: bool = False,
        on_version: Callable[[Published], object] | None = None,
    ) -> None:
        if isinstance(files, (str, Path)):
            files = _files_of(_folder("files", files))
        self._settings = Settings(
            chooser=EncodingChooser(encoding),
            policy=AnchorPolicy(anchor_every, anchor_ratio),
            files=Companions(files),
            wire_dtype=wire_dtype,
            buffers=buffers,
            detector=as_detector(detector) if detector is not None else None,
            skip_every=skip_every,
            reference=str(reference) if reference is not None else None,
            model_name=model_name,
            max_pending=max_pending,
            base=None if base is None else _folder("base", base),
            continues=continues,
            on_version=on_version,
        )
        self._tokenizer = tokenizer
        self._took_files = False
        self._store = open_store(address_only(run))
        self._turn = threading.RLock()
        """Held by the thread that captures or closes; reentrant, so that a signal handler can close."""
        self._group = group
        self._pipeline = Pipeline(self._store, self._settings)
        """For this process alone, until a model turns out to be in the hands of several ranks."""
        if not may_share(group):
            self._pipeline.look()

    # ── what a trainer calls ─────────────────────────────────────────────────────────────────────────────────────────

    def publish(
        self,
        model: Any,
        *,
        step: int | None = None,
        metrics: Mapping[str, float] | None = None,
        wait: bool = False,
        progress: Progress | None = None,
    ) -> PublishHandle:
        """Make the model's present weights the next version.

        Takes a torch module, a state dict, a mapping of arrays, or anything with `schema` and `region` (a checkpoint
        folder). Returns once it has seen what changed; the model may train on. With `wait` it returns after the commit
        and, in host memory, holds no more than one copy of the model plus a few blocks.

        Tied weights travel once; frozen ones are compared like all others, and cost no bytes while they do not change.
        """
        with self._in_turn():
            if not self._took_files:
                self._take_files(model)
            pipeline = self._pipeline_for(model)
            handle = pipeline.publish(model, step, metrics or {}, wait, progress)
            if wait and pipeline.together:
                # in its turn: other ranks must see this rank's publishes in one order
                pipeline.background.wait_for(handle)
        if wait:
            # other threads may publish meanwhile
            pipeline.background.wait_for(handle)
        return handle

    def resume(self, model: Any) -> int:
        """Declare that these weights are the run's newest version, and check it. DivergedRun if they are not."""
        with self._in_turn():
            return self._pipeline_for(model).resume(model)

    def flush(self, timeout: float | None = None) -> None:
        """Wait until everything published before this call is committed; raise what went wrong."""
        self._pipeline.background.flush(timeout)

    def close(self, timeout: float | None = None) -> None:
        """Publish what waits, stop the thread, and raise a background failure that was not raised before.

        A publish that another thread has begun ends first; a later one raises PublisherClosed. After a TimeoutError
        what is on its way still goes on, and another `close` waits for it again.
        """
        self._close(timeout, LAST_WAIT)

    def _close(self, timeout: float | None, patience: float) -> None:
        self._pipeline.background.refuse_own_thread()
        if not self._turn.acquire(timeout=-1 if timeout is None else timeout):
            raise TimeoutError(f"another thread has not ended its publish to {self._store.url} within {timeout} s")
        try:
            self._pipeline.close(timeout, patience)
        finally:
            self._turn.release()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            # after an error other ranks may wait for this one in the training's own collectives: they do not publish
            self._close(None, LAST_WAIT if kind is None else HURRY)
        except DeltawireError:
            # an error already on its way out of the block is the one to see
            if kind is None:
                raise

    def __repr__(self) -> str:
        version = "no version yet" if self.version is None else f"at version {self.version}"
        return f"<Publisher of {self._store.url}, {version}>"

    @property
    def url(self) -> str:
        """Where the run is, fit to be shown."""
        return self._store.url

    @property
    def version(self) -> int | None:
        """The newest committed version."""
        return self._pipeline.version

    @property
    def queue(self) -> int:
        """Versions on their way: 0, 1 in flight, or 2 with one that waits (and takes in every further publish)."""
        return self._pipeline.background.depth

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def _in_turn(self) -> Iterator[None]:
        """One thread at a time. OutOfStep for a second one where ranks publish together."""
        self._pipeline.background.refuse_own_thread()
        overlaps = not self._turn.acquire(blocking=False)
        if overlaps:
            self._turn.acquire()
        try:
            if overlaps and self._pipeline.together:
                raise OutOfStep(
                    "two threads of a rank used its publisher at once, so nobody can tell which publish of the other "
                    "ranks belongs to which; call it from one thread per rank"
                )
            yield
        finally:
            self._turn.release()

    def _pipeline_for(self, model: Any) -> Pipeline:
        """That of this process alone, or at the first publish of a model that several processes hold, one of all."""
        if not self._pipeline.is_open and not self._pipeline.together:
            group = group_of(model, self._group)
            if group is not None:
                self._pipeline.background.check()
                self._pipeline = Pipeline(self._store, self._settings, group)
        return self._pipeline

    def _take_files(self, model: Any) -> None:
        """The files that the model and its tokenizer bring along."""
        found = model.files if isinstance(model, Adapter) else files_of(model, self._settings.wire_dtype)
        if self._tokenizer is not None:
            found = {**found, **tokenizer_files(self._tokenizer)}
        settings = self._settings
        settings.files.found, self._took_files = found, True
        settings.model_name = settings.model_name or settings.files.architecture or class_name(model)


def _folder(option: str, path: str | Path) -> Path:
    folder = Path(path)
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise Misconfigured(f"{option}={str(path)!r} {what}: name a checkpoint folder, as save_pretrained writes it")
    return folder


def _files_of(folder: Path) -> dict[str, bytes]:
    """The small files of a checkpoint folder. What does not travel is said in the log."""
    files = full.companion_files(folder)
    for name in full.asks_for_code(files):
        log.warning(
            "%s asks for code of its own (auto_map): code never travels, and no follower runs any", folder / name
        )
    left_out = full.left_out(folder)
    if left_out:
        code = any(name.endswith(full.CODE_SUFFIXES) for name in left_out)
        listed = ", ".join(f"{name} ({why})" for name, why in left_out.items())
        log.log(logging.WARNING if code else logging.INFO, "not published from %s: %s", folder, listed)
    return files
