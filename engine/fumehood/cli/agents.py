"""`fumehood agents`: agents and their tools."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from fumehood.cli.control import AsJson, CredentialStdin, ask_control, part, show_rows
from fumehood.cli.exits import ExitCode, fail
from fumehood.cli.settings import read_config
from fumehood.model.identity import uid_principal_id
from fumehood.model.json_types import JsonObject
from fumehood.wire import strict_json

agents = typer.Typer(help="Agents: who calls are made for.", no_args_is_help=True)

AgentId = Annotated[str, typer.Argument(help="The agent's id.")]
ToolName = Annotated[str, typer.Argument(help="name or name@version")]
Principals = Annotated[
    list[str] | None,
    typer.Option("--principal", help="Who may speak for it; repeatable; default: you (uid:N)."),
]


@agents.command("create")
def create(
    agent_id: AgentId,
    description: Annotated[str, typer.Option(help="What it is for.")] = "",
    principal: Principals = None,
    credential_stdin: CredentialStdin = False,
) -> None:
    """Make an agent. It has no tools until some are bound to it."""
    body: JsonObject = {
        "id": agent_id,
        "description": description,
        "principals": principal or [_own_principal()],
    }
    ask_control("POST", "/v1/agents", body, credential_stdin=credential_stdin)


@agents.command("list")
def list_agents(as_json: AsJson = False, credential_stdin: CredentialStdin = False) -> None:
    """List every agent."""
    data = ask_control("GET", "/v1/agents", credential_stdin=credential_stdin)
    columns = {
        "agent": "id", "may speak for it": "principals", "enabled": "is_enabled",
        "description": "description",
    }  # fmt: skip
    show_rows(data["items"], columns, as_json=as_json)


@agents.command("show")
def show(agent_id: AgentId, credential_stdin: CredentialStdin = False) -> None:
    """Show one agent with its tools, as JSON."""
    from fumehood.cli.show import show_json

    show_json(ask_control("GET", f"/v1/agents/{part(agent_id)}", credential_stdin=credential_stdin))


@agents.command("enable")
def enable(agent_id: AgentId, credential_stdin: CredentialStdin = False) -> None:
    """Let calls be made for an agent again."""
    _switch(agent_id, on=True, credential_stdin=credential_stdin)


@agents.command("disable")
def disable(agent_id: AgentId, credential_stdin: CredentialStdin = False) -> None:
    """Refuse every call that is made for an agent."""
    _switch(agent_id, on=False, credential_stdin=credential_stdin)


@agents.command("delete")
def delete(agent_id: AgentId, credential_stdin: CredentialStdin = False) -> None:
    """Remove an agent with its bindings."""
    ask_control("DELETE", f"/v1/agents/{part(agent_id)}", credential_stdin=credential_stdin)


@agents.command("bind")
def bind(
    agent_id: AgentId,
    tool: ToolName,
    order: Annotated[int, typer.Option(help="Its place among the agent's tools.")] = 0,
    fixed: Annotated[
        str, typer.Option(help="Arguments the agent neither sees nor gives, as JSON.")
    ] = "{}",
    defaults: Annotated[
        str, typer.Option(help="Arguments for what the agent leaves out, as JSON.")
    ] = "{}",
    disabled: Annotated[bool, typer.Option("--disabled", help="Bound, but switched off.")] = False,
    credential_stdin: CredentialStdin = False,
) -> None:
    """Give an agent a tool, or change how it has it."""
    body: JsonObject = {
        "sort_order": order,
        "fixed": _json_object(fixed, "--fixed"),
        "defaults": _json_object(defaults, "--defaults"),
        "is_enabled": not disabled,
    }
    address = f"/v1/agents/{part(agent_id)}/tools/{part(tool)}"
    ask_control("PUT", address, body, credential_stdin=credential_stdin)


@agents.command("unbind")
def unbind(agent_id: AgentId, tool: ToolName, credential_stdin: CredentialStdin = False) -> None:
    """Take a tool from an agent."""
    address = f"/v1/agents/{part(agent_id)}/tools/{part(tool)}"
    ask_control("DELETE", address, credential_stdin=credential_stdin)


def _own_principal() -> str:
    uid = os.getuid()
    return read_config().principal_ids.get(uid) or uid_principal_id(uid)


def _switch(agent_id: str, *, on: bool, credential_stdin: bool) -> None:
    body: JsonObject = {"is_enabled": on}
    ask_control("PATCH", f"/v1/agents/{part(agent_id)}", body, credential_stdin=credential_stdin)


def _json_object(text: str, option: str) -> JsonObject:
    try:
        value = strict_json.loads(text.encode())
    except strict_json.StrictJsonError as error:
        fail(f"{option} is {error}.", ExitCode.USAGE)
    if not isinstance(value, dict):
        fail(f"{option} takes a JSON object.", ExitCode.USAGE)
    return value
