"""The nodes of the cluster. Administrators drain and resume them."""

from __future__ import annotations

from starlette.responses import Response

from fumehood.web.view import Page, View, get, post


async def show(view: View) -> Response:
    """Show every node."""
    return view.render("nodes.html", nodes=await view.control.nodes.list())


async def drain(view: View) -> Response:
    """Let a node take nothing new."""
    await view.control.nodes.drain(view.path["node"])
    return view.go("/nodes")


async def resume(view: View) -> Response:
    """Let a drained node take calls and sessions again."""
    await view.control.nodes.resume(view.path["node"])
    return view.go("/nodes")


PAGE = Page(
    "Nodes",
    "/nodes",
    (get("/nodes", show), post("/nodes/{node}/drain", drain), post("/nodes/{node}/resume", resume)),
)
