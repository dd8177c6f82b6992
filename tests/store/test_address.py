"""Bucket addresses as users write them."""

from __future__ import annotations

import pytest

from deltawire.core.errors import BadURL
from deltawire.store.address import connect, parse


def test_the_parts_of_an_address() -> None:
    found = parse("s3://bucket/a%20b/run/?endpoint=http://127.0.0.1:8333&region=eu-west-1")
    assert (found.scheme, found.bucket, found.prefix) == ("s3", "bucket", "a b/run")
    assert found.options == {"endpoint": "http://127.0.0.1:8333", "region": "eu-west-1"}
    assert found.url == "s3://bucket/a%20b/run?endpoint=http://127.0.0.1:8333&region=eu-west-1"
    assert parse("gs://bucket").prefix == ""


def test_an_address_that_could_hold_a_secret_is_refused_without_repeating_it() -> None:
    for url in (
        "s3://key:hunter2@bucket/run",
        "s3://bucket/run?secret=hunter2",
        "s3://bucket/run?region=hunter2&region=x",
        "s3://bucket/run?region=",
        "gs://bucket/run?endpoint=hunter2",
    ):
        with pytest.raises(BadURL, match="GOOGLE_APP" if url.startswith("gs") else "AWS_ACCESS_KEY_ID") as caught:
            parse(url)
        assert "hunter2" not in str(caught.value)


def test_what_is_no_address() -> None:
    for url in ("s3:///run", "s3://bucket/a/../b", "s3://bucket/run#part"):
        with pytest.raises(BadURL):
            parse(url)


def test_http_is_for_servers_near_by() -> None:
    near = parse("s3://bucket/run?endpoint=http://127.0.0.1:8333")
    far = parse("s3://bucket/run?endpoint=http://example.com")
    connect(near, {}, 0)
    with pytest.raises(BadURL, match="AWS_ALLOW_HTTP"):
        connect(far, {}, 0)
    connect(far, {"AWS_ALLOW_HTTP": "true"}, 0)
