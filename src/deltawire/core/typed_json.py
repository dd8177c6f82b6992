"""Typed JSON from untrusted sources, decoded by any number of threads at once.

msgspec builds what it knows of a class when the class is first decoded, and other threads see it half built: with two
that begin at the same moment, the process may crash (msgspec 0.22). So decoders are made under a lock, and kept.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import msgspec

from .errors import DeltawireError

T = TypeVar("T")

_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}
_making = threading.Lock()


def decode(data: bytes | str | msgspec.Raw, kind: type[T], what: str, error: type[DeltawireError]) -> T:
    """Decode JSON. Raises `error`, which names `what` does not parse, for anything that is not a `kind`."""
    decoder = _decoders.get(kind)
    if decoder is None:
        with _making:
            decoder = _decoders.setdefault(kind, msgspec.json.Decoder(kind))
    try:
        return decoder.decode(data)  # type: ignore[no-any-return]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
        raise error(f"{what} does not parse: {problem}") from None
