"""The callers' addresses over loopback TCP, where the configuration says so (`tcp`).

Host side. Every user and every web page of this machine can connect to such an address, so nothing
is answered there without a token. Invariant: a request has this server's own name as its host, no
page of another origin behind it, and a token with the scope `call`; what it may do then is what the
token's principal may do on the callers' socket.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.requests import Request

from fumehood.config import Config
from fumehood.core.errors import EngineError, PermissionDenied, Unauthorized
from fumehood.core.identity import Scope
from fumehood.http.caller import principal_of
from fumehood.http.listen import BACKLOG
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
    address = ipaddress.ip_address(host.strip("[]"))
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((str(address), int(port)))
        except OSError as error:
            raise StateError(f"{config.tcp} cannot be listened on: {error.strerror}.") from None
        listener.listen(BACKLOG)
        yield [listener]


def refusal_over_tcp(request: Request) -> EngineError | None:
    """Why a request over TCP is not answered; None if it is."""
    own = _own_names(request)
    hosts, origins = _headers(request, b"host"), _headers(request, b"origin")
    if len(hosts) != 1 or hosts[0] not in own:
        return PermissionDenied("The host of this request is not this server.")
    if any(origin not in {f"http://{name}" for name in own} for origin in origins):
        return PermissionDenied("Pages of other origins may not use this server.")
    try:
        principal = principal_of(request)
    except Unauthorized as refusal:
        return refusal
    if principal is None or Scope.CALL not in principal.scopes:
        return Unauthorized(
            "This address needs a token with the scope call, as `authorization: Bearer …`."
        )
    return None


def _own_names(request: Request) -> set[str]:
    host, port = request.scope["server"]
    names = {f"[{host}]" if ":" in host else host, "localhost"}
    return {f"{name}:{port}" for name in names} | (names if port == 80 else set())


def _headers(request: Request, name: bytes) -> list[str]:
    return [v.decode("latin-1").lower() for key, v in request.scope["headers"] if key == name]
