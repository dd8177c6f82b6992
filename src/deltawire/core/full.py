"""Full weights as safetensors: the anchors of a run, and checkpoint folders."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol, runtime_checkable

import msgspec
import numpy as np
from blake3 import blake3

from . import container, digest
from .change import BLOCK_UNITS, Region, pieces, tile, whole
from .container import Read
from .dtypes import Bits, lookup
from .errors import FormatError, HeaderError, ManifestError, SchemaMismatch, UnknownFormat, UnsafeName
from .held import Held, Part
from .manifest import MAX_FILE, parse
from .parallel import default_threads, ordered_map, threads_for
from .schema import Schema, TensorSpec, check_file_name
from .sparse import FORMAT, FORMAT_VERSION, DataFile
from .typed_json import decode

INDEX_NAME = "model.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"
DRAFT = "draft"
"""Folder in a checkpoint folder: the checkpoint of a draft model that is published with it."""
OF_DRAFT = "draft."
"""How the names of its tensors and files begin in a run."""
SHARD_BYTES = 5 << 30
COMPANION_SUFFIXES = (".json", ".jinja", ".md", ".model", ".tiktoken", ".txt")
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model",
    "sentencepiece.bpe.model", "tekken.json",
)  # fmt: skip
"""Files of which a tokenizer has at least one."""
_MORE_OF_A_TOKENIZER = (
    "added_tokens.json", "chat_template.json", "chat_template.jinja", "merges.txt", "special_tokens_map.json",
)  # fmt: skip
CODE_SUFFIXES = (".py", ".ipynb", ".sh", ".so")
REGIONS = "regions"
_HEX = 32
"""Digits of a hash."""
PART_BYTES, PART_HASHES = "part_bytes", "part_hashes"
"""Metadata of an anchor: its tensors in parts of so many bytes, and their hashes."""
PART = 4 << 20
"""Bytes of such a part. Smaller files have none."""
MAX_PARTS = 1 << 17
"""Parts of an object, besides one for each tensor; the parts of a larger object are larger."""
_READ_UNITS = BLOCK_UNITS >> 2


@runtime_checkable
class Source(Protocol):
    """Anything that returns the bits of a region: a model in memory, a checkpoint folder, an anchor.

    For weights by name, for example:

        class Weights:
            def __init__(self, schema, units):           # name → the flat units of a tensor
                self.schema, self.units = schema, units

            def region(self, region):
                return region.cut(self.units[region.tensor.name])

        dw.digest_of(Weights(schema, units))
    """

    schema: Schema

    def region(self, region: Region) -> Bits:
        """The region's own flat bits (see `Region.cut`)."""
        ...


class ReadBy:
    """A source whose regions are read by a function."""

    def __init__(self, schema: Schema, read: Callable[[Region], Bits]) -> None:
        self.schema, self._read = schema, read

    def region(self, region: Region) -> Bits:
        return self._read(region)


def _file_order(region: Region) -> tuple[int, str, int, int]:
    """Widest dtype first, then by name: every tensor then starts at a multiple of its own width."""
    return -lookup(region.tensor.dtype).size, region.tensor.name, region.row, region.column


def _chunks(regions: Iterable[Region], read: Callable[[Region], Bits]) -> Iterator[memoryview]:
    """The data part of a file, a few megabytes at a time."""
    for region in regions:
        for piece in pieces(region):
            yield np.ascontiguousarray(read(piece)).data.cast("B")


