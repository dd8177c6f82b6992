"""Skip deltas: everything since a base version, kept so that it can be published beside the ordinary delta."""

from __future__ import annotations

from ..core.parallel import ordered_map
from ..core.sparse import encode_block
from .captures import Capture, Mirror
from .writer import Skip


class Skips:
    def __init__(self, every: int | None) -> None:
        self._every = every
        self._base: tuple[int, Capture] | None = None
        # the last base version, and what changed since

    @property
    def base(self) -> int | None:
        """The version that the next skip delta starts from."""
        return self._base[0] if self._base else None

    def forget(self) -> None:
        self._base = None

    def since(self, capture: Capture) -> tuple[int, Capture] | None:
        """The base version and everything since, with this capture."""
        if self._base is None:
            return None
        base, changes = self._base
        return base, changes.then(capture)

    def draft(
        self, mirror: Mirror, since: tuple[int, Capture] | None, capture: Capture, version: int, encoding: str
    ) -> Skip | None:
        if since is None or not self._is_base(version) or since[0] == version - 1:
            return None
        base, changes = since
        before = mirror.before(capture, since=changes)
        return Skip(base, lambda: ordered_map(lambda block: encode_block(block, encoding, before), changes.blocks))

    def settle(self, mirror: Mirror, capture: Capture, version: int, since: tuple[int, Capture] | None) -> None:
        """The capture is published as this version."""
        mirror.settle(capture)
        self._base = (version, Capture.empty(mirror.plan)) if self._is_base(version) else since

    def _is_base(self, version: int) -> bool:
        return bool(self._every) and version % (self._every or 1) == 0
