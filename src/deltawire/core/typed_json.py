"""Typed JSON, decoded by any number of threads at once.

msgspec builds what it knows of a class when the class is first decoded, and other threads see it half built: with two
that begin at the same moment, the process may crash (msgspec 0.22). So decoders are made under a lock, and kept.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}
_making = threading.Lock()


def decode(data: bytes | msgspec.Raw, kind: type[T]) -> T:
    """Raises what `msgspec.json.decode` does."""
    decoder = _decoders.get(kind)
    if decoder is None:
        with _making:
            decoder = _decoders.setdefault(kind, msgspec.json.Decoder(kind))
    return decoder.decode(data)  # type: ignore[no-any-return]
