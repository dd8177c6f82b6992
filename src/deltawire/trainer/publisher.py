"""The trainer's side: `publish` notes what changed and returns; a background thread encodes, uploads and commits.

publish ──capture──▶ waiting ──▶ in flight ──encode, put, commit──▶ version
                        ▲ a second publish merges into what waits: a slow bucket makes fewer, larger versions
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..bucket.replay import State, find_reference
from ..bucket.run import Run
from ..bucket.versions import address_only
from ..core import full
from ..core.errors import DeltawireError, DivergedRun, Misconfigured, OutOfStep, RunNotFound, SchemaMismatch
from ..core.parallel import ordered_map
from ..core.sparse import EncodedBlock, encode_block
from ..huggingface import tokenizer_files
from ..models import AUTO, Known, ModelView, class_name, files_of
from ..store import Store, open_store
from .adapters import Adapter
from .auto import EncodingChooser
from .background import Background, Job, PublishHandle
from .captures import Mirror
from .commit import Committer, Companions
from .detectors import Detector, HostDetector, LostTrack, TooLarge, as_detector, default_detector
from .policy import AnchorPolicy
from .resume import OTHER_MODEL, commit_reference, load_base, open_reference, rebuild
from .skips import Skips
from .stream import Stream
from .team import group_of, may_share
from .writer import Draft, Progress, Published, VersionWriter, say, tell

if TYPE_CHECKING:
    from .sharded import ShardedPublisher

log = logging.getLogger("deltawire")

MIN_PENDING = 64 << 20
HURRY = 5.0


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
                   (trainer/sharded.py), so every rank must call `publish`. A process group, or None: this one alone.
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
        self._chooser = EncodingChooser(encoding)
        self._policy = AnchorPolicy(anchor_every, anchor_ratio)
        self._wire_dtype = wire_dtype
        self._buffers = buffers
        self._detector: Detector | None = as_detector(detector) if detector is not None else None
        # the user's; bound at the first publish, which knows the tensors
        self._bound = False
        self._known: Known | None = None
        # about the model published last, which is usually the next one too
        self._reference = str(reference) if reference is not None else None
        if isinstance(files, (str, Path)):
            files = _files_of(_folder("files", files))
        self._files = Companions(files)
        self._tokenizer = tokenizer
        self._took_files = False
        self._on_version = on_version
        self._model_name = model_name
        self._max_pending = max_pending
        self._base, self._continues = None if base is None else _folder("base", base), continues
        self._opened = False
        self._store = open_store(address_only(run))
        self._writer: VersionWriter | None = None
        self._mirror: Mirror | None = None
        # what to diff against; None until the first publish, and again when it no longer is what the bucket has
        self._skips = Skips(skip_every)
        self._background = Background(self._publish, self._store.url)
        self._turn = threading.RLock()
        # held by the thread that captures or closes; reentrant, so that a signal handler can close
        self._group, self._skip_every = group, skip_every
        self._sharded: ShardedPublisher | None = None
        # where several ranks publish, it does all the work
        if not may_share(group):
            self._look()

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
            handle = self._accept(model, step, metrics or {}, wait, progress)
        if wait:
            # others may publish meanwhile
            self._background.wait_for(handle)
        return handle

    def resume(self, model: Any) -> int:
        """Declare that these weights are the run's newest version, and check it. DivergedRun if they are not."""
        with self._in_turn():
            sharded = self._together(model)
            if sharded is not None:
                return sharded.resume(model)
            self._look()
            committer = self._writer.committer if self._writer else None
            newest = committer.newest if committer else None
            if committer is None or newest is None:
                raise DivergedRun(f"{self._store.url} has no version to resume from")
            source = self._source(model)
            committer.run.schema.require_equal(source.schema, ours="the run", theirs="this model")
            detector = self._detector_for(source)
            found = str(detector.digest_of(source))
            if found != newest.digest:
                same = [v for v, summary in committer.versions.items() if summary.digest == found]
                what = f"version {same[-1]}" if same else "no version of it"
                raise DivergedRun(f"{self._store.url} is at version {newest.version}; these weights are {what}")
            self._mirror = Mirror(detector, detector.load(source))
            return newest.version

    def flush(self, timeout: float | None = None) -> None:
        """Wait until everything published before this call is committed; raise what went wrong."""
        (self._sharded or self._background).flush(timeout)

    def close(self, timeout: float | None = None) -> None:
        """Publish what waits, stop the thread, and raise a background failure that nobody saw yet.

        A publish that another thread has begun ends first; a later one raises PublisherClosed. After a TimeoutError
        what is on its way still goes on, and another `close` waits for it again.
        """
        (self._sharded or self._background).refuse_own_thread()
        if not self._turn.acquire(timeout=-1 if timeout is None else timeout):
            raise TimeoutError(f"another thread has not ended its publish to {self._store.url} within {timeout} s")
        try:
            (self._sharded or self._background).close(timeout)
        finally:
            if self._mirror is not None:
                self._mirror.detector.close()
            self._turn.release()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is not None and self._sharded is not None:
                # the others may wait for this rank in the training's own collectives: they will not publish any more
                self._sharded.close(patience=HURRY)
            else:
                self.close()
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
        if self._sharded is not None:
            return self._sharded.version
        newest = self._writer.committer.newest if self._writer else None
        return newest.version if newest else None

    @property
    def queue(self) -> int:
        """Versions on their way: 0, 1 in flight, or 2 with one that waits (and takes in every further publish)."""
        return (self._sharded or self._background).depth

    @contextmanager
    def _in_turn(self) -> Iterator[None]:
        """One thread at a time. OutOfStep for a second one where ranks publish together."""
        (self._sharded or self._background).refuse_own_thread()
        overlaps = not self._turn.acquire(blocking=False)
        if overlaps:
            self._turn.acquire()
        try:
            if overlaps and self._sharded is not None:
                raise OutOfStep(
                    "two threads of a rank used its publisher at once, so nobody can tell which publish of the other "
                    "ranks belongs to which; call it from one thread per rank"
                )
            yield
        finally:
            self._turn.release()

    def _accept(
        self, model: Any, step: int | None, metrics: Mapping[str, float], wait: bool, progress: Progress | None
    ) -> PublishHandle:
        """Capture what changed and hand it to the background, or publish it here where it must be streamed."""
        self._take_files(model)
        sharded = self._together(model)
        if sharded is not None:
            return sharded.publish(model, step, metrics, wait)
        began = time.perf_counter()
        self._background.check()
        source = self._open(model, progress)
        handle = PublishHandle()
        try:
            job = None if self._must_stream(source, wait) else self._capture(source)
        except LostTrack as lost:
            log.warning("%s; comparing with the newest version in %s", lost, self._store.url)
            self.flush()
            self._mirror, self._background.leftover, job = None, [], None
            source = self._open(source, progress)
        if job is None:
            self._stream(source, handle, step, metrics, began, progress)
            return handle
        job.handles.append(handle)
        job.step, job.metrics = step, metrics
        job.held += time.perf_counter() - began
        self._background.submit(job)
        return handle

    # ── opening ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _together(self, model: Any) -> ShardedPublisher | None:
        """Who publishes where the model is in the hands of several processes; None where this one has all of it."""
        group = group_of(model, self._group) if self._sharded is None and self._mirror is None else None
        if group is not None:
            from .sharded import Settings, ShardedPublisher

            settings = Settings(
                self._chooser,
                self._policy,
                self._wire_dtype,
                self._buffers,
                self._skip_every,
                self._reference,
                self._files,
                self._model_name,
                self._detector,
                self._on_version,
            )
            self._sharded, self._writer = ShardedPublisher(self._store, group, settings), None
        return self._sharded

    def _take_files(self, model: Any) -> None:
        """At the first publish: the files that the model and its tokenizer bring along."""
        if self._took_files:
            return
        found = model.files if isinstance(model, Adapter) else files_of(model, self._wire_dtype)
        if self._tokenizer is not None:
            found = {**found, **tokenizer_files(self._tokenizer)}
        self._files.found, self._took_files = found, True
        self._model_name = self._model_name or self._files.architecture or class_name(model)

    def _look(self) -> None:
        """Take up the run if it is there. Else it is made by the first publish, which knows the schema."""
        if self._writer is None:
            with suppress(RunNotFound):
                self._take_up(Run.open(self._store))

    def _take_up(self, run: Run) -> VersionWriter:
        self._writer = VersionWriter(Committer(run), self._chooser, self._policy, self._files)
        return self._writer

    def _source(self, model: Any) -> full.Source:
        if isinstance(model, full.Checkpoint):
            full.check_links(model.folder)
        if hasattr(model, "schema") and hasattr(model, "region"):
            return model  # type: ignore[no-any-return]
        view = ModelView(model, self._wire_dtype, buffers=self._buffers, known=self._known)
        self._known = view.known
        return view

    def _open(self, model: Any, progress: Progress | None) -> full.Source:
        """Before the first diff: create the run, or take up its newest version as what to diff against."""
        source = self._source(model)
        writer = self._writer or self._take_up(Run.create(self._store, source.schema, self._model_name))
        if self._mirror is not None and not self._mirror.detector.suits(source):
            # the model has moved to another device, or is handed over in another form
            self.flush()
            self._mirror, self._background.leftover = None, []
        if self._mirror is None:
            writer.committer.check_run()
            writer.committer.catch_up()
        run, newest = writer.committer.run, writer.committer.newest
        run.schema.require_equal(
            source.schema, ours=f"the run {self._store.url}", theirs="this model", advice=OTHER_MODEL
        )
        if self._mirror is not None:
            return source
        if newest is None and self._reference is not None:
            self._commit_reference(writer)
            return source
        detector = self._detector_for(source)
        if newest is None:
            # in host memory the first version is what differs from zeros; a device takes its weights over at once
            self._mirror = Mirror(detector) if detector.writes_parts else Mirror(detector, detector.load(source))
        elif str(detector.digest_of(source)) == newest.digest:
            self._mirror = Mirror(detector, detector.load(source))
        else:
            if not (self._continues or self._opened):
                log.warning(
                    "%s is at version %d, published %s, and these weights are other ones: continuing after it. "
                    "If this is another training, stop it and give it an address of its own",
                    self._store.url,
                    newest.version,
                    time.strftime("%Y-%m-%d %H:%M", time.localtime(newest.created)),
                )
            fetched = (lambda n, total: progress("fetch", n, total)) if progress else None
            base = load_base(run, self._base, writer.committer.versions) if self._base is not None else None
            state = rebuild(run, newest.version, self._find_reference, fetched, base)
            writer.start_over = state is None
            state = state or State(run.schema)
            self._mirror = Mirror(HostDetector.of(state), state.digest)
        self._opened = True
        return source

    def _detector_for(self, source: full.Source) -> Detector:
        if self._detector is None:
            detector = default_detector(source)
            detector.bind(source)
            return detector
        if not self._bound:
            self._detector.bind(source)
            self._bound = True
        if not self._detector.suits(source):
            raise SchemaMismatch(
                f"{type(self._detector).__name__} was made for other tensors than those of this model; "
                "pass the same model to every publish, or a new detector to a new Publisher"
            )
        return self._detector

    def _find_reference(self, source: str, most: int) -> Path:
        """Where this publisher was told the reference is, which may not be what the run calls it."""
        return find_reference(self._reference or source, most)

    def _commit_reference(self, writer: VersionWriter) -> None:
        assert self._reference is not None
        schema = writer.committer.run.schema
        link, weights = open_reference(writer.committer.run, self._reference, self._find_reference)
        state = State(schema)
        state.load(weights)
        say(commit_reference(writer.committer, link, str(state.digest), self._files), schema.elements)
        self._mirror = Mirror(HostDetector.of(state), state.digest)

    # ── detecting ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _must_stream(self, source: full.Source, wait: bool) -> bool:
        """Whether to compare block by block while the caller waits: in little host memory, or where the version to diff
        against came from the bucket and is not yet where the model is."""
        assert self._mirror is not None
        in_host_memory = self._mirror.detector.writes_parts
        return in_host_memory and (wait or self._lives_elsewhere(source))

    def _lives_elsewhere(self, source: full.Source) -> bool:
        return not (self._detector or default_detector(source)).writes_parts

    def _capture(self, source: full.Source) -> Job | None:
        """What changed, merged into the job that waits, if one does. None where it is too dense to hold in memory."""
        assert self._mirror is not None
        budget = self._max_pending or max(MIN_PENDING, self._mirror.nbytes // 2)
        job = self._background.withdraw()
        try:
            capture = self._mirror.capture(source, budget, job.capture if job else None)
        except BaseException as error:
            # what waits must not be lost with it
            self._background.submit(job)
            if isinstance(error, TooLarge):
                return None
            raise
        if job is None:
            return Job(capture)
        job.capture = capture
        return job

    def _stream(
        self,
        source: full.Source,
        handle: PublishHandle,
        step: int | None,
        metrics: Mapping[str, float],
        began: float,
        progress: Progress | None,
    ) -> None:
        """Compare, encode and take over one block after the other, in the caller's thread: one model copy, no more."""
        self.flush()
        assert self._writer is not None
        if self._background.leftover:
            # the mirror is ahead of the bucket by something that was never published
            self._mirror, self._background.leftover = None, []
            source = self._open(source, progress)
        mirror, first = self._mirror, self._writer.committer.newest is None
        assert mirror is not None
        choice = self._chooser.choose(source.schema.elements)
        detected = (lambda n: progress("detect", n, source.schema.nbytes)) if progress else None
        stream = Stream(mirror, source, choice.encoding, detected)
        # until the commit the mirror is ahead of the bucket; if anything fails it must be rebuilt from there
        self._mirror = None
        self._skips.forget()
        if first:
            stream.load()
        blocks = () if first else stream.blocks()
        draft = Draft(choice, blocks, mirror.detector.region, stream.digest, step, metrics, {}, None, progress)
        published = self._writer.write(draft)
        # from here on a detector of the model's own kind can take over: the bucket has what the model has
        self._mirror = None if mirror.detector.writes_parts and self._lives_elsewhere(source) else mirror
        published.timings["held"] = time.perf_counter() - began
        handle.succeed(published)
        tell(self._on_version, published)

    # ── the background ───────────────────────────────────────────────────────────────────────────────────────────────

    def _publish(self, job: Job) -> Published:
        """Encode, upload and commit one job. Nothing is lost on failure: it is part of whatever is published next."""
        assert self._mirror is not None
        assert self._writer is not None
        mirror = self._mirror
        caught_up = self._writer.committer.catch_up()
        self._background.take_over(job, caught_up.version if caught_up else None, mirror, self._skips)
        capture, version = job.capture, self._writer.committer.next_version
        choice = self._chooser.choose(self._writer.committer.run.schema.elements, capture.count)
        before = mirror.before(capture)

        def encoded() -> Iterator[EncodedBlock]:
            return ordered_map(lambda changes: encode_block(changes, choice.encoding, before), capture.blocks)

        since = self._skips.since(capture)
        draft = Draft(
            choice,
            encoded() if version else (),
            mirror.at(capture),
            lambda: mirror.digest_at(capture),
            job.step,
            job.metrics,
            {"held": job.held},
            self._skips.draft(mirror, since, capture, version, choice.encoding),
            publishes=len(job.handles),
        )
        published = self._writer.write(draft)
        self._skips.settle(mirror, capture, version, since)
        tell(self._on_version, published)
        return published


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
