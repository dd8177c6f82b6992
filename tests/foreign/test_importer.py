"""deltawire.foreign: versions of other systems become versions of a run, bit for bit, whatever happens on the way."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tarfile
import uuid
from collections import deque
from collections.abc import Callable
from contextlib import closing
from itertools import islice
from pathlib import Path

import pytest
import writers
from writers import Model, model, trained, write_base, write_delta, write_skyrl

import deltawire as dw
from deltawire.bucket.replay import checkout
from deltawire.errors import (
    CorruptStream,
    DivergedRun,
    MissingBase,
    ObjectNotFound,
    ObjectTooLarge,
    StoreUnavailable,
    Unsupported,
)
from deltawire.foreign import Imported, Importer
from deltawire.foreign.version import _Memory
from deltawire.store import Fetched, Level, LocalStore, ObjectStore
from deltawire.trainer import pipeline
from deltawire_wordle.seaweed import SeaweedFS
from interrupting import Interrupted, raising_at_each_line
from support import blank, same

GOLDEN = Path(__file__).parent / "golden"


def steps(count: int, seed: int = 0) -> list[Model]:
    made = [model(seed)]
    for step in range(1, count):
        made.append(trained(made[-1], seed + step))
    return made


def write_all(source: Path, history: list[Model], first: int = 1) -> None:
    for number in range(first, len(history)):
        write_delta(source, number, *history[number - 1 : number + 1])


def take(source: Path, run: Path, base: Path | None = None) -> list[Imported]:
    with Importer(source, run, base=base) as importer:
        return [*importer.follow(once=True)]


def numbers(done: list[Imported]) -> list[tuple[str, str, int]]:
    return [(each.kind, each.source_version, each.published.version) for each in done]


def weights_of(run: Path, version: int) -> Model:
    live = blank(model())
    assert dw.Replica(run).sync(live, version) == version
    return live


def golden_digests(where: Path) -> list[str]:
    """The hash of each version, as in sha256.json."""
    run, found = dw.Run.open(where), []
    for version in run.listed():
        state, whole = checkout(run, version), hashlib.sha256()
        for tensor in run.schema.tensors:
            whole.update(tensor.name.encode() + state.bits(tensor.name).tobytes())
        found.append(whole.hexdigest())
    return found


# ── what is read ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("encoding", ("xor", "overwrite"))
@pytest.mark.parametrize("algorithm", writers.CHECKSUMS)
def test_versions_are_the_weights_that_were_written(tmp_path: Path, encoding: str, algorithm: str) -> None:
    history = steps(4)
    base = write_base(tmp_path / "base", history[0])
    for number in range(1, 4):
        old, new = history[number - 1 : number + 1]
        write_delta(tmp_path / "source", number, old, new, encoding, algorithm, files=number)
    done = take(tmp_path / "source", tmp_path / "run", base)
    assert numbers(done) == [("base", "0", 0), ("delta", "1", 1), ("delta", "2", 2), ("delta", "3", 3)]
    for version, weights in enumerate(history):
        assert same(weights_of(tmp_path / "run", version), weights)
    manifest = dw.Run.open(tmp_path / "run").manifest(3)
    assert [file.name for file in manifest.files] == ["config.json"]
    assert (manifest.step, manifest.metrics["source_version"]) == (3, 3.0)


@pytest.mark.parametrize("name", [path.stem for path in sorted(GOLDEN.glob("*.tar"))])
def test_what_other_systems_wrote_is_imported_bit_for_bit(tmp_path: Path, name: str) -> None:
    """tests/foreign/golden/README says what wrote these."""
    with tarfile.open(GOLDEN / f"{name}.tar") as archive:
        archive.extractall(tmp_path / "source", filter="data")
    done = take(tmp_path / "source", tmp_path / "run", GOLDEN / "base")
    assert [each.published.version for each in done] == [*range(11)]
    assert {each.kind for each in done[1:]} == ({"delta", "full"} if "modelexpress" in name else {"delta"})
    assert golden_digests(tmp_path / "run") == json.loads((GOLDEN / "sha256.json").read_text())


def test_full_weights_begin_a_run_and_need_no_base(tmp_path: Path) -> None:
    history = steps(4)
    full = write_base(tmp_path / "source" / "weight_v000001", history[1], index={"total_size": 1})
    write_delta(tmp_path / "source", 2, *history[1:3])
    assert numbers(take(tmp_path / "source", tmp_path / "run")) == [("full", "1", 0), ("delta", "2", 1)]
    assert same(weights_of(tmp_path / "run", 1), history[2])
    assert [file.name for file in dw.Run.open(tmp_path / "run").manifest(0).files] == ["config.json"]
    # a file that comes later does not make it another version
    (full / "README.md").write_text("trained here")
    assert take(tmp_path / "source", tmp_path / "run") == []
    # one file without an index, as save_pretrained writes small models
    write_base(tmp_path / "source" / "weight_v000003", history[3])
    assert numbers(take(tmp_path / "source", tmp_path / "run")) == [("full", "3", 2)]
    assert same(weights_of(tmp_path / "run", 2), history[3])
    assert (full / "config.json").read_bytes() == b'{"model_type": "toy"}'


def test_stitch_says_how_far_versions_are_out(tmp_path: Path) -> None:
    history, source, run = steps(4), tmp_path / "source", tmp_path / "run"
    base = write_base(tmp_path / "base", history[0])
    write_all(source / "updates", history)
    (source / "latest").write_text("weight_v000002\n")
    assert [name for _, name, _ in numbers(take(source, run, base))] == ["0", "1", "2"]
    (source / "latest").write_text("000003")
    assert numbers(take(source, run, base)) == [("delta", "3", 3)]
    # another training, in a folder of its own: it begins at the base again
    other = steps(3, seed=50)
    other[0] = history[0]
    other[1] = trained(history[0], 99)
    other[2] = trained(other[1], 100)
    write_all(source / "chat-2", other)
    (source / "latest").write_text("chat-2/weight_v000002")
    assert numbers(take(source, run, base)) == [("delta", "1", 4), ("delta", "2", 5)]
    assert same(weights_of(run, 5), other[2])
    (source / "latest").write_text("chat-2/weight_v000000")
    assert take(source, run, base) == []


def test_stitch_in_a_bucket(tmp_path: Path, seaweed: SeaweedFS) -> None:
    """What slime wrote, where stitch's store puts it: below updates/, then `latest`, which names run and version."""
    with tarfile.open(GOLDEN / "slime-xor.tar") as archive:
        archive.extractall(tmp_path / "written", filter="data")
    source = seaweed.store(f"deltawire/{uuid.uuid4()}/root")
    source.put("latest", b"run-1/weight_v000000")
    with Importer(source, tmp_path / "run", base=GOLDEN / "base") as importer:
        assert [each.kind for each in importer.follow(once=True)] == ["base"]
        for number in range(1, 11):
            for path in sorted((tmp_path / "written" / f"weight_v{number:06d}").iterdir()):
                source.put(f"updates/{path.parent.name}/{path.name}", path.read_bytes())
            if number % 2:
                # what is not out yet is not imported
                assert [*importer.follow(once=True)] == []
            else:
                source.put("latest", f"run-1/weight_v{number:06d}".encode())
                assert len([*importer.follow(once=True)]) == 2
    assert golden_digests(tmp_path / "run") == json.loads((GOLDEN / "sha256.json").read_text())


