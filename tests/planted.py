"""Plants small random bugs in the source, one at a time, and says which of them the tests find.

    python tests/planted.py --seed 7                          12 bugs in each room
    python tests/planted.py --seed 7 --rooms core --only 3    the third bug in core again

Each bug is planted in a copy of `src`: a comparison changed, a statement dropped, a constant off by one, `not` dropped,
`and` for `or`. The tests are those of the room and those that import the module; one that hangs has found the bug.
A bug that survives is for a reader: it does not matter, or a test is missing. The same seed plants the same bugs until
the source changes.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SOURCE = Path("src", "deltawire")
ROOMS = ("core", "bucket", "replica", "trainer", "keeper", "store")
OTHERS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}


class Bug(NamedTuple):
    file: Path
    kind: str
    start: int
    """In bytes."""
    end: int
    text: str

    def planted(self, source: bytes) -> bytes:
        return source[: self.start] + self.text.encode() + source[self.end :]


def bugs(file: Path, chance: random.Random) -> Iterator[Bug]:
    """Every bug that can be planted in a file."""
    source = (ROOT / file).read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in _code(ast.parse(source)):
        for kind, other in _changed(node, chance):
            assert node.end_lineno is not None
            assert node.end_col_offset is not None
            first = starts[node.lineno - 1] + node.col_offset
            end = starts[node.end_lineno - 1] + node.end_col_offset
            text = ast.unparse(other)
            yield Bug(file, kind, first, end, f"({text})" if isinstance(other, ast.expr) else text)


def _code(node: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """What is computed: no types, and nothing of messages."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            match child:
                case ast.JoinedStr() | ast.Import() | ast.ImportFrom() | ast.If(test=ast.Name(id="TYPE_CHECKING")):
                    continue
                case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="log")))):
                    continue
                case ast.expr() | ast.stmt():
                    yield child
            if isinstance(child, ast.AST) and not isinstance(child, ast.Raise):
                yield from _code(child)


def _changed(node: ast.AST, chance: random.Random) -> Iterator[tuple[str, ast.expr | ast.stmt]]:
    match node:
        case ast.Compare(left, [first, *rest], comparators):
            operator = chance.choice(OTHERS[type(first)])()
            yield "comparison", ast.Compare(left, [operator, *rest], comparators)
        case ast.BoolOp(op, values):
            yield "and/or", ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "not", operand
        case ast.Constant(value=int(number)) if not isinstance(number, bool):
            yield "constant", ast.Constant(number + chance.choice((-1, 1)))
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.Raise() | ast.AugAssign() | ast.Delete():
            yield "statement", ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "statement", ast.Pass()
        case ast.If(body=[*_, ast.Raise() | ast.Return() | ast.Continue()], orelse=[]):
            yield "statement", ast.Pass()


def chosen(room: str, seed: int, number: int) -> list[Bug]:
    """As many of each kind, wherever in the room."""
    chance = random.Random(f"{seed} {room}")
    kinds: dict[str, list[Bug]] = defaultdict(list)
    for path in sorted((ROOT / SOURCE / room).rglob("*.py")):
        for bug in bugs(path.relative_to(ROOT), chance):
            kinds[bug.kind].append(bug)
    found: list[Bug] = []
    while len(found) < number:
        bug = chance.choice(kinds[chance.choice(sorted(kinds))])
        if bug not in found:
            found.append(bug)
    return found


def tests_of(file: Path) -> list[list[str]]:
    """Test files: first those of the module, then those of the room and all others that import the module."""
    room, name = file.relative_to(SOURCE).parts[0], file.stem
    dotted = ".".join(file.relative_to("src").with_suffix("").parts)
    parent, _, last = dotted.rpartition(".")
    imports = re.compile(rf"\b{re.escape(dotted)}\b|from {re.escape(parent)} import [^\n]*\b{re.escape(last)}\b")
    own, rest = [], []
    for test in sorted((ROOT / "tests").rglob("test_*.py")):
        inside, text = test.is_relative_to(ROOT / "tests" / room), test.read_text()
        general = test.parent == ROOT / "tests" and f"deltawire.{room}" in text
        if inside and test.stem in (f"test_{name}", f"test_{room}_{name}"):
            own.append(str(test.relative_to(ROOT)))
        elif inside or general or imports.search(text):
            rest.append(str(test.relative_to(ROOT)))
    return [files for files in (own, rest) if files]


def failing(source: Path, tests: list[str], jobs: int, limit: float) -> str | None:
    """The test that fails with this source, or how else pytest ended; None if all pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--jobs", str(jobs), *tests]
    path = os.pathsep.join([str(source), *filter(None, [os.environ.get("PYTHONPATH")])])
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            [*command, "--timeout", str(limit / 4)], cwd=ROOT, env={**os.environ, "PYTHONPATH": path},
            stdout=said, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            return "hangs"
        finally:
            # and what its tests have started and left
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        said.seek(0)
        lines = said.read().splitlines()
    if not code:
        return None
    named = [line.split(" - ")[0] for line in lines if line.startswith(("FAILED tests", "ERROR tests"))]
    return named[0] if named else f"pytest ended with {code}: {lines[-1] if lines else ''}"


def find(bug: Bug, jobs: int, limit: float) -> str | None:
    """The test that finds a bug."""
    with tempfile.TemporaryDirectory(prefix="deltawire-planted-") as folder:
        # with the compiled kernels; those of a module that changes are compiled anew (precompile.py)
        shutil.copytree(ROOT / "src", Path(folder, "src"))
        path = Path(folder, bug.file)
        path.write_bytes(bug.planted(path.read_bytes()))
        for tests in tests_of(bug.file):
            if found := failing(Path(folder, "src"), tests, jobs, limit):
                return found
    return None


def show(bug: Bug) -> str:
    before = (ROOT / bug.file).read_bytes()
    lines = [text.decode().splitlines() for text in (before, bug.planted(before))]
    return "\n".join(difflib.unified_diff(*lines, str(bug.file), str(bug.file), lineterm="", n=4))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--rooms", nargs="+", choices=ROOMS, default=ROOMS)
    parser.add_argument("--bugs", type=int, default=12, help="in each room")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of the bugs in each room")
    parser.add_argument("--jobs", type=int, default=2, help="processes that run tests")
    parser.add_argument("--limit", type=float, default=400, help="seconds that tests may take, for each bug")
    parser.add_argument("--list", action="store_true", help="only show the bugs")
    options = parser.parse_args()
    survived = total = 0
    for room in options.rooms:
        everything = [str(Path("tests", room))]
        if not options.list and (failed := failing(ROOT / "src", everything, options.jobs, options.limit)):
            sys.exit(f"without a bug: {failed}")
        for number, bug in enumerate(chosen(room, options.seed, options.bugs), 1):
            if options.only and number not in options.only:
                continue
            clock = time.monotonic()
            found = None if options.list else find(bug, options.jobs, options.limit)
            survived, total = survived + (not found), total + 1
            word = "planted" if options.list else "found" if found else "SURVIVED"
            print(f"\n── {room} {number}: {bug.kind}: {word} ({time.monotonic() - clock:.0f} s) {found or ''}")
            print(show(bug), flush=True)
    if not options.list:
        print(f"\n{total - survived} of {total} found, {survived} survived")


if __name__ == "__main__":
    main()
