"""Stores: the protocol that a run needs from its bucket, and the backends that implement it.

    file:///path or a bare path    a folder, shared between processes
    memory://name                  this process's memory, for tests and demos
    s3://bucket/run                S3 and compatible servers (AWS_ENDPOINT_URL names them)
    gs://bucket/run                Google Cloud Storage
    az://container/run             Azure Blob Storage
    hf://buckets/me/name/run       a Hugging Face bucket, with the `hub` extra
    https://cdn.example/run        a CDN or a proxy in front of a bucket, only to read; http:// in a private network

Several addresses of the same run, with commas between them, are read as one: the first that answers (mirrored.py).

Credentials come from the environment or the files of the AWS tools, never from the URL. The URL may name an endpoint
and a region (s3://bucket/run?endpoint=http://127.0.0.1:8333). docs/stores.md has the details.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from deltawire.core.errors import BadURL
from deltawire.core.protocols import implements
from deltawire.store import http
from deltawire.store.base import (
    Announcing,
    Browsing,
    Cached,
    Chunks,
    Fetched,
    Level,
    ObjectInfo,
    Settling,
    Store,
    Sweeping,
    check_key,
    check_prefix,
    check_range,
    check_size,
)
from deltawire.store.http import HttpStore
from deltawire.store.hub import HubStore
from deltawire.store.local import LocalStore
from deltawire.store.mirrored import MirroredStore
from deltawire.store.object import SCHEMES, ObjectStore
from deltawire.store.retry import Retrying

__all__ = [
    "Announcing",
    "Browsing",
    "Cached",
    "Chunks",
    "Fetched",
    "HttpStore",
    "HubStore",
    "Level",
    "LocalStore",
    "MirroredStore",
    "ObjectInfo",
    "ObjectStore",
    "Retrying",
    "Settling",
    "Store",
    "Sweeping",
    "check_key",
    "check_prefix",
    "check_range",
    "check_size",
    "open_store",
]

_SCHEMES = sorted(("file", "hf", *http.SCHEMES, *SCHEMES))
_ANOTHER = re.compile(r",(?=[a-z0-9]+://)")
"""Between two addresses. A comma that no address follows is part of a name."""


def open_store(where: str | os.PathLike[str] | Store, *, retry: bool = True) -> Store:
    """Return the store at a URL or path, without any request. A `Store` is returned unchanged.

    `retry` wraps it in `Retrying`. Raises BadURL if the address is not valid.
    """
    # not by isinstance(where, Store): from Python 3.12 on that denies a store which passes calls on by __getattr__
    if not isinstance(where, str | os.PathLike):
        if not implements(Store, where):
            raise TypeError(f"{where!r} is neither an address (a URL or a path) nor a Store")
        return where
    addresses = _ANOTHER.split(os.fspath(where))
    if len(addresses) > 1:
        # little patience with each: the next one may answer at once
        stores = [Retrying(_open(each), attempts=3, total_s=5.0) if retry else _open(each) for each in addresses]
        return MirroredStore(stores)
    store = _open(addresses[0])
    return Retrying(store) if retry else store


def _open(where: str) -> Store:
    if ",/" in where:
        raise BadURL(
            "an address with ',/' in it: of several addresses each is a URL, a folder file:///path; where the comma "
            "belongs to a name, write it as %2C in a URL"
        )
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]+):/", where)
    if scheme is None:
        if not where:
            raise BadURL(f"an empty address; {_known()}")
        name, slashes, _ = where.partition("//")
        if slashes and name.lower() in _SCHEMES:
            raise BadURL(f"a colon is missing: write {name}://…, or ./{name}/… for a folder")
        return LocalStore(Path(where).expanduser())
    name = scheme[1].lower()
    if name not in _SCHEMES:
        raise BadURL(f"there is no store for {name}://; {_known()}")
    if not where.startswith("://", len(name)):
        raise BadURL(f"{name}: needs two slashes, as in {name}://…")
    where = name + where[len(name) :]
    if name == "hf":
        return HubStore.from_url(where)
    if name in http.SCHEMES:
        return HttpStore(where)
    return LocalStore(_file_path(where)) if name == "file" else ObjectStore.from_url(where)


def _file_path(url: str) -> str:
    parts = urlsplit(url)
    if parts.query or parts.fragment:
        raise BadURL(f"{url}: write '?' as %3F and '#' as %23, or give the path without file://")
    if parts.netloc not in ("", "localhost"):
        machine = parts.netloc.rpartition("@")[2]
        raise BadURL(f"a file:// URL names the machine {machine!r}; a path on this one has three slashes, file:///path")
    if not parts.path.startswith("/"):
        raise BadURL(f"{url}: no path; write file:///path/to/run")
    return unquote(parts.path)


def _known() -> str:
    schemes = ", ".join(f"{name}://" for name in _SCHEMES)
    return f"use one of {schemes} or a path"
