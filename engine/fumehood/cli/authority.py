"""`fumehood agents`, `approvers` and `tokens`: permissions to call, approve and administer."""

from __future__ import annotations

import os
import re
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from functools import partial
from typing import Annotated

import typer

from fumehood.cli.exits import ExitCode, fail
from fumehood.cli.options import (
    AsJson,
    ControlSocketPath,
    CredentialStdin,
    Network,
    SocketPath,
    TokenFile,
    ToolName,
    deadline,
    json_object,
)
from fumehood.cli.plain import plain
from fumehood.cli.reach import calling, controlling, read_config, show_secret
from fumehood.cli.show import (
    Column,
    as_document,
    as_table,
    show_json,
    show_table,
    wants_json,
)
from fumehood.core.identity import uid_principal_id

agents = typer.Typer(help="Agents: on whose behalf calls are made.", no_args_is_help=True)

AgentId = Annotated[str, typer.Argument(help="The agent's id.")]
AGENT = {"agent_id": AgentId}
Principals = Annotated[
    list[str] | None,
    typer.Option(
        "--principal", help="A principal that may act for it; repeatable; default: you (uid:N)."
    ),
]

Presets = Annotated[
    list[str] | None,
    typer.Option(
        "--preset",
        help="The only presets with which its sessions are made, the first one by default; "
        "repeatable.",
    ),
]


@agents.command("create")
def create(
    agent_id: AgentId,
    description: Annotated[str, typer.Option(help="A description.")] = "",
    principal: Principals = None,
    network: Network = None,
    preset: Presets = None,
    credential_stdin: CredentialStdin = False,
    socket: ControlSocketPath = None,
) -> None:
    """Create an agent. It has no tools until you bind some."""
    principals = principal or [own_principal()]
    with controlling(socket, credential_stdin=credential_stdin) as client:
        client.agents.create(
            agent_id, description=description, principals=principals, network=network,
            presets=preset,
        )  # fmt: skip


@agents.command("update")
def update(
    agent_id: AgentId,
    description: Annotated[str | None, typer.Option(help="A description.")] = None,
    principal: Annotated[
        list[str] | None,
        typer.Option("--principal", help="A principal that may act for it; repeatable."),
    ] = None,
    network: Network = None,
    preset: Presets = None,
    credential_stdin: CredentialStdin = False,
    socket: ControlSocketPath = None,
) -> None:
    """Change an agent. What is left out stays; an empty --preset or --network removes them all."""
    with controlling(socket, credential_stdin=credential_stdin) as client:
        client.agents.update(
            agent_id,
            description=description,
            principals=principal,
            network=_without_empty(network),
            presets=_without_empty(preset),
        )


def _without_empty(words: list[str] | None) -> list[str] | None:
    return None if words is None else [word for word in words if word]


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
    show_table((Column("tool"), Column("may use"), Column("reason")), rows)


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
    always, otherwise = json_object(fixed, "--fixed"), json_object(defaults, "--defaults")
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
    """Return the id of the principal that belongs to the user who runs this command."""
    uid = os.getuid()
    return read_config().principal_ids.get(uid) or uid_principal_id(uid)


