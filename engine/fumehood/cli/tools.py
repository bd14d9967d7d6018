"""`fumehood tools list|show`: what the daemon offers."""

from __future__ import annotations

from typing import Annotated

import typer

from fumehood.cli.exits import require_tool_name
from fumehood.cli.reach import SocketPath, calling

tools = typer.Typer(help="The tools of the running engine.", no_args_is_help=True)

AsJson = Annotated[bool, typer.Option("--json", help="As JSON.")]


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
    """List the tools, each with where it comes from."""
    from fumehood.cli.show import show_tools, wants_json

    asked = {"category": category, "tag": tag, "type": kind}
    filters = {name: value for name, value in asked.items() if value is not None}
    with calling(socket, as_json=as_json) as client:
        found = client.tools_and_sources(**filters)
    show_tools(found, as_json=wants_json(as_json))


@tools.command("show")
def show_tool(
    name: Annotated[str, typer.Argument(help="name or name@version")],
    as_json: AsJson = False,
    socket: SocketPath = None,
) -> None:
    """Show one tool's definition."""
    from fumehood.cli.show import show_json

    require_tool_name(name)
    with calling(socket, as_json=as_json) as client:
        details = client.tool(name)
    show_json(details.tool.model_dump(mode="json"))
