"""Finds the nodes of a Ray cluster, and checks whether the cluster may be used.

Host side, below `wall`. A node is a detached actor on a machine of the cluster that has the
resource `fumehood`. The amount of the resource is the number of slots. Anyone who can reach Ray can
run code on all machines, so a cluster that others can reach without a token is refused.
"""

from __future__ import annotations

import asyncio
import io
import ipaddress
import os
import pickle
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import psutil

from fumehood.cluster.model import (
    HeldState,
    ImageFacts,
    NodeReport,
    Refused,
    Ticket,
)
from fumehood.cluster.node import Fenced
from fumehood.cluster.wall import NodeGone, NodePort
from fumehood.core import errors
from fumehood.core.errors import EndedBy, EngineError, InternalError, SandboxUnavailable
from fumehood.core.limits import Grade, Held, Limit
from fumehood.sandbox.container.pool import Kind
from fumehood.sandbox.wall import HostSize, ImageMissing, RunEnding

HEADER = struct.Struct("!QI")
"""Header of a message: the message's number and length. An answer has the number of its request."""

TOKEN_FILE = Path(".ray") / "auth_token"
"""Path of the cluster's token, below the home directory. *Source*: Ray, "Token authentication"."""

COPY_TOKEN = f"Copy it from the head to ~/{TOKEN_FILE}, or set RAY_AUTH_TOKEN"

CONNECT_TO_SELF_S = 0.5
"""Timeout in seconds for checking whether a port of this machine is open."""

PROBE_S = 20.0
"""Timeout in seconds for checking whether the cluster requires a token."""

CONNECT_S = 60.0
"""Timeout in seconds for connecting to the cluster and receiving the first answer."""

ANSWER_S = 20.0
"""Timeout in seconds for each later answer. It is so short that a hanging `ray_bridge` process is
replaced before the sessions of all nodes are given up."""


