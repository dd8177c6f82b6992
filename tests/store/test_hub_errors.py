"""Answers of the Hub as errors of ours: which are worth another attempt, and what to do about the others."""

from __future__ import annotations

import pytest

httpx2 = pytest.importorskip("httpx2")

from deltawire.core.errors import (  # noqa: E402
    ObjectNotFound,
    PermissionDenied,
    StoreError,
    StoreFull,
    StoreUnavailable,
)
from deltawire.store.hub_errors import NoBucket, of_request, of_response, of_storage  # noqa: E402


def test_each_status_has_its_error() -> None:
    for status, kind, part in (
        (401, PermissionDenied, "hf auth login"),
        (403, PermissionDenied, "settings/tokens"),
        (404, ObjectNotFound, "no object"),
        (402, StoreFull, "402"),
        (413, StoreFull, "413"),
        (429, StoreUnavailable, "429"),
        (503, StoreUnavailable, "503"),
        (400, StoreError, "400"),
    ):
        found = of_response(httpx2.Response(status), "me/bucket")
        assert type(found) is kind
        assert part in str(found)


def test_a_missing_bucket_is_told_from_a_missing_object() -> None:
    answer = httpx2.Response(404, headers={"X-Error-Code": "RepoNotFound"})
    assert type(of_response(answer, "me/bucket")) is NoBucket


def test_how_long_to_stay_away() -> None:
    def wait(**headers: str) -> float | None:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        found = of_response(httpx2.Response(429, headers=named), "x")
        assert isinstance(found, StoreUnavailable)
        return found.retry_after

    assert wait(Retry_After="7") == 7.0
    assert wait(Retry_After="9" * 30) is None
    assert wait() is None


def test_signed_links_are_not_repeated() -> None:
    said = "cannot reach https://cas.example/x?signature=hunter2 now"
    for found in (of_request(OSError(said), "x"), of_storage(RuntimeError(said), "x")):
        assert isinstance(found, StoreUnavailable)
        assert "hunter2" not in str(found)


def test_errors_of_the_storage_engine() -> None:
    refused = RuntimeError("HTTP status client error (403 Forbidden), domain: x")
    assert isinstance(of_storage(refused, "x"), PermissionDenied)
    assert isinstance(of_storage(RuntimeError("No space left on device"), "x"), StoreFull)
    for name, kind in (("XetAuthenticationError", PermissionDenied), ("XetObjectNotFoundError", ObjectNotFound)):
        assert isinstance(of_storage(type(name, (Exception,), {})("no"), "x"), kind)
