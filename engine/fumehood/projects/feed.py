"""Bytes for a program of the engine in a container, as fast as it reads them.

Host side. Invariant: at most a window of them is on the way, which the guest opens.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio

from fumehood.protocol.framing import (
    DATA,
    FED,
    FEED_BYTES,
    PIECE_BYTES,
    TAKEN,
    ConnectionFrame,
    FrameError,
)
from fumehood.sandbox.wall import CallPort, Dial


class Feed:
    """Feeds one run. Implements `FrameSink`."""

    def __init__(self) -> None:
        self._run_id = 0
        self._send: Callable[[bytes], None] = lambda frame: None
        self._room = 0
        self._is_closed = False
        self._change = anyio.Event()

    def open(
        self, run_id: int, send: Callable[[bytes], None], port: CallPort, dial: Dial | None = None
    ) -> Feed:
        """Begin. Implements `OpenConnections`."""
        self._run_id, self._send = run_id, send
        return self

    async def send(self, data: bytes) -> None:
        """Send bytes, as the program takes them.

        Raises:
            BrokenResourceError: its run has ended.
        """
        view = memoryview(data)
        while view:
            if self._is_closed:
                raise anyio.BrokenResourceError
            if not self._room:
                await self._change.wait()
                continue
            piece = bytes(view[: min(self._room, PIECE_BYTES)])
            view = view[len(piece) :]
            self._room -= len(piece)
            self._send(ConnectionFrame(DATA, self._run_id, FED, piece).encode())

    def on_frame(self, frame: ConnectionFrame) -> None:
        """Take a frame of the guest. Raises FrameError."""
        if (frame.kind, frame.number) != (TAKEN, FED):
            raise FrameError("a connection that no program can have made")
        self._room += frame.taken_bytes
        if self._room > FEED_BYTES:
            raise FrameError("more bytes were taken than were sent")
        self._wake()

    def close(self) -> None:
        """Break it: the run has ended."""
        self._is_closed = True
        self._wake()

    def _wake(self) -> None:
        self._change.set()
        self._change = anyio.Event()
