"""`fumehood agents`: agents and their tools."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from fumehood.cli.exits import ExitCode, fail
from fumehood.cli.options import (
    AsJson,
    ControlSocketPath,
    CredentialStdin,
    SocketPath,
    TokenFile,
    ToolName,
)
from fumehood.cli.plain import Column, as_document, as_table, plain
from fumehood.cli.reach import calling, controlling
from fumehood.cli.settings import read_config
from fumehood.core.identity import uid_principal_id
from fumehood.core.json_types import JsonObject
from fumehood.protocol import strict_json

agents = typer.Typer(help="Agents: on whose behalf calls are made.", no_args_is_help=True)

AgentId = Annotated[str, typer.Argument(help="The agent's id.")]
AGENT = {"agent_id": AgentId}
Principals = Annotated[
    list[str] | None,
    typer.Option(
        "--principal", help="A principal that may act for it; repeatable; default: you (uid:N)."
    ),
]


@agents.command("create")
def create(
    agent_id: AgentId,
    description: Annotated[str, typer.Option(help="A description.")] = "",
    principal: Principals = None,
    credential_stdin: CredentialStdin = False,
    socket: ControlSocketPath = None,
) -> None:
    """Create an agent. It has no tools until you bind some."""
    principals = principal or [own_principal()]
    with controlling(socket, credential_stdin=credential_stdin) as client:
        client.agents.create(agent_id, description=description, principals=principals)


plain(
    agents,
    "agents.list",
    "List all agents.",
    as_table(
        Column("agent", lambda agent: agent.id),
        Column("enabled", lambda agent: str(agent.is_enabled)),
        Column("principals", lambda agent: ", ".join(agent.principals), drop=1),
        Column("description", lambda agent: agent.description, drop=2),
    ),
)
plain(
    agents, "agents.show", "Show one agent with its tools, as JSON.", as_document, arguments=AGENT
)


@agents.command("filter")
def filter_tools(
    agent_id: AgentId,
    category: Annotated[
        list[str] | None, typer.Option(help="Only tools of this category; repeatable.")
    ] = None,
    include_dangerous: Annotated[
        bool, typer.Option("--include-dangerous", help="Also dangerous tools.")
    ] = False,
    max_cost: Annotated[
        str | None, typer.Option(help="Only tools up to this cost per use, such as 0.05.")
    ] = None,
    at_most: Annotated[int | None, typer.Option(min=0, help="Only so many tools.")] = None,
    as_json: AsJson = False,
    token_file: TokenFile = None,
    socket: SocketPath = None,
) -> None:
    """List the tools that an agent of yours may use, and why it may not use the others."""
    from decimal import Decimal, InvalidOperation

    from fumehood.cli.show import show_json, wants_json
    from fumehood.cli.tables import Field, show_table

    try:
        cost = None if max_cost is None else Decimal(max_cost)
    except InvalidOperation:
        fail("--max-cost takes an amount such as 0.05.", ExitCode.USAGE)
    with calling(socket, as_json=as_json, token_file=token_file) as client:
        found = client.agent_tools(
            agent_id,
            categories=category,
            exclude_dangerous=not include_dangerous,
            max_cost=cost,
            at_most=at_most,
        )
    if wants_json(as_json):
        show_json(found.model_dump(mode="json", include={"items", "left_out"}))
        return
    rows = [(f"{tool.name}@{tool.version}", "yes", "") for tool in found.items]
    rows += [(one.name, "no", one.reason) for one in found.left_out]
    show_table((Field("tool"), Field("may use"), Field("reason")), rows)


plain(agents, "agents.enable", "Allow calls for an agent again.", arguments=AGENT)
plain(agents, "agents.disable", "Refuse all calls for an agent.", arguments=AGENT)
plain(agents, "agents.delete", "Delete an agent and its bindings.", arguments=AGENT)


@agents.command("bind")
def bind(
    agent_id: AgentId,
    tool: ToolName,
    order: Annotated[int, typer.Option(help="Its position among the agent's tools.")] = 0,
    fixed: Annotated[
        str, typer.Option(help="Fixed arguments that the agent neither sees nor gives, as JSON.")
    ] = "{}",
    defaults: Annotated[
        str, typer.Option(help="Defaults for arguments that the agent leaves out, as JSON.")
    ] = "{}",
    disabled: Annotated[bool, typer.Option("--disabled", help="Bind it disabled.")] = False,
    credential_stdin: CredentialStdin = False,
    socket: ControlSocketPath = None,
) -> None:
    """Bind a tool to an agent, or change its binding."""
    always, otherwise = _json_object(fixed, "--fixed"), _json_object(defaults, "--defaults")
    with controlling(socket, credential_stdin=credential_stdin) as client:
        client.agents.bind(
            agent_id,
            tool,
            sort_order=order,
            fixed=always,
            defaults=otherwise,
            is_enabled=not disabled,
        )


plain(
    agents, "agents.unbind", "Unbind a tool from an agent.", arguments={**AGENT, "tool": ToolName}
)


def own_principal() -> str:
    """Return the principal of the user who runs this command."""
    uid = os.getuid()
    return read_config().principal_ids.get(uid) or uid_principal_id(uid)


def _json_object(text: str, option: str) -> JsonObject:
    try:
        value = strict_json.loads(text.encode("utf-8", "surrogateescape"))
    except strict_json.StrictJsonError as error:
        fail(f"{option} is {error}.", ExitCode.USAGE)
    if not isinstance(value, dict):
        fail(f"{option} takes a JSON object.", ExitCode.USAGE)
    return value
