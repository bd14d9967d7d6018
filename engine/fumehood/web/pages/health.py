"""The engine's health: walls, containers, circuits, changes, and the checks of this host.

A second page shows the nodes of the cluster, which administrators can drain and resume.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import anyio
from starlette.responses import Response

from fumehood.web.view import Page, View, get, post

CHECK_S = 120.0
"""Maximum seconds for the checks of this host."""

Finding = dict[str, str]


async def show(view: View) -> Response:
    """Show the page with the engine's health."""
    return view.render("health.html", **await _values(view), can_check="HOME" in os.environ)


async def show_live(view: View) -> Response:
    """Send only the part of the page that refreshes itself."""
    return view.render("health_live.html", **await _values(view))


async def check(view: View) -> Response:
    """Run `fumehood doctor` on this host, as the user who runs the console, and show the
    findings.
    """
    findings, error = await _doctor()
    order = {"missing": 0, "warning": 1}
    findings.sort(key=lambda one: order.get(one["verdict"], 2))
    return view.render("health_checks.html", findings=findings, error=error)


async def _values(view: View) -> dict[str, Any]:
    engine = await view.control.engine()
    changes = await view.control.changes()
    alerts = await view.control.alerts()
    return {"engine": engine, "changes": changes, "alerts": alerts}


async def _doctor() -> tuple[list[Finding], str]:
    """Run `fumehood doctor`. Return its findings and an empty text, or no findings and an error
    message.
    """
    # With -P, nothing is imported from the current directory. The directory is not changed, because
    # paths in the environment may be relative.
    command = [sys.executable, "-P", "-m", "fumehood.cli.main", "doctor", "--json"]
    try:
        with anyio.fail_after(CHECK_S):
            done = await anyio.run_process(command, check=False)
        found = json.loads(done.stdout)
    except TimeoutError:
        return [], "The checks took too long."
    except (OSError, ValueError):
        return [], "The checks could not be run here. Run fumehood doctor in a terminal."
    return found, ""


async def show_nodes(view: View) -> Response:
    """Show every node of the cluster."""
    return view.render("nodes.html", nodes=await view.control.nodes.list())


async def drain_node(view: View) -> Response:
    """Drain a node, so that the engine places no new calls and sessions on it."""
    await view.control.nodes.drain(view.path["node"])
    return view.go("/nodes")


async def resume_node(view: View) -> Response:
    """Resume a drained node, so that the engine places calls and sessions on it again."""
    await view.control.nodes.resume(view.path["node"])
    return view.go("/nodes")


PAGE = Page(
    "Health",
    "/health",
    (get("/health", show), get("/health/live", show_live), post("/health/check", check)),
)
NODES = Page(
    "Nodes",
    "/nodes",
    (
        get("/nodes", show_nodes),
        post("/nodes/{node}/drain", drain_node),
        post("/nodes/{node}/resume", resume_node),
    ),
)
