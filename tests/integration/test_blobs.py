"""Blobs served by a daemon: owner only, complete, as attachments, persistent over a restart."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import Daemon
from fumehood import Client, ControlClient, Refused
from support.clients import KINDS, client_of
from support.container import told
from support.http import SocketClient
from support.scripted_daemon import running_scripted_daemon
from support.wait import wait_until

pytestmark = [pytest.mark.row("E6", "E7")]

LARGE = 3_000_000


@pytest.fixture(scope="module")
def scripted() -> Iterator[Daemon]:
    """A daemon whose fake containers answer as scripted by the program text."""
    with running_scripted_daemon(approver=True) as daemon:
        yield daemon


@pytest.fixture
def http(scripted: Daemon) -> Iterator[SocketClient]:
    client = scripted.client()
    yield client
    client.close()


def run(http: SocketClient, **script: Any) -> Any:
    answer = http.call("run_python", {"code": told(**script)})
    assert answer.status == 200, answer.body
    return answer.body["data"]


def test_large_file_is_served_from_its_url_as_an_attachment(http: SocketClient) -> None:
    (entry,) = run(http, files={'plots/a b".html': LARGE})["files"]
    assert entry["content_type"] == "text/html"
    answer = http.get(entry["url"])
    assert (answer.status, len(answer.body)) == (200, LARGE)
    assert answer.headers["content-type"].startswith("text/html")
    assert answer.headers["content-disposition"] == "attachment; filename*=UTF-8''a%20b%22.html"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["content-length"] == str(LARGE)
    head = http.request("HEAD", entry["url"])
    assert (head.status, head.body) == (200, b"")
    assert head.headers["content-length"] == str(LARGE)


def test_filename_with_crlf_cannot_inject_a_response_header(http: SocketClient) -> None:
    (entry,) = run(http, files={"a\r\nset-cookie: x\n": LARGE})["files"]
    answer = http.get(entry["url"])
    assert answer.status == 200
    assert "set-cookie" not in answer.headers


@pytest.mark.row("D4")
def test_blob_of_another_principal_is_not_found_even_with_its_full_url(
    scripted: Daemon,
) -> None:
    with ControlClient(scripted.control, credential=scripted.credential) as control:
        secret = control.tokens.new("other", principal_id="other").secret
    script = {"code": told(files={"a": LARGE})}
    with Client(scripted.socket) as owner, Client(scripted.socket, credential=secret) as other:
        url = owner.call("run_python", script).data["files"][0]["url"]
        with pytest.raises(Refused) as caught:
            other.blob(url)
        assert caught.value.code == "RESOURCE_NOT_FOUND"
        assert len(owner.blob(url)) == LARGE
        own = other.call("run_python", script).data["files"][0]["url"]
        assert len(other.blob(own)) == LARGE  # twin


@pytest.mark.parametrize("kind", KINDS)
def test_clients_fetch_save_and_stream_blobs_and_refuse_foreign_urls(
    kind: str, scripted: Daemon, tmp_path: Path
) -> None:
    with client_of(kind, scripted.socket) as client:
        (entry,) = client.call("run_python", {"code": told(files={"a": LARGE})}).data["files"]
        assert client.blob(entry["url"]) == b"x" * LARGE
        client.save_blob(entry["url"], tmp_path / "a")
        assert (tmp_path / "a").stat().st_size == LARGE
        with pytest.raises(FileExistsError):
            client.save_blob(entry["url"], tmp_path / "a")
        pieces: list[bytes] = []
        client.download_blob(entry["url"], pieces.append)
        assert len(pieces) > 1
        assert sum(map(len, pieces)) == LARGE
        forged = entry["url"][:-1] + ("0" if entry["url"][-1] != "0" else "1")
        with pytest.raises(Refused) as caught:
            client.save_blob(forged, tmp_path / "b")
        assert caught.value.code == "RESOURCE_NOT_FOUND"
        assert not (tmp_path / "b").exists()
        for other in ("/v1/tools", "http://elsewhere/v1/blobs/x", entry["url"] + "\n"):
            with pytest.raises(ValueError, match="not the address of a blob"):
                client.blob(other)


@pytest.mark.parametrize("kind", KINDS)
def test_clients_read_truncated_output_and_values_whole(kind: str, scripted: Daemon) -> None:
    texts = {"stdout": "ä" * 50_000, "stderr": "short"}
    value = list(range(5000))
    with client_of(kind, scripted.socket) as client:
        answer = client.call("run_python", {"code": told(**texts, value=value)})
        failed = client.call(
            "run_python", {"code": told(**texts, ended_by="exit", exit_code=2)}, max_length=70
        )
        for envelope in (answer, failed):
            assert client.whole(envelope, "stdout") == texts["stdout"]
            assert client.whole(envelope, "stderr") == "short"
        assert answer.data["value"] is None
        assert client.whole(answer, "value") == value
        with pytest.raises(ValueError, match="has no files"):
            client.whole(answer, "files.0.content")


def test_blobs_of_a_session_are_deleted_when_it_ends(scripted: Daemon) -> None:
    with Client(scripted.socket) as client:
        script = {"code": told(files={"a": LARGE}, stdout="b" * 50_000)}
        session = client.create_session()
        inside = client.call("run_python", script, session_id=session.id).data
        outside = client.call("run_python", script).data
        assert client.blob(inside["resource_url"]) == b"b" * 50_000
        kept = len(os.listdir(scripted.home / "blobs"))
        client.end_session(session.id)
        wait_until(lambda: len(os.listdir(scripted.home / "blobs")) == kept - 2)
        for url in (inside["files"][0]["url"], inside["resource_url"]):
            with pytest.raises(Refused, match="its session has ended"):
                client.blob(url)
        assert len(client.blob(outside["files"][0]["url"])) == LARGE
        assert client.blob(outside["resource_url"]) == b"b" * 50_000


def test_aborted_blob_download_leaks_no_file_descriptor(scripted: Daemon) -> None:
    http = scripted.client()
    (entry,) = run(http, files={"a": 20_000_000})["files"]
    http.close()

    def is_closed() -> bool:
        directory = Path(f"/proc/{scripted.process.pid}/fd")
        try:
            return not any("/blobs/" in os.readlink(entry) for entry in directory.iterdir())
        except FileNotFoundError:  # one was closed in this moment
            return False

    for _ in range(5):
        with socket.socket(socket.AF_UNIX) as leaves:
            leaves.connect(str(scripted.socket))
            leaves.sendall(f"GET {entry['url']} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
            assert leaves.recv(100)
    wait_until(is_closed)
    again = scripted.client()
    assert len(again.get(entry["url"]).body) == 20_000_000
    again.close()


def test_world_readable_blob_directory_is_not_used_and_calls_still_succeed(
    home: Path,
) -> None:
    (home / "blobs").mkdir()
    (home / "blobs").chmod(0o755)
    with running_scripted_daemon(home) as daemon:
        http = daemon.client()
        data = run(http, stdout="a" * 50_000, files={"big": LARGE, "small": "abc"})
        big, small = data["files"]
        assert "keeps nothing now" in big["not_kept"]
        assert "content_base64" in small
        assert "resource_url" not in data
        assert data["stdout"].startswith("aaa")
        http.close()
        assert "blobs.unavailable" in daemon.log
        assert "open to other users" in daemon.log
    assert os.listdir(home / "blobs") == []
