"""All workers of a server as one set of live weights: staged, swapped in a pause, proven, or taken back."""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ...bucket.replay import as_run
from ...core import full
from ...core.digest import StateDigest
from ...core.errors import ChainError, DeltawireError, DigestMismatch, MissingBase, SchemaMismatch
from ...core.schema import Schema, listed
from . import arrays
from .channel import Caller, ChannelClosed, call_all
from .decoder import Decoder
from .guard import has_draft
from .layout import Layout, arrange
from .rectangle import Rectangle
from .settings import Policy

log = logging.getLogger("deltawire")

STAGE_LIMIT_S = 3600.0
"""Seconds that work beside the model may take."""

OF_NO_VERSION = StateDigest(1, 1)
"""Stands for the digest of weights that have none: unknown ones, or ranks that disagree."""


class WorkerError(ChainError):
    """A rank could not do what it was asked to; nothing was changed. Another way to the version may still work."""


class TooDense(ChainError):
    """Full weights that have little in common with the present ones: they have to be written over them."""


class NotRestored(DeltawireError):
    """Weights were changed and could not be put back: the server stays paused."""


@dataclass(slots=True)
class Staged:
    """A version that every rank has decoded and could write now."""

    version: int
    digest: StateDigest
    # what the weights will have
    changed: int
    audited: bool
    # whether ranks prove no more in the pause than what they write, so that all weights have to be read after it
    timings: dict[str, float] = field(default_factory=dict)


