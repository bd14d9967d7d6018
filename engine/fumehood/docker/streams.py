"""Docker's attached streams: both output streams of a container in one.

Host side. Docker multiplexes standard output and standard error into records with a header of eight
bytes. No more than one header is buffered. The bytes of a record are passed on as they arrive,
whatever its length.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Iterator

from fumehood.sandbox.container.runtime import Receiver

RECORD_HEADER = struct.Struct("!BxxxI")
"""The header of a record: Docker's number of the stream, and the length of the record. *Source*:
Docker Engine API, ContainerAttach, "Stream format".
"""

STDOUT, STDERR = 1, 2
"""Docker's numbers of the output streams."""


class DockerStreams:
    """The standard streams of a container's first process, as one socket. `begun` contains the
    bytes that have already been read from the socket.
    """

    def __init__(self, stream: socket.socket, begun: bytes = b"") -> None:
        self._stream = stream
        self._begun = begun

    async def connect(self, receiver: Receiver) -> None:
        """Connect the streams to the event loop. If this fails, the streams are closed."""
        try:
            self._stream.setblocking(False)
            records = _Records(receiver)
            records.data_received(self._begun)
            loop = asyncio.get_running_loop()
            await loop.create_connection(lambda: records, sock=self._stream)
        except BaseException:
            self._stream.close()
            raise

    def close(self) -> None:
        """Close the streams, which ends the guest."""
        self._stream.close()


class _Records(asyncio.Protocol):
    """Takes Docker's records apart for a receiver."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._demultiplexer = Demultiplexer()
        self._is_broken = False
        self.connection_made = receiver.connection_made  # type: ignore[method-assign]
        self.connection_lost = receiver.connection_lost  # type: ignore[method-assign]
        self.eof_received = receiver.eof_received  # type: ignore[method-assign]
        self.pause_writing = receiver.pause_writing  # type: ignore[method-assign]
        self.resume_writing = receiver.resume_writing  # type: ignore[method-assign]

    def data_received(self, chunk: bytes) -> None:
        if self._is_broken:
            return
        try:
            for stream, piece in self._demultiplexer.feed(chunk):
                if stream == STDERR:
                    self._receiver.errors_received(piece)
                else:
                    self._receiver.data_received(piece)
        except InvalidRecord as error:
            self._is_broken = True
            self._receiver.stream_broken(str(error))


class InvalidRecord(Exception):
    """The stream contains a header that Docker never sends."""


class Demultiplexer:
    """Splits Docker's multiplexed stream into pieces of standard output and standard error. The
    stream arrives in chunks.
    """

    def __init__(self) -> None:
        self._header = bytearray()
        self._stream = STDOUT
        self._left = 0

    def feed(self, chunk: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield the pieces in the next chunk in order of arrival. Each consists of the stream's
        number and bytes.

        Raises:
            InvalidRecord: the chunk has a header that Docker never sends.
        """
        rest = memoryview(chunk)
        while rest:
            if self._left:
                piece, rest = rest[: self._left], rest[self._left :]
                self._left -= len(piece)
                yield self._stream, bytes(piece)
                continue
            missing = RECORD_HEADER.size - len(self._header)
            self._header += rest[:missing]
            rest = rest[missing:]
            if len(self._header) == RECORD_HEADER.size:
                self._begin()

    def _begin(self) -> None:
        self._stream, self._left = RECORD_HEADER.unpack(self._header)
        self._header.clear()
        if self._stream not in (STDOUT, STDERR):
            raise InvalidRecord("this is not Docker's attached stream")
