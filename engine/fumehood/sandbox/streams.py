"""Streams of a container's channel: what a feature exchanges with its own code in the guest.

Host side. A stream has a kind, which names its owner: the owner opens the stream for a run
(`RunSinks.streams`) or for a container, checks every frame from the guest, and has code of the same
kind in the guest (`guest/streams/`). The channel, the walls and the sessions pass frames on unread.
Invariants: the channel accepts only frames of streams that were opened, and only while they are
open; an end that finds a frame invalid ends the container; a run whose guest lacks one of its
streams does not begin.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import anyio.abc

MAX_UNREAD_BYTES = 32 << 20
"""Usual maximum number of bytes sent to a guest that it has not read. A guest that exceeds this
limit is treated as hostile."""

Dial = Callable[[str, int], Awaitable[anyio.abc.ByteStream]]
"""Connects to an address and port from the machine on which the run takes place. Raises
EngineError.
"""


class RunClock(Protocol):
    """The clock of a run, by which its time limit is measured."""

    def pause(self, *, is_paused: bool) -> None:
        """Pause the clock while the run waits for a human, or resume the clock. Does nothing after
        the run has ended.
        """


class StreamPort(RunClock, Protocol):
    """The channel as one stream uses it. Does nothing after the stream's run has ended."""

    @property
    def dial(self) -> Dial | None:
        """A function that connects from the container's machine, or None if the container runs on
        the engine's own machine.
        """

    def send(self, body: bytes) -> None:
        """Send a frame to the guest. Must not be called while the stream is being opened."""

    def refuse(self, why: str) -> None:
        """End the container, because what the guest sent breaks the protocol. For a fault that is
        found after `StreamEnd.on_frame` has returned.
        """


class StreamEnd(Protocol):
    """The host's end of one stream. The event loop calls its methods, so they must not block."""

    def on_frame(self, body: bytes) -> None:
        """Process the body of a frame from the guest, which is hostile. After `close`, check the
        frame and drop it.

        Raises:
            FrameError: the frame breaks the protocol. The container ends.
        """

    def close(self) -> None:
        """Handle the end of the stream: its run was cancelled, or the run or the container has
        ended. May be called again.
        """


class KeptEnd(StreamEnd, Protocol):
    """The host's end of a stream that belongs to a container, and to none of its runs."""

    def interrupt(self) -> None:
        """Break what passes over the stream now, because the container is about to be frozen. The
        stream stays open.
        """


@dataclass(frozen=True, slots=True)
class StreamKind:
    """What the channel and the guest must know of a stream."""

    name: str
    """The name of the kind, and of the guest's module in `guest/streams/`."""
    told: str = ""
    """A text for the guest's end, which the guest receives when the run starts."""
    modules: tuple[str, ...] = ()
    """The modules in `guest/given/` that a Python program gets because of this stream."""
    max_unread_bytes: int = MAX_UNREAD_BYTES
    """Maximum number of bytes that the guest may leave unread when a frame is sent."""


E = TypeVar("E", bound=StreamEnd, covariant=True)
K = TypeVar("K", bound=KeptEnd)


@dataclass(frozen=True, slots=True)
class Stream(Generic[E]):
    """A stream that can be opened."""

    kind: StreamKind
    open: Callable[[StreamPort], E]
    """Opens the host's end. Must not block, and must not send."""
