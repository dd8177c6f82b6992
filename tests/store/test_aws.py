"""Endpoint, region and credentials of S3, from where the AWS tools take them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from deltawire.core.errors import BadURL, MissingExtra, PermissionDenied
from deltawire.store.aws import check_endpoint, is_near, settings

KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}


def files(folder: Path, credentials: str = "", config: str = "") -> dict[str, str]:
    (folder / "credentials").write_text(credentials)
    (folder / "config").write_text(config)
    return {"AWS_SHARED_CREDENTIALS_FILE": str(folder / "credentials"), "AWS_CONFIG_FILE": str(folder / "config")}


def test_the_url_wins_over_variables_and_these_over_the_profile(tmp_path: Path) -> None:
    environ = files(tmp_path, config="[default]\nregion = c\nendpoint_url = http://c\n")
    assert (settings({}, environ).region, settings({}, environ).endpoint) == ("c", "http://c")
    environ |= {"AWS_REGION": "b", "AWS_ENDPOINT_URL": "http://b/"}
    assert (settings({}, environ).region, settings({}, environ).endpoint) == ("b", "http://b")
    chosen = settings({"region": "a", "endpoint": "http://a"}, environ)
    assert (chosen.region, chosen.endpoint) == ("a", "http://a")
    assert settings({}, files(tmp_path)).region == "us-east-1"


def test_credentials_of_the_environment_and_of_a_file(tmp_path: Path) -> None:
    provider = settings({}, files(tmp_path) | KEYS).provider
    assert provider is not None
    assert provider()["access_key_id"] == "key"
    environ = files(tmp_path, "[work]\naws_access_key_id = a%b\naws_secret_access_key = s\n")
    provider = settings({"profile": "work"}, environ | KEYS).provider
    assert provider is not None
    assert provider()["access_key_id"] == "a%b", "the profile of the URL wins over variables"
    assert settings({}, files(tmp_path)).provider is None, "left to the machine's own role"


def test_what_is_half_or_missing_is_named(tmp_path: Path) -> None:
    for environ, part in (
        ({"AWS_ACCESS_KEY_ID": "key"}, "AWS_SECRET_ACCESS_KEY"),
        ({"AWS_PROFILE": "nobody"}, "'nobody'"),
    ):
        with pytest.raises(PermissionDenied, match=part):
            settings({}, files(tmp_path) | environ)
    with pytest.raises(PermissionDenied) as caught:
        settings({}, files(tmp_path, "hunter2 without a section\n"))
    assert "hunter2" not in str(caught.value)


def test_endpoints() -> None:
    assert check_endpoint("https://host/") == "https://host"
    for bad in ("https://key:hunter2@host", "https://host?token=hunter2", "host:9000", "ftp://host"):
        with pytest.raises(BadURL) as caught:
            check_endpoint(bad)
        assert "hunter2" not in str(caught.value)
    near = ("http://127.0.0.1:1", "http://minio:9000", "http://10.0.0.7", "http://x.svc", "http://[::1]:1")
    assert all(map(is_near, near))
    assert not is_near("http://example.com")
    assert not is_near("http://8.8.8.8")


@pytest.mark.parametrize(
    "entry", ["credential_process = /bin/true", "role_arn = x", "sso_session = office", "login_session = x"]
)
def test_what_signs_in_by_other_means_needs_the_extra(
    entry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = files(tmp_path, config=f"[profile office]\n{entry}\n") | {"AWS_PROFILE": "office"}
    assert settings({}, environ).provider is not None
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(
        MissingExtra, match=r"'office'.*boto3: pip install .*\[aws\].*export-credentials --profile office"
    ):
        settings({}, environ)
