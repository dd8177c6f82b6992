"""Tools for tests of stores and of programs that use one: `StoreTests`, `FlakyStore`, `CountingStore`,
`ThrottledStore`, `seaweed`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deltawire.core.errors import MissingExtra
from deltawire.testing.counting import CountingStore
from deltawire.testing.flaky import FlakyStore
from deltawire.testing.throttled import ThrottledStore

if TYPE_CHECKING:
    from deltawire.testing.stores import StoreTests

__all__ = ["CountingStore", "FlakyStore", "StoreTests", "ThrottledStore"]


def __getattr__(name: str) -> Any:
    # Only StoreTests needs pytest; the wrappers also serve demos on machines without it.
    if name != "StoreTests":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import pytest
    except ImportError:
        raise MissingExtra("deltawire.testing.StoreTests needs pytest: pip install pytest") from None
    pytest.register_assert_rewrite("deltawire.testing.stores")
    from deltawire.testing.stores import StoreTests

    return StoreTests
