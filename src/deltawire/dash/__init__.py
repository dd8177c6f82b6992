"""A page about a run: live from its bucket, or as one self-contained file.

    from deltawire.dash import serve, write_page

    write_page("s3://runs/chat", "run.html")                # one file, no server; returns the document it shows
    with serve("s3://runs/chat", port=8321) as page:        # live, in threads of this process
        print(page.url)                                     # http://127.0.0.1:8321/
        ...                                                 # train; a new version is on the page within two seconds

`deltawire dash` does the same on the command line. Everything shown comes from manifests, heartbeats and headers of
deltas; nothing is written to the bucket, and nothing is loaded from elsewhere.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..store import Store
from .collect import Collector
from .document import Document, encode
from .html import html
from .server import PageServer

__all__ = ["Collector", "Document", "PageServer", "serve", "write_page"]


def write_page(run: str | Path | Store, out: str | Path, *, requests: int | None = None) -> Document:
    """Write the page of a run as one file that needs nothing else, and return the document that it shows.

    The file appears as a whole or not at all; one that is there is replaced. Raises RunNotFound if there is no run.

    requests   most requests to the bucket, by default 48 and in a folder 400; with more, more replicas and tensors
    """
    collector = Collector(run, requests=requests)
    collector.opened()
    document = collector.look()
    save(document, Path(out))
    return document


def save(document: Document, out: Path) -> None:
    """Write a document as a page, atomically."""
    page = html(encode(document), document.model or document.url).encode()
    descriptor, temporary = tempfile.mkstemp(dir=out.parent, prefix=f".{out.name[:100]}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(page)
        os.chmod(temporary, 0o644)
        os.replace(temporary, out)
    except BaseException:
        os.unlink(temporary)
        raise


@contextmanager
def serve(
    run: str | Path | Store,
    port: int = 0,
    *,
    host: str = "127.0.0.1",
    token: str | None = None,
    requests: int | None = None,
) -> Iterator[PageServer]:
    """Serve the live page of a run from a thread of this process, for as long as the block lasts.

    The run may appear later. Port 0 is any that is free; `url` of the server has it. Raises Misconfigured if the port
    is taken, or if `host` is not this machine and there is no token.
    """
    server = PageServer(run, host=host, port=port, token=token, requests=requests)
    thread = threading.Thread(target=server.serve_forever, args=(0.1,), name="deltawire-dash", daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
