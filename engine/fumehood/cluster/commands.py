"""`fumehood node`: run a node of a cluster. `fumehood nodes …`: list, drain and resume nodes."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from fumehood.cli.exits import ExitCode, fail, say
from fumehood.cli.plain import plain
from fumehood.cli.show import (
    Column,
    as_fields,
    as_table,
)
from fumehood.cluster.ray_membership import TOKEN_FILE, probe
from fumehood.core.errors import SandboxUnavailable

nodes = typer.Typer(help="The cluster's nodes: machines that run containers.", no_args_is_help=True)

MB_OF_SLOT = 1024
"""MB of a machine's memory per slot, for computing the default number of slots."""

PORT = 6379
"""The default port of the cluster's head."""

HEAD_S = 5.0
"""Seconds within which the cluster's head must accept a connection."""

HEALTH = '{"health_check_period_ms": 1000, "health_check_failure_threshold": 5}'
"""Ray's settings for detecting a dead machine after about five seconds."""

Name = Annotated[str, typer.Argument(metavar="NODE", help="A node's name or id.")]


plain(
    nodes,
    "nodes.list",
    "List the nodes of the cluster.",
    as_table(
        Column("node", lambda node: node.name, whole=True),
        Column("state", lambda node: node.state),
        Column("slots", lambda node: f"{node.used}/{node.slots}"),
        Column("sessions", lambda node: str(node.sessions), drop=2),
        Column("MB", lambda node: str(node.memory_mb), drop=3),
        Column("why", lambda node: node.why or "", drop=1),
    ),
)
plain(
    nodes,
    "nodes.drain",
    "Place no new calls and sessions on a node. Running ones continue.",
    as_fields,
    arguments={"node": Name},
)
plain(
    nodes,
    "nodes.resume",
    "Place calls and sessions on a drained node again.",
    as_fields,
    arguments={"node": Name},
)


def node(
    head: Annotated[bool, typer.Option("--head", help="Start the cluster's head here.")] = False,
    address: Annotated[
        str | None, typer.Option(help="Join the cluster of the head at HOST:PORT.")
    ] = None,
    slots: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=256,
            help="Calls at once; default: by memory and processors. 0: engines only.",
        ),
    ] = None,
    ip: Annotated[
        str | None, typer.Option(help="This machine's address for the others, if it has several.")
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65_535, help="The head's port.")] = PORT,
) -> None:
    """Run a node of a cluster on this machine, until Ctrl-C.

    Needs Docker and the images, and the cluster's token.
    """
    if head == (address is not None):
        fail(
            "Name the head with --address HOST:PORT, or start it here with --head.", ExitCode.USAGE
        )
    if find_spec("ray") is None:
        fail(
            "A cluster needs Ray: pip install 'PATH_OF_THE_CHECKOUT[cluster]'.",
            ExitCode.UNAVAILABLE,
        )
    if address is not None:
        _require_answer(address)
    _use_token(may_make=head)
    if address is not None:
        _require_membership(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # by default Ray reports its usage
    # By default, Ray first waits for its actors to end, but a node does not end by itself.
    os.environ.setdefault("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "0")
    from ray.scripts.scripts import main as ray  # reads the authentication mode when imported

    slots = _usual_slots() if slots is None else slots
    where = ["--head", f"--port={port}", f"--system-config={HEALTH}"]
    sys.argv = [
        "ray", "start", "--block", "--num-cpus=1", f'--resources={{"fumehood": {slots}}}',
        *([f"--node-ip-address={ip}"] if ip is not None else []),
        *(where if head else [f"--address={address}"]),
    ]  # fmt: skip
    say(f"This machine has {slots} slots.", to_stderr=True)
    ray()  # type: ignore[no-untyped-call]  # exits


def _require_answer(address: str) -> None:
    """End the command with an error message unless the cluster's head accepts a connection.

    This check is made before Ray starts, because Ray would try to connect for minutes.
    """
    import socket

    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) <= 65_535:
        fail("The head's address has the form HOST:PORT, such as 10.0.0.1:6379.", ExitCode.USAGE)
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=HEAD_S).close()
    except OSError as error:
        why = error.strerror or str(error)
        fail(f"The cluster's head at {address} cannot be reached: {why}.", ExitCode.UNAVAILABLE)


def _require_membership(address: str) -> None:
    """End the command with an error message unless the cluster accepts this machine's token.

    This check is made before Ray starts, because Ray's own error message is long.
    """
    say(f"Joining the cluster at {address} …", to_stderr=True)
    try:
        probe(address, allow_unauthenticated=True)
    except SandboxUnavailable as error:
        fail(f"{error}.", ExitCode.UNAVAILABLE)


def _usual_slots() -> int:
    import psutil

    memory_mb = psutil.virtual_memory().total >> 20
    return int(max(1, min(4 * (os.cpu_count() or 1), memory_mb // MB_OF_SLOT)))


def _use_token(*, may_make: bool) -> None:
    """Configure Ray so that it requires the cluster's token.

    If the token is missing, create it if `may_make` is True. Otherwise, end the command.
    """
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    if os.environ["RAY_AUTH_MODE"] != "token" or os.environ.get("RAY_AUTH_TOKEN"):
        return
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / TOKEN_FILE)
    if path.exists():
        return
    if not may_make:
        fail(
            f"This machine has no token of the cluster. Copy {path} from the head, or set "
            "RAY_AUTH_TOKEN.",
            ExitCode.UNAVAILABLE,
        )
    import secrets

    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32))
    say(f"The cluster's token is in {path}. Copy it to the other machines.", to_stderr=True)
