"""Servers on a loopback address: listen, and recognize requests that are meant for other servers.

Every user of this machine can connect to a loopback address. So can every web page in a browser on
this machine, even under the page's own host name (DNS rebinding). Invariant: a request that
`why_not_ours` accepts names this server as its host, and does not come from a page of another
origin. This does not show who has sent the request.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable

BACKLOG = 2048


def listen_on(host: str, port: int, *, anywhere: bool = False) -> socket.socket:
    """Return a socket that listens on `host` and `port`. `host` must be a loopback address, unless
    `anywhere` is True. If `port` is 0, the operating system chooses a free port.

    Raises:
        ValueError: `host` is not a loopback address, and `anywhere` is False.
        OSError: the address cannot be used.
    """
    address = ipaddress.ip_address(host.strip("[]"))
    if not (anywhere or address.is_loopback):
        raise ValueError(f"{host} is not a loopback address.")
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    return socket.create_server(
        (str(address), port),
        family=family,
        backlog=BACKLOG,
        dualstack_ipv6=family == socket.AF_INET6,
    )


def own_names(host: str, port: int) -> frozenset[str]:
    """Return the values that the `Host` header may have in requests to this server. These are the
    server's address and `localhost`, each with the port. For port 80, they are also valid without
    the port.
    """
    names = {f"[{host}]" if ":" in host else host, "localhost"}
    return frozenset({f"{name}:{port}" for name in names} | (names if port == 80 else set()))


def why_not_ours(names: frozenset[str], headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Return why a request must be refused because of its `Host` or `Origin` header, or None if it
    may be accepted. `names` are the valid values of `Host`, as `own_names` returns them.
    """
    found: dict[bytes, list[str]] = {b"host": [], b"origin": []}
    for name, value in headers:
        if name in found:
            found[name].append(value.decode("latin-1").lower())
    if len(found[b"host"]) != 1 or found[b"host"][0] not in names:
        return "The host of this request is not this server."
    if any(origin not in {f"http://{name}" for name in names} for origin in found[b"origin"]):
        return "Pages of other origins may not use this server."
    return None
