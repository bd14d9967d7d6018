"""The standard streams of an MCP server's program that runs in a container.

Host side, above the wall. The container has no guest, and the program serves the calls of all
callers. What the program writes is treated as hostile: an invalid frame ends the program, and a
program that does not read its input is disconnected. If the program may use the network, a *front*
runs it: a process in the container that also connects the program to the gateway.
"""

from __future__ import annotations

import asyncio
import errno
import time
from contextlib import suppress
from dataclasses import dataclass

import anyio

from fumehood.protocol import framing
from fumehood.protocol.connections import MAX_SEGMENT_BYTES
from fumehood.protocol.streams import FRONT_RUN, MAX_HEAD_BYTES, StreamFrame
from fumehood.sandbox.connections import Connection, Connections
from fumehood.sandbox.streams import MAX_UNREAD_BYTES, Dial, Stream, StreamEnd
from fumehood.sandbox.wall import CHUNK_BYTES, AttachedProgram, rest_after

STANDARD = "stdio"
"""Name of the stream between the host and the program behind a front. It has only one connection,
which carries the program's standard input and output.
"""


class ContainerProgram:
    """The standard streams of a program in a container."""

    def __init__(self, attached: AttachedProgram) -> None:
        self._attached = attached
        self._reader = attached.reader
        self._writer = attached.writer

    @property
    def said(self) -> bytes:
        """The end of what the program has written to standard error so far."""
        return self._attached.said()

    async def read(self) -> bytes:
        """Return the next bytes of the program's standard output. At the end of the output, return
        empty bytes.
        """
        return await self._reader.read(CHUNK_BYTES)

    async def write(self, data: bytes) -> None:
        """Write to the program's standard input.

        Raises OSError if the input is closed, or if the program has left too much of its input
        unread.
        """
        if self._writer.transport.get_write_buffer_size() > len(data) + MAX_UNREAD_BYTES:
            raise BlockingIOError("it reads nothing")
        self._writer.write(data)
        await self._writer.drain()

    def send(self, frame: bytes) -> None:
        """Send a frame to the front, which is the process in the container that runs the program
        and connects it to the gateway. If the front has left too much unread, disconnect the front.
        """
        if self._writer.transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            self.disconnect()
        else:
            self._writer.write(frame)

    def disconnect(self) -> None:
        """Close the streams of a container that has violated the protocol."""
        self._writer.transport.abort()

    async def stop(self) -> None:
        """Remove the container."""
        await self._attached.stop()


class NetworkedProgram:
    """The standard streams of a program in a container that may use the network.

    A front runs the program: it is a process in the container that exchanges two streams with the
    host. One stream carries the program's standard input and output. The other, `network`, carries
    the program's connections to the gateway.
    """

    def __init__(self, program: ContainerProgram, stream: Stream[StreamEnd]) -> None:
        self._program = program
        self._decoder = framing.Decoder(MAX_HEAD_BYTES + MAX_SEGMENT_BYTES)
        kind = stream.kind
        self._ends: dict[str, StreamEnd] = {
            kind.name: stream.open(_Port(program, kind.name)),
            STANDARD: Connections(_Port(program, STANDARD), self._on_streams),
        }
        self._streams: Connection | None = None
        self._are_open = asyncio.Event()
        self._input: asyncio.Queue[bytes] = asyncio.Queue()
        self._unsent = 0
        program.send(framing.encode({"trust": kind.told}))
        self._tasks = [asyncio.ensure_future(self._pump()), asyncio.ensure_future(self._feed())]

    @property
    def said(self) -> bytes:
        """The end of what the program has written to standard error so far."""
        return self._program.said

    async def read(self) -> bytes:
        """Return the next bytes of the program's standard output. At the end of the output, return
        empty bytes.
        """
        await self._are_open.wait()
        if self._streams is not None:
            with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
                return await self._streams.receive()
        return b""

    async def write(self, data: bytes) -> None:
        """Write to the program's standard input.

        Raises OSError if the program has left too much of its input unread.
        """
        if self._unsent > MAX_UNREAD_BYTES:
            raise BlockingIOError(errno.EAGAIN, "it reads nothing")
        self._unsent += len(data)
        self._input.put_nowait(data)

    async def stop(self) -> None:
        """Close the program's connections, and remove the container."""
        for task in self._tasks:
            task.cancel()
        self._close()
        await self._program.stop()

    def _close(self) -> None:
        for end in self._ends.values():
            end.close()

    def _on_streams(self, connection: Connection) -> None:
        """Use `connection` for the program's standard input and output. This method is called once,
        because the stream `STANDARD` has only this connection.
        """
        self._streams = connection
        self._are_open.set()

    async def _pump(self) -> None:
        """Process the frames that the front (the process that runs the program) sends. When the
        frames end or a frame is invalid, close all connections.
        """
        try:
            while chunk := await self._program.read():
                began = time.monotonic()
                for body in self._decoder.bodies(chunk):
                    frame = StreamFrame.parse(body)
                    if frame.run_id != FRONT_RUN or frame.kind not in self._ends:
                        raise framing.FrameError("a stream that the host has not opened")
                    self._ends[frame.kind].on_frame(frame.body)
                await rest_after(time.monotonic() - began)
        except framing.FrameError:
            pass
        finally:
            self._close()
            self._are_open.set()

    async def _feed(self) -> None:
        await self._are_open.wait()
        with suppress(anyio.BrokenResourceError):
            while self._streams is not None:
                data = await self._input.get()
                await self._streams.send(data)
                self._unsent -= len(data)


@dataclass(frozen=True, slots=True)
class _Port:
    """Sends the frames of the stream `kind` to the front, which is the process in the container
    that runs the program.
    """

    program: ContainerProgram
    kind: str
    dial: Dial | None = None

    def send(self, body: bytes) -> None:
        """Send a frame with `body` to the front."""
        self.program.send(StreamFrame(self.kind, FRONT_RUN, body).encode())

    def pause(self, *, is_paused: bool) -> None:
        """Do nothing, because the program of an MCP server has no time limit to pause."""

    def refuse(self, why: str) -> None:
        """Disconnect the front, which has violated the protocol. The reason `why` is not used."""
        self.program.disconnect()