def test_a_bucket_and_skyrl(tmp_path: Path) -> None:
    history = steps(4)
    base = write_base(tmp_path / "base", history[0])
    for number in range(1, 4):
        write_skyrl(tmp_path / "source", number, *history[number - 1 : number + 1])
    bucket = ObjectStore.from_url(f"memory://{tmp_path.name}")
    for path in sorted((tmp_path / "source").rglob("*.*")):
        bucket.put(str(path.relative_to(tmp_path / "source")), path.read_bytes())
    with Importer(bucket, tmp_path / "run", base=base) as importer:
        assert len([*importer.follow(once=True)]) == 4
    assert same(weights_of(tmp_path / "run", 3), history[3])


@pytest.fixture
def streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every change is too dense to be captured."""
    monkeypatch.setattr(pipeline, "most_pending", lambda nbytes: 1)


@pytest.mark.usefixtures("streamed")
def test_a_dense_version_is_streamed(tmp_path: Path) -> None:
    history, source, run = steps(4), tmp_path / "source", tmp_path / "run"
    base = write_base(tmp_path / "base", history[0])
    write_all(source, history[:3])
    broken = write_delta(source, 3, *history[2:4], payloads={"norm.weight": b"no zstd frame"})
    with pytest.raises(CorruptStream, match=r"norm\.weight"):
        take(source, run, base)
    shutil.rmtree(broken)
    write_delta(source, 3, *history[2:4], "overwrite")
    take(source, run)
    for version, weights in enumerate(history):
        assert same(weights_of(run, version), weights)


def test_memory_is_lent_again_only_when_nobody_reads_it() -> None:
    memory = _Memory()
    first = memory.lend(64)
    first[:] = 7
    part = first.view("<u2").reshape(4, 8)[1:3].reshape(-1)[4:8]
    address = first.ctypes.data
    del first
    # `part` still needs it
    assert memory.lend(64).ctypes.data != address
    held = [memory.lend(64) for _ in range(3)]
    for other in held:
        other[:] = 0
    assert part.tolist() == [0x0707] * 4
    del part
    again = [memory.lend(32) for _ in range(3)]
    assert address in [each.ctypes.data for each in again]


# ── over time ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_it_continues_after_the_version_imported_last(tmp_path: Path) -> None:
    history, source, run = steps(6), tmp_path / "source", tmp_path / "run"
    base = write_base(tmp_path / "base", history[0])
    write_all(source, history[:3])
    with Importer(source, run, base=base) as importer:
        versions = importer.follow(poll=0.01)
        assert [next(versions).source_version for _ in range(3)] == ["0", "1", "2"]
        write_delta(source, 3, *history[2:4])
        assert next(versions).source_version == "3"
    assert take(source, run) == []
    write_all(source, history[:5], 4)
    # what is behind may be pruned
    for number in (1, 2, 3):
        shutil.rmtree(source / f"weight_v{number:06d}")
    write_all(source, history, 5)
    assert numbers(take(source, run)) == [("delta", "4", 4), ("delta", "5", 5)]
    assert same(weights_of(run, 5), history[5])


@pytest.mark.parametrize("later", (False, True))
def test_an_import_at_every_line(tmp_path: Path, later: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the base, or of a version after it: the program goes on, and each version is imported once."""
    monkeypatch.setenv("DELTAWIRE_WRITER_RENEWAL", "0.1")
    history, source = steps(3), tmp_path / "source"
    base = write_base(tmp_path / "base", history[0])
    write_all(source, history)
    digests = [str(dw.digest_of(dw.ModelView(weights))) for weights in history]

    def operation(interrupted: Interrupted) -> None:
        store, made = ObjectStore.from_url(f"memory://{uuid.uuid4()}"), list[Importer]()
        interrupted(lambda: made.append(Importer(source, store, base=base)))
        importer = made[0] if made else Importer(source, store, base=base)

        def take(count: int) -> None:
            with closing(importer.follow(once=True)) as versions:
                deque(islice(versions, count), maxlen=0)

        if later:
            take(1)
        interrupted(lambda: take(2))
        take(9)
        interrupted(importer.close)
        importer.close()
        run = dw.Run.open(store)
        manifests = [run.manifest(version) for version in run.listed()]
        assert [manifest.digest for manifest in manifests] == digests
        assert [manifest.metrics["source_version"] for manifest in manifests] == [0, 1, 2]
        assert dw.verify(run).ok

    where = ["_open", "follow", "_publish", "_publish_base", "_commit", "close"]
    assert len(raising_at_each_line([getattr(Importer, name) for name in where], operation)) > 30


