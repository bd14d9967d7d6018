"""Addresses: which ones the engine connects to for a tool, and the connection itself.

Host side. Names are resolved here, every address that a name has is checked, and the connection
goes to a checked address, not to the name: a name that means something else a moment later (DNS
rebinding) changes nothing. TLS still verifies the name. Invariant: an address that is not public is
reached only if the operator's configuration names the host.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Collection, Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Any

import anyio
import anyio.lowlevel
import httpcore2

from fumehood.core.errors import NetworkError, PermissionDenied
from fumehood.registry.secrets import Origin
from fumehood.sandbox.bounded_threads import BoundedThreads

RESOLVED_AT_ONCE = 8
RESOLVE_S = 60.0
"""Resolvers give up sooner."""

TURNS = 2
"""Turns of the event loop after which a read has returned any data that has arrived."""

# *Source*: IANA's registries of special-purpose addresses, as `ipaddress` knows them
# (`is_global`), with these beside them.
_NOT_PUBLIC_V4 = (
    IPv4Network("192.88.99.0/24"),  # relays of 6to4
    IPv4Network("168.63.129.16/32"),  # a cloud's service for its own machines
)
_GLOBAL_UNICAST = IPv6Network("2000::/3")
_NOT_PUBLIC_V6 = (
    IPv6Network("2001::/23"),  # protocol assignments; Teredo carries an IPv4 address
    IPv6Network("2002::/16"),  # 6to4 carries an IPv4 address
    IPv6Network("3fff::/20"),  # documentation
)


def is_public(address: IPv4Address | IPv6Address) -> bool:
    """Whether an address is on the public Internet.

    Forms of IPv6 that carry an IPv4 address (mapped, compatible, NAT64, 6to4, Teredo) are not.
    """
    if not address.is_global or address.is_multicast:
        return False
    if isinstance(address, IPv4Address):
        return not any(address in network for network in _NOT_PUBLIC_V4)
    return address in _GLOBAL_UNICAST and not any(address in net for net in _NOT_PUBLIC_V6)


class CheckedBackend(httpcore2.AnyIOBackend):
    """Connects to checked addresses only."""

    def __init__(
        self, allowed_hosts: Collection[str] = (), setting: str = "rest.allowed_hosts"
    ) -> None:
        """`setting` is the one that allows hosts, for the refusals."""
        self._allowed_hosts = frozenset(allowed_hosts)
        self._setting = setting
        # Its own threads: the owner of a domain can let questions for its names hang, and a caller
        # of `fetch_url` can ask for many. REST tools resolve theirs meanwhile.
        self._resolving = BoundedThreads(RESOLVED_AT_ONCE, "resolve")

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109  # the library's signature
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        """Connect to the first checked address that answers.

        Raises:
            PermissionDenied: an address of the host is not public, and the host is not allowed.
            NetworkError: it cannot be resolved or reached.
        """
        for address in await self._addresses(host, port):
            try:
                stream = await super().connect_tcp(
                    str(address), port, timeout, local_address, socket_options
                )
                return _Connection(stream)
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout):
                continue
        raise NetworkError("The tool's service could not be reached. Repeat the call later.")

    async def _addresses(self, host: str, port: int) -> list[IPv4Address | IPv6Address]:
        found = await self.resolve(host, port)
        is_allowed = Origin("", host, port).is_in(self._allowed_hosts)
        if not is_allowed and not all(map(is_public, found)):
            raise PermissionDenied(
                "The host has an address that is not public, and the operator has not allowed it "
                f"({self._setting}). Do not retry."
            )
        return found

    async def resolve(self, host: str, port: int) -> list[IPv4Address | IPv6Address]:
        """The addresses of a host. Raises NetworkError if it has none."""
        try:
            rows = await self._resolving.run(
                lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM), RESOLVE_S
            )
        except (OSError, UnicodeError):
            rows = []
        # The scope of a link-local address is cut off: such an address is not public anyway.
        found = dict.fromkeys(ip_address(str(row[4][0]).partition("%")[0]) for row in rows)
        if not found:
            raise NetworkError(
                "The name of the tool's service could not be resolved. Repeat the call later."
            )
        return list(found)


class _Connection(httpcore2.AsyncNetworkStream):
    """A connection that carries one answer for each request, and is closed where it is left.

    The library looks for more than one answer in the socket only, not in what TLS and the event
    loop have read already; and it leaves a connection open whose handshake is cancelled, so that a
    service that never answers a handshake would keep a socket with each call.
    """

    def __init__(self, stream: httpcore2.AsyncNetworkStream) -> None:
        self._stream = stream
        self._has_answered = False

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109
        self._has_answered = True
        return await self._stream.read(max_bytes, timeout)

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ASYNC109
        if self._has_answered and await self._has_unread():
            raise httpcore2.ConnectionNotAvailable  # so that the library takes another
        self._has_answered = False
        await self._stream.write(buffer, timeout)

    async def _has_unread(self) -> bool:
        """Whether anything has come after the last answer, its end included."""
        async with anyio.create_task_group() as group:
            group.start_soon(_cancel_soon, group.cancel_scope)
            with contextlib.suppress(httpcore2.ReadError):
                await self._stream.read(1)
            group.cancel_scope.cancel()
            return True
        return False  # it was cancelled

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> httpcore2.AsyncNetworkStream:
        try:
            stream = await self._stream.start_tls(ssl_context, server_hostname, timeout)
            return _Connection(stream)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._stream.aclose()
            raise

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


async def _cancel_soon(scope: anyio.CancelScope) -> None:
    """Cancel a read that would block, once the event loop has had time to deliver data."""
    for _ in range(TURNS):
        await anyio.lowlevel.checkpoint()
    scope.cancel()
