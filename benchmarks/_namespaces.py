"""Machines on one machine: network namespaces with a shaped link to a bucket each. Linux and root only.

    trainer ── 10.77.1.0/24 ── bucket ── 10.77.2.0/24 ── replica

Every link is a veth pair; its speed is set on both ends by a token bucket, and can be changed while things run.
"""

from __future__ import annotations

import os
import subprocess
from types import TracebackType

SIDES = ("trainer", "replica")


class Namespaces:
    def __init__(self) -> None:
        self._mark = f"{os.getpid() % 100_000}"
        self._made: list[str] = []

    def __enter__(self) -> Namespaces:
        try:
            for name in ("bucket", *SIDES):
                _run("ip", "netns", "add", self._space(name))
                self._made.append(self._space(name))
                self._in(name, "ip", "link", "set", "lo", "up")
            for number, side in enumerate(SIDES, 1):
                near, far = self._device(side), self._device(side, far=True)
                _run("ip", "link", "add", near, "netns", self._space(side), "type", "veth",
                     "peer", "name", far, "netns", self._space("bucket"))  # fmt: skip
                self._in(side, "ip", "address", "add", f"10.77.{number}.2/24", "dev", near)
                self._in("bucket", "ip", "address", "add", f"10.77.{number}.1/24", "dev", far)
                self._in(side, "ip", "link", "set", near, "up")
                self._in("bucket", "ip", "link", "set", far, "up")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for space in self._made:
            subprocess.run(["ip", "netns", "delete", space], check=False)
        self._made.clear()

    def command(self, name: str) -> list[str]:
        """What to put before a command so that it runs on that machine."""
        return ["ip", "netns", "exec", self._space(name)]

    def bucket_address(self, side: str) -> str:
        """Where the bucket is, seen from there."""
        return f"10.77.{SIDES.index(side) + 1}.1"

    def shape(self, mbit: float | None) -> None:
        """Every link, both ways; None leaves them as fast as the machine."""
        for side in SIDES:
            for name, device in ((side, self._device(side)), ("bucket", self._device(side, far=True))):
                if mbit is None:
                    space = self.command(name)
                    subprocess.run([*space, "tc", "qdisc", "delete", "dev", device, "root"], stderr=subprocess.DEVNULL)
                    continue
                # the bucket must hold a few milliseconds, or the timer cannot keep the rate up
                burst = max(128 << 10, int(mbit * 1e6 / 8 * 0.005))
                self._in(name, "tc", "qdisc", "replace", "dev", device, "root", "tbf",
                         "rate", f"{mbit:g}mbit", "burst", str(burst), "latency", "200ms")  # fmt: skip

    def bytes_to(self, side: str) -> int:
        """What the bucket has sent to that side since the start, headers and all."""
        path = f"/sys/class/net/{self._device(side, far=True)}/statistics/tx_bytes"
        return int(self._in("bucket", "cat", path))

    def _space(self, name: str) -> str:
        return f"dw{self._mark}-{name}"

    def _device(self, side: str, *, far: bool = False) -> str:
        return f"dw{self._mark}{side[0]}{1 if far else 0}"

    def _in(self, name: str, *command: str) -> str:
        return _run(*self.command(name), *command)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}\n(network namespaces need Linux and root)")
    return done.stdout
