"""`fumehood tools export`: tools in a provider's format, its losses, or a SKILL.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from fumehood.cli.escaping import visible
from fumehood.cli.exits import ExitCode, fail
from fumehood.cli.reach import calling
from fumehood.cli.show import show_json, wants_json
from fumehood.cli.skill import FILE_NAME, skill_text


def export_tools(
    kind: Any,
    agent: str | None,
    only: list[str] | None,
    socket: Path | None,
    *,
    explain: bool,
    as_json: bool,
) -> None:
    """Print the tools, or with `explain` what the format cannot express."""
    with calling(socket, as_json=as_json) as client:
        found = client.export_with_losses(kind, agent_id=agent, tools=only)
    losses = [loss.model_dump() for loss in found.losses]
    if not explain:
        show_json(list(found.tools))
        if losses:
            words = "parts cannot be expressed" if len(losses) > 1 else "part cannot be expressed"
            typer.echo(f"{len(losses)} {words}; --explain shows what and why", err=True)
    elif wants_json(as_json):
        show_json(losses)
    else:
        for loss in found.losses:
            where, what, change = map(visible, (loss.where, loss.what, loss.change))
            typer.echo(f"{loss.tool}  {where}: {what}. To change it: {change}.")
        if not losses:
            typer.echo("Nothing is lost.")


def export_skill(
    agent: str | None, only: list[str] | None, out: Path | None, socket: Path | None
) -> None:
    """Print a SKILL.md, or write it into a directory, which is made if it is missing."""
    with calling(socket, is_payload=True) as client:
        if agent is None:
            found = [tool for tool in client.tools() if tool.is_active]
        else:
            found = list(client.agent_tools(agent, exclude_dangerous=False).items)
    if only is not None:
        unknown = sorted(set(only) - {tool.name for tool in found})
        if unknown:
            fail(f"There is no tool {visible(unknown[0][:80])} to export.", ExitCode.USAGE)
        found = [tool for tool in found if tool.name in only]
    text = skill_text(found, agent)
    if out is None:
        typer.echo(text, nl=False)
        return
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / FILE_NAME).write_text(text, encoding="utf-8")
    except OSError as error:
        fail(f"{out / FILE_NAME} cannot be written: {error.strerror}.", ExitCode.USAGE)
