"""The tools with their statistics and the places where they run. Also the agents with their tools.

Users can try a tool with a form that is made from the tool's schema. The call goes to the callers'
socket, with the token that the user enters in the form. Administrators can leave the token out. The
call is then made as the user who runs the console. An approver's credential is never used for
calls. The token is neither stored nor sent back.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import shlex
from pathlib import Path
from typing import Any

from starlette.responses import Response

from fumehood.client.api_request import Refused
from fumehood.client.async_client import AsyncClient
from fumehood.core.call_log import ToolFigures
from fumehood.core.json_types import JsonObject
from fumehood.core.names import EXTERNAL, NET_TOOL
from fumehood.core.tool import ToolDefinition
from fumehood.web.arguments import arguments_of, errors_of, fields_of
from fumehood.web.pages.calls import parts_of
from fumehood.web.view import Page, Problem, View, get, is_name, post

PERIODS = {"24": "last day", "168": "last 7 days"}


async def show(view: View) -> Response:
    """Show every tool with its statistics."""
    hours = view.query.one_of("hours", PERIODS)
    wanted = view.query.get("q").strip().lower()
    found = await view.control.figures(int(hours))
    figures = {one.tool: one for one in found.items}
    tools = [tool for tool in await view.caller.tools() if wanted in _text_of(tool)]
    return view.render(
        "tools.html", tools=tools, figures=figures,
        hours=hours, periods=PERIODS, wanted=wanted, is_partial=found.is_partial,
    )  # fmt: skip


async def show_one(view: View) -> Response:
    """Show the page of one tool, with all details."""
    name = view.path["name"]
    if name == NET_TOOL:
        raise Problem("This stands for the requests that programs send.", 404)
    if name.startswith(EXTERNAL):
        raise Problem("This is a tool of another agent: the engine only decides about it.", 404)
    details = await view.caller.tool(name)
    found = await view.control.figures(168)
    tool = details.tool
    figures: ToolFigures | None = next((f for f in found.items if f.tool == tool.name), None)
    calls = await view.control.calls.list(tool=tool.name, limit=10)
    document = tool.model_dump(mode="json", exclude_unset=True, exclude={"headers"})
    return view.render(
        "tool.html", one=details, tool=tool, figures=figures, calls=calls.items, document=document
    )


async def show_form(view: View) -> Response:
    """Show the form for trying a tool."""
    tool = (await view.caller.tool(view.path["name"])).tool
    fields = fields_of({}, tool.parameters)
    return view.render("tool_try.html", tool=tool, fields=fields, error="")


async def try_tool(view: View) -> Response:
    """Call the tool with the arguments in the form, and show the answer."""
    tool = (await view.caller.tool(view.path["name"])).tool
    arguments, errors = arguments_of(view.form)
    options: dict[str, Any] = {
        name: value
        for name, field in (("agent_id", "agent"), ("session_id", "session"))
        if (value := view.form.get(field).strip())
    }
    if view.form.get("dry_run"):
        options["dry_run"] = True
    copies = _copies(view.console.callers, tool.name, arguments, options)
    values: dict[str, Any] = {"copies": copies, "envelope": None, "answer": None, "call_id": None}
    if errors:
        return view.render("tool_tried.html", errors=errors, **values)
    caller = await _caller(view)
    try:
        if caller is view.caller:  # the trace id names the user who tried it
            by = view.login.principal_id
            options["trace_id"] = f"console:{by}:{secrets.token_hex(4)}"
        envelope = await caller.call(tool.name, arguments, **options)
    except Refused as refused:
        error = refused.envelope.error
        errors = errors_of(error.fields if error else None, str(refused))
        return view.render("tool_tried.html", errors=errors, **values)
    finally:
        if caller is not view.caller:
            await caller.close()
    if caller is view.caller and not await view.may_administer():  # the call may have taken minutes
        raise Problem("You may not administer any more: its answer is not for you.", 403)
    values |= {"envelope": envelope, "answer": parts_of(envelope)}
    if not options.get("dry_run"):
        values["call_id"] = envelope.metadata.call_id
    return view.render("tool_tried.html", errors={}, **values)


async def show_agents(view: View) -> Response:
    """Show every agent with its tools. Only administrators see this page."""
    if not view.login.can_administer:
        return view.render("agents.html", agents=[])
    show = view.control.agents.show
    agents = await asyncio.gather(*(show(one.id) for one in await view.control.agents.list()))
    return view.render("agents.html", agents=agents)


def _text_of(tool: ToolDefinition) -> str:
    return f"{tool.name} {tool.category or ''} {' '.join(tool.tags)} {tool.description}".lower()


async def create_agent(view: View) -> Response:
    """Create an agent."""
    form = view.form
    name, description = form.get("id").strip(), form.get("description").strip()
    await view.control.agents.create(name, description, principals=_principals(view))
    return view.go("/agents")


async def change_agent(view: View) -> Response:
    """Enable or disable an agent, or change which principals may act for it."""
    switch = view.form.get("is_enabled")
    change: dict[str, Any] = {"is_enabled": switch == "true"}
    if not switch:
        change = {"principals": _principals(view)}
    await view.control.agents.update(view.path["agent_id"], **change)
    return view.go("/agents")


def _principals(view: View) -> list[str]:
    return view.form.get("principals").replace(",", " ").split()


async def bind_tool(view: View) -> Response:
    """Bind a tool to an agent. The form can fix arguments of the tool for this agent."""
    fixed = view.form.json("fixed")
    await view.control.agents.bind(view.path["agent_id"], _tool_in(view), fixed=fixed)
    return view.go("/agents")


async def unbind_tool(view: View) -> Response:
    """Unbind a tool from an agent."""
    await view.control.agents.unbind(view.path["agent_id"], _tool_in(view))
    return view.go("/agents")


def _tool_in(view: View) -> str:
    name = view.form.get("tool").strip()
    if not is_name(name):
        raise Problem("Name a tool.")
    return name


async def _caller(view: View) -> AsyncClient:
    """Return the client with which the user tries a tool.

    If the form contains a token, the client sends this token. If the form contains none and the
    user is an administrator, return the console's own client.

    Raises:
        Problem: the token is invalid, or there is no token and the user is not an administrator.
    """
    token = view.form.get("token").strip()
    if token:
        try:
            return AsyncClient(view.console.callers, credential=token)
        except ValueError:
            raise Problem("This is no token.") from None
    if not await view.may_administer():
        raise Problem("Give the token of a caller: your credential approves, and never calls.", 403)
    return view.caller


def _copies(
    socket: Path, tool: str, arguments: JsonObject, options: dict[str, Any]
) -> list[tuple[str, str]]:
    """Return texts with which a user can repeat the call from a terminal, from Python, with curl
    and over MCP. Each item is a title and the text.

    `socket` is the path of the engine's socket for calls. `options` are the options of the call.
    """
    given = json.dumps(arguments, ensure_ascii=False)
    words = ["fumehood", "call", tool, given]
    for key, flag in (("agent_id", "--agent"), ("session_id", "--session")):
        words += [flag, options[key]] if key in options else []
    words += ["--dry-run"] if "dry_run" in options else []
    named = "".join(f", {name}={value!r}" for name, value in options.items())
    python = f"""\
from fumehood import Client

with Client() as client:
    answer = client.call({tool!r}, {arguments!r}{named})
print(answer.data if answer.success else answer.error)"""
    body = {"arguments": arguments, **({"options": options} if options else {})}
    curl = ["curl", "--unix-socket", str(socket), "-H", "content-type: application/json", "-d"]
    curl += [json.dumps(body), f"http://fumehood/v1/tools/{tool}/call"]
    message = {
        "jsonrpc": "2.0", "id": 1, "method": "tools/call",
        "params": {"name": tool, "arguments": arguments},
    }  # fmt: skip
    return [
        ("Terminal", shlex.join(words)),
        ("Python", python),
        ("curl", shlex.join(curl)),
        (
            "MCP, whose server has the agent and the session" if options else "MCP",
            json.dumps(message, ensure_ascii=False),
        ),
    ]


PAGE = Page(
    "Tools",
    "/tools",
    (
        get("/tools", show),
        get("/tools/{name}", show_one),
        get("/tools/{name}/try", show_form),
        post("/tools/{name}/try", try_tool),
    ),
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
