"""HTTP routes of the cluster's nodes: list all nodes, and drain or resume one node."""

from __future__ import annotations

from typing import Annotated

from fumehood.cluster.in_engine import Cluster
from fumehood.core.errors import InvalidParams, ResourceNotFound, SandboxUnavailable
from fumehood.core.identity import Principal
from fumehood.core.status import NodeRecord
from fumehood.engine import Engine
from fumehood.http.caller import require_authority
from fumehood.http.endpoint import As, Needs, endpoint

ERRORS = [InvalidParams, ResourceNotFound, SandboxUnavailable]

NodeName = Annotated[str, "The node's name or id."]
NodeAnswer = Annotated[NodeRecord, As("node", "NodeAnswer", "The current state of a node.")]


@endpoint("GET", "/v1/nodes", Needs.APPROVER, authorize=require_authority, client="nodes.list")
async def list_nodes(
    engine: Engine,
) -> Annotated[
    tuple[NodeRecord, ...],
    As(
        "items",
        "NodeList",
        "The cluster's nodes, sorted by name. Empty if containers run on the engine's machine.",
    ),
]:
    """List the nodes of the cluster.

    Needs the scope `approve` or `admin`.
    """
    return tuple(engine.part(Cluster).nodes())


@endpoint("POST", "/v1/nodes/{node}/drain", Needs.ADMIN, errors=ERRORS, client="nodes.drain")
async def drain_node(engine: Engine, caller: Principal, node: NodeName) -> NodeAnswer:
    """Stop placing new calls and sessions on a node. Running calls and sessions continue."""
    return await engine.part(Cluster).drain(node, caller, is_drained=True)


@endpoint("POST", "/v1/nodes/{node}/resume", Needs.ADMIN, errors=ERRORS, client="nodes.resume")
async def resume_node(engine: Engine, caller: Principal, node: NodeName) -> NodeAnswer:
    """Place calls and sessions on a drained node again."""
    return await engine.part(Cluster).drain(node, caller, is_drained=False)


CONTROL_OPERATIONS = [list_nodes, drain_node, resume_node]
