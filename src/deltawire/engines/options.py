"""Options of a server that follows a run, for all engines: from flags, from environment variables, or in Python.

`deltawire serve` makes its flags of them (cli/serve.py), with their docstrings as help. Other engines accept no further
flags, so their plugins read variables, in every process of a server. Some of those must not import numba before vLLM
has set itself up: imports nothing heavy.
"""

# ruff: noqa: RUF009  `option` is a field of a dataclass
from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NoReturn, get_args, get_type_hints

from ..core.errors import Misconfigured
from .names import ADAPTER_NAME

Kv = Literal["version", "clear", "keep"]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]

__all__ = ["BUILTIN", "FLOW", "WHAT", "WHERE", "ServerOptions", "Setting", "named_adapters", "settings"]

WHAT, WHERE, FLOW, ANSWERS = "What to serve", "Where, and for whom", "Following the run", "Answers"
BUILTIN = "Only the built-in server"
"""Panel of the flags that other engines have under names of their own."""


def option(default: Any, **given: Any) -> Any:
    """Declare an option; `given` are fields of `Setting`."""
    return field(default=default, metadata=given)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Options of a server: what it serves and follows, where it listens, and what it allows."""

    run: str = option("", variable="DELTAWIRE_RUN")
    """Address of the run. Empty: adapters alone are followed, or a trainer names the run to /update_weights."""
    pin: int | str | None = option(None, variable="DELTAWIRE_PIN")
    """Go to this version and stay there: 41, v41, -2 or a tag."""
    model: str | None = None
    """Checkpoint folder or hub id to start from. None takes config, tokenizer and weights from the run."""
    adapters: Mapping[str, str] = field(
        default_factory=dict, metadata={"variable": "DELTAWIRE_ADAPTERS", "only_plugins": True}
    )
    """Runs of adapters, by the name that requests use: `policy=s3://runs/lora, judge=…`."""
    adapters_keep: int = option(1, variable="DELTAWIRE_ADAPTERS_KEEP", least=0, only_plugins=True)
    """Number of older versions of each adapter that stay loaded when nothing uses them."""
    name: str | None = option(None, panel=WHAT, own_flag="--served-model-name", value="NAME")
    """The clients' name for the model; the name of the run by default."""
    reference: Path | None = option(None, variable="DELTAWIRE_REFERENCE", panel=WHAT, value="DIR", exists=True)
    """Folder of the checkpoint that the run starts from, if its own name does not work here."""
    folder: Path | None = option(None, panel=WHAT, value="DIR", only_plugins=True)
    """With --engine vllm or sglang: folder for the version to start from, used again if it has that version; by
    default a temporary folder, removed at the end."""

    host: str = option("127.0.0.1", panel=WHERE)
    """Address to listen on."""
    port: int = option(8000, panel=WHERE, least=0, most=65535)
    """Port to listen on; 0: any that is free."""
    address: str = option("", variable="DELTAWIRE_ADDRESS", panel=WHERE, value="HOST:PORT")
    """Address for clients, as `deltawire fleet` shows it; by default where the server listens."""
    token: str | None = field(default=None, repr=False, metadata={"variable": "DELTAWIRE_TOKEN"})
    """Bearer token of the control routes. It has no flag: every process can read a command line."""

    poll: float = option(1.0, variable="DELTAWIRE_POLL", panel=FLOW, value="SECONDS", least=0.01)
    """Longest time between two polls of the run."""
    follow: bool = option(True, variable="DELTAWIRE_FOLLOW")
    """Go to every new version; otherwise catch up at start, then wait to be told."""
    heartbeat: float = option(10.0, variable="DELTAWIRE_HEARTBEAT", least=0)
    """Seconds between heartbeats in the bucket; 0: none."""
    heartbeats: str = option("", variable="DELTAWIRE_HEARTBEATS", panel=FLOW, value="URL")
    """The run's bucket, for heartbeats, if the run is read from an address that takes none (https://)."""
    kv: Kv | None = option(None, variable="DELTAWIRE_KV", panel=FLOW)
    """Keys and values of the old weights. version: running requests keep theirs, and no other request finds them.
    clear: all are dropped. keep: all requests find them. By default clear, with vLLM and SGLang version."""
    pause: Literal["keep", "wait", "abort"] = option("keep", variable="DELTAWIRE_PAUSE", only_plugins=True)
    """How running requests are treated at a swap."""
    staging_memory: float | None = option(None, variable="DELTAWIRE_STAGING_MEMORY", least=0, only_plugins=True)
    """Gigabytes of its device that each rank may take for a version; what is more waits in pinned host memory and is
    copied in the pause. By default 1.5 % of the rank's weights, at least half a gigabyte."""

    max_model_len: int | None = option(None, panel=ANSWERS, value="N", least=2)
    """Most tokens of prompt and answer together; the model's maximum by default."""
    logprobs_mode: LogprobsMode = option("raw_logprobs", panel=ANSWERS)
    """Log-probabilities before (raw) or after (processed) temperature and top_p."""
    version_wait: float = option(30.0, variable="DELTAWIRE_VERSION_WAIT", panel=ANSWERS, value="SECONDS", least=0)
    """Longest wait for a version that a request asks for, then a 409."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option("auto", panel=BUILTIN)
    """dtype to compute in; auto is float32 on a CPU, elsewhere that of most weights of the run."""
    device: str = option("cpu", panel=BUILTIN)
    """cpu, cuda, cuda:1 …"""
    threads: int | None = option(None, panel=BUILTIN, value="N", least=1)
    """CPU threads."""
    id: str | None = option(None, panel=BUILTIN, value="NAME")
    """Name in `log`; host and process by default."""
    guard_all: bool = option(False, panel=BUILTIN)
    """Ask for the token on /v1 and /metrics too."""
    max_batch: int = option(64, panel=BUILTIN, least=1)
    """Most sequences that run at once."""
    max_queue: int = option(1024, panel=BUILTIN, least=1)
    """Most sequences that wait; more get a 503."""
    kv_memory: float = option(2.0, panel=BUILTIN, value="GB", least=0.001)
    """Memory for keys and values."""
    max_body: float = option(8.0, panel=BUILTIN, value="MB", least=0.001)
    """Largest request."""
    max_connections: int = option(1024, panel=BUILTIN, least=8)
    """Most connections at once; fewer under a low ulimit -n."""
    request_timeout: float = option(600.0, panel=BUILTIN, value="SECONDS", least=0.001)
    """Longest time for one answer, then a 504."""
    grace: float = option(5.0, panel=BUILTIN, value="SECONDS", least=0)
    """Time for running requests when the server ends."""

    extra: Sequence[str] = ()
    """The engine's own flags."""

    @property
    def plugin_kv(self) -> Kv:
        """`kv` in vLLM and SGLang."""
        return self.kv or "version"

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ) -> ServerOptions:
        """Return the options that environment variables give. Raises Misconfigured."""
        given = {it: environment.get(it.variable, "").strip() for it in settings() if it.variable}
        return cls(**{it.name: it.parse(text) for it, text in given.items() if text})

    def variables(self) -> dict[str, str]:
        """Return the environment variables by which `read` finds these options again."""
        return {it.variable: it.write(getattr(self, it.name)) for it in settings() if it.variable}


