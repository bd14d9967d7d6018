"""`fumehood` and its commands. A command's module is imported only when the command is used."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from importlib import import_module
from inspect import Signature, signature
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from fumehood.cli.exits import ExitCode
from fumehood.cli.options import PlainCommand, PlainGroup
from fumehood.core.part import Command, Options, PartError, imported, placed
from fumehood.parts import parts

COMMANDS = {
    "serve": "Run the engine as a daemon until SIGTERM or Ctrl-C.",
    "call": "Call a tool and show its envelope.",
    "run": "Run a program in a sandbox and show what it printed.",
    "hook": "Gates before the tools of other agents.",
    "usage": "Show usage: tokens and cost, summed from the call log; and budgets.",
    "doctor": "Check this host.",
    "config": "The configuration: values and their sources.",
    "tools": "The tools of the running engine.",
    "agents": "Agents: on whose behalf calls are made.",
    "approvals": "Calls that wait for approval.",
    "approvers": "People who may approve calls or administer.",
    "policy": "The policy: rules that allow, ask or deny calls.",
    "tokens": "Tokens: principals with scopes and agents.",
    "calls": "The call log of the running engine.",
    "sessions": "Sessions: files and variables that persist between calls.",
}
"""Maps the name of each built-in command to its help line. A test compares these lines with each
command's own help."""

MODULES = {
    "agents": "authority",
    "approvers": "authority",
    "tokens": "authority",
    "usage": "calls",
}
"""Maps the name of a command to the name of its module in this package, if the names differ."""

OPEN = frozenset({"doctor", "serve", "sessions", "tools"})
"""Commands to which parts may add options, and groups to which parts may add commands. All other
built-in commands start without loading the parts."""

SETTINGS: dict[str, Any] = {
    "pretty_exceptions_enable": False,
    "rich_markup_mode": None,
}


