"""Multipart uploads that a killed writer left behind: paid for, and shown by no listing of objects.

The bucket client has no request for them, so these two (ListMultipartUploads, AbortMultipartUpload) are signed here, by
AWS Signature Version 4.
"""

from __future__ import annotations

import hashlib
import hmac
import ssl
import time
import urllib.error
import urllib.request
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from urllib.parse import quote, urlsplit

from deltawire.core.errors import PermissionDenied, StoreError, StoreUnavailable, Unsupported
from deltawire.store.aws import S3Settings
from deltawire.store.base import is_transient

_TIMEOUT_S = 60.0
_MAX_ANSWER = 16 << 20
_NOTHING = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True, slots=True)
class Upload:
    """An unfinished multipart upload."""

    key: str
    """In the bucket, with the run's prefix."""
    id: str
    started: float
    """Seconds since the epoch, by the store's clock."""


class Uploads:
    """The unfinished uploads of one bucket. `where` names it in messages."""

    def __init__(self, where: str, bucket: str, settings: S3Settings, bundle: str | None = None) -> None:
        self._where = where
        self._settings = settings
        self._bundle = bundle
        base = settings.endpoint or f"https://s3.{settings.region}.amazonaws.com"
        self._base = f"{base}/{quote(bucket, safe='')}"

    def list(self, prefix: str) -> Iterator[Upload]:
        marker: dict[str, str] = {}
        while True:
            answer = self._ask("GET", "", {"uploads": "", "prefix": prefix, **marker})
            try:
                root = ElementTree.fromstring(answer)
                found = [_upload(node) for node in root if _name(node) == "Upload"]
                told = {_name(node): node.text or "" for node in root}
            except (ElementTree.ParseError, KeyError, ValueError):
                raise StoreError(f"{self._where}: the list of unfinished uploads does not parse") from None
            # text, as everywhere: some servers take the prefix for a folder and answer with all of it
            yield from (upload for upload in found if upload.key.startswith(prefix))
            if told.get("IsTruncated") != "true" or not found:
                return
            marker = {
                "key-marker": told.get("NextKeyMarker") or found[-1].key,
                "upload-id-marker": told.get("NextUploadIdMarker") or found[-1].id,
            }

    def abort(self, upload: Upload) -> None:
        """Abort an upload; no error if it has been finished or aborted meanwhile."""
        self._ask("DELETE", upload.key, {"uploadId": upload.id}, missing_is_fine=True)

    def _ask(self, method: str, key: str, query: dict[str, str], *, missing_is_fine: bool = False) -> bytes:
        url = f"{self._base}/{quote(key, safe='/~')}" if key else self._base
        parts = "&".join(f"{quote(name, safe='')}={quote(query[name], safe='')}" for name in sorted(query))
        request = urllib.request.Request(f"{url}?{parts}", method=method, headers=self._sign(method, url, parts))
        context = ssl.create_default_context(cafile=self._bundle) if url.startswith("https") else None
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=context) as answer:
                body: bytes = answer.read(_MAX_ANSWER)
                return body
        except urllib.error.HTTPError as error:
            status = error.code
        except OSError as error:
            raise StoreUnavailable(f"{self._where}: {getattr(error, 'reason', error)}") from None
        what = f"{self._where}: {status} when asked for unfinished uploads"
        if status == 404 and missing_is_fine:
            return b""
        if status in (401, 403):
            raise PermissionDenied(f"{what}; grant s3:ListBucketMultipartUploads and s3:AbortMultipartUpload")
        if is_transient(status):
            raise StoreUnavailable(what)
        raise Unsupported(what) if status in (400, 404, 405, 501) else StoreError(what)

    def _sign(self, method: str, url: str, query: str) -> dict[str, str]:
        if self._settings.provider is None:
            raise Unsupported(
                f"{self._where}: unfinished uploads are looked for with a key only, and here the machine's role signs"
            )
        login = self._settings.provider()
        parts = urlsplit(url)
        moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        headers = {"host": parts.netloc, "x-amz-content-sha256": _NOTHING, "x-amz-date": moment}
        if login["token"]:
            headers["x-amz-security-token"] = login["token"]
        names = ";".join(sorted(headers))
        lines = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
        scope = f"{moment[:8]}/{self._settings.region}/s3/aws4_request"
        asked = hashlib.sha256(f"{method}\n{parts.path}\n{query}\n{lines}\n{names}\n{_NOTHING}".encode()).hexdigest()
        key = f"AWS4{login['secret_access_key']}".encode()
        for part in scope.split("/"):
            key = hmac.digest(key, part.encode(), "sha256")
        text = f"AWS4-HMAC-SHA256\n{moment}\n{scope}\n{asked}".encode()
        signature = hmac.new(key, text, "sha256").hexdigest()
        credential = f"{login['access_key_id']}/{scope}"
        headers["authorization"] = (
            f"AWS4-HMAC-SHA256 Credential={credential}, SignedHeaders={names}, Signature={signature}"
        )
        return headers


def _name(node: ElementTree.Element) -> str:
    return node.tag.rpartition("}")[2]


def _upload(node: ElementTree.Element) -> Upload:
    told = {_name(child): child.text or "" for child in node}
    started = datetime.fromisoformat(told["Initiated"].replace("Z", "+00:00"))
    return Upload(told["Key"], told["UploadId"], started.replace(tzinfo=started.tzinfo or timezone.utc).timestamp())
