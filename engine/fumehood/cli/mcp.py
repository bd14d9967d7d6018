"""`fumehood mcp`: the engine's tools for a client of the Model Context Protocol."""

from __future__ import annotations

import shutil
import signal
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from fumehood.cli.escaping import say
from fumehood.cli.exits import ExitCode, fail
from fumehood.cli.options import SocketPath
from fumehood.cli.plain_values import PlainCommand, with_plain_values
from fumehood.cli.settings import find_socket

NEW = "new"

PLACES = {
    "claude-code": (".mcp.json", "in the project, or run: claude mcp add-json fumehood '…'"),
    "claude-desktop": ("claude_desktop_config.json", "opened from its settings, Developer"),
    "codex": ("~/.codex/config.toml", "as a table of its own"),
    "cursor": (".cursor/mcp.json", "in the project, or ~/.cursor/mcp.json"),
    "gemini-cli": (".gemini/settings.json", "in the project, or ~/.gemini/settings.json"),
    "vscode": (".vscode/mcp.json", "in the workspace"),
    "windsurf": ("~/.codeium/windsurf/mcp_config.json", "for all projects"),
}
"""Clients: the file that the snippet belongs into, and where that is."""


class PlainGroup(TyperGroup):
    """A group whose options need no pydantic: clients start this command for every call."""

    def get_params(self, ctx: Any) -> Any:
        """Return the options, including `--help`."""
        return with_plain_values(super().get_params(ctx))


mcp = typer.Typer(
    cls=PlainGroup,
    help="Serve an MCP client over standard input and output.",
    invoke_without_command=True,
)

Agent = Annotated[str | None, typer.Option(help="The agent to make the calls for.")]
Session = Annotated[
    str | None,
    typer.Option(metavar="ID|new", help="The session to make the calls in; new: one of its own."),
]
Wait = Annotated[
    float | None,
    typer.Option(metavar="SECONDS", help="How long a call waits for approval, if it is needed."),
]


@mcp.callback()
def serve(
    context: typer.Context,
    agent: Agent = None,
    session: Session = None,
    wait: Wait = None,
    socket: SocketPath = None,
) -> None:
    """Serve an MCP client over standard input and output.

    The running engine makes the calls, as this user or its agent. The client starts this command;
    `fumehood mcp config --client NAME` prints what to put into its configuration.
    """
    if context.invoked_subcommand is not None:
        return
    if wait is not None and not 0 < wait < float("inf"):
        fail("--wait takes a number of seconds over 0.", ExitCode.USAGE)
    from fumehood.mcp.stdio import Unavailable, ask_daemon
    from fumehood.mcp.stdio import serve as serve_client

    path = find_socket(socket)
    signal.signal(signal.SIGTERM, _end)
    try:
        try:
            ask_daemon(path, "GET", "/v1/health")
        except Unavailable as error:  # which each call says as well, until there is an engine
            say(str(error), to_stderr=True)
        if sys.stdin.isatty():
            say(
                "An MCP client speaks here, in lines of JSON. Ctrl-C stops it. To set one up:\n"
                "  fumehood mcp config --client claude-code",
                to_stderr=True,
            )
        named = None if session == NEW else session
        chosen = {"agent_id": agent, "session_id": named, "wait": wait}
        query = {key: str(value) for key, value in chosen.items() if value is not None}
        serve_client(path, query, has_own_session=session == NEW)
    except Unavailable as error:
        print(f"The session could not be ended: {error}", file=sys.stderr)


@mcp.command("config", cls=PlainCommand)
def config(
    client: Annotated[str, typer.Option(help=f"One of: {', '.join(PLACES)}.")] = "",
    agent: Agent = None,
    session: Session = NEW,
    wait: Wait = None,
    socket: SocketPath = None,
) -> None:
    """Print what to put into a client's configuration."""
    if client not in PLACES:
        fail(f"--client takes one of: {', '.join(PLACES)}.", ExitCode.USAGE)
    arguments = ["mcp"]
    where = str(find_socket(socket))  # clients pass on hardly any variable that would name it
    for option, value in (
        ("--agent", agent), ("--session", session), ("--wait", wait), ("--socket", where),
    ):  # fmt: skip
        if value is not None:
            arguments += [option, f"{value:g}" if isinstance(value, float) else value]
    file, place = PLACES[client]
    say(f"Put this into {file} ({place}):", to_stderr=True)
    say(_snippet(client, _executable(), arguments))


@mcp.command("add", cls=PlainCommand)
def add(
    name: Annotated[str, typer.Argument(help="The server's name: its tools become NAME__TOOL.")],
    command: Annotated[
        list[str] | None, typer.Argument(help="After --: the server's program and its arguments.")
    ] = None,
    url: Annotated[str | None, typer.Option(help="The address of a server over HTTP.")] = None,
    place: Annotated[
        str | None, typer.Option(help="container (the default), or host: without a sandbox.")
    ] = None,
    image: Annotated[str | None, typer.Option(help="The image of the container.")] = None,
    harmless: Annotated[
        list[str] | None, typer.Option(metavar="TOOL", help="A tool that is not dangerous.")
    ] = None,
    env: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="A variable of the program.")
    ] = None,
    header: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="A header, with --url.")
    ] = None,
) -> None:
    """Add an MCP server whose tools become the engine's to the configuration file.

    The daemon reads the file when it starts.
    """
    from fumehood.cli.mcp_servers import add_server

    given = {"command": command, "url": url, "place": place, "image": image, "harmless": harmless}
    pairs = {"env": env, "headers": header}
    add_server(name, {**given, **{key: _pairs(each or []) for key, each in pairs.items()}})


@mcp.command("remove", cls=PlainCommand)
def remove(name: Annotated[str, typer.Argument(help="The server's name.")]) -> None:
    """Take an MCP server out of the configuration file."""
    from fumehood.cli.mcp_servers import remove_server

    remove_server(name)


def _pairs(words: list[str]) -> dict[str, str]:
    for word in words:
        if "=" not in word:
            fail(f"{word!r} is no NAME=VALUE.", ExitCode.USAGE)
    return dict(word.split("=", 1) for word in words)


def _snippet(client: str, command: str, arguments: list[str]) -> str:
    from fumehood.protocol.strict_json import dumps

    if client == "codex":  # a JSON text is a TOML text, too
        words = ", ".join(dumps(word).decode() for word in arguments)
        return f"[mcp_servers.fumehood]\ncommand = {dumps(command).decode()}\nargs = [{words}]"
    import json

    server: dict[str, Any] = {"command": command, "args": arguments}
    if client in ("claude-code", "vscode"):
        server = {"type": "stdio", **server}
    key = "servers" if client == "vscode" else "mcpServers"
    return json.dumps({key: {"fumehood": server}}, indent=2)


def _executable() -> str:
    """This command's own path: a client from a desktop has another PATH."""
    own = Path(sys.argv[0])
    found = shutil.which("fumehood") if own.name != "fumehood" else str(own.absolute())
    return found or "fumehood"


def _end(*_: object) -> NoReturn:
    raise SystemExit(0)
