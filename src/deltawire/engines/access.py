"""Access to a server: tokens, addresses, sockets. Imports no heavy module, so that a refusal is immediate."""

from __future__ import annotations

import errno
import hmac
import ipaddress
import logging
import os
import socket
from pathlib import Path

from ..core.errors import Misconfigured

__all__ = ["check_guarded", "is_bearer", "is_loopback", "listen", "public_address", "read_token"]

log = logging.getLogger("deltawire")


def check_guarded(host: str, token: str | None, risk: str = "reach /pause and /resume") -> None:
    """Raise Misconfigured for a server without a token that can be reached from other machines, who could do `risk`."""
    if token is None and not is_loopback(host):
        raise Misconfigured(
            f"listening on {host} lets others {risk}: set a bearer token in DELTAWIRE_TOKEN "
            "(or --token-file), or listen on 127.0.0.1"
        )


def is_loopback(host: str | None) -> bool:
    """Whether a server that listens there can be reached from this machine only; None listens everywhere."""
    try:
        return ipaddress.ip_address(host or "0.0.0.0").is_loopback
    except ValueError:
        return host == "localhost"


def public_address(host: str | None, port: int) -> str:
    """Return host:port for clients of a server that listens there, as far as this machine can know it.

    Empty, with a warning, where that is not an address that a heartbeat may have (bucket/addresses.py).
    """
    from ..bucket.addresses import host_and_port

    if host in (None, "", "0.0.0.0", "::"):
        # all addresses of this machine: the one that packets to other networks leave from; nothing is sent
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(("192.0.2.1", 9))
                host = str(probe.getsockname()[0])
            except OSError:
                host = "127.0.0.1"
    found = f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"
    if host_and_port(found) is None:
        log.warning("no proxy can be sent to %s: set DELTAWIRE_ADDRESS to host:port for clients", found)
        return ""
    return found


def is_bearer(header: str, token: str) -> bool:
    """Whether an Authorization header carries this token."""
    scheme, _, given = header.partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), token.encode())


def listen(host: str, port: int) -> socket.socket:
    """Return a bound socket; port 0 chooses a free one. Clients cannot connect before the server runs."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.set_inheritable(True)
    except OSError as error:
        bound.close()
        known = {
            errno.EADDRINUSE: f"port {port} of {host} is in use: end what listens there, or choose another with --port "
            "(0: any)",
            errno.EACCES: f"port {port} needs more rights than this process has: choose one from 1024 on with --port",
        }
        other = f"{host} is no address of this machine ({error.strerror or error}): choose one with --host"
        raise Misconfigured(known.get(error.errno or 0, other)) from None
    return bound


def read_token(file: Path | None) -> str | None:
    """Read the token from a file or the environment; never from the command line, which every process can read."""
    if file is None:
        return os.environ.get("DELTAWIRE_TOKEN", "").strip() or None
    token = file.read_text().strip()
    if not token:
        raise Misconfigured(f"the token file {file} is empty: write a token into it, or leave the option out")
    return token
