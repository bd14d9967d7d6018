"""Headers and time limits of all responses that are streams of server-sent events.

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
"""A comment, which clients ignore. It shows the client and the server that the connection still
works."""

KEEP_ALIVE_S = 15.0
WRITE_DEADLINE_S = 60.0
"""Seconds within which a client must receive the events that are sent. A slower client is
disconnected."""
