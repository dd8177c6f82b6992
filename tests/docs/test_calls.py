"""The calls that docs/design.md lists for a publish and for a sync are made, in this order."""

from __future__ import annotations

import importlib
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from types import CodeType, FrameType
from typing import Any

from documents import ROOT

import deltawire as dw
from deltawire.store import open_store
from support import history, same

_, PUBLISH, SYNC = (
    [*re.findall(r"^\| `([\w.]+)` \| `([\w/]+)\.py` \|", part, re.M)]
    for part in (ROOT / "docs/design.md").read_text().split("| call | in `deltawire/` | what it does |")
)


def code_of(name: str, path: str) -> CodeType:
    module = importlib.import_module(f"deltawire.{path.replace('/', '.')}")
    code: CodeType = reduce(getattr, name.split("."), module).__code__  # type: ignore[attr-defined]
    return code


@contextmanager
def calls() -> Iterator[list[CodeType]]:
    """What is called meanwhile, by this thread and by those that begin, in the order of first calls."""
    found: dict[CodeType, None] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            found.setdefault(frame.f_code)

    before = sys.getprofile()
    order: list[CodeType] = []
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield order
    finally:
        sys.setprofile(before)
        threading.setprofile(before)  # type: ignore[arg-type]
        order += found


def test_a_publish_and_a_sync_make_the_calls_of_the_document() -> None:
    store, versions = open_store("memory://calls"), history(3, changes=50)
    target = {name: array.copy() for name, array in versions[0].items()}
    with dw.Publisher(store) as publisher:
        publisher.publish(versions[0], wait=True)
    replica = dw.Replica(store)
    replica.sync(target)
    with calls() as published, dw.Publisher(store) as publisher:
        publisher.publish(versions[1]).result(60)
    with calls() as synced:
        replica.sync(target)
    assert same(target, versions[1])
    for listed, made in ((PUBLISH, published), (SYNC, synced)):
        places = [made.index(code_of(*row)) for row in listed]
        assert len(places) > 15
        assert [row for _, row in sorted(zip(places, listed, strict=True))] == listed