class Workers:
    """Bound to one engine and one schema. Methods block; they are called from the follower's thread."""

    def __init__(self, client: Any, loop: asyncio.AbstractEventLoop, policy: Policy) -> None:
        self.model = self
        # what `Replica` compares to know whether it is still bound to the same weights
        self.layout: Layout | None = None
        self.refused = ""
        # why deltas cannot be applied here
        self.timings: dict[str, float] = {}
        self.has_draft = has_draft(client.vllm_config)
        # whether a draft model proposes tokens, whose weights stay what they are
        self._client, self._loop, self._policy = client, loop, policy
        self._temporary = arrays.folder()
        self._folder = Path(self._temporary.name)
        self._ranks: list[Caller] = []
        self._decoder: Decoder | None = None
        # of weights that are not in host memory
        self._loaded: StateDigest | None = None
        # digest of the checkpoint that vLLM's own loader was given last
        self._from = str(client.vllm_config.model_config.model)
        # where the server started from; a reload makes vLLM forget it
        self._source_unknown = False
        self._reloads: bool | None = None
        # whether vLLM's own reload was seen to do no harm here; None until it was tried

    # ── binding ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def bind(self, schema: Schema) -> None:
        """Find out where the weights lie, and whether they can be patched there.

        Raises SchemaMismatch if the run is not one that this server's loader takes.
        """
        path = self._folder / "schema.json"
        path.write_bytes(msgspec.json.encode(schema))
        self.schema = schema
        answers = self._all("layout", schema=str(path), sockets=str(self._folder))
        ranks = [[Rectangle(*piece) for piece in answer["pieces"]] for answer in answers]
        problems = [problem for answer in answers for problem in answer["problems"]]
        self.layout = arrange(schema, ranks, list(dict.fromkeys(problems)))
        self._require_names(schema, self.layout.unused, answers)
        self.refused = self.layout.problems[0] if self.layout.problems else ""
        for caller in self._ranks:
            caller.close()
        self._ranks = [Caller(answer["socket"]) for answer in answers]
        if not self.refused:
            self._all("group", groups=[list(groups) for groups in self.layout.groups])
            if all(answer["device"] for answer in answers):
                self._decoder = self._decoder or Decoder(self._folder)
                self._decoder.call(
                    "open", STAGE_LIMIT_S, schema=str(path), ranks=[answer["pieces"] for answer in answers]
                )
        self._check_layout()

    def _require_names(self, schema: Schema, unused: Sequence[str], answers: list[dict[str, Any]]) -> None:
        """Now, while nothing was touched: a loader that does not know the run's names could not load it either."""
        failure = next((answer["failure"] for answer in answers if answer["failure"]), "")
        missing = [name for answer in answers for name in answer["untouched"]]
        if not failure and not (unused and missing):
            return
        differences: list[str] = []
        folder = self._source_folder()
        if folder is not None:
            differences = full.Checkpoint(folder).schema.differences(schema, ours=self._from, theirs="the run")
        elif not failure:
            differences = [f"the loader does not use {listed(unused)}", f"nothing is for its {listed(missing)}"]
        if differences:
            raise SchemaMismatch(
                f"the run's tensors are not those of this model: {'; '.join(differences)}. Publish under the names "
                "that save_pretrained writes, or serve the model that the run was made from"
            )

    def _check_layout(self) -> None:
        """The bytes that the map finds must be those of the checkpoint that was loaded: if not, they were repacked."""
        source = self._source()
        self._source_unknown = source is None
        if source is None:
            self.refused = self.refused or "the checkpoint that this server loaded is not here to compare memory with"
            return
        self._loaded = full.digest_of(source)
        if not self.refused and self.live_digest() != self._loaded:
            self.refused = "memory is not laid out like the checkpoint: a kernel repacked some of the weights"

    def _source(self) -> full.Source | None:
        """The checkpoint that the server started from, where it is one of this schema."""
        folder = self._source_folder()
        try:
            return as_run(full.Checkpoint(folder), self.schema, self._from) if folder else None
        except DeltawireError as error:
            log.info("cannot compare with %s: %s", self._from, error)
            return None

    def _source_folder(self) -> Path | None:
        return Path(self._from) if Path(self._from).is_dir() else _cached(self._from)

    def digest(self) -> StateDigest:
        """What the weights are. Where they cannot be read through the map: what vLLM's own loader was given."""
        if not self.refused:
            return self.live_digest()
        return self._loaded if self._loaded is not None else OF_NO_VERSION

    def live_digest(self) -> StateDigest:
        return self._total(self._beside("digest"))

    # ── before the pause ─────────────────────────────────────────────────────────────────────────────────────────────

    def spool(self, name: str, chunks: Iterable[bytes | memoryview]) -> Path:
        """A file that the workers of this node read. Remove it when it is no longer needed."""
        path = self._folder / name
        with open(path, "wb") as out:
            for chunk in chunks:
                out.write(chunk)
        return path

    def stage(self, kind: str, paths: Sequence[Path], version: int, present: StateDigest) -> Staged:
        """Have every rank make its part ready, while the model generates. Nothing is changed."""
        clock = time.perf_counter()
        files = [str(path) for path in paths]
        answers = self._received(files) if kind == "delta" and self._decoder is not None else None
        if answers is None:
            answers = self._decoded(kind, files, version)
        if any("dense" in answer for answer in answers):
            self.forget()
            raise TooDense(f"the weights of version {version} are too different to be staged beside the present ones")
        if (found := self._total(answers, "present")) != present:
            raise DigestMismatch(version, str(present), str(found), "the weights are not those from before")
        changed = sum(answer["changed"] for answer in answers)
        staged = Staged(version, self._total(answers, "predicted"), changed, self._decoder is None)
        staged.timings["decode"] = time.perf_counter() - clock
        return staged

    def _received(self, files: list[str]) -> list[dict[str, Any]] | None:
        """Stage a delta that is decoded once, in a process of its own, for ranks that hold their weights on devices.
        None where tiles are cut by the edges of pieces."""
        assert self._decoder is not None
        out = f"{files[0]}.ranks"
        try:
            read = self._decoder.call("read", STAGE_LIMIT_S, paths=files, out=out)
            if read.get("cut"):
                return None
            if any(read["tiles"]):
                self._beside("count", path=out)
                self._decoder.call("ranks", STAGE_LIMIT_S, out=out)
            return self._beside("receive", path=out, parts=read["parts"], tiles=read["tiles"])
        finally:
            for file in self._folder.glob(f"{Path(out).name}.*"):
                file.unlink()

    def _decoded(self, kind: str, files: list[str], version: int) -> list[dict[str, Any]]:
        """Stage what each rank decodes from the weights it holds, and from those that others lend it."""
        lent: list[str] = []
        answers = self._beside("stage", kind=kind, paths=files, lent=lent)
        if any("wanted" in answer for answer in answers):
            rectangles = [r for answer in answers for r in answer.get("wanted", ())]
            lent = [answer["lent"] for answer in self._beside("lend", rectangles=rectangles, path=files[0])]
            answers = self._beside("stage", kind=kind, paths=files, lent=lent)
            for file in lent:
                os.unlink(file)
        if any("wanted" in answer for answer in answers):
            raise MissingBase(f"version {version} needs old weights that no rank of this node holds")
        return answers

    def forget(self) -> None:
        self._beside("forget")

    # ── the pause ────────────────────────────────────────────────────────────────────────────────────────────────────

    def swap(self, staged: Staged) -> None:
        """Write what is staged and prove it; if a rank fails, all of them are put back and that is proven."""
        self.run(self._swap(staged))

    async def _swap(self, staged: Staged) -> None:
        """One call to the engine, which does it between two steps (core.py). Requests that are not to be kept are
        stopped before."""
        keep = self._policy.mode == "keep"
        stay = keep or await self._client.is_paused()
        try:
            if not keep:
                await self._client.sleep(level=0, mode=self._policy.mode)
            answer = await self._client.engine_core.call_utility_async(
                "deltawire_swap", str(staged.version), self._policy.kv == "clear"
            )
        except Exception as error:
            raise NotRestored(f"nobody can say what the weights are: {type(error).__name__}: {error}") from error
        if "lost" in answer:
            raise NotRestored(f"{answer['failure']}; and the old weights could not be put back: {answer['lost']}")
        if not stay:
            await self._client.wake_up(["scheduling"])
        self.timings.update({name: answer[name] for name in ("stop", "apply", "prove", "pause") if name in answer})
        if "failure" in answer:
            log.warning("version %d was taken back on all ranks: %s", staged.version, answer["failure"])
            raise WorkerError(answer["failure"])

    def audit(self, staged: Staged) -> None:
        """After the pause: read all weights, while the model generates. What is wrong now is not served any longer."""
        clock = time.perf_counter()
        try:
            found = str(self.live_digest())
        except DeltawireError as error:
            found = str(error)
        if found != str(staged.digest):
            try:
                self.pause()
            except WorkerError:
                log.exception("weights that have no name are perhaps still being served")
            mismatch = DigestMismatch(staged.version, str(staged.digest), found, "the server was paused")
            raise NotRestored(f"weights changed that nobody was to change: {mismatch}")
        staged.timings["audit"] = time.perf_counter() - clock

    def load(self, path: Path, version: int, digest: StateDigest) -> None:
        """Overwrite everything through the map. There is no way back, so the server stays paused if this fails."""
        self.run(self._paused(lambda: self._load(path, version, digest), version))

    async def _load(self, path: Path, version: int, digest: StateDigest) -> None:
        answers = await self._call("load", path=str(path))
        if (failure := _first_error(answers)) is not None:
            raise NotRestored(f"version {version} could not be loaded: {failure}")
        if (found := self._total(answers)) != digest:
            raise NotRestored(str(DigestMismatch(version, str(digest), str(found))))
        self.timings.update(_slowest(answers))

    def reload(self, source: full.Source, version: int, digest: StateDigest) -> None:
        """Full weights through vLLM's own loader, for layouts that cannot be patched."""
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            full.write_checkpoint(Path(folder), source)
            self.run(self._paused(lambda: self._reload(Path(folder), version, digest), version))
        self._loaded = digest

    async def _reload(self, folder: Path, version: int, digest: StateDigest) -> None:
        clock = time.perf_counter()
        if self._reloads is None:
            await self._prove_reload()
        if not self._reloads:
            # for good: what a harmful reload left behind, a second one may well leave as it is
            raise NotRestored(
                "this server can follow no run: its layout cannot be patched "
                f"({self.refused}), and vLLM's own reload of the same weights gave other ones; restart it"
            )
        await self._reload_from(folder)
        assert self.layout is not None
        if not self.layout.problems and self._source_unknown:
            # the first weights whose digest is known here: they show whether memory is laid out like a checkpoint
            found = await asyncio.to_thread(self.live_digest)
            if found != digest:
                raise NotRestored(str(DigestMismatch(version, str(digest), str(found), "restart the server")))
            self.refused = ""
        self.timings["apply"] = time.perf_counter() - clock

    async def _prove_reload(self) -> None:
        """Loading what is loaded already must change nothing: a loader that repacks weights may not survive it."""
        if self._source_unknown:
            self._reloads = True
            return
        before = _fingerprints(await self._call("fingerprint"))
        folder = self._source_folder()
        assert folder is not None
        self._reloads = False
        await self._reload_from(folder)
        self._reloads = _fingerprints(await self._call("fingerprint")) == before

    async def _reload_from(self, folder: Path) -> None:
        if (error := _first_error(await self._call("reloading"))) is not None:
            raise error
        # until it is known that all went well, nobody can say what the weights are
        self._loaded = None
        try:
            await self._client.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
        except Exception as error:
            raise NotRestored(f"vLLM could not reload {folder}: {error}; restart the server") from error

    def name(self, version: int, *, resume: bool) -> None:
        """Say which version the weights are; with `resume`, let the server generate with them."""
        self.run(self._name(version, resume))

    async def _name(self, version: int, resume: bool) -> None:
        await self._client.update_weight_version(str(version))
        if resume:
            await self._client.wake_up(["scheduling"])

    def pause(self) -> None:
        self.run(self._stand_still("keep"))

    async def _paused(self, work: Callable[[], Coroutine[Any, Any, None]], version: int) -> None:
        """Run `work` while no token is made. Only weights that have a name are left to generate with."""
        stay = await self._client.is_paused()
        clock = time.perf_counter()
        try:
            await self._stand_still(self._policy.mode)
            self.timings["stop"] = time.perf_counter() - clock
            await work()
            await self._client.update_weight_version(str(version))
        except NotRestored:
            stay = True
            raise
        except DeltawireError:
            # the old weights are back, and proven to be
            raise
        except Exception as error:
            stay = True
            raise NotRestored(f"nobody can say what the weights are: {type(error).__name__}: {error}") from error
        finally:
            if not stay:
                await self._client.wake_up(["scheduling"])
            self.timings["pause"] = time.perf_counter() - clock

    async def _stand_still(self, mode: str) -> None:
        """What `pause_generation` does, without the 20 ms that it sleeps so that callers see outputs in a nicer order.
        Level 0 stops the scheduler and leaves all memory as it is."""
        client = self._client
        try:
            await client.sleep(level=0, mode=mode)
            if self._policy.kv != "keep":
                dropped, *_ = await asyncio.gather(
                    client.reset_prefix_cache(reset_running_requests=True, reset_connector=True),
                    client.reset_mm_cache(),
                    client.reset_encoder_cache(),
                )
                if not dropped:
                    raise RuntimeError("keys and values of the old weights could not be dropped")
        except Exception as error:
            raise WorkerError(f"vLLM does not pause: {type(error).__name__}: {error}") from error

    # ── reaching the ranks ───────────────────────────────────────────────────────────────────────────────────────────

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine where the engine client lives, and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _call(self, operation: str, **arguments: Any) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = await self._client.collective_rpc(
            "deltawire", args=(operation,), kwargs=arguments
        )
        return answers

    def _all(self, operation: str, **arguments: Any) -> list[dict[str, Any]]:
        answers = self.run(self._call(operation, **arguments))
        if (error := _first_error(answers)) is not None:
            raise error
        return answers  # type: ignore[no-any-return]

    def _beside(self, operation: str, **arguments: Any) -> list[dict[str, Any]]:
        """Have every rank do something beside the model; the engine does not hear of it."""
        try:
            answers = call_all(self._ranks, operation, STAGE_LIMIT_S, **arguments)
        except ChannelClosed as error:
            raise WorkerError(f"a rank cannot be reached for {operation!r}: {error}") from error
        if (failed := _first_error(answers)) is not None:
            raise failed
        return answers

    def _total(self, answers: list[dict[str, Any]], key: str = "sums") -> StateDigest:
        """The digest of the whole model from those of its parts."""
        assert self.layout is not None
        try:
            return self.layout.total([{int(group): value for group, value in a[key].items()} for a in answers])
        except SchemaMismatch as error:
            log.warning("%s", error)
            return OF_NO_VERSION


def _first_error(answers: list[dict[str, Any]]) -> DeltawireError | None:
    for rank, answer in enumerate(answers):
        if "error" in answer:
            return WorkerError(f"rank {rank}: {answer['error']}")
    return None


def _fingerprints(answers: list[dict[str, Any]]) -> list[str]:
    if (error := _first_error(answers)) is not None:
        raise error
    return [answer["fingerprint"] for answer in answers]


def _slowest(answers: list[dict[str, Any]]) -> dict[str, float]:
    return {phase: max(answer[phase] for answer in answers) for phase in ("apply", "prove")}


def _cached(name: str) -> Path | None:
    """A hub model as it lies in the local cache."""
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, local_files_only=True))
    except Exception:
        return None
