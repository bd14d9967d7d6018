"""Which requests clients retry if a connection drops before, during or after them.

The peer is a scripted server, so that each moment can be hit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from fumehood import DaemonUnavailable
from support.clients import KINDS, client_of
from support.recording import bench
from support.scripted_server import scripted_server

HEALTHY = b'{"status": "ok"}'


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def path(home: Path) -> Path:
    return home / "engine.sock"


@pytest.fixture(scope="module")
def envelope(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A successful call's envelope as bytes."""

    async def call() -> bytes:
        async with bench(tmp_path_factory.mktemp("home")) as made:
            answer = await made.engine.call("calculator", {"expression": "1"})
        return answer.model_dump_json().encode()

    return anyio.run(call)


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that detects a closed connection only on use.

    Simulates the race in which the daemon closes just after the client's check.
    """
    for backend in ("sync", "anyio"):
        monkeypatch.setattr(f"httpcore2._backends.{backend}.is_socket_readable", lambda _: False)


def post(client: Any) -> Any:
    return client.call("calculator", {"expression": "1"})


@pytest.mark.row("D1")
def test_idle_connection_closed_by_the_daemon_is_reopened(
    kind: str, path: Path, envelope: bytes
) -> None:
    with (
        scripted_server(path, envelope, ["answer"], ["answer", "answer"]) as server,
        client_of(kind, path) as client,
    ):
        post(client)
        server.wait_until_closed(0)
        post(client)
        post(client)
    assert server.requests == ["POST /v1/tools/calculator/call"] * 3


@pytest.mark.row("D1")
@pytest.mark.usefixtures("blind")
def test_call_whose_request_head_was_not_sent_is_retried(
    kind: str, path: Path, envelope: bytes
) -> None:
    with (
        scripted_server(path, envelope, ["answer"], ["answer"]) as server,
        client_of(kind, path) as client,
    ):
        post(client)
        server.wait_until_closed(0)
        post(client)
    assert server.requests == ["POST /v1/tools/calculator/call"] * 2


@pytest.mark.row("D1")
@pytest.mark.usefixtures("blind")
def test_call_on_a_half_closed_connection_is_not_retried(
    kind: str, path: Path, envelope: bytes
) -> None:
    """The peer sends nothing more but may still read, so the call may have run."""
    with (
        scripted_server(path, envelope, ["answer", "half_close", "read"], ["answer"]) as server,
        client_of(kind, path) as client,
    ):
        post(client)
        with pytest.raises(DaemonUnavailable) as caught:
            post(client)
        assert caught.value.may_have_acted is True
        server.wait_until_closed(0)
    assert server.requests == ["POST /v1/tools/calculator/call"] * 2


@pytest.mark.row("D1")
@pytest.mark.parametrize("first", [["read"], ["answer", "read"]], ids=["new", "kept"])
def test_call_read_but_not_answered_is_not_retried(
    kind: str, path: Path, envelope: bytes, first: list[str]
) -> None:
    with (
        scripted_server(path, envelope, first, ["answer"]) as server,
        client_of(kind, path) as client,
    ):
        for _ in first[:-1]:
            post(client)
        with pytest.raises(DaemonUnavailable, match="unknown whether") as caught:
            post(client)
        assert caught.value.may_have_acted is True
        server.wait_until_closed(0)
    assert len(server.requests) == len(first)


@pytest.mark.row("D1")
def test_get_request_without_an_answer_is_sent_again_once(kind: str, path: Path) -> None:
    """Twin: a GET changes nothing, so it is safe to repeat."""
    with (
        scripted_server(path, HEALTHY, ["read"], ["answer"]) as server,
        client_of(kind, path) as client,
    ):
        assert client.health().status == "ok"
    assert server.requests == ["GET /v1/health"] * 2


@pytest.mark.row("D1")
def test_get_is_not_retried_twice(kind: str, path: Path) -> None:
    with (
        scripted_server(path, HEALTHY, ["read"], ["read"], ["answer"]) as server,
        client_of(kind, path) as client,
    ):
        with pytest.raises(DaemonUnavailable) as caught:
            client.health()
        assert caught.value.may_have_acted is False
    assert server.requests == ["GET /v1/health"] * 2


@pytest.mark.row("D1")
def test_call_without_answer_times_out_as_may_have_acted(
    kind: str, path: Path, envelope: bytes
) -> None:
    with (
        scripted_server(path, envelope, ["read", "hold"], ["answer"]) as server,
        client_of(kind, path, grace_s=0.1) as client,
    ):
        with pytest.raises(DaemonUnavailable, match="ReadTimeout") as caught:
            client.call("calculator", {"expression": "1"}, timeout_seconds=0.1)
        assert caught.value.may_have_acted is True
        assert len(server.requests) == 1
        assert post(client).metadata.tool_name == "calculator"


@pytest.mark.row("D1")
@pytest.mark.parametrize("body", [b"<hi>", b"{}", b"[]", b"\xff", b'{"status": "fine"}'], ids=repr)
def test_foreign_server_on_the_socket_is_reported_as_not_fumehood(
    kind: str, path: Path, body: bytes
) -> None:
    with (
        scripted_server(path, body, ["answer"] * 3) as server,
        client_of(kind, path) as client,
    ):
        for ask in (client.ready, client.tools, lambda: post(client)):
            with pytest.raises(DaemonUnavailable, match="not a fumehood engine"):
                ask()
    assert len(server.requests) == 3


BLOB = f"/v1/blobs/blob_{'0' * 32}?expires=1&signature={'f' * 64}"


@pytest.mark.row("E7")
def test_blob_download_dropped_before_its_first_byte_is_retried(kind: str, path: Path) -> None:
    with (
        scripted_server(path, b"content", ["answer", "read"], ["answer"]) as server,
        client_of(kind, path) as client,
    ):
        assert client.blob(BLOB) == b"content"
        assert client.blob(BLOB) == b"content"
    assert server.requests == [f"GET {BLOB}"] * 3


@pytest.mark.row("E7")
def test_truncated_blob_download_fails_without_retry_and_leaves_no_file(
    kind: str, path: Path, home: Path
) -> None:
    """Bytes already passed on cannot be recalled, so the download is not restarted either."""
    with (
        scripted_server(path, b"content", ["cut"]) as server,
        client_of(kind, path) as client,
        pytest.raises(DaemonUnavailable) as caught,
    ):
        client.save_blob(BLOB, home / "saved")
    assert caught.value.may_have_acted is False
    assert server.requests == [f"GET {BLOB}"]
    assert not (home / "saved").exists()
