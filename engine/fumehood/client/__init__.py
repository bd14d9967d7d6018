"""The clients: talk to a daemon over its sockets, with the engine's own method names.

Client side. They know the protocol and the model, nothing of the engine. One description of every
request (`requests/`) serves both kinds: `blocking….py` and `awaiting….py` only send it, through
`transport.py`, which alone knows HTTP and when a request may be sent again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fumehood.client.awaiting import AsyncClient as AsyncClient
    from fumehood.client.awaiting_control import AsyncControlClient as AsyncControlClient
    from fumehood.client.blocking import Client as Client
    from fumehood.client.blocking_control import ControlClient as ControlClient
    from fumehood.client.errors import DaemonUnavailable as DaemonUnavailable
    from fumehood.client.errors import Refused as Refused

_HOMES = {
    "AsyncClient": "fumehood.client.awaiting",
    "AsyncControlClient": "fumehood.client.awaiting_control",
    "Client": "fumehood.client.blocking",
    "ControlClient": "fumehood.client.blocking_control",
    "DaemonUnavailable": "fumehood.client.errors",
    "Refused": "fumehood.client.errors",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    """Import a name when it is first used: a command needs one of these clients, not four."""
    if name not in _HOMES:
        raise AttributeError(f"module 'fumehood.client' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
