"""Try a tool: a form made from its schema, and the answer below it.

A call is made at the callers' socket: with the token in the form, or, for administrators, as the
user of the console. The credential of an approver never calls. The token is neither kept nor sent
back.
"""

from __future__ import annotations

import json
import secrets
import shlex
from pathlib import Path
from typing import Any

from starlette.responses import Response

from fumehood.client.api_request import Refused
from fumehood.client.async_client import AsyncClient
from fumehood.core.json_types import JsonObject
from fumehood.core.tool import ToolDefinition
from fumehood.web.arguments import arguments_of, errors_of, fields_of
from fumehood.web.pages.calls import parts_of
from fumehood.web.view import Problem, View, get, post


async def show(view: View) -> Response:
    """Show the form of a tool."""
    tool = await _tool(view)
    fields = fields_of({}, tool.parameters)
    return view.render("tool_try.html", tool=tool, fields=fields, error="")


async def run(view: View) -> Response:
    """Call the tool, and show the answer."""
    tool = await _tool(view)
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
        session = options.get("session_id", "_")
        if "_" not in session:  # a name, which calls do not take
            options["session_id"] = (await caller.session(session)).id
            values["copies"] = _copies(view.console.callers, tool.name, arguments, options)
        if caller is view.caller:  # the log says who tried it
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
    if caller is view.caller and not await view.may_administer():  # it may have taken minutes
        raise Problem("You may not administer any more: its answer is not for you.", 403)
    values |= {"envelope": envelope, "answer": parts_of(envelope)}
    if not options.get("dry_run"):
        values["call_id"] = envelope.metadata.call_id
    return view.render("tool_tried.html", errors={}, **values)


async def _tool(view: View) -> ToolDefinition:
    try:
        return (await view.caller.tool(view.path["name"])).tool
    except ValueError:
        raise Problem("There is no such tool.", 404) from None


async def _caller(view: View) -> AsyncClient:
    """Return the client that makes the call. Raises Problem."""
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
    """Return the same call for a terminal, Python, curl and MCP."""
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


ADDRESSES = (get("/tools/{name}/try", show), post("/tools/{name}/try", run))
