"""`fumehood mcp`: serves the engine's tools to MCP clients, and configures the MCP servers that the
engine uses.

`add` and `remove` change the tables `[mcp_servers.NAME]` of the configuration file. A daemon that
is running keeps the configuration with which it started. These commands give a user no additional
rights, because the user must be able to write the file and to restart the daemon. The rest of the
file stays as it is, including comments. A change that would affect more than one table is refused.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import stat
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from fumehood.cli.exits import ExitCode, fail, say
from fumehood.cli.options import (
    PlainCommand,
    PlainGroup,
    SocketPath,
    directory,
    local,
    pairs_of,
    require_seconds,
)
from fumehood.cli.reach import find_socket
from fumehood.core.json_types import JsonObject
from fumehood.protocol.engine_paths import config_file
from fumehood.protocol.strict_json import decoded, dumps

NEW = "new"

PLACES = {
    "claude-code": (".mcp.json", "in the project, or run: claude mcp add-json fumehood '…'"),
    "claude-desktop": ("claude_desktop_config.json", "opened from its settings, Developer"),
    "cline": ("cline_mcp_settings.json", "opened from MCP Servers, Configure"),
    "codex": ("~/.codex/config.toml", "as a table of its own"),
    "copilot-cli": ("~/.copilot/mcp-config.json", "or .mcp.json in the project"),
    "cursor": (".cursor/mcp.json", "in the project, or ~/.cursor/mcp.json"),
    "gemini-cli": (".gemini/settings.json", "in the project, or ~/.gemini/settings.json"),
    "goose": ("~/.config/goose/config.yaml", "beside the entries of its extensions"),
    "opencode": ("opencode.json", "in the project, or ~/.config/opencode/opencode.json"),
    "vscode": (".vscode/mcp.json", "in the workspace"),
    "windsurf": ("~/.codeium/windsurf/mcp_config.json", "for all projects"),
    "zed": ("~/.config/zed/settings.json", "opened by the command zed: open settings"),
}
"""Client → the file into which the printed settings belong, and a hint where this file is."""

TIME_LIMITS = {
    "claude-code": ("timeout", 1000),
    "cline": ("timeout", 1),
    "codex": ("tool_timeout_sec", 1),
    "copilot-cli": ("timeout", 1000),
    "gemini-cli": ("timeout", 1000),
    "goose": ("timeout", 1),
    "opencode": ("timeout", 1000),
    "zed": ("timeout", 1),
}
"""Client → its setting for the timeout of a call: the name of the setting, and how many of its
units make a second. Clients that are missing here have no such setting.
"""

RUN_S = 120
"""Seconds that are added to `--wait` for the client's timeout. This is the time that a call has to
run after a human's decision.
"""


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
Preset = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="The preset of a session of its own, as with --session new."),
]
Project = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        help="Copy a project into a session of its own, as with --session new.",
    ),
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
    preset: Preset = None,
    project: Project = None,
    wait: Wait = None,
    socket: SocketPath = None,
) -> None:
    """Serve an MCP client over standard input and output.

    The running engine makes the calls, as this user or its agent. The client starts this command;
    `fumehood mcp config --client NAME` prints what to put into its configuration.
    """
    if context.invoked_subcommand is not None:
        return
    require_seconds(wait, "--wait")
    top = directory(project)
    session = _session_with(session, {"--preset": preset, "--project": project})
    from fumehood.mcp.server.stdio import Unavailable
    from fumehood.mcp.server.stdio import serve as serve_client

    path = find_socket(socket)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        if sys.stdin.isatty():
            say(
                "An MCP client speaks here, in lines of JSON. Ctrl-C stops it. To set one up:\n"
                "  fumehood mcp config --client claude-code",
                to_stderr=True,
            )
        named = None if session == NEW else session
        chosen = {"agent_id": agent, "session_id": named, "wait": wait}
        query = {key: str(value) for key, value in chosen.items() if value is not None}
        serve_client(
            path, query, has_own_session=session == NEW, preset=preset,
            project=None if top is None else top.resolve(),
        )  # fmt: skip
    except Unavailable as error:
        print(f"The session could not be ended: {error}", file=sys.stderr)


@mcp.command("config", cls=PlainCommand)
def config(
    client: Annotated[str, typer.Option(help=f"One of: {', '.join(PLACES)}.")] = "",
    agent: Agent = None,
    session: Session = NEW,
    preset: Preset = None,
    project: Project = None,
    wait: Wait = None,
    socket: SocketPath = None,
) -> None:
    """Print what to put into a client's configuration."""
    if client not in PLACES:
        fail(f"--client takes one of: {', '.join(PLACES)}.", ExitCode.USAGE)
    arguments = ["mcp"]
    top = directory(project)
    where = str(find_socket(socket))  # clients hardly pass on environment variables
    described = {
        "--preset": preset,
        "--project": None if top is None else str(top.resolve()),
    }
    for option, value in (
        ("--agent", agent), ("--session", _session_with(session, described)), *described.items(),
        ("--wait", wait), ("--socket", where),
    ):  # fmt: skip
        if value is not None:
            arguments += [option, f"{value:g}" if isinstance(value, float) else value]
    file, place = PLACES[client]
    say(f"Put this into {file} ({place}):", to_stderr=True)
    if wait is not None and client not in TIME_LIMITS:
        say(
            f"{client} has no setting for how long it waits for a call. If it gives up before the "
            "time of --wait, repeat the call after the decision.",
            to_stderr=True,
        )
    say(_snippet(client, _executable(), arguments, wait))


