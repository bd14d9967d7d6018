"""The guest end of a container's channel, scripted by a test, without Docker or sockets."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from fumehood.core.limits import Limit, Limits
from fumehood.protocol import framing
from fumehood.protocol.streams import STREAM_START, StreamFrame
from fumehood.sandbox.container.channel import USUAL_CLOCKS, Channel, Clocks

LIMITS = Limits(wall_s=5, cpu_s=5, memory_mb=128, output_bytes=1000)
READY = {
    "op": "ready", "enforces": {limit.value: True for limit in Limit}, "faults": [],
    "streams": ["calls", "feed", "network", "ports"],
}  # fmt: skip


def ended(run_id: int = 1, **other: Any) -> dict[str, Any]:
    """The ending of a successful run, with fields of `other` replaced."""
    return {
        "op": "ended", "id": run_id, "ended_by": "ok", "cpu_ms": 1.0, "peak_memory_bytes": 1,
        "stdout_bytes": 0, "stderr_bytes": 0, "exit_code": 0, "signal": None, "limits_hit": [],
        "files_left_out": 0, "claim": {"result": {"value": 4}}, **other,
    }  # fmt: skip


def reset(run_id: int = 1, *, clean: bool = True, why: str | None = None) -> dict[str, Any]:
    return {"op": "reset", "id": run_id, "clean": clean, "why": why}


@dataclass
class Heard:
    """The events a channel's listener received."""

    clean: int = 0
    ends: list[str] = field(default_factory=list)

    def on_clean(self) -> None:
        self.clean += 1

    def on_end(self, why: str) -> None:
        self.ends.append(why)


SHORT_CLOCKS = Clocks(answer_grace_s=0.05, collect_s=0.05, cancel_s=0.05, reset_s=0.05)
"""Deadlines short enough for tests."""


class Wire(asyncio.Transport):
    """The messages and the streams' frames that the host wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[dict[str, Any]] = []
        self.frames: list[StreamFrame] = []
        self.is_aborted = False
        self.unsent_bytes = 0
        self._decoder = framing.Decoder(16 << 20)

    def write(self, data: Any) -> None:
        for body in self._decoder.bodies(bytes(data)):
            if body.startswith(STREAM_START):
                self.frames.append(StreamFrame.parse(body))
            else:
                self.messages.append(framing.parse_body(body))

    def abort(self) -> None:
        self.is_aborted = True

    def is_closing(self) -> bool:
        return self.is_aborted

    def get_write_buffer_size(self) -> int:
        return self.unsent_bytes


class ScriptedGuest:
    """A channel with a scripted guest at its other end."""

    def __init__(self, clocks: Clocks = USUAL_CLOCKS, *, ready: bool = True) -> None:
        self.heard = Heard()
        self.channel = Channel(self.heard, clocks)
        self.wire = Wire()
        self.channel.connection_made(self.wire)
        if ready:
            self.says(READY)

    def says(self, *messages: dict[str, Any]) -> None:
        for message in messages:
            self.sends(framing.encode(message))

    def says_in(self, kind: str, body: bytes, run_id: int = 1) -> None:
        """Send a frame of a stream."""
        self.sends(StreamFrame(kind, run_id, body).encode())

    def sends(self, payload: bytes) -> None:
        self.channel.data_received(payload)