@pytest.mark.parametrize("follows", (True, False))
@pytest.mark.parametrize("longer", (True, False))
def test_a_source_that_was_wiped_begins_at_the_base(tmp_path: Path, follows: bool, longer: bool) -> None:
    history, source, run = steps(4), tmp_path / "source", tmp_path / "run"
    again = [history[0]]
    for step in range(5 if longer else 2):
        again.append(trained(again[-1], 70 + step))
    base = write_base(tmp_path / "base", history[0])
    write_all(source, history)
    importer = Importer(source, run, base=base)
    versions = importer.follow(poll=0.01)
    for _ in range(4):
        next(versions)
    if not follows:
        importer.close()
        importer = Importer(source, run, base=base)
        versions = importer.follow(poll=0.01)
    shutil.rmtree(source)
    write_all(source, again)
    with importer:
        came = [next(versions) for _ in again[1:]]
    assert numbers(came) == [("delta", str(n), 3 + n) for n in range(1, len(again))]
    for number, weights in enumerate(again[1:], 4):
        assert same(weights_of(run, number), weights)
    assert take(source, run, base) == []


@pytest.mark.parametrize("write", (write_delta, write_skyrl))
def test_a_step_that_changed_nothing_is_another_one_after_a_wipe(tmp_path: Path, write: Callable[..., Path]) -> None:
    """It has no checksums, and the step before it may have been another one."""
    start, source, run = model(), tmp_path / "source", tmp_path / "run"
    base = write_base(tmp_path / "base", start)
    for seed in (1, 2):
        first = trained(start, seed)
        write(source, 1, start, first)
        write(source, 2, first, first)
        take(source, run, base)
        # what changed nothing is not what says so
        assert take(source, run, base) == []
        if seed == 1:
            shutil.rmtree(source)
    write(source, 3, first, last := {**first, "norm.weight": trained(first, 3, 0.5)["norm.weight"]})
    assert numbers(take(source, run, base)) == [("delta", "3", 5)]
    assert same(weights_of(run, 5), last)


