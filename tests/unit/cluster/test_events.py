"""What a run sends waits on its node until it is fetched, and holds its program back."""

from __future__ import annotations

import pytest

from fumehood.cluster.model import RunOrder
from fumehood.cluster.node import PIECE_BYTES, Events
from fumehood.core.errors import EndedBy
from fumehood.core.identity import TrustDomain
from fumehood.core.limits import Limits
from fumehood.sandbox.streams import StreamKind, StreamPort
from fumehood.sandbox.wall import RunEnding

ORDER = RunOrder(
    "run", "python", {}, Limits(1, 1, 128, 1), TrustDomain("uid:1"),
    wants=frozenset({"progress", "files", "output"}), streams=(StreamKind("network"),),
)  # fmt: skip


class Port:
    dial = None

    def send(self, body: bytes) -> None:
        raise AssertionError

    def pause(self, *, is_paused: bool) -> None:
        raise AssertionError

    def refuse(self, why: str) -> None:
        raise AssertionError


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["output", "progress", "files", "frames", "large-frames"])
async def test_attack_program_that_sends_without_end_is_held_back(kind: str) -> None:
    """Many small events, and frames of streams with large bodies, take a node's memory as well."""
    events, opened = Events(), dict[str, StreamPort]()
    sinks = events.sinks(ORDER, opened.__setitem__)
    (stream,), port = sinks.streams, Port()
    frames = stream.open(port)
    assert opened == {"network": port}
    assert sinks.output
    assert sinks.progress
    assert sinks.files
    sent = 0
    while not events.brake.is_on and sent < 2 * PIECE_BYTES:
        sent += 1
        match kind:
            case "output":
                sinks.output("stdout", "x")
            case "progress":
                sinks.progress(1.0, "")
            case "files":
                sinks.files.start(f"f{sent}", 0)
            case "frames":
                frames.on_frame(b"x")
            case "large-frames":
                frames.on_frame(b"x" * 10_000)
    assert sent <= PIECE_BYTES // (10_000 if kind == "large-frames" else 100)
    await events.next()
    assert not events.brake.is_on


@pytest.mark.anyio
async def test_run_has_one_ending() -> None:
    events = Events()
    events.add("ending", RunEnding(EndedBy.OK, "call"))
    events.close(RunEnding(EndedBy.CANCELLED, "call"))
    ((_, ending),) = await events.next()
    assert ending.ended_by is EndedBy.OK
