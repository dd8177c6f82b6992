"""Access to a server: tokens and addresses. Imports no heavy module, so that a refusal is immediate."""

from __future__ import annotations

import hmac
import ipaddress
import os
from pathlib import Path

from ..core.errors import Misconfigured


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


def is_bearer(header: str, token: str) -> bool:
    """Whether an Authorization header carries this token."""
    scheme, _, given = header.partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), token.encode())


def read_token(file: Path | None) -> str | None:
    """Read the token from a file or the environment; never from the command line, which every process can read."""
    if file is None:
        return os.environ.get("DELTAWIRE_TOKEN", "").strip() or None
    token = file.read_text().strip()
    if not token:
        raise Misconfigured(f"the token file {file} is empty: write a token into it, or leave the option out")
    return token