def test_a_training_that_was_resumed_goes_on_from_the_checkpoint_that_is_given(tmp_path: Path) -> None:
    history, source, run = steps(4), tmp_path / "source", tmp_path / "run"
    write_all(source, history)
    take(source, run, write_base(tmp_path / "base", history[0]))
    # begun again at version 2, with what is written from there on
    again = [history[2], trained(history[2], 80), trained(history[2], 81)]
    shutil.rmtree(source)
    write_delta(source, 3, again[0], again[1])
    saved = write_base(tmp_path / "saved", again[0])
    with pytest.raises(MissingBase, match="--base-version"):
        take(source, run, saved)
    for at, first in ((run, 4), (tmp_path / "new", 0)):
        with Importer(source, at, base=saved, base_version=2) as importer:
            done = numbers([*importer.follow(once=True)])
        assert done[-1] == ("delta", "3", first or 1)
        assert same(weights_of(at, first or 1), again[1])
    # pruned behind it, but for one that has full weights
    shutil.rmtree(source / "weight_v000003")
    write_base(source / "weight_v000001", history[1], index={})
    write_delta(source, 4, again[1], again[2])
    assert numbers(take(source, run)) == [("delta", "4", 5)]
    assert same(weights_of(run, 5), again[2])


def test_versions_without_numbers_are_in_the_order_in_which_they_build_on_each_other(tmp_path: Path) -> None:
    history, source, run = steps(5), tmp_path / "source", tmp_path / "run"
    base = write_base(tmp_path / "base", history[0])
    names = ("the-base", "zulu", "yankee", "xray", "whisky")

    def write(number: int) -> None:
        folder = write_delta(
            source, number, *history[number - 1 : number + 1], "xor", "adler32",
            name=names[number], version=names[number], base=names[number - 1],
        )  # fmt: skip
        for path in folder.iterdir():
            # copied: all at one moment
            os.utime(path, (1_700_000_000, 1_700_000_000))

    for number in (1, 2, 3):
        write(number)
    (source / "notes").mkdir()
    assert [each.name for each in take(source, run, base)] == ["base", "zulu", "yankee", "xray"]
    write(4)
    assert [each.name for each in take(source, run)] == ["whisky"]
    assert same(weights_of(run, 4), history[4])


def test_a_poll_costs_few_requests(tmp_path: Path) -> None:
    history, source = steps(6), tmp_path / "source"
    base = write_base(tmp_path / "base", history[0])
    names = [f"uid-{n}" for n in range(6)]
    looked: list[str] = []

    class Counted(LocalStore):
        def folders(self, prefix: str = "") -> Level:
            looked.append(prefix)
            return super().folders(prefix)

    for numbered in (True, False):
        shutil.rmtree(source, ignore_errors=True)
        for n in range(1, 6):
            if numbered:
                write_delta(source, n, *history[n - 1 : n + 1])
            else:
                write_delta(
                    source, n, *history[n - 1 : n + 1], name=names[n], version=names[n], base=names[n - 1]
                )  # fmt: skip
        with Importer(Counted(source), tmp_path / f"run-{numbered}", base=base) as importer:
            assert len([*importer.follow(once=True)]) == 6
            looked.clear()
            assert [*importer.follow(once=True)] == []
        # the root, and the version imported last
        assert len(looked) == 2


