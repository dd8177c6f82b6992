"""The protocol, on every store that needs no server."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from deltawire.store import LocalStore, ObjectStore, Retrying, Store
from deltawire.testing import StoreTests
from deltawire_wordle.counting import CountingStore
from deltawire_wordle.throttled import ThrottledStore
from flaky_store import FlakyStore


class TestLocalStore(StoreTests):
    page_size = 100  # a folder has no pages

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return LocalStore(tmp_path / "run")


class TestMemoryStore(StoreTests):
    @pytest.fixture
    def store(self) -> Store:
        return ObjectStore.from_url(f"memory://{uuid.uuid4()}")


class TestMemoryStoreWithPrefix(StoreTests):
    @pytest.fixture
    def store(self) -> Store:
        name = f"memory://{uuid.uuid4()}"
        # Neighbours whose keys begin like ours, which no listing may show.
        for neighbour in ("", "/some/run2", "/some/ru", "/some"):
            ObjectStore.from_url(name + neighbour).put("neighbour", b"not ours")
        return ObjectStore.from_url(name + "/some/run")


class TestWrappers(StoreTests):
    """Wrappers that have nothing to do must not show."""

    @pytest.fixture
    def store(self) -> Store:
        inner = FlakyStore(ObjectStore.from_url(f"memory://{uuid.uuid4()}"))
        return Retrying(CountingStore(ThrottledStore(inner, 1e6)))


class TestTutorial(StoreTests):
    """The store that docs/tutorials/extending.md writes."""

    @pytest.fixture
    def store(self) -> Store:
        text = (Path(__file__).parents[2] / "docs" / "tutorials" / "extending.md").read_text()
        names: dict[str, type] = {}
        exec(text.split("```python\n")[1].split("```")[0], names)
        return names["DictStore"]()
