"""A bucket address as the user writes it, and the client for it.

    s3://bucket/run    s3://bucket/run?endpoint=http://127.0.0.1:8333&region=us-east-1    gs://…    az://…    memory://…

Credentials come from the environment or the files of the AWS tools, never from the address: addresses are logged, shown
and handed on.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote, urlsplit

from obstore.store import from_url

from deltawire.core.errors import BadURL, UnsafeName
from deltawire.store import aws, clouds
from deltawire.store.base import check_key

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Client

SCHEMES = ("az", "gs", "memory", "s3")

_FAMILIES = {"s3": "AWS", "gs": "GOOGLE", "az": "AZURE"}
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, …",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, …",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, …",
}
# `timeout` bounds a whole request, so it must fit a large get. `read_timeout` ends a stalled connection, but takes a
# whole upload for one wait: the parts in flight must go up within it, at 1.1 MB/s. AWS_READ_TIMEOUT and so on override.
_TIMEOUTS = {"connect_timeout": "5s", "read_timeout": "60s", "timeout": "900s"}
# HTTP options that users set by environment. Given any of ours, the client ignores all of theirs, so carry them over.
_CLIENT_VARIABLES = (
    "allow_http", "allow_invalid_certificates", "connect_timeout", "proxy_url", "read_timeout", "timeout", "user_agent",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Address:
    """A bucket address, parsed."""

    scheme: str
    bucket: str
    prefix: str
    """Folder of the run in the bucket, without slashes around it."""
    options: dict[str, str]
    """The options after `?`."""
    url: str
    """The whole address, normalised."""


def parse(url: str) -> Address:
    """Parse an address. One that could hold a secret is refused, and not repeated in the message."""
    parts = urlsplit(url)
    options = _options(parts.scheme, parts.query)
    if "@" in parts.netloc or options is None:
        known = ", ".join(f"?{name}=" for name in aws.OPTIONS)
        allowed = f"; all it may say is {known}" if parts.scheme == "s3" else ""
        raise BadURL(
            f"{parts.scheme}://… has no place for credentials or such options{allowed}. Credentials go into the "
            f"environment ({_CREDENTIALS.get(parts.scheme, 'none for this store')})"
        )
    if parts.fragment:
        raise BadURL(f"{parts.scheme}://{parts.netloc}{parts.path}#…: write '#' as %23")
    prefix = unquote(parts.path).strip("/")
    if not parts.netloc:
        raise BadURL(f"{url}: no bucket; write {parts.scheme}://bucket/run")
    if prefix:
        try:
            check_key(prefix)
        except UnsafeName as error:
            raise BadURL(f"{url}: {error}") from None
    place = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
    return Address(parts.scheme, parts.netloc, prefix, options, f"{place}?{parts.query}" if parts.query else place)


def _options(scheme: str, query: str) -> dict[str, str] | None:
    """The options after `?`; None if one is unknown."""
    pairs = parse_qsl(query, keep_blank_values=True)
    options = dict(pairs)
    if not query:
        return {}
    if scheme != "s3" or not pairs or len(options) != len(pairs):
        return None
    return options if all(name in aws.OPTIONS and value for name, value in pairs) else None


def connect(address: Address, environ: Mapping[str, str], retries: int) -> Client:
    """Make the client of an address. Nothing is contacted yet."""
    backoff: Any = {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=2), "base": 2}
    config: Any = {}
    options: Any = _client_options(address.scheme, environ)
    provider: aws.Provider | None = None
    if address.scheme == "s3":
        chosen = aws.settings(address.options, environ)
        provider = chosen.provider
        config = {"region": chosen.region, **({"endpoint": chosen.endpoint} if chosen.endpoint else {})}
        _check_agreement(address, chosen.endpoint)
        if bundle := environ.get("AWS_CA_BUNDLE"):
            options["root_certificate"] = _read_bundle(bundle)
    elif address.scheme == "az":
        config = clouds.azure(environ)
    else:
        config = clouds.google(environ)
    endpoint = clouds.google_endpoint(environ) if address.scheme == "gs" else config.get("endpoint")
    _allow_http(address.scheme, endpoint, options)
    arguments: Any = {
        "config": config or None,
        "client_options": options,
        "retry_config": {"max_retries": retries, "retry_timeout": timedelta(seconds=30), "backoff": backoff},
    }
    if provider is not None:
        arguments["credential_provider"] = provider
    client: Client = from_url(f"{address.scheme}://{address.bucket}", **arguments)
    return client


def _client_options(scheme: str, environ: Mapping[str, str]) -> dict[str, Any]:
    family = _FAMILIES[scheme]
    return _TIMEOUTS | {name: value for name in _CLIENT_VARIABLES if (value := environ.get(f"{family}_{name.upper()}"))}


def _allow_http(scheme: str, endpoint: str | None, options: dict[str, Any]) -> None:
    """Allow http:// to a server near by; across the internet it is an error unless it was asked for."""
    if not (endpoint or "").startswith("http://") or "allow_http" in options:
        return
    if endpoint and not aws.is_near(endpoint):
        raise BadURL(
            f"{endpoint} would carry everything unencrypted through the internet; write https://, or set "
            f"{_FAMILIES[scheme]}_ALLOW_HTTP=true if that is meant"
        )
    options["allow_http"] = True


def _check_agreement(address: Address, endpoint: str | None) -> None:
    """Refuse AWS_ENDPOINT_URL_S3 where it names another endpoint: the client prefers it to what it is given."""
    winner = os.environ.get("AWS_ENDPOINT_URL_S3")
    if winner and winner.rstrip("/") != endpoint:
        raise BadURL(
            f"{address.url} is to use the endpoint {endpoint}, but AWS_ENDPOINT_URL_S3 names another: unset it"
        )


def _read_bundle(path: str) -> bytes:
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        raise BadURL(f"AWS_CA_BUNDLE names {path}, which cannot be read: {error.strerror}") from None