def _session_with(session: str | None, described: Mapping[str, object]) -> str | None:
    """Return the session to use: `new` if an option describes a new session, otherwise `session`,
    the value of `--session`.

    `described` maps the options that describe a new session to their values, or None for options
    that are not given. If such an option is given although `session` names an existing session, end
    the command with an error.
    """
    given = [option for option, value in described.items() if value is not None]
    if given and session not in (None, NEW):
        fail(f"{given[0]} makes a session: leave --session out.", ExitCode.USAGE)
    return NEW if given else session


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
    network: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST", help="A host that it may reach from its container."),
    ] = None,
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
    given = {
        "command": command, "url": url, "place": place, "image": image, "network": network,
        "harmless": harmless,
    }  # fmt: skip
    pairs = {"env": env, "headers": header}
    _add_server(name, {**given, **{key: pairs_of(each or []) for key, each in pairs.items()}})


@mcp.command("remove", cls=PlainCommand)
def remove(name: Annotated[str, typer.Argument(help="The server's name.")]) -> None:
    """Take an MCP server out of the configuration file."""
    _remove_server(name)


def _snippet(client: str, command: str, arguments: list[str], wait: float | None) -> str:
    server: dict[str, Any] = {"command": command, "args": arguments}
    match client:
        case "claude-code" | "vscode":
            server = {"type": "stdio", **server}
        case "copilot-cli":
            server = {"type": "local", **server, "tools": ["*"]}
        case "goose":
            server = {"enabled": True, "type": "stdio", "name": "fumehood", "cmd": command,
                      "args": arguments}  # fmt: skip
        case "opencode":
            server = {"type": "local", "command": [command, *arguments], "enabled": True}
    if wait is not None and client in TIME_LIMITS:
        key, units = TIME_LIMITS[client]
        server[key] = math.ceil(wait + RUN_S) * units
    # The JSON values here are also valid in TOML and YAML.
    if client == "codex":
        return "\n".join(["[mcp_servers.fumehood]", *_lines(server, " = ")])
    if client == "goose":
        return "\n  ".join(["extensions:", "fumehood:", *_lines(server, ": ", "  ")])
    place = {"opencode": "mcp", "vscode": "servers", "zed": "context_servers"}
    return json.dumps({place.get(client, "mcpServers"): {"fumehood": server}}, indent=2)


def _lines(server: dict[str, Any], sign: str, indent: str = "") -> list[str]:
    return [
        f"{indent}{key}{sign}{json.dumps(value, ensure_ascii=False)}"
        for key, value in server.items()
    ]


def _executable() -> str:
    """Return the absolute path of this command, because a client that is started from a desktop may
    have another PATH.
    """
    own = Path(sys.argv[0])
    found = shutil.which("fumehood") if own.name != "fumehood" else str(own.absolute())
    return found or "fumehood"


# -- the configuration file --------------------------------------------------------------


