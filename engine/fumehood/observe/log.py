"""The structured log: one line for each event, as JSON or coloured text.

Host side. Logging never delays a call, because a thread formats and writes the lines. Without the
thread, a process that stops reading the daemon's log would block calls. If the log's reader is too
slow, events are dropped and counted.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, MutableMapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

import structlog

MAX_WAITING_EVENTS = 10_000
"""Maximum number of events that wait to be written. If there are more, new events are dropped."""

FLUSH_DEADLINE_S = 2.0
"""Maximum seconds that `flush` waits."""

GATHER_S = 0.02
"""Seconds for which the thread collects events before it writes them together."""

Logger = Any
"""The type of loggers. structlog's loggers are built at run time and have no useful static type."""


class EventWriter:
    """The sink of the log. It formats and writes events in order, in a thread.

    If the attribute `redact` is set, the writer calls it for each event to replace secrets.
    """

    def __init__(self, stream: TextIO, processors: Sequence[Any]) -> None:
        # A reference keeps the stream open. If it were closed, its descriptor could be reused, and
        # log lines would be written to another file or socket.
        self._stream = stream
        self._descriptor = stream.fileno()
        self._processors = processors
        self.redact: Callable[[Any], Any] | None = None
        self._events: deque[dict[str, Any]] = deque()
        self._wake = threading.Event()
        self._empty = threading.Event()
        self._empty.set()
        self._dropped = 0
        threading.Thread(target=self._write_forever, name="log-writer", daemon=True).start()

    def msg(self, **event: Any) -> None:
        """Queue one event. The methods for the log levels, such as `info`, are aliases of this
        method.
        """
        if len(self._events) >= MAX_WAITING_EVENTS:
            self._dropped += 1
            return
        self._events.append(event)
        if not self._wake.is_set():  # `set` takes a lock even if it is already set
            self._empty.clear()
            self._wake.set()

    debug = info = warning = error = critical = exception = fatal = failure = msg

    def flush(self, timeout_s: float = FLUSH_DEADLINE_S) -> bool:
        """Wait until all events are written. Return False if this takes longer than `timeout_s`."""
        return self._empty.wait(timeout_s)

    def _write_forever(self) -> None:
        while True:
            self._wake.wait()
            # Lines that follow soon are written together. Waking this thread for each line would
            # cost the caller more time than formatting it.
            time.sleep(GATHER_S)
            self._wake.clear()
            while self._events:
                events = [self._events.popleft() for _ in range(len(self._events))]
                if self._dropped:
                    events.append(
                        {"event": "log.dropped", "level": "warning", "count": self._dropped}
                    )
                    self._dropped = 0
                lines = "".join(self._line(event) + "\n" for event in events)
                self._write(lines.encode("utf-8", "replace"))
            self._empty.set()
            if self._events:  # added between the loop's end and the line above
                self._empty.clear()
                self._wake.set()

    def _line(self, event: dict[str, Any]) -> str:
        try:
            return self._rendered(event)
        except Exception as error:  # an event that cannot be formatted must not end the log
            return self._rendered(
                {"event": "log.event_lost", "level": "error", "exception": type(error).__name__}
            )

    def _rendered(self, event: dict[str, Any]) -> str:
        *prepare, render = self._processors
        for process in prepare:
            event = process(None, "", event)
        if self.redact is not None:  # before rendering, which escapes characters
            event = self.redact(event)
        return str(render(None, "", event))

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._descriptor, view) :]
            except OSError:
                return


def make_logger(level: str = "info", style: str = "auto", stream: TextIO | None = None) -> Logger:
    """Return a new logger. The global logging configuration of an embedding program stays
    unchanged.

    `style` is `json`, `text`, or `auto`: text on a terminal, JSON elsewhere.
    """
    stream = stream or sys.stderr
    as_text = style == "text" or (style == "auto" and stream.isatty())
    renderer: Any = (
        structlog.dev.ConsoleRenderer(colors=stream.isatty())
        if as_text
        else structlog.processors.JSONRenderer(separators=(",", ":"))
    )
    in_thread = [_readable_time, structlog.processors.format_exc_info, renderer]
    return structlog.wrap_logger(
        EventWriter(stream, in_thread),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(),
            _as_event,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[level.upper()]
        ),
        cache_logger_on_first_use=False,
    ).bind()  # the lazy proxy would be bound again for every line


def _as_event(logger: Any, method: str, event: MutableMapping[str, Any]) -> tuple[Any, ...]:
    """Return the arguments with which structlog calls the sink: no positional arguments, and the
    event as keyword arguments.
    """
    return (), event


def _readable_time(logger: Any, method: str, event: dict[str, Any]) -> dict[str, Any]:
    if isinstance(event.get("timestamp"), float):
        moment = datetime.fromtimestamp(event["timestamp"], UTC)
        event["timestamp"] = moment.isoformat(timespec="microseconds").replace("+00:00", "Z")
    return event


def log_fault(logger: Logger, event: str, error: BaseException, **values: Any) -> None:
    """Log an exception: its type and place at the level `error`, its text only at `debug`.

    An exception's text often quotes the value that caused the exception, and argument values may be
    logged only at `debug`.
    """
    frames = traceback.extract_tb(error.__traceback__)
    where = [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames[-8:]]
    # An exception from another process has its original type and place as attributes.
    where = list(getattr(error, "where", where))
    kind = getattr(error, "kind", type(error).__name__)
    logger.error(event, **values, exception=kind, where=where)
    logger.debug(f"{event}.text", **values, exc_info=error)


def quiet_logger() -> Logger:
    """Return the default logger for embedding programs. It logs only warnings and errors."""
    return make_logger("warning")


def redact_events(logger: Logger, redact: Callable[[Any], Any]) -> None:
    """Redact all further events of a logger. This module must have created the logger."""
    sink = getattr(logger, "_logger", None)
    if isinstance(sink, EventWriter):
        sink.redact = redact


def flush(logger: Logger) -> None:
    """Wait until all queued events are written, but at most `FLUSH_DEADLINE_S` seconds."""
    sink = getattr(logger, "_logger", None)
    if isinstance(sink, EventWriter):
        sink.flush()