def test_an_address_with_versions_of_its_own_is_refused(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", model())
    with dw.Publisher(tmp_path / "run") as publisher:
        publisher.publish(model())
    with pytest.raises(DivergedRun, match="not imported"):
        Importer(tmp_path / "source", tmp_path / "run", base=base)


def test_nothing_is_published_from_a_source_that_cannot_be_listed(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", model())
    with (
        Importer("https://127.0.0.1:1/deltas", tmp_path / "run", base=base) as importer,
        pytest.raises(Unsupported, match="listings"),
    ):
        [*importer.follow(once=True)]
    assert not (tmp_path / "run").exists()


def test_a_folder_may_appear_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    history, source = steps(3), tmp_path / "source"
    base = write_base(tmp_path / "base", history[0])
    with Importer(source, tmp_path / "run", base=base) as importer:
        assert len([*importer.follow(once=True)]) == 1
        assert [*importer.follow(once=True)] == []
        assert [record.message for record in caplog.records if "has no version yet" in record.message] == [
            f"file://{source} has no version yet: no folder like weight_v000001 or delta-00000001 with an index or "
            "manifest"
        ]
        assert not source.exists()
        write_all(source, history)
        versions = importer.follow(poll=0.01)
        assert [next(versions).source_version for _ in range(2)] == ["1", "2"]


def test_a_store_whose_pointer_comes_and_goes_is_looked_at_again(tmp_path: Path) -> None:
    history, source = steps(3), tmp_path / "source"
    base = write_base(tmp_path / "base", history[0])
    write_all(source / "updates", history)
    reads = iter(("gone", "large", "wrong"))

    class Pointed(LocalStore):
        def get(self, key: str, *, limit: int | None = None) -> Fetched:
            match next(reads, "") if key == "latest" else "":
                case "gone":
                    raise ObjectNotFound("latest was deleted")
                case "large":
                    raise ObjectTooLarge("latest is too large")
                case "wrong":
                    return Fetched(b"weight_v", None)
            return super().get(key, limit=limit)

    (source / "latest").write_text("run-1/weight_v000002")
    with Importer(Pointed(source), tmp_path / "run", base=base) as importer:
        versions = importer.follow(poll=0.01)
        assert [next(versions).source_version for _ in range(3)] == ["0", "1", "2"]


def test_without_its_base_a_delta_is_not_imported(tmp_path: Path) -> None:
    history = steps(2)
    write_all(tmp_path / "source", history)
    with pytest.raises(MissingBase, match="--base"):
        take(tmp_path / "source", tmp_path / "run")


@pytest.mark.parametrize("dense", (False, True))
def test_a_store_that_fails_in_between_loses_nothing(
    tmp_path: Path, dense: bool, request: pytest.FixtureRequest
) -> None:
    if dense:
        request.getfixturevalue("streamed")
    history = steps(3)
    base = write_base(tmp_path / "base", history[0])
    write_all(tmp_path / "source", history)

    class Failing(LocalStore):
        failures = 0

        def put(self, key: str, data: object) -> None:
            if key.startswith("deltas/") and self.failures:
                self.failures -= 1
                raise StoreUnavailable("not now")
            super().put(key, data)  # type: ignore[arg-type]

    run = Failing(tmp_path / "run")
    with Importer(tmp_path / "source", run, base=base) as importer:
        versions = importer.follow(poll=0.01)
        next(versions)
        run.failures = 2
        assert [next(versions).source_version for _ in range(2)] == ["1", "2"]
    newest = dw.Run.open(tmp_path / "run").newest()
    assert newest is not None
    for version, weights in zip((newest - 1, newest), history[1:], strict=True):
        live = blank(weights)
        dw.Replica(tmp_path / "run").sync(live, version)
        assert same(live, weights)
