"""Who may reach a server, and by which token."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltawire.core.errors import Misconfigured
from deltawire.engines.access import check_guarded, is_bearer, is_loopback, public_address, read_token


def test_only_this_machine_is_reached_without_a_token() -> None:
    for host in ("127.0.0.1", "127.3.4.5", "::1", "localhost"):
        assert is_loopback(host)
        check_guarded(host, None)
    for host in ("0.0.0.0", "::", "192.168.1.4", "example.org", None):
        assert not is_loopback(host)
    with pytest.raises(Misconfigured, match="DELTAWIRE_TOKEN"):
        check_guarded("0.0.0.0", None)
    check_guarded("0.0.0.0", "secret")


def test_where_clients_reach_a_server_is_said_only_if_they_could_use_it(caplog: pytest.LogCaptureFixture) -> None:
    assert public_address("10.0.0.5", 8000) == "10.0.0.5:8000"
    assert public_address("::1", 8000) == "[::1]:8000"
    assert public_address("gpu-1.example.org", 8000) == "gpu-1.example.org:8000"
    assert not caplog.text
    for host in ("fe80::1%eth0", "gpu_1", "0x7f.1"):
        assert public_address(host, 8000) == ""
        assert "set DELTAWIRE_ADDRESS" in caplog.text
        caplog.clear()


def test_the_token_is_compared_whole() -> None:
    assert is_bearer("Bearer secret", "secret")
    assert is_bearer("bearer  secret ", "secret")
    for header in ("", "Bearer", "Bearer secre", "Bearer secret2", "Basic secret", "secret"):
        assert not is_bearer(header, "secret")


def test_the_token_is_read_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTAWIRE_TOKEN", " of the environment ")
    assert read_token(None) == "of the environment"
    (tmp_path / "token").write_text("of the file\n")
    assert read_token(tmp_path / "token") == "of the file"
    monkeypatch.setenv("DELTAWIRE_TOKEN", "")
    assert read_token(None) is None
    (tmp_path / "token").write_text("\n")
    with pytest.raises(Misconfigured, match="is empty"):
        read_token(tmp_path / "token")
