"""Nodes as Ray actors. Only this module and `ray_bridge` import Ray, never an engine's process."""

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
"""Ray's resource of a machine that is a node. Its amount is the number of slots."""

NAMESPACE = "fumehood"

DIRECTORY_VARIABLE = "FUMEHOOD_NODE_HOME"
"""Environment variable of a node: where it keeps its state; default `~/.fumehood/nodes`."""

MAX_CALLS = 10_000
"""Maximum number of calls in a node at once."""


class NodeActor:
    """A node as an actor."""

    def __init__(self, slots: int) -> None:
        base = os.environ.get(DIRECTORY_VARIABLE) or Path.home() / ".fumehood" / "nodes"
        make_wall = partial(container_wall, eager=True)
        gc.freeze()
        self._node = Node(NodeHome(Path(base)), slots, make_wall)

    async def call(self, asked: bytes) -> bytes:
        """Call a method of the node: its name, arguments and keyword arguments, pickled. Errors
        that are the engine's own are returned.
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
        """Add a piece, as another node's `call` returned it, to an image."""
        content = pickle.loads(piece)  # noqa: S301 - from a node
        if isinstance(content, Refused):
            return piece
        return await self.call(pickle.dumps(("write_image", (ticket, transfer, content), {})))


def machines() -> dict[str, int]:
    """Return Ray's ids of the machines that live and are nodes, and their slots."""
    return {
        str(one["NodeID"]): int(one["Resources"][RESOURCE])
        for one in ray.nodes()  # type: ignore[no-untyped-call]
        if one["Alive"] and one["Resources"].get(RESOURCE, 0) >= 1
    }


def actor_of(key: str, slots: int) -> Any:
    """Return the actor of a machine. It is started if there is none."""
    made = ray.remote(NodeActor).options(
        name=f"node-{key}", namespace=NAMESPACE, lifetime="detached", get_if_exists=True,
        num_cpus=0, max_concurrency=MAX_CALLS, max_restarts=0, enable_task_events=False,
        scheduling_strategy=NodeAffinitySchedulingStrategy(key, soft=False),
    )  # fmt: skip
    return made.remote(slots)
