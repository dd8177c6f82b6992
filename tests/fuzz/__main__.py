"""`make fuzz`, or `python tests/fuzz`: mutated files, runs, folders and requests against everything that reads them.

Whatever the input: a typed error, a clear 4xx, or the right bits; within a time and 1 GB of memory. Anything else is a
finding and is kept in tests/fuzz/found, which `make test` replays.

With `--mode interrupt` the input is good, and signals arrive at random moments (interrupt.py).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FOUND = HERE / "found"
# flat, as the tests have it; and where `soak` is
TESTS = HERE.parent
PATHS = [HERE, TESTS, TESTS / "abuse", TESTS / "foreign", TESTS / "engines" / "server", TESTS.parent]
sys.path[:0] = [str(path) for path in PATHS]

from child import DECLARED, KINDS, case_of, serve, started  # noqa: E402

CPU_LIMIT = float(os.environ.get("FUZZ_CPU_LIMIT", 20))
"""Seconds of computing for one case."""
WALL_LIMIT = 120.0
"""Seconds for one case on a busy machine; above the time limits of the code under test."""
SLICE = 2.0


class Dead(Exception):
    """The process under test hung, was killed or ended by itself; the case it was at is a finding."""


class Child:
    """A process that runs the cases of one family of targets."""

    def __init__(self, family: str) -> None:
        self.family = family
        # what is tested syncs its files to disk; in memory that costs nothing
        memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
        self._folder = tempfile.TemporaryDirectory(prefix="deltawire-fuzz-", dir=memory)
        environment = {
            **os.environ,
            "DELTAWIRE_MAX_MODEL_GB": str(DECLARED / 1e9),
            "DELTAWIRE_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "MALLOC_ARENA_MAX": "2",
            "OMP_NUM_THREADS": "1",
            "TMPDIR": self._folder.name,
        }
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        self._process = subprocess.Popen(
            [sys.executable, str(HERE), "--child", family],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, env=environment,
        )  # fmt: skip
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._stdout, selectors.EVENT_READ)
        self._buffer = b""
        self.hear(600.0)

    @property
    def _stdout(self) -> Any:
        return self._process.stdout

    def tell(self, **order: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()

    def hear(self, limit: float = WALL_LIMIT) -> dict[str, Any]:
        """The next line; Dead when the process ends, or computes or waits for too long."""
        began, used = time.monotonic(), self._cpu()
        while b"\n" not in self._buffer:
            if self._selector.select(0.5):
                part = os.read(self._stdout.fileno(), 1 << 16)
                if not part:
                    status = self._process.wait()
                    self._said.seek(-min(self._said.tell(), 500), os.SEEK_END)
                    raise Dead(f"the process ended with {status}: {self._said.read().decode(errors='replace')}")
                self._buffer += part
            elif limit == WALL_LIMIT and self._cpu() - used > CPU_LIMIT:
                raise Dead(f"computed for more than {CPU_LIMIT:g} s")
            elif time.monotonic() - began > limit:
                raise Dead(f"no end after {limit:g} s")
        line, _, self._buffer = self._buffer.partition(b"\n")
        value: dict[str, Any] = json.loads(line)
        return value

    def _cpu(self) -> float:
        try:
            fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._selector.close()
        self._said.close()
        self._folder.cleanup()


class Tally:
    """What came of the cases of one kind."""

    def __init__(self) -> None:
        self.cases, self.outcomes = 0, Counter[str]()
        self.slowest_s, self.most_bytes = 0.0, 0

    def add(self, answer: dict[str, Any]) -> None:
        self.cases += 1
        self.outcomes[answer.get("did", "FOUND")] += 1
        self.slowest_s = max(self.slowest_s, answer.get("cpu_s", 0.0))
        self.most_bytes = max(self.most_bytes, answer.get("grown", 0))

    def value(self) -> dict[str, Any]:
        return {
            "cases": self.cases, "slowest_s": self.slowest_s, "most_mb": round(self.most_bytes / 1e6, 1),
            "outcomes": dict(self.outcomes.most_common()),
        }  # fmt: skip


def fuzz(minutes: float, seed: int, kinds: list[str], keep: Path, most: int) -> dict[str, Any]:
    """Slices of all kinds in turn until the time is over or `most` findings are there."""
    turns = [(family, kind) for kind, family in KINDS.items() if kind in kinds or (not kinds and family != "broken")]
    children: dict[str, Child] = {family: Child(family) for family in dict(turns)}
    began, end = time.monotonic(), time.monotonic() + 60 * minutes
    tallies = {kind: Tally() for _, kind in turns}
    findings: list[dict[str, Any]] = []
    seen: set[str] = set()
    told = 0.0
    try:
        while time.monotonic() < end and len(findings) < most:
            for family, kind in turns:
                if children.get(family) is None:
                    children[family] = Child(family)
                found = _slice(children[family], kind, seed, tallies[kind])
                if any(each["dead"] for each in found):
                    children.pop(family).end()
                for each in found:
                    if (signature := _signature(each)) not in seen:
                        seen.add(signature)
                        each["file"] = _keep(family, each, keep)
                        print(f"FOUND in {kind} {each['number']}: {each['found']}\n  {each['file']}", flush=True)
                        findings.append(each)
            if time.monotonic() - told > 30:
                told = time.monotonic()
                cases = sum(tally.cases for tally in tallies.values())
                print(f"{(told - began) / 60:6.1f} min  {cases:,} cases  {len(findings)} findings", flush=True)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    finally:
        for child in children.values():
            child.end()
    seconds = time.monotonic() - began
    cases = sum(tally.cases for tally in tallies.values())
    return {
        "seed": seed, "minutes": round(seconds / 60, 2), "cases": cases, "cases_per_s": round(cases / seconds, 1),
        "machine": f"{os.cpu_count()} × {platform.machine()}, Python {platform.python_version()}",
        "kinds": {kind: tally.value() for kind, tally in tallies.items()}, "findings": findings,
    }  # fmt: skip


def _slice(child: Child, kind: str, seed: int, tally: Tally) -> list[dict[str, Any]]:
    """A few seconds of one kind, from where it was left."""
    found: list[dict[str, Any]] = []
    number = tally.cases
    child.tell(kind=kind, seed=seed, first=number, seconds=SLICE)
    try:
        while "end" not in (answer := child.hear()):
            if "at" in answer:
                number = answer["at"]
                continue
            tally.add(answer)
            if "found" in answer:
                found.append({"kind": kind, "seed": seed, "number": number, "dead": False, **answer})
    except Dead as dead:
        tally.add({})
        found.append({"kind": kind, "seed": seed, "number": number, "dead": True, "found": str(dead)})
    return found


def _signature(finding: dict[str, Any]) -> str:
    """Findings of one kind from one line of code count once."""
    places = re.findall(r'File "([^"]+)", line (\d+)', finding.get("where", ""))
    return f"{finding['kind']} {places[-1] if places else re.sub(r'[0-9]+', '0', finding['found'])}"


def _keep(family: str, finding: dict[str, Any], folder: Path) -> str:
    """Write the case as a file. If its process died, another one makes the case again, without running it."""
    path = folder / f"{finding['kind'].replace(' ', '-')}-{finding['seed']}-{finding['number']}.json"
    folder.mkdir(parents=True, exist_ok=True)
    text = finding.pop("case", None)
    if text is None:
        order = json.dumps({"family": family, **finding})
        command = [sys.executable, str(HERE), "--remake"]
        text = subprocess.run(command, input=order, stdout=subprocess.PIPE, check=True, text=True).stdout
    path.write_text(text)
    return str(path)


def _remake(order: dict[str, Any]) -> None:
    _, case = case_of(started(order["family"]), order["kind"], order["seed"], order["number"])
    sys.stdout.write(case.dump(found=order["found"]))


def replay(paths: list[Path]) -> list[str]:
    """Run kept cases again, and return what is wrong with them."""
    wrong, children = [], dict[str, Child]()
    try:
        for path in paths:
            family = KINDS[json.loads(path.read_text())["kind"]]
            child = children.get(family) or children.setdefault(family, Child(family))
            child.tell(replay=str(path.absolute()))
            try:
                while "end" not in (answer := child.hear()):
                    if "found" in answer:
                        wrong.append(f"{path.name}: {answer['found']}\n{answer.get('where', '')}")
            except Dead as dead:
                wrong.append(f"{path.name}: {dead}")
                children.pop(family).end()
    finally:
        for child in children.values():
            child.end()
    return wrong


def _show(result: dict[str, Any]) -> None:
    print(f"\n{'kind':<16} {'cases':>9} {'slowest':>9} {'memory':>9}  answers")
    for kind, tally in result["kinds"].items():
        answers = ", ".join(f"{name} {count}" for name, count in list(tally["outcomes"].items())[:5])
        print(f"{kind:<16} {tally['cases']:>9,} {tally['slowest_s']:>7.2f} s {tally['most_mb']:>6.0f} MB  {answers}")
    print(
        f"\nseed {result['seed']}: {result['cases']:,} cases in {result['minutes']} min, {result['cases_per_s']} a "
        f"second, {len(result['findings'])} findings ({result['machine']})"
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/fuzz", description=__doc__.partition("\n\n")[0])
    parser.add_argument(
        "--mode", choices=["input", "interrupt"], default="input", help="what it is done to: input, or interrupt"
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=None, help="which cases; drawn and printed when not given")
    parser.add_argument("--kind", action="append", default=[], help="only this kind; repeatable")
    parser.add_argument("--number", type=int, default=None, help="with --mode interrupt: this case, again and again")
    parser.add_argument("--most", type=int, default=20, help="stop after so many findings (20)")
    parser.add_argument("--json", type=Path, default=None, help="write the result to this file too")
    parser.add_argument("--keep", type=Path, default=FOUND, help="folder for findings (tests/fuzz/found)")
    parser.add_argument("--replay", type=Path, nargs="*", default=None, help="run kept cases again: files (all kept)")
    parser.add_argument("--child", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--remake", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        serve(arguments.child)
        return 0
    if arguments.remake:
        _remake(json.loads(sys.stdin.read()))
        return 0
    if arguments.replay is not None:
        paths = arguments.replay or sorted(FOUND.glob("*.json"))
        wrong = replay(paths)
        print("\n".join([*wrong, f"{len(paths)} kept cases, {len(wrong)} findings"]))
        return 1 if wrong else 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    seed = arguments.seed if arguments.seed is not None else int(time.time())
    print(f"seed {seed}, {arguments.minutes:g} minutes", flush=True)
    if arguments.mode == "interrupt":
        # it imports all that it interrupts
        import interrupt

        result = interrupt.fuzz(arguments.minutes, seed, arguments.kind, arguments.number, arguments.most)
    else:
        result = fuzz(arguments.minutes, seed, arguments.kind, arguments.keep, arguments.most)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    (interrupt.show if arguments.mode == "interrupt" else _show)(result)
    return 1 if result["findings"] else 0


if __name__ == "__main__":
    sys.exit(main())
