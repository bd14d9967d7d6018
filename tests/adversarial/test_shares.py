"""One user who holds connections, memory or slots must not starve everybody else.

The attacks use connections with unfinished headers, endless bodies, and the walls' slots.
`acceptance/test_service_mode.py` tests connections between users.
"""

from __future__ import annotations

import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest

from fumehood.core.identity import TrustDomain
from fumehood.core.limits import MAX_BODY_BYTES, Limits
from fumehood.http.peer import MAX_CONNECTIONS, MAX_HELD_BYTES
from fumehood.interpreter.wall import InterpreterWall
from fumehood.sandbox.process.wall import JailWall
from support.health import Health
from support.http import SocketClient, connect, read_to_end, split_answer
from support.wait import DEADLINE_S, wait_until

UNFINISHED = b"GET /v1/ready HTTP/1.1\r\nx: "
CALL = "POST /v1/tools/calculator/call HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
GOOD = b'{"arguments": {"expression": "2 + 2"}}'
LARGEST = GOOD.ljust(MAX_BODY_BYTES)
HELD_BODIES = MAX_HELD_BYTES // MAX_BODY_BYTES
MAX_GROWTH_BYTES = MAX_HELD_BYTES * 3


@pytest.fixture
def hold() -> Iterator[Callable[..., socket.socket]]:
    """Open a connection, send something, and keep it open until the end of the test."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(4 * MAX_CONNECTIONS, hard)), hard))
    with ExitStack() as held:

        def hold(path: Path, *sent: bytes) -> socket.socket:
            connection = held.enter_context(connect(path))
            for part in sent:
                connection.sendall(part)
            return connection

        yield hold
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.row("D1", "D4")
def test_caller_holding_all_connections_does_not_block_control_socket(
    start_daemon: Any, hold: Any, health: Health
) -> None:
    health.expect_connections(MAX_CONNECTIONS)
    daemon = start_daemon()
    control = daemon.socket.with_name("control.sock")
    held = [hold(daemon.socket, UNFINISHED) for _ in range(MAX_CONNECTIONS)]
    refused = split_answer(read_to_end(hold(daemon.socket)))
    assert (refused.code, refused.status) == ("RATE_LIMITED", 429)
    assert refused.body["error"]["retryable"] is True
    with_authority = SocketClient(control)
    assert with_authority.get("/v1/ready").status == 200
    with_authority.close()
    # Twin: what was given back is there again, for a call too.
    for connection in held[:2]:
        connection.close()

    def is_served() -> bool:
        client = SocketClient(daemon.socket)
        try:
            return bool(client.calculate("2 + 2").body["success"])
        except OSError:
            return False
        finally:
            client.close()

    wait_until(is_served)
    wait_until(lambda: "too many connections" in daemon.log)
    for connection in held:
        connection.close()
    assert daemon.stop() == 0


@pytest.mark.row("D1")
def test_memory_held_by_unfinished_bodies_is_bounded(start_daemon: Any, hold: Any) -> None:
    daemon = start_daemon()
    process = psutil.Process(daemon.process.pid)
    before = process.memory_info().rss
    head = f"{CALL}content-length: {len(LARGEST)}\r\nconnection: close\r\n\r\n".encode()
    held = [hold(daemon.socket, head, LARGEST[:-1]) for _ in range(HELD_BODIES)]

    def one_more() -> Any:
        return split_answer(read_to_end(hold(daemon.socket, head, LARGEST)))

    # The kernel holds the last parts of some for a moment before the daemon has read them.
    wait_until(lambda: one_more().code == "RATE_LIMITED")
    refused = one_more()
    assert (refused.code, refused.status) == ("RATE_LIMITED", 429)
    assert process.memory_info().rss - before < MAX_GROWTH_BYTES
    # Twins: a small call goes on meanwhile, those held still end well, and then there is room.
    client = daemon.client()
    assert client.calculate("2 + 2").body["success"]
    client.close()
    held[0].sendall(LARGEST[-1:])
    assert split_answer(read_to_end(held[0])).body["data"]["value"] == 4
    assert one_more().body["data"]["value"] == 4
    for connection in held[1:]:
        connection.close()
    assert daemon.stop() == 0


@pytest.mark.anyio
@pytest.mark.row("S4")
@pytest.mark.parametrize(
    ("kind", "all_places"),
    [(InterpreterWall, 16), pytest.param(JailWall, 8, marks=pytest.mark.needs("landlock"))],
)
async def test_principal_holding_its_slots_does_not_starve_others(
    kind: type[InterpreterWall] | type[JailWall], all_places: int
) -> None:
    taken: list[int] = []

    async def hold(number: int) -> None:
        async with wall.lease(TrustDomain("alice", session_id=str(number)), fresh=True):
            taken.append(number)
            await anyio.sleep_forever()

    async with kind() as wall, anyio.create_task_group() as group:
        for number in range(2 * all_places):
            group.start_soon(hold, number)
        with anyio.fail_after(DEADLINE_S):
            while len(taken) < all_places * 3 // 4:
                await anyio.sleep(0.01)
            async with wall.lease(TrustDomain("bob"), fresh=True) as lease:
                limits = Limits(wall_s=5, cpu_s=5, memory_mb=64, output_bytes=65536)
                if kind is InterpreterWall:
                    ran = await lease.run("calculator", {"expression": "2 + 2"}, limits)
                    assert ran.result == {"value": 4, "text": "4"}
        assert len(taken) == all_places * 3 // 4
        group.cancel_scope.cancel()
