"""What signatures cost: seconds to sign and to check one version, and bytes added to its manifest.

    python benchmarks/signed.py                  # seconds

A run of a small model is published to memory and read again, signed and unsigned in turn. The manifests are those that
a run of any size has; their size depends on the number of objects and of recent versions, not on the model.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from _report import about, print_about
from deltawire.bucket.run import Run
from deltawire.bucket.trust import Trust
from deltawire.core import keys
from deltawire.core.manifest import dump, parse_manifest
from deltawire.core.signing import MANIFEST, SigningKey
from deltawire.store import open_store
from deltawire.trainer import Publisher

VERSIONS, REPEATS = 31, 200


def best(work: Callable[[], object]) -> float:
    """Median of many calls, in microseconds."""
    times = []
    for _ in range(REPEATS):
        clock = time.perf_counter()
        work()
        times.append(time.perf_counter() - clock)
    return 1e6 * statistics.median(times)


def main() -> None:
    key = SigningKey.generate()
    with tempfile.TemporaryDirectory() as home:
        os.environ["DELTAWIRE_STATE"] = home
        key.write(Path(home) / "key")
        store = open_store(f"memory://{uuid.uuid4()}")
        weights = {"w": np.zeros((256, 256), np.uint16)}
        with Publisher(store, sign=Path(home) / "key") as publisher:
            for version in range(VERSIONS):
                weights["w"][version] += 1
                publisher.publish(weights).result(60)
        data = store.get(keys.manifest(VERSIONS - 1)).data
        info = Run.open(store).info
        parsed = parse_manifest(data, VERSIONS - 1, info)
        body = data[: data.rindex(b',"signature"')] + b"}"
        trust = Trust(key.public, remember=False).of_run(store.url, info.run)
        print_about(about())
        added = len(data) - len(dump(msgspec.structs.replace(parsed, signer="", signature="")))
        print(f"a manifest with 15 recent versions: {len(data):,} bytes, of which signer and signature {added}")
        print(f"sign a version            {best(lambda: key.seal(MANIFEST, body)):8.0f} µs")
        print(f"check a version           {best(lambda: trust.check_manifest(parsed, data)):8.0f} µs")
        print(f"parse it, for comparison  {best(lambda: parse_manifest(data, VERSIONS - 1, info)):8.0f} µs")

        def first_seen() -> None:
            kept = Trust(key.public).of_run(uuid.uuid4().hex, uuid.uuid4().hex)
            kept.check_manifest(parsed, data)

        os.environ["DELTAWIRE_STATE"] = f"{home}/state"
        print(f"check it and note it on disk    {best(first_seen):8.0f} µs")


if __name__ == "__main__":
    main()
