"""Machines on one machine: network namespaces, joined by links of a chosen speed. Linux and root only.

    with Namespaces([("trainer", "bucket"), ("replica", "bucket")]) as spaces:
        spaces.shape(20)
        subprocess.run([*spaces.command("trainer"), "ping", spaces.address("bucket")])

Every machine has one address. A link is a veth pair, its speed a token bucket at both ends that may change while things
run. Nothing is forwarded, there is no IPv6 and no default route: who has no link has no way. With `open_links=False` a
link alone leads nowhere either, until `open_door` routes one port of one machine for one other: the way there for what
goes to that port, the way back for what comes from it, and no route for anything else.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

Link = tuple[str, str]

_TABLE = "77"
# of routes that only the rules of a door lead to; who is not asked by a rule is not asked at all


class Namespaces:
    def __init__(self, links: Sequence[Link], *, open_links: bool = True) -> None:
        self.links = [*links]
        self.machines = [*dict.fromkeys(machine for link in links for machine in link)]
        self._open = open_links
        self._mark = f"{os.getpid()}"
        self._made: list[str] = []

    def __enter__(self) -> Namespaces:
        _sweep()
        try:
            for machine in self.machines:
                _run("ip", "netns", "add", self._space(machine))
                self._made.append(self._space(machine))
                self._in(machine, "sysctl", "-qw", "net.ipv6.conf.all.disable_ipv6=1")
                self._in(machine, "ip", "link", "set", "lo", "up")
                self._in(machine, "ip", "address", "add", f"{self.address(machine)}/32", "dev", "lo")
            for number, (one, other) in enumerate(self.links):
                _run("ip", "link", "add", self._device(number, one), "netns", self._space(one), "type", "veth",
                     "peer", "name", self._device(number, other), "netns", self._space(other))  # fmt: skip
                for here, there in ((one, other), (other, one)):
                    device = self._device(number, here)
                    self._in(here, "ip", "link", "set", device, "up")
                    self._in(here, "ip", "route", "add", self.address(there), "dev", device,
                             "src", self.address(here), "table", "main" if self._open else _TABLE)  # fmt: skip
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

    def command(self, machine: str) -> list[str]:
        """What to put before a command so that it runs on that machine."""
        return ["ip", "netns", "exec", self._space(machine)]

    def address(self, machine: str) -> str:
        return f"10.77.0.{self.machines.index(machine) + 1}"

    def open_door(self, client: str, server: str, port: int) -> None:
        """Let one machine connect to a TCP port of another, over the link they have."""
        tcp = ("ip", "rule", "add", "ipproto", "tcp")
        self._in(client, *tcp, "dport", str(port), "to", self.address(server), "table", _TABLE)
        self._in(server, *tcp, "sport", str(port), "to", self.address(client), "table", _TABLE)

    def shape(self, mbit: float | None, only: Link | None = None) -> None:
        """Every link, or only one, both ways; None leaves them as fast as the machine."""
        for number, link in enumerate(self.links):
            for machine in link if only in (None, link) else ():
                device = self._device(number, machine)
                if mbit is None:
                    space = self.command(machine)
                    subprocess.run([*space, "tc", "qdisc", "delete", "dev", device, "root"], stderr=subprocess.DEVNULL)
                    continue
                # the bucket must hold a few milliseconds, or the timer cannot keep the rate up
                burst = max(128 << 10, int(mbit * 1e6 / 8 * 0.005))
                self._in(machine, "tc", "qdisc", "replace", "dev", device, "root", "tbf",
                         "rate", f"{mbit:g}mbit", "burst", str(burst), "latency", "200ms")  # fmt: skip

    def sent(self, machine: str, to: str) -> int:
        """Bytes that have gone over their link since the start, headers and all."""
        number = next(at for at, link in enumerate(self.links) if set(link) == {machine, to})
        return int(self._in(machine, "cat", f"/sys/class/net/{self._device(number, machine)}/statistics/tx_bytes"))

    def _space(self, machine: str) -> str:
        return f"dw{self._mark}-{machine}"

    def _device(self, number: int, machine: str) -> str:
        return f"dw{self._mark}l{number}{'ab'[self.links[number].index(machine)]}"

    def _in(self, machine: str, *command: str) -> str:
        return _run(*self.command(machine), *command)


def _sweep() -> None:
    """Those of a process that was killed before it could tidy up."""
    for line in _run("ip", "netns", "list").splitlines():
        found = re.match(r"dw(\d+)-", line)
        if found and not Path(f"/proc/{found[1]}").exists():
            subprocess.run(["ip", "netns", "delete", line.split()[0]], check=False)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}\n(network namespaces need Linux and root)")
    return done.stdout
