"""The part object of one engine for a cluster, on whose nodes the engine's containers run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

from fumehood.cluster.settings import ClusterSettings
from fumehood.config import ConfigError
from fumehood.core.errors import ResourceNotFound
from fumehood.core.identity import Principal
from fumehood.core.status import NodeRecord, NodeState
from fumehood.engine_part import EnginePart, Kernel
from fumehood.observe.figures import Figure
from fumehood.sandbox.wall import Wall
from fumehood.sandbox.walls import WARNINGS, OwnWalls, logged

if TYPE_CHECKING:
    from fumehood.cluster.wall import ClusterWall

NODE_WARNINGS = frozenset(
    {
        "cluster.unavailable",
        "node.refused",
        "node.lost",
        "node.lost_run",
        "node.image_not_copied",
    }
)
"""Cluster events that are logged as warnings."""


class Cluster(EnginePart):
    """Runs an engine's containers on nodes. `wall` is None if no cluster address is configured."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self.wall: ClusterWall | None = None

    def walls(self, own: OwnWalls) -> Mapping[str, Wall]:
        """Return the cluster's wall under the key `container`. It replaces `own.container`, the
        engine's own wall, whose containers run on this machine.

        Return an empty mapping if no cluster is configured, or if the engine has no container wall.

        Raises:
            ConfigError: a cluster is configured, but Ray is not installed.
        """
        settings = self.kernel.config.of("cluster", ClusterSettings)
        if own.container is None or settings is None or settings.address is None:
            return {}
        if find_spec("ray") is None:
            raise ConfigError(
                "cluster.address needs Ray: pip install 'PATH_OF_THE_CHECKOUT[cluster]'."
            )
        # Imported here, because an engine without a cluster does not need these modules.
        from fumehood.cluster.model import Terms
        from fumehood.cluster.ray_membership import RayMembership
        from fumehood.cluster.starts import count_start
        from fumehood.cluster.wall import ClusterWall

        database = self.kernel.database
        start = database.write_now(count_start)
        self.wall = ClusterWall(
            Terms(own.settings),
            RayMembership(settings.address, allow_unauthenticated=settings.allow_unauthenticated),
            owner=start.owner,
            epoch=start.number,
            lost_s=settings.lost_seconds,
            keeps_sessions=database.directory is not None,
            open_program=own.container.open_program,
            on_event=logged(self.kernel.log, WARNINGS | NODE_WARNINGS),
        )
        return {"container": self.wall}

    def nodes(self) -> list[NodeRecord]:
        """Return the cluster's nodes, or an empty list if the containers run on this machine."""
        return self.wall.nodes() if self.wall is not None else []

    async def drain(self, name: str, by: Principal, *, is_drained: bool) -> NodeRecord:
        """If `is_drained` is True, drain the node `name`, so that it takes no new calls or
        sessions. Otherwise, let the node take calls and sessions again. Return the node's new
        state.

        `by` is the principal that made the request; it is logged.

        Raises:
            ResourceNotFound: no such node has joined.
            InvalidParams: several nodes have this name.
            SandboxUnavailable: the node was lost.
        """
        if self.wall is None:
            raise ResourceNotFound("This engine has no nodes.", fields=["node"])
        node = await self.wall.drain(name, is_drained=is_drained)
        event = "node.drained" if is_drained else "node.resumed"
        self.kernel.log.info(event, node=name, by=by.id)
        return node

    def figures(self) -> Iterable[Figure]:
        """Return the metrics of the cluster's nodes. Empty if no cluster is configured."""
        return node_figures(self.wall.nodes()) if self.wall is not None else ()


def node_figures(nodes: Iterable[NodeRecord]) -> Iterator[Figure]:
    """Yield the metrics of a cluster's nodes."""
    shown, well = list(nodes), (NodeState.JOINED, NodeState.DRAINED)
    up = {node.name: float(node.state in well) for node in shown}
    yield Figure("node_up", "1 while a node is ready or drained.", up, "node")
    for name, words in (
        ("slots", "Calls that a node can take at once."),
        ("used", "Slots of a node in use, by this and other engines."),
        ("sessions", "Sessions on a node that are not stopped."),
    ):
        values = {node.name: float(getattr(node, name)) for node in shown}
        yield Figure(f"node_{name}", words, values, "node")
