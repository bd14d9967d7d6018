"""The check of the addresses that a tool may reach, and the connections to these addresses.

Host side. The engine resolves a host's name, checks every resulting address, and connects to a
checked address instead of the name. So a name that resolves differently a moment later (DNS
rebinding) has no effect. TLS still verifies the name. Invariant: an address that is not public is
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
from httpcore2._backends.anyio import AnyIOStream

from fumehood.core.errors import EngineError, NetworkError, PermissionDenied
from fumehood.registry.secrets import Origin
from fumehood.sandbox.bounded_threads import BoundedThreads
from fumehood.sandbox.streams import Dial

RESOLVED_AT_ONCE = 8
"""Maximum number of names that one backend resolves at the same time."""

RESOLVE_S = 60.0
"""Maximum seconds to resolve a name. System resolvers give up sooner."""

CHECKED_CONNECTION = "checked_connection"
"""Key of a stream's extra information under which its `CheckedConnection` is found."""

MAX_IDLE_CONNECTIONS = 16
"""Maximum number of unused connections that one pool keeps open."""

IDLE_S = 30.0
"""Seconds after which an unused connection is closed."""

TURNS = 2
"""Number of event loop turns within which a read returns if data has already arrived."""

# *Source*: IANA's registries of special-purpose addresses, in the form of `ipaddress`
# (`is_global`), plus the networks below.
_NOT_PUBLIC_V4 = (
    IPv4Network("192.88.99.0/24"),  # 6to4 relays
    IPv4Network("168.63.129.16/32"),  # a cloud provider's internal service for its virtual machines
)
_GLOBAL_UNICAST = IPv6Network("2000::/3")
_NOT_PUBLIC_V6 = (
    IPv6Network("2001::/23"),  # protocol assignments; Teredo carries an IPv4 address
    IPv6Network("2002::/16"),  # 6to4 carries an IPv4 address
    IPv6Network("3fff::/20"),  # documentation
)


def is_public(address: IPv4Address | IPv6Address) -> bool:
    """Whether an address is on the public Internet.

    False for IPv6 addresses that embed an IPv4 address (mapped, compatible, NAT64, 6to4, Teredo),
    because the embedded address may be internal.
    """
    if not address.is_global or address.is_multicast:
        return False
    if isinstance(address, IPv4Address):
        return not any(address in network for network in _NOT_PUBLIC_V4)
    return address in _GLOBAL_UNICAST and not any(address in net for net in _NOT_PUBLIC_V6)


class CheckedBackend(httpcore2.AnyIOBackend):
    """A network backend for the HTTP client that connects only to checked addresses."""

    def __init__(
        self, allowed_hosts: Collection[str] = (), setting: str = "rest.allowed_hosts"
    ) -> None:
        """`setting` is the name of the setting for `allowed_hosts`, for error messages."""
        self._allowed_hosts = frozenset(allowed_hosts)
        self._setting = setting
        self.dial: Dial | None = None
        """A function that connects from another machine, or None to connect from this machine."""
        # Each backend has its own threads: a domain's owner can delay DNS answers, and a caller of
        # `fetch_url` can request many such names. That must not block REST tools.
        self._resolving = BoundedThreads(RESOLVED_AT_ONCE, "resolve")

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109  # the library's signature
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        """Connect to the first checked address that accepts the connection.

        Raises:
            PermissionDenied: an address of the host is not public, and the host is not allowed.
            NetworkError: the host cannot be resolved or reached.
        """
        for address in await self.addresses(host, port):
            try:
                if self.dial is not None:
                    with anyio.fail_after(timeout):
                        return CheckedConnection(AnyIOStream(await self.dial(str(address), port)))
                stream = await super().connect_tcp(
                    str(address), port, timeout, local_address, socket_options
                )
                return CheckedConnection(stream)
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout, EngineError, TimeoutError):
                continue
        raise NetworkError("The tool's service could not be reached. Repeat the call later.")

    async def addresses(self, host: str, port: int) -> list[IPv4Address | IPv6Address]:
        """Return the addresses of a host, after checking that all of them may be reached. Raises
        the same errors as `connect_tcp`.
        """
        found = await self.resolve(host, port)
        is_allowed = Origin("", host, port).is_in(self._allowed_hosts)
        if not is_allowed and not all(map(is_public, found)):
            raise PermissionDenied(
                "The host has an address that is not public, and the operator has not allowed it "
                f"({self._setting}). Do not retry."
            )
        return found

    async def resolve(self, host: str, port: int) -> list[IPv4Address | IPv6Address]:
        """Return the addresses of a host without checking them. Raises NetworkError if the host has
        none.
        """
        try:
            rows = await self._resolving.run(
                lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM), RESOLVE_S
            )
        except (OSError, UnicodeError):
            rows = []
        # Remove the zone of a link-local address (`%eth0`): such an address is never public.
        found = dict.fromkeys(ip_address(str(row[4][0]).partition("%")[0]) for row in rows)
        if not found:
            raise NetworkError(
                "The name of the tool's service could not be resolved. Repeat the call later."
            )
        return list(found)


class CheckedConnection(httpcore2.AsyncNetworkStream):
    """A connection to a service, with two checks that the HTTP library lacks.

    If unexpected data has arrived after an answer, the connection is not reused. If the TLS
    handshake fails or is cancelled, the connection is closed.
    """

    def __init__(self, stream: httpcore2.AsyncNetworkStream) -> None:
        self._stream = stream
        self._has_answered = False
        self._is_relayed = False

    def relay(self) -> None:
        """Allow both sides to send at any time from now on, as over a WebSocket."""
        self._is_relayed = True

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109
        self._has_answered = True
        return await self._stream.read(max_bytes, timeout)

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ASYNC109
        if self._has_answered and not self._is_relayed and await self._has_unread():
            # The library looks for unread data only in the socket, not in the buffers of TLS and of
            # the event loop. So a service could answer a later request in advance.
            raise httpcore2.ConnectionNotAvailable  # the library then uses another connection
        self._has_answered = False
        await self._stream.write(buffer, timeout)

    async def _has_unread(self) -> bool:
        """Whether data, an error or the end of the stream has arrived since the last answer."""
        async with anyio.create_task_group() as group:
            group.start_soon(_cancel_soon, group.cancel_scope)
            with contextlib.suppress(httpcore2.ReadError):
                await self._stream.read(1)
            group.cancel_scope.cancel()
            return True
        return False  # the read was cancelled: nothing had arrived

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
            return CheckedConnection(stream)
        except BaseException:
            # If the handshake is cancelled, the library leaves the connection open. A service that
            # never completes handshakes would then cost a socket for each call.
            with anyio.CancelScope(shield=True):
                await self._stream.aclose()
            raise

    def get_extra_info(self, info: str) -> Any:
        if info == CHECKED_CONNECTION:
            return self
        return self._stream.get_extra_info(info)


def drop_what_follows(answer: httpcore2.Response) -> None:
    """Close the connection of `answer` if the service has sent more data after the answer."""
    stream: Any = answer.stream
    state = stream._stream._connection._h11_state
    # The next call on this connection could take the data for its answer. The library has no
    # function for this check: it only looks for data that has not been read yet.
    if state.trailing_data[0]:
        state.send_failed()  # makes the library close the connection


async def _cancel_soon(scope: anyio.CancelScope) -> None:
    """Cancel `scope` after a few turns of the event loop.

    In the meantime, a read in the scope can return data that has already arrived. If no data has
    arrived, the cancellation ends the read, which would otherwise block.
    """
    for _ in range(TURNS):
        await anyio.lowlevel.checkpoint()
    scope.cancel()
