"""`fumehood tools add|replace|remove|enable|disable`: change what the engine offers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fumehood.cli.control import CredentialStdin
from fumehood.cli.exits import ExitCode, fail, require_tool_name
from fumehood.cli.reach import ControlSocketPath, controlling
from fumehood.cli.tools import tools
from fumehood.protocol import strict_json

__all__ = ["tools"]

DefinitionFile = Annotated[Path, typer.Argument(help="A file with the definition as JSON.")]
ToolName = Annotated[str, typer.Argument(help="name or name@version")]
Pinned = Annotated[str, typer.Argument(help="name@version")]


@tools.command("add")
def add(
    file: DefinitionFile,
    credential_stdin: CredentialStdin = False,
    socket: ControlSocketPath = None,
) -> None:
    """Register one version of a REST or MCP tool. Needs a credential with admin."""
    document = _read(file)
    with controlling(socket, credential_stdin=credential_stdin) as client:
        client.tools.add(document)


@tools.command("replace")
def replace(
    name: Pinned,
    file: DefinitionFile,
    credential_stdin: CredentialStdin = False,
    socket: ControlSocketPath = None,
) -> None:
    """Put another definition in place of a registered one."""
    require_tool_name(name)
    document = _read(file)
    with controlling(socket, credential_stdin=credential_stdin) as client:
        client.tools.replace(name, document)


@tools.command("remove")
def remove(
    name: Pinned,
    credential_stdin: CredentialStdin = False,
    socket: ControlSocketPath = None,
) -> None:
    """Forget a registered version."""
    require_tool_name(name)
    with controlling(socket, credential_stdin=credential_stdin) as client:
        client.tools.remove(name)


@tools.command("enable")
def enable(
    name: ToolName,
    credential_stdin: CredentialStdin = False,
    socket: ControlSocketPath = None,
) -> None:
    """Switch one version, or every version, of a tool on."""
    require_tool_name(name)
    with controlling(socket, credential_stdin=credential_stdin) as client:
        client.tools.enable(name)


@tools.command("disable")
def disable(
    name: ToolName,
    credential_stdin: CredentialStdin = False,
    socket: ControlSocketPath = None,
) -> None:
    """Switch one version, or every version, of a tool off: calls are refused."""
    require_tool_name(name)
    with controlling(socket, credential_stdin=credential_stdin) as client:
        client.tools.disable(name)


def _read(file: Path) -> dict[str, Any]:
    try:
        document = strict_json.loads(file.read_bytes())
    except OSError as error:
        fail(f"{file} cannot be read: {error.strerror}.", ExitCode.USAGE)
    except strict_json.StrictJsonError as error:
        fail(f"{file} is {error}.", ExitCode.USAGE)
    if not isinstance(document, dict):
        fail(f"{file} holds no JSON object.", ExitCode.USAGE)
    return document
