"""What a run sends waits on its node until it is fetched, and holds its program back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fumehood.cluster.model import RunOrder
from fumehood.cluster.node import PIECE_BYTES, Events, _Passing
from fumehood.core.errors import EndedBy
from fumehood.core.identity import TrustDomain
from fumehood.core.limits import Limits
from fumehood.protocol.framing import DATA, ConnectionFrame
from fumehood.sandbox.wall import RunEnding

ORDER = RunOrder(
    "run", "python", {}, Limits(1, 1, 128, 1), TrustDomain("uid:1"),
    wants=frozenset({"progress", "files", "output", "call"}), trust="certificates",
)  # fmt: skip


class Port:
    def answer(self, answer: bytes) -> None:
        raise AssertionError

    def pause(self, *, is_paused: bool) -> None:
        raise AssertionError


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["output", "progress", "call", "files", "connection"])
async def test_attack_program_that_sends_without_end_is_held_back(kind: str) -> None:
    """Many small events, and tool calls with large arguments, take a node's memory as well."""
    events = Events()
    run: Any = SimpleNamespace(events=events)
    sinks = events.sinks(
        ORDER, lambda number, port: None, lambda number, send, port: _Passing(run, send)
    )
    assert sinks.network
    frames = sinks.network.open(1, lambda frame: None, Port())
    assert sinks.output
    assert sinks.progress
    assert sinks.call
    assert sinks.files
    sent = 0
    while not events.brake.is_on and sent < 2 * PIECE_BYTES:
        sent += 1
        match kind:
            case "output":
                sinks.output("stdout", "x")
            case "progress":
                sinks.progress(1.0, "")
            case "call":
                sinks.call(sent, "tool", {"text": "x" * 10_000}, Port())
            case "files":
                sinks.files.start(f"f{sent}", 0)
            case "connection":
                frames.on_frame(ConnectionFrame(DATA, 1, 1, b"x"))
    assert sent <= PIECE_BYTES // (10_000 if kind == "call" else 100)
    await events.next()
    assert not events.brake.is_on


@pytest.mark.anyio
async def test_run_has_one_ending() -> None:
    events = Events()
    events.add("ending", RunEnding(EndedBy.OK, "call"))
    events.close(RunEnding(EndedBy.CANCELLED, "call"))
    ((_, ending),) = await events.next()
    assert ending.ended_by is EndedBy.OK
