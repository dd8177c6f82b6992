"""Every way to spoil a delta that a reader must notice, with the error it must raise.

An attack takes the bytes of a good delta between two models of `support.history` and returns a bad one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import zstandard
from forge import (
    edited_index,
    index_of,
    join,
    nested,
    split,
    streams_of,
    with_header,
    with_index,
    with_indices,
    with_metadata,
    with_streams,
)

from deltawire.core.codecs import BLOCK_ENCODINGS, ENCODINGS
from deltawire.core.errors import (
    CorruptStream,
    CountMismatch,
    DeltawireError,
    FormatError,
    HashMismatch,
    HeaderError,
    PositionError,
    SchemaMismatch,
    TruncatedFile,
    UnknownFormat,
    UnsafeName,
    UnsupportedDtype,
)

HUNDRED_GB = 100 * 10**9


@dataclass(frozen=True)
class Attack:
    name: str
    encoding: str
    error: type[DeltawireError]
    make: Callable[[bytes], bytes]

    def __str__(self) -> str:
        return f"{self.name}-{self.encoding}"


ATTACKS: list[Attack] = []


def attack(
    error: type[DeltawireError], *encodings: str
) -> Callable[[Callable[[bytes], bytes]], Callable[[bytes], bytes]]:
    def register(make: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
        ATTACKS.extend(Attack(make.__name__, encoding, error, make) for encoding in encodings or ENCODINGS)
        return make

    return register


# ── the container ────────────────────────────────────────────────────────────────────────────────────────────────────


@attack(TruncatedFile)
def empty_file(blob: bytes) -> bytes:
    return b""


@attack(TruncatedFile)
def seven_bytes(blob: bytes) -> bytes:
    return blob[:7]


@attack(TruncatedFile)
def cut_in_the_header(blob: bytes) -> bytes:
    return blob[:100]


@attack(TruncatedFile)
def last_byte_missing(blob: bytes) -> bytes:
    return blob[:-1]


@attack(TruncatedFile)
def half_of_it(blob: bytes) -> bytes:
    size = 8 + int.from_bytes(blob[:8], "little")
    return blob[: (size + len(blob)) // 2]


@attack(HeaderError)
def header_of_100_gb(blob: bytes) -> bytes:
    return HUNDRED_GB.to_bytes(8, "little") + blob[8:]


@attack(HeaderError)
def header_of_16_exabytes(blob: bytes) -> bytes:
    return b"\xff" * 8 + blob[8:]


@attack(TruncatedFile)
def header_longer_than_the_file(blob: bytes) -> bytes:
    return (len(blob) + 1).to_bytes(8, "little") + blob[8:]


@attack(HeaderError)
def header_shorter_than_it_is(blob: bytes) -> bytes:
    return (int.from_bytes(blob[:8], "little") - 30).to_bytes(8, "little") + blob[8:]


@attack(HeaderError)
def header_that_is_not_json(blob: bytes) -> bytes:
    return blob[:8] + b"\x00" + blob[9:]


@attack(HeaderError)
def header_that_is_not_utf8(blob: bytes) -> bytes:
    return blob[:10] + b"\xff\xfe" + blob[12:]


@attack(HeaderError)
def header_that_is_a_list(blob: bytes) -> bytes:
    return (8).to_bytes(8, "little") + b"[1,2,3] " + blob


@attack(HeaderError)
def header_nested_a_million_deep(blob: bytes) -> bytes:
    text = b'{"a":' + nested(1_000_000) + b"}"
    return len(text).to_bytes(8, "little") + text


@attack(HeaderError)
def metadata_that_is_not_text(blob: bytes) -> bytes:
    return with_header(blob, lambda header: header.update(__metadata__={"format": 1}))


@attack(HeaderError)
def bytes_after_the_last_tensor(blob: bytes) -> bytes:
    return blob + b"\0"


def _items(header: dict[str, Any]) -> list[dict[str, Any]]:
    entries = [entry for name, entry in header.items() if name != "__metadata__"]
    return sorted(entries, key=lambda entry: entry["data_offsets"])


@attack(HeaderError)
def overlapping_offsets(blob: bytes) -> bytes:
    def edit(header: dict[str, Any]) -> None:
        second = _items(header)[1]
        begin, end = second["data_offsets"]
        second["data_offsets"] = [begin - 4, end - 4]

    return with_header(blob, edit)


@attack(HeaderError)
def the_same_bytes_twice(blob: bytes) -> bytes:
    def edit(header: dict[str, Any]) -> None:
        first, second = _items(header)[:2]
        second |= {"data_offsets": first["data_offsets"], "dtype": first["dtype"], "shape": first["shape"]}

    return with_header(blob, edit)


@attack(HeaderError)
def a_gap_between_tensors(blob: bytes) -> bytes:
    metadata, tensors = split(blob)
    names = list(tensors)

    def edit(header: dict[str, Any]) -> None:
        for name in names[1:]:
            begin, end = header[name]["data_offsets"]
            header[name]["data_offsets"] = [begin + 8, end + 8]

    return join(metadata, tensors, edit) + bytes(8)


@attack(HeaderError)
def an_offset_before_the_data(blob: bytes) -> bytes:
    def edit(header: dict[str, Any]) -> None:
        first = _items(header)[0]
        begin, end = first["data_offsets"]
        first["data_offsets"] = [begin - 8, end - 8]

    return with_header(blob, edit)


@attack(TruncatedFile)
def an_offset_far_behind_the_data(blob: bytes) -> bytes:
    def edit(header: dict[str, Any]) -> None:
        last = _items(header)[-1]
        size = {"U8": 1, "I32": 4, "F32": 4, "BF16": 2, "U32": 4}[last["dtype"]]
        last["data_offsets"][1] = last["data_offsets"][0] + 1024 * HUNDRED_GB
        last["shape"] = [1024 * HUNDRED_GB // size]

    return with_header(blob, edit)


@attack(HeaderError)
def an_offset_that_ends_before_it_begins(blob: bytes) -> bytes:
    def edit(header: dict[str, Any]) -> None:
        first = _items(header)[0]
        first["data_offsets"] = [0, -8]

    return with_header(blob, edit)


@attack(HeaderError)
def a_shape_that_does_not_fit_its_bytes(blob: bytes) -> bytes:
    return with_header(blob, lambda header: _items(header)[0].update(shape=[_items(header)[0]["shape"][0] + 1]))


@attack(HeaderError)
def a_negative_shape(blob: bytes) -> bytes:
    def edit(header: dict[str, Any]) -> None:
        first = _items(header)[0]
        first["shape"] = [-1, -first["shape"][0]]

    return with_header(blob, edit)


@attack(HeaderError, "raw")
def a_shape_of_300_000_dimensions(blob: bytes) -> bytes:
    return with_header(blob, lambda header: _items(header)[0].update(shape=[1 << 62] * 300_000))


@attack(UnsupportedDtype)
def a_dtype_that_nobody_knows(blob: bytes) -> bytes:
    return with_header(blob, lambda header: _items(header)[0].update(dtype="F3"))


def _renamed(name: str) -> Callable[[bytes], bytes]:
    def make(blob: bytes) -> bytes:
        metadata, tensors = split(blob)
        first = next(iter(tensors))
        return join(metadata, {name if key == first else key: value for key, value in tensors.items()})

    return make


@attack(UnsafeName)
def a_name_that_leads_up(blob: bytes) -> bytes:
    return _renamed("../../etc/passwd")(blob)


@attack(UnsafeName)
def a_name_that_is_absolute(blob: bytes) -> bytes:
    return _renamed("/etc/passwd")(blob)


@attack(UnsafeName)
def a_name_with_a_nul(blob: bytes) -> bytes:
    return _renamed("embed\0.indices")(blob)


@attack(UnsafeName)
def a_name_with_terminal_codes(blob: bytes) -> bytes:
    return _renamed("\x1b[2Jembed")(blob)


@attack(UnsafeName)
def a_name_that_is_empty(blob: bytes) -> bytes:
    return _renamed("")(blob)


@attack(HeaderError)
def a_tensor_called_metadata(blob: bytes) -> bytes:
    return _renamed("__metadata__")(blob)


# ── what the file says it is ─────────────────────────────────────────────────────────────────────────────────────────


@attack(UnknownFormat)
def a_format_version_of_the_future(blob: bytes) -> bytes:
    return with_metadata(blob, version="2")


@attack(UnknownFormat)
def a_format_of_somebody_else(blob: bytes) -> bytes:
    return with_metadata(blob, format="wiredelta")


@attack(UnknownFormat)
def an_encoding_that_nobody_knows(blob: bytes) -> bytes:
    return with_metadata(blob, encoding="psychic")


@attack(UnknownFormat, *BLOCK_ENCODINGS)
def a_block_in_an_unknown_encoding(blob: bytes) -> bytes:
    return edited_index(blob, lambda index: index["blocks"][0].update(encoding="psychic"))


@attack(UnknownFormat, "raw")
def a_raw_file_that_says_packed(blob: bytes) -> bytes:
    return with_metadata(blob, encoding="packed")


@attack(SchemaMismatch, *BLOCK_ENCODINGS)
def a_packed_file_that_says_raw(blob: bytes) -> bytes:
    return with_metadata(blob, encoding="raw")


# ── raw: indices and values ──────────────────────────────────────────────────────────────────────────────────────────


@attack(PositionError, "raw")
def an_index_out_of_range(blob: bytes) -> bytes:
    return with_indices(blob, "embed.weight", lambda i: np.r_[i[:-1], 64 * 16])


@attack(PositionError, "raw")
def a_negative_index(blob: bytes) -> bytes:
    return with_indices(blob, "embed.weight", lambda i: np.r_[-1, i[1:]])


@attack(PositionError, "raw")
def indices_that_do_not_ascend(blob: bytes) -> bytes:
    return with_indices(blob, "embed.weight", lambda i: np.r_[i[1], i[0], i[2:]])


@attack(PositionError, "raw")
def an_index_in_the_middle_out_of_range(blob: bytes) -> bytes:
    return with_indices(blob, "embed.weight", lambda i: np.r_[i[0], 10**6, i[2:]])


@attack(PositionError, "raw")
def an_index_twice(blob: bytes) -> bytes:
    return with_indices(blob, "embed.weight", lambda i: np.r_[i[0], i[0], i[2:]])


@attack(PositionError, "raw")
def indices_whose_differences_wrap_around(blob: bytes) -> bytes:
    """Every difference of neighbours is positive in 64 bits, first and last are in range; those between are not."""
    top = (1 << 63) - 1
    return with_indices(blob, "embed.weight", lambda i: np.array([0, top, -top - 1, -1, 5]), "I64")


@attack(CountMismatch, "raw")
def more_indices_than_the_tensor_has_units(blob: bytes) -> bytes:
    return with_indices(blob, "embed.weight", lambda i: np.arange(64 * 16 + 1))


@attack(CountMismatch, "raw")
def fewer_values_than_indices(blob: bytes) -> bytes:
    metadata, tensors = split(blob)
    dtype, shape, data = tensors["embed.weight.values"]
    tensors["embed.weight.values"] = (dtype, [shape[0] - 1], data[:-2])
    return join(metadata, tensors)


@attack(CountMismatch, "raw")
def indices_in_two_dimensions(blob: bytes) -> bytes:
    metadata, tensors = split(blob)
    for part in ("indices", "values"):
        dtype, shape, data = tensors[f"embed.weight.{part}"]
        tensors[f"embed.weight.{part}"] = (dtype, [1, shape[0]], data)
    return join(metadata, tensors)


@attack(SchemaMismatch, "raw")
def indices_without_values(blob: bytes) -> bytes:
    metadata, tensors = split(blob)
    del tensors["embed.weight.values"]
    return join(metadata, tensors)


@attack(SchemaMismatch, "raw")
def values_without_indices(blob: bytes) -> bytes:
    metadata, tensors = split(blob)
    del tensors["embed.weight.indices"]
    return join(metadata, tensors)


@attack(SchemaMismatch, "raw")
def indices_that_are_floats(blob: bytes) -> bytes:
    metadata, tensors = split(blob)
    _, shape, data = tensors["embed.weight.indices"]
    tensors["embed.weight.indices"] = ("F32", shape, data)
    return join(metadata, tensors)


@attack(SchemaMismatch, "raw")
def values_of_another_dtype(blob: bytes) -> bytes:
    metadata, tensors = split(blob)
    _, shape, data = tensors["embed.weight.values"]
    tensors["embed.weight.values"] = ("F16", shape, data)
    return join(metadata, tensors)


@attack(SchemaMismatch, "raw")
def a_raw_tensor_the_run_does_not_have(blob: bytes) -> bytes:
    metadata, tensors = split(blob)
    renamed = {key.replace("embed.weight", "other.weight"): value for key, value in tensors.items()}
    return join(metadata, renamed)


# ── block encodings: the index ───────────────────────────────────────────────────────────────────────────────────────


@attack(UnknownFormat, *BLOCK_ENCODINGS)
def no_index(blob: bytes) -> bytes:
    metadata, tensors = split(blob)
    del tensors["index"]
    return join(metadata, tensors)


@attack(CorruptStream, *BLOCK_ENCODINGS)
def an_index_that_claims_100_gb(blob: bytes) -> bytes:
    return with_metadata(blob, index_size=str(HUNDRED_GB))


@attack(CorruptStream, *BLOCK_ENCODINGS)
def an_index_that_claims_less_than_nothing(blob: bytes) -> bytes:
    return with_metadata(blob, index_size="-1")


@attack(CorruptStream, *BLOCK_ENCODINGS)
def an_index_size_that_is_no_number(blob: bytes) -> bytes:
    return with_metadata(blob, index_size="many")


@attack(CorruptStream, *BLOCK_ENCODINGS)
def an_index_size_in_digits_of_another_script(blob: bytes) -> bytes:
    return with_metadata(blob, index_size="٣" * 400)


BOMB = 256 << 20


@cache
def bomb(size: int = BOMB, claimed: int | None = None) -> bytes:
    """`size` zeros, a few kilobytes compressed; the frame may claim another size."""
    chunk, left = bytes(1 << 20), size
    compressor = zstandard.ZstdCompressor(level=1)
    out = compressor.compressobj(size=size) if claimed is None else compressor.compressobj()
    parts = []
    while left:
        parts.append(out.compress(chunk[: min(left, len(chunk))]))
        left -= min(left, len(chunk))
    parts.append(out.flush())
    frame = b"".join(parts)
    if claimed is None:
        return frame
    # a frame without a content size has 4 bytes of magic, 1 of descriptor, 1 of window: give it a size that lies
    descriptor = frame[4]
    assert descriptor >> 6 == 0
    assert not descriptor & 0x20
    return frame[:4] + bytes([descriptor | 0xC0]) + frame[5:6] + claimed.to_bytes(8, "little") + frame[6:]


def _bombed_index(frame: bytes, claimed: int) -> Callable[[bytes], bytes]:
    def make(blob: bytes) -> bytes:
        metadata, tensors = split(blob)
        metadata["index_size"] = str(claimed)
        tensors["index"] = ("U8", [len(frame)], frame)
        return join(metadata, tensors)

    return make


@attack(CorruptStream, *BLOCK_ENCODINGS)
def an_index_that_is_a_bomb(blob: bytes) -> bytes:
    """256 MB of zeros in a few kilobytes, honestly labelled."""
    return _bombed_index(bomb(), BOMB)(blob)


@attack(CorruptStream, *BLOCK_ENCODINGS)
def an_index_bomb_that_claims_to_be_small(blob: bytes) -> bytes:
    """The file and the frame say 4 kB; the frame holds 256 MB."""
    return _bombed_index(bomb(claimed=4096), 4096)(blob)


@attack(CorruptStream, *BLOCK_ENCODINGS)
def an_index_that_does_not_decompress(blob: bytes) -> bytes:
    return _bombed_index(b"\x28\xb5\x2f\xfd" + b"garbage!", 4096)(blob)


@attack(CorruptStream, *BLOCK_ENCODINGS)
def an_index_that_is_not_json(blob: bytes) -> bytes:
    return with_index(blob, b"not json at all")


@attack(CorruptStream, *BLOCK_ENCODINGS)
def an_index_nested_a_million_deep(blob: bytes) -> bytes:
    return with_index(blob, b'{"tensors":' + nested(1_000_000) + b',"blocks":[]}')


@attack(CountMismatch, *BLOCK_ENCODINGS)
def an_index_with_numbers_beyond_64_bits(blob: bytes) -> bytes:
    return edited_index(blob, lambda index: index["blocks"][0]["regions"][0].__setitem__(5, 10**40))


@attack(SchemaMismatch, *BLOCK_ENCODINGS)
def an_index_with_a_tensor_of_another_shape(blob: bytes) -> bytes:
    def edit(index: dict[str, Any]) -> None:
        next(t for t in index["tensors"] if t[0] == "embed.weight")[2] = [16, 64]

    return edited_index(blob, edit)


@attack(SchemaMismatch, *BLOCK_ENCODINGS)
def an_index_with_a_tensor_of_another_dtype(blob: bytes) -> bytes:
    def edit(index: dict[str, Any]) -> None:
        next(t for t in index["tensors"] if t[0] == "embed.weight")[1] = "F16"

    return edited_index(blob, edit)


@attack(SchemaMismatch, *BLOCK_ENCODINGS)
def an_index_with_a_tensor_the_run_does_not_have(blob: bytes) -> bytes:
    return edited_index(blob, lambda index: index["tensors"].append(["../other", "BF16", [4]]))


@attack(SchemaMismatch, *BLOCK_ENCODINGS)
def an_index_with_the_same_tensor_twice(blob: bytes) -> bytes:
    """Two numbers for one tensor, so that overlapping regions do not seem to."""

    def edit(index: dict[str, Any]) -> None:
        for block in index["blocks"]:
            for region in block["regions"]:
                if index["tensors"][region[0]][0] == "embed.weight":
                    index["tensors"].append(index["tensors"][region[0]])
                    block["regions"].append([len(index["tensors"]) - 1, *region[1:]])
                    return

    return edited_index(blob, edit)


def _region(blob: bytes, edit: Callable[[list[int]], None]) -> bytes:
    """Edit the region of embed.weight, [tensor, row, rows, column, columns, changed]."""

    def go(index: dict[str, Any]) -> None:
        for block in index["blocks"]:
            for region in block["regions"]:
                if index["tensors"][region[0]][0] == "embed.weight":
                    edit(region)

    return edited_index(blob, go)


@attack(SchemaMismatch, *BLOCK_ENCODINGS)
def a_region_of_a_tensor_that_is_not_listed(blob: bytes) -> bytes:
    return _region(blob, lambda region: region.__setitem__(0, 99))


@attack(SchemaMismatch, *BLOCK_ENCODINGS)
def a_region_of_tensor_minus_one(blob: bytes) -> bytes:
    return _region(blob, lambda region: region.__setitem__(0, -1))


@attack(PositionError, *BLOCK_ENCODINGS)
def a_region_below_its_tensor(blob: bytes) -> bytes:
    return _region(blob, lambda region: region.__setitem__(1, 1))


@attack(PositionError, *BLOCK_ENCODINGS)
def a_region_beside_its_tensor(blob: bytes) -> bytes:
    return _region(blob, lambda region: region.__setitem__(3, 1))


@attack(PositionError, *BLOCK_ENCODINGS)
def a_region_with_a_negative_row(blob: bytes) -> bytes:
    return _region(blob, lambda region: region.__setitem__(1, -1))


@attack(PositionError, *BLOCK_ENCODINGS)
def a_region_taller_than_its_tensor(blob: bytes) -> bytes:
    return _region(blob, lambda region: region.__setitem__(2, 1 << 40))


@attack(PositionError, *BLOCK_ENCODINGS)
def a_region_whose_sides_are_both_negative(blob: bytes) -> bytes:
    def edit(region: list[int]) -> None:
        region[2], region[4] = -region[2], -region[4]

    return _region(blob, edit)


@attack(PositionError, *BLOCK_ENCODINGS)
def regions_that_overlap(blob: bytes) -> bytes:
    def edit(index: dict[str, Any]) -> None:
        for block in index["blocks"]:
            for region in list(block["regions"]):
                if index["tensors"][region[0]][0] == "embed.weight":
                    block["regions"].append([region[0], region[1] + 1, region[2] - 1, *region[3:5], 1])

    return edited_index(blob, edit)


@attack(PositionError, *BLOCK_ENCODINGS)
def the_same_region_in_two_blocks(blob: bytes) -> bytes:
    metadata, tensors = split(blob)
    index = index_of(blob)
    number = next(
        n
        for n, block in enumerate(index["blocks"])
        if any(index["tensors"][region[0]][0] == "embed.weight" for region in block["regions"])
    )
    index["blocks"].append(index["blocks"][number])
    tensors[f"block.{len(index['blocks']) - 1:05d}"] = tensors[f"block.{number:05d}"]
    return with_index(join(metadata, tensors), index)


@attack(CountMismatch, *BLOCK_ENCODINGS)
def more_changes_than_the_region_has_units(blob: bytes) -> bytes:
    return _region(blob, lambda region: region.__setitem__(5, region[2] * region[4] + 1))


@attack(CountMismatch, *BLOCK_ENCODINGS)
def a_region_without_changes(blob: bytes) -> bytes:
    return _region(blob, lambda region: region.__setitem__(5, 0))


@attack(CountMismatch, *BLOCK_ENCODINGS)
def a_count_that_is_too_high(blob: bytes) -> bytes:
    return _region(blob, lambda region: region.__setitem__(5, region[5] + 2))


@attack(FormatError, *BLOCK_ENCODINGS)  # which one, depends on what an encoding reads first
def a_count_that_is_too_low(blob: bytes) -> bytes:
    return _region(blob, lambda region: region.__setitem__(5, region[5] - 2))


@attack(CountMismatch, "planes")
def a_count_below_the_bits_that_flip(blob: bytes) -> bytes:
    return a_count_that_is_too_low(blob)


@attack(CorruptStream, *BLOCK_ENCODINGS)
def a_block_of_two_dtypes(blob: bytes) -> bytes:
    def edit(index: dict[str, Any]) -> None:
        first, second = index["blocks"][:2]
        first["regions"].append(second["regions"].pop(0))

    return edited_index(blob, edit)


@attack(CorruptStream, *BLOCK_ENCODINGS)
def a_block_without_regions(blob: bytes) -> bytes:
    return edited_index(blob, lambda index: index["blocks"][0].update(regions=[]))


@attack(HeaderError, *BLOCK_ENCODINGS)
def a_block_that_is_not_in_the_file(blob: bytes) -> bytes:
    metadata, tensors = split(blob)
    del tensors["block.00000"]
    return join(metadata, tensors)


@attack(HeaderError, *BLOCK_ENCODINGS)
def a_block_that_is_not_in_the_index(blob: bytes) -> bytes:
    return edited_index(blob, lambda index: index["blocks"].pop())


@attack(HeaderError, *BLOCK_ENCODINGS)
def a_block_of_floats(blob: bytes) -> bytes:
    metadata, tensors = split(blob)
    _, shape, data = tensors["block.00000"]
    tensors["block.00000"] = ("F8_E4M3", shape, data)
    return join(metadata, tensors)


@attack(HashMismatch, *BLOCK_ENCODINGS)
def a_block_with_another_hash(blob: bytes) -> bytes:
    return edited_index(blob, lambda index: index["blocks"][0].update(hash="0" * 32))


@attack(HashMismatch, *BLOCK_ENCODINGS)
def a_flipped_bit_in_a_block(blob: bytes) -> bytes:
    metadata, tensors = split(blob)
    dtype, shape, data = tensors["block.00000"]
    tensors["block.00000"] = (dtype, shape, bytes([data[0] ^ 1]) + data[1:])
    return join(metadata, tensors)


# ── packed: streams ──────────────────────────────────────────────────────────────────────────────────────────────────


def _stream(name: str, edit: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
    def make(blob: bytes) -> bytes:
        streams = streams_of(blob)
        return with_streams(blob, {**streams, name: edit(streams[name])})

    return make


def _sized(raw: int, stored: int) -> Callable[[dict[str, Any]], None]:
    return lambda index: index["blocks"][0]["streams"].update(gaps=[raw, stored])


@attack(CorruptStream, "packed")
def a_stream_of_negative_size(blob: bytes) -> bytes:
    return edited_index(blob, _sized(5, -5))


@attack(CorruptStream, "packed")
def a_stream_that_grew_by_compression(blob: bytes) -> bytes:
    return edited_index(blob, _sized(5, 6))


@attack(CountMismatch, "packed")
def streams_that_do_not_add_up(blob: bytes) -> bytes:
    return edited_index(blob, _sized(5000, 5000))


@attack(CountMismatch, "packed")
def a_gap_stream_too_short(blob: bytes) -> bytes:
    return _stream("gaps", lambda data: data[:-1])(blob)


@attack(CountMismatch, "packed")
def a_gap_stream_too_long(blob: bytes) -> bytes:
    return _stream("gaps", lambda data: data + b"\0")(blob)


@attack(CorruptStream, "packed")
def a_gap_stream_much_too_long(blob: bytes) -> bytes:
    return _stream("gaps", lambda data: data + bytes(100_000))(blob)


@attack(PositionError, "packed")
def a_gap_that_leads_out_of_the_region(blob: bytes) -> bytes:
    return _stream("gaps", lambda data: b"\xfe" * len(data))(blob)


@attack(CountMismatch, "packed")
def gaps_that_never_end(blob: bytes) -> bytes:
    return _stream("gaps", lambda data: b"\xff" * len(data))(blob)


@attack(CountMismatch, "packed")
def a_step_stream_too_short(blob: bytes) -> bytes:
    return _stream("steps", lambda data: data[:-1])(blob)


@attack(CorruptStream, "packed")
def a_step_stream_too_long(blob: bytes) -> bytes:
    return _stream("steps", lambda data: data + b"\0")(blob)


@attack(CountMismatch, "packed")
def fewer_wide_steps_than_escapes(blob: bytes) -> bytes:
    return _stream("wide", lambda data: data[:-2])(blob)


@attack(CountMismatch, "packed")
def more_wide_steps_than_escapes(blob: bytes) -> bytes:
    """Two escapes fewer, so that two wide steps are left over."""

    def edit(data: bytes) -> bytes:
        steps = bytearray(data)
        assert steps[0] == 0xFF, "the model was made to begin with two wide steps"
        steps[0] = 0x00
        return bytes(steps)

    return _stream("steps", edit)(blob)


@attack(CountMismatch, "packed")
def half_a_wide_step(blob: bytes) -> bytes:
    return _stream("wide", lambda data: data[:-1])(blob)


@attack(CorruptStream, "packed")
def a_wide_step_wider_than_its_dtype(blob: bytes) -> bytes:
    return _stream("wide", lambda data: b"\xff" * len(data))(blob)


@attack(CountMismatch, "packed")
def a_stream_that_is_missing(blob: bytes) -> bytes:
    streams = streams_of(blob)
    del streams["steps"]
    return with_streams(blob, streams)


@attack(CorruptStream, "packed")
def a_shift_of_60(blob: bytes) -> bytes:
    return edited_index(blob, lambda index: index["blocks"][0]["parameters"].update(shift=60))


@attack(CorruptStream, "packed")
def a_shift_of_minus_one(blob: bytes) -> bytes:
    return edited_index(blob, lambda index: index["blocks"][0]["parameters"].update(shift=-1))


@attack(CountMismatch, "packed")
def a_shift_without_its_low_bits(blob: bytes) -> bytes:
    return edited_index(blob, lambda index: index["blocks"][0]["parameters"].update(shift=3))


@attack(CorruptStream, "packed")
def no_shift(blob: bytes) -> bytes:
    return edited_index(blob, lambda index: index["blocks"][0].update(parameters={}))


def _bombed_stream(name: str, frame: bytes, raw: int) -> Callable[[bytes], bytes]:
    def make(blob: bytes) -> bytes:
        streams = streams_of(blob)
        index = index_of(blob)
        stored = {**streams, name: frame}
        index["blocks"][0]["streams"] = {n: [raw if n == name else len(data), len(data)] for n, data in stored.items()}
        return with_index(blob, index, {0: b"".join(stored.values())})

    return make


def with_bomb(blob: bytes, stream: str) -> bytes:
    """The first block, with 256 MB of zeros for one of its streams, honestly labelled."""
    return _bombed_stream(stream, bomb(), BOMB)(blob)


@attack(CorruptStream, "packed")
def a_gap_stream_that_is_a_bomb(blob: bytes) -> bytes:
    return _bombed_stream("gaps", bomb(), BOMB)(blob)


@attack(CorruptStream, "packed")
def a_gap_bomb_that_claims_to_be_small(blob: bytes) -> bytes:
    size = len(streams_of(blob)["gaps"])
    frame = bomb(claimed=10**6)
    # as large as its counts allow, and still the frame lies
    frame = frame[:6] + size.to_bytes(8, "little") + frame[14:]
    assert len(frame) > size, "stored may not be larger than raw: see the next attack for that"
    return _bombed_stream("gaps", frame, size)(blob)


@attack(CorruptStream, "packed")
def a_step_stream_that_is_a_bomb(blob: bytes) -> bytes:
    return _bombed_stream("steps", bomb(), BOMB)(blob)


@attack(CorruptStream, "packed")
def a_wide_stream_that_is_a_bomb(blob: bytes) -> bytes:
    return _bombed_stream("wide", bomb(), BOMB)(blob)


@attack(CorruptStream, "packed")
def a_stream_that_does_not_decompress(blob: bytes) -> bytes:
    gaps = streams_of(blob)["gaps"]
    return _bombed_stream("gaps", b"\0" * (len(gaps) - 1), len(gaps))(blob)
