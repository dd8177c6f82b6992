"""Azure and Google Cloud by the variables that their own tools read."""

from __future__ import annotations

import http.server
import json
import os
import threading
from collections.abc import Iterator

import pytest

from deltawire.core.errors import BadURL, DeltawireError, PermissionDenied, StoreError
from deltawire.store import clouds, open_store

SECRET = "cGw0bnRlZC1zZWNyZXQ="


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("AZURE_", "GOOGLE_", "STORAGE_"))]:
        monkeypatch.delenv(name)


def azure(text: str) -> dict[str, str]:
    return clouds.azure({"AZURE_STORAGE_CONNECTION_STRING": text})


def test_connection_strings() -> None:
    key = f"AccountName=me;AccountKey={SECRET}"
    found = {"account_name": "me", "account_key": SECRET, "endpoint": "https://me.blob.core.windows.net"}
    assert azure(f"DefaultEndpointsProtocol=https;{key};EndpointSuffix=core.windows.net") == found
    assert azure(key) == found
    assert azure(f" accountname = me ; ACCOUNTKEY={SECRET};;") == found
    china = azure(f"DefaultEndpointsProtocol=https;{key};EndpointSuffix=core.chinacloudapi.cn")
    assert china["endpoint"] == "https://me.blob.core.chinacloudapi.cn"
    assert azure(f"{key};BlobEndpoint=http://127.0.0.1:10000/me/")["endpoint"] == "http://127.0.0.1:10000/me"
    shared = azure("BlobEndpoint=https://me.blob.core.windows.net;SharedAccessSignature=?sv=1&sig=a%3D")
    assert shared == {"account_name": "me", "endpoint": "https://me.blob.core.windows.net", "sas_key": "sv=1&sig=a%3D"}
    assert azure("UseDevelopmentStorage=true")["endpoint"] == "http://127.0.0.1:10000/devstoreaccount1"
    assert clouds.azure({}) == {}
    assert clouds.azure({"AZURE_STORAGE_ENDPOINT": "http://a"}) == {"endpoint": "http://a"}


@pytest.mark.parametrize("text", ["nonsense", f"AccountKey={SECRET}", "AccountName=me", f"=;{SECRET}"])
def test_a_connection_string_that_is_of_no_use_is_not_repeated(text: str) -> None:
    with pytest.raises(BadURL, match="AZURE_STORAGE_CONNECTION_STRING") as caught:
        azure(text)
    assert SECRET not in str(caught.value)


def test_an_invalid_key_is_not_repeated_in_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", "AccountName=me;AccountKey=*pl4nted*")
    with pytest.raises(DeltawireError) as caught:
        open_store("az://runs/a", retry=False).get("key")
    assert "pl4nted" not in str(caught.value)


def test_without_settings_the_message_names_the_variables() -> None:
    with pytest.raises(PermissionDenied, match="AZURE_STORAGE_CONNECTION_STRING"):
        open_store("az://runs/a", retry=False)


def test_http_across_the_internet_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "AZURE_STORAGE_CONNECTION_STRING", f"DefaultEndpointsProtocol=http;AccountName=me;AccountKey={SECRET}"
    )
    with pytest.raises(BadURL, match="AZURE_ALLOW_HTTP"):
        open_store("az://runs/a")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://gcs.example.com")
    with pytest.raises(BadURL, match="GOOGLE_ALLOW_HTTP"):
        open_store("gs://runs/a")


# ── Google Cloud ─────────────────────────────────────────────────────────────────────────────────────────────────────


class Bucket(http.server.BaseHTTPRequestHandler):
    """The part of the XML interface that a put and a get need."""

    objects: dict[str, bytes]
    etag: str | None = '"1"'

    def _answer(self, status: int, body: bytes = b"") -> None:
        assert self.headers.get("authorization", "").strip() in ("", "Bearer"), "an emulator is sent no credentials"
        self.send_response(status)
        if self.etag:
            self.send_header("etag", self.etag)
        self.send_header("last-modified", "Sun, 15 Nov 2026 12:00:00 GMT")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("x-goog-if-generation-match") == "0" and self.path in self.objects:
            self._answer(412)
            return
        self.objects[self.path] = data
        self._answer(200)

    def do_GET(self) -> None:
        self._answer(200, self.objects[self.path])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def emulator() -> Iterator[tuple[type[Bucket], str]]:
    handler = type("Fresh", (Bucket,), {"objects": {}})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield handler, f"127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("scheme", ["", "http://"])
def test_an_emulator_of_google_cloud(
    emulator: tuple[type[Bucket], str], monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    handler, host = emulator
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", scheme + host)
    store = open_store("gs://runs/a", retry=False)
    store.put("key", b"x")
    assert store.get("key").data == b"x"
    assert list(handler.objects) == ["/runs/a%2Fkey"]


def test_an_emulator_without_etags_is_named(
    emulator: tuple[type[Bucket], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    handler, host = emulator
    handler.etag = None
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", host)
    with pytest.raises(StoreError, match="not every emulator sends them"):
        open_store("gs://runs/a", retry=False).put("key", b"x")


def test_the_settings_of_an_emulator_are_no_credentials() -> None:
    assert clouds.google({}) == {}
    account = json.loads(clouds.google({"STORAGE_EMULATOR_HOST": "localhost:9023/"})["service_account_key"])
    assert account["gcs_base_url"] == "http://localhost:9023"
    assert account["disable_oauth"] is True
