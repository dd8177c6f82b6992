"""Endpoint, region and credentials of an S3 address, as users of the AWS tools expect.

    what          looked for in this order
    endpoint      ?endpoint= in the URL, AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, AWS_ENDPOINT, the profile's endpoint_url
    region        ?region=, AWS_REGION, AWS_DEFAULT_REGION, the profile's region, us-east-1
    profile       ?profile=, AWS_PROFILE, AWS_DEFAULT_PROFILE, "default"
    credentials   the profile if the URL names one; AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; a role given to the
                  machine by its environment (EKS, ECS); the profile; the instance's own role

The bucket client reads variables but no profiles, hence this file. Secrets are not kept: they are read when a request
needs them, so keys that were rotated on disk are found.
"""

from __future__ import annotations

import configparser
import ipaddress
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from deltawire.core.errors import BadURL, MissingExtra, PermissionDenied
from deltawire.core.extras import install_command

OPTIONS = ("endpoint", "profile", "region")
"""What an s3:// URL may say after `?`. No place for a secret among them."""

_REREAD = timedelta(minutes=5)
"""How long a key from a file is used before the file is read again."""

_GIVEN_ROLES = (
    "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)  # fmt: skip
_BY_BOTO3 = ("credential_process", "role_arn", "login_session")
"""What a profile has that signs in by other means than a key; also all that begins with sso_."""
_NEAR = (".local", ".localhost", ".internal", ".lan", ".home.arpa", ".svc", ".test")

Provider = Callable[[], dict[str, Any]]
"""Called for credentials when a request needs them: access_key_id, secret_access_key, token, expires_at."""


@dataclass(frozen=True, slots=True)
class S3Settings:
    """Where an S3 address leads, and the credentials for it."""

    endpoint: str | None
    """None is Amazon's own for the region."""
    region: str
    provider: Provider | None
    """None leaves credentials to the client, which asks the machine it runs on."""


def settings(options: Mapping[str, str], environ: Mapping[str, str]) -> S3Settings:
    """Find the settings of an address. `options` are those of the URL."""
    name = options.get("profile") or environ.get("AWS_PROFILE") or environ.get("AWS_DEFAULT_PROFILE")
    profile = _profile(name, environ)
    variables = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    endpoint = options.get("endpoint") or _first(environ, *variables) or profile.get("endpoint_url")
    if endpoint:
        endpoint = check_endpoint(endpoint)
    region = options.get("region") or _first(environ, "AWS_REGION", "AWS_DEFAULT_REGION") or profile.get("region")
    return S3Settings(endpoint, region or "us-east-1", _provider(options, environ, name, profile))


def check_endpoint(endpoint: str) -> str:
    """Return the endpoint as it is used. One that holds a secret is refused without repeating it."""
    parts = urlsplit(endpoint)
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise BadURL(
            "an endpoint has no place for credentials or options; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise BadURL(
            f"the endpoint {endpoint!r} is not a URL this client may use; write https://host or http://host:port"
        )
    return endpoint.rstrip("/")


def is_near(endpoint: str) -> bool:
    """Whether an endpoint is on this machine or in a private network, where http:// is acceptable."""
    host = (urlsplit(endpoint).hostname or "").lower()
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return "." not in host or host.endswith(_NEAR)
    return address.is_private or address.is_loopback or address.is_link_local


def _provider(
    options: Mapping[str, str], environ: Mapping[str, str], name: str | None, profile: Mapping[str, str]
) -> Provider | None:
    key, secret = environ.get("AWS_ACCESS_KEY_ID"), environ.get("AWS_SECRET_ACCESS_KEY")
    if environ.get("AWS_SKIP_SIGNATURE", "").lower() in ("1", "true", "yes", "on"):
        return None
    if "profile" not in options:
        if bool(key) != bool(secret):
            missing = "AWS_SECRET_ACCESS_KEY" if key else "AWS_ACCESS_KEY_ID"
            raise PermissionDenied(f"half of a key: set {missing} too, or neither")
        if key:
            token = environ.get("AWS_SESSION_TOKEN") or environ.get("AWS_TOKEN")
            return lambda: {"access_key_id": key, "secret_access_key": secret, "token": token, "expires_at": None}
        if any(environ.get(variable) for variable in _GIVEN_ROLES):
            return None
    if "aws_access_key_id" in profile:
        return lambda: _from_file(name, environ)
    if any(entry in _BY_BOTO3 or entry.startswith("sso_") for entry in profile):
        return _from_boto3(name)
    if name is not None and not profile:
        raise PermissionDenied(f"there is no AWS profile {name!r} in {_files(environ)[0]} or {_files(environ)[1]}")
    return None


# ── the files of the AWS tools ───────────────────────────────────────────────────────────────────────────────────────


def _profile(name: str | None, environ: Mapping[str, str]) -> dict[str, str]:
    """Read a profile from both files; the credentials file wins. Empty where there is no such profile."""
    found: dict[str, str] = {}
    credentials, config = _files(environ)
    wanted = name or "default"
    for path, sections in ((config, (f"profile {wanted}", wanted)), (credentials, (wanted,))):
        # no interpolation: a secret may hold a percent sign. `default_section` is moved away, it is a profile here.
        parser = configparser.ConfigParser(interpolation=None, default_section="", strict=False)
        problem = ""
        try:
            parser.read(path, encoding="utf-8")
        except (configparser.Error, UnicodeDecodeError):
            # not in its words: they quote the line, which may be a secret
            problem = "does not parse: write lines `[profile]` and `name = value`"
        except OSError as error:
            problem = f"cannot be read: {error.strerror}"
        if problem:
            raise PermissionDenied(f"{path} {problem}")
        for section in sections:
            if parser.has_section(section):
                found.update(parser[section])
                break
    return found


def _files(environ: Mapping[str, str]) -> tuple[Path, Path]:
    home = Path(environ.get("HOME") or os.path.expanduser("~")) / ".aws"
    return (
        Path(environ.get("AWS_SHARED_CREDENTIALS_FILE") or home / "credentials").expanduser(),
        Path(environ.get("AWS_CONFIG_FILE") or home / "config").expanduser(),
    )


def _from_file(name: str | None, environ: Mapping[str, str]) -> dict[str, Any]:
    profile = _profile(name, environ)
    if not profile.get("aws_access_key_id") or not profile.get("aws_secret_access_key"):
        raise PermissionDenied(f"the AWS profile {name or 'default'!r} has no whole key any more")
    return {
        "access_key_id": profile["aws_access_key_id"],
        "secret_access_key": profile["aws_secret_access_key"],
        "token": profile.get("aws_session_token"),
        "expires_at": datetime.now(timezone.utc) + _REREAD,
    }


def _from_boto3(name: str | None) -> Provider:
    """By the AWS tools' own library: a program, a role, single sign-on."""
    who = f"the AWS profile {name or 'default'!r}"
    try:
        import boto3
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        raise MissingExtra(
            f"{who} signs in by a program, a role or single sign-on, which needs boto3: {install_command('aws')}; "
            f'or run eval "$(aws configure export-credentials --profile {name or "default"} --format env)"'
        ) from None

    def provide() -> dict[str, Any]:
        try:
            # a new session each time, so that a profile that was changed on disk is found
            return dict(Boto3CredentialProvider(boto3.Session(profile_name=name), ttl=_REREAD)())
        except Exception as error:  # not in its words: they quote what a program printed
            kind = type(error).__name__
        raise PermissionDenied(
            f"{who} gave no credentials ({kind}); run `aws sts get-caller-identity` with it to see why"
        )

    return provide


def _first(environ: Mapping[str, str], *names: str) -> str | None:
    return next((environ[name] for name in names if environ.get(name)), None)
