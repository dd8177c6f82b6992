"""Addresses that a heartbeat may name, and places where servers may be.

Whoever can write the bucket can write a heartbeat, and a proxy may send a token to every address it is given. So an
address is used only if it is host:port in a strict form and, by `Allowed`, a place where servers of this fleet can be.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence

from ..core.errors import Misconfigured

_NAME = re.compile(
    r"(?=.{1,253}\Z)[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*", re.I | re.A
)
_PORT = re.compile(r"[1-9][0-9]{0,4}")

_METADATA = [
    ipaddress.ip_network(place)
    for place in (
        "169.254.169.0/24", "169.254.170.0/24", "100.100.100.200", "168.63.129.16", "192.0.0.192",
        "fd00:ec2::/32", "fd20:ce::254", "fd00:42::42", "fe80::a9fe:a9fe",
    )
]  # fmt: skip
"""Where clouds keep credentials of their machines: all clouds, Alibaba, Azure, Oracle; AWS, Google, Scaleway, all."""

_NOWHERE = [ipaddress.ip_network(place) for place in ("0.0.0.0/8", "64:ff9b:1::/48")]
"""Networks that reach this machine, or wherever a translator leads, and that `ipaddress` does not call reserved."""

_NAT64 = ipaddress.ip_network("64:ff9b::/96")

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


def split_address(text: str) -> tuple[str | IpAddress, int] | None:
    """Return host and port of `host:port`, `1.2.3.4:port` or `[::1]:port`; None if it is anything else."""
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
    found = split_address(text)
    if found is None:
        raise Misconfigured(f"{text[:80]!r} is no address for clients: write host:port, such as 10.0.0.5:8000")
    host, port = found
    return f"[{host}]:{port}" if isinstance(host, ipaddress.IPv6Address) else f"{host}:{port}"


def _reached(host: IpAddress) -> list[IpAddress]:
    """An address, and the IPv4 addresses in it, where packets to it may end: mapped, 6to4, Teredo, NAT64."""
    if isinstance(host, ipaddress.IPv4Address):
        return [host]
    inner = [host.ipv4_mapped, host.sixtofour, *(host.teredo or ())]
    if host in _NAT64:
        inner.append(ipaddress.IPv4Address(host.packed[-4:]))
    return [host, *(address for address in inner if address is not None)]


def _is_within(host: IpAddress, networks: Iterable[ipaddress.IPv4Network | ipaddress.IPv6Network]) -> bool:
    return any(host in network for network in networks)


def _is_usable(host: IpAddress) -> bool:
    """Whether other machines can have this address, each its own."""
    unusable = host.is_loopback or host.is_link_local or host.is_multicast or host.is_unspecified or host.is_reserved
    return not (unusable or _is_within(host, _NOWHERE) or getattr(host, "is_site_local", False))


class Allowed:
    """Places where servers may be: networks (`10.0.0.0/8`) and domains (`.example.internal`).

    Without any, all IP addresses that are not reserved, of one machine, one link or a group, also not by an IPv4
    address inside; names need to be listed, since a proxy resolves them, and may refuse its whole configuration if it
    cannot. Where clouds keep credentials, only an address that is listed by itself is used.
    """

    def __init__(self, places: Sequence[str] = ()) -> None:
        self._networks: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = []
        self._domains: list[str] = []
        for place in places:
            try:
                self._networks.append(ipaddress.ip_network(place, strict=False))
            except ValueError:
                if not _NAME.fullmatch(place.removeprefix(".")):
                    raise Misconfigured(
                        f"{place[:80]!r} is neither a network such as 10.0.0.0/8 nor a domain such as .example.internal"
                    ) from None
                self._domains.append(place.lower())

    def __contains__(self, address: str) -> bool:
        found = split_address(address)
        if found is None:
            return False
        host, _ = found
        if isinstance(host, str):
            return any(host == domain or (domain[0] == "." and host.endswith(domain)) for domain in self._domains)
        reached = _reached(host)
        if any(_is_within(each, _METADATA) for each in reached):
            return _is_within(host, [network for network in self._networks if network.num_addresses == 1])
        if self._networks or self._domains:
            return _is_within(host, self._networks)
        return all(_is_usable(each) for each in reached)
