"""Streams of a container's channel. Each connects a feature of the engine with the code of this
feature in the guest.

Host side. A stream has a kind, which names the feature that owns it. The owner opens the stream for
a run (`RunSinks.streams`) or for a container, checks every frame from the guest, and has code of
the same kind in the guest (`guest/streams/`). The channel, the walls and the sessions pass frames
on without reading them. Invariants: the channel accepts only frames of streams that were opened,
and only while these streams are open; if the host's end of a stream finds a frame invalid, the
container is ended; if the guest lacks one of a run's streams, the run does not begin.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import anyio.abc

MAX_UNREAD_BYTES = 32 << 20
"""Usual maximum number of bytes that were sent to a guest and that it has not read. A guest that
leaves more bytes unread is treated as hostile.
"""

Dial = Callable[[str, int], Awaitable[anyio.abc.ByteStream]]
"""Connects to an address and port from the machine on which the run takes place, and returns the
connection. Raises EngineError.
"""


class RunClock(Protocol):
    """The clock that measures the time of a run against the run's limit."""

    def pause(self, *, is_paused: bool) -> None:
        """If `is_paused` is True, stop the clock, because the run waits for a human. Otherwise, let
        it continue. Does nothing after the run has ended.
        """


class StreamPort(RunClock, Protocol):
    """Connects the host's end of a stream to the channel. With it, the host's end sends frames,
    pauses the clock of the run, or ends the container. After the stream's run has ended, the
    methods do nothing.
    """

    @property
    def dial(self) -> Dial | None:
        """A function that opens connections from the machine on which the container runs. None if
        that machine is the engine's own.
        """

    def send(self, body: bytes) -> None:
        """Send a frame to the guest's end of the stream. Must not be called while the stream is
        being opened.
        """

    def refuse(self, why: str) -> None:
        """End the container, because the guest broke the protocol; `why` describes the fault. This
        is for faults that are found only after `StreamEnd.on_frame` has returned.
        """


class StreamEnd(Protocol):
    """The host's end of one stream. Its methods are called in the event loop, so they must not
    block.
    """

    def on_frame(self, body: bytes) -> None:
        """Process the body of a frame from the guest. The body must be regarded as hostile. After
        `close`, the frame is still checked, but then dropped.

        Raises:
            FrameError: the frame breaks the protocol. The container is then ended.
        """

    def close(self) -> None:
        """Inform this end that the stream has ended, because its run was cancelled, or because the
        run or the container has ended. May be called several times.
        """


class KeptEnd(StreamEnd, Protocol):
    """The host's end of a stream that belongs to a container, and not to one of its runs."""

    def interrupt(self) -> None:
        """Break the transfers in progress, because the container is about to be frozen. The stream
        stays open.
        """


@dataclass(frozen=True, slots=True)
class StreamKind:
    """The fixed properties of all streams of one kind, which the channel and the guest need to open
    such a stream.
    """

    name: str
    """The name of the kind, and of the guest's module in `guest/streams/`."""
    told: str = ""
    """A text for the guest's end of the stream. The guest receives it when the run starts."""
    modules: tuple[str, ...] = ()
    """The modules in `guest/given/` that a Python program can import because of this stream."""
    max_unread_bytes: int = MAX_UNREAD_BYTES
    """Maximum number of bytes that the guest may have left unread when another frame is sent to
    it.
    """


E = TypeVar("E", bound=StreamEnd, covariant=True)
K = TypeVar("K", bound=KeptEnd)


@dataclass(frozen=True, slots=True)
class Stream(Generic[E]):
    """Describes a stream: its kind, and the function that opens the host's end of the stream for a
    run or a container.
    """

    kind: StreamKind
    open: Callable[[StreamPort], E]
    """Opens the host's end of the stream, and returns it. Must not block, and must not send
    frames.
    """
