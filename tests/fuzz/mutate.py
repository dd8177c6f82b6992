"""Mutations: small random changes of bytes, JSON and safetensors files, all drawn from one `random.Random`.

Structured ones take a file apart, change one thing and make the rest fit again (hashes, sizes, offsets): what comes
back passes the first checks and reaches the later ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from random import Random
from typing import Any

import zstandard
from blake3 import blake3
from forge import index_of, join, split, streams_of, with_index, with_streams

NUMBERS: list[Any] = [
    -(2**63) - 1, -(2**63), -(2**31), -1, 0, 1, 2, 3, 7, 8, 15, 16, 63, 64, 127, 128, 255, 256, 65535, 65536, 10**6,
    2**26, 2**31 - 1, 2**31, 2**32, 2**40, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**18, 10**19, 10**300,
    0.5, -0.0, 1e-320, 1e308, float("nan"), float("inf"), float("-inf"), True, False,
]  # fmt: skip
TEXTS = [
    "", " ", "a", "0", "-1", "null", "NaN", "1e999", "../../etc/passwd", "/etc/passwd", "a/b", "a\\b", ".", "..",
    "\0", "a\nb", "\x1b[2J\x1b]0;owned\x07", "\u202e\ufeff", "\ud800", "\N{PILE OF POO}" * 20, "a" * 300, "a" * 70_000,
    "run.json", "head.json", "versions/000001.json", "file:///etc", "hf://buckets/a/b", "org/model", "{{ 7 * 7 }}",
    "{% for x in range(10**9) %}{{ x }}{% endfor %}", "[bold red]x[/]", "%s%n", "model.safetensors", "model.py",
    "__metadata__", "BF16", "F32", "U8", "I64", "F8_E4M3", "anchor", "delta", "reference", "raw", "packed", "context",
    "planes", "f" * 32, "0" * 32,
]  # fmt: skip


# ── bytes ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def of_bytes(rng: Random, data: bytes) -> bytes:
    """One to four changes anywhere."""
    made = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(made)) if made else 0
        length = min(rng.choice((1, 2, 4, 8, 64, 1024)), len(made) - at)
        match rng.randrange(8):
            case 0 if made:
                made[at] ^= 1 << rng.randrange(8)
            case 1 if made:
                made[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFE, 0xFF, rng.randrange(256)))
            case 2:
                made[at : at + length] = rng.randbytes(length)
            case 3:
                del made[at : at + length]
            case 4:
                made[at:at] = made[at : at + length] * rng.choice((1, 2, 100))
            case 5:
                del made[at:]
            case 6:
                number = rng.choice((0, 1, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1, rng.getrandbits(64)))
                width = rng.choice((2, 4, 8))
                made[at : at + width] = (number % (1 << 8 * width)).to_bytes(width, "little")
            case _:
                made += rng.randbytes(length)
    return bytes(made)


# ── JSON ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def of_json(rng: Random, data: bytes) -> bytes:
    """Other values, keys and structure; sometimes what is no JSON at all."""
    choice = rng.random()
    with suppress(ValueError, RecursionError):
        value = json.loads(data)
        if choice < 0.85:
            for _ in range(rng.choice((1, 1, 1, 2, 3))):
                value = of_value(rng, value)
            return json.dumps(value, ensure_ascii=rng.random() < 0.9).encode("utf-8", "surrogatepass")
        if choice < 0.9:
            return _odd_text(rng, value)
    return of_bytes(rng, data)


def _odd_text(rng: Random, value: Any) -> bytes:
    text = json.dumps(value).encode()
    match rng.randrange(6):
        case 0:
            return b"\xef\xbb\xbf" + text
        case 1:
            return text.decode().encode("utf-16")
        case 2:
            depth = rng.choice((100, 2_000, 200_000))
            return b"[" * depth + text + b"]" * depth
        case 3:
            return text[:-1] + b"," + text[1:]  # every key twice
        case 4:
            return text.replace(b"0", b"0" * rng.choice((2, 5_000)), 1)
        case _:
            return text + rng.choice((b"\0", b"{}", b"\xff", b" " * 100_000))


def of_value(rng: Random, value: Any) -> Any:
    """The value with one node of it changed."""
    places = list(_places(value))
    if not places:
        return any_value(rng)
    holder, key = rng.choice(places)
    old = holder[key]
    match rng.randrange(10):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, list):
            # never so many that the mutation itself takes the memory
            holder[key:key] = [old] * (rng.choice((1, 1, 40, 2_000)) if len(places) < 2_000 else 1)
        case 1:
            holder[rng.choice(TEXTS)] = old
        case 2:
            other, where = rng.choice(places)
            with suppress(LookupError):
                holder[key] = other[where] if not _contains(other[where], holder) else None
        case 3 if isinstance(old, int | float) and not isinstance(old, bool):
            holder[key] = old + rng.choice((-16, -1, 1, 16))
        case 4 if isinstance(old, int | float) and not isinstance(old, bool):
            holder[key] = rng.choice((-old, old * 2, old * 1000, str(old)))
        case 5 if isinstance(old, str):
            holder[key] = of_text(rng, old)
        case 6 if isinstance(old, list):
            rng.shuffle(old)
        case 7 if isinstance(old, list) and old:
            holder[key] = old[:1]
        case _:
            holder[key] = any_value(rng)
    return value


def of_text(rng: Random, text: str) -> str:
    at = rng.randrange(len(text) + 1)
    extra = rng.choice((*TEXTS[:40], "0", "f", "/", "."))
    return rng.choice((text[:at], text[:at] + extra + text[at:], text[:at] + extra + text[at + 1 :], text * 2))


def any_value(rng: Random) -> Any:
    kind = rng.random()
    if kind < 0.45:
        return rng.choice(NUMBERS)
    if kind < 0.75:
        return rng.choice(TEXTS)
    simple: list[Callable[[], Any]] = [
        lambda: None, list, dict, lambda: [rng.choice(NUMBERS)], lambda: [[]], lambda: {"": None},
        lambda: {rng.choice(TEXTS): rng.choice(NUMBERS)}, lambda: [rng.choice(NUMBERS)] * rng.choice((2, 100, 5_000)),
    ]  # fmt: skip
    return rng.choice(simple)()


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of every node but the root."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])


def _contains(value: Any, wanted: Any) -> bool:
    return value is wanted or any(holder[key] is wanted for holder, key in _places(value))


# ── safetensors ──────────────────────────────────────────────────────────────────────────────────────────────────────


def of_tensors(rng: Random, blob: bytes) -> bytes:
    """A safetensors file with one part changed: header, metadata, index, a stream, the data of a tensor, any byte."""
    ways = [of_bytes, _header, _metadata, _data, _data, _order]
    with suppress(Exception):
        index_of(blob)
        ways += [_index, _index, _streams, _streams, _streams, _payload]
    # a file that was changed before may be beyond taking apart
    with suppress(Exception):
        return rng.choice(ways)(rng, blob)
    return of_bytes(rng, blob)


def _header(rng: Random, blob: bytes) -> bytes:
    size = int.from_bytes(blob[:8], "little")
    text = of_json(rng, blob[8 : 8 + size])
    return (len(text) if rng.random() < 0.9 else size).to_bytes(8, "little") + text + blob[8 + size :]


def _metadata(rng: Random, blob: bytes) -> bytes:
    metadata, tensors = split(blob)
    value = of_value(rng, metadata)
    if rng.random() < 0.7:
        value = {str(key): str(text) for key, text in value.items()}
    return join(value, tensors)


def _data(rng: Random, blob: bytes) -> bytes:
    """Other bytes in a tensor; the header fits them."""
    metadata, tensors = split(blob)
    name = rng.choice(list(tensors))
    dtype, shape, data = tensors[name]
    made = of_bytes(rng, data)
    if len(made) != len(data) and len(shape) == 1 and shape[0]:
        shape = [len(made) * shape[0] // max(len(data), 1)]
    tensors[name] = dtype, shape, made
    return join(metadata, tensors)


def _order(rng: Random, blob: bytes) -> bytes:
    metadata, tensors = split(blob)
    names = list(tensors)
    rng.shuffle(names)
    if rng.random() < 0.3:
        names.pop()
    if rng.random() < 0.3:
        # two tensors trade their contents
        one, other = rng.choice(names), rng.choice(names)
        tensors[one], tensors[other] = tensors[other], tensors[one]
    return join(metadata, {name: tensors[name] for name in names})


def _index(rng: Random, blob: bytes) -> bytes:
    index = of_value(rng, index_of(blob))
    if rng.random() < 0.8:
        return with_index(blob, json.dumps(index).encode())
    metadata, tensors = split(blob)
    text = json.dumps(index).encode()
    packed = zstandard.ZstdCompressor(write_content_size=rng.random() < 0.8).compress(text)
    metadata["index_size"] = str(len(text) + rng.choice((0, 0, -1, 1, 10**9)))
    tensors["index"] = ("U8", [len(packed)], packed)
    return join(metadata, tensors)


def _streams(rng: Random, blob: bytes) -> bytes:
    """Other bytes in a stream of a block, with its hash and sizes right."""
    number = rng.randrange(len(index_of(blob)["blocks"]))
    streams = streams_of(blob, number)
    name = rng.choice(list(streams))
    made = of_bytes(rng, streams[name])
    if rng.random() < 0.7:
        # most checks come after the one on the length
        made = (made + bytes(len(streams[name])))[: len(streams[name])]
    return with_streams(blob, {**streams, name: made}, number)


def _payload(rng: Random, blob: bytes) -> bytes:
    """Other stored bytes in a block, under their right hash: compressed streams that do not decompress."""
    index = index_of(blob)
    number = rng.randrange(len(index["blocks"]))
    data = split(blob)[1][f"block.{number:05d}"][2]
    made = (of_bytes(rng, data) + bytes(len(data)))[: len(data)]
    return with_index(blob, index, {number: made})


def hash_of(data: bytes) -> str:
    return blake3(data).hexdigest(length=16)
