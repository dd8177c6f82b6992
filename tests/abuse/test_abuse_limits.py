"""Sizes that a run declares: refused before anything of that size is read or allocated.

What matters is the memory of a process that meets such a run, so each case is a child process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from forge import ForgedRun

from deltawire.bucket.run import Run
from deltawire.core import keys
from deltawire.core.errors import (
    DeltawireError,
    ManifestError,
    Misconfigured,
    ModelTooLarge,
    ObjectTooLarge,
    PublishFailed,
    SchemaMismatch,
    UnsafeName,
)
from deltawire.core.manifest import MAX_FILE, parse_manifest
from deltawire.replica import Replica
from deltawire.store import LocalStore, Store
from deltawire.trainer import Publisher
from support import blank, model, publish, trained

Json = dict[str, Any]

# It imports once what commands need, then forks a child for each. RLIMIT_DATA counts what is allocated, neither code
# nor what threads reserve.
FORKS = """
import json, os, resource, sys
from deltawire.cli import main
import deltawire.bucket.verify, deltawire.bucket.checkpoint_folder, deltawire.bucket.prune
import deltawire.replica, rich.progress

# RLIMIT_DATA does not count files in memory
del os.memfd_create

for line in sys.stdin:
    task = json.loads(line)
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    for stream in (1, 2):
        os.dup2(os.open(task["files"][stream - 1], os.O_WRONLY | os.O_CREAT), stream)
    used = next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmData"))
    most = used + task["limit"]
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    sys.argv = ["deltawire", *task["arguments"]]
    main()
    break
