"""Send a socket what its OpenAPI document allows and what it does not: `python -m fuzz.contract
engine|control SECONDS PACKAGES`. Every answer must be one that the document describes.

The daemon is real but for its containers, so no program that this makes up is ever run.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from support.scripted_daemon import running_scripted_daemon

CHECKS = "status_code_conformance,content_type_conformance,response_schema_conformance"
WAITS = "/(mcp|changes)$"
"""Addresses whose answers wait until something happens."""


@contextmanager
def on_loopback(path: Path) -> Iterator[int]:
    """Yield a port that forwards to a Unix socket: the client speaks only TCP."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_accept, args=(listener, path), daemon=True).start()
        yield listener.getsockname()[1]


def _accept(listener: socket.socket, path: Path) -> None:
    with suppress(OSError):  # it was closed
        while True:
            client, _ = listener.accept()
            server = socket.socket(socket.AF_UNIX)
            server.connect(str(path))
            for one, other in ((client, server), (server, client)):
                threading.Thread(target=_copy, args=(one, other), daemon=True).start()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while chunk := source.recv(65536):
            sink.sendall(chunk)
    with suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


def main() -> None:
    """Try the socket. Exits 1 if an answer breaks the document."""
    name, seconds, packages = sys.argv[1], sys.argv[2], Path(sys.argv[3]).resolve()
    with running_scripted_daemon(approver=True) as daemon:
        headers = ["--header", f"Authorization:Bearer {daemon.credential}"]
        with on_loopback(daemon.control if name == "control" else daemon.socket) as port:
            status = subprocess.call(
                [
                    sys.executable, "-m", "schemathesis.cli", "run",
                    f"http://127.0.0.1:{port}/v1/openapi.json",
                    *(headers if name == "control" else ()),
                    "--checks", CHECKS, "--exclude-path-regex", WAITS, "--no-color",
                    "--phases", "coverage,fuzzing,stateful", "--max-time", seconds,
                    "--request-timeout", "10", "--warnings", "off",
                    "--suppress-health-check", "all",
                ],
                cwd=packages,
                env={**os.environ, "PYTHONPATH": str(packages)},
            )  # fmt: skip
    sys.exit(status)


if __name__ == "__main__":
    main()
