"""Arrays in files that one process of a node writes and another reads: a header in JSON, then the arrays.

Where a model is served, large ones are read in parts and not mapped: on some virtual machines it takes 0.1 s to unmap
hundreds of megabytes, and other threads of the process may have to wait for that.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import tempfile
from collections.abc import Callable, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...replica.moves import ArrayInFile

Array = npt.NDArray[Any]
_ALIGNED = 64
_PREFIX = 8


def root() -> Path:
    """Where processes of this node share files: in memory if the system has a memory file system."""
    shared = Path("/dev/shm")
    return shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


def node() -> str:
    """Name the node that this process is on: the same for all processes that see the same files in `root`."""
    place = root().stat()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = socket.gethostname()
    return f"{boot}:{place.st_dev}:{place.st_ino}"


def folder() -> tempfile.TemporaryDirectory[str]:
    """Make a private folder there."""
    return tempfile.TemporaryDirectory(prefix="deltawire-", dir=root())


def create(path: Path, shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, Array]:
    """A new file with arrays of these dtypes and shapes, mapped and ready to be filled. OSError where there is no
    room."""
    layout, at = [], 0
    for name, (dtype, shape) in shapes.items():
        layout.append((name, dtype, shape, at))
        at += -(-np.dtype(dtype).itemsize * int(np.prod(shape)) // _ALIGNED) * _ALIGNED
    head = json.dumps(layout).encode()
    start = -(-(_PREFIX + len(head)) // _ALIGNED) * _ALIGNED
    with open(path, "w+b") as file:
        try:
            # all of it now: a page that a full /dev/shm cannot give later ends the process that touches it
            os.posix_fallocate(file.fileno(), 0, start + at)
        except OSError as error:
            path.unlink()
            raise OSError(
                error.errno,
                f"no room for {(start + at) / 1e6:.0f} MB in {path.parent}: {error.strerror}. A container may need "
                "more shared memory (--shm-size)",
            ) from error
        memory = mmap.mmap(file.fileno(), start + at)
    memory[: _PREFIX + len(head)] = len(head).to_bytes(_PREFIX, "little") + head
    return _views(memory, layout, start)


def open_arrays(path: Path) -> dict[str, Array]:
    """Map the arrays of a file. The file may be removed while they are in use."""
    with open(path, "rb") as file:
        layout, start = _head(file.read)
        return _views(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), layout, start)


def open_stored(path: Path) -> dict[str, ArrayInFile]:
    """The arrays of a file, to be read in parts. The file may be removed while they are in use."""
    file = FileIO(path)
    layout, start = _head(file.read)
    return {name: ArrayInFile(file, start + at, np.dtype(dtype), tuple(shape)) for name, dtype, shape, at in layout}


def write(path: Path, arrays: Mapping[str, Array]) -> None:
    """Write copies of arrays to a new file."""
    made = create(path, {name: (array.dtype.str, array.shape) for name, array in arrays.items()})
    for name, array in arrays.items():
        made[name][...] = array


def _head(read: Callable[[int], bytes]) -> tuple[Any, int]:
    """Names, dtypes, shapes and places of the arrays, and where the first one begins."""
    size = int.from_bytes(read(_PREFIX), "little")
    return json.loads(read(size)), -(-(_PREFIX + size) // _ALIGNED) * _ALIGNED


def _views(memory: mmap.mmap, layout: Any, start: int) -> dict[str, Array]:
    return {
        name: np.frombuffer(memory, dtype, int(np.prod(shape)), start + at).reshape(shape)
        for name, dtype, shape, at in layout
    }