def anchor(
    regions: Iterable[Region], read: Callable[[Region], Bits], metadata: Mapping[str, str], *, part: int = PART
) -> DataFile:
    """Full weights as a data object: all tensors, or what one of several writers holds.

    What is not a whole tensor gets a name of its own, and `regions` in the metadata says where it belongs. Reads all
    weights once for the hashes of its parts of so many bytes, and again for every put.
    """
    ordered = sorted(regions, key=_file_order)
    stored = [_stored(region) for region in ordered]
    if len({tensor.name for tensor in stored}) != len(stored):
        raise SchemaMismatch("a part of a tensor would have the name of another tensor; rename that one")
    everything = {"format": FORMAT, "version": FORMAT_VERSION, "sparse": "false", **metadata}
    parts = {
        tensor.name: (r.tensor.name, r.row, r.rows, r.column, r.columns)
        for tensor, r in zip(stored, ordered, strict=True)
        if r != whole(r.tensor)
    }
    if parts:
        everything[REGIONS] = msgspec.json.encode(parts).decode()
    sizes = [region.nbytes for region in ordered]
    if sum(sizes) >= part:
        while sum(-(-size // part) for size in sizes) > MAX_PARTS + len(sizes):
            part *= 2
        everything[PART_BYTES] = str(part)
        everything[PART_HASHES] = "".join(_part_hashes(ordered, read, part))
    head = container.build(((t.name, t.dtype, t.shape) for t in stored), everything)
    elements = sum(tensor.elements for tensor in stored)
    return DataFile(head, lambda: map(bytes, _chunks(ordered, read)), sum(sizes), elements, default_threads())


def _part_hashes(regions: Iterable[Region], read: Callable[[Region], Bits], part: int) -> Iterator[str]:
    """Hash the bytes of each region in parts of this size, the last one smaller."""
    threads = default_threads()
    for region in regions:
        hashed, room = blake3(max_threads=threads), part
        for chunk in _chunks([region], read):
            while chunk:
                hashed.update(chunk[:room])
                room, chunk = room - len(chunk[:room]), chunk[room:]
                if not room:
                    yield hashed.hexdigest(length=16)
                    hashed, room = blake3(max_threads=threads), part
        if room < part:
            yield hashed.hexdigest(length=16)


def _stored(rectangle: Region) -> TensorSpec:
    """The tensor that a rectangle is in a file: the whole one, or a matrix of its elements."""
    tensor = rectangle.tensor
    if rectangle == whole(tensor):
        return tensor
    columns = rectangle.columns // lookup(tensor.dtype).units_per_element
    return TensorSpec(f"{tensor.name}@{rectangle.row},{rectangle.column}", tensor.dtype, (rectangle.rows, columns))


class FullFile:
    """One opened safetensors file of full tensors, its header checked. `read(start, length)` returns bytes of it.

    file = dw.FullFile(lambda start, length: store.get_range(key, start, length), store.head(key).size)
    print(file.metadata, file.tensors)
    """

    def __init__(self, read: Read, size: int) -> None:
        self._read = read
        self.header = container.read_header(read, size)
        self.metadata = self.header.metadata
        if self.metadata.get("sparse") == "true":
            raise SchemaMismatch("this file is a delta, not full weights")
        # checkpoints of others say "pt" or nothing
        if self.metadata.get("format") == FORMAT and self.metadata.get("version") != FORMAT_VERSION:
            raise UnknownFormat(f"an anchor of format version {self.metadata.get('version')!r}: upgrade deltawire")
        self.tensors = [TensorSpec(i.name, i.dtype, i.shape) for i in self.header.items.values()]

    def parts(self) -> dict[str, list[Part]] | None:
        """Parts of each tensor that can be checked alone, by its name; None for a file without their hashes."""
        if PART_HASHES not in self.metadata:
            return None
        said, hashes = self.metadata.get(PART_BYTES, ""), self.metadata[PART_HASHES]
        size = int(said) if said.isdecimal() and said.isascii() and len(said) < 19 else 0
        items = self.header.items
        count = sum(-(-item.nbytes // size) for item in items.values()) if size else -1
        if len(hashes) != _HEX * count or not set(hashes) <= set("0123456789abcdef"):
            raise HeaderError(f"the hashes of an anchor's parts are not one for each {said[:20]!r} bytes of a tensor")
        found: dict[str, list[Part]] = {}
        at = 0
        for item in items.values():
            found[item.name] = []
            for start in range(0, item.nbytes, size):
                hash = hashes[at : at + _HEX]
                found[item.name].append(Part(item.start + start, min(size, item.nbytes - start), hash))
                at += _HEX
        return found

    def region(self, region: Region) -> Bits:
        item = self.header.items[region.tensor.name]
        unit = lookup(item.dtype).unit
        size = np.dtype(unit).itemsize
        if region.contiguous:
            return np.frombuffer(self._read(item.start + region.start * size, region.units * size), unit)
        # whole rows, then the columns wanted of them
        width = region.tensor.columns
        data = self._read(item.start + region.row * width * size, region.rows * width * size)
        rows = np.frombuffer(data, unit).reshape(region.rows, width)
        return np.ascontiguousarray(rows[:, region.column : region.column + region.columns]).reshape(-1)


class Anchor:
    """The full weights of a version, from the objects of its anchor: one with everything, or one per writer."""

    def __init__(self, files: Iterable[FullFile], schema: Schema) -> None:
        self.schema = schema
        known = schema.by_name()
        self._parts: dict[str, list[tuple[Region, TensorSpec, FullFile]]] = {name: [] for name in known}
        for file in files:
            for region, stored in _places(file, known):
                self._parts[region.tensor.name].append((region, stored, file))
        tile((part for parts in self._parts.values() for part, _, _ in parts), schema, "the anchor")
        for parts in self._parts.values():
            parts.sort(key=lambda part: (part[0].row, part[0].column))

    def region(self, region: Region) -> Bits:
        parts = self._parts[region.tensor.name]
        # in bands, who starts later also ends later
        at = bisect_left(parts, region.row + 1, key=lambda part: part[0].row + part[0].rows)
        result = np.empty((region.rows, region.columns), lookup(region.tensor.dtype).unit)
        while at < len(parts) and parts[at][0].row < region.row + region.rows:
            place, stored, file = parts[at]
            at += 1
            common = region.meet(place)
            if common is None:
                continue
            bits = file.region(
                Region(stored, common.row - place.row, common.rows, common.column - place.column, common.columns)
            )
            if common == region:
                return bits
            result[common.within(region)] = bits.reshape(common.rows, common.columns)
        return result.reshape(-1)


def _places(file: FullFile, known: Mapping[str, TensorSpec]) -> Iterator[tuple[Region, TensorSpec]]:
    """Where the tensors of an anchor's object belong, and how they are stored."""
    said = file.metadata.get(REGIONS, "{}")
    placed = decode(said, dict[str, tuple[str, int, int, int, int]], "the `regions` of an anchor", SchemaMismatch)
    for stored in file.tensors:
        name, *sides = placed.get(stored.name) or (stored.name,)
        if name not in known:
            raise SchemaMismatch(f"tensor {name[:80]!r} is in the anchor only")
        region = Region(known[name], *sides) if sides else whole(known[name])
        per = lookup(stored.dtype).units_per_element
        if stored != _stored(region) or region.column % per or region.columns % per:
            raise SchemaMismatch(
                f"the anchor has {stored.dtype} {list(stored.shape)} where the run has "
                f"{known[name].dtype} {list(known[name].shape)} as {name!r}"
            )
        yield region, stored


def needed(file: FullFile, schema: Schema, held: Held) -> list[Part] | None:
    """Return the parts of an anchor's object with rows of what is held. None if parts cannot be checked alone."""
    parts = file.parts()
    if parts is None:
        return None
    found = []
    for region, stored in _places(file, schema.by_name()):
        of_tensor, row = parts[stored.name], region.columns * region.tensor.unit_size
        for common in held.common(region) if of_tensor else ():
            size, first = of_tensor[0].nbytes, row * (common.row - region.row)
            found += of_tensor[first // size : -(-(first + row * common.rows) // size)]
    return list(dict.fromkeys(found))


class Checkpoint:
    """A Hugging Face checkpoint folder, in one file or several, as a Source that is read a region at a time.

    publisher.publish(dw.Checkpoint("step-100"))
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._files: dict[str, tuple[FullFile, TensorSpec]] = {}
        tensors: list[TensorSpec] = []
        for start, place in _parts_of(self.folder):
            for path in weight_files(place):
                file = FullFile(*container.open_file(path))
                for stored in file.tensors:
                    tensor = _renamed(stored, start + stored.name)
                    if tensor.name in self._files:
                        raise SchemaMismatch(f"{tensor.name!r} stands in two files of {self.folder}")
                    self._files[tensor.name] = file, stored
                    tensors.append(tensor)
        self.schema = Schema.build(tensors)

    def region(self, region: Region) -> Bits:
        file, stored = self._files[region.tensor.name]
        return file.region(replace(region, tensor=stored))

    def left_out(self) -> dict[str, str]:
        """Files of the folder that are not published, and why."""
        return left_out(self.folder)


def _renamed(tensor: TensorSpec, name: str) -> TensorSpec:
    return TensorSpec(name, tensor.dtype, tensor.shape)


def folders_of(folder: Path) -> list[Path]:
    """A checkpoint folder, and that of a draft model in it."""
    return [place for _, place in _parts_of(folder)]


def _parts_of(folder: Path) -> list[tuple[str, Path]]:
    """The folders of a checkpoint, and how the names of what is in them begin in a run."""
    draft = folder / DRAFT
    return [("", folder), *([(OF_DRAFT, draft)] if any(draft.glob("*.safetensors")) else [])]


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint folder, as its index names them where it has one."""
    index = folder / INDEX_NAME
    if index.is_file():
        if index.stat().st_size > MAX_FILE:
            raise ManifestError(f"{index} has more than {MAX_FILE:,} bytes: it is no index")
        names = set(parse(index.read_bytes(), _ShardIndex, str(index)).weight_map.values())
        for name in names:
            check_file_name(name)
        files = [folder / name for name in sorted(names)]
    elif (folder / "model.safetensors").is_file():
        files = [folder / "model.safetensors"]
    else:
        files = sorted(folder.glob("*.safetensors"))
    missing = [path for path in files if not path.is_file()]
    if missing or not files:
        what = f"{missing[0]} is missing" if missing else f"{folder} holds no *.safetensors"
        raise SchemaMismatch(f"not a checkpoint folder: {what}")
    return files


def is_companion(name: str) -> bool:
    """Whether a file of this name may go with the weights: config, tokenizer, chat template.

    Never code, never a pickle, nothing that a loader could take for weights.
    """
    return name.endswith(COMPANION_SUFFIXES) and not name.endswith(".index.json") and not name.startswith(".")


def check_companion(name: str) -> None:
    check_file_name(name)
    if not is_companion(name):
        raise UnsafeName(f"{name[:80]!r} cannot go with the weights; what can ends in {', '.join(COMPANION_SUFFIXES)}")


def companion_files(folder: Path) -> dict[str, bytes]:
    """The small files that are published with a checkpoint. `left_out` lists the others."""
    check_links(folder)
    return {
        start + path.name: path.read_bytes()
        for start, place in _parts_of(folder)
        for path in sorted(place.iterdir())
        if is_companion(path.name) and path.is_file() and path.stat().st_size <= MAX_FILE
    }


def companion_path(folder: Path, name: str) -> Path:
    """Where a file is in a checkpoint folder."""
    own = name.removeprefix(OF_DRAFT)
    return folder / DRAFT / own if own != name and (folder / DRAFT).is_dir() else folder / name


def has_tokenizer(names: Iterable[str]) -> bool:
    """Whether files of these names hold a tokenizer. Engines make up an empty one where there is none."""
    return not set(TOKENIZER_FILES).isdisjoint(names)


def lacks_tokenizer(model: str | os.PathLike[str]) -> bool:
    """Whether a model is a folder without a tokenizer. A name of the Hub is not."""
    return os.path.isdir(model) and not has_tokenizer(os.listdir(model))


def tokenizer_in(folder: Path) -> dict[str, bytes]:
    """The files of the tokenizer in a checkpoint folder; empty if it has none. UnsafeName for one that is a symlink out
    of it."""
    names = (*TOKENIZER_FILES, *_MORE_OF_A_TOKENIZER) if not lacks_tokenizer(folder) else ()
    paths = [folder / name for name in names if (folder / name).is_file()]
    _check_inside(folder, paths)
    return {path.name: path.read_bytes() for path in paths if path.stat().st_size <= MAX_FILE}


def left_out(folder: Path) -> dict[str, str]:
    """Files of a checkpoint folder that are not published, and why. Hidden files are ignored."""
    found: dict[str, str] = {}
    places = folders_of(folder)
    for path in sorted(folder.iterdir()):
        name = path.name
        if name.startswith(".") or name.endswith((".safetensors", ".index.json")):
            continue
        if path.is_dir() and path not in places:
            found[name] = "a folder"
        elif path.is_dir():
            found |= {f"{name}/{inner}": why for inner, why in left_out(path).items()}
        elif name.endswith(CODE_SUFFIXES):
            found[name] = "code never travels"
        elif not path.is_file():
            found[name] = "not a file"
        elif not is_companion(name):
            found[name] = "neither safetensors nor a config or tokenizer file"
        elif path.stat().st_size > MAX_FILE:
            found[name] = f"more than {MAX_FILE >> 20} MiB"
    return found


def asks_for_code(files: Mapping[str, bytes]) -> list[str]:
    """Config files that name Python code to be run when they are loaded (`auto_map`), as custom models have."""
    found = []
    for name, data in files.items():
        if name.endswith(".json") and b"auto_map" in data:
            with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                content = msgspec.json.decode(data)
                if isinstance(content, dict) and "auto_map" in content:
                    found.append(name)
    return found


def check_links(folder: Path) -> None:
    """Raise UnsafeName for a file to publish that is a symlink out of the folder: its name does not show what it is."""
    for _, place in _parts_of(folder):
        paths = [path for path in place.iterdir() if is_companion(path.name) or path.name == INDEX_NAME]
        with suppress(SchemaMismatch):  # a folder without weights may still have files
            paths += weight_files(place)
        _check_inside(folder, sorted(paths))


def _check_inside(folder: Path, paths: Iterable[Path]) -> None:
    """Raise UnsafeName for a path that leads out of the folder.

    A snapshot in the cache of the Hugging Face Hub is made of links to the `blobs` beside it, which belong to it.
    """
    root = folder.resolve()
    allowed = [root, *(parent.parent / "blobs" for parent in root.parents if parent.name == "snapshots")]
    for path in paths:
        if not any(path.resolve().is_relative_to(place) for place in allowed):
            raise UnsafeName(
                f"{path} is a symlink to {path.resolve()}, outside the folder; "
                "copy or hard-link the file there, or publish the folder it lies in"
            )


class _ShardIndex(msgspec.Struct):
    weight_map: dict[str, str]


def digest_of(source: Source, threads: int | None = None, words: digest.Words = digest.PUBLIC) -> digest.StateDigest:
    """Compute the state digest of a source in one pass; or the same sum with other words.

    Weights of version 41 have the digest that its manifest names:

        str(dw.digest_of(source)) == run.manifest(41).digest
    """
    regions = [whole(tensor) for tensor in source.schema.tensors]
    found = digests_of(lambda _, region: source.region(region), regions, [0] * len(regions), threads, words=words)
    return found.get(0, digest.StateDigest())


def digests_of(
    read: Callable[[int, Region], Bits],
    regions: Sequence[Region],
    groups: Sequence[int],
    threads: int | None = None,
    at_once: Container[int] = (),
    words: digest.Words = digest.PUBLIC,
) -> dict[int, digest.StateDigest]:
    """The digest of each group of regions, whose bits `read` returns a part at a time, given the region's number.

    at_once   numbers of regions that are not read in parts
    """

    def one(band: tuple[int, Region]) -> digest.StateDigest:
        part = band[1]
        bits = read(*band).reshape(part.rows, part.columns)
        return digest.of_rows(part.tensor.name, bits, part.start, part.tensor.columns, words)

    threads = threads_for(sum(region.units for region in regions), threads)
    bands = [
        (number, part)
        for number, region in enumerate(regions)
        for part in pieces(region, max(region.units, 1) if number in at_once else _READ_UNITS)
    ]
    totals = {group: digest.StateDigest() for group in groups}
    for (number, _), found in zip(bands, ordered_map(one, bands, threads), strict=True):
        totals[groups[number]] += found
    return totals


def write_checkpoint(
    folder: Path,
    source: Source,
    *,
    stem: str = "model",
    progress: Callable[[int], None] | None = None,
    held: Held | None = None,
) -> None:
    """The weights as a checkpoint folder that transformers and vLLM load. The folder must exist. The weights of a draft
    model become a checkpoint within it.

    held   write only rows of which something is held, for readers of no others; there are holes in place of the rest
    """
    draft = [tensor for tensor in source.schema.tensors if tensor.name.startswith(OF_DRAFT)]
    if draft and len(draft) < len(source.schema.tensors):
        (folder / DRAFT).mkdir()
        _write(folder / DRAFT, _draft_of(source, draft), stem, progress, None)
        kept = [tensor for tensor in source.schema.tensors if not tensor.name.startswith(OF_DRAFT)]
        source = ReadBy(Schema.build(kept), source.region)
    _write(folder, source, stem, progress, held)


def _draft_of(source: Source, tensors: Sequence[TensorSpec]) -> Source:
    """The tensors of a draft model under the names that they have in its own checkpoint."""
    named = {tensor.name.removeprefix(OF_DRAFT): tensor for tensor in tensors}
    schema = Schema.build([_renamed(tensor, name) for name, tensor in named.items()])
    return ReadBy(schema, lambda region: source.region(replace(region, tensor=named[region.tensor.name])))


def _write(folder: Path, source: Source, stem: str, progress: Callable[[int], None] | None, held: Held | None) -> None:
    shards: list[list[TensorSpec]] = []
    room = 0
    for tensor in (region.tensor for region in sorted(map(whole, source.schema.tensors), key=_file_order)):
        if not shards or tensor.nbytes > room:
            shards.append([])
            room = SHARD_BYTES
        shards[-1].append(tensor)
        room -= tensor.nbytes
    if not shards:
        raise FormatError("a checkpoint needs at least one tensor")
    n = len(shards)
    names = [f"{stem}.safetensors"] if n == 1 else [f"{stem}-{i + 1:05d}-of-{n:05d}.safetensors" for i in range(n)]
    for name, shard in zip(names, shards, strict=True):
        with open(folder / name, "wb") as out:
            at = out.write(container.build(((t.name, t.dtype, t.shape) for t in shard), {"format": "pt"}))
            out.truncate(at + sum(tensor.nbytes for tensor in shard))
            for tensor in shard:
                row = tensor.columns * tensor.unit_size
                for first, end in [(0, tensor.rows)] if held is None else held.rows(tensor):
                    out.seek(at + first * row)
                    for chunk in _chunks([Region(tensor, first, end - first, 0, tensor.columns)], source.region):
                        out.write(chunk)
                        if progress:
                            progress(chunk.nbytes)
                at += tensor.nbytes
            out.flush()
            os.fsync(out.fileno())
    if n > 1:
        index = {
            "metadata": {"total_size": source.schema.nbytes},
            "weight_map": {t.name: name for name, shard in zip(names, shards, strict=True) for t in shard},
        }
        (folder / INDEX_NAME).write_bytes(msgspec.json.format(msgspec.json.encode(index), indent=2))
