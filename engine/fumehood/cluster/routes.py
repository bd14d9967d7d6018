"""HTTP routes of the nodes: list them, drain and resume one."""

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

NodeName = Annotated[str, "A node's name or id."]
NodeAnswer = Annotated[NodeRecord, As("node", "NodeAnswer", "A node as it is now.")]


@endpoint("GET", "/v1/nodes", Needs.APPROVER, authorize=require_authority, client="nodes.list")
async def list_nodes(
    engine: Engine,
) -> Annotated[
    tuple[NodeRecord, ...],
    As("items", "NodeList", "The cluster's nodes by name; none if containers are on this machine."),
]:
    """List the nodes of the cluster.

    Needs `approve` or `admin`.
    """
    return tuple(engine.part(Cluster).nodes())


@endpoint("POST", "/v1/nodes/{node}/drain", Needs.ADMIN, errors=ERRORS, client="nodes.drain")
async def drain_node(engine: Engine, caller: Principal, node: NodeName) -> NodeAnswer:
    """Let a node take no new calls and sessions. What runs there goes on."""
    return await engine.part(Cluster).drain(node, caller, is_drained=True)


@endpoint("POST", "/v1/nodes/{node}/resume", Needs.ADMIN, errors=ERRORS, client="nodes.resume")
async def resume_node(engine: Engine, caller: Principal, node: NodeName) -> NodeAnswer:
    """Let a drained node take calls and sessions again."""
    return await engine.part(Cluster).drain(node, caller, is_drained=False)


CONTROL_OPERATIONS = [list_nodes, drain_node, resume_node]
