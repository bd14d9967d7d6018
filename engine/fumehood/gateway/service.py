"""The gateway of an engine: opens a door for each program that may use the network.

Host side. Invariants: the gateway does no work for a program without network access; when the call
of a program ends, all tasks that serve the program's connections have ended.
"""

from __future__ import annotations

import asyncio
import copy
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from fumehood.core.errors import PermissionDenied, StateUnavailable
from fumehood.core.hosts import network_wish
from fumehood.core.json_types import JsonObject
from fumehood.gateway.door import Ask, Door, Lists, Spend, free
from fumehood.gateway.placeholders import HeldRequest, Placeholders, secrets_for
from fumehood.gateway.settings import GatewaySettings, ListedPackages, NetworkHosts
from fumehood.gateway.tape import Tape
from fumehood.observe.log import Logger, log_fault
from fumehood.policy.model import CallFacts, Decision
from fumehood.protocol.connections import MAX_CONNECTIONS, WINDOW_BYTES
from fumehood.protocol.framing import GATEWAY_PORT, TRUST_FILE
from fumehood.redaction.redactor import Redactor
from fumehood.registry.index import NET
from fumehood.registry.secrets import SecretBindings
from fumehood.sandbox.connections import Connection, Connections
from fumehood.sandbox.streams import MAX_UNREAD_BYTES, RunClock, Stream, StreamKind, StreamPort

if TYPE_CHECKING:
    import httpcore2

    from fumehood.gateway.authority import Authority
    from fumehood.outgoing.addresses import CheckedBackend

AUTHORITY_FILE = "gateway.pem"

_PROXY = f"http://127.0.0.1:{GATEWAY_PORT}"

NODE_PROXY = "/opt/fumehood/fumehood/guest/languages/proxy.js"
"""A file in the images of containers. With it, Node 18 uses the gateway as its proxy."""

ENVIRONMENT = {
    **dict.fromkeys(("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy"), _PROXY),
    **dict.fromkeys(("NO_PROXY", "no_proxy"), "localhost,127.0.0.1,::1"),
    **dict.fromkeys(
        (
            "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "GIT_SSL_CAINFO", "PIP_CERT",
            "NODE_EXTRA_CA_CERTS", "CARGO_HTTP_CAINFO",
        ),
        TRUST_FILE,
    ),
    "NODE_USE_ENV_PROXY": "1",
    "NODE_OPTIONS": f"--require {NODE_PROXY}",
    **dict.fromkeys(("npm_config_audit", "npm_config_fund"), "false"),  # a POST with each install
}  # fmt: skip
"""Environment variables that make HTTP clients use the gateway and trust its certificates. There
are many because each library and each program reads variables of its own.
"""


MAX_UNREAD = 2 * MAX_CONNECTIONS * WINDOW_BYTES + MAX_UNREAD_BYTES
"""Maximum number of bytes that the guest may leave unread: the windows of all connections that the
host accepts at once, plus the usual maximum for other frames.
"""


def network_kind(trust: str) -> StreamKind:
    """Return the kind of stream that connects a program to the gateway. `trust` contains the
    certificates that the program must accept, as PEM text.
    """
    return StreamKind("network", trust, max_unread_bytes=MAX_UNREAD)


