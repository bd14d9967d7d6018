"""Requests to Docker: answered by the deadline, in a bounded number of threads; no TLS."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import UnixStreamServer
from typing import ClassVar

import anyio
import pytest

from fumehood.docker.api import (
    FREEZE_PAUSES_S,
    Docker,
    DockerConflict,
    DockerError,
    DockerNotFound,
    DockerNotSupported,
    DockerTimeout,
)
from fumehood.sandbox.bounded_threads import BoundedThreads

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


class _Speaking(BaseHTTPRequestHandler):
    """Docker, as far as a client asks it for its version."""

    def do_GET(self) -> None:
        self._answer({"ApiVersion": "1.41"})

    def _answer(self, value: dict[str, str], status: bytes = b"200 OK") -> None:
        body = json.dumps(value).encode()
        head = b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n" % (status, len(body))
        self.wfile.write(head + body)

    def address_string(self) -> str:
        return "a Unix socket"

    def log_message(self, *said: object) -> None:
        """Print nothing."""


class _Upgrading(_Speaking):
    """Docker, as far as it is needed to run a command in a container."""

    said = b""
    """What is sent together with the head of the stream's response."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.path.endswith("/start"):
            self.wfile.write(b"HTTP/1.1 101 UPGRADED\r\nUpgrade: tcp\r\n\r\n" + self.said)
            self.wfile.write(self.rfile.read1())
        else:
            self._answer({"Id": "made"})


@contextmanager
def serving(tmp_path: Path, handler: type[_Speaking]) -> Iterator[Docker]:
    path = tmp_path / "docker.sock"
    with UnixStreamServer(str(path), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Docker({"DOCKER_HOST": f"unix://{path}"})
        server.shutdown()


class _Freezing(_Speaking):
    """Docker, which refuses to freeze a container some times."""

    refusals: ClassVar[list[int]] = []
    """Statuses of the next answers."""
    asked = 0

    def do_POST(self) -> None:
        assert self.path.endswith("/containers/name/pause")
        type(self).asked += 1
        status = self.refusals.pop(0) if self.refusals else 204
        self.wfile.write(b"HTTP/1.1 %d Said\r\nContent-Length: 0\r\n\r\n" % status)


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
    refusal = nullcontext() if fault is None else pytest.raises(fault)
    with serving(tmp_path, _Freezing) as docker, refusal:
        await docker.pause("name")
    assert _Freezing.asked == asked


@pytest.mark.parametrize("said", [b"", b"ready"], ids=["nothing", "the first bytes"])
async def test_stream_has_what_came_with_the_head_of_its_response(
    said: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Upgrading, "said", said)
    with serving(tmp_path, _Upgrading) as docker:
        streams = await docker.take_over("name", 1)
        with streams._stream as stream:
            stream.setblocking(True)
            stream.sendall(b"hello")
            rest = stream.recv(100, socket.MSG_WAITALL)
    assert streams._begun + rest == said + b"hello"


MOUNT_FAILED = (
    "error while mounting volume '/srv/secret/volumes/v/_data': failed to mount local volume: mount "
    "/dev/loop5:/srv/secret/volumes/v/_data, flags: 0x6: {}"
)


class _Refusing(_Speaking):
    """Docker that refuses to create volumes."""

    status, words = b"", ""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer({"message": self.words}, self.status)


@pytest.mark.parametrize(
    ("status", "words", "kind", "answer"),
    [
        (b"500 Error", MOUNT_FAILED.format("no such device or address"), DockerError,
         "it answered with status 500, no such device or address"),
        (b"500 Error", MOUNT_FAILED.format("no such device"), DockerError,
         "it answered with status 500, no such device"),
        (b"500 Error", "mount /dev/loop5: device or resource busy\nsee /srv/secret", DockerError,
         "it answered with status 500, device or resource busy"),
        (b"500 Error", "/srv/secret", DockerError, "it answered with status 500"),
        (b"404 Missing", "no such volume: /srv/secret", DockerNotFound, "it answered with status 404"),
        (b"409 Conflict", "/srv/secret is in use", DockerConflict, "it answered with status 409"),
    ],
)  # fmt: skip
async def test_refused_request_is_named_with_its_answer_and_no_path_of_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: bytes, words: str,
    kind: type[DockerError], answer: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(_Refusing, "status", status)
    monkeypatch.setattr(_Refusing, "words", words)
    with serving(tmp_path, _Refusing) as docker, pytest.raises(DockerError) as refused:
        await docker.attach_disk("v", "/dev/loop5")
    assert type(refused.value) is kind
    assert refused.value.message == f"Docker did not create a volume: {answer}."
    assert words in str(refused.value)  # for the operator's log


async def test_request_without_an_answer_is_named(tmp_path: Path) -> None:
    docker = Docker({})
    with pytest.raises(DockerTimeout) as late:
        await docker.ask("list containers", lambda client: threading.Event().wait(20), 0.05)
    assert late.value.message == "Docker did not list containers within 0.05 s."
