"""Session files over HTTP: unchanged, streamed, complete or not at all."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import Daemon
from fumehood import Client, ControlClient
from support.fake_files import UPLOAD
from support.http import Answer, connect, read_to_end, split_answer
from support.scripted_daemon import running_scripted_daemon
from support.wait import wait_until

pytestmark = [pytest.mark.row("S6", "D1")]

MB = 1 << 20


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_scripted_daemon(approver=True) as running:
        yield running


class Place:
    """One session of 128 MB and the host directory that holds its files."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.http = daemon.client()
        made = self.http.post("/v1/sessions", b'{"memory_mb": 128}')
        assert made.status == 200, made.body
        self.id = made.body["data"]["session"]["id"]
        self.root = daemon.home / "workspaces" / self.id
        self.root.mkdir(parents=True)

    def request(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Answer:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.http.request(method, f"/v1/sessions/{self.id}/files{path}", body, named)

    @property
    def left_over(self) -> list[str]:
        return [name for name in os.listdir(self.root) if name.startswith(UPLOAD)]


@pytest.fixture
def place(daemon: Daemon) -> Iterator[Place]:
    made = Place(daemon)
    yield made
    made.http.request("DELETE", f"/v1/sessions/{made.id}")
    made.http.close()


@pytest.mark.parametrize("size", [0, 3 * MB + 17])
def test_uploaded_file_is_downloaded_byte_for_byte(place: Place, size: int) -> None:
    content = (bytes(range(256)) + b"\r\n\0") * (size // 259 + 1)
    content = content[:size]
    put = place.request("PUT", "/d/a.bin", content)
    assert put.body["data"] == {"path": "d/a.bin", "size": size}
    assert (place.root / "d/a.bin").read_bytes() == content
    got = place.request("GET", "/d/a.bin")
    assert got.body == content
    assert got.headers["content-length"] == str(size)


def test_file_is_served_as_a_private_attachment(place: Place) -> None:
    place.request("PUT", "/a%22b.html", b"<script>")
    got = place.request("GET", "/a%22b.html")
    assert got.body == b"<script>"
    assert got.headers["content-type"] == "text/html"
    assert got.headers["content-disposition"] == "attachment; filename*=UTF-8''a%22b.html"
    assert got.headers["x-content-type-options"] == "nosniff"
    assert got.headers["cache-control"] == "private, no-store"
    head = place.request("HEAD", "/a%22b.html")
    assert (head.status, head.headers["content-length"]) == (200, "8")


def test_upload_larger_than_the_workspace_is_refused(place: Place) -> None:
    """By its announced length, and by its received length if none is announced."""
    announced = place.request("PUT", "/a", b"x" * (33 * MB))
    assert (announced.status, announced.code) == (413, "REQUEST_TOO_LARGE")
    connection = connect(place.daemon.socket)
    connection.sendall(
        f"PUT /v1/sessions/{place.id}/files/a HTTP/1.1\r\nhost: x\r\n"
        "transfer-encoding: chunked\r\nconnection: close\r\n\r\n".encode()
    )
    for _ in range(34):
        connection.sendall(b"100000\r\n" + b"x" * MB + b"\r\n")
    connection.sendall(b"0\r\n\r\n")
    assert b"REQUEST_TOO_LARGE" in read_to_end(connection)
    connection.close()
    assert os.listdir(place.root) == []
    assert place.request("PUT", "/a", b"x" * (32 * MB)).status == 200  # the twin


def half_an_upload(place: Place, path: str = "/a") -> socket.socket:
    """An upload of 4 MB cut at 2.5 MB, of which 2 MB have reached the session."""
    connection = connect(place.daemon.socket)
    connection.sendall(
        f"PUT /v1/sessions/{place.id}/files{path} HTTP/1.1\r\nhost: x\r\n"
        f"content-length: {4 * MB}\r\nconnection: close\r\n\r\n".encode()
        + b"x" * (5 * MB // 2)
    )
    wait_until(
        lambda: any((place.root / name).stat().st_size == 2 * MB for name in place.left_over)
    )
    return connection


@pytest.mark.parametrize("how", ["close", "half"])
def test_interrupted_upload_leaves_no_file(place: Place, how: str) -> None:
    connection = half_an_upload(place)
    if how == "half":
        connection.shutdown(socket.SHUT_WR)
        assert b"INVALID_PARAMS" in read_to_end(connection)
    connection.close()
    wait_until(lambda: os.listdir(place.root) == [])
    assert place.request("GET", "/a").code == "RESOURCE_NOT_FOUND"


def test_slow_upload_does_not_block_other_requests_of_the_session(place: Place) -> None:
    connection = half_an_upload(place)
    assert place.request("PUT", "/b", b"quick").status == 200
    listed = place.request("GET", "?recursive=true")
    assert [entry["path"] for entry in listed.body["data"]["items"]] == ["b"]
    connection.sendall(b"x" * (3 * MB // 2))
    raw = read_to_end(connection)
    connection.close()
    assert split_answer(raw).body["data"] == {"path": "a", "size": 4 * MB}
    assert (place.root / "a").stat().st_size == 4 * MB


def test_download_of_a_changing_file_is_cut_short_not_mixed(place: Place) -> None:
    (place.root / "a").write_bytes(b"1" * (16 * MB))
    connection = connect(place.daemon.socket)
    connection.sendall(f"GET /v1/sessions/{place.id}/files/a HTTP/1.1\r\nhost: x\r\n\r\n".encode())
    beginning = connection.recv(1000)  # more than the connection holds cannot be under way yet
    (place.root / "a").write_bytes(b"2" * (16 * MB))
    raw = beginning + read_to_end(connection)
    connection.close()
    head, _, body = raw.partition(b"\r\n\r\n")
    assert f"content-length: {16 * MB}".encode() in head
    assert body == b"1" * len(body)
    assert len(body) < 16 * MB
    wait_until(lambda: "session.download_broke_off" in place.daemon.log)
    assert "internal_error" not in place.daemon.log
    assert place.request("GET", "/a").body == b"2" * (16 * MB)  # the twin


def test_stalled_downloads_are_limited_and_freed_on_disconnect(place: Place) -> None:
    (place.root / "a").write_bytes(b"1" * (2 * MB))
    connections, statuses = [], []
    for _ in range(140):  # one after the other: a session serves one at a time
        connection = connect(place.daemon.socket)
        connection.sendall(
            f"GET /v1/sessions/{place.id}/files/a HTTP/1.1\r\nhost: x\r\n\r\n".encode()
        )
        statuses.append(connection.recv(12)[-3:])
        connections.append(connection)
    assert (statuses.count(b"200"), statuses.count(b"429")) == (128, 12)
    assert place.request("GET", "?limit=1").status == 200  # what is small goes on
    for connection in connections:
        connection.close()
    wait_until(lambda: place.request("GET", "/a").status == 200)


def most_memory_mb(daemon: Daemon) -> float:
    """The daemon's peak memory in MB."""
    status = Path(f"/proc/{daemon.process.pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def test_large_file_transfer_uses_bounded_daemon_memory(daemon: Daemon) -> None:
    size, piece = 50 * MB, bytes(range(256)) * 256
    with Client(daemon.socket) as client:
        session = client.create_session(memory_mb=512)
        (daemon.home / "warm").write_bytes(b"x" * 3 * MB)
        client.put_file(session.id, "warm", daemon.home / "warm")
        client.get_file(session.id, "warm")
        before = most_memory_mb(daemon)
        large = daemon.home / "large"
        with large.open("wb") as file:
            for _ in range(size // len(piece)):
                file.write(piece)
        assert client.put_file(session.id, "large", large).size == size
        digest, expected = hashlib.sha256(), hashlib.sha256(large.read_bytes())
        client.download_file(session.id, "large", digest.update)
        client.end_session(session.id)
    assert digest.digest() == expected.digest()
    assert most_memory_mb(daemon) - before < 40


def test_file_list_is_paged_and_rejects_invalid_queries(place: Place) -> None:
    for number in range(25):
        (place.root / f"{number:02}").touch()
    first = place.request("GET", "?limit=20").body["data"]
    cursor = first["pagination"]["next_cursor"]
    rest = place.request("GET", f"?limit=20&cursor={cursor}").body["data"]
    assert [entry["path"] for entry in first["items"] + rest["items"]] == [
        f"{number:02}" for number in range(25)
    ]
    assert rest["pagination"]["next_cursor"] is None
    assert place.request("GET", f"?limit=20&recursive=true&cursor={cursor}").code == (
        "INVALID_PARAMS"
    )
    for wrong in ("?limit=0", "?limit=101", "?path=..", "?path=/etc", "?more=1", "?path=a&path=b"):
        assert place.request("GET", wrong).code == "INVALID_PARAMS", wrong


def test_sessions_and_files_of_another_principal_are_not_found(place: Place) -> None:
    place.request("PUT", "/a", b"secret")
    with ControlClient(place.daemon.control, credential=place.daemon.credential) as control:
        other = control.tokens.new("other", principal_id="somebody", scopes=["call"])
    theirs = {"authorization": f"Bearer {other.secret}"}
    answers = [
        place.http.request(method, f"/v1/sessions/{session}/{path}", body, theirs)
        for session in (place.id, "sess_" + "0" * 32)
        for method, path, body in (
            ("GET", "files", None), ("GET", "files/a", None), ("PUT", "files/a", b"1"),
            ("DELETE", "files/a", None),
        )
    ]  # fmt: skip
    answers += [
        place.http.request(method, f"/v1/sessions/{session}", None, theirs)
        for session in (place.id, "sess_" + "0" * 32)
        for method in ("GET", "DELETE")
    ]
    said = {(answer.code, answer.body["error"]["message"]) for answer in answers}
    assert len(said) == 1  # nobody learns which of the two sessions there is
    assert said.pop()[0] == "RESOURCE_NOT_FOUND"
    assert (place.root / "a").read_bytes() == b"secret"
    assert place.http.request("GET", "/v1/sessions", None, theirs).body["data"]["items"] == []


def test_upload_with_content_encoding_is_refused(place: Place) -> None:
    answer = place.request("PUT", "/a", b"1", content_encoding="gzip")
    assert answer.code == "UNSUPPORTED_MEDIA_TYPE"
    assert os.listdir(place.root) == []
