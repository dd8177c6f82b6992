"""A small HTTP server of the standard library: a thread for each connection, a token for those who may read."""

from __future__ import annotations

import logging
import socket
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from .access import check_guarded, is_bearer, listen

__all__ = ["Handler", "ThreadedServer"]

log = logging.getLogger("deltawire")


class ThreadedServer(ThreadingHTTPServer):
    """Serves until `shutdown`. Made with the socket bound, so that `url` is known at once."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, handler: type[Handler], host: str, port: int, token: str | None) -> None:
        """Raises Misconfigured if the port is taken, or if `host` is not this machine and there is no token."""
        check_guarded(host, token, "read the run")
        self.token = token
        bound = listen(host, port)
        super().__init__((host, port), handler, bind_and_activate=False)
        # instead of the one that socketserver made and did not bind
        self.socket.close()
        self.socket, self.server_address = bound, bound.getsockname()
        self.server_activate()

    @property
    def url(self) -> str:
        """Its address, without the token."""
        host, port = str(self.server_address[0]), self.server_address[1]
        if host in ("0.0.0.0", "::"):
            # no address to go to: all those of this machine
            host = socket.gethostname()
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a client's connection failed", exc_info=True)


class Handler(BaseHTTPRequestHandler):
    """Answers one connection."""

    protocol_version = "HTTP/1.1"
    server_version = "deltawire"
    sys_version = ""
    server: ThreadedServer

    @property
    def has_token(self) -> bool:
        """Whether the request has the server's token, where that has one."""
        token = self.server.token
        return token is None or is_bearer(self.headers.get("Authorization", ""), token)

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)
