"""What a version changed: how many weights of each tensor, and how far they moved, in ulps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager

from ..core.codecs import packed
from ..core.describe import FileContents, TensorPart
from ..core.dtypes import lookup
from ..core.errors import DeltawireError
from ..core.manifest import Blob, Link
from ..core.parallel import REQUESTS, ordered_map
from ..core.ulps import Histogram, in_ulps
from ..store import Store
from .fetch import fetch
from .parts import fetch_head
from .replay import checkout
from .run import Run
from .walk import Walker, fetch_link


@contextmanager
def opened(store: Store, blob: Blob, *, whole: bool) -> Iterator[FileContents]:
    """Open a data object after checking its hash: of all of it, or only of its header and index."""
    if whole or not blob.head_size:
        with fetch(store, blob) as data:
            yield FileContents(data.read, data.size)
        return
    head = fetch_head(store, blob)
    yield FileContents(lambda start, length: head[start : start + length], blob.size)


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


def tensor_changes(
    run: Run, versions: Iterable[int], *, anchors: bool = False
) -> Iterator[tuple[int, list[TensorPart] | DeltawireError]]:
    """Read what each version has of every tensor and how many of its weights it changed, several versions at a time.

        for version, parts in dw.tensor_changes(run, [40, 41]):
            ...                     # parts[0].name, parts[0].changed; of a sharded trainer, one part per object

    Only headers are read. A delta has a part for each tensor that it changes. Full weights do not say what changed:
    they have no parts, or with `anchors` one for each tensor, without `changed`. `run.manifest(41).main.kind` tells
    both apart; `difference` counts what changed between any two checkouts. A version that cannot be read has its error
    in place of parts.
    """

    def one(version: int) -> list[TensorPart] | DeltawireError:
        try:
            link = run.manifest(version).main
            return read(run.store, link)[0] if anchors or link.kind == "delta" else []
        except DeltawireError as error:
            return error

    wanted = list(versions)
    return zip(wanted, ordered_map(one, wanted, REQUESTS), strict=True)


def step_sizes(run: Run, version: int, *, most: float = math.inf, stored: bool = False) -> tuple[int, Histogram | None]:
    """Count by how many representable values (ulps) the weights of a version moved.

        _, steps = dw.step_sizes(run, 41)
        steps.rows()                # [("1", 40312, 39877), …]: size of the step, how many up, how many down

    Returns the bytes that are fetched for it too; where those are more than `most`, None in place of the steps, as for
    full weights. A `packed` delta stores its steps. For other encodings the base is checked out, or with `stored`,
    None is returned.
    """
    manifest = run.manifest(version)
    link = manifest.main
    if link.kind != "delta" or link.base is None:
        return 0, None
    if tells_steps(link):
        return link.bytes, read(run.store, link, steps=True)[1] if link.bytes <= most else None
    if stored:
        return 0, None
    cost = link.bytes + sum(step.bytes for step in Walker(run).plan(None, link.base))
    if cost > most:
        return cost, None
    histogram = Histogram()
    base = checkout(run, link.base)
    with closing(fetch_link(run, manifest, link)) as fetched:
        for file in fetched.delta(base.digest).open():
            for changes in file.changes(base.bits):
                for change in changes:
                    histogram.add(in_ulps(change.old, change.new, lookup(change.region.tensor.dtype)))
    return cost, histogram
