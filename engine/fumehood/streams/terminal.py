"""A running call on the terminal: live output, progress, and Ctrl-C to cancel.

A program's output is untrusted, so it is escaped on a terminal. Elsewhere, it is written unchanged.
Progress is shown on stderr, but only if stderr is a terminal and its current line is empty.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TextIO

from rich.console import Console
from rich.text import Text

from fumehood.cli.exits import document_of, write
from fumehood.cli.reach import caller_token, calling, find_socket, telling_what_waits
from fumehood.client import Client, DaemonUnavailable, Refused
from fumehood.core.escaping import printable, visible
from fumehood.core.json_types import JsonObject
from fumehood.streams.events import (
    ErrorEvent,
    NoticeEvent,
    OutputEvent,
    ProgressEvent,
    ResultEvent,
    RetryingEvent,
)


def stream_call(
    tool: str, arguments: JsonObject, options: JsonObject, socket: Path | None, *,
    as_json: bool, token_file: Path | None = None,
) -> JsonObject:  # fmt: skip
    """Call a tool, show its events, and return its answer.

    The program's stdout is written to stdout, and everything else to stderr. With `as_json`,
    everything is written to stderr. The first Ctrl-C cancels the call, and its answer is still
    returned. A second Ctrl-C exits without the answer.
    """
    screen = _Screen(sys.stderr if as_json else sys.stdout)
    with ExitStack() as stack:
        client = stack.enter_context(
            calling(socket, as_json=as_json, is_call=True, token_file=token_file)
        )
        stack.callback(screen.clear)
        calls: list[str] = []
        stack.enter_context(_cancelling(client, calls))
        path, token = find_socket(socket), caller_token(token_file)
        waiting = telling_what_waits(path, token, tool, arguments, options)
        for event in client.stream(tool, arguments, **stack.enter_context(waiting)):
            match event:
                case ProgressEvent():
                    calls[:] = [event.metadata.call_id]
                    screen.progress(event)
                case OutputEvent():
                    screen.output(event)
                case RetryingEvent(retry_count=number, max_retries=most, error=error):
                    screen.say(f"{error.code}: {error.message} Retry {number} of {most}.")
                case NoticeEvent():
                    screen.say(event.message)
                case ResultEvent() | ErrorEvent():
                    return document_of(event.envelope)
    raise AssertionError("a client ends its events with an answer")


class _Screen:
    """Shows the two output streams of a program, which may share a terminal. The progress is shown
    below them.
    """

    def __init__(self, stdout: TextIO) -> None:
        self._streams = {"stdout": stdout, "stderr": sys.stderr}
        self._is_at_start = True
        """Whether the cursor is at the start of a line. If it is not, progress would hide
        output."""
        self._last: ProgressEvent | None = None

    def output(self, event: OutputEvent) -> None:
        stream = self._streams[event.stream]
        if stream.isatty():
            self.clear()
            self._is_at_start = event.text.endswith("\n")
        write(stream, event.text)
        self._draw()

    def progress(self, event: ProgressEvent) -> None:
        if not event.id.startswith("0:"):
            self.clear()
            self._last = event
            self._draw()

    def say(self, message: str) -> None:
        self.clear()
        sys.stderr.write(printable(message) + "\n")
        sys.stderr.flush()

    def clear(self) -> None:
        """Erase the progress line."""
        if self._is_drawn:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    @property
    def _is_drawn(self) -> bool:
        return self._last is not None and self._is_at_start and sys.stderr.isatty()

    def _draw(self) -> None:
        if self._last is not None and self._is_drawn:
            line = Text(f"{self._last.progress:.0f}% {visible(self._last.message)}")
            Console(stderr=True).print(line, no_wrap=True, overflow="ellipsis", end="\r")


@contextmanager
def _cancelling(client: Client, calls: list[str]) -> Iterator[None]:
    """During the block, the first Ctrl-C cancels the call, and the second Ctrl-C ends this program.
    The caller adds the call's id to `calls` as soon as it is known.

    As long as `calls` is empty, even the first Ctrl-C ends this program.
    """

    def cancel() -> None:
        # If the call has ended meanwhile, its answer is in transit, or the client is closed.
        with suppress(DaemonUnavailable, Refused, RuntimeError):
            client.cancel(calls[0])

    def interrupt(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if not calls:
            raise KeyboardInterrupt
        sys.stderr.write("\nCancelling the call. Press Ctrl-C again to exit without its answer.\n")
        # Not in the signal handler, because the connection may be in the middle of a read.
        threading.Thread(target=cancel, daemon=True).start()

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
