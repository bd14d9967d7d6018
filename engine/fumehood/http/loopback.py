"""The callers' addresses over loopback TCP, where the configuration says so (`tcp`).

Host side. Every user and every web page of this machine can connect to such an address, so nothing
is answered there without a token. Invariant: a request has this server's own name as its host, no
page of another origin behind it, and a token with the scope `call`; what it may do then is what the
token's principal may do on the callers' socket.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.requests import Request

from fumehood.config import Config
from fumehood.core.errors import EngineError, PermissionDenied, Unauthorized
from fumehood.core.identity import Scope
from fumehood.http.caller import principal_of
from fumehood.protocol.loopback import listen_on, own_names, why_not_ours
from fumehood.storage.directory import StateError


@contextmanager
def listening_on_loopback(config: Config) -> Iterator[list[socket.socket]]:
    """Listen on the configured address; on none if there is none.

    Raises:
        StateError: the address cannot be used.
    """
    if config.tcp is None:
        yield []
        return
    host, port = config.tcp.rsplit(":", 1)
    try:
        listener = listen_on(host, int(port))
    except OSError as error:
        raise StateError(f"{config.tcp} cannot be listened on: {error.strerror}.") from None
    with listener:
        yield [listener]


def refusal_over_tcp(request: Request) -> EngineError | None:
    """Why a request over TCP is not answered; None if it is."""
    why = why_not_ours(own_names(*request.scope["server"]), request.scope["headers"])
    if why is not None:
        return PermissionDenied(why)
    try:
        principal = principal_of(request)
    except Unauthorized as refusal:
        return refusal
    if principal is None or Scope.CALL not in principal.scopes:
        return Unauthorized(
            "This address needs a token with the scope call, as `authorization: Bearer …`."
        )
    return None
