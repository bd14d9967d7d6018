"""Nodes as Ray actors, which are called through Ray.

The only module that imports Ray. `ray_membership` imports it, once it has found out what the
cluster asks for, because Ray reads its mode once.
"""

from __future__ import annotations

import asyncio
import logging
import os
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray._private import worker
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from fumehood.core.errors import EngineError, InternalError
from fumehood.sandbox.cluster.model import Refused, Ticket
from fumehood.sandbox.cluster.node import Node, NodeHome
from fumehood.sandbox.cluster.wall import NodeGone, NodePort
from fumehood.sandbox.walls import container_wall

RESOURCE = "fumehood"
"""Ray's resource of a machine that is a node. Its amount is the number of slots."""

NAMESPACE = "fumehood"

DIRECTORY_VARIABLE = "FUMEHOOD_NODE_HOME"
"""Environment variable of a node: where it keeps its state; default `~/.fumehood/nodes`."""

MAX_CALLS = 10_000
"""Maximum number of calls in a node at once."""


class NodeActor:
    """A node as an actor: its methods return the errors that are the engine's own as values."""

    def __init__(self, slots: int) -> None:
        base = os.environ.get(DIRECTORY_VARIABLE) or Path.home() / ".fumehood" / "nodes"
        make_wall = partial(container_wall, eager=True)
        self._node = Node(NodeHome(Path(base)), slots, make_wall)

    async def call(self, method: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Call a method of the node."""
        try:
            result = getattr(self._node, method)(*arguments, **options)
            return await result if asyncio.iscoroutine(result) else result
        except EngineError as error:
            return Refused(error)

    async def write_image(self, ticket: Ticket, transfer: str, piece: Any) -> Any:
        """Add a piece, which comes from its node, to an image."""
        if isinstance(piece, Refused):
            return piece
        return await self.call("write_image", (ticket, transfer, piece), {})


class RayPort:
    """A node behind its actor. `key` is Ray's id of its machine in this life of it."""

    def __init__(self, key: str, actor: Any) -> None:
        self.key = key
        self._actor = actor

    async def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of the node. Raises NodeGone, or the node's own error."""
        return _opened(await _awaited(self._actor.call.remote(method, arguments, options)))

    def tell(self, method: str, *arguments: Any) -> None:
        """Call a method of the node without waiting."""
        self._actor.call.remote(method, arguments, {})

    async def pass_piece(self, ticket: Ticket, transfer: str, to: NodePort, its: Ticket) -> None:
        """Pass a piece of an image on to another node. It does not come to this process."""
        assert isinstance(to, RayPort)
        piece = self._actor.call.remote("read_image", (ticket, transfer), {})
        _opened(await _awaited(to._actor.write_image.remote(its, transfer, piece)))


async def _awaited(reference: Any) -> Any:
    try:
        return await reference
    except RayTaskError as error:  # a fault of the node's code
        raise InternalError(f"A node failed: {first_line(error.cause or error)}") from None
    except RayError as error:
        raise NodeGone(first_line(error)) from None


def _opened(answer: Any) -> Any:
    if isinstance(answer, Refused):
        raise answer.error
    return answer


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def connect(address: str) -> None:
    """Connect this process to a cluster. Not to be called in the main thread, where Ray would
    replace handlers of signals.
    """
    # It would print what nodes report into the engine's log.
    logging.getLogger("ray").setLevel(logging.CRITICAL)
    worker.print_to_stdstream = lambda *_, **__: None
    ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)


def disconnect() -> None:
    """Disconnect; the nodes stay."""
    ray.shutdown()


def machines() -> dict[str, int]:
    """Return Ray's ids of the machines that live and are nodes, and their slots."""
    return {
        str(one["NodeID"]): int(one["Resources"][RESOURCE])
        for one in ray.nodes()  # type: ignore[no-untyped-call]
        if one["Alive"] and one["Resources"].get(RESOURCE, 0) >= 1
    }


def port_to(key: str, slots: int) -> RayPort:
    """Return the port to the node of a machine, whose actor is started if there is none."""
    made = ray.remote(NodeActor).options(
        name=f"node-{key}", namespace=NAMESPACE, lifetime="detached", get_if_exists=True,
        num_cpus=0, max_concurrency=MAX_CALLS, max_restarts=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(key, soft=False),
    )  # fmt: skip
    return RayPort(key, made.remote(slots))