class RayPort:
    """A node, reached through its actor.

    `key` is Ray's id of the node's machine. The key changes whenever Ray is restarted on the
    machine.
    """

    def __init__(self, membership: RayMembership, key: str) -> None:
        self.key = key
        self._membership = membership

    async def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of the node and return its result. `options` are the method's keyword
        arguments.

        Raises:
            NodeGone: the node cannot be reached.
            EngineError: the node raised this error.
        """
        asked = pickle.dumps((method, arguments, options))
        return _opened(await self._membership.ask("call", self.key, asked))

    def tell(self, method: str, *arguments: Any) -> None:
        """Call a method of the node without waiting for the result."""
        self._membership.send("call", self.key, pickle.dumps((method, arguments, {})))

    async def pass_piece(self, ticket: Ticket, transfer: str, to: NodePort, its: Ticket) -> None:
        """Pass the next piece of the image with the transfer id `transfer` to the node `to`,
        without loading the piece into this process.

        `ticket` is the ticket for this node, and `its` the ticket for the node `to`.
        """
        asked = pickle.dumps(("read_image", (ticket, transfer), {}))
        passed = self._membership.ask("pass_piece", self.key, asked, to.key, its, transfer)
        _opened(await passed)


Probe = subprocess.Popen[bytes]

_SENT = {
    (cls.__module__, cls.__qualname__): cls
    for cls in (
        EndedBy, Grade, Fenced, HeldState, HostSize, ImageFacts, ImageMissing, Kind, Limit,
        Held, NodeReport, Refused, RunEnding, frozenset,
        *(e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, EngineError)),
    )
}  # fmt: skip
"""The classes that answers of nodes may contain, by module and name."""


class _Values(pickle.Unpickler):
    """Unpickles the answers of nodes.

    Only known classes are accepted, so that a compromised node cannot run code in the engine.
    """

    def find_class(self, module: str, name: str) -> Any:
        """Return the class with this name, if answers may contain it. Otherwise, raise
        UnpicklingError.
        """
        try:
            return _SENT[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"a node sent {module}.{name}"[:200]) from None


def _opened(result: bytes) -> Any:
    try:
        answer = _Values(io.BytesIO(result)).load()
    except Exception as error:  # hostile bytes can raise anything
        raise NodeGone(f"it sent invalid data: {error}") from None
    if isinstance(answer, Refused):
        raise answer.error
    return answer


class RayMembership:
    """The nodes of a Ray cluster, reached through a separate process (`ray_bridge`)."""

    def __init__(self, address: str, *, allow_unauthenticated: bool) -> None:
        self._address = address
        self._allow_unauthenticated = allow_unauthenticated
        self._ports: dict[str, NodePort] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._has_answered = False
        """Whether the current process has answered."""
        self._numbers = 0
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._probes: list[Probe] = []

    async def _open(self) -> None:
        """Connect to the cluster, unless already connected.

        Raises:
            SandboxUnavailable: the cluster cannot be reached, `probe` found that it must not be
                used, or the process that connects to the cluster cannot be started.
        """
        if self._writer is not None:
            return
        address, mode = await anyio.to_thread.run_sync(self._checked, abandon_on_cancel=True)
        await self.close()
        try:
            own, its = socket.socketpair()
            with its:
                # A new session, so that Ctrl-C reaches only the engine, whose calls may continue.
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable, "-I", "-m", "fumehood.cluster.ray_bridge", address,
                    env=_environment(mode), stdin=its.fileno(), stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL, start_new_session=True,
                )  # fmt: skip
            reader, self._writer = await asyncio.open_connection(sock=own)
        except OSError as error:
            raise SandboxUnavailable(f"Ray's process cannot be started: {error}") from None
        self._has_answered = False
        self._reading = asyncio.ensure_future(self._read(reader))

    def _checked(self) -> tuple[str, str]:
        """Return the address of the cluster's head, and Ray's authentication mode.

        Raises:
            SandboxUnavailable: the cluster cannot be reached, or `probe` found that it must not be
                used.
        """
        address, asks = probe(
            self._address,
            allow_unauthenticated=self._allow_unauthenticated,
            on_start=self._probes.append,
        )
        return address, "token" if asks else "disabled"

    async def ports(self) -> Sequence[NodePort]:
        """Return the nodes of the cluster. Actors that are missing are started first.

        Raises:
            SandboxUnavailable: the cluster cannot be used now.
        """
        await self._open()
        try:
            with anyio.fail_after(ANSWER_S if self._has_answered else CONNECT_S):
                alive = await self.ask("machines")
        except (TimeoutError, NodeGone, InternalError) as error:
            await self.close()
            why = str(error) or "it took too long"
            raise SandboxUnavailable(f"Ray's cluster does not answer: {why}") from None
        self._has_answered = True
        self._ports = {key: self._ports.get(key) or RayPort(self, key) for key in alive}
        return list(self._ports.values())

    def send(self, *request: Any, number: int = 0) -> None:
        """Send a request: the name of a method of `Bridge`, and its arguments. Without a
        connection, do nothing.

        The answer will have the request's `number`. If `number` is 0, the result is dropped.
        """
        if self._writer is not None:
            body = pickle.dumps(request)
            self._writer.write(HEADER.pack(number, len(body)) + body)

    async def ask(self, *request: Any) -> Any:
        """Send a request, the name of a method of `Bridge` and its arguments. Return the result.

        Raises:
            NodeGone: the node or the cluster cannot be reached.
            InternalError: the node failed unexpectedly.
        """
        if self._writer is None:
            raise NodeGone("Ray's cluster is not connected")
        self._numbers += 1
        number, answer = self._numbers, asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        try:
            self.send(*request, number=number)
            kind, result = await answer
        finally:
            self._asked.pop(number, None)
        if kind == "gone":
            raise NodeGone(result)
        if kind == "failed":
            # Callers may see this, so it names only the error's type. Ray's log has the details.
            raise InternalError(f"A node failed: {result.partition(':')[0]}.")
        return result

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Receive the answers of the process `ray_bridge` until this process ends."""
        try:
            while True:
                number, length = HEADER.unpack(await reader.readexactly(HEADER.size))
                answer = pickle.loads(await reader.readexactly(length))  # noqa: S301 - our process
                if number in self._asked and not self._asked[number].done():
                    self._asked[number].set_result(answer)
        except Exception:  # whatever failed, no more answers can arrive
            self._end()

    def _end(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        for answer in self._asked.values():
            if not answer.done():
                answer.set_result(("gone", "Ray's process has ended"))

    async def close(self) -> None:
        """Disconnect from the cluster. The nodes keep running."""
        self._end()
        for (
            probe
        ) in self._probes:  # the threads that wait for them would delay the end of this process
            probe.kill()
        self._probes.clear()
        if self._reading is not None:
            self._reading.cancel()
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
            self._process = None


def _environment(mode: str) -> dict[str, str]:
    """Return the environment variables that Ray needs, without the engine's secrets."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name.startswith("RAY_") or name in ("HOME", "LANG", "PATH", "TMPDIR")
    }
    return {**kept, "RAY_AUTH_MODE": mode, "RAY_USAGE_STATS_ENABLED": "0"}


def probe(
    address: str,
    *,
    allow_unauthenticated: bool,
    on_start: Callable[[Probe], None] = lambda probe: None,
) -> tuple[str, bool]:
    """Check that the engine may use a cluster. Return the address of the cluster's head, and
    whether the cluster requires a token.

    A cluster that requires a token must accept the token of this machine. A cluster that requires
    none may be used only in two cases: `allow_unauthenticated` is True, or no other machine can
    reach the cluster's head.

    The checks run in separate processes. `on_start` receives each process when it starts.

    Raises:
        SandboxUnavailable: the cluster cannot be reached, or must not be used. The error's first
            sentence states the cause, and its second sentence the remedy.
    """
    found, asks = _probed(address, mode="disabled", on_start=on_start)
    if asks and not has_token():
        raise SandboxUnavailable(f"Ray's cluster requires its token. {COPY_TOKEN}")
    if asks and _probed(address, mode="token", on_start=on_start)[1]:
        raise SandboxUnavailable(f"Ray's cluster refused this machine's token. {COPY_TOKEN}")
    if not (asks or allow_unauthenticated or _is_private(found)):
        raise SandboxUnavailable(
            "Ray's cluster has no token authentication, so anyone who can reach it could run code "
            "on every node. Start all of it with RAY_AUTH_MODE=token, or set "
            "cluster.allow_unauthenticated"
        )
    return found, asks


def has_token() -> bool:
    """Return whether Ray can find the cluster's token. Without a token, Ray would end the
    process.
    """
    path = os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / TOKEN_FILE
    return bool(os.environ.get("RAY_AUTH_TOKEN")) or Path(path).is_file()


_PROBE = """
import sys
from ray._private.services import canonicalize_bootstrap_address_or_die
from ray._raylet import GcsClient
from ray.exceptions import AuthenticationError
address = canonicalize_bootstrap_address_or_die(sys.argv[1])
print(address)
try:
    GcsClient(address=address)
except AuthenticationError:
    print("refused")
"""


def _probed(
    address: str, *, mode: str, on_start: Callable[[Probe], None] = lambda probe: None
) -> tuple[str, bool]:
    """Try to connect to a cluster with Ray's authentication mode `mode`. Return the address of the
    cluster's head, and True if the head refuses the connection.

    A separate process makes the connection. `on_start` receives the process when it starts.

    Raises:
        SandboxUnavailable: the cluster's head cannot be reached.
    """
    try:
        # A separate process, because Ray reads the mode only once in each process.
        found, *refused = _ran(address, mode, on_start).split()
    except (OSError, ValueError, subprocess.SubprocessError):
        raise SandboxUnavailable(
            f"Ray's cluster at {address} cannot be reached. Start it with fumehood node, also on "
            "this machine, or correct its address"
        ) from None
    return found, bool(refused)


def _ran(address: str, mode: str, on_start: Callable[[Probe], None]) -> str:
    """Run the program `_PROBE`, a client of the cluster, as a separate process and return its
    output. `on_start` receives the process when it starts.

    Raises:
        OSError: the process cannot be started.
        SubprocessError: the process failed or took too long.
    """
    with subprocess.Popen(  # noqa: S603 - the address was checked
        [sys.executable, "-I", "-c", _PROBE, address],
        env=_environment(mode), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, start_new_session=True,
    ) as running:  # fmt: skip
        on_start(running)
        try:
            said, _ = running.communicate(timeout=PROBE_S)
        finally:
            running.kill()
    if running.returncode:
        raise subprocess.CalledProcessError(running.returncode, sys.executable)
    return said.decode()


def _is_private(address: str) -> bool:
    """Return whether the cluster's head can be reached only from this machine."""
    host, _, port = address.rpartition(":")
    # A loopback address alone does not prove this: for most of them, Ray listens on all networks.
    return _is_loopback(host) and not any(
        _is_open(entry.address, int(port))
        for addresses in psutil.net_if_addrs().values()
        for entry in addresses
        if entry.family in (socket.AF_INET, socket.AF_INET6) and not _is_loopback(entry.address)
    )


def _is_open(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=CONNECT_TO_SELF_S):
            return True
    except OSError:
        return False


def _is_loopback(host: str) -> bool:
    host = host.strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
