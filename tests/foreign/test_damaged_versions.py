"""Versions that are damaged or hostile: an error that names file and tensor, no version, and the next whole one."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import numpy as st
from writers import compressed, model, packed, trained, write_base, write_delta, write_skyrl

import deltawire as dw
from deltawire.errors import (
    CorruptStream,
    CountMismatch,
    DeltawireError,
    HashMismatch,
    HeaderError,
    ManifestError,
    MissingBase,
    MissingExtra,
    ObjectNotFound,
    ObjectTooLarge,
    PositionError,
    SchemaMismatch,
    TruncatedFile,
    UnknownFormat,
    UnsafeName,
)
from deltawire.foreign import Importer
from deltawire.store import LocalStore
from deltawire_wordle.seaweed import SeaweedFS
from support import blank, same

INDEX, FILE = "model.safetensors.index.json", "model-00000-of-00001.safetensors"
TENSOR = "layer.0.weight"
HISTORY = [model()]
for _seed in range(1, 5):
    HISTORY.append(trained(HISTORY[-1], _seed))
SIZE = HISTORY[0][TENSOR].nbytes


def write(source: Path, number: int, **options: Any) -> Path:
    return write_delta(source, number, *HISTORY[number - 1 : number + 1], **options)


def index(**changes: Any) -> Callable[[Path], None]:
    """Other metadata of the index; None removes an entry."""

    def damage(folder: Path) -> None:
        value = json.loads((folder / INDEX).read_text())
        value["metadata"] |= changes
        value["metadata"] = {key: text for key, text in value["metadata"].items() if text is not None}
        (folder / INDEX).write_text(json.dumps(value))

    return damage


def mapped(change: Callable[[dict[str, str]], Any]) -> Callable[[Path], None]:
    """Another weight_map of the index."""

    def damage(folder: Path) -> None:
        value = json.loads((folder / INDEX).read_text())
        change(value["weight_map"])
        (folder / INDEX).write_text(json.dumps(value))

    return damage


def tensor(data: bytes) -> Callable[[Path], None]:
    """Other bytes of a tensor, with the file whole."""

    def damage(folder: Path) -> None:
        blob = (folder / FILE).read_bytes()
        metadata = json.loads(blob[8 : 8 + int.from_bytes(blob[:8], "little")])["__metadata__"]
        tensors = st.load(blob) | {TENSOR: np.frombuffer(data, np.uint8)}
        (folder / FILE).write_bytes(st.save(tensors, metadata=metadata))

    return damage


def blob(change: Callable[[bytes], bytes], name: str = FILE) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).write_bytes(change((folder / name).read_bytes()))

    return damage


def _huge(folder: Path) -> None:
    metadata = json.loads((folder / INDEX).read_text())["metadata"]
    names = ",".join(f'"{n}":"{FILE}"' for n in range(1_000_000))
    (folder / INDEX).write_text(f'{{"metadata":{json.dumps(metadata)},"weight_map":{{{names}}}}}')


def _too_large(folder: Path) -> None:
    os.truncate(folder / INDEX, (64 << 20) + 1)


def _two_files(folder: Path) -> None:
    (folder / "model-00001-of-00002.safetensors").write_bytes((folder / FILE).read_bytes())
    mapped(lambda names: names.update({"norm.weight": "model-00001-of-00002.safetensors"}))(folder)


def _other_dtype(folder: Path) -> None:
    tensors = st.load((folder / FILE).read_bytes())
    (folder / FILE).write_bytes(st.save({name: array.view(np.int8) for name, array in tensors.items()}))


NEW = HISTORY[2][TENSOR].reshape(-1).view(np.uint8)
OLD = HISTORY[1][TENSOR].reshape(-1).view(np.uint8)


def overwritten(positions: list[int], values: bytes = b"", count: int | None = None) -> bytes:
    head = np.array([len(positions) if count is None else count, *positions], "<u4").tobytes()
    return compressed(head + (values or bytes(len(positions))))


def _resized(frame: bytes) -> bytes:
    """A frame whose header states one byte more."""
    assert frame[4] == 0b01100000  # one segment, and two bytes with the size less 256
    return frame[:5] + (SIZE + 1 - 256).to_bytes(2, "little") + frame[7:]


XOR: dict[str, tuple[Callable[[Path], None], type[DeltawireError]]] = {
    "another checksum": (blob(lambda data: re.sub(rb'("norm.weight":").', rb"\1x", data, count=1)), HashMismatch),
    "another delta": (tensor(packed(OLD, NEW ^ np.uint8(1), "xor")), HashMismatch),
    "bytes beyond the tensor": (tensor(compressed(bytes(SIZE + 1))), CorruptStream),
    "far more bytes": (tensor(compressed(bytes(1 << 24))), CorruptStream),
    "fewer bytes": (tensor(compressed(bytes(SIZE - 1))), CorruptStream),
    "no zstd frame": (tensor(b"\0" * 100), CorruptStream),
    "half a zstd frame": (tensor(packed(OLD, NEW, "xor")[:50]), CorruptStream),
    "a window of 2 GB": (tensor(b"\x28\xb5\x2f\xfd\x00\xa8" + bytes(8)), CorruptStream),
    "larger than it inflates to": (tensor(bytes(1 << 18)), CorruptStream),
    "nothing": (tensor(b""), CorruptStream),
    "bytes after the frame": (tensor(packed(OLD, NEW, "xor") + b"more"), CorruptStream),
    "a second frame": (tensor(packed(OLD, NEW, "xor") + compressed(b"more")), CorruptStream),
    "another content size": (tensor(_resized(packed(OLD, NEW, "xor"))), CorruptStream),
    "no JSON": (blob(lambda data: data[:-2], INDEX), ManifestError),
    "deep JSON": (blob(lambda data: b"[" * 200_000, INDEX), ManifestError),
    "an index that is too large": (_too_large, ObjectTooLarge),
    "a million tensors": (_huge, SchemaMismatch),
    "another version": (index(version="000007"), ManifestError),
    "a base that is not there": (index(base_version="000008"), MissingBase),
    "no base version": (index(base_version=None), ManifestError),
    "no checksum format": (index(checksum_format=None), ManifestError),
    "an unknown checksum": (index(checksum_format="crc32"), UnknownFormat),
    "an unknown encoding": (index(delta_encoding="rle"), UnknownFormat),
    "an unknown compression": (index(compression_format="lz4"), UnknownFormat),
    "full weights that are none": (index(delta_encoding=None), SchemaMismatch),
    "a missing file": (lambda folder: (folder / FILE).unlink(), ObjectNotFound),
    "a file elsewhere": (mapped(lambda names: names.update({TENSOR: f"../weight_v000001/{FILE}"})), UnsafeName),
    "a file at the root": (mapped(lambda names: names.update({TENSOR: "/etc/passwd"})), UnsafeName),
    "a file that the index lacks": (
        lambda folder: (folder / "more.safetensors").write_bytes((folder / FILE).read_bytes()), CountMismatch
    ),
    "a tensor in two files": (_two_files, SchemaMismatch),
    "a tensor that the index lacks": (mapped(lambda names: names.pop(TENSOR)), SchemaMismatch),
    "a tensor under another name": (
        mapped(lambda names: names.update({"ghost": names.pop("norm.weight")})), SchemaMismatch
    ),
    "a tensor that the base lacks": (
        blob(lambda data: data.replace(b"norm.weight", b"worm.weight")), SchemaMismatch
    ),
    "no checksum of a tensor": (
        blob(lambda data: data.replace(b'"norm.weight":"', b'"norn.weight":"', 1)), ManifestError
    ),
    "a file without tensors": (blob(lambda data: b"\2" + bytes(7) + b"{}"), CountMismatch),
    "tensors of another dtype": (_other_dtype, SchemaMismatch),
    "a header without end": (blob(lambda data: b"\xff" * 8 + data[8:]), HeaderError),
    "a file cut short": (blob(lambda data: data[:-1]), TruncatedFile),
    "a file too long": (blob(lambda data: data + b"\0"), HeaderError),
}  # fmt: skip
OVERWRITE: dict[str, tuple[Callable[[Path], None], type[DeltawireError]]] = {
    "positions beyond the end": (tensor(overwritten([3, SIZE])), PositionError),
    "positions that descend": (tensor(overwritten([4, 3])), PositionError),
    "a position twice": (tensor(overwritten([4, 4])), PositionError),
    "more positions than bytes": (tensor(overwritten([1], count=SIZE + 1)), CorruptStream),
    "fewer values": (tensor(overwritten([1, 2, 3], values=b"ab")), CorruptStream),
    "more values": (tensor(overwritten([1, 2, 3], values=b"abcd")), CorruptStream),
    "other values": (tensor(overwritten([1, 2, 3])), HashMismatch),
}


@pytest.mark.parametrize(
    ("encoding", "case"), [*(("xor", case) for case in XOR), *(("overwrite", case) for case in OVERWRITE)]
)
def test_a_bad_version_is_left_out_and_the_next_whole_one_imported(tmp_path: Path, encoding: str, case: str) -> None:
    damage, error = (XOR | OVERWRITE)[case]
    base, source = write_base(tmp_path / "base", HISTORY[0]), tmp_path / "source"
    for number in (1, 2, 3):
        write(source, number, encoding=encoding)
    write_base(source / "weight_v000004", HISTORY[4], index={})
    if case == "a tensor that the base lacks":
        mapped(lambda names: names.update({"worm.weight": names.pop("norm.weight")}))(source / "weight_v000002")
    damage(source / "weight_v000002")
    with Importer(source, tmp_path / "run", base=base) as importer:
        versions = importer.follow(once=True)
        assert [next(versions).source_version for _ in range(3)] == ["0", "1", "4"]
        with pytest.raises(error) as caught:
            next(versions)
    assert type(caught.value) is error
    assert "weight_v000002" in str(caught.value)
    if encoding == "overwrite" or error in (HashMismatch, CorruptStream):
        assert "layer.0.weight" in str(caught.value) or "norm.weight" in str(caught.value)
    run = dw.Run.open(tmp_path / "run")
    assert run.listed() == [0, 1, 2]
    for version, weights in enumerate((HISTORY[0], HISTORY[1], HISTORY[4])):
        live = blank(weights)
        dw.Replica(tmp_path / "run").sync(live, version)
        assert same(live, weights)


def test_a_bad_version_is_imported_once_it_is_mended(tmp_path: Path) -> None:
    base, source = write_base(tmp_path / "base", HISTORY[0]), tmp_path / "source"
    folder = write(source, 1)
    write(source, 2)
    good = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(good[:-1])
    with Importer(source, tmp_path / "run", base=base) as importer:
        versions = importer.follow(poll=0.01)
        assert next(versions).source_version == "0"
        with pytest.raises(TruncatedFile):
            [*importer.follow(once=True)]
        (folder / FILE).write_bytes(good)
        versions = importer.follow(poll=0.01)
        assert [next(versions).source_version for _ in range(2)] == ["1", "2"]


def test_a_version_that_is_still_being_written_is_waited_for(tmp_path: Path) -> None:
    base, source = write_base(tmp_path / "base", HISTORY[0]), tmp_path / "source"
    folder = write(source, 1)
    (folder / INDEX).rename(tmp_path / INDEX)
    with Importer(source, tmp_path / "run", base=base) as importer:
        assert [each.name for each in importer.follow(once=True)] == ["base"]
        (tmp_path / INDEX).rename(folder / INDEX)
        assert [each.name for each in importer.follow(once=True)] == ["weight_v000001"]


def test_a_checksum_that_needs_another_package_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, source = write_base(tmp_path / "base", HISTORY[0]), tmp_path / "source"
    write(source, 1)
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with (
        Importer(source, tmp_path / "run", base=base) as importer,
        pytest.raises(MissingExtra, match="pip install xxhash"),
    ):
        # not only left out: no later version could be imported
        [*importer.follow(poll=0.01)]


def test_a_format_that_is_not_known_is_named(tmp_path: Path) -> None:
    base, folder = write_base(tmp_path / "base", HISTORY[0]), tmp_path / "source" / "weight_v000001"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    with (
        Importer(tmp_path / "source", tmp_path / "run", base=base) as importer,
        pytest.raises(UnknownFormat, match=r"weight_v000001/manifest\.json"),
    ):
        [*importer.follow(once=True)]


def test_a_pointer_that_names_no_version_is_an_error(tmp_path: Path) -> None:
    base, source = write_base(tmp_path / "base", HISTORY[0]), tmp_path / "source"
    write(source / "updates", 1)
    for pointer in (b"../../elsewhere", b"\x1b[31m/weight_v000001", b"\xff/weight_v000001", b"weight_v1e3", b""):
        (source / "latest").write_bytes(pointer)
        with (
            Importer(source, tmp_path / "run", base=base) as importer,
            pytest.raises(ManifestError, match="latest names no version"),
        ):
            [*importer.follow(once=True)]


MANIFESTS: dict[str, tuple[Callable[[Any], Any], type[DeltawireError]]] = {
    "another shape": (lambda m: m["tensors"][0].update(shape=[1, 2]), SchemaMismatch),
    "another version": (lambda m: m.update(version=9), ManifestError),
    "another base": (lambda m: m.update(base_version=7), MissingBase),
    "another checksum": (lambda m: m["tensors"][0].update(checksum="0"), HashMismatch),
    "an unknown checksum": (lambda m: m["tensors"][0].update(checksum_algorithm="md5"), UnknownFormat),
    "a tensor left out": (lambda m: m["tensors"].pop(), CountMismatch),
    "all tensors left out": (lambda m: m["tensors"].clear(), CountMismatch),
    "a tensor twice": (lambda m: m["tensors"].append(m["tensors"][0]), SchemaMismatch),
    "a tensor that no file has": (lambda m: m["tensors"][0].update(payload_key="ghost"), CountMismatch),
    "a file elsewhere": (lambda m: m["tensors"][0].update(payload_file="../x.safetensors"), UnsafeName),
    "a tensor that the base lacks": (lambda m: m["tensors"][0].update(name="ghost"), SchemaMismatch),
    "no JSON object": (lambda m: m.clear(), ManifestError),
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_bad_manifest_of_skyrl(tmp_path: Path, case: str) -> None:
    change, error = MANIFESTS[case]
    base, source = write_base(tmp_path / "base", HISTORY[0]), tmp_path / "source"
    path = write_skyrl(source, 1, *HISTORY[:2]) / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))
    with Importer(source, tmp_path / "run", base=base) as importer:
        with pytest.raises(error, match="delta-00000001"):
            [*importer.follow(once=True)]
        assert importer.follow(once=True) is not None
    assert dw.Run.open(tmp_path / "run").listed() == [0]


def test_two_folders_of_one_number_are_refused(tmp_path: Path) -> None:
    base, source = write_base(tmp_path / "base", HISTORY[0]), tmp_path / "source"
    write(source, 1)
    write(source, 2)
    for other in (write_skyrl(source, 2, HISTORY[1], HISTORY[3]), write(source, 2, name="weight_v2")):
        with Importer(source, tmp_path / "run", base=base) as importer:
            with pytest.raises(ManifestError, match="have the same number"):
                [*importer.follow(once=True)]
            shutil.rmtree(other)
    with Importer(source, tmp_path / "run", base=base) as importer:
        assert [each.source_version for each in importer.follow(once=True)] == ["0", "1", "2"]


def test_full_weights_that_change_while_they_are_read_are_read_again(tmp_path: Path) -> None:
    base, source = write_base(tmp_path / "base", HISTORY[0]), tmp_path / "source"
    folder = write_base(source / "weight_v000001", HISTORY[1], index={})
    write_base(tmp_path / "other", HISTORY[2], index={})
    name = "model-00001-of-00001.safetensors"

    class Replaced(LocalStore):
        reads = 0

        def get_range(self, key: str, start: int, length: int) -> bytes:
            if key.endswith(name):
                self.reads += 1
                # after the header and two tensors
                if self.reads == 5:
                    (folder / name).write_bytes((tmp_path / "other" / name).read_bytes())
            return super().get_range(key, start, length)

    with Importer(Replaced(source), tmp_path / "run", base=base) as importer:
        versions = importer.follow(poll=0.01)
        assert next(versions).kind == "base"
        assert next(versions).source_version == "1"
    run = dw.Run.open(tmp_path / "run")
    assert run.listed() == [0, 1]
    live = blank(HISTORY[2])
    dw.Replica(tmp_path / "run").sync(live, 1)
    assert same(live, HISTORY[2])


@pytest.mark.slow
def test_bad_versions_in_a_bucket(tmp_path: Path, seaweed: SeaweedFS) -> None:
    """What the tests above have in folders."""
    base = write_base(tmp_path / "base", HISTORY[0])
    for encoding, cases in (("xor", XOR), ("overwrite", OVERWRITE)):
        for case, (damage, error) in cases.items():
            with tempfile.TemporaryDirectory(dir=tmp_path) as made:
                source, bucket = Path(made), seaweed.store(f"deltawire/{uuid.uuid4()}/source")
                for number in (1, 2, 3):
                    write(source, number, encoding=encoding)
                write_base(source / "weight_v000004", HISTORY[4], index={})
                if case == "a tensor that the base lacks":
                    mapped(lambda names: names.update({"worm.weight": names.pop("norm.weight")}))(
                        source / "weight_v000002"
                    )
                damage(source / "weight_v000002")
                for path in sorted(path for path in source.rglob("*") if path.is_file()):
                    bucket.put(str(path.relative_to(source)), path.read_bytes())
                with Importer(bucket, source / "run", base=base) as importer:
                    versions = importer.follow(once=True)
                    assert [next(versions).source_version for _ in range(3)] == ["0", "1", "4"], case
                    with pytest.raises(error, match="weight_v000002"):
                        next(versions)
                live = blank(HISTORY[4])
                dw.Replica(source / "run").sync(live, 2)
                assert same(live, HISTORY[4])