class Gateway:
    """Opens a door for each call whose program may use the network. A door decides which requests
    of the program are sent. The gateway also makes the connections from the engine to hosts.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        decide: Callable[[CallFacts], Decision],
        state: Path | None,
        secrets: SecretBindings,
        record: Callable[[str, JsonObject], Awaitable[None]],
        log: Logger,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Create the gateway of one engine.

        Args:
            settings: the operator's settings of the gateway.
            decide: returns the decision of the policy about a program's request.
            state: the directory of the certificate authority, or None to keep the authority in
                memory.
            secrets: the secrets of the engine, with the hosts and tools that they are bound to.
            record: adds an event to the audit log.
            log: receives faults of the gateway itself.
            tls: if given, replaces the default TLS settings for connections to hosts.
        """
        self._settings = settings
        self._decide = decide
        self._state = state
        self._secrets = secrets
        self._record = record
        self._log = log
        self._tls = tls
        self._authority: Authority | None = None
        self._backend: CheckedBackend | None = None

    @property
    def is_open(self) -> bool:
        """Whether the operator has allowed at least one host or package index."""
        return bool(self._settings.hosts or self._settings.indexes)

    @asynccontextmanager
    async def door(
        self,
        hosts: Iterable[str],
        ask: Ask,
        redactor: Redactor,
        *,
        cancel: Callable[[asyncio.Task[None]], bool] = lambda task: False,
        spend: Spend = free,
        tape: Tape | None = None,
        held_back: list[HeldRequest] | None = None,
        tool: str,
        call_id: str,
        principal_id: str,
        agent_id: str | None,
        session_id: str | None,
    ) -> AsyncIterator[tuple[Door, Stream[Connections]]]:
        """Open a door for one call. The door decides which requests of the call's program are sent.
        Yield the door, and the stream that connects the program to the gateway.

        Args:
            hosts: the hosts and package indexes that the call names.
            ask: requests a human's approval of a request, then sends the request.
            redactor: learns the values of the secrets that requests contain, so that it can redact
                them.
            cancel: cancels the approval request for which a task is waiting. Returns False if the
                task waits for no approval.
            spend: charges requests and bytes to the budgets of the call.
            tape: if given, either records the requests and their answers, or answers the requests
                from an earlier recording. If it answers them, nothing is sent to hosts, and the
                package indexes in `hosts` need not be configured.
            held_back: if given, the list to which a trial's requests are added instead of being
                sent.
            tool: the name of the called tool.
            call_id: the id of the call, for the audit log.
            principal_id: the principal of the call, for policy rules and the audit log.
            agent_id: the agent of the call, for policy rules.
            session_id: the session of the call, for policy rules.

        Raises:
            PermissionDenied: `hosts` names a package index that the operator has not configured.
            StateUnavailable: the gateway's certificate authority cannot be read or stored.
        """
        from fumehood.gateway.proxy import Proxy  # not at the top: most engines need no TLS

        def decide(arguments: JsonObject) -> Decision:
            return self._decide(
                CallFacts(NET.definition, arguments, principal_id, agent_id, session_id)
            )

        async def record(kind: str, fields: JsonObject) -> None:
            await self._record(kind, {"call_id": call_id, "principal": principal_id, **fields})

        async def read(name: str) -> str:
            value = await anyio.to_thread.run_sync(
                self._secrets.value, name, abandon_on_cancel=True
            )
            redactor.learn(value)
            return value

        is_answered = tape is not None and tape.answers
        asked = [host for host in hosts if not (is_answered and host.startswith("@"))]
        patterns, settings, lists = self._asked(asked)
        bound = secrets_for(self._secrets.settings, tool, patterns)
        # If the connection begins on a node, a secret that is sent without TLS could be read there.
        plain_hosts = self._settings.allowed_hosts if self._settings.leave == "engine" else ()
        placeholders = Placeholders(bound, plain_hosts, read, self._secrets.settings)
        door = Door(
            patterns, settings, decide, ask, placeholders, record, tape, spend, held_back, lists,
        )  # fmt: skip
        authority, (pool, backend) = self._certificates(), self._connections()
        proxy = Proxy(door, authority, pool, backend)
        door.deliver = proxy.deliver
        served: set[asyncio.Task[None]] = set()

        async def serve(connection: Connection, clock: RunClock) -> None:
            try:
                await proxy.serve(connection, clock)
            except Exception as fault:  # `serve` has closed the connection
                log_fault(self._log, "gateway.failed", fault)

        def on_connection(connection: Connection, clock: RunClock) -> None:
            # The event loop calls this function directly, so no task could hold a task group.
            task = asyncio.ensure_future(serve(connection, clock))
            served.add(task)
            connection.on_gone = lambda: cancel(task) or task.cancel()
            task.add_done_callback(served.discard)

        def connections(port: StreamPort) -> Connections:
            backend.dial = port.dial if self._settings.leave == "node" else None
            return Connections(port, partial(on_connection, clock=port))

        try:
            yield door, Stream(network_kind(authority.certificate), connections)
        finally:
            for task in served:
                task.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.gather(*served, return_exceptions=True)
                await pool.aclose()

    def _asked(self, wishes: Iterable[str]) -> tuple[tuple[str, ...], GatewaySettings, Lists]:
        """Determine what a door needs to know about `wishes`, the hosts and package indexes that
        its call requests.

        Return three values:

        * The host patterns of everything that is requested, including the hosts of the indexes.
        * The gateway's settings, changed so that they also allow the hosts of those requested
          indexes that have no package list.
        * The package lists of the other requested indexes.

        Raises:
            PermissionDenied: the operator has not configured a requested index.
        """
        patterns, of_indexes, lists = (
            list[str](),
            list[str](),
            list[tuple[NetworkHosts, ListedPackages]](),
        )
        for wish in map(network_wish, wishes):
            name = wish[1:]
            if not wish.startswith("@"):
                patterns.append(wish)
            elif (found := self._settings.indexes.get(name)) is None:
                raise PermissionDenied(
                    f"The operator has not configured the package index {wish} (gateway.indexes). "
                    "Do not retry."
                )
            elif (packages := self._settings.packages.get(name)) is not None:
                patterns += found
                lists.append((found, packages))
            else:
                of_indexes += found
        allowed = self._settings.model_copy(update={"hosts": (*self._settings.hosts, *of_indexes)})
        return (*patterns, *of_indexes), allowed, tuple(lists)

    def _certificates(self) -> Authority:
        if self._authority is None:
            from fumehood.gateway.authority import Authority

            file = self._state / AUTHORITY_FILE if self._state is not None else None
            try:
                self._authority = Authority(file)
            except (OSError, ValueError) as error:
                raise StateUnavailable(
                    f"The gateway's certificate authority cannot be used: {error}."
                ) from None
        return self._authority

    def _connections(self) -> tuple[httpcore2.AsyncConnectionPool, CheckedBackend]:
        """Return a new connection pool for one call, and the backend that opens the pool's
        connections.

        Calls never share connections. So no call can get the answer to another call's request.
        """
        import httpcore2

        from fumehood.outgoing.addresses import IDLE_S, MAX_IDLE_CONNECTIONS, CheckedBackend

        if self._tls is None:
            self._tls = httpcore2.default_ssl_context()
        if self._backend is None:
            self._backend = CheckedBackend(self._settings.allowed_hosts, "gateway.allowed_hosts")
        backend = copy.copy(self._backend)  # shares the threads, but has its own `dial`
        pool = httpcore2.AsyncConnectionPool(
            ssl_context=self._tls,
            max_connections=None,  # each program has a bounded number
            # A connection through a node is not reused: data that it sent in between would be
            # noticed late.
            max_keepalive_connections=MAX_IDLE_CONNECTIONS * (self._settings.leave == "engine"),
            keepalive_expiry=IDLE_S,
            network_backend=backend,
        )
        return pool, backend
