"""What is fuzzed. A target makes cases from its corpus and runs them.

`run` returns, or raises a DeltawireError: both are fine. Anything else it raises is a finding: `Wrong` for wrong bits
and bad answers, a foreign exception for itself.

A case is self-contained: replaying one needs no random numbers, only the corpus, which is the same in every process.
"""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, ClassVar, Protocol
from unittest import mock

import mutate
import numpy as np
import typer
from safetensors import SafetensorError, deserialize

import deltawire as dw
from deltawire.bucket import parts
from deltawire.bucket.run import Run
from deltawire.bucket.trust import Trust, delegate
from deltawire.bucket.versions import set_tag
from deltawire.cli import app
from deltawire.core import change, container, full, keys
from deltawire.core.codecs import ENCODINGS
from deltawire.core.describe import FileContents
from deltawire.core.dtypes import lookup
from deltawire.core.errors import DeltawireError
from deltawire.core.held import Held, Part
from deltawire.core.manifest import Blob
from deltawire.core.signing import MANIFEST, SigningKey
from deltawire.core.sparse import INDEX, DeltaFile
from deltawire.keeper.keeper import Keeper, KeeperOptions
from deltawire.keeper.roster import RosterWriter
from deltawire.models import ModelView
from deltawire.replica import Replica
from deltawire.store import ObjectStore, Store
from deltawire.trainer import Publisher
from support import Model, blank, copy, history, same, trained

VERSIONS = 18
"""Of the run that is fuzzed: enough for a page of history."""


class Wrong(Exception):
    """An answer that no input may get: wrong bits, a server error, a touched weight."""


@dataclass(frozen=True)
class Case:
    """One input. `files` lie over those of the corpus; None removes one."""

    kind: str
    action: str
    files: dict[str, bytes | None]
    links: dict[str, str] = field(default_factory=dict)
    """Names that are no plain files: "fifo", "folder", or where a symbolic link leads."""

    def dump(self, **more: Any) -> str:
        def text(data: bytes | None) -> Any:
            with suppress(UnicodeDecodeError, AttributeError):
                return data.decode()  # type: ignore[union-attr]
            return None if data is None else {"base64": base64.b64encode(data).decode()}

        files = {name: text(data) for name, data in self.files.items()}
        value = {**more, "kind": self.kind, "action": self.action, "files": files, "links": self.links}
        return json.dumps(value, indent=1, ensure_ascii=True) + "\n"

    @classmethod
    def load(cls, text: str) -> Case:
        def data(value: Any) -> bytes | None:
            if isinstance(value, dict):
                return base64.b64decode(value["base64"])
            return None if value is None else value.encode()

        value = json.loads(text)
        return cls(value["kind"], value["action"], {k: data(v) for k, v in value["files"].items()}, value["links"])


class Target(Protocol):
    kinds: tuple[str, ...]

    def make(self, rng: Random, kind: str) -> Case: ...

    def run(self, case: Case) -> None: ...


@contextmanager
def fixed_marks() -> Iterator[None]:
    """The same run ids, writer's marks and times in every process."""
    count = iter(range(1, 1 << 30))
    with (
        mock.patch("secrets.token_hex", lambda size=8: f"{next(count) * 2654435761 % (1 << 32):0{2 * size}x}"),
        mock.patch("time.time", return_value=1_790_000_000.0),
    ):
        yield


# ── deltas ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Deltas:
    """`dw.decode`, and what `deltawire show FILE` reads, on deltas of every encoding."""

    kinds = tuple(f"delta-{encoding}" for encoding in ENCODINGS)

    def __init__(self) -> None:
        self.pairs = [tuple(history(2, changes=7)), (_wide(0), _wide(1)), (_wide(0), _wide(9))]
        self.corpus = {encoding: [dw.encode(old, new, encoding) for old, new in self.pairs] for encoding in ENCODINGS}

    def make(self, rng: Random, kind: str) -> Case:
        which = rng.randrange(len(self.pairs))
        blob = self.corpus[kind.removeprefix("delta-")][which]
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            blob = mutate.of_tensors(rng, blob)
        return Case(kind, f"decode {which}", {"delta.safetensors": blob})

    def run(self, case: Case) -> None:
        blob = case.files["delta.safetensors"] or b""
        old, new = self.pairs[int(case.action.split()[1])]
        failure = None
        try:
            result = dw.decode(blob, old)
        except DeltawireError as error:
            failure = error
        else:
            if not same(result, new):
                raise Wrong("decode returned other bits than were encoded")
        with suppress(DeltawireError):
            contents = FileContents(lambda start, length: blob[start : start + length], len(blob))
            contents.parts()
            contents.stats()
            contents.steps()
        if failure is not None:
            raise failure


