"""`deltawire cache`: one cache for the servers of a site."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

import deltawire as dw

from . import ui

PORT = 8330


def command(
    run: ui.RunArgument,
    folder: Annotated[Path, Option(file_okay=False, help="Where objects are kept.")] = Path(
        "~/.cache/deltawire/objects"
    ),
    gigabytes: Annotated[
        float, Option("--gb", metavar="GB", min=0.001, help="Most GB of objects; the least recently used are deleted.")
    ] = 20.0,
    host: ui.HostOption = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="Port to listen on; 0: any that is free.")] = PORT,
    token_file: ui.TokenFileOption = None,
    json: ui.JsonOption = False,
) -> None:
    """Serve the objects of a run to the servers of one site.

    Each object is fetched from the bucket once. The servers use the cache with
    DELTAWIRE_CACHE=http://host:8330 in their environment and, if it has a token,
    DELTAWIRE_CACHE_TOKEN. They check the hash of every object, and use the bucket
    if the cache is away, too slow, or wrong.

    To listen on anything but this machine, the cache needs a token
    (DELTAWIRE_TOKEN or --token-file). Objects that are damaged in the folder are
    fetched again.

    \b
    Examples
      deltawire cache s3://runs/chat --host 10.0.0.5 --folder /var/cache/deltawire
      DELTAWIRE_CACHE=http://10.0.0.5:8330 deltawire serve s3://runs/chat
    """
    from ..engines.live import access

    limit, token = int(gigabytes * 1e9), access.read_token(token_file)
    server = dw.CacheServer(run, folder, limit, host=host, port=port, token=token)
    text = f"objects of {server.store.url} at {server.url}; Ctrl-C ends it"
    ui.serve_until_ended(server, {"event": "listening", "url": server.url}, text, json)
