"""The ranks of a server as one target: staged beside the model, swapped by one call to the engine, or undone.

Where memory cannot be patched, versions come as full weights and go through the engine's own loader, in the same swap.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from ...bucket.run import Run
from ...bucket.walk import Delta
from ...core import full
from ...core.change import Region
from ...core.digest import StateDigest
from ...core.errors import DeltawireError, DigestMismatch, MissingBase, NotRestored, SchemaMismatch
from ...core.parallel import ordered_map
from ...core.schema import Schema, listed
from ...replica.target import UNCHANGED, Staged, Update
from . import arrays, messages
from .channel import Answer, Caller
from .engine import Engine
from .layout import Layout, arrange, sums_of
from .node import SECRET, Node, RemoteNode, WorkerError, ask, source_folder, wanted
from .swap import errors

log = logging.getLogger("deltawire")

OF_NO_VERSION = StateDigest(1, 1)
"""Stands for the digest of weights that have none: unknown ones, or ranks that disagree."""


@dataclass(slots=True, kw_only=True)
class StagedRanks(Staged):
    """A version that is staged on every rank."""

    reloads: bool = False
    """Whether the weights go through the engine's own loader."""
    numbers: list[int] = field(default_factory=list)
    """The number that each rank gave to what it staged last."""


class EngineTarget:
    """The weights of one engine, on all ranks. Methods block; the follower's thread calls them.

    Generation is stopped while the weights have no name: `hold`, `pause` and a swap that could not be undone stop it,
    `name` lets it go on.
    """

    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop) -> None:
        self.refused = ""
        """Why deltas cannot be applied here; empty where they can."""
        self.named: int | None = None
        """The version that the engine puts on samples; None before the first."""
        self.held = False
        """Whether generation was stopped because the weights have no name, perhaps half-way: the next version resumes
        it."""
        self.stopped = False
        """Whether generation is known to stand still."""
        self.spoiled = False
        """Whether a swap failed and could not be undone."""
        self.drafts = False
        """Whether the run has the weights of the engine's draft model, which then are one with the others."""
        self.engine, self._loop = engine, loop
        self._temporary = arrays.folder()
        self._folder = Path(self._temporary.name)
        self._schema = Schema.build(())
        self._layout: Layout = arrange(self._schema, ())
        self._here = Node(self._folder)
        self._nodes: list[Node | RemoteNode] = []
        """Where the ranks are; empty before the first run."""
        self._audits = True
        """Whether reading all weights takes too long for a pause."""
        self._loaded = OF_NO_VERSION
        """Digest of the checkpoint that the engine's own loader was given last."""
        self._from = engine.source
        """Where the server started from; a reload may make the engine forget it."""
        self._source_unknown = False
        self._reload_is_safe = False
        """Whether the engine's own reload was seen to do no harm here."""
        self._harm = ""
        """The observed effect of a reload."""

    # ── binding ──────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def takes_deltas(self) -> bool:
        return not self.refused

    def holds(self) -> list[Region] | None:
        """The regions that ranks of this node hold; None if versions are needed whole."""
        return None if self.refused or len(self._nodes) < 2 else self._here.regions

    @property
    def guard(self) -> str:
        """ "patch", or why weights are reloaded in full; empty before the first sync."""
        return f"reload: {self.refused}" if self.refused else "patch" if self._nodes else ""

    def bind(self, run: Run) -> bool:
        """Locate the weights on all ranks, and check whether they can be patched in place.

        Raises SchemaMismatch if the run is not one that this server's loader takes.
        """
        schema = run.schema
        if schema == self._schema:
            return False
        run.check_kind(is_adapter=False)
        self._schema, clock = Schema.build(()), time.perf_counter()
        answers = self._all(messages.Locate(schema, self.engine.first_rank, self._from))
        ranks = msgspec.convert([answer["pieces"] for answer in answers], list[list[Region]])
        problems = [problem for answer in answers for problem in answer["problems"]]
        self._layout = arrange(schema, ranks, list(dict.fromkeys(problems)))
        self._require_names(schema, self._layout.unused, answers)
        self.refused = self._layout.problems[0] if self._layout.problems else ""
        self._audits = not all(answer["device"] for answer in answers)
        # of a pipeline, the last stage has the draft model
        self.drafts = any(answer["draft"] for answer in answers)
        self._find_nodes(schema, ranks, answers)
        if not self.refused:
            self._all(messages.SetGroups([list(groups) for groups in self._layout.groups]))
        self._check_layout(schema)
        self._schema = schema
        if not self.refused:
            log.info("the weights can be patched (found in %.1f s)", time.perf_counter() - clock)
        else:
            log.warning("deltas are refused, every version is reloaded in full: %s", self.refused)
        return True

    def _find_nodes(self, schema: Schema, ranks: list[list[Region]], answers: list[Answer]) -> None:
        """Reach all ranks, node by node."""
        for node in self._nodes:
            if isinstance(node, RemoteNode):
                node.close()
        self._nodes = []
        at: dict[str, list[int]] = {}
        for number, answer in enumerate(answers):
            at.setdefault(answer["node"], []).append(number)
        decodes = not self.refused and not self._audits

        def connecting(numbers: list[int], found: list[Answer]) -> messages.Connect:
            pieces = [ranks[number] for number in numbers]
            return messages.Connect(numbers, [answer["socket"] for answer in found], schema, pieces, decodes)

        def connect(name: str) -> Caller:
            numbers, secret = at[name], secrets.token_bytes(SECRET)
            found = self._listening(name, numbers, f"deltawire-{secrets.token_hex(8)}", secret.hex())
            host, port = found[0]["address"]
            caller = Caller((host, port), secret=secret)
            ask(caller, connecting(numbers, found))
            return caller

        for name, numbers in at.items():
            if name != arrays.node():
                self._nodes.append(RemoteNode(numbers, partial(connect, name)))
                continue
            found = self._listening(name, numbers, self._folder.name, "")
            self._here.call(connecting(numbers, found))
            self._nodes.append(self._here)

    def _listening(self, node: str, numbers: list[int], folder: str, secret: str) -> list[Answer]:
        found = self._all(messages.Listen(node, numbers, folder, secret))
        return [found[number] for number in numbers]

    def _require_names(self, schema: Schema, unused: Sequence[str], answers: list[Answer]) -> None:
        """Now, while nothing was touched: a loader that does not know the run's names could not load it either."""
        failure = next((answer["failure"] for answer in answers if answer["failure"]), "")
        missing = [name for answer in answers for name in answer["untouched"]]
        if apart := sorted(set(missing).intersection(schema.ties)):
            raise SchemaMismatch(
                f"the run stores {schema.ties[apart[0]]!r} and says that {apart[0]!r} is tied to it, but this server "
                "holds them apart and would leave the second one as it is. Publish the module rather than its state "
                "dict, or start the server from the model that save_pretrained writes"
            )
        if not failure and not (unused and missing):
            return
        differences: list[str] = []
        folder = source_folder(self._from)
        if folder is not None:
            differences = full.Checkpoint(folder).schema.differences(schema, ours=self._from, theirs="the run")
        elif not failure:
            differences = [f"the loader does not use {listed(unused)}", f"nothing is for its {listed(missing)}"]
        if differences:
            raise SchemaMismatch(
                f"the run's tensors are not those of this model: {'; '.join(differences)}. Publish under the names "
                "that save_pretrained writes, or serve the model that the run was made from"
            )

    def _check_layout(self, schema: Schema) -> None:
        """The bytes that the map finds must be those of the checkpoint that was loaded: if not, they were repacked. The
        weights of all nodes have a name only if all of them have the same checkpoint."""
        answers = self._each(messages.DigestFolder(self._from, schema))
        sources = msgspec.convert([answer["source"] for answer in answers], list[StateDigest | None])
        self._loaded = sources[0] if sources[0] is not None and len({*sources}) == 1 else OF_NO_VERSION
        self._source_unknown = self._loaded == OF_NO_VERSION
        if self._source_unknown:
            problem = "the checkpoint that this server loaded is not here to compare memory with"
            if (other := next((rank for rank, found in enumerate(sources) if found != sources[0]), None)) is not None:
                problem = f"the node of rank {other} has another checkpoint {self._from} than that of rank 0, or none"
                log.warning("%s: generation is held until a version is loaded on all nodes", problem)
            self.refused = self.refused or problem
        elif not self.refused and self.live_digest() != self._loaded:
            self.refused = "memory is not laid out like the checkpoint: a kernel repacked some of the weights"
            if len(self._nodes) > 1:
                # or a node has other weights in memory than in its folder by now, which a reload shows
                self._loaded = OF_NO_VERSION

    def digest(self) -> StateDigest:
        """Digest of the live weights; if they cannot be read in place, of the checkpoint that was loaded last."""
        return self._loaded if self.refused else self.live_digest()

    def live_digest(self) -> StateDigest:
        return self._total(self._each(messages.Digest()), "sums")

    # ── beside the model ─────────────────────────────────────────────────────────────────────────────────────────────

    def stage(self, update: Update) -> StagedRanks:
        clock = time.perf_counter()
        staged = StagedRanks(update=update, reloads=bool(self.refused) and not isinstance(update.content, Delta))
        try:
            answers = self._of_nodes(lambda node: node.stage(update, staged.reloads))
            if staged.reloads:
                staged.undoable = False
            else:
                self._check(staged, self._borrow(answers, update.version))
        except BaseException:
            self._forget()
            raise
        staged.timings["decode"] = time.perf_counter() - clock
        return staged

    def _check(self, staged: StagedRanks, answers: list[Answer]) -> None:
        update = staged.update
        if (found := self._total(answers, "present")) != update.before:
            raise DigestMismatch(
                update.version, str(update.before), str(found), "the weights are not those from before"
            )
        update.require(self._total(answers, "predicted"), UNCHANGED)
        staged.numbers = _numbers(answers)
        staged.undoable = not any(answer["overwrites"] for answer in answers)

    def _borrow(self, answers: list[Answer], version: int) -> list[Answer]:
        """Stage again where that takes old weights of other nodes: a tile is cut by the edge between two of them."""
        for node in self._nodes if any("wanted" in answer for answer in answers) else ():
            if regions := wanted(answers[number] for number in node.numbers):
                others = [other for other in self._nodes if other is not node]
                given = [part for other in others for part in other.call(messages.Give(regions))]
                parts = msgspec.convert(given, list[tuple[Region, bytes]])
                for number, answer in zip(node.numbers, node.call(messages.Take(parts)), strict=True):
                    answers[number] = answer
        if any("wanted" in answer for answer in answers):
            raise MissingBase(f"version {version} needs old weights that no rank holds")
        return answers

    def _forget(self) -> None:
        with suppress(WorkerError):
            self._each(messages.Forget())

    # ── the swap ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def swap(self, staged: StagedRanks) -> None:
        """Write what is staged on all ranks and prove it; if one of them fails, all are put back."""
        try:
            if staged.reloads:
                self._reload(staged)
            else:
                self.run(self._swap(staged))
                if self._audits:
                    self._audit(staged)
        except NotRestored:
            self.spoiled = True
            raise
        finally:
            self._forget()
        self.spoiled = False

    async def _swap(self, staged: StagedRanks, name: bool = True) -> None:
        """One call to the engine, which does it between two steps."""
        version = staged.update.version
        try:
            answer = await self.engine.swap(str(version) if name else "", staged.numbers)
        except Exception as error:
            self.held = self.stopped = True
            raise NotRestored(f"the state of the weights is unknown: {type(error).__name__}: {error}") from error
        if "lost" in answer:
            self.held = self.stopped = True
            raise NotRestored(f"{answer['failure']}; and the old weights could not be put back: {answer['lost']}")
        staged.timings |= {phase: answer[phase] for phase in ("stop", "apply", "prove", "pause") if phase in answer}
        if "failure" in answer:
            log.warning("version %d was taken back on all ranks: %s", version, answer["failure"])
            raise WorkerError(answer["failure"])
        self.named = version if name else self.named

    def _audit(self, staged: StagedRanks) -> None:
        """Read all weights after the pause, while the model generates: in host memory that takes too long for a pause,
        in which ranks look at what they wrote and at no more."""
        clock, update = time.perf_counter(), staged.update
        try:
            found = str(self.live_digest())
        except DeltawireError as error:
            found = str(error)
        staged.timings["audit"] = time.perf_counter() - clock
        if found != str(update.digest):
            mismatch = DigestMismatch(update.version, str(update.digest), found, "the server is paused")
            raise NotRestored(f"other weights than those of the update have changed: {mismatch}")

    def _reload(self, staged: StagedRanks) -> None:
        """Full weights through the engine's own loader, for layouts that cannot be patched."""
        before, self._loaded = self._loaded, OF_NO_VERSION
        if not self._source_unknown and not self._reload_is_safe:
            self._prove_reload(staged)
        # the first weights whose digest is known here show whether memory is laid out like a checkpoint
        provable = self._source_unknown and not self._layout.problems
        try:
            staged.numbers = _numbers(self._each(messages.Reload("", unchanged=False, prove=provable)))
            self.run(self._swap(staged))
        except WorkerError:
            self._loaded = before
            raise
        self._loaded = staged.update.digest
        if provable:
            self.refused = ""

    def _prove_reload(self, staged: StagedRanks) -> None:
        """Loading what is loaded already must change nothing: a loader that repacks weights may not survive it."""
        if not self._harm:
            staged.numbers = _numbers(self._each(messages.Reload(self._from, unchanged=True, prove=False)))
            try:
                self.run(self._swap(staged, name=False))
                self._reload_is_safe = True
                return
            except NotRestored as error:
                # for good: what a harmful reload left behind, a second one may well leave as it is
                self._harm = str(error)
        raise NotRestored(
            f"this server can follow no run: its layout cannot be patched ({self.refused}), and {self.engine.name}'s "
            f"own reload of the same weights failed ({self._harm}); restart it"
        )

    # ── what the engine is told ──────────────────────────────────────────────────────────────────────────────────────

    async def hold(self) -> None:
        """Hold generation until the weights are a known version; requests wait."""
        await self.engine.hold()
        self.held = self.stopped = True

    def name(self, version: int) -> None:
        """Set the version of the weights, and resume generation."""
        self.run(self.engine.set_version(str(version), resume=self.held))
        self.named, self.held, self.stopped, self.spoiled = version, False, False, False

    def pause(self) -> None:
        """Stop generation because the weights are no known version, and drop what was computed with them."""
        self.held = True
        try:
            self.run(self.engine.stop())
        except Exception as error:
            raise WorkerError(f"{self.engine.name} does not pause: {type(error).__name__}: {error}") from error
        self.stopped = True

    # ── reaching the ranks ───────────────────────────────────────────────────────────────────────────────────────────

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in the event loop of the engine client, and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _all(self, message: messages.ToRank) -> list[Answer]:
        answers = self.run(self.engine.call(message.text()))
        if failed := errors(answers):
            raise WorkerError(failed[0])
        return answers  # type: ignore[no-any-return]

    def _each(self, message: messages.ToNode) -> list[Answer]:
        return self._of_nodes(lambda node: node.call(message))

    def _of_nodes(self, work: Callable[[Node | RemoteNode], list[Answer]]) -> list[Answer]:
        """Call all nodes at the same time. Returns the answers of all ranks in order."""
        found: dict[int, Answer] = {}
        each = ordered_map(work, self._nodes, len(self._nodes))
        for node, answers in zip(self._nodes, each, strict=True):
            found |= zip(node.numbers, answers, strict=True)
        return [found[number] for number in sorted(found)]

    def _total(self, answers: list[Answer], key: str) -> StateDigest:
        """The digest of the whole model from those of its parts."""
        try:
            return self._layout.total([sums_of(answer[key]) for answer in answers])
        except SchemaMismatch as error:
            log.warning("%s", error)
            return OF_NO_VERSION


def _numbers(answers: list[Answer]) -> list[int]:
    return [answer["staged"] for answer in answers]
