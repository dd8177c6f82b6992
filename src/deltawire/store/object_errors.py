"""What the bucket client's errors mean. The only place that reads its messages.

The client keeps the HTTP status in the text alone and gives most failures one class (a 403 is "permission denied" on a
get and "generic" on a list), so the text decides wherever it names a status or an error code.
"""

from __future__ import annotations

import re

from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    InvalidPathError,
    JoinError,
    PermissionDeniedError,
    UnauthenticatedError,
)

from deltawire.core.errors import (
    AlreadyExists,
    BadURL,
    DeltawireError,
    ObjectNotFound,
    PermissionDenied,
    StoreError,
    StoreFull,
    StoreUnavailable,
    TruncatedFile,
    UnsafeName,
)

CLIENT_ERRORS = (BaseError, FileNotFoundError, ValueError)
"""All that a call into the client raises on its own account."""

# Error codes, as servers write them between <Code> tags.
_NO_BUCKET = {"NoSuchBucket", "ContainerNotFound"}
_BUSY = {"ConditionalRequestConflict", "OperationAborted", "RequestTimeout", "ServerBusy", "SlowDown"}
_BAD_LOGIN = {"AuthFailure", "ExpiredToken", "InvalidAccessKeyId", "InvalidToken", "TokenRefreshRequired"}
_NO_SPACE = {"InsufficientStorage", "QuotaExceeded", "XMinioStorageFull"}
_DENIED = (PermissionDeniedError, UnauthenticatedError)

# Where a client without credentials goes to ask for some: the machine it hopes to run on.
_LOGIN_SERVICE = re.compile(r"Error performing \w+ http://(169\.254\.|metadata\.google\.internal)")

_LOGIN_HINT = (
    "no credentials found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (profiles are not read: "
    "`aws configure export-credentials --format env` prints them), GOOGLE_APPLICATION_CREDENTIALS, "
    "or AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY"
)


def translate(error: Exception, where: str) -> DeltawireError:
    """`where` is the URL of the object, or of the store for a listing."""
    text, _, debug = str(error).partition("\n\nDebug source:")
    # What the server answered, apart from what precedes it: the key, which could say anything.
    answer = text.partition("Server returned non-2xx status code: ")[2]
    status = int(answer[:3]) if answer[:3].isdecimal() else 0
    code = _tag("Code", answer)
    reason = _reason(text, answer, debug)

    if code in _NO_BUCKET:
        return BadURL(f"{where}: no such bucket; create it first, or check its name and the endpoint")
    if _LOGIN_SERVICE.search(text):
        return PermissionDenied(f"{where}: {_LOGIN_HINT}")
    # Before the classes: the client calls every 409 "already exists", also the one by which S3 says "busy, try again".
    if code in _BUSY:
        return StoreUnavailable(f"{where}: {reason}")
    if isinstance(error, FileNotFoundError):
        return ObjectNotFound(f"no object at {where}")
    if isinstance(error, AlreadyExistsError):
        return AlreadyExists(f"{where} exists already")
    if isinstance(error, _DENIED) or status in (401, 403) or code in _BAD_LOGIN:
        return PermissionDenied(f"{where}: {reason}")
    if status == 416 or text.startswith("Generic InMemory error: Invalid range"):
        return TruncatedFile(f"{where}: {reason}")
    if status == 507 or code in _NO_SPACE:
        return StoreFull(f"{where}: {reason}")
    if isinstance(error, InvalidPathError) or text.startswith("Could not parse path"):
        return UnsafeName(f"{where}: {reason}")
    if text.endswith("HTTP error: builder error"):
        return BadURL(f"{where}: the endpoint is not a URL this client may use: {reason}")
    if not answer and ("HTTP error: " in text or isinstance(error, JoinError)):
        return StoreUnavailable(f"{where}: {reason}")
    # 501 is an answer about the request, not about the moment.
    if status in (408, 425, 429) or (status >= 500 and status != 501):
        return StoreUnavailable(f"{where}: {reason}")
    return StoreError(f"{where}: {reason}")


def _tag(name: str, text: str) -> str | None:
    found = re.search(rf"<{name}>([^<]*)</{name}>", text)
    return found[1] if found else None


def _reason(text: str, answer: str, debug: str) -> str:
    """One line a person can act on: the server's own words, or what the socket said."""
    if answer:
        said = (answer.partition(":")[0], _tag("Code", answer), _tag("Message", answer))
        return ": ".join(part for part in said if part)
    short = text.rpartition(" - ")[2].strip()
    below = re.search(r'(?:message|error): "([^"]+)"|source: (TimedOut)', debug)
    return f"{short} ({below[1] or 'timed out'})" if below else short