NEXT_START = "A daemon reads it when it starts: restart one that runs."


def _add_server(name: str, given: JsonObject) -> None:
    """Append a table for the server `name` to the configuration file. `given` contains the settings
    of the server.
    """
    from pydantic import TypeAdapter, ValidationError

    from fumehood.mcp.client.settings import AllMcpServers

    server = {key: value for key, value in given.items() if value}
    try:
        TypeAdapter(AllMcpServers).validate_python({name: server})
    except ValidationError as error:
        faults = error.errors(include_url=False, include_input=False)
        fail("; ".join(_fault_words(name, fault) for fault in faults), ExitCode.USAGE)
    file, text, document = _read_file()
    servers = document.get("mcp_servers", {})
    if name in servers:
        fail(f"{file} has a server {name} already: remove it first.", ExitCode.USAGE)
    gap = "" if not text else "\n" if text.endswith("\n") else "\n\n"
    lines = [f"[mcp_servers.{name}]", *(f"{key} = {_toml(server[key])}" for key in server), ""]
    after = text + gap + "\n".join(lines)
    _replace(file, after, {**document, "mcp_servers": {**servers, name: server}})
    but = ", but for those of --harmless" if "harmless" in server else ""
    say(f"Added {name} to {file}. Its tools, {name}__…, are dangerous{but}. {NEXT_START}")


def _remove_server(name: str) -> None:
    """Remove the table of the server `name` from the configuration file."""
    file, text, document = _read_file()
    servers = dict(document.get("mcp_servers", {}))
    if servers.pop(name, None) is None:
        fail(f"{file} has no server {name}.", ExitCode.USAGE)
    own = re.compile(rf"\[\s*mcp_servers\s*\.\s*([\"']?){re.escape(name)}\1\s*[].]")
    tables = re.split(r"^(?=[ \t]*\[)", text, flags=re.MULTILINE)
    kept = [_remarks_after(one) if own.match(one.lstrip()) else one for one in tables]
    _replace(file, "".join(kept), {**document, "mcp_servers": servers})
    say(f"Removed {name} from {file}. {NEXT_START}")


def _remarks_after(table: str) -> str:
    """Return the empty lines and comments at the end of the text of a TOML table. They belong to
    the next table in the file.
    """
    found = re.search(r"(?:^[ \t]*(?:#.*)?\n)*\Z", table, re.MULTILINE)
    return found[0] if found is not None else ""


def _read_file() -> tuple[Path, str, JsonObject]:
    import tomllib

    file = config_file(os.environ).absolute()
    try:
        text = decoded(file.read_bytes()) if file.exists() else ""
        return file, text, tomllib.loads(text)
    except (OSError, ValueError) as error:
        fail(f"{file} cannot be read: {error}", ExitCode.USAGE)


def _replace(file: Path, text: str, expected: JsonObject) -> None:
    """Replace the content of the configuration file by `text`, atomically. Its owner and mode stay
    the same.

    If `text` does not parse to `expected`, end the command without a change.
    """
    import tomllib

    from fumehood.client.files import new_file

    found = None
    with suppress(ValueError):
        found = {"mcp_servers": {}, **tomllib.loads(text)}
    if found != expected:
        fail(f"{file} has a form that cannot be changed here. Edit it by hand.", ExitCode.USAGE)
    file = file.resolve()
    with local(file, "cannot be written"):
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with new_file(file, replace=True, mode=0o600) as made:
            if file.exists():
                os.fchown(made.fileno(), file.stat().st_uid, file.stat().st_gid)
                os.fchmod(made.fileno(), stat.S_IMODE(file.stat().st_mode))
            made.write(text.encode())


def _fault_words(name: str, fault: Any) -> str:
    path = ".".join(str(part) for part in fault["loc"] if part not in (name, "[key]"))
    return f"{path or name}: {fault['msg'].removeprefix('Value error, ')}"


def _toml(value: Any) -> str:
    """Return a value in the syntax of TOML. Strings are written in the syntax of JSON, which TOML
    also accepts.
    """
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{_toml(key)} = {_toml(each)}' for key, each in value.items())} }}"
    if isinstance(value, str):
        return dumps(value).decode()
    return f"[{', '.join(map(_toml, value))}]"
