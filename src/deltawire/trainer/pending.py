"""Versions on their way into the bucket, and what `publish` returns for them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ..core.manifest import Origin
from ..core.parallel import Later
from ..metrics import VersionFigures
from .captures import Capture, Stream

Progress = Callable[[str, int, int], None]
"""(phase, bytes since the last call, bytes of the phase as far as known); the phases are "fetch" (of what to diff
against), "detect" and "put"."""


@dataclass(frozen=True, slots=True)
class Published(VersionFigures):
    """A committed version, as `PublishHandle.result` returns it and `on_version` gets it.

        dw.Publisher("s3://runs/chat", on_version=lambda published: wandb.log(published.report()))

    version     its number
    digest      state digest of all its weights
    changed     number of weights that differ from the version before
    bytes       bytes uploaded for this version
    kinds       what was uploaded: "delta", "anchor", "reference"
    timings     seconds: held (the training loop was blocked), encode, put; of the slowest rank
    elements    number of weights of the model
    publishes   calls of `publish` in this version: more than one if the bucket was slower than the trainer
    """

    version: int
    digest: str
    changed: int
    bytes: int
    kinds: tuple[str, ...]
    timings: dict[str, float]
    elements: int = 0
    publishes: int = 1


class PublishHandle:
    """Returned by `publish` at once. `result()` waits for the version that carries the publish.

        handle = publisher.publish(model)
        print(handle.result().version)

    Any thread may use it, and several may wait.
    """

    def __init__(self) -> None:
        self._version = Later[Published]()

    def result(self, timeout: float | None = None) -> Published:
        """Wait for the version and return it. Raises what made it fail, or TimeoutError after `timeout` seconds."""
        return self._version.result(timeout)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the version is committed or has failed, or so many seconds. Returns whether it is."""
        return self._version.wait(timeout)

    def done(self) -> bool:
        """Whether the version is committed or has failed."""
        return self._version.done()


C = TypeVar("C", bound=Capture | Stream)
"""What turns one version into the next: captured, or compared while it is encoded."""


@dataclass(slots=True)
class PendingVersion(Generic[C]):
    """A version that is not committed yet. Several publishes may be merged into one."""

    step: int | None
    metrics: Mapping[str, float]
    progress: Progress | None
    origin: Origin | None
    """What the weights were derived from, for a derived run."""
    handles: list[PublishHandle] = field(default_factory=lambda: [PublishHandle()])
    """Of all publishes in it."""
    timings: dict[str, float] = field(default_factory=dict)
    """Seconds by phase: held (the training loop was blocked), encode, put."""
    changes: C = field(init=False)
    """A capture, or a stream that compares while it is encoded: once it is known which."""
    last_publish: int = 0
    """Sequence number of the newest publish in it."""

    def merge(self, later: PendingVersion[C]) -> None:
        """Include a later one, whose changes are those of both."""
        self.changes, self.step, self.metrics, self.origin = later.changes, later.step, later.metrics, later.origin
        self.last_publish = later.last_publish
        self.handles = self.handles + later.handles
        self.timings = {**self.timings, "held": self.timings["held"] + later.timings["held"]}

    def merged(self, later: PendingVersion[C]) -> PendingVersion[C]:
        """One version of both; this one stays as it is."""
        both = copy.copy(self)
        both.merge(later)
        return both

    def succeed(self, published: Published) -> None:
        """Hand the committed version to all who wait for it."""
        for handle in self.handles:
            handle._version.succeed(published)

    def fail(self, error: BaseException) -> None:
        """Raise an error for all who wait for the version."""
        for handle in self.handles:
            handle._version.fail(error)
