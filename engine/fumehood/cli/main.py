"""`fumehood`: its commands. The module of a command is imported when that command is asked for."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from fumehood.cli.exits import ExitCode
from fumehood.cli.plain_values import PlainCommand, with_plain_values

COMMANDS = {
    "serve": "Run the engine as a daemon until SIGTERM or Ctrl-C.",
    "call": "Call a tool and show its envelope.",
    "run": "Run a program in a sandbox and show what it printed.",
    "usage": "Show what calls took: tokens and money, added up from the call log; and budgets.",
    "doctor": "Check this host.",
    "config": "The configuration: what is set, and where.",
    "tools": "The tools of the running engine.",
    "agents": "Agents: who calls are made for.",
    "approvals": "Calls that wait for a human's yes.",
    "approvers": "Who may approve and administer.",
    "policy": "The policy: rules that allow, ask or deny calls.",
    "tokens": "Tokens: principals with scopes and agents.",
    "audit": "The audit chain: verify, export, rotate its key.",
    "calls": "The calls that the running engine has kept.",
    "sessions": "Sessions: files and variables that calls leave to the next ones.",
    "images": "The images that containers are made from.",
}
"""Name → line of help, in the order of `--help`. A test compares them with the commands' own."""

SETTINGS: dict[str, Any] = {
    "pretty_exceptions_enable": False,
    "rich_markup_mode": None,
}


class CommandsOnDemand(TyperGroup):
    """A group that knows names and lines of help, and imports a command to run or complete it."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        for name, line in COMMANDS.items():
            self.add_command(TyperCommand(name, help=line), name)

    def get_params(self, ctx: Any) -> Any:
        """Its options, `--help` included."""
        return with_plain_values(super().get_params(ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Import the command that is named first."""
        if args and args[0] in COMMANDS:
            self.add_command(load_command(args[0]), args[0])
        return super().resolve_command(ctx, args)


def load_command(name: str) -> Any:
    """Import one command and build it."""
    module = import_module(f"fumehood.cli.{name}")
    found = getattr(module, name)
    holder = typer.Typer(add_completion=False, **SETTINGS)
    holder.callback()(lambda: None)  # a holder of one command alone would be that command
    if isinstance(found, typer.Typer):
        holder.add_typer(found, name=name)
    else:
        holder.command(name, cls=getattr(module, "COMMAND_CLASS", PlainCommand))(found)
    return typer.main.get_group(holder).commands[name]


app = typer.Typer(
    name="fumehood",
    cls=CommandsOnDemand,
    help="A sandboxed tool-execution engine for AI agents.",
    no_args_is_help=True,
    **SETTINGS,
)


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(f"fumehood {version('fumehood')}")
        raise typer.Exit


@app.callback()
def options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """A sandboxed tool-execution engine for AI agents."""


def main() -> None:
    """The console script."""
    if sys.platform != "linux":
        print("fumehood runs on Linux only; other systems are not supported yet.", file=sys.stderr)
        raise SystemExit(ExitCode.UNAVAILABLE)
    try:
        app()
    except OSError as error:  # standard output went away or is full
        print(f"The answer could not be written: {error.strerror}.", file=sys.stderr)
        raise SystemExit(ExitCode.TOOL_FAILED) from None


if __name__ == "__main__":
    main()
