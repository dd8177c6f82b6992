"""Hostile sizes cost no memory: the attacks again, in a process that cannot have more than it needs to say no."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from attacks import ATTACKS

HERE = Path(__file__).parent
LIMIT = 128 << 20
"""Above what a warm process has; every bomb is larger."""

CHILD = """
import json, os, resource, sys
import deltawire as dw
from attacks import ATTACKS, BOMB, bomb
from forge import ForgedRun, dumps, join
from blake3 import blake3
from support import copy, history, opened, same
from deltawire.core.codecs import ENCODINGS
from deltawire.core.schema import Schema, TensorSpec

names, limit = json.loads(sys.argv[1]), int(sys.argv[2])
old, new = history(2, changes=7)
good = {encoding: dw.encode(old, new, encoding) for encoding in ENCODINGS}
for blob in good.values():
    assert same(dw.decode(blob, old), new)
blobs = {str(a): a.make(good[a.encoding]) for a in ATTACKS if str(a) in names}

# a block that is as large as its tensor, with streams of zeros that compress to nothing
schema = Schema.build([TensorSpec("w", "U8", (BOMB,))])
gaps, steps = bomb(), bomb(BOMB // 2)
payload = gaps + steps
index = dumps({
    "tensors": [["w", "U8", [BOMB]]],
    "blocks": [{
        "encoding": "packed", "regions": [[0, 0, 1, 0, BOMB, BOMB]], "parameters": {"shift": 0},
        "streams": {"gaps": [BOMB, len(gaps)], "low": [0, 0], "steps": [BOMB // 2, len(steps)], "wide": [0, 0]},
        "hash": blake3(payload).hexdigest(length=16),
    }],
})
metadata = {"format": "deltawire", "version": "1", "encoding": "packed", "index_size": str(len(index))}
dense = join(metadata, {"index": ("U8", [len(index)], index), "block.00000": ("U8", [len(payload)], payload)})
del gaps, steps, payload, index

used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + limit, used + limit))
try:
    bytearray(limit + (1 << 20))
except MemoryError:
    pass
else:
    raise SystemExit("the limit does not hold")

def tried(work):
    try:
        work()
    except BaseException as error:
        return type(error).__name__
    return "nothing"

found = {name: tried(lambda: dw.decode(blob, old)) for name, blob in blobs.items()}

def read_dense():
    next(iter(opened(dense, schema).changes(lambda name: None)))

found["a_block_as_large_as_its_tensor"] = tried(read_dense)
# the reader is told that the file is that large: an object store would say so too
claimed = (100 * 10**9 - 8).to_bytes(8, "little") + bytes(100)
from deltawire.core.sparse import DeltaFile
found["a_file_that_is_100_gb"] = tried(lambda: DeltaFile(lambda start, n: claimed[start:start + n], 100 * 10**9))
print(json.dumps(found))
"""

WANTED = [
    attack
    for attack in ATTACKS
    if any(word in attack.name for word in ("bomb", "100_gb", "exabytes", "far_behind", "units", "taller", "nested"))
]


def test_hostile_sizes_in_a_process_with_little_memory() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps([str(attack) for attack in WANTED]), str(LIMIT)],
        env={
            **os.environ,
            "PYTHONPATH": ":".join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]),
            "DELTAWIRE_THREADS": "1",
            "MALLOC_ARENA_MAX": "2",
        },
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    expected = {str(attack): attack.error.__name__ for attack in WANTED}
    expected["a_block_as_large_as_its_tensor"] = "PositionError"
    expected["a_file_that_is_100_gb"] = "HeaderError"
    assert json.loads(done.stdout.splitlines()[-1]) == expected
    assert len(expected) > 15
