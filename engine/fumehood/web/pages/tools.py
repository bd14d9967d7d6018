"""The tools, with where they run and their statistics, and the agents with their tools."""

from __future__ import annotations

import asyncio

from starlette.responses import Response

from fumehood.core.call_log import ToolFigures
from fumehood.core.names import EXTERNAL, NET_TOOL
from fumehood.core.tool import ToolDefinition
from fumehood.web.pages import playground
from fumehood.web.view import Page, Problem, View, get, post

PERIODS = {"24": "last day", "168": "last 7 days"}


async def show(view: View) -> Response:
    """Show every tool with its statistics."""
    hours = view.query.get("hours", "24")
    hours = hours if hours in PERIODS else "24"
    wanted = view.query.get("q").strip().lower()
    found = await view.control.figures(int(hours))
    figures = {one.tool: one for one in found.items}
    tools = [tool for tool in await view.caller.tools() if wanted in _text_of(tool)]
    return view.render(
        "tools.html", tools=tools, figures=figures,
        hours=hours, periods=PERIODS, wanted=wanted, is_partial=found.is_partial,
    )  # fmt: skip


async def show_one(view: View) -> Response:
    """Show one tool in full."""
    name = view.path["name"]
    if name == NET_TOOL:
        raise Problem("This stands for the requests that programs send.", 404)
    if name.startswith(EXTERNAL):
        raise Problem("This is a tool of another agent: the engine only decides about it.", 404)
    try:
        details = await view.caller.tool(name)
    except ValueError:
        raise Problem("There is no such tool.", 404) from None
    found = await view.control.figures(168)
    tool = details.tool
    figures: ToolFigures | None = next((f for f in found.items if f.tool == tool.name), None)
    calls = await view.control.calls.list(tool=tool.name, limit=10)
    document = tool.model_dump(mode="json", exclude_unset=True, exclude={"headers"})
    return view.render(
        "tool.html", one=details, tool=tool, figures=figures, calls=calls.items, document=document
    )


async def show_agents(view: View) -> Response:
    """Show every agent with its tools. Needs `admin`."""
    if not view.login.can_administer:
        return view.render("agents.html", agents=[])
    show = view.control.agents.show
    agents = await asyncio.gather(*(show(one.id) for one in await view.control.agents.list()))
    return view.render("agents.html", agents=agents)


def _text_of(tool: ToolDefinition) -> str:
    return f"{tool.name} {tool.category or ''} {' '.join(tool.tags)} {tool.description}".lower()


async def create_agent(view: View) -> Response:
    """Make an agent."""
    form = view.form
    principals = form.get("principals").replace(",", " ").split()
    name = form.get("id").strip()
    await view.control.agents.create(name, form.get("description").strip(), principals=principals)
    return view.go("/agents")


async def change_agent(view: View) -> Response:
    """Switch an agent on or off, or change who may call for it."""
    form = view.form
    if form.get("principals"):
        principals = form.get("principals").replace(",", " ").split()
        await view.control.agents.update(view.path["agent_id"], principals=principals)
    if form.get("is_enabled"):
        is_enabled = form.get("is_enabled") == "true"
        await view.control.agents.update(view.path["agent_id"], is_enabled=is_enabled)
    return view.go("/agents")


async def bind_tool(view: View) -> Response:
    """Give an agent a tool, with arguments that are fixed for it."""
    fixed = view.form.json("fixed")
    tool = view.form.get("tool").strip()
    if not tool:
        raise Problem("Name a tool.")
    try:
        await view.control.agents.bind(view.path["agent_id"], tool, fixed=fixed)
    except ValueError:
        raise Problem("There is no such tool.", 404) from None
    return view.go("/agents")


async def unbind_tool(view: View) -> Response:
    """Take a tool from an agent."""
    try:
        await view.control.agents.unbind(view.path["agent_id"], view.form.get("tool"))
    except ValueError:
        raise Problem("There is no such tool.", 404) from None
    return view.go("/agents")


PAGE = Page(
    "Tools",
    "/tools",
    (get("/tools", show), get("/tools/{name}", show_one), *playground.ADDRESSES),
)
AGENTS = Page(
    "Agents",
    "/agents",
    (
        get("/agents", show_agents),
        post("/agents", create_agent),
        post("/agents/{agent_id}", change_agent),
        post("/agents/{agent_id}/bind", bind_tool),
        post("/agents/{agent_id}/unbind", unbind_tool),
    ),
)
