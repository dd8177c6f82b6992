"""Versions of other systems, with a file changed, by everything that `deltawire import` reads them with."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from random import Random

import mutate
import numpy as np
from safetensors import numpy as st
from targets import Case, Wrong
from writers import model, trained, write_base, write_delta, write_skyrl

from deltawire.bucket.run import Run
from deltawire.core.errors import DeltawireError
from deltawire.core.full import digest_of
from deltawire.foreign import Importer
from deltawire.models import ModelView
from deltawire.store import ObjectStore
from deltawire.store import object as object_store

LAYOUTS = ("xor", "overwrite", "stitch", "skyrl")


class ForeignVersions:
    """An import of three versions. Whatever it publishes is one of them."""

    kinds = tuple(f"foreign {layout}" for layout in LAYOUTS)

    def __init__(self) -> None:
        history = [model()]
        for seed in (1, 2, 3):
            history.append(trained(history[-1], seed))
        self._digests = {str(digest_of(ModelView(weights))) for weights in history}
        home = Path(tempfile.mkdtemp(prefix="deltawire-fuzz-"))
        self._base = write_base(home / "base", history[0])
        self._corpus: dict[str, dict[str, bytes]] = {}
        for layout in LAYOUTS:
            source = home / layout
            for number in (1, 2, 3):
                pair = history[number - 1 : number + 1]
                if layout == "skyrl":
                    write_skyrl(source, number, *pair)
                else:
                    root = source / "updates" if layout == "stitch" else source
                    write_delta(root, number, *pair, "overwrite" if layout == "overwrite" else "xor", files=2)
            if layout == "stitch":
                (source / "latest").write_text("weight_v000003")
            paths = (path for path in sorted(source.rglob("*")) if path.is_file())
            self._corpus[layout] = {str(path.relative_to(source)): path.read_bytes() for path in paths}
            shutil.rmtree(source)

    def make(self, rng: Random, kind: str) -> Case:
        corpus = self._corpus[kind.removeprefix("foreign ")]
        key = rng.choice([*corpus])
        data = corpus[key]
        way = rng.random()
        if way < 0.05:
            return Case(kind, "import", {key: None})
        # not for files of tensors: one of another version is whole, and nothing in the format says that it is elsewhere
        if way < 0.1 and key.endswith(".json"):
            return Case(kind, "import", {key: corpus[rng.choice([*corpus])]})
        if key.endswith(".json"):
            return Case(kind, "import", {key: mutate.of_json(rng, data)})
        if key == "latest":
            return Case(
                kind,
                "import",
                {key: rng.choice((mutate.of_bytes(rng, data), rng.choice(mutate.TEXTS).encode("utf-8", "replace")))},
            )
        made = mutate.of_tensors(rng, data)
        if rng.random() < 0.5:
            # other bytes of one stream, in a file that is whole
            metadata = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]).get("__metadata__")
            tensors = st.load(data)
            name = rng.choice([*tensors])
            tensors[name] = np.frombuffer(mutate.of_bytes(rng, tensors[name].tobytes()), np.uint8)
            made = st.save(tensors, metadata=metadata)
        return Case(kind, "import", {key: made})

    def run(self, case: Case) -> None:
        names = [f"fuzz-{what}-{os.getpid()}" for what in ("source", "run")]
        try:
            source, run = (ObjectStore.from_url(f"memory://{name}") for name in names)
            for key, data in {**self._corpus[case.kind.removeprefix("foreign ")], **case.files}.items():
                if data is not None:
                    with suppress(DeltawireError):  # names that no store takes
                        source.put(key, data)
            try:
                with Importer(source, run, base=self._base) as importer:
                    for _ in importer.follow(once=True):
                        pass
            finally:
                opened = Run.open(run)
                for version in opened.listed():
                    if opened.manifest(version).digest not in self._digests:
                        raise Wrong(f"version {version} has weights that were never written")
        finally:
            for name in names:
                object_store._memory.pop(name, None)
