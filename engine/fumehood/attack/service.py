"""A service on loopback that programs may read from, for attacks on the gateway.

Host side. It tells back what it received; a request that is no read is noted as a loss.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit


class Service(ThreadingHTTPServer):
    """`/?to=URL` is a redirect."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.authority = f"127.0.0.1:{self.server_address[1]}"
        self._written: list[str] = []

    def note(self, method: str) -> None:
        """Note a request that is no read."""
        self._written.append(method)

    def losses(self) -> list[str]:
        """Describe the writes since the last call."""
        written, self._written[:] = list(self._written), []
        return [f"a {method} arrived that nobody allowed" for method in dict.fromkeys(written)]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 5
    server: Service

    def do_GET(self) -> None:
        if int(self.headers.get("content-length") or 0):
            self.server.note("GET with a body")
        wanted = parse_qs(urlsplit(self.path).query).get("to", [])
        body = json.dumps({"path": self.path, **self.headers}).encode()
        self.send_response(302 if wanted else 200)
        if wanted:
            self.send_header("location", wanted[0])
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.server.note(self.command)
        self.send_response(204)
        self.end_headers()

    do_PUT = do_PATCH = do_DELETE = do_POST  # noqa: N815  # as the library names them

    def log_message(self, *values: object) -> None:
        """Log nothing."""


@contextmanager
def running_service() -> Iterator[Service]:
    """Yield the running service."""
    with Service() as service:
        thread = threading.Thread(target=service.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield service
        finally:
            service.shutdown()
            thread.join()
