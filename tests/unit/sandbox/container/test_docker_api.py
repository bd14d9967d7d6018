"""Requests to Docker: answered by the deadline, in a bounded number of threads; no TLS."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import UnixStreamServer
from typing import ClassVar

import anyio
import pytest

from fumehood.sandbox.bounded_threads import BoundedThreads
from fumehood.sandbox.container.docker_api import (
    FREEZE_PAUSES_S,
    Docker,
    DockerError,
    DockerNotFound,
    DockerNotSupported,
)

pytestmark = pytest.mark.anyio


async def test_hanging_call_times_out_and_its_late_result_is_discarded() -> None:
    threads = BoundedThreads(2, "test")
    release, thrown = threading.Event(), threading.Event()

    def hang() -> str:
        release.wait(20)
        return "late"

    with pytest.raises(TimeoutError):
        await threads.run(hang, 0.01, unwanted=lambda answer: thrown.set())
    assert await threads.run(lambda: 4, 5) == 4  # the loop, and the other thread, go on
    assert not thrown.is_set()
    release.set()
    assert await anyio.to_thread.run_sync(thrown.wait, 20)


def test_result_that_arrives_after_the_loop_closed_is_discarded() -> None:
    release, thrown = threading.Event(), threading.Event()

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await BoundedThreads(1, "test").run(
                lambda: release.wait(20), 0.01, unwanted=lambda answer: thrown.set()
            )

    anyio.run(give_up)
    release.set()
    assert thrown.wait(20)


async def test_hanging_calls_use_at_most_the_allowed_threads() -> None:
    threads = BoundedThreads(2, "test-bounded")
    release = threading.Event()
    for _ in range(5):
        with pytest.raises(TimeoutError):
            await threads.run(lambda: release.wait(20), 0.01)
    assert sum(thread.name == "test-bounded" for thread in threading.enumerate()) == 2
    release.set()
    assert await threads.run(lambda: 4, 20) == 4


@pytest.mark.parametrize(
    "environment",
    [
        {"DOCKER_HOST": "https://docker.example:2376"},
        {"DOCKER_HOST": "tcp://docker.example:2376", "DOCKER_TLS_VERIFY": "1"},
        {"DOCKER_HOST": "ssh://docker.example"},
    ],
    ids=["https", "tls", "ssh"],
)
async def test_docker_address_without_stream_support_is_refused(
    environment: dict[str, str],
) -> None:
    """The channel to a guest is the socket itself, which must not be encrypted."""
    docker = Docker(environment)
    with pytest.raises(DockerNotSupported):
        await docker.info()
    assert isinstance(docker.failure, DockerNotSupported)


class _Upgrading(BaseHTTPRequestHandler):
    """Docker, as far as it is needed to run a command in a container."""

    said = b""
    """What is sent together with the head of the stream's response."""

    def do_GET(self) -> None:
        self._answer({"ApiVersion": "1.41"})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.path.endswith("/start"):
            self.wfile.write(b"HTTP/1.1 101 UPGRADED\r\nUpgrade: tcp\r\n\r\n" + self.said)
            self.wfile.write(self.rfile.read1())
        else:
            self._answer({"Id": "made"})

    def _answer(self, value: dict[str, str]) -> None:
        body = json.dumps(value).encode()
        self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    def address_string(self) -> str:
        return "a Unix socket"

    def log_message(self, *said: object) -> None:
        """Print nothing."""


class _Freezing(BaseHTTPRequestHandler):
    """Docker, which refuses to freeze a container some times."""

    refusals: ClassVar[list[int]] = []
    """Statuses of the next answers."""
    asked = 0

    def do_GET(self) -> None:
        body = b'{"ApiVersion": "1.41"}'
        self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    def do_POST(self) -> None:
        assert self.path.endswith("/containers/name/pause")
        type(self).asked += 1
        status = self.refusals.pop(0) if self.refusals else 204
        self.wfile.write(b"HTTP/1.1 %d Said\r\nContent-Length: 0\r\n\r\n" % status)

    def address_string(self) -> str:
        return "a Unix socket"

    def log_message(self, *said: object) -> None:
        """Print nothing."""


@pytest.mark.parametrize(
    ("refusals", "fault", "asked"),
    [
        ([], None, 1),
        ([500, 500], None, 3),
        ([409], None, 1),
        ([404], DockerNotFound, 1),
        ([500] * 100, DockerError, 1 + len(FREEZE_PAUSES_S)),
    ],
    ids=["at once", "busy", "frozen already", "gone", "never"],
)
async def test_container_that_could_not_be_frozen_is_frozen_by_another_attempt(
    refusals: list[int],
    fault: type[DockerError] | None,
    asked: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_Freezing, "refusals", refusals)
    monkeypatch.setattr(_Freezing, "asked", 0)
    path = tmp_path / "docker.sock"
    with UnixStreamServer(str(path), _Freezing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        docker = Docker({"DOCKER_HOST": f"unix://{path}"})
        with nullcontext() if fault is None else pytest.raises(fault):
            await docker.pause("name")
        server.shutdown()
    assert _Freezing.asked == asked


@pytest.mark.parametrize("said", [b"", b"ready"], ids=["nothing", "the first bytes"])
async def test_stream_has_what_came_with_the_head_of_its_response(
    said: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Upgrading, "said", said)
    path = tmp_path / "docker.sock"
    with UnixStreamServer(str(path), _Upgrading) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        docker = Docker({"DOCKER_HOST": f"unix://{path}"})
        stream, begun = await docker.launch_in("name", ("relay",))
        with stream:
            stream.setblocking(True)
            stream.sendall(b"hello")
            rest = stream.recv(100, socket.MSG_WAITALL)
        server.shutdown()
    assert begun + rest == said + b"hello"
