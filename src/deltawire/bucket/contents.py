"""What a data object of a run contains: changes per tensor, and steps in ulps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from blake3 import blake3

from ..core.codecs import packed
from ..core.describe import Contents, TensorPart
from ..core.errors import HashMismatch
from ..core.manifest import Blob, Link
from ..core.ulps import Histogram
from ..store import Store
from .fetch import fetch


@contextmanager
def opened(store: Store, blob: Blob, *, whole: bool) -> Iterator[Contents]:
    """Open a data object after checking its hash: of all of it, or only of its header and index."""
    if whole or not blob.head_size:
        with fetch(store, blob) as data:
            yield Contents(data.read, data.size)
        return
    head = store.get_range(blob.key, 0, blob.head_size)
    if blake3(head).hexdigest(length=16) != blob.head_hash:
        raise HashMismatch(f"the header of {blob.key} does not have the hash its manifest names")
    yield Contents(lambda start, length: head[start : start + length], blob.size)


def tells_steps(link: Link) -> bool:
    """Whether a link shows how far weights moved. Only `packed` stores steps; other encodings need the base version."""
    return link.kind == "delta" and link.encoding == packed.name


def read(store: Store, link: Link, *, steps: bool = False) -> tuple[list[TensorPart], Histogram]:
    """Read what each object of a link has of every tensor and, with `steps`, how far weights moved, in ulps.

    Without `steps` only the header and index of each object are read. `steps` needs a link that `tells_steps`.
    """
    parts: list[TensorPart] = []
    histogram = Histogram()
    for blob in link.objects:
        with opened(store, blob, whole=steps) as contents:
            parts += contents.parts()
            if steps:
                histogram.add_all(contents.steps())
    return parts, histogram