def _wide(step: int) -> Model:
    """Enough weights of a trained model's kind for tiles, and a few that changed; `step` 9 changes nearly all."""
    rng = np.random.default_rng(5)
    bits = ((rng.standard_normal((96, 80)) * 0.02).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    where = rng.random(bits.shape) < (0.02 if step == 1 else 0.9)
    return {"w": np.where(where, bits + np.uint16(1), bits).astype(np.uint16) if step else bits}


class Parts:
    """What a reader fetches of an object that holds a part of the model, if the manifest names the head as it is."""

    kinds = ("parts of deltas", "parts of anchors")

    def __init__(self) -> None:
        old, new = _split(0), _split(1)
        self.schema = ModelView(old).schema
        self.held = Held([change.whole(self.schema.tensors[0])])
        anchor = full.anchor(map(change.whole, self.schema.tensors), ModelView(old).region, {}, part=1000)
        self.corpus = {
            self.kinds[0]: [dw.encode(old, new, encoding) for encoding in ENCODINGS],
            self.kinds[1]: [b"".join(anchor.chunks())],
        }

    def make(self, rng: Random, kind: str) -> Case:
        blob = rng.choice(self.corpus[kind])
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            blob = mutate.of_tensors(rng, blob)
        with suppress(DeltawireError):
            header = container.read_header(lambda start, length: blob[start : start + length], len(blob))
            index = header.items.get(INDEX)
            return Case(kind, str(header.size + (index.nbytes if index else 0)), {"object": blob})
        return Case(kind, str(rng.randrange(len(blob) + 10)), {"object": blob})

    def run(self, case: Case) -> None:
        data, head_size = case.files["object"] or b"", int(case.action)
        store = ObjectStore.from_url(f"memory://fuzz-parts-{os.getpid()}")
        store.put("object", data)
        hashes = [mutate.hash_of(part) for part in (data, data[:head_size])]
        blob = Blob("object", len(data), hashes[0], head_size, hashes[1])

        def needed(read: container.Read, size: int) -> list[Part] | None:
            if case.kind == self.kinds[0]:
                return DeltaFile(read, size, self.schema).needed(self.held)
            return full.needed(full.FullFile(read, size), self.schema, self.held)

        with mock.patch.object(parts, "SMALL", 0), mock.patch.object(parts, "GAP", 0):
            found = parts.fetch_parts(store, blob, needed)
        if found is None:
            return
        with found:
            for start, end in found.parts or ():
                if found.read(start, end - start) != data[start:end]:
                    raise Wrong("a part has other bytes than the object")
            if case.kind == self.kinds[0]:
                bits = {t.name: np.zeros(t.units, lookup(t.dtype).unit) for t in self.schema.tensors}
                for _ in DeltaFile(found.read, found.size, self.schema).changes(bits.__getitem__, 1, held=self.held):
                    pass
            else:
                anchor = full.Anchor([full.FullFile(found.read, found.size)], self.schema)
                anchor.region(change.whole(self.schema.tensors[0]))


def _split(step: int) -> Model:
    """Tensors of three dtypes, which are blocks of their own."""
    wide = _wide(step)["w"]
    more = {"bytes": np.arange(5000, dtype=np.uint8) % 251, "words": np.arange(3000, dtype=np.uint32)}
    return {"a": wide, **{name: bits + bits.dtype.type(step * (i + 1)) for i, (name, bits) in enumerate(more.items())}}


# ── runs ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Runs:
    """Whole runs with changed objects, by everything that reads one: replica, publisher and the commands."""

    kinds = (
        "run.json", "head", "manifest", "data", "history", "pruned", "heartbeat", "roster", "tag", "added",
        "records", "special files",
    )  # fmt: skip

    _KEYS: ClassVar = {
        "run.json": (keys.RUN,),
        "head": (keys.HEAD,),
        "manifest": (keys.VERSIONS,),
        "data": (keys.ANCHORS, keys.DELTAS, keys.FILES),
        "history": (keys.HISTORY,),
        "pruned": (keys.PRUNED,),
        "heartbeat": (keys.REPLICAS,),
        "roster": (keys.ROSTER,),
        "tag": (keys.TAGS,),
        "added": (keys.ADDED, keys.ADDED_PAGES),
    }
    _COMMANDS: ClassVar = {
        "log": ["log", "RUN"],
        "log json": ["log", "RUN", "--json"],
        "show": ["show", "RUN"],
        "show 9": ["show", "RUN@9", "--json"],
        "verify": ["verify", "RUN"],
        "prune": ["prune", "RUN", "--keep-last", "2"],
        "prune apply": ["prune", "RUN", "--keep-last", "2", "--grace", "0s", "--apply"],
        "fleet": ["fleet", "RUN"],
        "tag": ["tag", "RUN"],
        "show two": ["show", "RUN@best", "@latest"],
        "runs": ["runs", "HOME", "--json"],
        "checkout": ["checkout", "RUN", "-o", "OUT"],
        "checkout best": ["checkout", "RUN@best", "-o", "OUT"],
        "checkout 9": ["checkout", "RUN@9", "-o", "OUT"],
    }
    _READS = ("sync", "sync", "sync 3", "sync 15", "follow", "publish") * 2

    signs: str | None = None
    """Private key of the publisher."""
    keeper: SigningKey | None = None
    trust: Trust | None = None

    def __init__(self) -> None:
        self.models = history(VERSIONS, changes=7)
        self.next = trained(self.models[-1], 77)
        self.corpus = self._made()
        self.digests = {str(full.digest_of(ModelView(model))): model for model in (*self.models, self.next)}
        self._home = Path(tempfile.mkdtemp(prefix="deltawire-fuzz-"))

    def _made(self) -> dict[str, bytes]:
        store: Store = ObjectStore.from_url(f"memory://fuzz-{type(self).__name__}")
        files = {"config.json": b'{"model_type": "toy"}', "tokenizer.json": b"{}"}
        with (
            fixed_marks(),
            Publisher(store, anchor_ratio=1e9, anchor_every=8, files=files, sign=self.signs) as publisher,
        ):
            for step, weights in enumerate(self.models):
                publisher.publish(weights, step=step, metrics={"reward": 0.5}).result(60)
            Replica(store, id="a").sync(copy(self.models[0]))
            run = Run.open(store)
            set_tag(run, 12, "best")
            set_tag(run, 8, "first")
            self._keep(store, run)
            with mock.patch("deltawire.keeper.roster.LEAST", 1):
                RosterWriter(run).update()
        store.put(keys.PRUNED, json.dumps({"run": run.info.run, "versions": [[1, 3], [5, 7]]}).encode())
        made = {info.key: store.get(info.key).data for info in store.list()}
        for key, data in made.items():
            if key.startswith((keys.VERSIONS, keys.REPLICAS)):
                value = json.loads(data)
                value.pop("signature", None)
                made[key] = self._sealed(key, {**value, "timings": {"encode": 0.25}})
        return made

    def _sealed(self, key: str, value: dict[str, Any]) -> bytes:
        return json.dumps(value).encode()

    def _keep(self, store: Store, run: Run) -> None:
        """Add links, as a keeper does."""
        # few links make a page
        with mock.patch("deltawire.keeper.lease.SETTLE_S", 0.0), mock.patch("deltawire.keeper.announce.RECENT", 4):
            options = KeeperOptions(since=0, anchors=False, levels=2)
            keeper = Keeper(store, options, id="keeper", trust=self.trust, sign=self.keeper)
            for _ in keeper.once():
                pass
            keeper.close()
        store.delete(keys.replica("keeper"))

    def make(self, rng: Random, kind: str) -> Case:
        action = rng.choice((*self._COMMANDS, *self._READS))
        if kind == "special files":
            return self._special(rng, rng.choice(list(self._COMMANDS)))
        kinds = [kind] if kind != "records" else rng.choices([k for k in self._KEYS if k != "data"], k=3)
        changed: dict[str, bytes | None] = {}
        for each in kinds:
            self._change(rng, each, changed)
        return Case(kind, action, changed)

    def _change(self, rng: Random, kind: str, changed: dict[str, bytes | None]) -> None:
        candidates = [key for key in self.corpus if key.startswith(self._KEYS[kind])]
        # the newest versions are what everybody reads
        key = candidates[-1 - min(int(rng.expovariate(0.4)), len(candidates) - 1)]
        data = changed.get(key) or self.corpus[key]
        way = rng.random()
        if way < 0.04:
            changed[key] = None
        elif way < 0.07:
            changed[key] = self.corpus[rng.choice(list(self.corpus))]
        elif way < 0.12:
            self._plant(rng, key, data, changed)
        elif kind == "data":
            changed[key] = mutate.of_tensors(rng, data)
            if rng.random() < 0.9:
                self._refit(key, changed[key] or b"", changed)
        else:
            changed[key] = self._rehashed(rng, key, mutate.of_json(rng, data))

    def _plant(self, rng: Random, key: str, data: bytes, changed: dict[str, bytes | None]) -> None:
        """A copy under another number: far ahead, beyond all numbers, or under a name of no kind."""
        number = rng.choice((VERSIONS, VERSIONS + 1, 99, 2**20, 2**40, 10**18 - 1, 10**18, 10**30))
        folder, _, name = key.rpartition("/")
        place = rng.choice((f"{number:06d}.json", "x.json", name + ".bak", f"step_{number:06d}.{'a' * 8}.safetensors"))
        made = data
        with suppress(ValueError, TypeError, RecursionError):
            value = json.loads(data)
            value |= {"version": number, "parent": rng.choice((number - 1, VERSIONS - 1))}
            made = json.dumps(value).encode()
        changed[f"{folder}/{place}" if folder else place] = made
        if rng.random() < 0.5:
            run = json.loads(self.corpus[keys.RUN])["run"]
            changed[keys.HEAD] = json.dumps({"run": run, "version": number}).encode()

    def _refit(self, key: str, data: bytes, changed: dict[str, bytes | None]) -> None:
        """Make the manifests that name an object state its new size and hash."""
        for name, text in self.corpus.items():
            if name.startswith(keys.VERSIONS) and key.encode() in text:
                value = json.loads(text)
                for blob in (*value.get("files", ()), *(b for link in value["links"] for b in link.get("objects", ()))):
                    if blob["key"] == key:
                        blob |= {"size": len(data), "hash": mutate.hash_of(data)}
                        blob.pop("head_size", None), blob.pop("head_hash", None)
                changed[name] = json.dumps(value).encode()

    def _rehashed(self, rng: Random, key: str, data: bytes) -> bytes:
        if key == keys.RUN and rng.random() < 0.8:
            with suppress(Exception):
                from msgspec import convert, structs

                from deltawire.core.manifest import RunInfo

                value = json.loads(data)
                info = structs.replace(convert({**value, "schema_hash": ""}, RunInfo))
                return json.dumps({**value, "schema_hash": info.schema.hash}).encode()
        return data

    def _special(self, rng: Random, action: str) -> Case:
        """On a file system a name may be no plain file."""
        places = (keys.HEAD, keys.RUN, keys.PRUNED, *self.corpus, "replicas/b.json", "versions/000018.json")
        leads = ("fifo", "folder", "/dev/zero", "/dev/null", "/nowhere", "/proc/self/mem", "/etc", ".", "socket")
        return Case("special files", action, {}, {rng.choice(places): rng.choice(leads)})

    def run(self, case: Case) -> None:
        if case.action in self._COMMANDS:
            self._command(case)
        else:
            self._read(case)

    def _objects(self, case: Case) -> Iterator[tuple[str, bytes]]:
        for key, data in {**self.corpus, **case.files}.items():
            # where there is a roster, heartbeats are not read
            if key == keys.ROSTER and key not in case.files and case.kind != "roster":
                continue
            if data is not None and key not in case.links:
                yield key, data

    # ── in memory ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _read(self, case: Case) -> None:
        from deltawire.store import object as object_store

        url = f"memory://fuzz-{os.getpid()}"
        try:
            store = ObjectStore.from_url(url)
            for key, data in self._objects(case):
                with suppress(DeltawireError):  # names that no store takes
                    store.put(key, data)
            match case.action.split():
                case ["sync", *given]:
                    self._sync(store, copy(self.models[int(given[0])]) if given else blank(self.models[0]))
                case ["follow"]:
                    self._follow(store)
                case ["publish"]:
                    self._publish(store)
        finally:
            object_store._memory.pop(url.removeprefix("memory://"), None)

    def _sync(self, store: Store, live: Model) -> None:
        kept = copy(live)
        try:
            version = Replica(store, heartbeat=0, trust=self.trust).sync(live)
        except DeltawireError:
            # it may have come as far as another version; never in between
            if not same(live, kept):
                self._check(live)
            raise
        self._check(live)
        self._check_accepted(store, version)

    def _check_accepted(self, store: Store, version: int) -> None:
        """Anything goes that has the weights of a version."""

    def _follow(self, store: Store) -> None:
        stop, live = threading.Event(), copy(self.models[2])
        timer = threading.Timer(0.1, stop.set)
        timer.start()
        try:
            replica = Replica(store, heartbeat=0, trust=self.trust)
            for version in replica.follow(live, every=True, poll=0.01, stop=stop):
                self._check(live)
                self._check_accepted(store, version)
        finally:
            timer.cancel()
        self._check(live)

    def _publish(self, store: Store) -> None:
        with Publisher(store, anchor_ratio=1e9, sign=self.signs) as publisher:
            result = publisher.publish(self.next).result(30)
        live = blank(self.next)
        if Replica(store, heartbeat=0, trust=self.trust).sync(live, result.version) == result.version and not same(
            live, self.next
        ):
            raise Wrong("what was published is not what is read")

    def _check(self, live: Model) -> None:
        if not any(same(live, model) for model in (*self.models, self.next)):
            raise Wrong("the weights are those of no version")

    # ── commands ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _command(self, case: Case) -> None:
        place, out = self._home / "run", self._home / "out"
        try:
            for key, data in self._objects(case):
                with suppress(OSError, ValueError):  # names that no file system takes
                    (place / key).parent.mkdir(parents=True, exist_ok=True)
                    (place / key).write_bytes(data)
            for key, lead in case.links.items():
                _make_special(place / key, lead)
            arguments = [
                {"RUN": str(place), "OUT": str(out), "HOME": str(self._home)}.get(a, a)
                for a in self._COMMANDS[case.action]
            ]
            arguments = [a.replace("RUN@", f"{place}@") for a in arguments]
            run_command(arguments)
            if case.action.startswith("checkout"):
                digest = str(full.digest_of(full.Checkpoint(out)))
                if digest not in self.digests:
                    raise Wrong("a checkout holds the weights of no version")
        finally:
            shutil.rmtree(place, ignore_errors=True)
            shutil.rmtree(out, ignore_errors=True)


@contextmanager
def _nothing_seen() -> Iterator[None]:
    """Let publishers find that this host has seen no signed run."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, DELTAWIRE_STATE=folder):
        yield


class SignedRuns(Runs):
    """Signed runs with changed objects, read with the trusted key: no changed manifest may be accepted."""

    kinds = ("signed manifest", "signed data", "signed records", "signed added")

    def __init__(self) -> None:
        self.signs = "ed25519-private:" + 32 * "5e"
        self._key = SigningKey.read(self.signs)
        self.keeper = SigningKey.read("ed25519-private:" + 32 * "6f")
        self.trust = Trust(self._key.public, remember=False)
        with _nothing_seen():
            super().__init__()

    def _read(self, case: Case) -> None:
        # each case is another history of the same run
        with _nothing_seen():
            super()._read(case)

    def _keep(self, store: Store, run: Run) -> None:
        assert self.keeper is not None
        delegate(run, self._key, self.keeper.public)
        super()._keep(store, run)

    def make(self, rng: Random, kind: str) -> Case:
        files = super().make(rng, kind.removeprefix("signed ")).files
        for key, data in files.items():
            if data and key.startswith(keys.VERSIONS) and rng.random() < 0.8:
                # JSON that is no object has no place for a signature
                with suppress(ValueError, AttributeError, TypeError, RecursionError):
                    # where a signature is looked for, so that it is checked
                    value = json.loads(data)
                    seal = json.dumps({"signature": value.pop("signature", "0" * 128)}, separators=(",", ":"))
                    files[key] = json.dumps(value).encode()[:-1] + b"," + seal[1:].encode()
        return Case(kind, rng.choice(self._READS), files)

    def _sealed(self, key: str, value: dict[str, Any]) -> bytes:
        data = super()._sealed(key, value)
        return self._key.seal(MANIFEST, data) if key.startswith(keys.VERSIONS) else data

    def _check_accepted(self, store: Store, version: int) -> None:
        if store.get(keys.manifest(version)).data != self.corpus.get(keys.manifest(version)):
            raise Wrong(f"a manifest of version {version} was accepted that was never signed")


@cache
def _commands() -> Any:
    """The command line, built once: that takes longer than most commands."""
    return typer.main.get_command(app)


def run_command(arguments: list[str]) -> None:
    """A command as a user runs it, in this process: a typed failure is an exit code and a line, never a traceback."""
    said, code = io.StringIO(), 0
    with redirect_stdout(said), redirect_stderr(said):
        try:
            _commands().main(arguments, prog_name="deltawire")
        except SystemExit as ended:
            code = ended.code  # type: ignore[assignment]
    if "\x1b" in said.getvalue() or "Traceback" in said.getvalue():
        raise Wrong(f"a command printed what no command should: {said.getvalue()[-2000:]!r}")
    if code not in (0, 1, 2, 3, 4, 5, 6):
        raise Wrong(f"exit code {code}")
    if code:
        raise Refused(code)


class Refused(DeltawireError):
    """A command ended with an exit code and said why."""

    def __init__(self, code: int) -> None:
        super().__init__(f"exit {code}")


def _make_special(path: Path, lead: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    if lead == "fifo":
        os.mkfifo(path)
    elif lead == "folder":
        path.mkdir()
    elif lead == "socket":
        import socket

        with socket.socket(socket.AF_UNIX) as made, suppress(OSError):
            made.bind(str(path))
    else:
        path.symlink_to(lead)


# ── checkpoint folders ───────────────────────────────────────────────────────────────────────────────────────────────


class Folders:
    """`deltawire publish FOLDER` on checkpoint folders, their index, shards and companion files."""

    kinds = ("folder",)

    def __init__(self) -> None:
        self._home = Path(tempfile.mkdtemp(prefix="deltawire-fuzz-"))
        place = self._home / "corpus"
        place.mkdir()
        model = {k: v for k, v in history(1)[0].items() if v.dtype != np.uint16}
        with mock.patch.object(full, "SHARD_BYTES", 64):
            full.write_checkpoint(place, ModelView(model))
        (place / "config.json").write_text('{"model_type": "toy", "auto_map": {"AutoModel": "code.Model"}}')
        (place / "chat_template.jinja").write_text("{{ messages }}")
        self.corpus = {path.name: path.read_bytes() for path in sorted(place.iterdir())}

    def make(self, rng: Random, kind: str) -> Case:
        name = rng.choice((*self.corpus, full.INDEX_NAME, full.INDEX_NAME))
        data = self.corpus[name]
        if rng.random() < 0.05:
            return Case(kind, "publish", {}, {name: rng.choice(("fifo", "folder", "/dev/zero", "/etc/passwd", "."))})
        if rng.random() < 0.05:
            return Case(kind, "publish", {rng.choice(("a" * 250 + ".json", "é.json", "\x1b[2J.txt")): data, name: None})
        made = mutate.of_json(rng, data) if name.endswith(".json") else mutate.of_tensors(rng, data)
        return Case(kind, rng.choice(("publish", "publish", "show")), {name: made})

    def run(self, case: Case) -> None:
        place, run, out = self._home / "folder", self._home / "run", self._home / "out"
        try:
            place.mkdir()
            for name, data in {**self.corpus, **case.files}.items():
                if data is not None and name not in case.links:
                    (place / name).write_bytes(data)
            for name, lead in case.links.items():
                _make_special(place / name, lead)
            if case.action == "show":
                run_command(["show", str(place / next(iter(case.files)))])
                return
            run_command(["publish", str(place), str(run)])
            run_command(["checkout", str(run), "-o", str(out)])
            written = _loaded(out)
            with suppress(SafetensorError):  # it is stricter about headers than about what they describe
                if written != _loaded(place):
                    raise Wrong("what was published is not what the folder holds")
        finally:
            for each in (place, run, out):
                shutil.rmtree(each, ignore_errors=True)


def _loaded(folder: Path) -> dict[str, tuple[Any, ...]]:
    """The tensors by another reader than ours: dtype, shape and bytes of each."""
    found = {}
    for path in full.weight_files(folder):
        for name, tensor in deserialize(path.read_bytes()):
            found[name] = tensor["dtype"], tuple(tensor["shape"]), bytes(tensor["data"])
    return found
