"""Declaration of the part `cluster`: nodes, which are other machines that run containers."""

from __future__ import annotations

from fumehood.core.part import Check, Command, Options, Part

PART = Part(
    name="cluster",
    settings="fumehood.cluster.settings:SETTINGS",
    commands={
        "node": Command(
            "Run a node of a cluster on this machine, until Ctrl-C.",
            "fumehood.cluster.commands:node",
            after="images",
        ),
        "nodes": Command(
            "The cluster's nodes: machines that run containers.",
            "fumehood.cluster.commands:nodes",
            after="node",
        ),
    },
    options=(Options("serve", "fumehood.cluster.options:with_nodes", before="log_level"),),
    checks=(Check("cluster", "fumehood.cluster.doctor:check", after="Limits", group="Cluster"),),
    control_operations="fumehood.cluster.routes:CONTROL_OPERATIONS",
    in_engine="fumehood.cluster.in_engine:Cluster",
)
