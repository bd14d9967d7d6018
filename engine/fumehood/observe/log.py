"""The structured log: one line for each event, as JSON or coloured text, never delaying a call.

Host side. A thread formats and writes the lines, because a reader of the daemon's log may have
stopped reading, and a full pipe must not block calls. Events that exceed the reader's speed are
dropped and counted.
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
FLUSH_DEADLINE_S = 2.0
GATHER_S = 0.02

Logger = Any
"""structlog's loggers are built at run time and have no useful static type."""


class EventWriter:
    """The sink: formats and writes events in order, in a thread."""

    def __init__(self, stream: TextIO, processors: Sequence[Any]) -> None:
        # Kept open with the sink: if its number were reused, log lines
        # would go into another channel.
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
        """Queue one event; every log level ends here."""
        if len(self._events) >= MAX_WAITING_EVENTS:
            self._dropped += 1
            return
        self._events.append(event)
        if not self._wake.is_set():  # setting what is set would cost a call a lock
            self._empty.clear()
            self._wake.set()

    debug = info = warning = error = critical = exception = fatal = failure = msg

    def flush(self, timeout_s: float = FLUSH_DEADLINE_S) -> bool:
        """Wait until everything is written; False if the reader is too slow."""
        return self._empty.wait(timeout_s)

    def _write_forever(self) -> None:
        while True:
            self._wake.wait()
            # Lines that follow soon are written together: waking this thread for each
            # would cost a call more than making its line.
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
        except Exception as error:  # one event must not end the log
            return self._rendered(
                {"event": "log.event_lost", "level": "error", "exception": type(error).__name__}
            )

    def _rendered(self, event: dict[str, Any]) -> str:
        *prepare, render = self._processors
        for process in prepare:
            event = process(None, "", event)
        if self.redact is not None:  # before characters are escaped
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
    """A logger without global configuration, so that an embedding program keeps its own.

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
    ).bind()  # the lazy proxy would be bound anew for every line


def _as_event(logger: Any, method: str, event: MutableMapping[str, Any]) -> tuple[Any, ...]:
    """structlog's form for "call the sink with these keywords"."""
    return (), event


def _readable_time(logger: Any, method: str, event: dict[str, Any]) -> dict[str, Any]:
    if isinstance(event.get("timestamp"), float):
        moment = datetime.fromtimestamp(event["timestamp"], UTC)
        event["timestamp"] = moment.isoformat(timespec="microseconds").replace("+00:00", "Z")
    return event


def log_fault(logger: Logger, event: str, error: BaseException, **values: Any) -> None:
    """Log an exception: kind and place at the level `error`, its text at `debug` only.

    The text of an exception often quotes the value that caused it, and argument values must not
    appear above `debug`.
    """
    frames = traceback.extract_tb(error.__traceback__)
    where = [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames[-8:]]
    # An exception from another process carries its own kind and place.
    where = list(getattr(error, "where", where))
    kind = getattr(error, "kind", type(error).__name__)
    logger.error(event, **values, exception=kind, where=where)
    logger.debug(f"{event}.text", **values, exc_info=error)


def quiet_logger() -> Logger:
    """The default of embedding programs: warnings and errors only."""
    return make_logger("warning")


def redact_events(logger: Logger, redact: Callable[[Any], Any]) -> None:
    """Redact the events of a logger of this module from now on."""
    sink = getattr(logger, "_logger", None)
    if isinstance(sink, EventWriter):
        sink.redact = redact


def flush(logger: Logger) -> None:
    """Write queued events, for at most two seconds."""
    sink = getattr(logger, "_logger", None)
    if isinstance(sink, EventWriter):
        sink.flush()
