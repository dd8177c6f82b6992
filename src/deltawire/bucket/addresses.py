"""Addresses that a heartbeat may name: host:port in a strict form, since whoever can write the bucket can write one."""

from __future__ import annotations

import ipaddress
import re

from ..core.errors import Misconfigured

_NAME = re.compile(
    r"(?=.{1,253}\Z)[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*", re.I | re.A
)
_PORT = re.compile(r"[1-9][0-9]{0,4}")

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


def host_and_port(text: str) -> tuple[str | IpAddress, int] | None:
    """Return host and port of `host:port`, `1.2.3.4:port` or `[::1]:port`; None if it is anything else.

    dw.host_and_port("10.0.0.5:8000")       # (IPv4Address("10.0.0.5"), 8000); a name stays text
    """
    host, colon, port = text.rpartition(":")
    if not colon or not _PORT.fullmatch(port) or int(port) > 65535:
        return None
    bracketed = host.startswith("[") and host.endswith("]")
    try:
        found = ipaddress.ip_address(host[1:-1] if bracketed else host)
    except ValueError:
        # a name must not look like an address that other programs read differently, such as 0x7f.1
        named = not bracketed and _NAME.fullmatch(host) and not _is_number(host.rpartition(".")[2])
        return (host.lower(), int(port)) if named else None
    if bracketed != (found.version == 6) or getattr(found, "scope_id", None):
        return None
    return found, int(port)


def _is_number(label: str) -> bool:
    return bool(re.fullmatch(r"[0-9]+|0x[0-9a-f]*", label, re.I))


def checked_address(text: str) -> str:
    """Return an address in its usual form; raises Misconfigured for anything but host:port."""
    found = host_and_port(text)
    if found is None:
        raise Misconfigured(f"{text[:80]!r} is no address for clients: write host:port, such as 10.0.0.5:8000")
    host, port = found
    return f"[{host}]:{port}" if isinstance(host, ipaddress.IPv6Address) else f"{host}:{port}"
