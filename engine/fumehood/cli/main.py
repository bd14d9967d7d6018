"""`fumehood`: the commands and what they share. Imports of a command wait until it runs."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Annotated

import typer

from fumehood.cli.agents import agents
from fumehood.cli.approvals import approvals
from fumehood.cli.approvers import approvers
from fumehood.cli.audit import audit
from fumehood.cli.call import CallCommand, call
from fumehood.cli.calls import calls
from fumehood.cli.doctor import doctor
from fumehood.cli.exits import ExitCode
from fumehood.cli.images import images
from fumehood.cli.policy import policy
from fumehood.cli.registry import tools
from fumehood.cli.run import run
from fumehood.cli.serve import serve
from fumehood.cli.sessions import sessions
from fumehood.cli.tokens import tokens
from fumehood.cli.usage import usage

app = typer.Typer(
    name="fumehood",
    help="A sandboxed tool-execution engine for AI agents.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(asked: bool) -> None:
    if asked:
        print(f"fumehood {version('fumehood')}")
        raise typer.Exit


@app.callback()
def options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """A sandboxed tool-execution engine for AI agents."""


app.command()(serve)
app.command(cls=CallCommand)(call)
app.command()(run)
app.add_typer(tools, name="tools")
app.add_typer(agents, name="agents")
app.add_typer(approvals, name="approvals")
app.add_typer(approvers, name="approvers")
app.add_typer(policy, name="policy")
app.add_typer(tokens, name="tokens")
app.add_typer(audit, name="audit")
app.add_typer(calls, name="calls")
app.command()(usage)
app.add_typer(sessions, name="sessions")
app.add_typer(images, name="images")
app.command()(doctor)


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
