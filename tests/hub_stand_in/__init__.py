"""A stand-in for the Hugging Face Hub: enough of its buckets, and of the Xet storage behind them, for the unmodified
client.

    with HubStandIn(folder) as hub:
        os.environ["HF_ENDPOINT"], os.environ["HF_TOKEN"] = hub.endpoint, hub.token

Tokens are checked, every hash that a client states is recomputed, and data lies on disk. What it leaves out: rate
limits of its own (make them with `Fault`), deduplication between uploads, organisations, versions of the API that the
client falls back from. `python -m tests.hub_stand_in` runs it by itself.
"""

from __future__ import annotations

import secrets
import threading
from collections import deque
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import TracebackType

from .contents import Contents
from .faults import Fault, Faults
from .handler import Handler

__all__ = ["Fault", "HubStandIn"]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


class HubStandIn:
    """Serves from construction to `close`.

    namespaces    where buckets may be created
    announces     whether there is a stream of events
    page          files in one answer of a listing
    """

    def __init__(
        self,
        root: Path,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        namespaces: tuple[str, ...] = ("me",),
        announces: bool = True,
        page: int = 1000,
    ) -> None:
        self.token = token or f"hf_{secrets.token_hex(17)}"
        self.read_token = f"hf_{secrets.token_hex(17)}"
        self.xet_tokens = {kind: secrets.token_hex(16) for kind in ("read", "write")}
        self.signature = secrets.token_hex(16)
        self.namespaces = namespaces
        self.announces = announces
        self.page = page
        self.contents = Contents(root)
        self.faults = Faults()
        self.requests: deque[str] = deque(maxlen=10_000)
        # "METHOD /path status", the latest last
        self.stopping = threading.Event()
        self._server = _Server((host, port), type("BoundHandler", (Handler,), {"hub": self}))
        self._thread = threading.Thread(target=self._server.serve_forever, name="hub-stand-in", daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    def note(self, method: str, path: str, status: int) -> None:
        self.requests.append(f"{method} {path} {status}")

    def close(self) -> None:
        self.stopping.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> HubStandIn:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
