"""Why Docker cannot be used: told apart by asking its socket."""

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
from fumehood.sandbox.container import docker_api
from fumehood.sandbox.container.docker_api import (
    DockerError,
    DockerFault,
    DockerNotInstalled,
    DockerNotPermitted,
    DockerNotRunning,
    DockerNotSupported,
    DockerTimeout,
    open_docker,
)


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
    """Somebody who says the same to everybody."""
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
            thread.join(10)


def test_no_socket_where_docker_host_says_is_an_engine_that_does_not_run(home: Path) -> None:
    assert type(why_not(home / "docker.sock")) is DockerNotRunning


def test_socket_that_nobody_serves_is_an_engine_that_does_not_run(home: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left_over:
        left_over.bind(str(home / "docker.sock"))
    assert type(why_not(home / "docker.sock")) is DockerNotRunning


@pytest.mark.parametrize("client", [True, False])
def test_client_without_an_engine_is_not_installed(
    home: Path, monkeypatch: pytest.MonkeyPatch, client: bool
) -> None:
    program = home / "docker"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755 if client else 0o644)
    monkeypatch.setenv("PATH", str(home))
    monkeypatch.setattr(docker_api, "SYSTEM_PATH", str(home))
    monkeypatch.setattr(docker_api, "SNAP", home / "nothing")
    monkeypatch.setattr(docker_api, "DEFAULT_HOST", f"unix://{home}/docker.sock")
    with pytest.raises(DockerError) as refusal:
        open_docker({})
    assert type(refusal.value) is DockerNotInstalled
    assert ("client" in str(refusal.value)) is client
    (home / "dockerd").write_text("#!/bin/sh\n")
    (home / "dockerd").chmod(0o755)
    with pytest.raises(DockerError) as refusal:
        open_docker({})
    assert type(refusal.value) is DockerNotRunning


@pytest.mark.parametrize("address", ["ssh://somewhere", "npipe:////./x", "docker.sock", "unix:/x"])
def test_address_of_another_form_is_named(address: str) -> None:
    assert type(failure_of(address)) is DockerNotSupported


@pytest.mark.parametrize(
    "answer",
    [b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n<hi>", b"SSH-2.0-x\r\n", b"",
     b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n[]"],
)  # fmt: skip
def test_somebody_else_at_the_socket_is_no_docker(home: Path, answer: bytes) -> None:
    with answering(home / "docker.sock", answer):
        assert type(why_not(home / "docker.sock")) in (DockerFault, DockerNotRunning)


def test_engine_that_hangs_is_given_up(home: Path) -> None:
    """It takes the connection, and then says nothing."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(home / "docker.sock"))
        listener.listen()
        assert type(why_not(home / "docker.sock")) is DockerTimeout


@pytest.mark.parametrize("path", ["/", "x" * 200])
def test_path_that_can_be_no_socket_is_refused(path: str) -> None:
    assert isinstance(failure_of(f"unix://{path}"), DockerNotRunning)


@pytest.mark.needs("root")
def test_user_who_may_not_open_the_socket_is_not_permitted(home: Path) -> None:
    """Asked by another user; the control is root, to whom the same socket answers otherwise."""
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
        assert type(why_not(home / "docker.sock")) in (DockerFault, DockerNotRunning)
    os.close(reader)
    os.close(writer)


def command(home: Path, *arguments: str, host: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [str(FUMEHOOD), *arguments],
        env={**CLEAN_ENVIRONMENT, "FUMEHOOD_HOME": str(home), "DOCKER_HOST": host},
        capture_output=True, timeout=60,
    )  # fmt: skip


@pytest.mark.row("S10", "D1")
@pytest.mark.parametrize("arguments", [["images", "list"], ["images", "build", "python"]])
def test_images_without_docker_end_with_4_and_the_cure(home: Path, arguments: list[str]) -> None:
    done = command(home, *arguments, host=f"unix://{home}/docker.sock")
    assert done.returncode == 4
    assert b"Docker is not running." in done.stderr
    assert b"systemctl start docker" in done.stderr
    assert b"Traceback" not in done.stderr
    assert done.stdout == b""


@pytest.mark.row("D7")
def test_doctor_without_docker_warns_and_does_not_fail(home: Path) -> None:
    done = command(home, "doctor", "--json", host=f"unix://{home}/docker.sock")
    assert done.returncode == 0, done.stdout
    assert b"Containers are unavailable." in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [["nosuch"], ["python", "--base", "debian:bookworm"], ["python", "--base", "debian"]],
)
def test_wrong_use_of_build_ends_with_2_before_docker_is_asked(
    home: Path, arguments: list[str]
) -> None:
    done = command(home, "images", "build", *arguments, host=f"unix://{home}/docker.sock")
    assert done.returncode == 2
    assert b"Traceback" not in done.stderr
