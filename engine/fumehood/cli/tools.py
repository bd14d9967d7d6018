"""`fumehood tools list|show`: what the daemon offers."""

from __future__ import annotations

from typing import Annotated

import typer

from fumehood.cli.exits import ExitCode, exit_code_of, fail, require_tool_name
from fumehood.cli.settings import read_config, read_socket_path

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
) -> None:
    """List the tools, each with where it comes from."""
    from fumehood.cli.show import show_envelope, show_tools, wants_json
    from fumehood.client import Client, DaemonUnavailable, Refused

    try:
        with Client(read_socket_path(read_config())) as client:
            asked = {"category": category, "tag": tag, "type": kind}
            filters = {name: value for name, value in asked.items() if value is not None}
            found = list(client.tools_and_sources(**filters))
    except DaemonUnavailable as error:
        fail(str(error), ExitCode.UNAVAILABLE)
    except Refused as refused:
        show_envelope(refused.envelope, as_json=wants_json(as_json))
        raise typer.Exit(exit_code_of(refused.envelope)) from None
    show_tools(found, as_json=wants_json(as_json))


@tools.command("show")
def show_tool(
    name: Annotated[str, typer.Argument(help="name or name@version")], as_json: AsJson = False
) -> None:
    """Show one tool's definition."""
    from fumehood.cli.show import show_envelope, show_json, wants_json
    from fumehood.client import Client, DaemonUnavailable

    require_tool_name(name)
    try:
        with Client(read_socket_path(read_config())) as client:
            envelope = client.tool(name)
    except DaemonUnavailable as error:
        fail(str(error), ExitCode.UNAVAILABLE)
    if envelope.error is None:
        show_json(envelope.data["tool"])
    else:
        show_envelope(envelope, as_json=wants_json(as_json))
    raise typer.Exit(exit_code_of(envelope))
