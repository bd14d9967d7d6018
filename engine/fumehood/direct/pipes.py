"""The standard streams of a sandbox's first process, as three pipes.

Host side, used by `Direct`, between the launcher and a container's channel.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from typing import Any

from fumehood.sandbox.container.runtime import Receiver

LAST_WORDS_S = 1.0
"""Seconds for the output of a process that no longer reads its input."""


class PipeStreams:
    """Our ends of the pipes `stdin`, `stdout` and `stderr`, given as descriptors. Create them with
    `pair`. The owner must call `connect` or `close`.
    """

    def __init__(self, stdin: int, stdout: int, stderr: int) -> None:
        self._files = [
            os.fdopen(stdin, "wb", 0), os.fdopen(stdout, "rb", 0), os.fdopen(stderr, "rb", 0),
        ]  # fmt: skip

    @classmethod
    def pair(cls) -> tuple[PipeStreams, tuple[int, int, int]]:
        """Return our ends of three new pipes, and descriptors of the sandbox's ends."""
        (in_r, in_w), (out_r, out_w), (err_r, err_w) = (os.pipe2(os.O_CLOEXEC) for _ in range(3))
        return cls(in_w, out_r, err_r), (in_r, out_w, err_w)

    async def connect(self, receiver: Receiver) -> None:
        """Connect the streams to the event loop. If this fails, the streams are closed."""
        loop = asyncio.get_running_loop()
        stdin, stdout, stderr = self._files
        joined = _Joined(receiver)
        try:
            writer, _ = await loop.connect_write_pipe(lambda: _Input(receiver, joined), stdin)
            joined.use(writer)
            reader, _ = await loop.connect_read_pipe(lambda: _Output(receiver, joined), stdout)
            joined.use(reader)
            errors, _ = await loop.connect_read_pipe(lambda: _Errors(receiver), stderr)
            joined.use(errors)
        except BaseException:
            joined.close()
            self.close()
            raise
        receiver.connection_made(joined)

    def close(self) -> None:
        """Close the streams, which ends the guest."""
        for file in self._files:
            with suppress(OSError):
                file.close()


class _Joined(asyncio.Transport):
    """A transport that writes to the standard input of a process, and reads its standard output."""

    def __init__(self, receiver: Receiver) -> None:
        super().__init__()
        self._receiver = receiver
        self._transports: list[Any] = []
        self._is_lost = False

    def use(self, transport: asyncio.BaseTransport) -> None:
        """Add the transport of the standard input, then that of the standard output, then that of
        the standard error.
        """
        self._transports.append(transport)

    def lost(self, error: Exception | None) -> None:
        """Report once that one of the two streams has ended, and close the others."""
        if not self._is_lost:
            self._is_lost = True
            self.close()
            self._receiver.connection_lost(error)

    def write(self, data: Any) -> None:
        self._transports[0].write(data)

    def get_write_buffer_size(self) -> int:
        return int(self._transports[0].get_write_buffer_size())

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._transports[0].set_write_buffer_limits(high, low)

    def pause_reading(self) -> None:
        if not self._transports[1].is_closing():
            self._transports[1].pause_reading()

    def resume_reading(self) -> None:
        if not self._transports[1].is_closing():
            self._transports[1].resume_reading()

    def is_closing(self) -> bool:
        return self._is_lost or bool(self._transports[0].is_closing())

    def close(self) -> None:
        for transport in self._transports:
            transport.close()

    def abort(self) -> None:
        writer = self._transports[0]
        # asyncio fails if a transport is aborted after its end was scheduled.
        if not writer.is_closing() or writer.get_write_buffer_size():
            writer.abort()
        for transport in self._transports[1:]:
            transport.close()


class _Input(asyncio.BaseProtocol):
    def __init__(self, receiver: Receiver, joined: _Joined) -> None:
        self._receiver, self._joined = receiver, joined

    def pause_writing(self) -> None:
        self._receiver.pause_writing()

    def resume_writing(self) -> None:
        self._receiver.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        # The process may still write its last words, whose end is reported then. But if it has only
        # closed its input, nothing can be sent to it any more.
        if error is not None:
            asyncio.get_running_loop().call_later(LAST_WORDS_S, self._joined.lost, error)


class _Output(asyncio.Protocol):
    def __init__(self, receiver: Receiver, joined: _Joined) -> None:
        self._receiver, self._joined = receiver, joined

    def data_received(self, data: bytes) -> None:
        self._receiver.data_received(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._joined.lost(error)


class _Errors(asyncio.Protocol):
    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def data_received(self, data: bytes) -> None:
        self._receiver.errors_received(data)