approvers = typer.Typer(help="People who may approve calls or administer.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="A name for the approver.")]


@approvers.command("init")
def init(name: Name = "owner") -> None:
    """Create the first approver, while no engine runs. Its credential is shown once."""
    from fumehood.core.errors import EngineError
    from fumehood.identity.approvers import ADD, make_first_approver
    from fumehood.storage.database import FILE_NAME, open_database
    from fumehood.storage.directory import InUse, hold_lock, private_directory
    from fumehood.storage.errors import StoreError

    show = partial(show_secret, what="credential")
    config = read_config()
    state, url = config.state_directory, config.state.secret_url
    try:
        with hold_lock(private_directory(state) / "engine.lock", "this state directory"):
            database = open_database(state / FILE_NAME, url=url)
            try:
                make_first_approver(database, name, datetime.now(UTC), show)
            finally:
                database.close()
    except EngineError as refusal:
        fail(refusal.message, ExitCode.TOOL_FAILED)
    except InUse:
        fail(
            "An engine uses this state directory. Stop it, run `fumehood approvers init` again, "
            f"and start it. If there has been an approver: {ADD}.",
            ExitCode.UNAVAILABLE,
        )
    except StoreError as error:
        fail(str(error), ExitCode.UNAVAILABLE)


@approvers.command("add")
def add(
    name: Name,
    admin: Annotated[bool, typer.Option("--admin", help="May also administer.")] = False,
    credential_stdin: CredentialStdin = False,
    socket: ControlSocketPath = None,
) -> None:
    """Add an approver. Needs a credential with admin."""
    scopes = ["approve", "admin"] if admin else ["approve"]
    with controlling(socket, credential_stdin=credential_stdin) as client:
        made = client.approvers.add(name, scopes=scopes)
    show_secret(made.secret, "credential")


plain(
    approvers,
    "approvers.list",
    "List the current approvers.",
    as_table(
        Column("name", lambda one: one.name),
        Column("scopes", lambda one: ", ".join(one.scopes)),
        Column("since (UTC)", lambda one: f"{one.created_at:%Y-%m-%d %H:%M}", drop=1),
        Column("by", lambda one: one.created_by, drop=2),
    ),
)


plain(approvers, "approvers.remove", "Remove an approver immediately.", arguments={"name": Name})


tokens = typer.Typer(help="Tokens: principals with scopes and agents.", no_args_is_help=True)


@tokens.command("new")
def new(
    name: Annotated[str, typer.Argument(help="A name that says what the token is for.")],
    scope: Annotated[
        list[str] | None, typer.Option(help="call (the default), approve or admin; repeatable.")
    ] = None,
    agent: Annotated[
        list[str] | None, typer.Option(help="An agent it may act for; repeatable.")
    ] = None,
    principal: Annotated[
        str | None, typer.Option(help="The principal it authenticates; default: token:NAME.")
    ] = None,
    expires: Annotated[
        str | None,
        typer.Option(
            help="When it expires: a duration (90m, 12h, 30d) or a time (2026-01-31T09:30)."
        ),
    ] = None,
    credential_stdin: CredentialStdin = False,
    socket: ControlSocketPath = None,
) -> None:
    """Create a token; it is shown once. Needs a credential with admin."""
    expires_at = deadline(expires, datetime.now(UTC), "--expires") if expires is not None else None
    with controlling(socket, credential_stdin=credential_stdin) as client:
        made = client.tokens.new(
            name,
            principal_id=principal,
            scopes=scope or ["call"],
            agents=agent or [],
            expires_at=expires_at,
        )
    show_secret(made.secret, "token")


plain(
    tokens,
    "tokens.list",
    "List all tokens, without their secrets.",
    as_table(
        Column("id", lambda token: token.id, whole=True),
        Column("name", lambda token: token.name),
        Column("principal", lambda token: token.principal_id, drop=1),
        Column("scopes", lambda token: ", ".join(token.scopes), drop=3),
        Column("agents", lambda token: ", ".join(token.agents), drop=4),
        Column("expires (UTC)", lambda token: _minute(token.expires_at), drop=2),
        Column("valid", lambda token: str(token.is_valid)),
    ),
)


def _minute(moment: datetime | None) -> str:
    return "" if moment is None else f"{moment:%Y-%m-%d %H:%M}"


def _require_id(token_id: str) -> None:
    if not re.fullmatch(r"[0-9a-f]{1,64}", token_id):
        fail(
            "That is not a token's id. `fumehood tokens list` shows the ids; in a token, it is the "
            "part between the first two underscores.",
            ExitCode.USAGE,
        )


TokenId = Annotated[str, typer.Argument(help="The token's id, as shown by `tokens list`.")]
plain(
    tokens,
    "tokens.revoke",
    "Revoke a token immediately.",
    arguments={"token_id": TokenId},
    check=_require_id,
)
