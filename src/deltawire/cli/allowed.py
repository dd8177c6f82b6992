"""Places where servers may be: a proxy may send a token to every address that it is given."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import deltawire as dw

from ..errors import Misconfigured

if TYPE_CHECKING:
    from ..fleet import Member

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
                host, _ = dw.host_and_port(f"{place.removeprefix('.')}:1") or (None, 0)
                if not isinstance(host, str):
                    raise Misconfigured(
                        f"{place[:80]!r} is neither a network such as 10.0.0.0/8 nor a domain such as .example.internal"
                    ) from None
                self._domains.append(place.lower())

    def __contains__(self, address: str) -> bool:
        found = dw.host_and_port(address)
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


def addresses(found: Iterable[Member], allowed: Allowed) -> list[str]:
    """The addresses of these that may be used, each once."""
    return sorted({member.address for member in found if member.address in allowed})
