"""A daemon and a floor for benchmarks, clients to drive them, and what they use."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
import psutil

FUMEHOOD = Path(sys.executable).with_name("fumehood")
CALL_PATH = "/v1/tools/calculator/call"
CALL_BODY = json.dumps({"arguments": {"expression": "5! + 2**10"}}).encode()
START_DEADLINE_S = 20
JSON = {"content-type": "application/json"}
SMALLEST_IMAGE = {
    "FUMEHOOD_CONTAINER__IMAGES__PYTHON": "python",
    "FUMEHOOD_CONTAINER__IMAGES__SHELL": "python",
    "FUMEHOOD_SESSIONS__IMAGE": "python",
}
"""Settings: images without what the default ones bring. Lines that are measured with them say so."""

MB = 1 << 20

Request = Callable[[], bytes]


@dataclass
class Running:
    """A server process on a socket."""

    process: psutil.Process
    socket: Path
    started: float

    def guest(self) -> list[psutil.Process]:
        """The daemon's guest: supervisor, zygote and children."""
        return self.process.children(recursive=True)


@contextmanager
def run_daemon(
    settings: Mapping[str, str] | None = None,
    command: Sequence[str] = (str(FUMEHOOD), "serve"),
    *,
    socket: Path | None = None,
) -> Iterator[Running]:
    """`fumehood serve` in a directory of its own; `settings` as environment variables.

    `socket` is that of a directory which `settings` names instead.
    """
    home = Path(tempfile.mkdtemp(prefix="fh-", dir="/tmp"))
    environment = {"PATH": os.environ["PATH"], "FUMEHOOD_HOME": str(home), **(settings or {})}
    with _server(list(command), socket or home / "engine.sock", environment) as running:
        yield running
    shutil.rmtree(home, ignore_errors=True)


@contextmanager
def run_floor() -> Iterator[Running]:
    """The empty server."""
    home = Path(tempfile.mkdtemp(prefix="fh-", dir="/tmp"))
    path = home / "floor.sock"
    command = [sys.executable, "-m", "benchmarks.floor", str(path)]
    with _server(command, path, dict(os.environ)) as running:
        yield running
    shutil.rmtree(home, ignore_errors=True)


@contextmanager
def _server(command: list[str], path: Path, environment: dict[str, str]) -> Iterator[Running]:
    started = time.monotonic()
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    try:
        while not _answers(path):
            if process.poll() is not None or time.monotonic() - started > START_DEADLINE_S:
                raise RuntimeError(f"{command[-1]} did not start")
            time.sleep(0.002)
        yield Running(psutil.Process(process.pid), path, started)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=30)


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


def bare_client(path: Path, address: str, body: bytes | None, method: str = "POST") -> Request:
    """The standard library's client: the least that a Python client can cost."""

    class Connection(http.client.HTTPConnection):
        def connect(self) -> None:
            self.sock = socket.socket(socket.AF_UNIX)
            self.sock.connect(str(path))

    connection = Connection("bench")

    def request() -> bytes:
        connection.request(method, address, body, JSON if body is not None else {})
        return connection.getresponse().read()

    return request


def product_client(path: Path, address: str, body: bytes) -> Request:
    """The HTTP client that `fumehood.Client` uses, with a connection kept open."""
    client = httpx2.Client(transport=httpx2.HTTPTransport(uds=str(path)), base_url="http://bench")
    return lambda: client.post(address, content=body, headers=JSON).content


def written_bytes(processes: list[psutil.Process]) -> int:
    """Memory that these processes have written to and share with nobody.

    Unlike `private_bytes` it does not depend on which other programs map the same libraries
    at the moment, so two figures of different times can be compared.
    """
    total = 0
    for process in processes:
        rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="ascii")
        total += next(
            int(line.split()[1]) for line in rollup.splitlines() if "Private_Dirty" in line
        )
    return total * 1024


def private_bytes(processes: list[psutil.Process]) -> int:
    """Memory that only these processes have: what ending them would free."""
    return sum(process.memory_full_info().uss for process in processes)
