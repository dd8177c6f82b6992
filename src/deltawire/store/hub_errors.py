"""Translate the Hub's answers and its storage engine's errors. The only place that reads their messages.

They are translated `from None`: they quote signed links, which are secrets for as long as they last.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from deltawire.core.errors import (
    DeltawireError,
    ObjectNotFound,
    PermissionDenied,
    StoreError,
    StoreFull,
    StoreUnavailable,
)
from deltawire.store.base import is_transient

if TYPE_CHECKING:
    import httpx2

_LOGIN = "set HF_TOKEN or run `hf auth login`"
_SCOPE = "this token may not do that: make one that may at https://huggingface.co/settings/tokens, and set HF_TOKEN"
# The storage engine keeps a status in its text alone: "HTTP status client error (403 Forbidden), domain: …"
_STATUS = re.compile(r"HTTP status (?:client|server) error \((\d{3})\b")
_LINK = re.compile(r"https?://\S+")


def of_response(response: httpx2.Response, where: str) -> DeltawireError:
    """Translate an error response of the Hub."""
    if response.headers.get("X-Error-Code") == "RepoNotFound":
        return NoBucket(f"{where}: there is no such bucket, or this token may not see it; if it should, {_LOGIN}")
    return _of_status(response.status_code, where, _said(response), _wait(response.headers))


def of_request(error: Exception, where: str) -> DeltawireError:
    """Translate the error of a request without a response."""
    if type(error).__name__ == "OfflineModeIsEnabled":
        return StoreError(f"{where}: HF_HUB_OFFLINE is set; unset it to reach the Hub")
    return StoreUnavailable(f"{where}: {_clean(error)}")


def of_storage(error: Exception, where: str) -> DeltawireError:
    """Translate an error of the storage engine. It retries by itself; unexplained errors may be temporary."""
    text = _clean(error)
    if status := _STATUS.search(str(error)):
        return _of_status(int(status[1]), where, text, None)
    kind = type(error).__name__
    if kind == "XetAuthenticationError":
        return PermissionDenied(f"{where}: {text}; {_LOGIN}")
    if kind == "XetObjectNotFoundError":
        return ObjectNotFound(f"no object at {where}: {text}")
    if "No space left on device" in text:
        return StoreFull(f"{where}: {text}; the storage engine keeps notes in HF_HOME")
    return StoreUnavailable(f"{where}: {text}")


class NoBucket(ObjectNotFound):
    """The whole bucket is missing: a reader finds no object, a writer can make it."""


def _of_status(status: int, where: str, said: str, wait: float | None) -> DeltawireError:
    if status == 401:
        return PermissionDenied(f"{where}: {said}; {_LOGIN}")
    if status == 403:
        return PermissionDenied(f"{where}: {said}; {_SCOPE}")
    if status == 404:
        return ObjectNotFound(f"no object at {where}")
    if status in (402, 413, 507):
        return StoreFull(f"{where}: {said}")
    if is_transient(status):
        return StoreUnavailable(f"{where}: {said}", wait)
    return StoreError(f"{where}: {said}")


def _said(response: httpx2.Response) -> str:
    message = response.headers.get("X-Error-Message", "")
    return _clean(f"{response.status_code} {response.reason_phrase}{': ' + message if message else ''}")


def _wait(headers: Mapping[str, str]) -> float | None:
    """Seconds to wait before a retry: `Retry-After`, or the rest of the rate limit's window."""
    from huggingface_hub.utils import parse_ratelimit_headers

    said = headers.get("Retry-After", "")
    if said.isdecimal() and len(said) < 20:
        return float(said)
    limit = parse_ratelimit_headers(headers)
    return float(limit.reset_in_seconds) if limit is not None and limit.remaining == 0 else None


def _clean(said: object) -> str:
    """One short line without links, which may be signed."""
    return _LINK.sub("…", " ".join(str(said).split()))[:300] or type(said).__name__
