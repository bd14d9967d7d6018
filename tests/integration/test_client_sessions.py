"""Sessions and their files through both clients: uploads, downloads and refused sources."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import Daemon
from fumehood import Refused
from support.clients import KINDS, LEAVES_SOCKETS, client_of
from support.scripted_daemon import running_scripted_daemon

pytestmark = [pytest.mark.row("S6", "D1"), *LEAVES_SOCKETS]

MB = 1 << 20


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_scripted_daemon() as running:
        yield running


@pytest.fixture(params=KINDS)
def client(request: pytest.FixtureRequest, daemon: Daemon) -> Iterator[Any]:
    with client_of(request.param, daemon.socket) as made:
        yield made


@pytest.fixture
def session(client: Any) -> Iterator[str]:
    made = client.create_session(memory_mb=128)
    yield made.id
    client.end_session(made.id)


def test_file_is_uploaded_from_every_source_type_and_downloaded_unchanged(
    client: Any, session: str, tmp_path: Path
) -> None:
    content = os.urandom(2 * MB + 3)
    here, target = tmp_path / "here", tmp_path / "target"
    here.write_bytes(content)
    with here.open("rb") as file:
        for number, source in enumerate((content, here, file, io.BytesIO(content))):
            name = f"d/a b{number}.bin"
            assert client.put_file(session, name, source).size == len(content)
            assert client.get_file(session, name) == content
    client.download_file(session, name, target)
    assert target.read_bytes() == content
    with pytest.raises(FileExistsError):
        client.download_file(session, name, target)
    pieces: list[bytes] = []
    client.download_file(session, name, pieces.append)
    assert b"".join(pieces) == content


def test_upload_of_anything_but_a_regular_file_is_refused(
    client: Any, session: str, tmp_path: Path
) -> None:
    """Reading a FIFO would block the caller; a refused upload creates nothing."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for source in (pipe, tmp_path, Path("/dev/zero")):
        with pytest.raises(ValueError, match="not a regular file"):
            client.put_file(session, "a", source)
    with pytest.raises(ValueError, match="a text could be"):
        client.put_file(session, "a", "content")
    with pytest.raises(FileNotFoundError):
        client.put_file(session, "a", tmp_path / "nothing")
    assert client.session_files(session).items == ()


def test_failed_download_leaves_no_file(client: Any, session: str, tmp_path: Path) -> None:
    with pytest.raises(Refused):
        client.download_file(session, "nothing", tmp_path / "target")
    assert os.listdir(tmp_path) == []
