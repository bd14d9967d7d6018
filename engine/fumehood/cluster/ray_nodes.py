"""Nodes as Ray actors. Only this module and `ray_bridge` import Ray; engine processes never do."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from fumehood.cluster.model import Refused, Ticket
from fumehood.cluster.node import Node, NodeHome
from fumehood.core.errors import EngineError
from fumehood.sandbox.walls import container_wall

RESOURCE = "fumehood"
"""Ray's resource of the machines that are nodes. Its amount is the number of slots."""

NAMESPACE = "fumehood"

DIRECTORY_VARIABLE = "FUMEHOOD_NODE_HOME"
"""Environment variable of a node: the directory for its state. Default: `~/.fumehood/nodes`."""

MAX_CALLS = 10_000
"""Maximum number of concurrent calls of a node's methods."""


class NodeActor:
    """A node as a Ray actor."""

    def __init__(self, slots: int) -> None:
        base = os.environ.get(DIRECTORY_VARIABLE) or Path.home() / ".fumehood" / "nodes"
        make_wall = partial(container_wall, eager=True)
        gc.freeze()
        self._node = Node(NodeHome(Path(base)), slots, make_wall)

    async def call(self, asked: bytes) -> bytes:
        """Call a method of the node, and return the pickled result.

        `asked` is the pickled name, arguments and keyword arguments. An EngineError is returned as
        `Refused` instead of being raised.
        """
        method, arguments, options = pickle.loads(asked)  # noqa: S301 - from the engine
        try:
            result = getattr(self._node, method)(*arguments, **options)
            if asyncio.iscoroutine(result):
                result = await result
        except EngineError as error:
            result = Refused(error)
        return pickle.dumps(result)

    async def write_image(self, ticket: Ticket, transfer: str, piece: bytes) -> bytes:
        """Append a piece to an image that is copied from another node. Return the pickled result.

        `piece` is the pickled result of the other node's `call`. If it is a refusal, no piece is
        appended, and the refusal is returned.
        """
        content = pickle.loads(piece)  # noqa: S301 - from a node
        if isinstance(content, Refused):
            return piece
        return await self.call(pickle.dumps(("write_image", (ticket, transfer, content), {})))


def machines() -> dict[str, int]:
    """Return the number of slots of each running machine that is a node, by Ray's id of the
    machine.
    """
    return {
        str(node["NodeID"]): int(node["Resources"][RESOURCE])
        for node in ray.nodes()  # type: ignore[no-untyped-call]
        if node["Alive"] and node["Resources"].get(RESOURCE, 0) >= 1
    }


def actor_of(key: str, slots: int) -> Any:
    """Return the node actor of the machine `key`. If the machine has no actor, start an actor whose
    node has `slots` slots.
    """
    made = ray.remote(NodeActor).options(
        name=f"node-{key}", namespace=NAMESPACE, lifetime="detached", get_if_exists=True,
        num_cpus=0, max_concurrency=MAX_CALLS, max_restarts=0, enable_task_events=False,
        scheduling_strategy=NodeAffinitySchedulingStrategy(key, soft=False),
    )  # fmt: skip
    return made.remote(slots)
