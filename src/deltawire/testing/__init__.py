"""The store protocol as tests, for authors of stores: `StoreTests`."""

from __future__ import annotations

from deltawire.core.errors import MissingExtra

try:
    import pytest
except ImportError:
    raise MissingExtra("deltawire.testing needs pytest: pip install pytest") from None

# before the import, so that a failing assertion shows its values
pytest.register_assert_rewrite("deltawire.testing.stores")

from deltawire.testing.stores import StoreTests  # noqa: E402

__all__ = ["StoreTests"]
