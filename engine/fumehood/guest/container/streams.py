"""Streams: data that a program, or the container, exchanges with a feature of the engine on the
host.

Guest side, used by the supervisor. For each kind of stream, `fumehood.guest.streams` has a module
with the name of the kind, which contains a class `End`. The supervisor passes frames and events to
the objects of these classes without reading them. Invariants: a frame reaches only the end of its
kind; a program uses only the streams that the host has named for its run.
"""

from __future__ import annotations

import selectors
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fumehood.guest import streams
from fumehood.guest.container.host import Host
from fumehood.guest.container.places import MARK
from fumehood.guest.container.run import Run
from fumehood.guest.core.modules import modules_of
from fumehood.protocol.streams import StreamFrame


@dataclass(frozen=True)
class Place:
    """The parts of the supervisor that an `End` may use. `host` is the connection to the host, and
    `selector` is the selector of the event loop.
    """

    host: Host
    selector: selectors.BaseSelector
    write: Callable[[Run, bytes], None]
    """Passes bytes to a run's program, through the pipe on which the program received its
    request.
    """
    stop: Callable[[Run, str], None]
    """Kills a run's program for a given reason, such as `policy`."""


class End:
    """The guest's end of one kind of stream. Subclasses override the methods that they need."""

    needs_sockets = False
    """Whether programs connect to a socket for this stream, or listen on one."""

    def __init__(self, kind: str, place: Place) -> None:
        self.kind = kind
        self.place = place

    def begin(self, run: Run, told: str) -> None:
        """Begin the stream of `run`, whose program is about to start. `told` is a text from the
        host that configures this stream. Its meaning depends on the kind of stream.
        """

    def on_frame(self, run: Run | None, frame: StreamFrame) -> None:
        """Process a frame from the host. `run` is the run in progress. The frame may belong to
        another run.
        """

    def on_message(self, run: Run, message: dict[str, Any]) -> bool:
        """Process a message from the program of `run`. The message must be regarded as hostile.
        Return False if it is not for this stream.
        """
        return False

    def on_garbage(self, run: Run) -> None:
        """Called when the program of `run` has sent an invalid message. No more messages are read
        from this program.
        """

    def on_written(self, run: Run) -> None:
        """Called after bytes were written to the program of `run`. They are already removed from
        `run.request`, which contains the bytes that still wait.
        """

    def end(self) -> None:
        """End the stream of the current run, whose processes are about to be killed."""

    def clear(self) -> None:
        """Remove what the last run's killed processes have left in this stream, so that the next
        run does not receive it.
        """

    def leave(self) -> None:
        """Release everything that belongs to the host, because the host is gone."""


class Streams:
    """The guest's ends of all kinds of streams, one end for each kind."""

    def __init__(self, place: Place) -> None:
        found = modules_of(streams)
        if MARK is not None:  # programs have no sockets
            found = {kind: one for kind, one in found.items() if not one.End.needs_sockets}
        self._ends: dict[str, End] = {kind: one.End(kind, place) for kind, one in found.items()}

    @property
    def kinds(self) -> list[str]:
        """The kinds of streams that this guest supports, sorted."""
        return sorted(self._ends)

    def begin(self, run: Run) -> None:
        """Begin the streams of a run."""
        for kind, told in run.streams.items():
            self._ends[kind].begin(run, told)

    def on_frame(self, run: Run | None, frame: StreamFrame) -> None:
        """Pass a frame from the host to the `End` for the frame's kind. `run` is the run in
        progress, or None.
        """
        self._ends[frame.kind].on_frame(run, frame)

    def on_message(self, run: Run, message: dict[str, Any]) -> bool:
        """Offer a message from the program of `run` to the streams of this run, one after the
        other. Return True if a stream has accepted it, or False if none has.
        """
        return any(end.on_message(run, message) for end in self._of(run))

    def on_garbage(self, run: Run) -> None:
        """Report to the streams of a run that its program sent an invalid message."""
        for end in self._of(run):
            end.on_garbage(run)

    def on_written(self, run: Run) -> None:
        """Report to the streams of a run that bytes were written to the run's program."""
        for end in self._of(run):
            end.on_written(run)

    def end(self) -> None:
        """End the streams of the current run, whose processes are about to be killed."""
        for end in self._ends.values():
            end.end()

    def clear(self) -> None:
        """Remove everything that the killed processes of the last run have left in the streams."""
        for end in self._ends.values():
            end.clear()

    def leave(self) -> None:
        """End all streams, because the host is gone."""
        for end in self._ends.values():
            end.leave()

    def _of(self, run: Run) -> list[End]:
        """Return the ends of the streams of `run`, or none if the host that began the run is
        gone.
        """
        return [] if run.is_left else [self._ends[kind] for kind in run.streams]
