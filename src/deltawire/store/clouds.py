"""Settings of Azure's and Google's own tools in the environment, translated for the bucket client.

The client reads AZURE_STORAGE_ACCOUNT_NAME, GOOGLE_APPLICATION_CREDENTIALS and the like by itself. It knows no
connection strings and no emulators of Google Cloud, hence this file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from deltawire.core.errors import BadURL

_EMULATOR = (
    "AccountName=devstoreaccount1;BlobEndpoint=http://127.0.0.1:10000/devstoreaccount1;AccountKey="
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
"""What UseDevelopmentStorage=true stands for. The key is no secret: every emulator has this one."""

_FIX = "copy it from the portal (Access keys), or set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY"


def azure(environ: Mapping[str, str]) -> dict[str, str]:
    """Settings from AZURE_STORAGE_CONNECTION_STRING, which wins over all other variables, as in Azure's own tools."""
    given = environ.get("AZURE_STORAGE_CONNECTION_STRING")
    if not given:
        endpoint = environ.get("AZURE_STORAGE_ENDPOINT") or environ.get("AZURE_ENDPOINT")
        return {"endpoint": endpoint} if endpoint else {}
    parts = _parts(given)
    if parts.get("usedevelopmentstorage", "").lower() == "true":
        parts = _parts(_EMULATOR)
    endpoint, name = parts.get("blobendpoint"), parts.get("accountname")
    if not endpoint and name:
        protocol, suffix = parts.get("defaultendpointsprotocol", "https"), parts.get("endpointsuffix")
        endpoint = f"{protocol}://{name}.blob.{suffix or 'core.windows.net'}"
    if not endpoint:
        raise BadURL(f"AZURE_STORAGE_CONNECTION_STRING names neither AccountName nor BlobEndpoint; {_FIX}")
    if not name:
        # a string with a SAS often has an endpoint only: https://ACCOUNT.blob.core.windows.net
        name = endpoint.partition("://")[2].partition("/")[0].partition(".")[0]
    found = {"account_name": name, "endpoint": endpoint.rstrip("/")}
    if key := parts.get("accountkey"):
        found["account_key"] = key
    elif token := parts.get("sharedaccesssignature"):
        found["sas_key"] = token.removeprefix("?")
    else:
        raise BadURL(f"AZURE_STORAGE_CONNECTION_STRING has no AccountKey and no SharedAccessSignature; {_FIX}")
    return found


def _parts(text: str) -> dict[str, str]:
    """Parse a connection string; names in lower case, since case does not matter."""
    pairs = (part.partition("=") for part in text.split(";") if part.strip())
    return {name.strip().lower(): value.strip() for name, _, value in pairs}


def google_endpoint(environ: Mapping[str, str]) -> str | None:
    """The emulator that STORAGE_EMULATOR_HOST names, with or without http:// as Google's own clients take it."""
    host = environ.get("STORAGE_EMULATOR_HOST", "").rstrip("/")
    return host if not host or "://" in host else f"http://{host}"


def google(environ: Mapping[str, str]) -> dict[str, str]:
    """Settings for Google Cloud. An emulator has no accounts, so its requests are not signed."""
    endpoint = google_endpoint(environ)
    if not endpoint:
        return {}
    account = {"gcs_base_url": endpoint, "disable_oauth": True, "client_email": "", "private_key": ""}
    return {"service_account_key": json.dumps({**account, "private_key_id": ""})}
