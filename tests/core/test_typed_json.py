"""Typed JSON from several threads at once, each the first to decode its class."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from deltawire.core.errors import ManifestError
from deltawire.core.typed_json import decode

MANY = """
    import sys, threading
    import msgspec
    from deltawire.core.errors import ManifestError
    from deltawire.core.typed_json import decode

    sys.setswitchinterval(1e-6)
    for number in range(300):
        inner = msgspec.defstruct("Inner", [("key", str), ("size", int)])
        outer = msgspec.defstruct("Outer", [("name", str), ("parts", tuple[inner, ...])])
        found, together = [], threading.Barrier(4)

        def work():
            together.wait()
            found.append(decode(b'{"name": "a", "parts": [{"key": "k", "size": 3}]}', outer, "it", ManifestError))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [value.parts[0].size for value in found] == [3] * 4
"""


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b'{"a": "\xff"}', b"[" * 100_000, b'{"a": 1e999}'])
def test_what_is_not_of_the_kind_is_one_error(data: bytes) -> None:
    with pytest.raises(ManifestError, match="it does not parse: "):
        decode(data, dict[str, int], "it", ManifestError)


def test_threads_that_begin_at_the_same_moment() -> None:
    """In a process of its own: what went wrong ended it."""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(MANY)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
