"""Settings of a plugin from the environment, since engines do not accept further flags.

Read in every process of a server, some of which must not import numba before vLLM has set itself up: imports nothing
heavy.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ...core.errors import Misconfigured


@dataclass(frozen=True, slots=True)
class Policy:
    """What happens to requests and cached keys and values at a swap."""

    mode: str = "keep"
    """What becomes of running requests: keep, wait or abort."""
    kv: str = "version"
    """What becomes of keys and values of the old weights. `version`: running requests keep theirs, and no other request
    finds them. `clear`: all are dropped. `keep`: all requests find them."""


@dataclass(frozen=True, slots=True)
class Settings:
    run: str = ""
    """DELTAWIRE_RUN: the run's address; empty: wait to be told by /update_weights."""
    poll: float = 1.0
    """DELTAWIRE_POLL: seconds between looks at the bucket."""
    follow: bool = True
    """DELTAWIRE_FOLLOW: go to every new version; 0: catch up at start, then wait to be told."""
    pin: str = ""
    """DELTAWIRE_PIN: go to this version and stay, as people write versions."""
    policy: Policy = field(default_factory=Policy)
    """DELTAWIRE_PAUSE: keep, wait or abort; DELTAWIRE_KV: version, clear or keep."""
    token: str = ""
    """DELTAWIRE_TOKEN: what control routes ask for."""
    reference: str | None = None
    """DELTAWIRE_REFERENCE: the folder of the checkpoint the run starts from, where its own name does not work here."""
    heartbeat: float = 10.0
    """DELTAWIRE_HEARTBEAT: seconds between heartbeats in the bucket; 0: none."""
    address: str = ""
    """DELTAWIRE_ADDRESS: host:port for clients, in the heartbeat; by default where the server listens."""
    version_wait: float = 30.0
    """DELTAWIRE_VERSION_WAIT: seconds that a request waits for a version it accepts, before a 409."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """DELTAWIRE_ADAPTERS: the runs of adapters, by the name that requests use: `policy=s3://runs/lora, judge=…`."""
    adapters_keep: int = 1
    """DELTAWIRE_ADAPTERS_KEEP: older versions of each adapter that stay loaded although nothing uses them."""


def read(environment: Mapping[str, str] = os.environ) -> Settings:
    def one_of(name: str, choices: tuple[str, ...]) -> str:
        value = environment.get(name) or choices[0]
        if value not in choices:
            raise Misconfigured(f"{name} is {value!r}; it can be {' or '.join(choices)}")
        return value

    def number(name: str, default: float) -> float:
        try:
            return float(environment.get(name) or default)
        except ValueError:
            raise Misconfigured(f"{name} is {environment[name]!r}; it is a number of seconds") from None

    # a comma before `name=` begins the next adapter, any other one separates two addresses of the same run
    adapters = re.split(r",(?=\s*[^\s,=:?]+\s*=)", environment.get("DELTAWIRE_ADAPTERS", ""))
    keep = environment.get("DELTAWIRE_ADAPTERS_KEEP") or "1"
    if not keep.isdecimal():
        raise Misconfigured(f"DELTAWIRE_ADAPTERS_KEEP is {keep[:80]!r}; it is a number of versions")
    return Settings(
        run=environment.get("DELTAWIRE_RUN", ""),
        poll=number("DELTAWIRE_POLL", 1.0),
        follow=one_of("DELTAWIRE_FOLLOW", ("1", "0")) == "1",
        pin=environment.get("DELTAWIRE_PIN", ""),
        policy=Policy(
            one_of("DELTAWIRE_PAUSE", ("keep", "wait", "abort")),
            one_of("DELTAWIRE_KV", ("version", "clear", "keep")),
        ),
        token=environment.get("DELTAWIRE_TOKEN", ""),
        reference=environment.get("DELTAWIRE_REFERENCE") or None,
        heartbeat=number("DELTAWIRE_HEARTBEAT", 10.0),
        address=environment.get("DELTAWIRE_ADDRESS", ""),
        version_wait=number("DELTAWIRE_VERSION_WAIT", 30.0),
        adapters=named_adapters("DELTAWIRE_ADAPTERS", filter(str.strip, adapters)),
        adapters_keep=int(keep),
    )


ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,99}")
"""Names of adapters. `@` separates one from a version: policy@41."""


def named_adapters(setting: str, entries: Iterable[str]) -> dict[str, str]:
    """Read NAME=RUN, NAME=RUN, … of a setting: the runs by name. Each may have several addresses."""
    found: dict[str, str] = {}
    for entry in entries:
        name, _, run = (part.strip() for part in entry.partition("="))
        if not ADAPTER_NAME.fullmatch(name) or not run:
            raise Misconfigured(
                f"{setting} has {entry.strip()[:200]!r}; write NAME=RUN, where a name is up to 100 of "
                "A-Z a-z 0-9 . _ / - and begins with a letter or a digit"
            )
        if name in found:
            raise Misconfigured(f"{setting} names {name!r} twice")
        found[name] = run
    return found
