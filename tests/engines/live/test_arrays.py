"""Arrays that processes of a node share."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from deltawire.engines.live import arrays


def test_what_is_written_is_read(tmp_path: Path) -> None:
    given = {"a": np.arange(7, dtype=np.uint16), "none": np.empty((0, 3)), "b": np.arange(6.0).reshape(2, 3)}
    arrays.write(tmp_path / "file", given)
    found = arrays.open_arrays(tmp_path / "file")
    assert found.keys() == given.keys()
    assert all(np.array_equal(found[name], given[name]) for name in given)


def test_what_is_written_is_read_in_parts(tmp_path: Path) -> None:
    given = np.arange(1000, dtype=np.uint16).reshape(10, 100)
    arrays.write(tmp_path / "file", {"before": np.ones(3, np.uint8), "a": given})
    found = arrays.open_stored(tmp_path / "file")["a"]
    (tmp_path / "file").unlink()
    assert (found.dtype, found.shape, found.nbytes) == (given.dtype, given.shape, given.nbytes)
    part = np.empty(600, np.uint8)
    found.read(1400, part)
    assert part.tobytes() == given.tobytes()[1400:]
    with pytest.raises(OSError, match="ends within an array"):
        found.read(1900, part)


FILL = """
import sys
from pathlib import Path
import numpy as np
from deltawire.engines.live import arrays

small = Path(sys.argv[1])
try:
    arrays.write(small / "file", {"a": np.ones(4 << 20, np.uint8)})
except OSError as error:
    print(error.errno, [*small.iterdir()], error)
arrays.write(small / "file", {"a": np.ones(1 << 18, np.uint8)})
"""


def test_a_full_dev_shm_is_an_error_and_not_the_end_of_the_process(tmp_path: Path) -> None:
    """Docker gives a container 64 MB. Memory that is mapped and not there ends a process by SIGBUS."""
    small = tmp_path / "small"
    small.mkdir()
    inside = f'mount -t tmpfs -o size=1m tmpfs "{small}" && exec "$@"'
    mount = ["unshare", "-rm", "sh", "-c", inside, "sh"]
    if subprocess.run([*mount, "true"], capture_output=True).returncode:
        pytest.skip("no file system may be mounted here")
    done = subprocess.run(
        [*mount, sys.executable, "-c", FILL, str(small)], capture_output=True, text=True, env={**os.environ}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{errno.ENOSPC} [] ")
    assert "--shm-size" in done.stdout