class CommandsOnDemand(PlainGroup):
    """A group of commands that imports a command's module only to run or complete this command. The
    names and help lines of all commands are known without the imports.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands.

        Each command that has not been imported is represented by a placeholder, which has only a
        help line.
        """
        for name, line in all_commands().items():
            self.commands.setdefault(name, TyperCommand(name, help=line))
        return list(all_commands())

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Resolve the command that the first argument names, after importing the command's
        module.
        """
        if args and (args[0] in COMMANDS or args[0] in self.list_commands(ctx)):
            self.add_command(load_command(args[0]), args[0])
        return super().resolve_command(ctx, args)


def all_commands() -> dict[str, str]:
    """Return a dictionary from the name of each command to its help line, in the order of `--help`.

    Raises:
        PartError: a part adds a command with the name of a built-in command, or adds an option or a
            command to a built-in command that is not open to parts (not in `OPEN`).
    """
    changed = {options.command for part in parts() for options in part.options}
    changed |= {name.split()[0] for part in parts() for name in part.commands if " " in name}
    if closed := changed - OPEN:
        raise PartError(f"A part adds to the command {min(closed)!r}, which is not open to parts.")
    added = {
        name: command
        for part in parts()
        for name, command in part.commands.items()
        if " " not in name
    }
    if taken := added.keys() & COMMANDS.keys():
        raise PartError(f"A part adds the command {min(taken)!r}, which is the kernel's.")
    names = placed(tuple(COMMANDS), {name: command.after for name, command in added.items()})
    return {name: added[name].help if name in added else COMMANDS[name] for name in names}


def load_command(name: str) -> Any:
    """Import one command's module and build the command, including the options and commands that
    parts add to it.
    """
    place = f"fumehood.cli.{MODULES.get(name, name)}:{name}"
    added: list[Options] = []
    more: dict[str, Command] = {}
    if name in OPEN or name not in COMMANDS:
        for part in parts():
            place = part.commands[name].function if name in part.commands else place
            added += [options for options in part.options if options.command == name]
            more |= {
                own.removeprefix(f"{name} "): command
                for own, command in part.commands.items()
                if own.startswith(f"{name} ")
            }
    module_name, _, function = place.partition(":")
    module = import_module(module_name)
    found = getattr(module, function)
    if added:
        found = with_options(found, added)
    if more:
        found = with_commands(found, more)
    holder = typer.Typer(add_completion=False, **SETTINGS)
    holder.callback()(
        lambda: None
    )  # without a callback, a typer app of one command would be that command
    if isinstance(found, typer.Typer):
        holder.add_typer(found, name=name)
    else:
        holder.command(name, cls=getattr(module, "COMMAND_CLASS", PlainCommand))(found)
    return typer.main.get_group(holder).commands[name]


def with_commands(group: typer.Typer, added: Mapping[str, Command]) -> typer.Typer:
    """Return a copy of a group of commands, with the commands that parts add to it (`added`, by
    name).
    """
    made = copy(group)
    made.registered_commands = list(group.registered_commands)
    made.registered_groups = list(group.registered_groups)
    for name, command in added.items():
        found = imported(command.function)
        if isinstance(found, typer.Typer):
            made.add_typer(found, name=name)  # `--help` shows groups last
        else:
            settings = {"ignore_unknown_options": command.takes_options}
            made.command(name, help=command.help, context_settings=settings)(found)
    own = [str(info.name) for info in group.registered_commands]
    order = placed(own, {name: command.after for name, command in added.items()})
    made.registered_commands.sort(key=lambda info: order.index(str(info.name)))
    return made


def with_options(command: Callable[..., Any], added: Sequence[Options]) -> Callable[..., Any]:
    """Return a command that has the options of `command` and those in `added`.

    Each item of `added` contains options that a part adds, and a function. Before `command` runs,
    each of these functions is called with the values of its options.
    """
    own = signature(command, eval_str=True).parameters
    functions = [imported(options.function) for options in added]
    theirs = [signature(function, eval_str=True).parameters for function in functions]
    shown = [parameter for name, parameter in own.items() if name != "added"]
    for options, parameters in zip(added, theirs, strict=True):
        names = [parameter.name for parameter in shown]
        place = names.index(options.before) if options.before in names else len(names)
        shown[place:place] = [p for name, p in parameters.items() if name not in own]

    def run(**given: Any) -> None:
        results = [
            function(**{name: given[name] for name in parameters})
            for function, parameters in zip(functions, theirs, strict=True)
        ]
        chosen = {name: value for name, value in given.items() if name in own}
        command(**chosen, **({"added": results} if "added" in own else {}))

    run.__signature__ = Signature(shown)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    run.__doc__, run.__name__ = command.__doc__, command.__name__
    return run


RARE_COLLECTIONS = 20_000
"""Number of allocated objects after which Python's garbage collector runs. Imports leave almost no
garbage, and with the default of 700, collections would take a sixth of a command's time."""

app = typer.Typer(
    name="fumehood",
    cls=CommandsOnDemand,
    help="A sandboxed tool-execution engine for AI agents.",
    invoke_without_command=True,
    **SETTINGS,
)


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(f"fumehood {version('fumehood')}")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    show_version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """A sandboxed tool-execution engine for AI agents."""
    if context.invoked_subcommand is None:
        from fumehood.cli.overview import show_overview

        show_overview()


def main() -> None:
    """Run the command line."""
    if sys.platform != "linux":
        print("fumehood runs on Linux only; other systems are not supported yet.", file=sys.stderr)
        raise SystemExit(ExitCode.UNAVAILABLE)
    gc.set_threshold(RARE_COLLECTIONS)
    try:
        app()
    except PartError as error:
        print(error, file=sys.stderr)
        raise SystemExit(ExitCode.UNAVAILABLE) from None
    except OSError as error:  # standard output is closed or full
        print(f"The answer could not be written: {error.strerror}.", file=sys.stderr)
        raise SystemExit(ExitCode.TOOL_FAILED) from None


if __name__ == "__main__":
    main()