# ── how each is given ────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, eq=False)
class Setting:
    """How an option is given, other than in Python."""

    name: str
    type: Any
    """None left out."""
    default: Any
    variable: str = ""
    """Environment variable; without one it has none."""
    panel: str = ""
    """Title above its flag in --help; without one it has no flag."""
    own_flag: str = ""
    """Its flag, where that is not its name with dashes."""
    value: str = ""
    """The placeholder for a value in --help."""
    least: float | None = None
    most: float | None = None
    exists: bool = False
    """Whether its folder must exist."""
    only_plugins: bool = False
    """Whether the built-in server has no such thing."""

    @property
    def flag(self) -> str:
        return self.own_flag or "--" + self.name.replace("_", "-")

    def parse(self, text: str) -> Any:
        """Read the text of the variable."""
        if self.type == Mapping[str, str]:
            # a comma before `name=` begins the next adapter, any other one separates two addresses of the same run
            entries = re.split(r",(?=\s*[^\s,=:?]+\s*=)", text)
            return named_adapters(self.variable, filter(str.strip, entries))
        if choices := get_args(self.type):
            return text if text in choices else self._refuse(text, " or ".join(choices))
        if self.type is bool:
            return text == "1" if text in ("0", "1") else self._refuse(text, "1 (on) or 0 (off)")
        if self.type not in (int, float):
            return self.type(text)
        try:
            found = self.type(text)
        except ValueError:
            found = math.nan
        least = self.least or 0
        return found if least <= found < math.inf else self._refuse(text, f"a number, at least {least:g}")

    def write(self, value: Any) -> str:
        """Return the text that `parse` reads as this value; empty for None."""
        if self.type == Mapping[str, str]:
            return ", ".join(f"{name}={run}" for name, run in value.items())
        if self.type is bool:
            return str(int(value))
        return "" if value is None else str(value)

    def _refuse(self, text: str, right: str) -> NoReturn:
        raise Misconfigured(f"{self.variable} is {text[:80]!r}; it can be {right}")


@cache
def settings() -> Sequence[Setting]:
    """Return how each option is given that a flag or a variable can give."""
    hints, usual = get_type_hints(ServerOptions), ServerOptions()
    return [
        Setting(it.name, _without_none(hints[it.name]), getattr(usual, it.name), **it.metadata)
        for it in fields(ServerOptions)
        if it.metadata
    ]


def _without_none(hint: Any) -> Any:
    """Return the type that text is read as: of several the last one."""
    return [kind for kind in get_args(hint) if kind is not NoneType][-1] if NoneType in get_args(hint) else hint


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
