"""SeaweedFS for tests: it keeps its data over a kill, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltawire.core.errors import StoreUnavailable
from deltawire_wordle.seaweed import SeaweedFS


def test_the_server_dies_and_comes_back() -> None:
    with SeaweedFS() as server:
        store = server.store("some-bucket/run", retries=0)
        store.put("key", b"x")
        server.kill()
        with pytest.raises(StoreUnavailable, match="Connection refused"):
            store.get("key")
        server.start()
        assert store.get("key").data == b"x"
        ports, folder = server.ports, server.folder
    assert not folder.exists()
    assert not [
        path for path in Path("/tmp").glob("seaweedfs-*.sock") if path.stem.endswith(tuple(map(str, ports.values())))
    ]
