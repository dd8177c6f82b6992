"""Live weights and the version that they are, by their digest."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress

from ..bucket.run import Run
from ..core.digest import StateDigest
from ..core.errors import DAMAGE, NotRestored
from .model import ModelTarget
from .target import AnyTarget, Staged, Update

log = logging.getLogger("deltawire")

_UNBOUND = ModelTarget({})


class LiveWeights:
    """A target and what its weights are. For one thread at a time; the attributes can be read at any time.

    id       name of the replica, for the log
    pause    entered while the weights are written
    on_name  called with the version by `tell`, and with None as soon as the weights are found to have none
    """

    def __init__(
        self, id: str, pause: Callable[[], AbstractContextManager[object]], on_name: Callable[[int | None], object]
    ) -> None:
        self.target: AnyTarget = _UNBOUND
        self.version: int | None = None
        """The version of the weights; None if they have none."""
        self.served: int | None = None
        """The version that clients get, which some targets tell from that of the weights in host memory."""
        self.digest = StateDigest()
        """Of the weights when they were last looked at."""
        self._id, self._pause, self._on_name = id, pause, on_name

    def bind(self, target: AnyTarget, run: Run, want: int) -> None:
        """Locate the weights and identify their version, if they have one; `want` is looked at first.

        Weights that are `want` already are looked at again: nothing else would find that something wrote to them.
        """
        known = target is self.target
        self.target = _UNBOUND
        try:
            has_moved = target.bind(run)
            if has_moved or not known:
                # before the target: no weights have the name of others
                self._be(None)
        except BaseException:
            self._be(None)
            raise
        self.target = target
        if self.version is None:
            self.digest = target.digest()
            self._be(run.identify(self.digest, want))
            if self.version is not None:
                log.info("%s: the weights are version %d already", self._id, self.version)
        elif self.version == want:
            self.have_strayed()

    def start(self, want: int) -> int | None:
        """The version to go on from. None also where clients do not get `want` although the weights are that version:
        it was passed on the way to another one, and no delta leads to where the weights are."""
        return None if self.version == want != self.served else self.version

    def apply(self, update: Update) -> dict[str, float]:
        """Stage a version and swap to it. Returns the seconds by phase."""
        staged: Staged = self.target.stage(update)
        with self._pause():
            try:
                self.target.swap(staged)
                # within: where this is interrupted, the weights say which version they are
                served = update.version if staged.served else self.served
                self.digest, self.version, self.served = update.digest, update.version, served
            except BaseException as error:
                named, self.version = self.version, self.version if staged.undoable else None
                if not isinstance(error, NotRestored) and self.target.digest() == self.digest:
                    self.version = named
                else:
                    self._lose()
                raise
        return staged.timings

    def have_strayed(self) -> bool:
        """Whether something else changed the weights; then they are no version any more."""
        if (found := self.target.digest()) == self.digest:
            return False
        log.warning("%s: the weights were changed by something other than this replica", self._id)
        # first: no weights have a digest and the name of another one
        self._lose()
        self.digest = found
        return True

    def were_replaced(self, run: Run) -> bool:
        """Whether their version was replaced in the bucket; then they are no version any more."""
        if self.version is None:
            return False
        run.forget(self.version)
        with suppress(*DAMAGE):
            if run.manifest(self.version).digest != str(self.digest):
                log.warning("%s: version %d was replaced in %s", self._id, self.version, run.store.url)
                self._lose()
                return True
        return False

    def tell(self) -> None:
        self._on_name(self.version)

    def _be(self, version: int | None) -> None:
        self.version = self.served = version

    def _lose(self) -> None:
        self._be(None)
        self._on_name(None)
