"""What the stand-in holds: buckets with their files and events, and the content-addressed data behind them, on disk."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, BinaryIO

from .xet import Chunk, Term, read_shard, read_xorb, text, unpack

_COPY = 1 << 20


def stamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


@dataclass(frozen=True, slots=True)
class Entry:
    path: str
    size: int
    hash: str
    mtime: float
    uploaded: float
    visible: float
    # when readers begin to see it
    before: Entry | None
    # what they see until then

    def json(self) -> dict[str, Any]:
        times = {"mtime": stamp(self.mtime), "uploadedAt": stamp(self.uploaded)}
        return {"type": "file", "path": self.path, "size": self.size, "xetHash": self.hash, **times}


@dataclass(slots=True)
class Bucket:
    id: str
    private: bool
    created: float = field(default_factory=time.time)
    entries: dict[str, Entry] = field(default_factory=dict)
    events: list[list[dict[str, Any]]] = field(default_factory=list)
    # one list of changes per batch; a cursor is how many a reader has seen
    changed: threading.Condition = field(default_factory=threading.Condition)

    def add(self, path: str, hash: str, size: int, mtime: float, late_s: float) -> dict[str, Any]:
        now = time.time()
        before = self.entry(path)
        self.entries[path] = Entry(path, size, hash, mtime, now, now + late_s, before)
        change = {"path": path, "op": "update" if before else "add", "size": size, "xetHash": hash}
        return {**change, "uploadedAt": stamp(now)}

    def delete(self, path: str) -> dict[str, Any] | None:
        return {"path": path, "op": "delete"} if self.entries.pop(path, None) else None

    def entry(self, path: str) -> Entry | None:
        """What readers see at a path now."""
        entry = self.entries.get(path)
        while entry is not None and entry.visible > time.time():
            entry = entry.before
        return entry

    def listed(self) -> list[Entry]:
        found = (self.entry(path) for path in sorted(self.entries))
        return [entry for entry in found if entry is not None]


class Contents:
    """Xorbs and files by hash. The bytes are in `root`; what is in memory is a few hundred bytes per chunk."""

    def __init__(self, root: Path) -> None:
        self._folder = root / "xorbs"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._xorbs: dict[str, list[Chunk]] = {}
        self._files: dict[str, tuple[Term, ...]] = {text(bytes(32)): ()}
        self.buckets: dict[str, Bucket] = {}
        self.lock = threading.Lock()

    def put_xorb(self, name: str, body: Iterator[bytes]) -> bool:
        """Whether it is new. Nothing is kept of one that is refused."""
        temporary = self._folder / f".tmp-{secrets.token_hex(8)}"
        try:
            with open(temporary, "w+b") as file:
                for data in body:
                    file.write(data)
                size = file.tell()
                file.seek(0)
                chunks = read_xorb(file, size, name)
            new = name not in self._xorbs
            os.replace(temporary, self._folder / name)
            self._xorbs[name] = chunks
            return new
        finally:
            temporary.unlink(missing_ok=True)

    def put_shard(self, data: bytes) -> None:
        self._files.update(read_shard(data, self._xorbs))

    def size(self, file: str) -> int:
        """KeyError for a file that no shard has declared."""
        return sum(term.size for term in self._files[file])

    def reconstruction(self, file: str, start: int, end: int, base: str) -> dict[str, Any]:
        """Which chunks of which xorbs hold the bytes from `start` to `end`, and where to fetch them."""
        terms: list[dict[str, Any]] = []
        spans: dict[str, list[tuple[int, int]]] = {}
        skip = 0
        for term, first, last, before in self._needed(file, start, end):
            if not terms:
                skip = start - before
            size = sum(chunk.size for chunk in self._xorbs[term.xorb][first:last])
            terms.append({"hash": term.xorb, "unpacked_length": size, "range": {"start": first, "end": last}})
            spans.setdefault(term.xorb, []).append((first, last))
        fetch = {xorb: [self._fetch(xorb, span, base) for span in _merged(those)] for xorb, those in spans.items()}
        return {"offset_into_first_range": skip, "terms": terms, "fetch_info": fetch}

    def _fetch(self, xorb: str, span: tuple[int, int], base: str) -> dict[str, Any]:
        chunks = self._xorbs[xorb][slice(*span)]
        where = {"start": chunks[0].start, "end": chunks[-1].end - 1}
        return {"range": {"start": span[0], "end": span[1]}, "url": base + xorb, "url_range": where}

    def _needed(self, file: str, start: int, end: int) -> Iterator[tuple[Term, int, int, int]]:
        """(term, first chunk, end of chunks, where the first of them begins in the file)"""
        at = 0
        for term in self._files[file]:
            first = last = before = 0
            for number in range(term.first, term.end):
                size = self._xorbs[term.xorb][number].size
                if at + size > start and at < end:
                    if not last:
                        first, before = number, at
                    last = number + 1
                at += size
            if last:
                yield term, first, last, before

    def read(self, file: str, start: int, end: int) -> Iterator[bytes]:
        """The bytes of a file, as a plain download gives them."""
        for term, first, last, at in self._needed(file, start, end):
            with self.open_xorb(term.xorb) as xorb:
                for chunk in self._xorbs[term.xorb][first:last]:
                    xorb.seek(chunk.start)
                    data = unpack(xorb.read(chunk.end - chunk.start))
                    yield data[max(start - at, 0) : max(end - at, 0)]
                    at += chunk.size

    def open_xorb(self, name: str) -> BinaryIO:
        if name not in self._xorbs:
            raise KeyError(name)
        return open(self._folder / name, "rb")

    def xorb_range(self, name: str, start: int, end: int) -> Iterator[bytes]:
        with self.open_xorb(name) as file:
            file.seek(start)
            left = end - start
            while left and (data := file.read(min(_COPY, left))):
                left -= len(data)
                yield data


def _merged(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """A file may use a chunk many times; it is fetched once, and each term finds its chunks in one piece."""
    merged: list[tuple[int, int]] = []
    for first, end in sorted(spans):
        if merged and first <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((first, end))
    return merged
