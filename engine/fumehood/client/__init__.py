"""The clients: talk to a daemon over its sockets, with the engine's own method names.

Client side. They know the wire and the model, nothing of the engine. One description of every
request (`callers.py`, `authority.py`) serves both kinds: `blocking….py` and `awaiting….py` only
send it, through `transport.py`, which alone knows HTTP and when a request may be sent again.
"""

from __future__ import annotations

from fumehood.client.awaiting import AsyncClient
from fumehood.client.awaiting_control import AsyncControlClient
from fumehood.client.blocking import Client
from fumehood.client.blocking_control import ControlClient
from fumehood.client.errors import DaemonUnavailable, Refused

__all__ = [
    "AsyncClient",
    "AsyncControlClient",
    "Client",
    "ControlClient",
    "DaemonUnavailable",
    "Refused",
]
