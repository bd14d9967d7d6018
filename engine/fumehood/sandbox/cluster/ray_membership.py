"""Which nodes a Ray cluster has, and whether the cluster may be used.

Host side, below `wall`. A node is a detached actor on each of the cluster's machines that has the
resource `fumehood`; its amount is the number of slots. Whoever can reach Ray can run code on all of
them, so a cluster that others can reach without a token is refused.
"""

from __future__ import annotations

import ipaddress
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from fumehood.core.errors import EngineError, SandboxUnavailable
from fumehood.sandbox.bounded_threads import BoundedThreads
from fumehood.sandbox.cluster.wall import NodePort

TOKEN_FILE = Path(".ray") / "auth_token"
"""Below the home directory: the cluster's token. *Source*: Ray, "Token authentication"."""

PROBE_S = 20.0
"""Seconds to find out whether the cluster asks for a token."""

CONNECT_S = 60.0
"""Seconds to connect to the cluster, and for it to answer; Ray itself tries for 40."""


class RayMembership:
    """The nodes of a Ray cluster."""

    def __init__(self, address: str, *, allow_unauthenticated: bool) -> None:
        self._address = address
        self._allow_unauthenticated = allow_unauthenticated
        self._threads = BoundedThreads(2, "ray")
        self._ports: dict[str, NodePort] = {}
        self._ray: ModuleType | None = None
        """`ray_nodes`, once it is connected."""

    async def open(self) -> None:
        """Connect to the cluster. Raises SandboxUnavailable."""
        self._ray = await self._in_thread(self._connect)

    def _connect(self) -> ModuleType:
        address, asks = _probed(self._address, mode="disabled")
        if asks and not (has_token() and not _probed(self._address, mode="token")[1]):
            raise SandboxUnavailable(
                f"Ray's cluster asks for its token. Copy it from the head to ~/{TOKEN_FILE}, or "
                "set RAY_AUTH_TOKEN"
            )
        if not (asks or self._allow_unauthenticated or _is_loopback(address)):
            raise SandboxUnavailable(
                "Ray's cluster has no token authentication, so whoever reaches it could run code "
                "on every node. Start all of it with RAY_AUTH_MODE=token, or set "
                "cluster.allow_unauthenticated"
            )
        os.environ["RAY_AUTH_MODE"] = "token" if asks else "disabled"
        # Its own log would go into the engine's standard error.
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
        from fumehood.sandbox.cluster import ray_nodes

        ray_nodes.connect(address)
        return ray_nodes

    async def ports(self) -> Sequence[NodePort]:
        """Return the machines of the cluster that are nodes. Starts their actors."""
        assert self._ray is not None
        alive = await self._in_thread(self._ray.machines)
        for key in self._ports.keys() - alive.keys():
            del self._ports[key]
        for key in alive.keys() - self._ports.keys():
            self._ports[key] = await self._in_thread(self._ray.port_to, key, alive[key])
        return list(self._ports.values())

    async def _in_thread(self, work: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return await self._threads.run(partial(work, *arguments), CONNECT_S)
        except EngineError:
            raise
        except Exception as error:  # what Ray raises here is not documented
            why = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
            raise SandboxUnavailable(f"Ray's cluster does not answer: {why}") from None

    def close(self) -> None:
        """Disconnect; the nodes stay."""
        if self._ray is not None:
            self._ray.disconnect()


def has_token() -> bool:
    """Whether Ray will find a token of its cluster. Without one it would end the process."""
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


def _probed(address: str, *, mode: str) -> tuple[str, bool]:
    """Return the address of the cluster's head, and whether it refuses a client of this mode.

    The client is a process of its own, because Ray reads its mode once.

    Raises:
        SandboxUnavailable: it cannot be reached.
    """
    try:
        probe = subprocess.run(  # noqa: S603 - the address was checked
            [sys.executable, "-I", "-c", _PROBE, address],
            env={**os.environ, "RAY_AUTH_MODE": mode}, stdin=subprocess.DEVNULL,
            capture_output=True, timeout=PROBE_S, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        raise SandboxUnavailable(f"Ray's cluster at {address} cannot be reached") from None
    found, *refused = probe.stdout.decode().split()
    return found, bool(refused)


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
