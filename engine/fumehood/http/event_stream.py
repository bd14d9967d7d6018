"""What responses that are streams of server-sent events have in common.

*Source*: the HTML standard, "Server-sent events".
"""

from __future__ import annotations

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # proxies must not buffer events
    (b"x-content-type-options", b"nosniff"),
]

KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which is not an event. The comment shows each end that the other end is alive."""

KEEP_ALIVE_S = 15.0
WRITE_DEADLINE_S = 60.0
"""Seconds to send the events that are there. A client that reads too slowly is disconnected."""
