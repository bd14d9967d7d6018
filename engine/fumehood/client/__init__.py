"""Clients for the daemon's sockets. Their methods have the same names as those of `Engine`.

Client side. The clients depend on the protocol and the models, not on the engine.
scripts/make_clients.py generates one method for each HTTP operation, and, for every file
`async_….py`, a synchronous twin in `sync/`. Only methods that do more than send one request are
written by hand. `api_request.py` makes the requests, and `exchange.py` contains the rules for
sending them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fumehood.client.api_request import DaemonUnavailable as DaemonUnavailable
    from fumehood.client.api_request import Refused as Refused
    from fumehood.client.async_control import AsyncControlClient as AsyncControlClient
    from fumehood.client.async_with_parts import AsyncClient as AsyncClient
    from fumehood.client.sync.control import ControlClient as ControlClient
    from fumehood.client.sync.with_parts import Client as Client

_HOMES = {
    "AsyncClient": "fumehood.client.async_with_parts",
    "AsyncControlClient": "fumehood.client.async_control",
    "Client": "fumehood.client.sync.with_parts",
    "ControlClient": "fumehood.client.sync.control",
    "DaemonUnavailable": "fumehood.client.api_request",
    "Refused": "fumehood.client.api_request",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    """Import and return the object `name` of this package. Raises AttributeError if there is none.

    An object's module is imported only on first use, so that a command does not load all four
    clients although it needs only a single client.
    """
    if name not in _HOMES:
        raise AttributeError(f"module 'fumehood.client' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
