"""`fumehood tools …`: list, show, add, replace, remove, enable and disable tools."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from fumehood.cli.exits import say
from fumehood.cli.options import (
    AsJson,
    ControlSocketPath,
    CredentialStdin,
    SocketPath,
    ToolName,
    json_object,
    pages,
    read_bytes,
)
from fumehood.cli.plain import plain
from fumehood.cli.reach import calling, controlling
from fumehood.cli.show import circuit_words, show_json, show_tools, wants_json
from fumehood.core.escaping import visible
from fumehood.core.json_types import JsonObject
from fumehood.core.tool import ToolDefinition

tools = typer.Typer(help="The tools of the running engine.", no_args_is_help=True)

DefinitionFile = Annotated[Path, typer.Argument(help="A file with the definition as JSON.")]
Pinned = Annotated[str, typer.Argument(help="name@version")]


@tools.command("list")
def list_tools(
    category: Annotated[str | None, typer.Option(help="Only this category.")] = None,
    tag: Annotated[str | None, typer.Option(help="Only tools with this tag.")] = None,
    kind: Annotated[
        str | None, typer.Option("--type", help="BUILTIN, NATIVE, REST or MCP only.")
    ] = None,
    as_json: AsJson = False,
    socket: SocketPath = None,
) -> None:
    """List the tools with their sources."""
    found: list[tuple[ToolDefinition, str]] = []
    unavailable: set[str] = set()
    with calling(socket, as_json=as_json) as client:
        fetch = partial(client.tools_page, category=category, tag=tag, type=kind, limit=100)
        for page in pages(fetch):
            found += [(tool, page.sources.get(tool.name, "")) for tool in page.items]
            unavailable.update(page.unavailable)
    show_tools(found, unavailable, as_json=wants_json(as_json))


@tools.command("show")
def show_tool(
    name: ToolName,
    as_json: AsJson = False,
    socket: SocketPath = None,
) -> None:
    """Show one tool's definition, and whether calls to its service are suspended."""
    with calling(socket, as_json=as_json) as client:
        details = client.tool(name)
    show_json(details.tool.model_dump(mode="json"))
    if details.circuit is not None:  # not on stdout, where the definition can be used again
        words = circuit_words(details.circuit)
        typer.echo(f"circuit to {details.circuit.upstream}: {words}", err=True)
    show_findings(details.findings)


@tools.command("add")
def add(
    file: DefinitionFile,
    credential_stdin: CredentialStdin = False,
    socket: ControlSocketPath = None,
) -> None:
    """Register one version of a REST or MCP tool. Needs a credential with admin."""
    document = _read(file)
    with controlling(socket, credential_stdin=credential_stdin) as client:
        show_findings(client.tools.add(document).findings)


@tools.command("replace")
def replace(
    name: Pinned,
    file: DefinitionFile,
    credential_stdin: CredentialStdin = False,
    socket: ControlSocketPath = None,
) -> None:
    """Replace the definition of a registered version."""
    document = _read(file)
    with controlling(socket, credential_stdin=credential_stdin) as client:
        show_findings(client.tools.replace(name, document).findings)


plain(
    tools,
    "tools.remove",
    "Remove a registered version.",
    arguments={"name": Pinned},
)
plain(
    tools,
    "tools.enable",
    "Enable one version, or all versions, of a tool.",
    arguments={"name": ToolName},
)
plain(
    tools,
    "tools.disable",
    "Disable one version, or all versions, of a tool: calls are refused.",
    arguments={"name": ToolName},
)


def _read(file: Path) -> JsonObject:
    return json_object(read_bytes(str(file), str(file)), str(file))


def show_findings(findings: Any) -> None:
    """Print the findings about a registered tool on standard error."""
    for each in findings:
        say(visible(f"{each.rule}: {each.path}: {each.message}. {each.remedy}"), to_stderr=True)
