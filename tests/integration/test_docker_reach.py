"""Reasons for an unusable Docker, distinguished through its socket."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import CLEAN_ENVIRONMENT, FUMEHOOD
from fumehood.docker import api
from fumehood.docker.api import (
    Docker,
    DockerError,
    DockerNotPermitted,
    DockerNotRunning,
    DockerNotSupported,
    DockerTimeout,
    open_docker,
)
from support.wait import DEADLINE_S


def failure_of(address: str) -> DockerError:
    with pytest.raises(DockerError) as refusal:
        open_docker({"DOCKER_HOST": address}, timeout_s=2)
    return refusal.value


def why_not(path: Path) -> DockerError:
    failure = failure_of(f"unix://{path}")
    assert str(path) not in f"{failure.message} {failure.remedy} {failure}"
    return failure


@contextlib.contextmanager
def answering(path: Path, answer: bytes) -> Iterator[None]:
    """A server on the socket that sends every client the same answer."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    # A client that only looks whether anybody listens closes at once.
                    with connection, contextlib.suppress(BrokenPipeError):
                        if answer:
                            connection.recv(9999)
                        connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(DEADLINE_S)


def test_missing_docker_socket_is_docker_not_running(home: Path) -> None:
    assert type(why_not(home / "docker.sock")) is DockerNotRunning


def test_stale_docker_socket_is_docker_not_running(home: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left_over:
        left_over.bind(str(home / "docker.sock"))
    assert type(why_not(home / "docker.sock")) is DockerNotRunning


@pytest.mark.parametrize("address", ["ssh://somewhere", "npipe:////./x", "docker.sock", "unix:/x"])
def test_unsupported_docker_host_scheme_is_docker_not_supported(address: str) -> None:
    assert type(failure_of(address)) is DockerNotSupported


@pytest.mark.parametrize(
    "answer",
    [b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n<hi>", b"SSH-2.0-x\r\n", b"",
     b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n[]"],
)  # fmt: skip
def test_foreign_server_on_the_docker_socket_is_a_docker_error(home: Path, answer: bytes) -> None:
    with answering(home / "docker.sock", answer):
        assert type(why_not(home / "docker.sock")) in (DockerError, DockerNotRunning)


@pytest.mark.row("S9")
@pytest.mark.anyio
async def test_docker_that_accepts_and_never_answers_is_docker_timeout(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "QUICK_S", 0.2)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(home / "docker.sock"))
        listener.listen()
        assert type(why_not(home / "docker.sock")) is DockerTimeout
        with pytest.raises(DockerTimeout):
            await Docker({"DOCKER_HOST": f"unix://{home}/docker.sock"}).info()


@pytest.mark.parametrize("path", ["/", "x" * 200])
def test_invalid_docker_socket_path_is_docker_not_running(path: str) -> None:
    assert isinstance(failure_of(f"unix://{path}"), DockerNotRunning)


@pytest.mark.needs("root")
def test_user_without_access_to_the_socket_is_docker_not_permitted(home: Path) -> None:
    """Connects as another user. Control: root gets a different error from the same socket."""
    with answering(home / "docker.sock", b""):
        (home / "docker.sock").chmod(0o600)
        home.chmod(0o711)
        reader, writer = os.pipe()
        if (child := os.fork()) == 0:
            os.setgroups([])
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
            try:
                open_docker({"DOCKER_HOST": f"unix://{home}/docker.sock"}, timeout_s=2)
            except DockerError as refusal:
                os.write(writer, type(refusal).__name__.encode())
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert os.read(reader, 99) == DockerNotPermitted.__name__.encode()
        assert type(why_not(home / "docker.sock")) in (DockerError, DockerNotRunning)
    os.close(reader)
    os.close(writer)


def command(home: Path, *arguments: str, host: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [str(FUMEHOOD), *arguments],
        env={**CLEAN_ENVIRONMENT, "FUMEHOOD_HOME": str(home), "DOCKER_HOST": host},
        capture_output=True, timeout=600,
    )  # fmt: skip


@pytest.mark.row("S10", "D1")
@pytest.mark.parametrize("arguments", [["images", "list"], ["images", "build", "python"]])
def test_images_commands_without_docker_exit_4_with_the_cure(
    home: Path, arguments: list[str]
) -> None:
    done = command(home, *arguments, host=f"unix://{home}/docker.sock")
    assert done.returncode == 4
    assert b"Docker is not running." in done.stderr
    assert b"systemctl start docker" in done.stderr
    assert b"Traceback" not in done.stderr
    assert done.stdout == b""


@pytest.mark.row("D7")
def test_doctor_without_docker_warns_and_exits_0(home: Path) -> None:
    done = command(home, "doctor", "--json", host=f"unix://{home}/docker.sock")
    assert done.returncode == 0, done.stdout
    assert b"Containers are unavailable." in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [["nosuch"], ["python", "--base", "debian:bookworm"], ["python", "--base", "debian"]],
)
def test_images_build_usage_error_exits_2_before_contacting_docker(
    home: Path, arguments: list[str]
) -> None:
    done = command(home, "images", "build", *arguments, host=f"unix://{home}/docker.sock")
    assert done.returncode == 2
    assert b"Traceback" not in done.stderr
