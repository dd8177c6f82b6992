"""Translate the bucket client's errors. The only place that reads its messages.

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
from deltawire.store.base import SLOW_DOWN_S, is_transient, rest_after

CLIENT_ERRORS = (BaseError, FileNotFoundError, ValueError)
"""All that a call into the client raises on its own account."""

# Error codes, as servers write them between <Code> tags.
_NO_BUCKET = {"NoSuchBucket", "ContainerNotFound"}
_BUSY = {"ConditionalRequestConflict", "OperationAborted", "RequestTimeout"}
_OVERLOADED = {"ServerBusy", "SlowDown"}
_BAD_LOGIN = {
    "AuthFailure", "ExpiredToken", "InvalidAccessKeyId", "InvalidToken", "RequestExpired", "RequestTimeTooSkewed",
    "TokenRefreshRequired",
}  # fmt: skip
_BAD_REGION = {"AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "PermanentRedirect"}
_NO_SPACE = {
    "InsufficientCapacity", "InsufficientStorage", "QuotaExceeded", "XMinioAdminBucketQuotaExceeded",
    "XMinioStorageFull",
}  # fmt: skip
_DENIED = (PermissionDeniedError, UnauthenticatedError)

# Where a client without credentials goes to ask for some: the machine it hopes to run on.
_LOGIN_SERVICE = re.compile(r"Error performing \w+ http://(169\.254\.|metadata\.google\.internal)")

_LOGIN = {
    "az": "set AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
    "gs": (
        "name the key file of a service account in GOOGLE_APPLICATION_CREDENTIALS, or run "
        "`gcloud auth application-default login` (for an emulator set STORAGE_EMULATOR_HOST)"
    ),
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
}
"""Where the client of each scheme looks for credentials."""

# How the client itself says that a range begins behind the end; the last is Azurite's answer for an empty object.
_PAST_THE_END = re.compile(
    r"^Generic \w+ error: (Invalid range|Wanted range starting at|Failed to parse .*CONTENT_RANGE.* \"bytes 0--1/0)"
)

# What the server says is wrong → what to do about it.
_NEXT = {
    "AccessDenied": "this key may not do that here; allow it to get, put, list and delete objects under this prefix",
    "AuthorizationHeaderMalformed": "set AWS_REGION, or ?region= in the URL, to the bucket's region",
    "ExpiredToken": "sign in again and restart with the new session token",
    "IllegalLocationConstraintException": "set AWS_REGION, or ?region= in the URL, to the bucket's region",
    "InternalError": "if this goes on, look whether the server's disk is full: some servers then answer so",
    "InvalidAccessKeyId": "this server does not know the key: check AWS_ACCESS_KEY_ID or the profile, and the endpoint",
    "InvalidToken": "AWS_SESSION_TOKEN does not belong to this key; unset it for a permanent one",
    "PermanentRedirect": "set AWS_REGION, or ?region= in the URL, to the bucket's region",
    "RequestExpired": "set this machine's clock",
    "RequestTimeTooSkewed": "set this machine's clock: it is too far from the server's",
    "SignatureDoesNotMatch": "the secret does not belong to the key: check AWS_SECRET_ACCESS_KEY or the profile",
}
_NO_REASON = "the answer gives no reason; check the key, its permissions and the bucket's name"
_NO_SPACE_HINT = "free some space, raise the quota, or prune old versions"
_REGION_HINT = "the bucket lies in another region; set AWS_REGION, or ?region= in the URL, to that"

# What the client's TLS layer says, which no second attempt will change.
_TLS = {
    "InvalidCertificate": "the server's certificate is not trusted; name its authority's file in AWS_CA_BUNDLE",
    "InvalidMessage": "this server does not speak TLS on that port; write http:// instead of https://",
}
_ASKED_US = "External AWS credential provider: "


def translate(error: Exception, where: str) -> DeltawireError:
    """Translate an error of the client. `where` is the URL of the object, or of the store for a listing."""
    text, _, debug = str(error).partition("\n\nDebug source:")
    # What the server answered, apart from what precedes it: the key, which could say anything.
    answer = text.partition("Server returned non-2xx status code: ")[2]
    status = int(answer[:3]) if answer[:3].isdecimal() else 0
    code = _tag("Code", answer) or _batch_code(text)
    reason = _reason(text, answer, debug)

    if code in _NO_BUCKET:
        return BadURL(f"{where}: no such bucket; create it first, or check its name and the endpoint")
    if _LOGIN_SERVICE.search(text) or "Account must be specified" in text:
        return PermissionDenied(f"{where}: no credentials found; {_LOGIN[where.partition(':')[0]]}")
    if _ASKED_US in text:
        # our own words come back with the name of their class in front
        return PermissionDenied(f"{where}: {text.partition(_ASKED_US)[2].partition(': ')[2].strip()}")
    if code in _BAD_REGION or "Received redirect without LOCATION" in text:
        return BadURL(f"{where}: {reason if code else _REGION_HINT}")
    # Before the classes: the client calls every 409 "already exists", also the one by which S3 says "busy, try again".
    if code in _OVERLOADED:
        return StoreUnavailable(f"{where}: {reason}", SLOW_DOWN_S)
    if code in _BUSY:
        return StoreUnavailable(f"{where}: {reason}")
    if isinstance(error, FileNotFoundError):
        return ObjectNotFound(f"no object at {where}")
    if isinstance(error, AlreadyExistsError):
        return AlreadyExists(f"{where} exists already")
    if status == 507 or code in _NO_SPACE:
        return StoreFull(f"{where}: {reason}; {_NO_SPACE_HINT}")
    if isinstance(error, _DENIED) or status in (401, 403) or code in _BAD_LOGIN or code == "AccessDenied":
        return PermissionDenied(f"{where}: {reason}")
    if status == 416 or _PAST_THE_END.search(text):
        return TruncatedFile(f"{where}: {reason}")
    if isinstance(error, InvalidPathError) or text.startswith("Could not parse path"):
        return UnsafeName(f"{where}: {reason}")
    if "ETag Header missing" in text:
        return StoreError(f"{where}: {reason}; a run needs etags, and not every emulator sends them")
    if text.endswith("HTTP error: builder error"):
        return BadURL(f"{where}: the endpoint is not a URL this client may use: {reason}")
    if not answer and (trouble := re.search(r"error: (InvalidCertificate|InvalidMessage)\(\s*(\w+)", debug)):
        return StoreError(f"{where}: {_TLS[trouble[1]]} ({trouble[2]})")
    if not answer and ("HTTP error: " in text or isinstance(error, JoinError)):
        return StoreUnavailable(f"{where}: {reason}")
    if is_transient(status):
        # the client keeps no headers, so what a Retry-After says is not known
        return StoreUnavailable(f"{where}: {reason}", rest_after(status))
    return StoreError(f"{where}: {reason}")


def _tag(name: str, text: str) -> str | None:
    found = re.search(rf"<{name}>([^<]*)</{name}>", text)
    return found[1] if found else None


def _batch_code(text: str) -> str | None:
    """The error code of one object in a response with status 200: S3 deletes in batches."""
    found = re.search(r"DeleteObjects request failed .*\(code: (\w+)\)$", text.strip(), re.DOTALL)
    return found[1] if found else None


def _reason(text: str, answer: str, debug: str) -> str:
    """Return the reason in one line: the message of the server or of the socket, and the next step."""
    if answer:
        code = _tag("Code", answer)
        said = ": ".join(part for part in (answer.partition(":")[0].strip(), code, _tag("Message", answer)) if part)
        if not code and said.startswith(("401", "403")):
            return f"{said}; {_NO_REASON}"
        return f"{said}; {_NEXT[code]}" if code in _NEXT else said
    if code := _batch_code(text):
        return f"{code}; {_NEXT[code]}" if code in _NEXT else code
    short = text.rpartition(" - ")[2].strip()
    below = re.search(r'(?:message|error): "([^"]+)"|source: (TimedOut)', debug)
    why = f"{short} ({below[1] or 'timed out'})" if below else short
    return f"{why}; check the endpoint and the network" if "HTTP error" in short else why
