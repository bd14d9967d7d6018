"""`fumehood tools …`: list, show and export tools; add, replace, remove, enable and disable them.

`care` has the commands that review definitions.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fumehood.cli.care import compare_tools, golden, lint_tools, show_findings
from fumehood.cli.exits import ExitCode, fail, require_tool_name
from fumehood.cli.options import (
    AsJson,
    ControlSocketPath,
    CredentialStdin,
    OfAgent,
    SocketPath,
    ToolName,
)
from fumehood.cli.plain import plain
from fumehood.cli.reach import calling, controlling
from fumehood.protocol import strict_json

if TYPE_CHECKING:
    from fumehood.core.tool import ToolDefinition

tools = typer.Typer(help="The tools of the running engine.", no_args_is_help=True)

imports = typer.Typer(help="Definitions made from documents of other kinds.", no_args_is_help=True)
tools.add_typer(imports, name="import")
tools.add_typer(golden, name="golden")
tools.command("lint")(lint_tools)
tools.command("compat")(compare_tools)

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
    from fumehood.cli.show import show_tools, wants_json

    found: list[tuple[ToolDefinition, str]] = []
    unavailable: set[str] = set()
    with calling(socket, as_json=as_json) as client:
        cursor = None
        while True:
            page = client.tools_page(
                category=category, tag=tag, type=kind, limit=100, cursor=cursor
            )
            found += [(tool, page.sources.get(tool.name, "")) for tool in page.items]
            unavailable.update(page.unavailable)
            cursor = page.pagination.next_cursor
            if cursor is None:
                break
    show_tools(found, unavailable, as_json=wants_json(as_json))


@tools.command("show")
def show_tool(
    name: ToolName,
    as_json: AsJson = False,
    socket: SocketPath = None,
) -> None:
    """Show one tool's definition, and whether calls to its service are suspended."""
    from fumehood.cli.show import circuit_words, show_json

    require_tool_name(name)
    with calling(socket, as_json=as_json) as client:
        details = client.tool(name)
    show_json(details.tool.model_dump(mode="json"))
    if details.circuit is not None:  # not on stdout, where the definition can be used again
        words = circuit_words(details.circuit)
        typer.echo(f"circuit to {details.circuit.upstream}: {words}", err=True)
    show_findings(details.findings)


@tools.command("export")
def export(
    kind: Annotated[
        str,
        typer.Option(
            "--format", help="openai, openai-responses, anthropic, gemini, mcp, or skill."
        ),
    ],
    explain: Annotated[
        bool, typer.Option("--explain", help="Show what the format cannot express instead.")
    ] = False,
    agent: OfAgent = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", help="Only this tool. Repeatable.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="With skill: the directory for SKILL.md.")
    ] = None,
    as_json: AsJson = False,
    socket: SocketPath = None,
) -> None:
    """Print the tools as a model's provider takes them, or write them as a skill."""
    from fumehood.cli.export import export_skill, export_tools

    if kind == "skill":
        if explain:
            fail("--explain is not for a skill, which loses nothing.", ExitCode.USAGE)
        export_skill(agent, only, out, socket)
        return
    if out is not None:
        fail("--out goes with --format skill.", ExitCode.USAGE)
    export_tools(kind, agent, only, socket, explain=explain, as_json=as_json)


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
    require_tool_name(name)
    document = _read(file)
    with controlling(socket, credential_stdin=credential_stdin) as client:
        show_findings(client.tools.replace(name, document).findings)


plain(
    tools,
    "tools.remove",
    "Remove a registered version.",
    arguments={"name": Pinned},
    check=require_tool_name,
)
plain(
    tools,
    "tools.enable",
    "Enable one version, or all versions, of a tool.",
    arguments={"name": ToolName},
    check=require_tool_name,
)
plain(
    tools,
    "tools.disable",
    "Disable one version, or all versions, of a tool: calls are refused.",
    arguments={"name": ToolName},
    check=require_tool_name,
)


@imports.callback()
def _group() -> None:
    """Keep the group: typer would reduce a group of one command to the command."""


@imports.command("openapi")
def import_openapi(
    document: Annotated[
        str, typer.Argument(help="A file, an http or https address, or - for standard input.")
    ],
    only: Annotated[
        list[str] | None,
        typer.Option("--only", help="Only this tool, operation or tag; * is any text. Repeatable."),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option("--out", help="Write one file for each tool into this directory."),
    ] = None,
    prefix: Annotated[
        str, typer.Option("--prefix", help="Begin the names of tools and secrets with this.")
    ] = "",
    server: Annotated[
        str | None,
        typer.Option("--server", help="The address of the service, instead of the document's."),
    ] = None,
    no_approval: Annotated[
        list[str] | None,
        typer.Option(
            "--no-approval",
            help="This tool changes something and runs without approval; * is any text. "
            "Repeatable.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files of --out.")] = False,
) -> None:
    """Make definitions of REST tools from an OpenAPI 3.0 or 3.1 document.

    Without --out they are printed as JSON, which is a file for the directory of definitions.
    """
    if out == "":  # of a variable that is not set
        fail("--out takes a directory.", ExitCode.USAGE)
    from fumehood.cli.import_openapi import import_document
    from fumehood.registry.openapi import ImportOptions

    is_address = document.startswith(("https://", "http://"))
    options = ImportOptions(
        only=tuple(only or ()),
        no_approval=tuple(no_approval or ()),
        prefix=prefix,
        server=server,
        source=document if is_address else None,
    )
    import_document(document, options, None if out is None else Path(out), force=force)


def _read(file: Path) -> dict[str, Any]:
    try:
        document = strict_json.loads(file.read_bytes())
    except OSError as error:
        fail(f"{file} cannot be read: {error.strerror}.", ExitCode.USAGE)
    except strict_json.StrictJsonError as error:
        fail(f"{file} is {error}.", ExitCode.USAGE)
    if not isinstance(document, dict):
        fail(f"{file} must hold a JSON object.", ExitCode.USAGE)
    return document