"""
BEYOND = 400 << 20
"""Bytes that a command may take beyond what it has after its imports; threads' stacks are in it."""

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    """Runs a command in a process with little memory."""
    environment = {**os.environ, "DELTAWIRE_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
    with subprocess.Popen(
        [sys.executable, "-c", FORKS], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        tasks, codes = process.stdin, process.stdout

        def run(*arguments: str, limit: int = BEYOND) -> subprocess.CompletedProcess[str]:
            files = [tmp_path_factory.mktemp("said") / name for name in ("out", "err")]
            task = {"arguments": arguments, "limit": limit, "files": [str(file) for file in files]}
            print(json.dumps(task), file=tasks, flush=True)
            code = int(codes.readline())
            return subprocess.CompletedProcess(arguments, code, *(file.read_text() for file in files))

        yield run
        tasks.close()


@pytest.fixture
def run(tmp_path: Path) -> ForgedRun:
    return ForgedRun(LocalStore(tmp_path / "run"))


def sparse_object(run: ForgedRun, key: str, size: int) -> None:
    """An object of zeros that takes no disk."""
    path = Path(str(run.store.root)) / key  # type: ignore[attr-defined]
    path.parent.mkdir(exist_ok=True)
    with open(path, "wb") as file:
        file.truncate(size)


# ── objects ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_companion_file_of_3_gb(run: ForgedRun, tmp_path: Path, command: Command) -> None:
    key = keys.file("0" * 32)
    sparse_object(run, key, 3 << 30)
    entry = {"name": "tokenizer.json", "key": key, "size": 3 << 30, "hash": "0" * 32}
    run.edit_manifest(lambda manifest: manifest.update(files=[entry]))
    for arguments in (("checkout", run.store.url, "-o", str(tmp_path / "out")), ("verify", run.store.url)):
        done = command(*arguments)
        assert done.returncode == 3, done.stderr
        assert "tokenizer.json" in done.stderr + done.stdout
    assert not (tmp_path / "out").exists()


def test_companion_files_of_many_megabytes_are_streamed(tmp_path: Path, command: Command) -> None:
    """As large as files may be, and several: none is held in memory twice, nor all of them at once."""
    store = LocalStore(tmp_path / "run")
    files = {f"tokenizer-{n}.json": bytes([n]) * MAX_FILE for n in range(4)}
    publish(store, [model()], files=files)
    done = command("checkout", store.url, "-o", str(tmp_path / "out"), limit=256 << 20)
    assert done.returncode == 0, done.stderr
    assert all((tmp_path / "out" / name).read_bytes() == data for name, data in files.items())


def test_one_object_that_is_named_forty_times(run: ForgedRun, command: Command) -> None:
    size = 60 << 20
    key = keys.anchor(2, "0123abcd")
    sparse_object(run, key, size)
    entry = {"key": key, "size": size, "hash": blake3(bytes(size)).hexdigest(length=16)}
    run.edit_manifest(lambda manifest: manifest.update(links=[{"kind": "anchor", "objects": [entry] * 40}]))
    done = command("verify", run.store.url)
    assert done.returncode == 3, done.stderr
    assert "ManifestError" in done.stdout


def test_many_objects_of_one_link_share_the_memory_of_one(tmp_path: Path, command: Command) -> None:
    """Each would be small enough to stay in memory, were it the only one."""
    store = LocalStore(tmp_path / "run")
    run = ForgedRun(store)
    schema = json.loads(store.get(keys.RUN).data)
    # a model that is large enough for eight objects of 40 MB
    schema["schema"]["tensors"] = [["w", "U8", [320 << 20]]]
    from deltawire.core.schema import Schema, TensorSpec

    schema["schema_hash"] = Schema.build([TensorSpec("w", "U8", (320 << 20,))]).hash
    store.put(keys.RUN, json.dumps(schema).encode())
    size, objects = 40 << 20, []
    hash = blake3(bytes(size)).hexdigest(length=16)
    for n in range(8):
        key = keys.anchor(2, "0123abcd", (n, 8))
        sparse_object(run, key, size)
        objects.append({"key": key, "size": size, "hash": hash})
    links = [{"kind": "anchor", "objects": objects}]
    for version in (0, 1, 2):
        run.edit_manifest(lambda m: m.update(schema=schema["schema_hash"], recent=[], links=links), version)
    for version in (0, 1):
        store.delete(keys.manifest(version))
    store.put(keys.PRUNED, json.dumps({"run": schema["run"], "versions": [[0, 1]]}).encode())
    done = command("verify", store.url, "--quick", limit=200 << 20)
    # eight objects were fetched and hashed, and none of them is a safetensors file
    assert done.returncode == 3, done.stderr
    assert "header" in done.stdout


# ── what a manifest may name ─────────────────────────────────────────────────────────────────────────────────────────


def first(manifest: Json) -> Json:
    return manifest["links"][0]["objects"][0]


def file(**changes: Any) -> Json:
    return {"name": "config.json", "key": keys.file("0" * 32), "size": 2, "hash": "0" * 32, **changes}


LIES: dict[str, tuple[Callable[[Json], Any], type[DeltawireError]]] = {
    "an_object_twice": (lambda m: m["links"][0].update(objects=[first(m)] * 2), ManifestError),
    "an_object_in_two_links": (
        lambda m: m["links"].append({"kind": "anchor", "objects": [first(m)]}),
        ManifestError,
    ),
    "a_link_twice": (
        lambda m: m["links"].append({**m["links"][0], "objects": [{**first(m), "key": keys.delta(1, 2, "0" * 8)}]}),
        ManifestError,
    ),
    "an_object_larger_than_any_delta": (lambda m: first(m).update(size=1 << 40), ManifestError),
    "a_header_of_a_gigabyte": (lambda m: first(m).update(head_size=1 << 30), ManifestError),
    "a_thousand_links": (
        lambda m: m.update(
            links=[
                {"kind": "delta", "base": n, "objects": [{**first(m), "key": keys.delta(n, 2, f"{n:08x}")}]}
                for n in (0, 1)
            ]
            + [{"kind": "reference", "source": str(n)} for n in range(1000)]
        ),
        ManifestError,
    ),
    "a_million_metrics": (lambda m: m.update(metrics={str(n): 0.0 for n in range(100_000)}), ManifestError),
    "a_reference_of_a_petabyte": (
        lambda m: m.update(links=[{"kind": "reference", "source": "/x", "nbytes": 1 << 50}]),
        ManifestError,
    ),
    "a_file_of_3_gb": (lambda m: m.update(files=[file(size=3 << 30)]), ManifestError),
    "a_file_of_less_than_nothing": (lambda m: m.update(files=[file(size=-1)]), ManifestError),
    "a_file_under_another_key": (lambda m: m.update(files=[file(hash="1" * 32)]), ManifestError),
    "a_file_twice": (lambda m: m.update(files=[file(), file()]), ManifestError),
    "files_of_64_gb": (
        lambda m: m.update(files=[file(name=f"{n}.json", size=MAX_FILE) for n in range(1000)]),
        ManifestError,
    ),
    "a_file_name_of_300_characters": (lambda m: m.update(files=[file(name="x" * 295 + ".json")]), UnsafeName),
    "a_file_name_of_300_bytes": (lambda m: m.update(files=[file(name="ü" * 148 + ".json")]), UnsafeName),
}


@pytest.mark.parametrize("name", LIES)
def test_what_a_manifest_cannot_name(store: Store, name: str) -> None:
    edit, error = LIES[name]
    run = ForgedRun(store)
    run.edit_manifest(edit)
    with pytest.raises(error):
        Run.open(store).manifest(2)


def test_a_manifest_larger_than_any_is_not_read(store: Store) -> None:
    run = ForgedRun(store)
    run.edit_manifest(lambda m: json.dumps(m).encode() + b" " * (5 << 20))
    with pytest.raises(ObjectTooLarge):
        Run.open(store).manifest(2)


def test_history_that_lies_about_sizes_is_found_out(store: Store) -> None:
    """Steps are fetched ahead by the sizes that history states: a lie would have everything fetched at once."""
    run = ForgedRun(store)

    def lie(manifest: Json) -> None:
        for summary in manifest["recent"]:
            for link in summary[6]:
                link[2] = 0

    run.edit_manifest(lie)
    with pytest.raises(ManifestError, match="history says"):
        Replica(store, heartbeat=0).sync(blank(run.versions[0]))


def test_a_publisher_commits_nothing_that_a_reader_refuses(store: Store) -> None:
    with Publisher(store) as publisher:
        with pytest.raises(ManifestError, match="metrics"):
            publisher.publish(model(), metrics={str(n): 0.0 for n in range(2000)}).result(120)
        with pytest.raises(PublishFailed):
            publisher.publish(model())
        assert publisher.publish(trained(model(), 1)).result(120).version == 0
    assert parse_manifest(store.get(keys.manifest(0)).data, 0, Run.open(store).info)
    with pytest.raises(ObjectTooLarge), Publisher(store, files={"config.json": bytes(MAX_FILE + 1)}) as publisher:
        publisher.publish(trained(model(), 2)).result(120)
    with pytest.raises(UnsafeName), Publisher(store, files={"x" * 300 + ".json": b"{}"}) as publisher:
        publisher.publish(trained(model(), 2)).result(120)


# ── the model ────────────────────────────────────────────────────────────────────────────────────────────────────────


def declare(store: Store, elements: int) -> None:
    from deltawire.core.schema import Schema, TensorSpec

    info = json.loads(store.get(keys.RUN).data)
    schema = Schema.build([TensorSpec("w", "U8", (elements,))])
    info |= {"schema": {"tensors": [["w", "U8", [elements]]], "ties": {}}, "schema_hash": schema.hash}
    store.put(keys.RUN, json.dumps(info).encode())


def test_a_model_that_is_larger_than_allowed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    run = ForgedRun(store)
    monkeypatch.setenv("DELTAWIRE_MAX_MODEL_GB", "0.000001")
    for work in (
        lambda: Run.open(store),
        lambda: Replica(store, heartbeat=0).sync(blank(run.versions[0])),
        lambda: Publisher(store).publish(run.versions[0]).result(120),
    ):
        with pytest.raises(ModelTooLarge, match="DELTAWIRE_MAX_MODEL_GB"):
            work()
    assert Run.open(store, max_model_gb=1)
    assert Replica(store, heartbeat=0, max_model_gb=1).sync(blank(run.versions[0])) == 2
    with pytest.raises(ModelTooLarge):
        Run.open(store, max_model_gb=1e-6)
    monkeypatch.setenv("DELTAWIRE_MAX_MODEL_GB", "many")
    with pytest.raises(Misconfigured, match="DELTAWIRE_MAX_MODEL_GB"):
        Run.open(store)
    monkeypatch.delenv("DELTAWIRE_MAX_MODEL_GB")
    declare(store, 5 * 10**12)
    with pytest.raises(ModelTooLarge):
        Run.open(store)


def test_a_model_that_is_larger_than_this_machine(run: ForgedRun, tmp_path: Path, command: Command) -> None:
    """It may be looked at, and nothing of its size is allocated."""
    declare(run.store, 3 * 10**12)
    schema = json.loads(run.store.get(keys.RUN).data)["schema_hash"]
    for version in range(3):
        run.edit_manifest(lambda m: m.update(schema=schema), version)
    assert command("log", run.store.url).returncode == 0
    done = command("checkout", run.store.url, "-o", str(tmp_path / "out"))
    assert done.returncode == 3
    assert "of memory" in done.stderr


def test_a_schema_of_more_tensors_than_any_model_has(store: Store) -> None:
    ForgedRun(store)
    info = json.loads(store.get(keys.RUN).data)
    info["schema"]["tensors"] = [[f"{n:07d}", "U8", []] for n in range(300_000)]
    store.put(keys.RUN, json.dumps(info).encode())
    with pytest.raises(SchemaMismatch, match="tensors"):
        Run.open(store)
